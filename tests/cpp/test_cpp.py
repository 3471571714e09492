"""The C++ interface to bundles, built by CMake and called by a small program; no GPU is needed."""

import _ctypes
import hashlib
import json
import keyword
import os
import random
import re
import struct
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from bundles import changed, write_keys
from cryptography.hazmat.primitives.asymmetric import ed448, ed25519

from cutlass_ops._version import TEMPLATE_VERSION
from cutlass_ops.artifacts import container, manifest
from cutlass_ops.artifacts.bundle import open_bundle, write_bundle
from cutlass_ops.artifacts.loader import ABI, Reason
from cutlass_ops.artifacts.manifest import File, sealed
from cutlass_ops.base import arch
from cutlass_ops.base.errors import BundleError
from cutlass_ops.epilogue import graph, names, operations
from cutlass_ops.ship import packing, shipping
from tests import cmake
from tests.faults.fuzz import seeds

# To build the program takes fifteen seconds.
pytestmark = pytest.mark.slow

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def keys(contents):
    """Keys of the first signature's kernels."""
    return {record.spec.config: record.key for record in contents[0].groups[0].kernels}


@pytest.fixture(params=[False, True], ids=["archive", "folder"])
def bundle(request, contents, tmp_path):
    path = tmp_path / "made.bundle"
    write_bundle(path, *contents, folder=request.param)
    return path


@pytest.fixture
def single(contents, tmp_path):
    """Archive with one kernel."""
    return _write(tmp_path / "single.bundle", contents)


def _write(path, contents, data=None, **options):
    """Write a bundle with the first kernel alone, and another library for it."""
    found, files = contents
    group = found.groups[0]
    record = group.kernels[0]
    if data is not None:
        record = replace(record, library=_file(data))
    found = replace(found, groups=(replace(group, kernels=(record,), choices=()),), tables=())
    found = replace(found, flags={"sm_90a": found.flags["sm_90a"]})
    chosen = {name: files[name] for name in found.files} | ({record.library_name: data} if data is not None else {})
    write_bundle(path, found, chosen, **options)
    return path


def _file(data):
    return File(hashlib.sha256(data).hexdigest(), len(data))


def test_sha256_of_every_length_around_blocks(probe, tmp_path):
    data = random.Random(0).randbytes(200)
    (tmp_path / "data").write_bytes(data)
    code, out = probe("hash", tmp_path / "data")
    assert code == 0
    assert out.split() == [hashlib.sha256(data[:size]).hexdigest() for size in range(201)]


PLACED = (
    "where(logical_and(le(sub(column_index, 3), row_index), logical_not(isnan(acc))), pow(acc, lambda_), "
    "uniform(seed, -9223372036854775808))"
)


def test_it_lists_what_is_there(probe, bundle, keys, contents):
    code, out = probe("list", bundle)
    assert code == 0
    assert out.splitlines() == [
        "d = relu(add(mul(acc, scale), bias)); top = max for each col of relu(add(mul(acc, scale), bias))",
        "a bf16.row",
        "b bf16.col",
        "out f16.row",
        "bias f32.row.align1",
        "scale f32.row.align1",
        "top f32.row.align1",
        *(f"{key} {config.default_target}" for config, key in keys.items()),
        "d = mul(sub(add(mul(swap_pairs(mul(acc, silu(gate))), 0x1.0000000000000p-2), cast(tile, bf16)), column), "
        "rsqrt(add(mean_square_of_a, 0x1.4f8b580000000p-17))); total = sum for each row of sub(add(mul("
        "swap_pairs(mul(acc, silu(gate))), 0x1.0000000000000p-2), cast(tile, bf16)), column)",
        "a f16.row.align2",
        "b f16.col",
        "out f32.row",
        "gate f16.col",
        "column f32.row.align1",
        "tile f32.row",
        "total f32.row.align1",
        *(f"{record.key} {record.spec.target}" for record in contents[0].groups[1].kernels),
        f"d = {PLACED}; at = argmax for each col of to_float(gt({PLACED}, 0x1.0000000000000p-1))",
        "a f16.row",
        "b f16.col",
        "out f16.row",
        "lambda_ f16.row",
        "seed i64.row.align1",
        "at i32.row.align1",
        *(f"{record.key} {record.spec.target}" for record in contents[0].groups[2].kernels),
        "d = acc",
        "a e4m3.row.blocks1x128",
        "b e5m2.col.blocks128x128",
        "out bf16.row",
        "scale_a f32.row.align1",
        "scale_b f32.row.align1",
        *(f"{record.key} {record.spec.target}" for record in contents[0].groups[3].kernels),
    ]


