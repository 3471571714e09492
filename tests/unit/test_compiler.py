import errno
import os
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_toolkit import FakeToolkit
from processes import ended

from cutlass_ops.base import arch, elf, programs
from cutlass_ops.base.errors import CompileError, ToolchainError
from cutlass_ops.compilation import compiler
from cutlass_ops.compilation.compiler import compile_kernel

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


@pytest.mark.slow
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


def test_a_compiler_that_is_exchanged_while_it_compiles(folder, toolkit):
    toolkit.does('echo > "$here/bin/ptxas"; echo > "$out"')
    with pytest.raises(ToolchainError, match="was replaced during the compilation: start again"):
        compile_(folder, toolkit)


# ---- What a shell sees ---------------------------------------------------------------------------------------------

SHELL = ("$(touch ran)", "`touch ran`", "$HOME", 'a"b', "a\\b", "a\nb")


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", SHELL)
def test_a_path_that_a_shell_would_change_is_refused(toolkit, tmp_path, name, monkeypatch):
    work = tmp_path / name / "work"
    work.mkdir(parents=True)
    (work / "kernel.cu").write_text("source")
    with pytest.raises(ToolchainError, match=r"the folder to compile in is .*: nvcc passes it to a shell.*_CACHE_DIR"):
        compile_(work, toolkit)
    assert [path.name for path in work.iterdir()] == ["kernel.cu"]
    assert toolkit.compilations == 0


# ---- What goes wrong -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [4, 6, 8, 11])
def test_a_compiler_that_crashes_is_an_error_of_the_kernel(folder, toolkit, number):
    toolkit.does(f"kill -{number} $$")
    with pytest.raises(CompileError, match=f"failed with status -{number} and no output"):
        compile_(folder, toolkit)


@pytest.mark.parametrize("number", [1, 7, 15, 24, 25])
def test_a_compiler_that_others_end_is_no_error_of_the_kernel(folder, toolkit, number):
    toolkit.does(f"kill -{number} $$")
    before = signal.signal(number, signal.SIG_DFL)  # behind nohup, children ignore hangups
    try:
        with pytest.raises(ToolchainError, match=f"it was ended by signal {number}"):
            compile_(folder, toolkit)
    finally:
        signal.signal(number, before)


FULL, LACKS = (OSError, "No space left on device"), (ToolchainError, "CUTLASS_OPS_JOBS")
# What a compiler prints, and the error that it becomes.
LOGS = {
    "/usr/bin/as: BFD: kernel.o: No space left on device": FULL,
    "/usr/bin/ld: final link failed: No space left on device": FULL,
    "kernel.cu: fatal error: error writing to /tmp/ccXYZ.s: No space left on device\nerror: x": FULL,
    "LLVM ERROR: IO failure on output stream: Disk quota exceeded": FULL,
    "ptxas fatal   : could not write output file: File too large": FULL,
    "g++: fatal error: Killed signal terminated program cc1plus": LACKS,
    "nvcc error   : 'cicc' died due to signal 9 (Kill signal)": LACKS,
    "collect2: fatal error: ld terminated with signal 9 [Killed]": LACKS,
    "cc1plus: out of memory allocating 65536 bytes after a total of 1 bytes": LACKS,
    "virtual memory exhausted: Cannot allocate memory": LACKS,
    "ptxas fatal   : Memory allocation failure": LACKS,
    "terminate called after throwing an instance of 'std::bad_alloc'": LACKS,
    "LLVM ERROR: out of memory": LACKS,
    "sh: 0: Cannot fork: Resource temporarily unavailable": LACKS,
    "Killed": LACKS,
    "fatal error: cannot open kernel.o: Read-only file system": LACKS,
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("does", ["does", "host_does"])
@pytest.mark.parametrize("log", LOGS)
def test_what_the_machine_lacks_is_no_error_of_the_kernel(folder, toolkit, log, does):
    kind, said = LOGS[log]
    getattr(toolkit, does)(f"printf '%s' {shlex.quote(log)}; exit 3")
    with pytest.raises(kind, match=said) as caught:
        compile_(folder, toolkit)
    assert log in str(caught.value) if kind is ToolchainError else caught.value.errno == errno.ENOSPC


# What a compiler prints, and the line of it that is shown.
SHOWN = {
    "In file included from kernel.cu:2:\nkernel.cu:1:10: fatal error: nope.h: No such file or directory\nmore": 1,
    'a.h(3): warning #177-D: x\nb.hpp(94): error: static assertion failed with "Could not"\nc(1): error: x': 1,
    "kernel.cu(1): error #20: identifier undefined": 0,
    "ptxas fatal   : Unresolved extern function 'f'": 0,
    "nvcc fatal   : Unsupported gpu": 0,
    "/usr/bin/ld: cannot find -lcudart\ncollect2: error: ld returned 1": 0,
    "Aborted": "nvcc failed with status 3: Aborted",
    "": "nvcc failed with status 3 and no output",
}


@pytest.mark.parametrize(("log", "first"), SHOWN.items())
def test_the_first_real_error_is_shown(folder, toolkit, log, first):
    toolkit.does(f"printf '%s' {shlex.quote(log)}; exit 3")
    with pytest.raises(CompileError) as caught:
        compile_(folder, toolkit)
    shown, command = str(caught.value).split("\n")
    assert shown == (log.split("\n")[first] if isinstance(first, int) else first)
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
        deadline = time.monotonic() + 120
        while program.status is None and time.monotonic() < deadline:
            time.sleep(0.01)
        status = program.status
        program.end()
        assert programs.ask(("/bin/sh", "-c", script), 120) == (7, "")
        assert signal.SIGCHLD in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert status == 7
