import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import CancelledError
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_toolkit import FakeToolkit, sm80_spec
from processes import WITHOUT_PYTORCH, ended

from cutlass_ops.artifacts.entry import identity_key
from cutlass_ops.base import arch, elf, programs
from cutlass_ops.base.errors import CompileError, ToolchainError
from cutlass_ops.compilation import compiler, toolchain
from cutlass_ops.compilation.compiler import compile_flags, compile_kernel
from cutlass_ops.compilation.identity import source_identity
from cutlass_ops.compilation.toolchain import find_toolchain

SM80 = arch.target("sm_80")

# Each would change what a compiler or linker reads, runs or writes.
HIDDEN = (
    *("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "OBJC_INCLUDE_PATH", "LIBRARY_PATH", "LD_RUN_PATH"),
    *("COMPILER_PATH", "GCC_EXEC_PREFIX", "GCC_COMPARE_DEBUG", "COLLECT_GCC", "LDEMULATION", "GNUTARGET", "ENV"),
    *("DEPENDENCIES_OUTPUT", "SUNPRO_DEPENDENCIES", "SOURCE_DATE_EPOCH", "LD_LIBRARY_PATH", "LD_AUDIT", "BASH_ENV"),
    *("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "NVCC_CCBIN", "CUDA_INC_PATH", "CICC_PATH", "CCACHE_PREFIX"),
    *("LANG", "LC_CTYPE", "LANGUAGE", "HOME", "NIX_LDFLAGS", "NIX_CFLAGS_COMPILE", "CXXFLAGS", "TMP", "ANYTHING_ELSE"),
)


@pytest.fixture
def toolkit(tmp_path):
    return FakeToolkit(tmp_path / "toolkit")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "kernel.cu").write_text("source")
    return tmp_path / "work"


def compile_(folder, toolkit, **more):
    return compile_kernel(folder, "kernel.cu", "kernel.so", SM80, toolkit.find(), **more)


def test_flags_name_no_path_of_this_machine():
    flags = compile_flags(SM80)
    assert list(flags) == ["device", "host", "link"]
    everything = [flag for step in flags.values() for flag in step]
    assert not [flag for flag in everything if "/" in flag and not flag.startswith(("-Iinc/", "-isysteminc/"))]
    assert "-gencode=arch=compute_80,code=sm_80" in flags["device"]


def test_lines_of_the_source_on_request_make_another_kernel(monkeypatch):
    spec = sm80_spec()
    plain, before = compile_flags(SM80), source_identity(spec, "source")
    monkeypatch.setenv("CUTLASS_OPS_LINEINFO", "1")
    assert compile_flags(SM80) == plain | {"device": (*plain["device"], "-lineinfo")}
    assert identity_key(source_identity(spec, "source")) != identity_key(before)
    monkeypatch.setenv("CUTLASS_OPS_LINEINFO", "0")
    assert source_identity(spec, "source") == before


def test_resources_are_read_from_the_log(folder, toolkit):
    compiled = compile_(folder, toolkit)
    assert compiled.seconds > 0
    assert compiled.resources == (
        {
            "function": "_Z6kernelv",
            "registers": 168,
            "static_shared_memory": 1024,
            "stack": 8,
            "spill_stores": 4,
            "spill_loads": 12,
        },
    )


def test_the_compiler_sees_links_and_no_hidden_inputs(folder, toolkit, monkeypatch):
    for name in HIDDEN:
        monkeypatch.setenv(name, "smuggled")
    monkeypatch.setenv("PATH", f".:smuggled:{os.environ['PATH']}:")
    chain = toolkit.find()
    sees = (
        "[ -f inc/cutlass/cutlass/cutlass.h ] && [ -f inc/tvm_ffi/tvm/ffi/c_api.h ] && [ -d inc/cutlass_ops ]"
        " && [ -f inc/cuda0/cuda_runtime.h ] && [ -f inc/cutlass_ops/cutlass_ops/image.S ]"
        ' && [ -f lib/libtvm_ffi.so ] && [ -f lib/libcudart.so ] && [ "$TMPDIR" = tmp ] && [ -d tmp ]'
        ' && env && ! env | grep smuggled && echo > "$out"'
    )
    toolkit.does(sees)
    toolkit.host_does(sees)
    compile_kernel(folder, "kernel.cu", "kernel.so", SM80, chain)
    seen = {line.partition("=")[0] for line in (folder / "compile.log").read_text().splitlines() if line[:1] != "$"}
    # A shell that is a compiler adds its own.
    assert seen <= {"PATH", "TMPDIR", "LC_ALL", "PWD", "OLDPWD", "SHLVL", "_"}


def test_the_systems_own_headers_are_not_put_first(folder, toolkit):
    chain = replace(toolkit.find(), include_dirs=(Path("/usr/include"), toolkit.root / "include"))
    compile_kernel(folder, "kernel.cu", "kernel.so", SM80, chain)
    assert [(p.name, p.readlink()) for p in (folder / "inc").glob("cuda*")] == [("cuda0", toolkit.root / "include")]


def test_the_halves_are_compiled_at_the_same_time(folder, toolkit):
    # Each waits for the other: one after the other they would never end.
    toolkit.does('echo > device; until [ -f host ]; do sleep 0.01; done; echo > "$out"')
    toolkit.host_does('echo > host; until [ -f device ]; do sleep 0.01; done; echo > "$out"')
    compile_(folder, toolkit, timeout=120)
    log = (folder / "compile.log").read_text()
    commands = [line.split()[1].rpartition("/")[2] for line in log.splitlines() if line.startswith("$ ")]
    assert commands == ["nvcc", "g++", "g++"]


def test_an_error_in_the_hosts_half_ends_the_other_compiler(folder, toolkit):
    toolkit.does("sleep 600 & echo $! > pid; wait")
    toolkit.host_does("until [ -s pid ]; do sleep 0.01; done; echo 'kernel.cu:3:1: error: no'; exit 1")
    with pytest.raises(CompileError) as caught:
        compile_(folder, toolkit)
    shown, command = str(caught.value).split("\n")
    assert shown == "kernel.cu:3:1: error: no"
    assert command.startswith(f"  command: cd {folder} && {toolkit.host} -xc++ ")
    assert ended(int((folder / "pid").read_text()))


# ---- Two environments, one key, the same bytes ---------------------------------------------------------------------

PLAIN = 'extern "C" __attribute__((visibility("default"))) int answer() { return 42; }\n'


@pytest.fixture
def real(tmp_path, monkeypatch):
    """A fake nvcc beside the real g++, as and ld."""
    kit = FakeToolkit(tmp_path / "real")
    (kit.root / "lib" / "libcudart.so.13").unlink()
    subprocess.run(
        ["g++", "-shared", "-Wl,-soname,libcudart.so.13", "-o", kit.root / "lib" / "libcudart.so.13", "-xc++", "-"],
        input=b"",
        check=True,
    )
    kit.host = Path(shutil.which("g++"))
    return kit


def compiled(kit, folder):
    folder.mkdir()
    (folder / "kernel.cu").write_text(PLAIN)
    chain = kit.find_anew()
    compile_kernel(folder, "kernel.cu", "kernel.so", SM80, chain)
    return chain.identity, (folder / "kernel.so").read_bytes()


def _planted(folder, name, real):
    """A program that leaves a mark, and then does what it should."""
    folder.mkdir(exist_ok=True)
    program = folder / name
    program.write_text(f'#!/bin/sh\necho > {folder}/ran\nexec {real} "$@"\n')
    program.chmod(0o755)


def test_another_environment_gives_the_same_bytes(real, tmp_path, monkeypatch):
    plain = compiled(real, tmp_path / "plain")
    planted = tmp_path / "planted"
    for name in ("as", "ld", "cc1plus", "collect2"):
        _planted(planted, name, shutil.which(name) or "false")
    (planted / "stdlib.h").write_text("#error another header\n")
    for name in ("LD_RUN_PATH", "LIBRARY_PATH", "CPATH", "CPLUS_INCLUDE_PATH", "LD_LIBRARY_PATH"):
        monkeypatch.setenv(name, str(planted))
    monkeypatch.setenv("COMPILER_PATH", f"{planted}:")
    monkeypatch.setenv("GCC_EXEC_PREFIX", f"{planted}/")
    monkeypatch.setenv("DEPENDENCIES_OUTPUT", str(planted / "ran"))
    monkeypatch.setenv("GCC_COMPARE_DEBUG", "1")
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    assert compiled(real, tmp_path / "other") == plain
    assert elf.search_paths(plain[1]) == []
    assert not (planted / "ran").exists()


@pytest.mark.parametrize("name", ["as", "ld"])
def test_another_program_on_path_is_another_key(real, tmp_path, monkeypatch, name):
    plain, _ = compiled(real, tmp_path / "plain")
    planted = tmp_path / "planted"
    _planted(planted, name, shutil.which(name))
    monkeypatch.setenv("PATH", f"{planted}:{os.environ['PATH']}")
    other, _ = compiled(real, tmp_path / "other")
    assert (planted / "ran").exists()
    assert other["host_compiler"] != plain["host_compiler"]
    assert {**other, "host_compiler": ""} == {**plain, "host_compiler": ""}


def test_compilers_run_with_the_path_that_they_were_found_by(real, tmp_path, monkeypatch):
    chain = real.find_anew()
    planted = tmp_path / "planted"
    _planted(planted, "as", shutil.which("as"))
    monkeypatch.setenv("PATH", f"{planted}:{os.environ['PATH']}")
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "kernel.cu").write_text(PLAIN)
    compile_kernel(tmp_path / "work", "kernel.cu", "kernel.so", SM80, chain)
    assert not (planted / "ran").exists()


