"""Places that cannot be written are refused before anything is done for what goes there."""

import os

import pytest

from cutlass_ops.base import disk

READABLE_BY_ROOT = pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")


def test_places_that_can_be_written_are_left_as_they_are(tmp_path):
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for path in (tmp_path / "file", tmp_path / "new", tmp_path / "a" / "b" / "new", tmp_path / "link"):
        disk.require_file(path)
    for path in (tmp_path, tmp_path / "new", tmp_path / "a" / "b"):
        disk.require_folder(path)
    disk.require_new(tmp_path / "a" / "b")
    assert sorted(os.listdir(tmp_path)) == ["file", "link"]
    assert (tmp_path / "file").read_text() == "old"


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("folder", "is a folder: name a file in it"),
        ("pipe", "is a device, a pipe or a socket"),
        ("/dev/null", "is a device, a pipe or a socket"),
        ("file/under", "is not a folder"),
        ("file/far/under", "is not a folder"),
        ("dangling/under", "is not a folder"),
        ("/dev/null/under", "is not a folder"),
        ("/proc/under", "no file can be created in /proc"),
        ("x" * 240, "its name is too long"),
        ("new/" + "x" * 300 + "/file", "its name is too long"),
    ],
)
def test_a_file_that_cannot_be_written(tmp_path, path, why):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match=why):
        disk.require_file(tmp_path / path)
    with pytest.raises(ValueError, match=f"{why}|already exists"):
        disk.require_new(tmp_path / path)


@pytest.mark.parametrize(
    ("path", "why"), [("file", "is not a folder"), ("/dev/null", "is not a folder"), ("/proc", "/proc")]
)
def test_a_folder_that_cannot_be_written(tmp_path, path, why):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=why):
        disk.require_folder(tmp_path / path)


@READABLE_BY_ROOT
def test_a_folder_of_others(tmp_path):
    tmp_path.chmod(0o500)
    for require in (disk.require_file, disk.require_new):
        with pytest.raises(ValueError, match=f"this user may not create files in {tmp_path}"):
            require(tmp_path / "file")
    tmp_path.chmod(0o700)
