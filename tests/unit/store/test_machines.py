"""Machines that share a store on a network file system."""

import errno
import os
import stat
import time

import pytest

from cutlass_ops.artifacts import store as store_module

KEYS = ("a" * 64, "b" * 64)


@pytest.fixture
def another(monkeypatch):
    """Do something on another machine, whose locks do not reach this one, as under local_lock=all."""

    def _another(do):
        with monkeypatch.context() as patch:
            patch.setattr("fcntl.flock", lambda *_: None)
            patch.setattr(store_module, "_machine", lambda: "another")
            return do()

    return _another


@pytest.mark.parametrize("key", KEYS)
def test_a_build_of_another_machine_is_abandoned_after_a_day(store, another, key):
    theirs = another(lambda: store.workspace(KEYS[0], "source"))
    assert store.clean() == 0
    mine = store.workspace(key, "source")
    assert theirs.exists()
    long_ago = time.time() - 100_000
    os.utime(theirs, (long_ago, long_ago))
    store.workspace(key, "source")
    assert not theirs.exists()
    assert not mine.exists()  # its lock is free, or this caller's


def test_what_another_machine_has_published_meanwhile_stays(store, put, another, monkeypatch):
    rename, published = os.rename, []

    def late(self, target):
        if not published:
            published.append(None)
            published[0] = another(lambda: put())
            published.append(published[0].folder.lstat().st_ino)
        rename(self, target)
        return target

    monkeypatch.setattr("pathlib.Path.rename", late)
    mine = put()
    assert mine == published[0] == store.lookup(mine.key)
    assert mine.folder.lstat().st_ino == published[1]
    assert list((store.root / "tmp").iterdir()) == []


def test_a_file_system_that_cannot_sync_folders(store, put, monkeypatch):
    def fsync(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr("os.fsync", fsync)
    assert put() == next(store.entries())
