import os
import tempfile
import zipfile
from pathlib import Path

import pytest

from cutlass_ops.artifacts import container
from cutlass_ops.artifacts.container import open_container, write
from cutlass_ops.base.disk import NotPrivateError, require_private
from cutlass_ops.base.errors import BundleError

A, B = (f"kernels/{c * 64}.so" for c in "ab")
FILES = {"manifest.json": b"{}", A: b"first", B: b"", f"tables/{'c' * 64}.json": b"[]"}


@pytest.fixture(params=[False, True], ids=["archive", "folder"])
def made(request, tmp_path):
    path = tmp_path / "made.bundle"
    write(path, FILES, folder=request.param)
    return path


def test_what_was_written_is_read(made):
    found = open_container(made)
    assert found.sizes == {name: len(data) for name, data in FILES.items()}
    assert {name: found.read(name) for name in FILES} == FILES
    with pytest.raises(BundleError, match=r"has no file manifest\.sig"):
        found.read("manifest.sig")


def test_the_same_files_give_the_same_bytes_in_any_order(tmp_path):
    write(tmp_path / "a", FILES)
    write(tmp_path / "b", dict(reversed(FILES.items())))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_any_zip_program_opens_an_archive(tmp_path):
    write(tmp_path / "a", FILES)
    with zipfile.ZipFile(tmp_path / "a") as found:
        assert found.testzip() is None
        assert {name: found.read(name) for name in found.namelist()} == FILES


def test_nothing_is_left_of_a_write_that_fails(tmp_path, monkeypatch):
    def fail(_):
        raise OSError("no space")

    for folder in (False, True):
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fail)
            with pytest.raises(OSError, match="no space"):
                write(tmp_path / "a", FILES, folder=folder)
        assert list(tmp_path.iterdir()) == []


def test_an_archive_is_replaced_and_a_folder_is_not(tmp_path):
    write(tmp_path / "a", FILES)
    write(tmp_path / "a", {"manifest.json": b"new"})
    assert open_container(tmp_path / "a").read("manifest.json") == b"new"
    write(tmp_path / "b", FILES, folder=True)
    with pytest.raises(ValueError, match="already exists"):
        write(tmp_path / "b", FILES, folder=True)


def test_descriptors_are_closed(made):
    before = set(os.listdir("/proc/self/fd"))
    found = open_container(made)
    found.read(A)
    del found
    assert set(os.listdir("/proc/self/fd")) == before


def test_others_may_not_write_it(made):
    inner = made / "kernels" if made.is_dir() else made
    for path in {made, inner}:
        mode = path.stat().st_mode
        for bit in (0o020, 0o002):
            path.chmod(mode | bit)
            with pytest.raises(BundleError, match=r"is not safe: .* can be written by others .* chmod -R go-w"):
                open_container(made)
        path.chmod(mode)
    open_container(made)


def test_a_group_may_write_what_lies_beside_what_it_may_write(tmp_path):
    tmp_path.chmod(0o775)
    gid = tmp_path.stat().st_gid

    def info(mode, group):
        return os.stat_result((0o100000 | mode, 0, 0, 1, os.geteuid(), group, 0, 0, 0, 0))

    require_private(info(0o664, gid), tmp_path / "a", tmp_path)
    for mode, group, beside in ((0o664, gid + 1, tmp_path), (0o666, gid, tmp_path), (0o664, gid, None)):
        with pytest.raises(NotPrivateError, match="can be written by others"):
            require_private(info(mode, group), tmp_path / "a", beside)
    tmp_path.chmod(0o755)
    with pytest.raises(NotPrivateError, match="can be written by others"):
        require_private(info(0o664, gid), tmp_path / "a", tmp_path)


def test_what_cannot_be_a_bundle_at_all(tmp_path):
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    os.mkfifo(tmp_path / "pipe")
    for path, why in (
        (tmp_path / "circle", "cannot be read"),
        (f"{tmp_path}/a\0b", "null"),
        (tmp_path / "pipe", "regular"),
    ):
        with pytest.raises(BundleError, match=why) as raised:
            open_container(path)
        assert "chmod" not in str(raised.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_another_users_is_refused():
    # Pytest's own temporary folders cannot be entered by others.
    with tempfile.TemporaryDirectory() as root:
        os.chmod(root, 0o755)
        for folder in (False, True):
            path = Path(root, str(folder))
            write(path, FILES, folder=folder)
            os.chown(path, 12345, -1)
            os.seteuid(54321)
            try:
                with pytest.raises(BundleError, match="belongs to user 12345, not to this one"):
                    open_container(path)
            finally:
                os.seteuid(0)


# ---- Archives that this library did not write ----------------------------------------------------------------------


def _zip(path, entries, **options):
    with zipfile.ZipFile(path, "w", **options) as archive:
        for name, data in entries:
            entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)) if isinstance(name, str) else name
            entry.compress_type = options.get("compression", zipfile.ZIP_STORED)
            archive.writestr(entry, data)