def test_choices_and_orders_are_python_s(probe, bundle, keys):
    signature = open_bundle(bundle).manifest.groups[0].signature
    rows = [1, 15, 16, 17, 64, 65, 512, 513, 1024, 1025, 10**6]
    for capability, n, k in (((9, 0), 256, 512), ((9, 0), 512, 256), ((8, 0), 256, 512)):
        choice = open_bundle(bundle).choice(signature, capability, n, k)
        wanted = [(keys[chosen.config], *chosen.order.numbers) for chosen in map(choice.at, rows)]
        code, out = probe("choose", bundle, *capability, n, k, *rows)
        assert code == 0
        assert [tuple(line.split()) for line in out.splitlines()] == [tuple(map(str, row)) for row in wanted]


def test_a_weight_that_was_not_named_and_a_device_without_kernels_are_said(probe, bundle):
    code, out = probe("choose", bundle, 9, 0, 1024, 512, 16)
    assert code == 1
    assert out.startswith("LoadError: the bundle's catalogue does not name the weight 1024x512 (N x K)")
    assert "it names 256x512 512x256." in out
    code, out = probe("choose", bundle, 8, 9, 256, 512, 16)
    assert code == 1
    assert "has no kernel of d = relu(add(mul(acc, scale), bias))" in out
    assert "for compute capability 8.9" in out


def test_signatures_are_found_by_epilogue_and_types(probe, bundle, keys):
    epilogue = "d = relu(add(mul(acc, scale), bias)); top = max for each col of relu(add(mul(acc, scale), bias))"
    key = next(iter(keys.values()))
    assert probe("find", bundle, epilogue, "bf16.row", "bf16.col") == (0, f"{key}\n")
    for words in (["d = relu(acc)"], [epilogue, "f16.row"]):
        code, out = probe("find", bundle, *words)
        assert code == 1
        assert out.startswith(f"LoadError: bundle {bundle} has no signature {words[0]}")
        assert f"\n  {epilogue} with a bf16.row, b bf16.col, out f16.row, bias f32.row.align1, scale" in out


def test_a_kernel_is_mapped_once(probe, bundle, keys):
    key = next(iter(keys.values()))
    assert probe("load", bundle, key[:9], key) == (0, "mapped\n" + 2 * "loaded, workspace 12345\n")


@pytest.mark.parametrize(("key", "found"), [("x", "no kernel"), ("", "8 kernels")])
def test_a_key_that_names_no_kernel_is_said(probe, bundle, key, found):
    code, out = probe("load", bundle, key)
    assert (code, out.splitlines()) == (
        1,
        [
            f'LoadError: bundle {bundle} has {found} whose key begins with "{key}": `cutlass-ops list --bundle` shows '
            "what is there"
        ],
    )


def _flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_changed_library_is_refused_before_it_is_mapped(probe, bundle, contents, keys):
    key = next(iter(keys.values()))
    name = f"kernels/{key}.so"
    if bundle.is_dir():
        _flip(bundle / name, -1)
    else:
        data = bundle.read_bytes()
        _flip(bundle, data.index(contents[1][name], data.index(name.encode())))
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
        path = _write(tmp_path / str(number), contents, data)
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
    path = _write(tmp_path / "small", contents, b"x")
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


