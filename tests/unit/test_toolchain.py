import os

import pytest
from fake_toolkit import FakeToolkit

from cutlass_ops.base import arch, env
from cutlass_ops.base.errors import ToolchainError
from cutlass_ops.base.session import Session
from cutlass_ops.compilation import finding, toolchain
from cutlass_ops.compilation.toolchain import find_toolchain

SM80 = arch.target("sm_80")


@pytest.fixture(autouse=True)
def _bare(monkeypatch, tmp_path):
    """A machine with a host compiler and nothing else."""
    for variable in env.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    host = tmp_path / "host"
    host.mkdir()
    for name in ("g++", "as", "ld", "sh", "cat", "dirname", "sleep", "env"):
        (host / name).symlink_to(toolchain.shutil.which(name))
    monkeypatch.setenv("PATH", str(host))
    monkeypatch.setattr(finding, "wheel_bins", lambda: iter(()))


@pytest.fixture
def toolkit(tmp_path):
    return FakeToolkit(tmp_path / "toolkit")


def test_order(monkeypatch, tmp_path):
    names = ("named", "home", "path", "on_path", "wheel")
    kits = {name: FakeToolkit(tmp_path / name) for name in names}
    monkeypatch.setattr(finding, "wheel_bins", lambda: iter([kits["wheel"].nvcc.parent]))
    monkeypatch.setenv("CUTLASS_OPS_NVCC", str(kits["named"].nvcc))
    monkeypatch.setenv("CUDA_HOME", str(kits["home"].root))
    monkeypatch.setenv("CUDA_PATH", str(kits["path"].root))
    bare = os.environ["PATH"]
    monkeypatch.setenv("PATH", f"{bare}:{kits['on_path'].nvcc.parent}")
    found = []
    for name in ("CUTLASS_OPS_NVCC", "CUDA_HOME", "CUDA_PATH", "PATH", None):
        chain = find_toolchain()
        found.append((chain.nvcc, chain.source))
        if name == "PATH":
            monkeypatch.setenv("PATH", bare)
        elif name:
            monkeypatch.delenv(name)
    sources = ("CUTLASS_OPS_NVCC", "CUDA_HOME", "CUDA_PATH", "PATH", "PyPI wheels")
    assert found == [(kits[name].nvcc, source) for name, source in zip(names, sources, strict=True)]


def test_whether_anything_can_be_compiled_is_seen_without_starting_a_program(toolkit, monkeypatch, tmp_path):
    monkeypatch.setattr(toolchain, "_examine", None)

    def can_compile():
        with Session().active():
            return finding.can_compile()

    assert not can_compile()  # a host compiler alone
    monkeypatch.setenv("CUTLASS_OPS_NVCC", str(toolkit.nvcc))
    assert can_compile()
    for package in ("jinja2", "cutlass_library"):
        with monkeypatch.context() as patch:
            patch.setattr(
                finding.importlib.util, "find_spec", lambda name, missing=package: None if name == missing else 1
            )
            assert not can_compile()
    monkeypatch.setenv("CUTLASS_OPS_NVCC", str(tmp_path / "no nvcc"))
    assert not can_compile()
    monkeypatch.setenv("CUTLASS_OPS_NVCC", str(toolkit.nvcc))
    monkeypatch.setenv("PATH", "/nowhere")
    assert not can_compile()


@pytest.mark.parametrize(
    "name", ["bin/nvcc", "bin/ptxas", "bin/cicc", "host/ld", "host/cc1plus", "lib/libcudart.so.13"]
)
def test_a_part_that_is_exchanged_is_another_identity(toolkit, monkeypatch, name):
    monkeypatch.setenv("CUDA_HOME", str(toolkit.root))
    monkeypatch.setenv("NVCC_CCBIN", str(toolkit.host))
    before = find_toolchain().identity
    part = toolkit.root / name
    part.write_text(part.read_text() + "\n# edited\n")
    after = find_toolchain().identity
    changed = [field for field in before if before[field] != after[field]]
    assert changed == ["host_compiler" if name.startswith("host/") else "nvcc"]


def test_a_large_part_is_known_by_size_and_ends(toolkit, monkeypatch):
    monkeypatch.setattr(toolchain, "_WHOLE", 64)
    monkeypatch.setattr(toolchain, "_END", 16)
    part = toolkit.root / "bin" / "cicc"
    seen = set()
    for text in ("a" + "x" * 99, "x" * 99 + "a", "x" * 100, "x" * 101):
        part.write_text(text)
        seen.add(toolkit.find_anew().nvcc_digest)
    assert len(seen) == 4


@pytest.mark.parametrize(
    ("variable", "where", "what"),
    [
        ("CUDA_HOME", "cuda", "nvcc from CUDA_HOME is .*CUTLASS_OPS_NVCC"),
        ("CUTLASS_OPS_NVCC", "cuda/bin/nvcc", "nvcc from CUTLASS_OPS_NVCC is"),
        ("NVCC_CCBIN", "cuda/host/g++", "the host compiler from NVCC_CCBIN or PATH is"),
        ("TMPDIR", "cuda", "the temporary folder is .*set TMPDIR"),
    ],
)
def test_paths_that_a_shell_would_change(toolkit, monkeypatch, tmp_path, variable, where, what):
    (tmp_path / "$(touch ran)").mkdir()
    FakeToolkit(tmp_path / "$(touch ran)" / "cuda")
    monkeypatch.setattr(toolchain.tempfile, "tempdir", None)
    monkeypatch.setenv("CUDA_HOME", str(toolkit.root))
    monkeypatch.setenv(variable, str(tmp_path / "$(touch ran)" / where))
    with pytest.raises(ToolchainError, match=what):
        find_toolchain()


