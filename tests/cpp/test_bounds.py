"""Memory, descriptors and files have bounds."""

import _ctypes
import re
from pathlib import Path

import pytest

from cutlass_ops.artifacts import container
from cutlass_ops.artifacts.bundle import write_bundle
from tests.cpp.made import with_tag, write_one

# To build the program takes fifteen seconds.
pytestmark = pytest.mark.slow
ENOUGH = 600 << 20  # bytes of address space, most of which the program's libraries take


def test_failed_loads_leave_no_descriptor(probe, contents, tmp_path):
    good = contents[1][contents[0].kernels[0].library_name]
    wrong = [b"no library", Path(_ctypes.__file__).read_bytes(), with_tag(good, 29)]
    wrong += [good.replace(b"__tvm_ffi_launch\0", b"__tvm_ffi_launcH\0"), good[:4000]]
    paths = [
        write_one(tmp_path / f"{i}{folder}", contents, data, folder=folder)
        for i, data in enumerate(wrong)
        for folder in (0, 1)
    ]
    container.write(tmp_path / "no manifest", {})
    container.write(tmp_path / "wrong", {"manifest.json": b"{}"}, folder=True)
    write_one(tmp_path / "folder", contents, folder=True)
    (tmp_path / "folder" / "more").write_bytes(b"")
    code, out = probe("leak", *paths, tmp_path / "no manifest", tmp_path / "wrong", tmp_path / "folder", "/nowhere")
    assert (code, out.splitlines()[-1]) == (0, "0 more")


def test_libraries_after_a_failed_one_are_their_own(probe, contents, tmp_path):
    """The dynamic linker knows libraries by their names: no two may have one."""
    good = contents[1][contents[0].kernels[0].library_name]
    no_kernel = good.replace(b"__tvm_ffi_launch\0", b"__tvm_ffi_launcH\0")
    variants = [no_kernel, good, no_kernel.replace(b"mapped\0", b"second\0"), good.replace(b"mapped\0", b"fourth\0")]
    paths = [write_one(tmp_path / str(i), contents, data) for i, data in enumerate(variants)]
    code, out = probe("apart", *paths, *paths[1::2])
    lines = [line if "cannot be loaded" not in line else "refused" for line in out.splitlines()]
    size = "123145"
    assert (code, lines) == (0, ["mapped", "refused", "mapped", size, "second", "refused", "fourth", *[size] * 3])


def test_where_memory_cannot_be_executed_a_private_file_stands_in(probe, contents, tmp_path, monkeypatch):
    good = contents[1][contents[0].kernels[0].library_name]
    paths = [write_one(tmp_path / "good", contents)]
    paths.append(write_one(tmp_path / "bad", contents, good.replace(b"__tvm_ffi_launch\0", b"__tvm_ffi_launcH\0")))
    paths.append(write_one(tmp_path / "other", contents, good.replace(b"mapped\0", b"second\0")))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    code, out = probe("apart", *paths, program="probe_bare")
    lines = [line if "cannot be loaded" not in line else "refused" for line in out.splitlines()]
    assert (code, lines) == (0, ["mapped", "123145", "mapped", "refused", "second", "123145"])
    assert probe("leak", paths[1], program="probe_bare")[1].endswith("0 more\n")
    assert list((tmp_path / "temporary").iterdir()) == []
    monkeypatch.setenv("TMPDIR", str(tmp_path / "nowhere"))
    code, out = probe("load", paths[0], "", program="probe_bare")
    assert code == 1
    assert out.startswith(f"LoadError: {tmp_path}/nowhere/cutlass_ops.")
    assert "cannot be made: No such file" in out


@pytest.mark.parametrize("name", ["manifest.json", "manifest.sig", f"kernels/{'a' * 64}.so"])
def test_sparse_files_cost_nothing(probe, contents, tmp_path, name):
    path = tmp_path / "made"
    write_bundle(path, *contents, folder=True)
    for size, said in ((1 << 32, "at most 67108864 are allowed"), (4 << 20 | 1, "")):
        with (path / name).open("ab") as file:
            file.truncate(size)
        code, out = probe("list", path, memory=ENOUGH)
        # A signature that nobody asks for may have any length.
        assert code == (0 if name == "manifest.sig" and not said else 1)
        assert said in out


@pytest.mark.parametrize("value", ["{}", "[]", "[[]]", "0", '""', '{"choices":[],"kernels":[]}', '["x",[],null]'])
@pytest.mark.parametrize("place", ["signatures", "tables", "flags"])
def test_a_large_manifest_costs_little_more_than_its_bytes(probe, tmp_path, contents, value, place):
    text = contents[0].to_bytes().decode()
    many = ",".join([value] * (4_000_000 // (len(value) + 1)))
    text = re.sub(rf'"{place}":[\[{{]', lambda m: m[0] + many + ",", text, count=1)
    container.write(tmp_path / "a", {"manifest.json": text.encode()})
    code, out = probe("list", tmp_path / "a", memory=ENOUGH)
    assert code == 1
    assert "BundleError: " in out
    assert "the manifest is wrong: at byte " in out


def test_memory_that_is_not_there_is_an_error(probe, contents, tmp_path):
    good = contents[1][contents[0].kernels[0].library_name]
    path = write_one(tmp_path / "large", contents, good + bytes((60 << 20) - len(good)))
    assert probe("starve", path, 400)[1].splitlines()[-1].startswith("loaded")
    for megabytes in (40, 20, 5, 1):
        assert probe("starve", path, megabytes) == (1, "Error: out of memory\n")