def test_a_compiler_that_is_exchanged_while_it_compiles(folder, toolkit):
    toolkit.does('echo > "$here/bin/ptxas"; echo > "$out"')
    with pytest.raises(ToolchainError, match="was replaced during the compilation: start again"):
        compile_(folder, toolkit)


# ---- What a shell sees ---------------------------------------------------------------------------------------------

SHELL = ("$(touch ran)", "`touch ran`", "$HOME", 'a"b', "a\\b", "a\nb")


@pytest.mark.parametrize("name", SHELL)
def test_a_path_that_a_shell_would_change_is_refused(toolkit, tmp_path, name, monkeypatch):
    work = tmp_path / name / "work"
    work.mkdir(parents=True)
    (work / "kernel.cu").write_text("source")
    with pytest.raises(ToolchainError, match=r"the folder to compile in is .*: nvcc passes it to a shell.*_CACHE_DIR"):
        compile_(work, toolkit)
    assert [path.name for path in work.iterdir()] == ["kernel.cu"]
    assert toolkit.compilations == 0


@pytest.mark.parametrize("name", ["a b", "it's", "a;b", "a&b", "*", "~", "#", "\u00fc\u4e2d", os.fsdecode(b"\xff")])
def test_a_path_that_a_shell_leaves_alone_is_not(toolkit, tmp_path, name):
    work = tmp_path / name / "work"
    work.mkdir(parents=True)
    (work / "kernel.cu").write_text("source")
    compile_(work, toolkit)