def test_tables_and_limits_are_python_s(probe):
    """What stands in C++ a second time."""
    code, out = probe("tables")
    assert code == 0
    found = {line.split()[0]: line.split()[1:] for line in out.splitlines()}
    assert found["versions"] == [str(ABI), str(TEMPLATE_VERSION), manifest.FORMAT]
    leaves = dict.fromkeys(graph._LEAVES, ((), operations.Type.FLOAT))
    leaves |= dict.fromkeys(("integer", *operations.INDICES), ((), operations.Type.INDEX))
    leaves |= {"seed": ((), operations.Type.SEED)}
    ways = {name: (0, (way,)) for name, way in leaves.items()}
    ways |= {name: (info.arity, info.signatures) for name, info in operations.OPS.items()}
    assert sorted(found["ops"]) == sorted(
        f"{name}:{arity}:{','.join(''.join(t.value[0] for t in (*takes, gives)) for takes, gives in all_of_it)}"
        for name, (arity, all_of_it) in ways.items()
    )
    results = {name: info.result for name, info in operations.REDUCTIONS.items()}
    assert found["reductions"] == [n if t == "f32" else f"{n}:{t}" for n, t in results.items()]
    assert found["kinds"] == [kind.value for kind in graph.Kind]
    assert set(found["opcodes"]) == set(arch.OPCODES.values())
    targets = (f"{t.name}:{t.capability[0]}.{t.capability[1]}{':wgmma' * t.wgmma}" for t in arch.TARGETS.values())
    assert found["targets"] == list(targets)
    assert set(found["reserved"]) == {*keyword.kwlist, *names.RESERVED}
    m = manifest
    limits = [
        container.MAX_FILE,
        m.MAX_BYTES,
        m._MAX_KERNELS,
        m._MAX_CHOICES,
        m._MAX_ROWS,
        m._MAX_TABLES,
        m._MAX_FUNCTIONS,
    ]
    limits += [
        m.MOST_EXTENT,
        graph.MAX_INPUTS,
        graph.MAX_OUTPUTS,
        graph.MAX_NODES,
        graph.MAX_PRODUCTS,
        names.MAX_LENGTH,
    ]
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


# ---- Bounds --------------------------------------------------------------------------------------------------------

ENOUGH = 600 << 20  # bytes of address space, most of which the program's libraries take


def test_failed_loads_leave_no_descriptor(probe, contents, tmp_path):
    good = contents[1][contents[0].kernels[0].library_name]
    wrong = [b"no library", Path(_ctypes.__file__).read_bytes(), _with_tag(good, 29)]
    wrong += [good.replace(b"__tvm_ffi_launch\0", b"__tvm_ffi_launcH\0"), good[:4000]]
    paths = [
        _write(tmp_path / f"{i}{folder}", contents, data, folder=folder)
        for i, data in enumerate(wrong)
        for folder in (0, 1)
    ]
    container.write(tmp_path / "no manifest", {})
    container.write(tmp_path / "wrong", {"manifest.json": b"{}"}, folder=True)
    _write(tmp_path / "folder", contents, folder=True)
    (tmp_path / "folder" / "more").write_bytes(b"")
    code, out = probe("leak", *paths, tmp_path / "no manifest", tmp_path / "wrong", tmp_path / "folder", "/nowhere")
    assert (code, out.splitlines()[-1]) == (0, "0 more")


def test_libraries_after_a_failed_one_are_their_own(probe, contents, tmp_path):
    """The dynamic linker knows libraries by their names: no two may have one."""
    good = contents[1][contents[0].kernels[0].library_name]
    no_kernel = good.replace(b"__tvm_ffi_launch\0", b"__tvm_ffi_launcH\0")
    variants = [no_kernel, good, no_kernel.replace(b"mapped\0", b"second\0"), good.replace(b"mapped\0", b"fourth\0")]
    paths = [_write(tmp_path / str(i), contents, data) for i, data in enumerate(variants)]
    code, out = probe("apart", *paths, *paths[1::2])
    lines = [line if "cannot be loaded" not in line else "refused" for line in out.splitlines()]
    assert (code, lines) == (0, ["mapped", "refused", "mapped", "12345", "second", "refused", "fourth", *["12345"] * 3])


