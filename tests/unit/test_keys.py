"""Keys of kernels are kept from one process to the next, so that a kernel is found without its source and compilers."""

import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace

import pytest
from fake_toolkit import FakeToolkit, sm80_spec

from cutlass_ops.artifacts import kept
from cutlass_ops.artifacts.store import KernelStore
from cutlass_ops.base import resources
from cutlass_ops.base.dtypes import bf16, e4m3
from cutlass_ops.base.errors import MissingKernelError, StoreError
from cutlass_ops.compilation import builder, finding, keys, lookup, toolchain
from cutlass_ops.declare.quantizing import QuantizeSpec
from cutlass_ops.kinds import render

SPEC, OTHER = sm80_spec(), sm80_spec(4)


@pytest.fixture
def templates(tmp_path, monkeypatch):
    """Return the folder of templates and headers, a copy."""
    copy = tmp_path / "templates"
    shutil.copytree(resources.templates(), copy)
    monkeypatch.setattr(resources, "templates", lambda: copy)
    render._environment.cache_clear()
    yield copy
    render._environment.cache_clear()


@pytest.fixture(autouse=True)
def toolkit(tmp_path, monkeypatch, session):
    found = FakeToolkit(tmp_path / "kit")
    monkeypatch.setenv("CUTLASS_OPS_CACHE_DIR", str(tmp_path / "store"))
    monkeypatch.setenv("CUTLASS_OPS_NVCC", str(found.nvcc))
    monkeypatch.setenv("NVCC_CCBIN", str(found.host))
    monkeypatch.setenv("CUTLASS_OPS_PROGRESS", "0")
    for name in ("CUTLASS_OPS_JIT", "CUTLASS_OPS_LINEINFO", "CUTLASS_OPS_CUTLASS_DIR"):
        monkeypatch.delenv(name, raising=False)
    return found


def files():
    return [each for each in (KernelStore.default().root / "keys").rglob("*") if each.is_file()]


def key_of(spec):
    return lookup.recalled(spec) and lookup.recalled(spec).key


@pytest.mark.parametrize(
    "build",
    [lambda: builder.build_artifact(SPEC), lambda: builder.build_many([OTHER, SPEC])[1]],
    ids=["one", "several"],
)
def test_what_was_built_is_found_without_rendering_and_compilers(build, monkeypatch):
    assert key_of(SPEC) is None
    built = build()
    for module, name in ((render, "render"), (toolchain, "_examine"), (builder, "stored")):
        monkeypatch.setattr(module, name, lambda *_: pytest.fail("more than a look"))
    assert lookup.stored(SPEC) == built
    assert key_of(SPEC) == built.key
    assert {each.stat().st_mode & 0o777 for each in files()} == {0o600}


def test_where_nothing_compiles_any_compilers_kernel_is_found(toolkit, monkeypatch):
    built = builder.build_artifact(SPEC)
    monkeypatch.setenv("CUTLASS_OPS_JIT", "0")
    shutil.rmtree(toolkit.nvcc.parent)
    assert key_of(SPEC) is None
    assert lookup.stored(SPEC) == built
    monkeypatch.setattr(render, "render", lambda _: pytest.fail("rendered"))
    assert lookup.stored(SPEC) == built


def test_where_nothing_compiles_a_kernel_with_other_flags_is_none(monkeypatch):
    builder.build_artifact(SPEC)
    monkeypatch.setenv("CUTLASS_OPS_JIT", "0")
    assert lookup.stored(SPEC) is not None
    assert key_of(SPEC) is not None
    monkeypatch.setenv("CUTLASS_OPS_LINEINFO", "1")
    assert lookup.stored(SPEC) is None


def test_where_nothing_compiles_a_kernel_that_was_removed_meanwhile_is_not_built(toolkit, monkeypatch):
    built = builder.build_artifact(SPEC)
    monkeypatch.setenv("CUTLASS_OPS_JIT", "0")
    assert lookup.stored(SPEC) == built  # its key is kept now
    found = lookup.recalled(SPEC)
    shutil.rmtree(built.folder)
    with pytest.raises(MissingKernelError, match="compilation is off"):
        found.read_library()
    assert toolkit.compilations == 1


