"""Who may write the store's folders, disks that fail, and links that somebody planted."""

import errno
import os
from pathlib import Path

import pytest
from fake_toolkit import sm80_spec

from cutlass_ops.artifacts import store as store_module
from cutlass_ops.artifacts.entry import FORMAT
from cutlass_ops.artifacts.store import KernelStore
from cutlass_ops.base.errors import StoreError

SPEC = sm80_spec()


@pytest.mark.parametrize("mode", [0o777, 0o720, 0o1777])
def test_a_store_that_others_can_write_is_refused(store, put, mode):
    key = put().key
    store.root.chmod(mode)
    for use in (lambda: store.lookup(key), put, store.clean, lambda: list(store.entries())):
        with pytest.raises(StoreError, match=r"not private.*can be written by others.*CUTLASS_OPS_CACHE_DIR"):
            use()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_store_of_another_user_is_refused(store, put):
    key = put().key
    os.chown(store.root, 12345, 12345)
    with pytest.raises(StoreError, match="belongs to user 12345"):
        store.lookup(key)


@pytest.mark.parametrize("call", ["mkdir", "rename", "_sync"])
@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.ENOSPC, "no space is left.*CUTLASS_OPS_CACHE_DIR"),
        (errno.EDQUOT, "no space is left"),
        (errno.EROFS, "cannot be written.*to build new ones, set"),
        (errno.EIO, "cannot be used"),
    ],
)
def test_a_disk_that_fails(store, put, monkeypatch, call, number, message):
    def fail(*_args, **_more):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(store_module if call == "_sync" else Path, call, fail)
        with pytest.raises(StoreError, match=message):
            put()
    assert list(store.entries()) == []
    assert store.lookup(put().key)


@pytest.mark.parametrize("name", ["tmp", "locks", f"v{FORMAT}", "failed"])
@pytest.mark.parametrize("kind", ["link", "open to others"])
def test_a_folder_in_which_others_can_plant_anything_is_refused(store, put, tmp_path, name, kind):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    store.root.mkdir(mode=0o700)
    if kind == "link":
        (store.root / name).symlink_to(elsewhere)
    else:
        (store.root / name).mkdir()
        (store.root / name).chmod(0o777)

    def use():
        put()
        store.keep_failed(store.workspace("a" * 64, "source"))

    with pytest.raises(StoreError, match=f"{name}.*(is a link|can be written by others)"):
        use()
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize("below", ["", "store"])
def test_a_link_that_leads_nowhere_is_named(tmp_path, below):
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "unmounted")
    store = KernelStore(link / below)
    assert store.lookup("0" * 64) is None
    with pytest.raises(StoreError, match=rf"{link} is a link to {tmp_path}/unmounted, which does not exist"):
        store.workspace("0" * 64, "source")
