"""Keys of kernels are kept from one process to the next, so that a kernel is found without its source and compilers."""

import os
import shutil
import sys
from types import ModuleType, SimpleNamespace

import pytest
from fake_toolkit import FakeToolkit, sm80_spec

from cutlass_ops.artifacts.store import KernelStore
from cutlass_ops.base import resources
from cutlass_ops.compilation import builder, finding, identity, lookup, memo, toolchain
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
    return [each for each in (KernelStore.default().root / "memo").rglob("*") if each.is_file()]


def key_of(spec):
    return lookup.recalled(spec) and lookup.recalled(spec).key


@pytest.mark.sample(2)
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
    memo.keep(file, "0" * 64)
    assert lookup.stored(SPEC) == built
    assert key_of(SPEC) == built.key


def edited(path, more="\n// another\n"):
    path.write_text(path.read_text() + more)


def without_tvm_ffi(templates, toolkit, monkeypatch):
    asked = finding.importlib.util.find_spec
    monkeypatch.setattr(memo.importlib.util, "find_spec", lambda name: None if name == "tvm_ffi" else asked(name))


def other_cutlass(templates, toolkit, monkeypatch):
    asked = finding.importlib.util.find_spec
    folder = toolkit.nvcc.parent / "cutlass_library" / "source" / "include" / "cutlass"
    folder.mkdir(parents=True)
    (folder / "version.h").touch()
    origin = SimpleNamespace(origin=str(folder.parents[2] / "__init__.py"))
    instead = lambda name: origin if name == "cutlass_library" else asked(name)  # noqa: E731
    monkeypatch.setattr(memo.importlib.util, "find_spec", instead)


def other_code(templates, toolkit, monkeypatch):
    memo._package.cache_clear()
    monkeypatch.setattr(memo.resources, "library_version", lambda: "9.9")


def code_since_its_import(templates, toolkit, monkeypatch):
    memo._package.cache_clear()
    monkeypatch.setattr(memo.session, "IMPORTED", os.stat(memo.__file__).st_ctime_ns - 1)


# What a key follows from: each function changes it.
CHANGES = {
    "a template": lambda templates, *_: edited(templates / "sm80_gemm.cu.j2"),
    "a header": lambda templates, *_: edited(templates / "include" / "cutlass_ops" / "sm80_gemm.h"),
    "code": other_code,
    "code since its import": code_since_its_import,
    "line numbers": lambda _, __, monkeypatch: monkeypatch.setenv("CUTLASS_OPS_LINEINFO", "1"),
    "nvcc": lambda _, toolkit, __: edited(toolkit.nvcc, "# another\n"),
    "host compiler": lambda _, toolkit, __: edited(toolkit.host, "# another\n"),
    "CUTLASS": other_cutlass,
    "own CUTLASS": lambda templates, _, patch: patch.setenv("CUTLASS_OPS_CUTLASS_DIR", str(templates)),
    "no tvm_ffi": without_tvm_ffi,
    "made-up tvm_ffi": lambda _, __, patch: patch.setitem(sys.modules, "tvm_ffi", ModuleType("tvm_ffi")),
}


@pytest.mark.sample(8)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_key_is_not_recalled_where_something_it_follows_from_is_another(templates, toolkit, monkeypatch, change):
    builder.build_artifact(SPEC)
    assert key_of(SPEC) is not None
    change(templates, toolkit, monkeypatch)
    try:
        assert key_of(SPEC) is None
    finally:
        monkeypatch.undo()
        memo._package.cache_clear()


@pytest.mark.parametrize("setting", ["", "CUTLASS_OPS_LINEINFO"])
def test_the_key_that_is_kept_is_the_one_that_is_computed(monkeypatch, setting):
    if setting:
        monkeypatch.setenv(setting, "1")
    built = builder.build_artifact(SPEC)
    assert key_of(SPEC) == built.key == identity.identify(SPEC).key


def test_a_source_or_compilers_that_were_given_leave_no_key(toolkit):
    builder.build_artifact(SPEC, source="// another")
    builder.build_artifact(OTHER, toolchain=toolkit.find())
    assert files() == []
    assert key_of(SPEC) is key_of(OTHER) is None


def test_a_key_of_another_declarations_kernel_is_refused():
    built, other = builder.build_many([SPEC, OTHER])
    memo.keep(memo.place_of_key(SPEC, KernelStore.default()), other.key)
    assert key_of(SPEC) is None
    assert lookup.stored(SPEC) == built


def test_a_store_that_cannot_be_written_keeps_no_keys(monkeypatch):
    built = builder.build_artifact(SPEC)
    shutil.rmtree(KernelStore.default().root / "memo")
    monkeypatch.setattr(memo, "replacing", lambda _: os.mkdir("/proc/none"))
    assert lookup.stored(SPEC) == built
    assert files() == []
