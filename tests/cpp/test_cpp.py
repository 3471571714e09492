"""The C++ interface to bundles, built by CMake and called by a small program; no GPU is needed."""

import _ctypes
import hashlib
import json
import os
import random
import resource
import struct
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from bundles import write_keys
from cryptography.hazmat.primitives.asymmetric import ed25519, ed448

import cutlass_ops as co
from cutlass_ops import arch, container, elf, manifest, packing, plan, shipping
from cutlass_ops._version import TEMPLATE_VERSION
from cutlass_ops.bundle import open_bundle, write_bundle
from cutlass_ops.epilogue import graph, names, ops
from cutlass_ops.loader import ABI, Reason
from cutlass_ops.manifest import File, sealed
from cutlass_ops.store import identity_key
from cutlass_ops.verifying import _LIBRARIES
from tests import cmake
from tests.faults.fuzz import seeds

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Folder of the program and the library that stands in for a kernel."""
    folder = tmp_path_factory.mktemp("built")
    cmake.build(HERE, folder, "-DCMAKE_BUILD_TYPE=")
    return folder


@pytest.fixture(scope="module")
def probe(built):
    """Call the program; return its exit code and what it wrote."""

    def _probe(*words, memory=None):
        limit = memory and (lambda: resource.setrlimit(resource.RLIMIT_AS, (memory, memory)))
        done = subprocess.run(
            [built / "probe", *map(str, words)], capture_output=True, text=True, check=False, preexec_fn=limit
        )
        assert done.returncode in (0, 1), done
        assert done.stderr == ""
        return done.returncode, done.stdout

    return _probe


@pytest.fixture(scope="module")
def contents(built):
    """Manifest and files of a bundle with the library for every kernel."""
    library = (built / "fake_kernel.so").read_bytes()
    return seeds.made(lambda _: library)


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


def test_it_lists_what_is_there(probe, bundle, keys):
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
        "d = add(EVERYTHING)",
    ]


def test_choices_and_orders_are_python_s(probe, bundle, keys):
    signature = open_bundle(bundle).manifest.groups[0].signature
    rows = [1, 15, 16, 17, 64, 65, 512, 513, 1024, 1025, 10**6]
    for capability, n, k in (((9, 0), 256, 512), ((9, 0), 512, 256), ((8, 0), 256, 512)):
        choice = open_bundle(bundle).choice(signature, capability, n, k)
        wanted = [(keys[config.binary()], *plan.order(config)) for config in map(choice.at, rows)]
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


def test_signatures_are_found_by_epilogue_and_types(probe, bundle):
    assert probe("find", bundle, "d = acc", "f16.row", "f16.row") == (0, f"{OTHER}\n")
    for words in (["d = relu(acc)"], ["d = acc", "bf16.row"]):
        code, out = probe("find", bundle, *words)
        assert code == 1
        assert out.startswith(f"LoadError: bundle {bundle} has no signature {words[0]}")
        assert "\n  d = acc with a f16.row, b f16.row, out f32.row\n" in out


def test_a_kernel_is_mapped_once(probe, bundle):
    assert probe("load", bundle, "a", "aa") == (0, "mapped\n" + 2 * "loaded, workspace 12345\n")


@pytest.mark.parametrize(("key", "found"), [("e", "no kernel"), ("", "5 kernels")])
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


def test_a_changed_library_is_refused_before_it_is_mapped(probe, bundle, contents):
    name = f"kernels/{'a' * 64}.so"
    if bundle.is_dir():
        _flip(bundle / name, -1)
    else:
        library = contents[1][name]
        at = bundle.read_bytes().index(library)
        _flip(bundle, at + len(library) - 1)
    assert probe("load", bundle, "a") == (
        1,
        f"BundleError: bundle {bundle}: {name} is not what the manifest says: its SHA-256 is another\n",
    )


def test_what_is_no_kernel_is_an_error(probe, contents, tmp_path):
    manifest, files = contents
    foreign = Path(_ctypes.__file__).read_bytes()  # a library, without a kernel's exports
    for data in (b"no library", foreign):
        group = manifest.groups[0]
        kernels = tuple(replace(kernel, library=_file(data)) for kernel in group.kernels)
        changed = replace(manifest, groups=(replace(group, kernels=kernels), manifest.groups[1]))
        write_bundle(tmp_path / "a", changed, files | {kernel.library_name: data for kernel in kernels})
        code, out = probe("load", tmp_path / "a", "a")
        assert code == 1
        assert out.startswith("LoadError: d = relu(")
        assert "cannot be loaded: " in out
        assert "its CUDA runtime is libcudart.so.13" in out


def test_a_longer_or_missing_library_is_refused(probe, contents, tmp_path):
    path, name = tmp_path / "made", f"kernels/{'a' * 64}.so"
    write_bundle(path, *contents, folder=True)
    with (path / name).open("ab") as file:
        file.write(b"\0")
    assert "is not what the manifest says" in probe("load", path, "a")[1]
    (path / name).unlink()
    assert f"BundleError: {path / name} cannot be read: No such file" in probe("load", path, "a")[1]


def test_every_changed_byte_of_a_small_archive_is_seen(probe, tmp_path, contents):
    manifest = contents[0]
    path = tmp_path / "small"
    container.write(path, {"manifest.json": manifest.to_bytes()})
    assert probe("list", path)[0] == 0
    size = path.stat().st_size
    # In ZIP's directory every one, in front of the manifest and in it some: each is a process.
    own = size - len(manifest.to_bytes())
    places = [*range(0, 30 + 13, 3), *range(size - own + 43, size), *random.Random(1).sample(range(43, size - own), 40)]
    for at in places:
        _flip(path, at)
        code, out = probe("list", path)
        assert code == 1, at
        assert out.startswith("BundleError: "), at
        _flip(path, at)
    assert probe("list", path)[0] == 0


def test_truncated_and_foreign_files_are_refused(probe, single):
    data = single.read_bytes()
    for cut in (data[:-1], data[:100], b"", data + b"\0", data[1:], b"PK\5\6" + bytes(18) + b"x"):
        single.write_bytes(cut)
        code, out = probe("list", single)
        assert code == 1
        assert "is no bundle as cutlass_ops writes it" in out
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
    for name in ("manifest.json", "kernels"):
        (bundle / name).rename(bundle.parent / name)
        (bundle / name).symlink_to(bundle.parent / name)
        assert "cannot be read" in probe("load", bundle, "a")[1]
        (bundle / name).unlink()
        (bundle.parent / name).rename(bundle / name)
    (bundle / "kernels").chmod(0o775)
    assert f"{bundle / 'kernels'} can be written by others" in probe("load", bundle, "a")[1]


def test_a_program_can_be_tied_to_one_bundle(probe, bundle, contents):
    digest = hashlib.sha256(contents[0].to_bytes()).hexdigest()
    assert probe("list", bundle, digest)[0] == 0
    code, out = probe("list", bundle, "0" * 64)
    assert code == 1
    assert f"another bundle than asked for: the SHA-256 of its manifest is {digest}, not {'0' * 64}" in out


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": "cutlass_ops.bundle/2"}, 'its format is "cutlass_ops.bundle/2"'),
        ({"abi": ABI + 1}, f"(ABI {ABI + 1}), and this program calls kernels of ABI {ABI}"),
        ({"signatures": 3}, "signatures has another type"),
        ({"signatures": [{}]}, "there is no signature"),
        ({"abi": "1"}, "abi has another type"),
        ({"toolchain": []}, "toolchain has another type"),
        ({"tables": eval("[" * 40 + "]" * 40)}, "nested too deeply"),
    ],
)
def test_wrong_manifests_are_refused(probe, contents, tmp_path, change, said):
    fields = json.loads(contents[0].to_bytes()) | change
    del fields["sha256"]
    container.write(tmp_path / "a", {"manifest.json": sealed(fields)})
    code, out = probe("list", tmp_path / "a")
    assert code == 1
    assert out.startswith(f"BundleError: bundle {tmp_path / 'a'}: ")
    assert said in out


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"null", b'{"format":1}', b"\xff\0"])
def test_what_is_no_manifest_is_refused(probe, tmp_path, text):
    container.write(tmp_path / "a", {"manifest.json": text})
    code, out = probe("list", tmp_path / "a")
    assert code == 1
    assert "the manifest is wrong: " in out


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
    ],
)
def test_refusals_are_put_into_words(probe, single, position, reason, said):
    code, out = probe("launch", single, 16 * position + reason, 1, 0)
    last = out.splitlines()[-1]
    assert code == 1
    assert last.startswith(f"ArgumentError: {said}")
    assert last.endswith(f"for sm_90a, {'a' * 12}")


def test_every_reason_has_words():
    (cases,) = test_refusals_are_put_into_words.pytestmark
    assert {reason for _, reason, _ in cases.args[1]} == set(Reason)


def test_a_failure_of_cuda_is_an_error_and_the_stream_is_put_back(probe, single):
    code, out = probe("launch", single, 0, 0, 0)
    assert code == 1
    assert out.splitlines()[-2:] == ["stream after it 0x7", "LaunchError: launch failed: out of memory"]


@pytest.mark.compile
@pytest.mark.slow
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