def test_what_changes_while_a_kernel_is_compiled_leaves_no_key_of_the_old_one(templates, monkeypatch):
    """Later processes would find the kernel of the old header by the new one's times."""
    header = templates / "include" / "cutlass_ops" / "sm80_gemm.h"
    compiled = builder.compile_kernel

    def edited_meanwhile(*given, **named):
        header.write_text(header.read_text() + "\n// another\n")
        return compiled(*given, **named)

    monkeypatch.setattr(builder, "compile_kernel", edited_meanwhile)
    old = builder.build_artifact(SPEC)
    assert key_of(SPEC) is None
    monkeypatch.setattr(builder, "compile_kernel", compiled)
    assert builder.build_artifact(SPEC).key != old.key


def test_a_key_of_a_kernel_that_is_gone_gives_way_to_that_of_another(toolkit, monkeypatch):
    """Such as that of an older compiler, whose parts were replaced behind the same nvcc."""
    built = builder.build_artifact(SPEC)
    (file,) = files()
    file.write_text("0" * 64)
    assert lookup.stored(SPEC) == built
    assert key_of(SPEC) == built.key


def test_a_store_that_others_may_write_is_refused_by_a_look_without_the_key(monkeypatch):
    builder.build_artifact(SPEC)
    KernelStore.default().root.chmod(0o777)
    assert lookup.recalled(SPEC) is None
    with pytest.raises(StoreError, match="others"):
        lookup.stored(SPEC)


def test_a_stored_kernel_whose_key_was_not_kept_is_noted_when_it_is_found():
    built = builder.build_artifact(SPEC)
    shutil.rmtree(KernelStore.default().root / "keys")
    assert key_of(SPEC) is None
    assert lookup.stored(SPEC) == built
    assert key_of(SPEC) == built.key


def test_a_kernel_that_was_removed_is_not_found_and_built_again(toolkit):
    built = lookup.stored(SPEC) or builder.build_artifact(SPEC)
    found = lookup.stored(SPEC)
    shutil.rmtree(built.folder)
    assert lookup.stored(SPEC) is None
    assert found.read_library() == built.read_library()  # built again
    assert lookup.stored(SPEC) == built
    assert toolkit.compilations == 2


def changed_template(templates, toolkit, monkeypatch):
    path = templates / "sm80_gemm.cu.j2"
    path.write_text(path.read_text() + "\n// another\n")


def changed_header(templates, toolkit, monkeypatch):
    path = templates / "include" / "cutlass_ops" / "sm80_gemm.h"
    path.write_text(path.read_text() + "\n// another\n")


def changed_code(templates, toolkit, monkeypatch):
    kept.package.cache_clear()
    monkeypatch.setattr(kept.resources, "library_version", lambda: "9.9")


def code_changed_since_its_import(templates, toolkit, monkeypatch):
    kept.package.cache_clear()
    monkeypatch.setattr(kept.session, "IMPORTED", os.stat(keys.__file__).st_ctime_ns - 1)


def line_numbers(templates, toolkit, monkeypatch):
    monkeypatch.setenv("CUTLASS_OPS_LINEINFO", "1")


def other_nvcc(templates, toolkit, monkeypatch):
    toolkit.nvcc.write_text(toolkit.nvcc.read_text() + "# another\n")


def other_host_compiler(templates, toolkit, monkeypatch):
    toolkit.host.write_text(toolkit.host.read_text() + "# another\n")


def other_cutlass(templates, toolkit, monkeypatch):
    asked = finding.importlib.util.find_spec
    folder = toolkit.nvcc.parent / "cutlass_library" / "source" / "include" / "cutlass"
    folder.mkdir(parents=True)
    (folder / "version.h").touch()
    origin = SimpleNamespace(origin=str(folder.parents[2] / "__init__.py"))
    instead = lambda name: origin if name == "cutlass_library" else asked(name)  # noqa: E731
    monkeypatch.setattr(keys.importlib.util, "find_spec", instead)


def own_cutlass(templates, toolkit, monkeypatch):
    monkeypatch.setenv("CUTLASS_OPS_CUTLASS_DIR", str(templates))


def no_tvm_ffi(templates, toolkit, monkeypatch):
    asked = finding.importlib.util.find_spec
    monkeypatch.setattr(keys.importlib.util, "find_spec", lambda name: None if name == "tvm_ffi" else asked(name))