def test_where_memory_cannot_be_executed_a_private_file_stands_in(probe, contents, tmp_path, monkeypatch):
    good = contents[1][contents[0].kernels[0].library_name]
    paths = [_write(tmp_path / "good", contents)]
    paths.append(_write(tmp_path / "bad", contents, good.replace(b"__tvm_ffi_launch\0", b"__tvm_ffi_launcH\0")))
    paths.append(_write(tmp_path / "other", contents, good.replace(b"mapped\0", b"second\0")))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    code, out = probe("apart", *paths, program="probe_bare")
    lines = [line if "cannot be loaded" not in line else "refused" for line in out.splitlines()]
    assert (code, lines) == (0, ["mapped", "12345", "mapped", "refused", "second", "12345"])
    assert probe("leak", paths[1], program="probe_bare")[1].endswith("0 more\n")
    assert list((tmp_path / "temporary").iterdir()) == []
    monkeypatch.setenv("TMPDIR", str(tmp_path / "nowhere"))
    code, out = probe("load", paths[0], "", program="probe_bare")
    assert code == 1
    assert out.startswith(f"LoadError: {tmp_path}/nowhere/cutlass_ops.")
    assert "cannot be made: No such file" in out


@pytest.mark.parametrize("length", [20_000 * 146 + 1, 0xF0000000])
def test_a_sparse_archive_costs_nothing(probe, tmp_path, length):
    path = tmp_path / "sparse"
    size = 0xFFFFFFFF
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 20_000, 20_000, length, size - 22 - length, 0)
    with path.open("wb") as file:
        file.truncate(size - len(end))
        file.seek(0, os.SEEK_END)
        file.write(end)
    code, out = probe("list", path, memory=ENOUGH)
    assert code == 1
    assert "is not a bundle of cutlass_ops" in out


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
    path = _write(tmp_path / "large", contents, good + bytes((60 << 20) - len(good)))
    assert probe("starve", path, 400)[1].splitlines()[-1].startswith("loaded")
    for megabytes in (40, 20, 5, 1):
        assert probe("starve", path, megabytes) == (1, "Error: out of memory\n")


def test_a_name_with_a_zero_byte_is_refused(probe, single):
    code, out = probe("zero", single)
    assert code == 1
    assert re.fullmatch(r"BundleError: '.*\?x' cannot be read: its name has a zero byte\n", out)


# ---- What libraries ask of the dynamic linker ------------------------------------------------------------------------


def _with_tag(library, tag, value=1):
    """A library with one tag more in its dynamic section, of the spare ones that the linker leaves."""
    (table,) = struct.unpack_from("<Q", library, 0x20)
    (count,) = struct.unpack_from("<H", library, 0x38)
    (part,) = (p for i in range(count) if (p := struct.unpack_from("<IIQQQQQQ", library, table + 56 * i))[0] == 2)
    at = next(at for at in range(part[2], part[2] + part[5], 16) if struct.unpack_from("<q", library, at)[0] == 0)
    assert at + 32 <= part[2] + part[5], "the linker left no spare tag"
    return library[:at] + struct.pack("<qQ", tag, value) + library[at + 16 :]


@pytest.mark.parametrize(
    ("tag", "name"),
    [
        (15, "DT_RPATH"),
        (29, "DT_RUNPATH"),
        (0x6FFFFEFC, "DT_AUDIT"),
        (0x6FFFFEFB, "DT_DEPAUDIT"),
        (0x7FFFFFFD, "DT_AUXILIARY"),
        (0x7FFFFFFF, "DT_FILTER"),
    ],
)
def test_a_kernel_with_a_path_of_its_own_is_refused_before_it_is_mapped(probe, contents, tmp_path, tag, name):
    library = _with_tag(contents[1][contents[0].kernels[0].library_name], tag)
    code, out = probe("load", _write(tmp_path / "a", contents, library), "")
    assert code == 1
    assert "mapped" not in out
    assert out.startswith(f"LoadError: bundle {tmp_path / 'a'}: kernels/")
    assert f"cannot be loaded: it has {name}" in out


