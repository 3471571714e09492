import shlex
import threading
import time
from concurrent.futures import CancelledError
from dataclasses import replace
from pathlib import Path

import pytest
from fake_toolkit import FakeToolkit

from cutlass_ops import arch, compiler, toolchain
from cutlass_ops.compiler import compile_flags, compile_kernel
from cutlass_ops.errors import CompileError

SM80 = arch.target("sm_80")


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
    for name in toolchain.HIDDEN_INPUTS:
        monkeypatch.setenv(name, "smuggled")
    monkeypatch.setenv("NVCC_CCBIN", "g++")
    sees = (
        "[ -f inc/cutlass/cutlass/cutlass.h ] && [ -f inc/tvm_ffi/tvm/ffi/c_api.h ] && [ -d inc/cutlass_ops ]"
        " && [ -f inc/cuda0/cuda_runtime.h ] && [ -f inc/cutlass_ops/cutlass_ops/image.S ]"
        ' && [ -f lib/libtvm_ffi.so ] && [ -f lib/libcudart.so ] && [ "$TMPDIR" = "$PWD/tmp" ] && [ -d "$TMPDIR" ]'
        ' && ! env | grep smuggled && echo > "$out"'
    )
    toolkit.does(sees)
    toolkit.host_does(sees)
    compile_(folder, toolkit)


def test_the_systems_own_headers_are_not_put_first(folder, toolkit):
    chain = replace(toolkit.find(), include_dirs=(Path("/usr/include"), toolkit.root / "include"))
    compile_kernel(folder, "kernel.cu", "kernel.so", SM80, chain)
    assert [(p.name, p.readlink()) for p in (folder / "inc").glob("cuda*")] == [("cuda0", toolkit.root / "include")]


def test_the_halves_are_compiled_at_the_same_time(folder, toolkit):
    # Each waits for the other: one after the other they would never end.
    toolkit.does('echo > device; until [ -f host ]; do sleep 0.01; done; echo > "$out"')
    toolkit.host_does('echo > host; until [ -f device ]; do sleep 0.01; done; echo > "$out"')
    compile_(folder, toolkit, timeout=20)
    log = (folder / "compile.log").read_text()
    commands = [line.split()[1].rpartition("/")[2] for line in log.splitlines() if line.startswith("$ ")]
    assert commands == ["nvcc", "g++", "g++"]


def test_an_error_in_the_hosts_half_ends_the_other_compiler(folder, toolkit):
    toolkit.does("sleep 60 & echo $! > pid; wait")
    toolkit.host_does("until [ -s pid ]; do sleep 0.01; done; echo 'kernel.cu:3:1: error: no'; exit 1")
    with pytest.raises(CompileError) as caught:
        compile_(folder, toolkit)
    shown, command = str(caught.value).split("\n")
    assert shown == "kernel.cu:3:1: error: no"
    assert command.startswith(f"  command: cd {folder} && {toolkit.host} -xc++ ")
    assert _ended(folder / "pid")


@pytest.mark.parametrize("does", ["does", "host_does"])
def test_a_compiler_that_the_system_kills_is_an_error(folder, toolkit, does):
    getattr(toolkit, does)("kill -9 $$")
    with pytest.raises(CompileError, match="failed with status -9 and said nothing"):
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
        ("", "nvcc failed with status 3 and said nothing"),
    ],
)
def test_the_first_real_error_is_shown(folder, toolkit, log, first):
    toolkit.does(f"printf '%s' {shlex.quote(log)}; exit 3")
    with pytest.raises(CompileError) as caught:
        compile_(folder, toolkit)
    shown, command = str(caught.value).split("\n")
    assert shown == first
    assert command.startswith(f"  command: cd {folder} && {toolkit.nvcc} ")


@pytest.mark.parametrize("code", ["C7510", "C7508"])
def test_slow_code_is_an_error(folder, toolkit, code):
    notice = f"ptxas info    : ({code}) Potential Performance Loss: ..."
    toolkit.does(f'echo > "$out"; echo "{notice}"')
    with pytest.raises(CompileError, match=rf"\({code}\) Potential"):
        compile_(folder, toolkit)


def _ended(pid_file):
    pid = int(pid_file.read_text())
    for _ in range(100):
        try:
            # A killed child of a killed parent may wait for init to take notice of it.
            if Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.01)
    return False


def test_timeout_ends_the_compiler_and_its_children(folder, toolkit):
    toolkit.does("(sleep 60 & echo $! > pid; wait)")
    with pytest.raises(CompileError, match="ended after 0 s"):
        compile_(folder, toolkit, timeout=0.2)
    assert _ended(folder / "pid")


def test_cancelling_ends_the_compiler(folder, toolkit):
    toolkit.does("sleep 60 & echo $! > pid; wait")
    cancel = threading.Event()
    timer = threading.Timer(0.2, cancel.set)
    timer.start()
    with pytest.raises(CancelledError):
        compile_(folder, toolkit, cancel=cancel)
    timer.join()
    assert _ended(folder / "pid")


def test_an_interrupt_ends_the_compiler(folder, toolkit, monkeypatch):
    toolkit.does("sleep 60 & echo $! > pid; wait")

    def interrupt(_):
        if (folder / "pid").exists() and (folder / "pid").read_text():
            raise KeyboardInterrupt

    monkeypatch.setattr(compiler.time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        compile_(folder, toolkit)
    monkeypatch.undo()
    assert _ended(folder / "pid")