def test_nothing_found_names_the_command_that_installs(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "gone"))
    with pytest.raises(ToolchainError, match=r'pip install "cutlass_ops\[toolkit\]"'):
        find_toolchain()


def named(name):
    """Name the host compiler by a link."""

    def spoil(kit, monkeypatch):
        other = kit.host.with_name(name)
        other.symlink_to(kit.host)
        monkeypatch.setenv("NVCC_CCBIN", str(other))

    return spoil


def prints(setting):
    """Have nvcc start programs in a folder of such a name."""

    def spoil(kit, _):
        (kit.root / "settings").write_text(f"#$ {setting}\n")
        kit.nvcc.write_text(kit.nvcc.read_text().replace("exit 0;;", 'cat "$here/settings"; exit 0;;'))

    return spoil


def clang(kit, monkeypatch):
    path = kit.root / "clang++"
    path.write_text("#!/bin/sh\necho 'Debian clang version 14.0.6'\necho 'Target: x86_64-pc-linux-gnu'\n")
    path.chmod(0o755)
    monkeypatch.setenv("NVCC_CCBIN", str(path))


IN_A_SHELL = r"is '/opt/\$\(id\)/.*where '\$' has a special meaning"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda kit, _: kit.says_version("11.8.89"), "version 11.8.89, but 12.4 or later"),
        (lambda kit, _: (kit.root / "version").write_text("hello"), "prints no version"),
        (lambda kit, _: (kit.root / "version").unlink(), "failed"),
        (lambda kit, _: (kit.root / "include" / "nv" / "target").unlink(), "lacks the CUDA header nv/target"),
        (lambda kit, _: kit.nvcc.write_text("not a program"), "cannot be run"),
        (lambda kit, _: (kit.root / "bin/ptxas").unlink(), "lacks ptxas"),
        (lambda kit, _: (kit.root / "host/as").unlink(), "finds no as: install the rest of GCC and binutils"),
        (clang, r"clang\+\+ is not GCC, but 'Debian clang version 14.0.6': name a g\+\+"),
        (prints("TOP=/opt/$(id)/cuda"), IN_A_SHELL),
        (prints('INCLUDES="-I/opt/$(id)/include"  '), IN_A_SHELL),
        *((named(x), "has a special meaning; use a link to it") for x in ("g++ -O3", "g++;ls", "g++&", "*", "g++'")),
    ],
)
def test_what_cannot_be_used_is_said(toolkit, monkeypatch, spoil, message):
    monkeypatch.setenv("CUDA_HOME", str(toolkit.root))
    monkeypatch.setenv("NVCC_CCBIN", str(toolkit.host))
    spoil(toolkit, monkeypatch)
    with pytest.raises(ToolchainError, match=message):
        find_toolchain()


def test_a_toolkit_that_cannot_be_used_gives_way_to_the_next_one(toolkit, monkeypatch, tmp_path):
    """As its error says, the wheels are installed where an old or incomplete toolkit is on PATH."""
    old, partial = FakeToolkit(tmp_path / "old"), FakeToolkit(tmp_path / "partial")
    old.says_version("11.8.89")
    (partial.root / "include" / "cuda_runtime.h").unlink()
    monkeypatch.setenv("CUDA_HOME", str(old.root))
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}:{old.nvcc.parent}:{partial.nvcc.parent}")
    with pytest.raises(ToolchainError, match=r"is version 11\.8\.89, .*cutlass_ops\[toolkit\]"):
        find_toolchain()
    monkeypatch.setattr(finding, "wheel_bins", lambda: iter([toolkit.nvcc.parent]))
    found = find_toolchain()
    assert (found.nvcc, found.source) == (toolkit.nvcc, "PyPI wheels")
    monkeypatch.setenv("CUTLASS_OPS_NVCC", str(old.nvcc))
    with pytest.raises(ToolchainError, match=r"is version 11\.8\.89"):
        find_toolchain()


def test_host_compiler(toolkit, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_HOME", str(toolkit.root))
    monkeypatch.setenv("NVCC_CCBIN", str(tmp_path / "host"))
    assert find_toolchain().host_compiler == tmp_path / "host" / "g++"
    monkeypatch.setenv("NVCC_CCBIN", "no-such-compiler")
    with pytest.raises(ToolchainError, match="NVCC_CCBIN names 'no-such-compiler'"):
        find_toolchain()
    monkeypatch.delenv("NVCC_CCBIN")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolchainError, match=r"apt-get install g\+\+"):
        find_toolchain()


def test_a_cutlass_checkout_is_part_of_the_identity(toolkit, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_HOME", str(toolkit.root))
    monkeypatch.setenv("CUTLASS_OPS_CUTLASS_DIR", str(tmp_path / "cutlass"))
    with pytest.raises(ToolchainError, match=r"CUTLASS_OPS_CUTLASS_DIR names .*version\.h"):
        find_toolchain()
    header = tmp_path / "cutlass" / "include" / "cutlass" / "version.h"
    header.parent.mkdir(parents=True)
    header.write_text("#define CUTLASS_MAJOR 4\n#define CUTLASS_MINOR 9\n")
    with pytest.raises(ToolchainError, match="does not define"):
        find_toolchain()
    header.write_text("#define CUTLASS_MAJOR 4\n#define CUTLASS_MINOR 9\n#define CUTLASS_PATCH 1\n")
    first = find_toolchain().cutlass_version
    assert first.startswith("4.9.1+")
    (header.parent / "gemm.hpp").write_text("edited")
    toolchain._examine.cache_clear()
    assert find_toolchain().cutlass_version != first
