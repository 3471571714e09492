"""What is no bundle, no kernel or another version is refused, as Python refuses it."""

import _ctypes
import hashlib
import json
import os
import re
import zipfile
from pathlib import Path

import pytest
from bundles import changed

from cutlass_ops._version import TEMPLATE_VERSION
from cutlass_ops.artifacts import container, manifest
from cutlass_ops.artifacts.bundle import open_bundle, write_bundle
from cutlass_ops.artifacts.loader import ABI
from cutlass_ops.base.checked_json import sealed
from cutlass_ops.base.errors import BundleError
from cutlass_ops.epilogue import graph, names
from tests.cpp.made import flip, write_one

# To build the program takes fifteen seconds.
pytestmark = pytest.mark.slow
HERE = Path(__file__).resolve().parent


def test_a_changed_library_is_refused_before_it_is_mapped(probe, bundle, contents, keys):
    key = next(iter(keys.values()))
    name = f"kernels/{key}.so"
    if bundle.is_dir():
        flip(bundle / name, -1)
    else:
        data = bundle.read_bytes()
        flip(bundle, data.index(contents[1][name], data.index(name.encode())))
    assert probe("load", bundle, key) == (
        1,
        f"BundleError: bundle {bundle}: {name} does not match the manifest: its SHA-256 differs\n",
    )


def test_a_kernel_that_was_made_as_something_else_is_refused_as_python_does(probe, contents, tmp_path):
    manifest, files = contents
    text = changed(manifest, lambda d: d["toolchain"].update(nvcc="13.0.89"))
    container.write(tmp_path / "a", {**files, "manifest.json": text})
    kernel = open_bundle(tmp_path / "a").kernels()[0]
    with pytest.raises(BundleError, match="its key does not match its identity in the manifest"):
        kernel.read_library()
    code, out = probe("load", tmp_path / "a", kernel.key)
    assert code == 1
    assert "its key does not match its identity in the manifest" in out


def test_what_is_no_kernel_is_an_error(probe, contents, tmp_path):
    good = (contents[1])[contents[0].kernels[0].library_name]
    other = good.replace(b"__tvm_ffi_workspace_size\0", b"__tvm_ffi_workspace_sizE\0")
    assert other != good
    for number, (data, said) in enumerate(
        {
            b"no library": "cannot be loaded: it is not a shared library",
            Path(_ctypes.__file__).read_bytes(): "cannot be loaded: it ",
            other: "cannot be loaded: ",
        }.items()
    ):
        path = write_one(tmp_path / str(number), contents, data)
        code, out = probe("load", path, "")
        assert code == 1
        assert out.splitlines()[-1].startswith("LoadError: ")
        assert said in out
    assert "its CUDA runtime is libcudart.so.13" in out


def test_a_longer_or_missing_library_is_refused(probe, contents, tmp_path, keys):
    path, name = tmp_path / "made", f"kernels/{next(iter(keys.values()))}.so"
    write_bundle(path, *contents, folder=True)
    with (path / name).open("ab") as file:
        file.write(b"\0")
    assert f"BundleError: bundle {path}: {name} is of another size than the manifest says" in probe("list", path)[1]
    (path / name).unlink()
    assert f"BundleError: bundle {path}: {name} is missing" in probe("list", path)[1]


def test_every_changed_byte_of_a_small_archive_is_seen(probe, tmp_path, contents):
    path = write_one(tmp_path / "small", contents, b"x")
    good = path.read_bytes()
    entries = container.open_container(path)._entries.values()
    # What belongs to a kernel or a source is compared when that is read; so is its checksum in the directory.
    later = {at for entry in entries if entry.name != container.MANIFEST for at in range(entry.offset, entry.end)}
    at = good.index(b"PK\1\2")
    for entry in entries:
        later |= set(range(at + 16, at + 20) if entry.name != container.MANIFEST else ())
        at += len(entry.central)
    changed = [tmp_path / str(at) for at in sorted(set(range(len(good))) - later)]
    for file in changed:
        data = bytearray(good)
        data[int(file.name)] ^= 1
        file.write_bytes(data)
    code, out = probe("each", path, *changed)
    assert code == 0
    said = zip([path, *changed], out.splitlines(), strict=True)
    assert [file.name for file, line in said if line[:2] == "ok"] == ["small"]