def test_a_real_run_path_is_refused(probe, built, contents, tmp_path):
    """As CMake gives it to what it builds."""
    library = (built / "with_run_path.so").read_bytes()
    code, out = probe("load", _write(tmp_path / "a", contents, library), "")
    assert code == 1
    assert re.search("it has DT_R(UN)?PATH", out)


@pytest.mark.parametrize(
    ("name", "good"),
    [
        ("libcudart.so.13", True),
        ("libtvm_ffi.so", True),
        ("libstdc++.so.6", True),
        ("libcudart.so.13/../../tmp/x", False),
        ("libcudart.so.$ORIGIN", False),
        ("libcudart.so.", False),
        ("/tmp/libcudart.so.13", False),
        ("libtvm_ffi.so.1", False),
        ("libevil.so", False),
        ("x" * 1000, False),
        ("", False),
    ],
)
def test_a_kernel_needs_what_kernels_need(probe, tmp_path, name, good):
    (tmp_path / "a").write_bytes(seeds.shared((1, name)))
    out = probe("linkage", tmp_path / "a")[1]
    assert (out == "\n") == good
    if not good:
        assert out.startswith("it needs ")
        assert len(out) < 200


def test_no_changed_byte_and_no_end_of_a_library_upsets_it(probe, tmp_path):
    """Whatever the headers say: a reason, or none, and nothing beyond the file is read (the fuzzer has sanitizers)."""
    rng = random.Random(3)
    good = seeds.shared((1, "libcudart.so.13"), (14, "kernel.so"))
    wrong = [good[:size] for size in range(len(good))]
    for _ in range(600):
        data, at = bytearray(good), rng.randrange(len(good))
        data[at : at + 8] = rng.choice(
            [b"\xff" * 8, bytes(8), b"\0" * 7 + b"\x80", rng.randbytes(8), b"\xff" * 7 + b"\x7f"]
        )
        wrong.append(bytes(data[: len(good)]))
    for number, data in enumerate([good, *wrong]):
        (tmp_path / str(number)).write_bytes(data)
    code, out = probe("linkage", *(tmp_path / str(number) for number in range(1 + len(wrong))))
    reasons = out.split("\n")[:-1]
    assert (code, len(reasons), reasons[0]) == (0, 1 + len(wrong), "")
    assert all(reasons[1 : 1 + len(good) - 1])  # what is cut off is refused, but for the last zero


# ---- Signatures ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def keys_of(tmp_path_factory):
    """Private and public PEM files of two Ed25519 keys and of one of another kind."""
    folder = tmp_path_factory.mktemp("keys")
    kinds = {"own": ed25519.Ed25519PrivateKey, "other": ed25519.Ed25519PrivateKey, "ed448": ed448.Ed448PrivateKey}
    return {name: write_keys(folder, name, kind.generate()) for name, kind in kinds.items()}


@pytest.fixture
def checks(probe, single):
    """Skip where the program was built without OpenSSL: AUTO takes it where it is."""
    if "built without signatures" in probe("signed", single, "x")[1]:
        pytest.skip("no OpenSSL with headers (libssl-dev) here: signatures are not checked in C++")


@pytest.fixture(params=[False, True], ids=["archive", "folder"])
def signed(request, contents, tmp_path, keys_of):
    return _write(tmp_path / "signed", contents, folder=request.param, private_key=keys_of["own"][0])


def test_a_signature_is_checked_as_python_does(checks, probe, signed, keys_of):
    own, other = keys_of["own"][1], keys_of["other"][1]
    open_bundle(signed, own)
    for given in ([own], [own, other], [other, own]):
        assert probe("signed", signed, *given) == (0, "signed\n")
    with pytest.raises(BundleError, match="the signature is not from the key in"):
        open_bundle(signed, other)
    code, out = probe("signed", signed, other)
    assert code == 1
    assert out.startswith(
        f"BundleError: bundle {signed}: the signature is not from the key in {other}, or the manifest was"
    )