def test_nvcc_gets_no_absolute_path_but_that_of_the_compiler(folder, toolkit):
    toolkit.does('echo "$TMPDIR $all" > args; echo > "$out"')
    compile_(folder, toolkit)
    seen = [word for word in (folder / "args").read_text().split() if "/" in word and not word.startswith("-Iinc/")]
    assert seen == [f"-ccbin={toolkit.host}"]


def test_what_the_real_nvcc_gives_to_a_shell(folder, tmp_path):
    """Its commands name the toolkit, the host compiler and the working folder, which are checked, and nothing else."""
    try:
        chain = find_toolchain()
    except ToolchainError as exc:
        pytest.skip(str(exc))
    (folder / "tmp").mkdir()
    command = [chain.nvcc, f"-ccbin={chain.host_compiler}", "--dryrun", *compile_flags(SM80)["device"], "-o", "k"]
    done = subprocess.run(
        [*command, "kernel.cu"], cwd=folder, env=toolchain.environment(chain.path), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    top = re.search(r"^#\$ TOP=(.*)$", done.stderr, re.MULTILINE)[1]
    text = "\n".join(line for line in done.stderr.splitlines() if not re.match(r"#\$ \w+=", line))
    host = chain.host_compiler
    for known in (f'"{folder}/kernel.cu"', f'"{host.parent}"/{host.name} ', f"{top}/", f"{os.path.normpath(top)}/"):
        text = text.replace(known, "")
    assert "cicc" in text
    assert "tmp/tmpxft" in text
    assert not re.findall(r'(?<=["= I])/\S+', text)


# ---- What compilers say --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("encoding", "name"), [("ascii", "\u00fc"), ("latin-1", "\u4e2d"), ("utf-8", os.fsdecode(b"\xff\xfe"))]
)
def test_any_output_in_any_locale_is_an_error_that_can_be_printed(toolkit, tmp_path, encoding, name):
    place = tmp_path / name
    place.mkdir()
    (place / "kernel.cu").write_text("source")
    toolkit.does("printf 'kernel.cu(1): error: \\303\\274 \\377'; exit 1")
    script = f"""{WITHOUT_PYTORCH}
from pathlib import Path
from cutlass_ops.base import arch
from cutlass_ops.tools.cli import program
from cutlass_ops.compilation import compiler, toolchain

kit, place = map(Path, sys.argv[1:3])
chain = toolchain._examine(kit / "bin" / "nvcc", "test", kit / "host" / "g++", None)
program.app = lambda: compiler.compile_kernel(place, "kernel.cu", "kernel.so", arch.target("sm_80"), chain)
program.main()
"""
    locale = {"LC_ALL": "C", "PYTHONIOENCODING": encoding, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", script, toolkit.root, place, "--json"],
        env=os.environ | locale,
        capture_output=True,
    )
    assert done.returncode == 3, done.stderr
    assert b"error: kernel.cu(1): error: " in done.stderr
    assert json.loads(done.stdout)["error"]["kind"] == "CompileError"
    assert "error: \u00fc" in (place / "compile.log").read_text(encoding="utf-8")