def test_truncated_and_foreign_files_are_refused(probe, single):
    data = single.read_bytes()
    for cut in (data[:-1], data[:100], b"", data + b"\0", data[1:], b"PK\5\6" + bytes(18) + b"x"):
        single.write_bytes(cut)
        code, out = probe("list", single)
        assert code == 1
        assert "is not a bundle of cutlass_ops" in out
    assert "BundleError: bundle /nowhere cannot be read: No such file" in probe("list", "/nowhere")[1]


def test_what_others_may_write_and_links_are_refused(probe, bundle):
    bundle.chmod(0o777)
    code, out = probe("list", bundle)
    assert code == 1
    assert f"BundleError: {bundle} can be written by others" in out
    if not bundle.is_dir():
        return
    bundle.chmod(0o755)
    assert probe("list", bundle)[0] == 0
    for name, said in (("manifest.json", "is not a regular file"), ("kernels", "cannot be read")):
        (bundle / name).rename(bundle.parent / name)
        (bundle / name).symlink_to(bundle.parent / name)
        assert said in probe("list", bundle)[1]
        (bundle / name).unlink()
        (bundle.parent / name).rename(bundle / name)
    (bundle / "kernels").chmod(0o775)
    assert f"{bundle / 'kernels'} can be written by others" in probe("list", bundle)[1]


@pytest.mark.parametrize(
    "name", ["more.txt", "kernels/x", f"kernels/{'d' * 64}.txt", "deep/x", f"tables/{'D' * 64}.json"]
)
def test_what_no_bundle_has_is_refused_in_a_folder(probe, contents, tmp_path, name):
    path = tmp_path / "made"
    write_bundle(path, *contents, folder=True)
    (path / name).parent.mkdir(exist_ok=True)
    (path / name).write_bytes(b"")
    code, out = probe("list", path)
    assert code == 1
    assert "a bundle cannot have a file named" in out


def _link(path):
    path.unlink()
    path.symlink_to("/etc/passwd")


def _pipe(path):
    path.unlink()
    os.mkfifo(path)


