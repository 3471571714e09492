"""However a process ends, its compilers and its measuring worker end with it, and so does all that these started."""

import contextlib
import os
import signal
from pathlib import Path

import crowd
import pytest
from processes import ended, group_ended

ENDS = {"SIGTERM": signal.SIGTERM, "SIGHUP": signal.SIGHUP, "SIGKILL": signal.SIGKILL, "SIGSEGV": signal.SIGSEGV}

# The group of the compiler; a process beside it; and one that it waits for.
_HANGS = """cut -d" " -f5 /proc/self/stat > {name}.new && mv {name}.new {name}
sleep 600 &
sleep 600
"""


@pytest.fixture
def kit(toolkit):
    toolkit.does(_HANGS.format(name="device"))
    toolkit.host_does(_HANGS.format(name="host"))
    return toolkit


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "kernel.cu").write_text("source")
    return tmp_path / "work"


@pytest.mark.sample(2)
@pytest.mark.parametrize("end", ENDS)
def test_compilers_end_with_the_process(kit, folder, processes, end):
    child = processes.Process(target=crowd.compile_until_ended, args=(folder, kit.find()))
    child.start()
    groups = crowd.groups_in(folder, child)
    os.kill(child.pid, ENDS[end])
    child.join()
    assert child.exitcode == -ENDS[end]
    assert all(map(group_ended, groups))


def test_compilers_of_a_thread_end_with_a_process_that_exits_at_once(kit, folder, processes):
    child = processes.Process(target=crowd.compile_and_exit, args=(folder, kit.find()))
    child.start()
    child.join()
    assert all(map(group_ended, crowd.groups_in(folder, child)))


def test_a_fork_of_the_process_keeps_no_compiler_alive(kit, folder, processes):
    child = processes.Process(target=crowd.compile_beside_a_fork, args=(folder, kit.find()))
    child.start()
    groups = crowd.groups_in(folder, child)
    while not (folder / "fork").exists():
        assert child.is_alive()
    child.kill()
    child.join()
    try:
        assert all(map(group_ended, groups))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int((folder / "fork").read_text()), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS)
def test_the_measuring_worker_ends_with_the_process(folder, processes, end):
    child = processes.Process(target=crowd.measure_until_ended, args=(folder,))
    child.start()
    groups = crowd.groups_in(folder, child)
    os.kill(child.pid, ENDS[end])
    child.join()
    assert child.exitcode == -ENDS[end]
    assert all(map(group_ended, groups))


@pytest.mark.slow
def test_local_workers_and_their_compilers_end_with_the_process(kit, store, processes, tmp_path):
    record = _HANGS.replace("{name}", f"{tmp_path}/{{name}}")
    kit.does(record.format(name="device"))
    kit.host_does(record.format(name="host"))
    child = processes.Process(target=crowd.compile_elsewhere, args=(store.root, str(kit.nvcc), str(kit.host)))
    child.start()
    groups = crowd.groups_in(tmp_path, child)
    # Each thread has its own children.
    workers = [int(pid) for f in Path(f"/proc/{child.pid}/task").glob("*/children") for pid in f.read_text().split()]
    assert workers
    child.kill()
    child.join()
    assert all(map(group_ended, groups))
    assert all(map(ended, workers))