def _link(name):
    entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
    entry.external_attr = 0o120777 << 16
    return entry


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize(
    ("entries", "options", "why"),
    [
        ([("../../etc/passwd", b"")], {}, "a bundle cannot have a file named '../../etc/passwd'"),
        ([("/tmp/x", b"")], {}, "a bundle cannot have a file named"),
        ([("kernels/../manifest.json", b"")], {}, "a bundle cannot have a file named"),
        ([("manifest.json", b"{}"), ("manifest.json", b"[]")], {}, "has extra fields"),
        ([(A, b"")] * 2, {}, "has extra fields"),
        ([("manifest.json", bytes(10_000))], {"compression": zipfile.ZIP_DEFLATED}, "is compressed, linked"),
        ([(_link(A), b"/etc/passwd")], {}, "is compressed, linked"),
        ([("kernels/", b"")], {}, "a bundle cannot have a file named"),
    ],
)
def test_other_archives_are_refused(tmp_path, entries, options, why):
    _zip(tmp_path / "a", entries, **options)
    with pytest.raises(BundleError, match=why):
        open_container(tmp_path / "a")


def test_a_comment_is_refused(tmp_path):
    write(tmp_path / "a", FILES)
    with zipfile.ZipFile(tmp_path / "a", "a") as archive:
        archive.comment = b"hello"
    with pytest.raises(BundleError, match="does not end like a ZIP file"):
        open_container(tmp_path / "a")


def test_limits(tmp_path, monkeypatch):
    monkeypatch.setattr(container, "MAX_FILE", 4)
    with pytest.raises(ValueError, match="at most 4"):
        write(tmp_path / "a", FILES)
    monkeypatch.setattr(container, "MAX_FILE", 100)
    for folder in (False, True):
        write(tmp_path / f"{folder}", FILES, folder=folder)
    for limit, value in (("MAX_FILE", 4), ("MAX_FILES", 3)):
        with monkeypatch.context() as patch:
            patch.setattr(container, limit, value)
            for folder in (False, True):
                with pytest.raises(BundleError):
                    open_container(tmp_path / f"{folder}")


# ---- Folders that this library did not write -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda f: (f / "more.txt").write_text(""), "a bundle cannot have a file named 'more.txt'"),
        (lambda f: (f / "kernels/x").write_text(""), "a bundle cannot have a file named 'kernels/x'"),
        (lambda f: (f / f"kernels/{'d' * 64}.so").symlink_to(f / A), "is not a regular file"),
        (lambda f: os.mkfifo(f / f"kernels/{'d' * 64}.so"), "is not a regular file"),
        (lambda f: (f / "deep").mkdir(), "a bundle cannot have a file named 'deep'"),
        (lambda f: (f / "sources").symlink_to(f / "kernels"), "cannot be read"),
    ],
)
def test_other_folders_are_refused(tmp_path, spoil, why):
    write(tmp_path / "a", FILES, folder=True)
    spoil(tmp_path / "a")
    with pytest.raises(BundleError, match=why):
        open_container(tmp_path / "a")


def test_a_file_that_becomes_a_link_or_longer_later_is_refused(tmp_path):
    write(tmp_path / "a", FILES, folder=True)
    found = open_container(tmp_path / "a")
    (tmp_path / "a" / A).write_bytes(b"longer than before")
    with pytest.raises(BundleError, match="changed its size"):
        found.read(A)
    (tmp_path / "a" / A).unlink()
    (tmp_path / "a" / A).symlink_to(tmp_path / "a" / B)
    with pytest.raises(BundleError, match="cannot be read"):
        found.read(A)


def test_a_link_to_the_bundle_itself_is_the_users_own(made, tmp_path):
    (tmp_path / "current").symlink_to(made)
    assert open_container(tmp_path / "current").read(A) == b"first"
