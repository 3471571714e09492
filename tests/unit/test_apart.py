"""Kernels are built by a process apart, which ends with this one."""

import contextlib
import os
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path

import pytest
from fake_toolkit import FakeToolkit, sm80_spec
from processes import WITHOUT_PYTORCH

from cutlass_ops.base.errors import CompileError, MissingKernelError
from cutlass_ops.base.session import Session
from cutlass_ops.compilation import apart, keys
from cutlass_ops.compilation.apart import Apart


@pytest.fixture
def toolkit(tmp_path, monkeypatch):
    found = FakeToolkit(tmp_path / "kit")
    monkeypatch.setenv("CUTLASS_OPS_CACHE_DIR", str(tmp_path / "store"))
    monkeypatch.setenv("CUTLASS_OPS_NVCC", str(found.nvcc))
    monkeypatch.setenv("NVCC_CCBIN", str(found.host))
    return found


@pytest.fixture
def process():
    found = Apart(Session())
    yield found
    found.close()


def child(shell):
    """Return the process that a shell supervises, once that has begun."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        with contextlib.suppress(FileNotFoundError):  # of one that has ended meanwhile
            children = Path(f"/proc/{shell}/task/{shell}/children").read_text().split()
            found = [pid for pid in children if Path(f"/proc/{pid}/cmdline").read_text().startswith(sys.executable)]
            if found:
                return int(*found)
        time.sleep(0.01)
    raise TimeoutError(f"shell {shell} supervises no Python")


def build(process, spec):
    """Build, and find what was built."""
    return process.build(spec, threading.Event())()


def pids(process):
    return [child(each._program._shell.pid) for each in process._processes.values()]


def test_it_builds_into_the_store_of_this_process(toolkit, process, monkeypatch):
    first = build(process, sm80_spec(3))
    assert first.library.is_file()
    assert toolkit.compilations == 1
    # Nothing was compiled here.
    monkeypatch.setattr("cutlass_ops.compilation.builder._compile", lambda *_: pytest.fail("compiled here"))
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda stages: build(process, sm80_spec(stages)), (2, 4, 3)))
    assert len({each.key for each in found}) == 3
    assert found[2].key == first.key
    assert toolkit.compilations == 3
    assert len(pids(process)) == 1


def test_kernels_of_a_burst_are_looked_for_with_one_look_at_templates_and_compilers(toolkit, process, monkeypatch):
    for stages in (2, 3):
        build(process, sm80_spec(stages))
    looks, situation, now = [], keys._situation, time.monotonic() + 3600
    monkeypatch.setattr(keys, "_situation", lambda: looks.append(now) or situation())
    monkeypatch.setattr(apart.time, "monotonic", lambda: now)
    for stages in (2, 3, 2):
        build(process, sm80_spec(stages))
    assert len(looks) == 1
    now += 2 * apart._BURST
    build(process, sm80_spec(3))
    assert len(looks) == 2


def test_a_burst_ends_where_the_environment_changes(toolkit, process, monkeypatch):
    monkeypatch.setattr(apart, "_BURST", 3600.0)
    build(process, sm80_spec(2))
    plain = build(process, sm80_spec(2))
    monkeypatch.setenv("CUTLASS_OPS_LINEINFO", "1")
    assert build(process, sm80_spec(2)).key != plain.key


def test_what_the_store_is_known_to_have_needs_no_process(toolkit, process):
    first = build(process, sm80_spec(3))
    another = Apart(Session())
    assert build(another, sm80_spec(3)) == first
    assert another._processes == {}
    shutil.rmtree(first.folder)
    assert build(another, sm80_spec(3)) == first
    assert len(pids(another)) == 1
    another.close()
    assert toolkit.compilations == 2


def test_what_was_removed_since_is_built_again(toolkit, process):
    found = build(process, sm80_spec(3))
    for file in found.folder.iterdir():
        file.unlink()
    found.folder.rmdir()
    assert found.read_library()
    assert toolkit.compilations == 2


def test_its_errors_are_those_of_building_here(toolkit, process, monkeypatch):
    toolkit.does("echo no such register; exit 1")
    with pytest.raises(CompileError, match="no such register"):
        build(process, sm80_spec(3))
    monkeypatch.setenv("CUTLASS_OPS_JIT", "0")
    with pytest.raises(MissingKernelError, match="CUTLASS_OPS_JIT=0"):
        build(process, sm80_spec(3))
    # It was started with other settings, so there are two.
    assert len(pids(process)) == 2


def test_it_needs_no_pytorch_and_gives_way(toolkit, process):
    build(process, sm80_spec(3))
    (pid,) = pids(process)
    assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text()
    assert os.getpriority(os.PRIO_PROCESS, pid) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 10)


def test_if_it_is_lost_this_process_builds(toolkit, process, caplog):
    toolkit.does("sleep 60")
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(build, process, sm80_spec(3))
        while not pids(process) or not toolkit.compilations:
            time.sleep(0.01)
        toolkit.makes((toolkit.root / "library").read_bytes())
        os.kill(*pids(process), 9)
        assert asked.result().library.is_file()
        assert "kernels are built in this process" in caplog.text
        caplog.clear()
        pool.submit(build, process, sm80_spec(2)).result()
    assert "kernels are built in this process" not in caplog.text  # once said


def test_a_program_that_only_embeds_python_builds_in_its_own_process(toolkit, process, monkeypatch, caplog):
    monkeypatch.setattr(sys, "executable", "/usr/bin/blender")
    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    def built_in_a_thread(process, spec):
        assert build(process, spec).library.is_file()
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())  # that of its compilers as well

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(built_in_a_thread, process, sm80_spec(3)).result() == min(19, max(before, 10))
    assert not process._processes
    monkeypatch.setattr(sys, "executable", "/nowhere/python3")
    other = Apart(Session())
    with ThreadPoolExecutor(1) as pool:
        pool.submit(built_in_a_thread, other, sm80_spec(2)).result()


def test_closing_ends_it_and_its_compilers(toolkit, process):
    toolkit.does('echo $$ > "$here/pid"; sleep 60')
    cancel = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(process.build, sm80_spec(3), cancel)
        while not (toolkit.root / "pid").exists():
            time.sleep(0.01)
        cancel.set()
        process.close()
        with pytest.raises(CancelledError):
            asked.result()
    compiler = int((toolkit.root / "pid").read_text())
    while os.path.exists(f"/proc/{compiler}"):
        time.sleep(0.01)


SCRIPT = """
import os, sys, threading
sys.path.insert(0, "tests/unit")
from fake_toolkit import sm80_spec
from cutlass_ops.base.session import Session
from cutlass_ops.compilation.apart import Apart
process = Apart(Session())
threading.Thread(target=process.build, args=(sm80_spec(3), threading.Event()), daemon=True).start()
while not process._processes:
    pass
(other,) = process._processes.values()
print(other._program._shell.pid, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "killed while a fork of it holds the pipe"])
def test_it_ends_with_this_process(toolkit, how):
    toolkit.does("sleep 60")
    fork = "\nif os.fork() == 0:\n    import time; time.sleep(60)\n" if "fork" in how else ""
    script = WITHOUT_PYTORCH + SCRIPT + fork + "import time; time.sleep(60)"
    with subprocess.Popen([sys.executable, "-W", "ignore", "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        while not toolkit.compilations:
            time.sleep(0.01)
        parent.kill()
        while os.path.exists(f"/proc/{pid}") and "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text():
            time.sleep(0.01)


def test_what_prints_at_its_start_is_no_answer(toolkit, process, monkeypatch, caplog):
    monkeypatch.setattr(apart, "_PROGRAM", "print('hello', flush=True)" + apart._PROGRAM)
    build(process, sm80_spec(3))
    assert caplog.text == ""
