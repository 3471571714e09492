"""What is removed where a store grows too large, and what is cleaned on request."""

import errno
import logging
import os
import time
from dataclasses import replace

import pytest
from fake_toolkit import HMMA, library, sm80_spec

from cutlass_ops.artifacts import entry as entry_module
from cutlass_ops.artifacts import store as store_module
from cutlass_ops.artifacts.entry import FORMAT
from cutlass_ops.base import disk
from cutlass_ops.base.errors import LoadError

SPEC = sm80_spec()


def bytes_of(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def used(artifact, seconds):
    """Have a kernel be last used so long ago."""
    then = time.time_ns() - seconds * 1_000_000_000
    os.utime(artifact.folder, ns=(then, then))
    return artifact


def test_the_least_recently_used_go(store, put, monkeypatch):
    first, second, third = (used(put(sm80_spec(stages)), 100 - stages) for stages in (2, 3, 4))
    size = bytes_of(store.root / f"v{FORMAT}")
    assert store.size() == size
    monkeypatch.setenv("CUTLASS_OPS_CACHE_SIZE", str(size + 40))
    assert store.lookup(first.key)  # used again
    assert list(store.entries()) == sorted((first, second, third), key=lambda a: a.key)  # to list them is no use
    fourth = put(sm80_spec(5))
    assert {a.key for a in store.entries()} == {first.key, third.key, fourth.key}
    assert bytes_of(store.root / f"v{FORMAT}") <= size + 40
    assert store.lookup(second.key) is None
    assert list((store.root / "tmp").iterdir()) == []


def test_a_kernel_that_alone_is_too_large_stays(store, put, monkeypatch):
    monkeypatch.setenv("CUTLASS_OPS_CACHE_SIZE", "1B")
    first, second = put(sm80_spec(2)), put(sm80_spec(3))
    assert list(store.entries()) == [second]
    assert store.lookup(first.key) is None


def test_a_wrong_limit_is_said_before_anything_is_compiled(store, monkeypatch):
    monkeypatch.setenv("CUTLASS_OPS_CACHE_SIZE", "much")
    with pytest.raises(ValueError, match=r"CUTLASS_OPS_CACHE_SIZE is 'much': a size such as 2GB.*or none"):
        store.workspace("a" * 64, "source")


def test_what_cannot_be_removed_costs_no_kernel(store, put, monkeypatch, caplog):
    put(sm80_spec(2))
    monkeypatch.setenv("CUTLASS_OPS_CACHE_SIZE", "1B")

    def fail(*_):
        raise PermissionError(errno.EACCES, "not yours")

    monkeypatch.setattr(disk, "excess", fail)
    assert store.lookup(put(sm80_spec(3)).key)
    assert "cannot limit the size" in caplog.text


def test_a_kernel_used_since_it_was_looked_at_stays(store, put, monkeypatch):
    first = used(put(sm80_spec(2)), 100)
    monkeypatch.setenv("CUTLASS_OPS_CACHE_SIZE", "1B")
    look = disk.uses

    def late(folders):
        found = look(folders)
        assert store.lookup(first.key)
        return found

    monkeypatch.setattr(disk, "uses", late)
    put(sm80_spec(3))
    assert first.folder.exists()


def test_a_kernel_that_is_removed_while_it_is_looked_up_is_a_miss(store, put, monkeypatch, caplog):
    artifact = put()
    whole = entry_module._read_manifest

    def read(folder, key):
        monkeypatch.setattr(entry_module, "_read_manifest", whole)
        found = whole(folder, key)
        store.discard(folder)
        return found

    monkeypatch.setattr(entry_module, "_read_manifest", read)
    with caplog.at_level(logging.DEBUG):
        assert store.lookup(artifact.key) is None
    assert caplog.text == ""


def test_what_is_removed_right_after_it_was_published_is_no_error(store, put, monkeypatch):
    sync = store_module._sync

    def remove(path):
        sync(path)
        if path.parent.name == f"v{FORMAT}":
            for folder in path.iterdir():
                store.discard(folder)

    monkeypatch.setattr(store_module, "_sync", remove)
    artifact = put()
    assert not artifact.folder.exists()
    with pytest.raises(LoadError, match="cannot be read"):
        artifact.read_library()
    again = replace(artifact, again=lambda use: use(put()))
    monkeypatch.setattr(store_module, "_sync", sync)
    assert again.read_library() == library(HMMA)
    assert again.read_source() == b"source"
    assert again.present() == artifact


def test_what_was_changed_is_not_built_again_behind_the_callers_back(store, put):
    artifact = replace(put(), again=lambda use: use(put()))
    artifact.library.write_bytes(b"changed")
    with pytest.raises(LoadError, match="changed since"):
        artifact.read_library()
    artifact.library.unlink()
    assert artifact.read_library() == library(HMMA)


def test_what_somebody_is_about_to_read_is_not_removed(store, put, monkeypatch):
    artifact = put(sm80_spec(2))
    with store.lock(artifact.key):
        assert store.clean() == 0
        monkeypatch.setenv("CUTLASS_OPS_CACHE_SIZE", "1B")
        other = put(sm80_spec(3))
        assert artifact.read_library()
    put(sm80_spec(4))
    assert not artifact.folder.exists()
    assert not other.folder.exists()


def test_failures_are_bounded(store, monkeypatch):
    monkeypatch.setattr(store_module, "_MOST_FAILED", 3)
    for number in range(6):
        last = store.keep_failed(store.workspace(f"{number}" * 64, "source"))
        then = time.time_ns() - (10 - number) * 1_000_000_000
        os.utime(last, ns=(then, then))
    assert sorted(path.name[0] for path in (store.root / "failed").iterdir()) == ["3", "4", "5"]
    monkeypatch.setattr(store_module, "_MAX_FAILED", 10)
    last = store.keep_failed(store.workspace("6" * 64, "s" * 100))
    assert [path.name[0] for path in (store.root / "failed").iterdir()] == ["5", "6"]
    assert (last / "kernel.cu").exists()


def test_clean_what_was_not_used_for_long(store, put):
    old, new = used(put(sm80_spec(2)), 1000), put(sm80_spec(3))
    failed = store.keep_failed(store.workspace("a" * 64, "source"))
    abandoned = store.workspace("b" * 64, "source")
    assert store.clean(unused_for=5000) == 0
    assert failed.exists()
    assert not abandoned.exists()
    assert store.clean(unused_for=500) == 1
    assert list(store.entries()) == [new]
    assert failed.exists()
    os.utime(failed, ns=(0, 0))
    assert store.clean(unused_for=500) == 0
    assert not failed.exists()
    assert not old.folder.exists()


def test_clean_down_to_a_size(store, put):
    made = [used(put(sm80_spec(stages)), 100 - stages) for stages in (2, 3, 4)]
    one = bytes_of(made[0].folder)
    assert store.clean(keep=3 * one + 9) == 0
    assert store.clean(keep=2 * one + 9) == 1
    assert {a.key for a in store.entries()} == {a.key for a in made[1:]}
    used(made[2], 1000)
    assert store.clean(keep=one + 9, unused_for=500) == 1
    assert list(store.entries()) == [made[1]]
    assert store.clean(keep=1) == 1