def test_an_unsigned_bundle_and_a_changed_one_are_refused(checks, probe, contents, tmp_path, keys_of, single):
    private, public = keys_of["own"]
    assert "it is not signed: it has no manifest.sig" in probe("signed", single, public)[1]
    path = _write(tmp_path / "a", contents, folder=True, private_key=private)
    text = (path / "manifest.json").read_bytes()
    # A change of the manifest whose own digest is right again, of which only the signature knows.
    data = json.loads(text)
    del data["sha256"]
    data["toolchain"]["nvcc"] = "13.0.89"
    (path / "manifest.json").write_bytes(sealed(data))
    assert probe("list", path)[0] == 0
    assert "the signature is not from the key in" in probe("signed", path, public)[1]
    (path / "manifest.json").write_bytes(text)
    for signature in (b"", bytes(63), bytes(64), bytes(65), bytes(1 << 20)):
        (path / "manifest.sig").write_bytes(signature)
        code, out = probe("signed", path, public)
        assert code == 1
        assert "BundleError: " in out


def test_what_is_no_key_is_an_error_whichever_signed(checks, probe, signed, keys_of, tmp_path):
    private, public = keys_of["own"]
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "text").write_bytes(b"-----BEGIN PUBLIC KEY-----\nnonsense\n-----END PUBLIC KEY-----\n")
    (tmp_path / "large").write_bytes(public.read_bytes() + bytes(1 << 17))
    (tmp_path / "loose").write_bytes(public.read_bytes())
    (tmp_path / "loose").chmod(0o666)
    for wrong, said in {
        "": "ArgumentError: a path of a public key is empty: name a PEM file",
        private: "has no usable public key",
        keys_of["ed448"][1]: "must be an Ed25519 key in PEM",
        tmp_path / "empty": "has no usable public key",
        tmp_path / "text": "has no usable public key",
        tmp_path / "large": "at most 65536 are allowed",
        tmp_path / "loose": "can be written by others",
        tmp_path / "none": "cannot be read: No such file",
        "/dev/zero": "is not a regular file",
    }.items():
        for given in ([wrong], [public, wrong], [wrong, public]):
            code, out = probe("signed", signed, *given)
            assert code == 1, wrong
            assert said in out


def test_a_key_with_a_password_is_not_asked_for(checks, probe, signed, tmp_path):
    text = (
        "-----BEGIN PUBLIC KEY-----\nProc-Type: 4,ENCRYPTED\nDEK-Info: AES-128-CBC,00112233445566778899AABBCCDDEEFF\n\n"
    )
    (tmp_path / "key").write_text(text + "AAAAAAAAAAAAAAAAAAAAAA==\n-----END PUBLIC KEY-----\n")
    code, out = probe("signed", signed, tmp_path / "key")
    assert code == 1
    assert "has no usable public key" in out


def test_without_openssl_a_key_that_is_given_opens_nothing(probe, signed, keys_of):
    assert probe("list", signed, program="probe_bare")[0] == 0
    for given in ([keys_of["own"][1]], [""]):
        code, out = probe("signed", signed, *given, program="probe_bare")
        assert code == 1
        assert "Error: " in out
        assert "this program was built without signatures: install OpenSSL's headers (libssl-dev)" in out


@pytest.mark.parametrize(
    ("option", "said"),
    [("ON", "CUTLASS_OPS_SIGNATURES is ON, and there is no OpenSSL"), ("maybe", "is maybe: use AUTO, ON or OFF")],
)
def test_what_cannot_be_built_is_said(tmp_path, option, said):
    with pytest.raises(AssertionError, match="CUTLASS_OPS_SIGNATURES") as raised:
        cmake.build(HERE, tmp_path, f"-DCUTLASS_OPS_SIGNATURES={option}", "-DCMAKE_DISABLE_FIND_PACKAGE_OpenSSL=ON")
    assert said in " ".join(str(raised.value).split())


# ---- Launches --------------------------------------------------------------------------------------------------------