def _folder(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("spoil", [_link, _pipe, _folder])
def test_what_is_no_file_is_refused_in_a_folder(probe, contents, tmp_path, keys, spoil):
    path = tmp_path / "made"
    write_bundle(path, *contents, folder=True)
    spoil(path / f"kernels/{next(iter(keys.values()))}.so")
    code, out = probe("list", path)
    assert code == 1
    assert "is not a regular file" in out


@pytest.mark.parametrize("kind", ["pipe", "circle", "/dev/zero"])
def test_what_cannot_be_a_bundle_at_all(probe, tmp_path, kind):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    code, out = probe("list", tmp_path / kind)
    assert code == 1
    assert re.search("is not a regular file|cannot be read", out)


NAMES = [
    "../../etc/passwd",
    "/etc/passwd",
    "kernels/../manifest.json",
    "kernels/",
    "manifest.json\0x",
    "a" * 65_000,
    "\x1b[2J",
]


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("compressed", [False, True])
def test_other_archives_are_refused(probe, contents, tmp_path, compressed):
    """With one file more, of a name that no bundle has, or twice, or compressed."""
    files = {**contents[1], "manifest.json": contents[0].to_bytes()}
    kind = zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED
    paths = []
    for number, name in enumerate([*NAMES, "manifest.json"]):
        paths.append(tmp_path / str(number))
        with zipfile.ZipFile(paths[-1], "w", kind) as archive:
            for other in sorted([*files, name]):
                entry = zipfile.ZipInfo("x", (1980, 1, 1, 0, 0, 0))
                entry.filename = other
                archive.writestr(entry, files.get(other, b""), kind)
    code, out = probe("each", *paths)
    assert code == 0
    assert out.isascii()
    assert "\x1b" not in out
    for line in out.splitlines():
        assert re.search("is not a bundle of cutlass_ops|a bundle cannot have a file named", line)
    assert len(out.splitlines()) == len(paths)


def test_too_many_files_are_refused_before_they_are_looked_at(probe, tmp_path, contents):
    files = {f"tables/{number:064x}.json": b"" for number in range(container.MAX_FILES + 1)}
    for folder in (False, True):
        path = tmp_path / f"many{folder}"
        path.mkdir() if folder else None
        if folder:
            (path / "tables").mkdir()
            for name in files:
                (path / name).touch()
        else:
            container._write_archive(path, files)
        code, out = probe("list", path)
        assert code == 1
        assert re.search(f"has more than {container.MAX_FILES} files|is not a bundle of cutlass_ops", out)


def test_a_program_can_be_tied_to_one_bundle(probe, bundle, contents):
    digest = hashlib.sha256(contents[0].to_bytes()).hexdigest()
    assert probe("list", bundle, digest)[0] == 0
    code, out = probe("list", bundle, "0" * 64)
    assert code == 1
    assert f"another bundle than asked for: the SHA-256 of its manifest is {digest}, not {'0' * 64}" in out


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": "cutlass_ops.artifacts.bundle/2"}, 'its format is "cutlass_ops.artifacts.bundle/2"'),
        (
            {"abi": ABI + 1},
            f"(ABI {ABI + 1}, templates {TEMPLATE_VERSION}), and this program calls kernels of ABI {ABI}",
        ),
        ({"templates": TEMPLATE_VERSION + 1}, f"(ABI {ABI}, templates {TEMPLATE_VERSION + 1}), and this program"),
        ({"templates": TEMPLATE_VERSION - 1}, f"(ABI {ABI}, templates {TEMPLATE_VERSION - 1}), and this program"),
        ({"signatures": 3}, "signatures, a list, is expected"),
        ({"signatures": [{}]}, "the field choices of a signature's entry is expected"),
        ({"abi": "1"}, "abi must be an integer from 1 to 65536, not something else"),
        ({"abi": 10**400}, "abi must be an integer from 1 to 65536, not 10000000000000000000..."),
        ({"abi": 1.0}, "abi must be an integer from 1 to 65536, not something else"),
        ({"toolchain": []}, "toolchain, an object, is expected"),
        ({"tables": eval("[" * 40 + "]" * 40)}, "a table, an object, is expected"),
        ({"library_version": "0.1\0"}, "library_version must be a text of printable ASCII"),
        ({"library_version": "\ud800"}, "library_version must be a text of printable ASCII"),
        ({"library_version": "x" * 101}, "library_version has more than 100 characters"),
        ({"library_version": ""}, "library_version is empty"),
        ({"more": 1}, "the field sha256 of it is expected"),
    ],
)
def test_wrong_manifests_are_refused(probe, contents, tmp_path, change, said):
    fields = json.loads(contents[0].to_bytes()) | change
    del fields["sha256"]
    container.write(tmp_path / "a", {**contents[1], "manifest.json": sealed(fields)})
    code, out = probe("list", tmp_path / "a")
    assert code == 1
    assert out.startswith(f"BundleError: bundle {tmp_path / 'a'}: ")
    assert said in out
    assert out.isascii()


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"null", b'{"format":1}', b"\xff\0", b"[" * 100_000, b"1" * 5000])
def test_what_is_no_manifest_is_refused(probe, tmp_path, text):
    container.write(tmp_path / "a", {"manifest.json": text})
    code, out = probe("list", tmp_path / "a")
    assert code == 1
    assert "the manifest is wrong: " in out


def test_versions_and_limits_are_python_s(probe):
    """Versions and limits stand in C++ a second time."""
    code, out = probe("tables")
    assert code == 0
    found = {line.split()[0]: line.split()[1:] for line in out.splitlines()}
    assert found["versions"] == [str(ABI), str(TEMPLATE_VERSION), manifest.FORMAT]
    m = manifest
    limits = [container.MAX_FILE, m.MAX_BYTES, m._MAX_KERNELS, m._MAX_CHOICES, m._MAX_ROWS, m._MAX_TABLES]
    limits += [m._MAX_FUNCTIONS, m.MOST_EXTENT, graph.MAX_INPUTS, graph.MAX_OUTPUTS, graph.MAX_NODES, names.MAX_LENGTH]
    assert found["limits"] == list(map(str, [*limits, m._MAX_NUMBER]))


def test_a_version_that_is_too_old_is_refused(probe, contents, tmp_path):
    manifest, files = contents
    for number, version in enumerate((None, 7)):
        data = changed(manifest, lambda d, v=version: d.update(version=v) if v else None)
        container.write(tmp_path / str(number), {**files, "manifest.json": data})
    assert probe("recent", tmp_path / "1", 7) == (0, "recent\n")
    assert probe("recent", tmp_path / "1", 0) == (0, "recent\n")
    assert "its version is 7, but version 8 or later is required" in probe("recent", tmp_path / "1", 8)[1]
    assert "it has no version, but version 1 or later is required" in probe("recent", tmp_path / "0", 1)[1]
    assert probe("recent", tmp_path / "0", -1)[1].startswith("ArgumentError: minimum_version")
