import os

import pytest
from fake_toolkit import FakeToolkit
from processes import ended

from cutlass_ops.base import arch, env, programs
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


def test_what_a_toolchain_says(toolkit, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(toolkit.root))
    chain = find_toolchain()
    assert chain.nvcc_version == "13.0.88"
    assert chain.include_dirs == (toolkit.root / "include",)
    assert chain.cudart == toolkit.root / "lib" / "libcudart.so.13"
    assert chain.host_version.startswith("g++")
    assert chain.cutlass_version == "4.2.0"
    assert (chain.cutlass_dir / "tools" / "util" / "include" / "cutlass").is_dir()
    assert (chain.tvm_ffi_dir / "include" / "tvm" / "ffi" / "c_api.h").is_file()
    assert str(toolkit.root) not in str(chain.identity)


def test_it_is_examined_once(toolkit, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(toolkit.root))
    chain = find_toolchain()
    monkeypatch.setattr(toolchain.programs, "ask", None)
    assert find_toolchain() is chain


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


def test_a_program_that_comes_first_on_path_while_this_process_runs(toolkit, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_HOME", str(toolkit.root))
    first = tmp_path / "first"
    first.mkdir()
    monkeypatch.setenv("PATH", f"{first}:{os.environ['PATH']}")
    before = find_toolchain().identity
    (first / "as").write_text(f'#!/bin/sh\nexec {toolchain.shutil.which("as")} "$@"\n')
    (first / "as").chmod(0o755)
    assert find_toolchain().identity != before


def test_the_same_parts_elsewhere_are_the_same_identity(tmp_path):
    assert FakeToolkit(tmp_path / "a").find().identity == FakeToolkit(tmp_path / "b" / "c").find().identity


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("bin/ptxas", "lacks ptxas"),
        ("host/as", r"finds no as: install the rest of GCC and binutils"),
    ],
)
def test_a_part_that_is_missing(toolkit, monkeypatch, name, what):
    monkeypatch.setenv("CUDA_HOME", str(toolkit.root))
    monkeypatch.setenv("NVCC_CCBIN", str(toolkit.host))
    (toolkit.root / name).unlink()
    with pytest.raises(ToolchainError, match=what):
        find_toolchain()


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


@pytest.mark.parametrize("setting", ["TOP=/opt/$(id)/cuda", 'INCLUDES="-I/opt/$(id)/include"  '])
def test_what_a_script_starts_lies_where_a_shell_changes_nothing(toolkit, monkeypatch, setting):
    monkeypatch.setenv("CUDA_HOME", str(toolkit.root))
    (toolkit.root / "settings").write_text(f"#$ {setting}\n")
    script = toolkit.nvcc.read_text()
    toolkit.nvcc.write_text(script.replace("exit 0;;", 'cat "$here/settings"; exit 0;;'))
    with pytest.raises(ToolchainError, match=r"is '/opt/\$\(id\)/.*where '\$' has a special meaning"):
        find_toolchain()


@pytest.mark.parametrize("name", ["g++ -O3", "g++;ls", "g++&", "*", "g++'"])
def test_a_host_compilers_name_stands_bare_in_a_shells_command(toolkit, monkeypatch, name):
    monkeypatch.setenv("CUDA_HOME", str(toolkit.root))
    other = toolkit.host.with_name(name)
    other.symlink_to(toolkit.host)
    monkeypatch.setenv("NVCC_CCBIN", str(other))
    with pytest.raises(ToolchainError, match=r"where .* has a special meaning; use a link to it"):
        find_toolchain()


def test_a_question_that_is_not_answered_ends_with_all_that_was_started(tmp_path):
    script = tmp_path / "slow"
    script.write_text("#!/bin/sh\nsleep 600 & echo $! > pid\nwait\n")
    script.chmod(0o755)
    # On a busy machine it may not come to starting anything in so little time.
    for limit in (1.0, 10.0, 100.0):
        with pytest.raises(TimeoutError):
            programs.ask([str(script)], limit, cwd=tmp_path)
        if (tmp_path / "pid").exists() and (tmp_path / "pid").read_text():
            break
    assert ended(int((tmp_path / "pid").read_text()))


def test_nothing_found_names_the_command_that_installs(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "gone"))
    with pytest.raises(ToolchainError, match=r'pip install "cutlass_ops\[toolkit\]"'):
        find_toolchain()


def test_a_named_nvcc_must_be_there(monkeypatch, tmp_path):
    monkeypatch.setenv("CUTLASS_OPS_NVCC", str(tmp_path / "nvcc"))
    with pytest.raises(ToolchainError, match=r"CUTLASS_OPS_NVCC names .*not an executable"):
        find_toolchain()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda kit: kit.says_version("11.8.89"), "version 11.8.89, but 12.4 or later"),
        (lambda kit: (kit.root / "version").write_text("hello"), "prints no version"),
        (lambda kit: (kit.root / "version").unlink(), "failed"),
        (lambda kit: (kit.root / "include" / "nv" / "target").unlink(), "lacks the CUDA header nv/target"),
        (lambda kit: kit.nvcc.write_text("not a program"), "cannot be run"),
    ],
)
def test_unusable_toolkits(toolkit, monkeypatch, spoil, message):
    spoil(toolkit)
    monkeypatch.setenv("CUDA_HOME", str(toolkit.root))
    with pytest.raises(ToolchainError, match=message):
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


def test_another_host_compiler_than_gcc_is_refused(toolkit, monkeypatch, tmp_path):
    clang = tmp_path / "clang++"
    clang.write_text("#!/bin/sh\necho 'Debian clang version 14.0.6'\necho 'Target: x86_64-pc-linux-gnu'\n")
    clang.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(toolkit.root))
    monkeypatch.setenv("NVCC_CCBIN", str(clang))
    with pytest.raises(ToolchainError, match=r"clang\+\+ is not GCC, but 'Debian clang version 14.0.6': name a g\+\+"):
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


def test_the_wheels_folder_is_found_without_importing(monkeypatch, tmp_path):
    monkeypatch.undo()
    for name in ("cu12", "cu13"):
        (tmp_path / "nvidia" / name / "bin").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    found = list(finding.wheel_bins())
    assert found.index(tmp_path / "nvidia" / "cu13" / "bin") < found.index(tmp_path / "nvidia" / "cu12" / "bin")