def test_a_launch_passes_everything_on_the_caller_s_stream(probe, single):
    code, out = probe("launch", single, 0, 3, 512)
    assert code == 0
    assert out.splitlines() == [
        "mapped",
        "tensor code 4 bits 16 device 2:1 shape 16 32 strides 40 1",
        "tensor code 4 bits 16 device 2:1 shape 32 64 strides 1 48",
        "tensor code 2 bits 16 device 2:1 shape 16 64 strides 64 1",
        "tensor code 2 bits 32 device 2:1 shape 64 strides 1",
        "float 0.5",
        "tensor code 2 bits 32 device 2:1 shape 16 strides 1",
        "integer 0",
        "integer 3",
        "tensor code 1 bits 8 device 2:1 shape 512 strides 1",
        "stream 0x9",
        "stream after it 0x7",
    ]
    assert "none 1\nstream 0x9\n" in probe("launch", single, 0, 3, 0)[1]


@pytest.mark.parametrize(
    ("position", "reason", "said"),
    [
        (1, Reason.KIND, "b must be a tensor of bf16; it is bf16, shape (32, 64), strides (1, 48), on device 1."),
        (1, Reason.SHAPE, "b has a shape that disagrees with the other arguments;"),
        (2, Reason.DTYPE, "out must have elements of type f16; it is f16, shape (16, 64)"),
        (3, Reason.DEVICE, "bias must be on the same CUDA device as a;"),
        (0, Reason.MAJOR, "a must be row-major: contiguous along the last dimension;"),
        (1, Reason.MAJOR, "b must be col-major: contiguous along the first dimension;"),
        (2, Reason.ALIGNMENT, "out must be aligned to 16 bytes in address, leading dimension and extent;"),
        (3, Reason.ALIGNMENT, "bias must be aligned to 4 bytes"),
        (5, Reason.OVERLAP, "top shares memory with another argument;"),
        (4, Reason.KIND, "scale must be a tensor of f32; it is the number 0.5"),
        (8, Reason.WORKSPACE, "the workspace is too small"),
        (9, Reason.COUNT, "argument 9 was refused (9)"),
        (0, Reason.NULL, "a has no memory: its address is null; it is bf16, shape (16, 32)"),
        (8, Reason.NULL, "the workspace is too small, not aligned to 256 bytes, or null"),
    ],
)
def test_refusals_are_put_into_words(probe, single, keys, position, reason, said):
    code, out = probe("launch", single, 16 * position + reason, 1, 0)
    last = out.splitlines()[-1]
    assert code == 1
    assert last.startswith(f"ArgumentError: {said}")
    assert last.endswith(f"for sm_90a, {next(iter(keys.values()))[:12]}")


def test_every_reason_has_words():
    (cases,) = test_refusals_are_put_into_words.pytestmark
    assert {reason for _, reason, _ in cases.args[1]} == set(Reason)


def test_a_failure_of_cuda_is_an_error_and_the_stream_is_put_back(probe, single):
    code, out = probe("launch", single, 0, 0, 0)
    assert code == 1
    assert out.splitlines()[-2:] == ["stream after it 0x7", "LaunchError: launch failed: out of memory"]


@pytest.mark.compile
def test_a_real_kernel_refuses_in_words(probe, tmp_path):
    catalogue = shipping.load(str(HERE.parents[1] / "examples" / "cpp" / "catalogue.toml"))
    packing.pack(catalogue).write(tmp_path / "kernels.bundle")
    for how, said in {
        "shape": "b has a shape that disagrees",
        "dtype": "bias must have elements of type bf16; it is f32, shape (128)",
        "kind": "bias must be a tensor of bf16; it is the number 0.5",
        "number": "a must be a tensor; it is the number 0.5",
        "device": "bias must be on the same CUDA device as a",
        "major": "a must be row-major",
        "alignment": "out must be aligned to 16 bytes",
        "overlap": "out shares memory with another argument",
        "count": "d = relu(add(acc, bias)) with a bf16.row, b bf16.col, out bf16.row, bias bf16.row.align1 for sm_90a",
    }.items():
        code, out = probe("refuse", tmp_path / "kernels.bundle", how)
        assert code == 1, how
        assert out.startswith(f"ArgumentError: {said}"), how