def test_a_path_that_is_no_text_can_be_printed():
    error = CompileError(os.fsdecode(b"/tmp/\xff/kernel.cu: no"))
    assert str(error).encode() == b"/tmp/\\udcff/kernel.cu: no"


# ---- What goes wrong -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("does", ["does", "host_does"])
def test_a_compiler_that_the_system_kills_is_an_error(folder, toolkit, does):
    getattr(toolkit, does)("kill -9 $$")
    with pytest.raises(CompileError, match="failed with status -9 and no output"):
        compile_(folder, toolkit)


@pytest.mark.parametrize(
    ("log", "first"),
    [
        (
            "In file included from kernel.cu:2:\nkernel.cu:1:10: fatal error: nope.h: No such file or directory\nmore",
            "kernel.cu:1:10: fatal error: nope.h: No such file or directory",
        ),
        (
            'a.h(3): warning #177-D: x\nb.hpp(94): error: static assertion failed with "Could not"\nc(1): error: x',
            'b.hpp(94): error: static assertion failed with "Could not"',
        ),
        ("kernel.cu(1): error #20: identifier undefined", "kernel.cu(1): error #20: identifier undefined"),
        ("ptxas fatal   : Unresolved extern function 'f'", "ptxas fatal   : Unresolved extern function 'f'"),
        ("nvcc fatal   : Unsupported gpu", "nvcc fatal   : Unsupported gpu"),
        ("/usr/bin/ld: cannot find -lcudart\ncollect2: error: ld returned 1", "/usr/bin/ld: cannot find -lcudart"),
        ("x: No space left on device", "x: No space left on device"),
        ("Killed", "nvcc failed with status 3: Killed"),
        ("", "nvcc failed with status 3 and no output"),
    ],
)
def test_the_first_real_error_is_shown(folder, toolkit, log, first):
    toolkit.does(f"printf '%s' {shlex.quote(log)}; exit 3")
    with pytest.raises(CompileError) as caught:
        compile_(folder, toolkit)
    shown, command = str(caught.value).split("\n")
    assert shown == first
    assert command.startswith(f"  command: cd {folder} && {toolkit.nvcc} ")


