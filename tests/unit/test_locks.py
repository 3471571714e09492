"""Locks among processes: one holder, none that is dead, and words where there can be none."""

import contextlib
import errno
import fcntl
import json
import logging
import os
import signal
import subprocess
import sys
import threading

import pytest
from processes import WITHOUT_PYTORCH

from cutlass_ops.base import locks

ADVICE = "use another folder"


def held(path, **more):
    return locks.held(path, "something", ADVICE, **more)


def descriptors():
    return sorted(os.listdir("/proc/self/fd"))


def test_a_file_is_there_while_the_lock_is_held(tmp_path):
    before = descriptors()
    with held(tmp_path / "lock"):
        note = json.loads((tmp_path / "lock").read_text())
        assert note["pid"] == os.getpid()
        assert note["what"] == "something"
        assert (tmp_path / "lock").stat().st_mode & 0o777 == 0o600
        with locks.attempted(tmp_path / "lock", "something", ADVICE) as got:
            assert not got
    assert list(tmp_path.iterdir()) == []
    with locks.attempted(tmp_path / "lock", "something", ADVICE) as got:
        assert got
    assert list(tmp_path.iterdir()) == []
    assert descriptors() == before


@pytest.mark.parametrize("number", [errno.EIO, errno.EBADF])
def test_another_failure_leaks_no_descriptor(tmp_path, monkeypatch, number):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    before = descriptors()
    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(OSError, match=os.strerror(number)), held(tmp_path / "lock"):
        pass
    assert descriptors() == before


def test_a_planted_link_is_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "lock").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic links"), held(tmp_path / "lock"):
        pass
    assert victim.read_text() == "precious"
    (tmp_path / "dangling").symlink_to(tmp_path / "made")
    with pytest.raises(OSError, match="symbolic links"), held(tmp_path / "dangling"):
        pass
    assert not (tmp_path / "made").exists()


def test_a_planted_pipe_is_refused(tmp_path):
    before = descriptors()
    os.mkfifo(tmp_path / "lock")
    with pytest.raises(OSError, match="not a regular file"), held(tmp_path / "lock"):
        pass
    assert descriptors() == before


def wait_for_warning(caplog):
    while not caplog.records:
        threading.Event().wait(0.005)


@pytest.mark.parametrize("note", ["", "{", "[1]", '{"pid": 1}'])
def test_a_waiter_says_for_whom(tmp_path, monkeypatch, caplog, note):
    monkeypatch.setattr(locks, "_PATIENCE", -1.0)
    monkeypatch.setattr(locks, "_POLL", 0.001)
    cancel = threading.Event()
    with caplog.at_level(logging.WARNING, "cutlass_ops"), held(tmp_path / "lock"):
        since = json.loads((tmp_path / "lock").read_text())["since"]
        if note:
            (tmp_path / "lock").write_text(note)
        waiter = threading.Thread(target=swallowed, args=(tmp_path / "lock", cancel))
        waiter.start()
        wait_for_warning(caplog)
        cancel.set()
        waiter.join()
    (text,) = {record.getMessage() for record in caplog.records}
    if note:
        assert text == "waiting for something: another process has the lock"
    else:
        assert f"waiting for something: process {os.getpid()} on {os.uname().nodename} has had the lock since" in text
        assert since in text
    assert len(caplog.records) == 1  # and not at every look


def swallowed(path, cancel):
    with contextlib.suppress(BaseException), held(path, cancel=cancel):
        pass


def test_who_has_the_file_of_another_time_has_no_lock(tmp_path, monkeypatch):
    """A file that is removed after it was opened, and made again by somebody else."""
    path, flock, others = tmp_path / "lock", fcntl.flock, []

    def replaced(descriptor, how):
        if not others:
            path.unlink()
            others.append(os.open(path, os.O_RDWR | os.O_CREAT))
            flock(others[0], fcntl.LOCK_EX)
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", replaced)
    for _ in range(2):
        with locks.attempted(path, "something", ADVICE) as got:
            assert not got
        assert path.exists()
    os.close(others[0])
    with held(path):
        pass
    assert not path.exists()


_FORKS = """
import os, signal, sys, threading, time
from pathlib import Path
from cutlass_ops.base import locks
path = Path(sys.argv[1])

def child(leave):
    if leave:
        return
    print(os.getpid(), flush=True)
    time.sleep(600)
    os._exit(0)

if sys.argv[2] == "same thread":
    with locks.held(path, "something", ""):
        if os.fork() == 0:
            child(False)
        os.kill(os.getpid(), signal.SIGKILL)
elif sys.argv[2] == "other thread":
    go, inside = threading.Event(), threading.Event()
    def hold():
        with locks.held(path, "something", ""):
            inside.set()
            go.wait()
    threading.Thread(target=hold, daemon=True).start()
    inside.wait()
    if os.fork() == 0:
        child(False)
    os.kill(os.getpid(), signal.SIGKILL)
else:  # the child leaves the context
    pid = 0
    with locks.held(path, "something", ""):
        pid = os.fork()
        if pid:
            os.waitpid(pid, 0)
            there = path.exists()
            with locks.attempted(path, "something", "") as got:
                print(there, got, flush=True)
    if not pid:
        with locks.held(path.with_name("other"), "something", ""):
            os._exit(0)
"""


@pytest.mark.sample(2)
@pytest.mark.parametrize("who", ["same thread", "other thread"])
def test_a_forked_process_does_not_keep_a_dead_ones_lock(tmp_path, who):
    code = [sys.executable, "-W", "ignore", "-c", WITHOUT_PYTORCH + _FORKS, str(tmp_path / "lock"), who]
    process = subprocess.Popen(code, stdout=subprocess.PIPE, text=True)
    child = int(process.stdout.readline())
    try:
        process.wait()
        os.kill(child, 0)  # it lives
        with locks.attempted(tmp_path / "lock", "something", ADVICE) as got:
            assert got
    finally:
        os.kill(child, signal.SIGKILL)
        process.stdout.close()


def test_a_forked_process_does_not_give_its_parents_lock_back(tmp_path):
    code = [sys.executable, "-W", "ignore", "-c", WITHOUT_PYTORCH + _FORKS, str(tmp_path / "lock"), "leaves"]
    assert subprocess.run(code, capture_output=True, text=True).stdout == "True False\n"