def made_up_tvm_ffi(templates, toolkit, monkeypatch):
    monkeypatch.setitem(sys.modules, "tvm_ffi", ModuleType("tvm_ffi"))


@pytest.mark.parametrize(
    "change",
    [
        changed_template,
        changed_header,
        changed_code,
        code_changed_since_its_import,
        line_numbers,
        other_nvcc,
        other_host_compiler,
        other_cutlass,
        own_cutlass,
        no_tvm_ffi,
        made_up_tvm_ffi,
    ],
)
def test_a_key_is_not_recalled_where_something_it_follows_from_is_another(templates, toolkit, monkeypatch, change):
    builder.build_artifact(SPEC)
    assert key_of(SPEC) is not None
    change(templates, toolkit, monkeypatch)
    try:
        assert key_of(SPEC) is None
    finally:
        monkeypatch.undo()
        kept.package.cache_clear()


def test_several_keys_may_be_looked_for_with_one_look_at_the_templates(templates, toolkit, monkeypatch):
    looks, stamps = [], kept.stamps
    monkeypatch.setattr(kept, "stamps", lambda place: looks.append(place) or stamps(place))
    built = builder.build_many([SPEC, OTHER])
    assert looks == [templates]
    with keys.one_situation():
        assert [key_of(SPEC), key_of(OTHER)] == [each.key for each in built]
        changed_template(templates, toolkit, monkeypatch)
        with keys.one_situation():
            assert key_of(SPEC) is not None
        assert key_of(OTHER) is not None
        with ThreadPoolExecutor(1) as another:
            assert another.submit(key_of, SPEC).result() is None
    assert len(looks) == 3
    assert key_of(SPEC) is None  # from now on


@pytest.mark.parametrize("setting", ["", "CUTLASS_OPS_LINEINFO"])
def test_the_key_that_is_kept_is_the_one_that_is_computed(monkeypatch, setting):
    if setting:
        monkeypatch.setenv(setting, "1")
    built = builder.build_artifact(SPEC)
    assert key_of(SPEC) == built.key == builder._job(SPEC, None, KernelStore.default(), None, None).key


def test_a_source_or_compilers_that_were_given_leave_no_key(toolkit):
    builder.build_artifact(SPEC, source="// another")
    builder.build_artifact(OTHER, toolchain=toolkit.find())
    assert files() == []
    assert key_of(SPEC) is key_of(OTHER) is None


@pytest.mark.parametrize("text", ["", "x" * 64, "A" * 64, "0" * 65, "0" * 64])
def test_a_damaged_file_is_as_good_as_none(text):
    built = builder.build_artifact(SPEC)
    (file,) = files()
    file.write_text(text)
    assert key_of(SPEC) is None
    assert lookup.stored(SPEC) == built


def test_a_key_of_another_declarations_kernel_is_refused():
    built, other = builder.build_many([SPEC, OTHER])
    for file in files():
        if file.read_text() == built.key:
            file.write_text(other.key)
    assert key_of(SPEC) is None
    assert lookup.stored(SPEC) == built


def test_a_file_that_others_may_write_is_not_read():
    builder.build_artifact(SPEC)
    (file,) = files()
    file.chmod(0o666)
    assert key_of(SPEC) is None


def test_a_store_that_cannot_be_written_keeps_no_keys(monkeypatch):
    built = builder.build_artifact(SPEC)
    shutil.rmtree(KernelStore.default().root / "keys")
    monkeypatch.setattr(kept, "replacing", lambda _: os.mkdir("/proc/none"))
    assert lookup.stored(SPEC) == built
    assert files() == []


def test_folders_of_other_versions_are_removed_but_for_the_latest(templates, toolkit, monkeypatch):
    for version in range(8):
        toolkit.nvcc.write_text(f"{toolkit.nvcc.read_text()}# {version}\n")
        builder.build_artifact(SPEC)
    assert len(os.listdir(KernelStore.default().root / "keys")) == 5


def test_kernels_that_quantise_have_keys_of_their_own():
    store, specs = KernelStore.default(), [QuantizeSpec(bf16, e4m3, block, "sm_90a") for block in (None, 128)]
    for spec, letter in zip(specs, "ab", strict=True):
        keys.note(keys.place(store, spec), letter * 64)
    assert [keys.recalled(store, spec) for spec in specs] == ["a" * 64, "b" * 64]
