"""The lock of a build."""

import errno
import os
import shutil
import threading
import time
from concurrent.futures import CancelledError

import pytest
from fake_toolkit import sm80_spec

from cutlass_ops.base import locks
from cutlass_ops.base.errors import StoreError

SPEC = sm80_spec()


def test_waiting_can_be_cancelled(store):
    cancel = threading.Event()
    cancel.set()
    with store.lock("a" * 64), pytest.raises(CancelledError), store.lock("a" * 64, cancel):
        pass


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL])
def test_a_file_system_without_locks_is_one_error_and_serves_what_it_has(store, put, monkeypatch, number):
    artifact = put()

    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", refuse)
    before = sorted(os.listdir("/proc/self/fd"))
    with pytest.raises(StoreError, match=r"has no file locks.*CUTLASS_OPS_CACHE_DIR to a folder on a local disk"):
        put(sm80_spec(stages=4))
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert store.lookup(artifact.key).read_library()
    assert store.clean() == 1
    assert not artifact.folder.exists()


def test_no_file_of_a_lock_stays(store, put):
    put()
    assert list((store.root / "locks").iterdir()) == []
    (store.root / "locks" / ("a" * 64)).touch()  # a builder was killed
    (store.root / "locks" / ("d" * 64)).symlink_to(store.root / "victim")
    with store.lock("b" * 64):
        assert store.clean() == 1
        assert [path.name for path in (store.root / "locks").iterdir()] == ["b" * 64]
    assert list((store.root / "locks").iterdir()) == []


def test_who_waits_while_the_store_is_deleted_goes_on(store, monkeypatch, caplog):
    monkeypatch.setattr(locks, "_PATIENCE", -1.0)  # who waits says so at once
    entered = threading.Event()

    def work():
        with store.lock("a" * 64):
            entered.set()

    with store.lock("a" * 64):
        thread = threading.Thread(target=work)
        thread.start()
        while "waiting" not in caplog.text:
            time.sleep(0.01)
        shutil.rmtree(store.root)
    thread.join()
    assert entered.is_set()