@pytest.mark.parametrize("code", ["C7510", "C7508", "C7514"])
def test_slow_code_is_an_error(folder, toolkit, code):
    notice = f"ptxas info    : ({code}) Potential Performance Loss: ..."
    toolkit.does(f'echo > "$out"; echo "{notice}"')
    with pytest.raises(CompileError, match=rf"\({code}\) Potential"):
        compile_(folder, toolkit)


@pytest.fixture
def late(folder, monkeypatch):
    """Have time run out once the compiler has begun, which takes as long as it takes."""

    def monotonic():
        return 1000.0 if (folder / "pid").exists() and (folder / "pid").read_text() else 0.0

    monkeypatch.setattr(compiler, "time", SimpleNamespace(monotonic=monotonic, sleep=compiler.time.sleep))


@pytest.mark.usefixtures("late")
def test_what_took_too_long_is_gone_at_once(folder, toolkit, monkeypatch):
    """Also where no init waits for what its parent left."""
    monkeypatch.setattr(programs, "_PATIENCE", 60)  # on a busy machine
    toolkit.does("echo $$ > pid; exec sleep 600")
    with pytest.raises(CompileError, match="killed after 10 s"):
        compile_(folder, toolkit, timeout=10)
    with pytest.raises(ProcessLookupError):
        os.kill(int((folder / "pid").read_text()), 0)


@pytest.mark.usefixtures("late")
def test_timeout_ends_the_compiler_and_its_children(folder, toolkit):
    toolkit.does("(sleep 600 & echo $! > pid; wait)")
    with pytest.raises(CompileError, match="killed after 10 s"):
        compile_(folder, toolkit, timeout=10)
    assert ended(int((folder / "pid").read_text()))


def test_cancelling_ends_the_compiler(folder, toolkit, monkeypatch):
    toolkit.does("sleep 600 & echo $! > pid; wait")
    pid = folder / "pid"
    cancel = SimpleNamespace(is_set=lambda: pid.exists() and pid.read_text() != "")
    with pytest.raises(CancelledError):
        compile_(folder, toolkit, cancel=cancel)
    assert ended(int(pid.read_text()))


def test_interrupts_end_both_compilers(folder, toolkit, monkeypatch):
    """Another interrupt, while one compiler is ended, leaves none behind."""
    hangs = "sleep 600 & echo $! > {0}.new; mv {0}.new {0}; wait"
    toolkit.does(hangs.format("device"))
    toolkit.host_does(hangs.format("host"))
    pids = (folder / "device", folder / "host")

    def interrupt(_):
        if all(path.exists() for path in pids):
            raise KeyboardInterrupt

    monkeypatch.setattr(compiler.time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        compile_(folder, toolkit)
    monkeypatch.undo()
    assert all(ended(int(path.read_text())) for path in pids)


def test_a_process_that_blocks_sigchld():
    # As programs do that take it by sigwait or signalfd, and what they start. The shell and a script wait for children.
    script = "/bin/sh -c 'true; true'; exit 7"
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    try:
        program = programs.Program(("/bin/sh", "-c", script), stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + 20
        while program.status is None and time.monotonic() < deadline:
            time.sleep(0.01)
        status = program.status
        program.end()
        assert programs.ask(("/bin/sh", "-c", script), 20) == (7, "")
        assert signal.SIGCHLD in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert status == 7
