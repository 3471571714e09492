"""Good bundles of every kind that the format has, from which fuzzers and the comparison of both readers begin.

As a program it writes them as files: `python -m tests.faults.fuzz.seeds FOLDER`.
"""

from __future__ import annotations

import hashlib
import re
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ed25519
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from fake_toolkit import HGMMA, HMMA, QGMMA, UTMALDG, library

import cutlass_ops as co
from cutlass_ops._version import TEMPLATE_VERSION
from cutlass_ops.artifacts import container
from cutlass_ops.artifacts.entry import identity_key
from cutlass_ops.artifacts.loader import ABI
from cutlass_ops.artifacts.manifest import Choice, File, Group, KernelRecord, Manifest
from cutlass_ops.declare.config import Config, Ordered, ThreadblockShape, WarpShape
from cutlass_ops.declare.order import TileOrder
from cutlass_ops.declare.signature import OpSignature
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.epilogue import composed
from cutlass_ops.kinds.gemv.config import GemvConfig
from cutlass_ops.kinds.sm80.config import Sm80Config
from cutlass_ops.kinds.sm90.config import Sm90Config

SOURCE = b"// not compiled\n"
TABLE = b"[]"
PINGPONG = Sm90Config(threadblock=ThreadblockShape(64, 128, 64))
COOPERATIVE = Sm90Config(threadblock=ThreadblockShape(128, 128, 64), schedule="cooperative")
SPLIT = Sm90Config(
    ThreadblockShape(64, 64, 64), schedule="warp_specialized", stages=4, split_k=2, means="beside", realign=True
)
MMA_SYNC = Sm80Config(threadblock=ThreadblockShape(128, 128, 32), warp=WarpShape(64, 64, 32), stages=3)
FEW_ROWS = GemvConfig()
PROMOTED = Sm90Config(ThreadblockShape(128, 128, 128), schedule="cooperative", accumulation="promoted")
CONFIGS: tuple[Config, ...] = (PINGPONG, COOPERATIVE, MMA_SYNC, FEW_ROWS)
CHOICES = (
    Choice(
        (9, 0),
        256,
        512,
        (
            (16, Ordered(PINGPONG)),
            (64, Ordered(COOPERATIVE, TileOrder("along_n", 4))),
            (512, Ordered(COOPERATIVE, TileOrder("along_m", by_gpc=True))),
            (1024, Ordered(PINGPONG, TileOrder(swizzle=2, by_gpc=True))),
        ),
    ),
    Choice((9, 0), 512, 256, ((1, Ordered(PINGPONG)),)),
    Choice((8, 0), 256, 512, ((16, Ordered(FEW_ROWS)), (64, Ordered(MMA_SYNC, TileOrder(swizzle=8))))),
)


@co.epilogue
def several(acc, bias: co.Row, scale: co.Scalar):
    """Inputs of two kinds, and a further output."""
    value = co.relu(acc * scale + bias)
    return {"d": value, "top": co.max(value, dim=1)}


@co.epilogue
def everything(acc, gate: co.Product, column: co.Col, tile: co.Tile):
    """Constants, a cast, a pair, a mean of A's rows and a product."""
    value = co.swap_pairs(acc * co.silu(gate)) * 0.25 + co.cast(tile, "bf16") - column
    return {"d": value * co.rsqrt(co.mean_square_of_a() + 1e-5), "total": co.sum(value, dim=0)}


@co.epilogue
def placed(acc, lambda_: co.Tile, seed: co.Integer):
    """Values of every type, a name that C++ would not have, and a reduction that gives indices."""
    keep = (co.column_index() - 3 <= co.row_index()) & ~co.isnan(acc)
    value = co.where(keep, acc**lambda_, co.uniform(seed, -(2**63)))
    return {"d": value, "at": co.argmax(value > 0.5, dim=1)}


@co.epilogue
def plain(acc):
    """The sums, which are added up in FP32."""
    return acc


@co.epilogue
def quantised(acc):
    """Scales of D's blocks."""
    return co.e.quantize(co.relu(acc), "e4m3")


def made(data: Callable[[KernelSpec], bytes] | None = None) -> tuple[Manifest, dict[str, bytes]]:
    """Return a manifest with all that there may be, and its files: kernels that :func:`verify` believes.

    Parameters
    ----------
    data : callable, optional
        Gives the library of a kernel.
    """
    by_bits = {8: QGMMA, 16: HGMMA}
    data = data or (
        lambda spec: (
            library(by_bits[spec.a.dtype.bits], UTMALDG, sm=90) if spec.config.arch == "sm90" else library(HMMA)
        )
    )
    types = {"a": "bf16.row", "b": "bf16.col", "d": "f16.row", "inputs": {"bias": "f32.row.align1"}}
    other = {"a": "f16.row.align2", "b": "f16.col", "d": "f32.row", "inputs": {"gate": "f16.col", "tile": "f32.row"}}
    blocks = {"a": "e4m3.row.blocks1x128", "b": "e5m2.col.blocks128x128"}
    specs = [
        [KernelSpec(**types, epilogue=several, config=config) for config in CONFIGS],
        [KernelSpec(**other, epilogue=everything, config=config) for config in (SPLIT, MMA_SYNC)],
        [KernelSpec(a="f16.row", b="f16.col", d="f16.row", epilogue=placed, config=PINGPONG)],
        [KernelSpec(**blocks, d="bf16.row", epilogue=composed.scaled_blocks, config=PROMOTED)],
        [KernelSpec(a="bf16.row", b="bf16.col", d="e4m3.row", epilogue=quantised, config=PINGPONG)],
        [KernelSpec(a="e4m3.row.promoted", b="e5m2.col.promoted", d="f16.row", epilogue=plain, config=PROMOTED)],
    ]
    targets = sorted({spec.target for group in specs for spec in group})
    flags = {target: {"device": ("-O3", f"-arch={target}"), "host": (), "link": ('-Wl,"x"',)} for target in targets}
    toolchain = {"nvcc": "13.0.88", "host_compiler": "g++ 1.0", "cutlass": "4.2.0", "tvm_ffi": "0.1.10"}
    manifest = Manifest(ABI, TEMPLATE_VERSION, co.__version__, toolchain, flags, (), (_file(TABLE),))

    def record(spec: KernelSpec) -> KernelRecord:
        names = ("registers", "stack", "spill_stores", "spill_loads", "static_shared_memory")
        resources = ({"function": "_Z6kernel", **dict.fromkeys(names, 8)},)
        wgmma = "QGMMA" if spec.a.dtype.bits == 8 else "HGMMA"
        opcodes = {"HMMA": 1} if spec.target == "sm_80" else {wgmma: 1, "UTMALDG": 1}
        found = KernelRecord(spec, "", "0" * 64, _file(data(spec)), _file(SOURCE), opcodes, resources)
        return replace(found, key=identity_key(manifest.identity(found)))

    def group(specs: list[KernelSpec], choices: tuple[Choice, ...]) -> Group:
        s = specs[0]
        signature = OpSignature(s.epilogue, s.a, s.b, s.d, s.inputs, s.outputs)
        return Group(signature, tuple(map(record, specs)), choices)

    manifest = replace(manifest, groups=(group(specs[0], CHOICES), *(group(others, ()) for others in specs[1:])))
    files = {}
    for r in manifest.kernels:
        files |= {r.library_name: data(r.spec), r.source_name: SOURCE}
    return manifest, {**files, f"tables/{_file(TABLE).sha256}.json": TABLE}


def _file(data: bytes) -> File:
    return File(hashlib.sha256(data).hexdigest(), len(data))


def shared(*entries: tuple[int, str]) -> bytes:
    """Return a library for x86-64 with nothing but tags of its dynamic section, and the texts that they name."""
    texts, rows = b"\0", []
    for tag, text in entries:
        rows.append((tag, len(texts)))
        texts += text.encode() + b"\0"
    place = 64 + 2 * 56
    names = place + 16 * (len(rows) + 2)
    dynamic = b"".join(struct.pack("<QQ", *row) for row in [*rows, (5, names), (0, 0)])
    size = names + len(texts)
    head = struct.pack("<16sHHIQQQIHHHHHH", b"\x7fELF\2\1\1", 3, 62, 1, 0, 64, 0, 0, 64, 56, 2, 0, 0, 0)
    load = struct.pack("<IIQQQQQQ", 1, 6, 0, 0, 0, size, size, 4096)
    part = struct.pack("<IIQQQQQQ", 2, 6, place, place, place, len(dynamic), len(dynamic), 8)
    return head + load + part + dynamic + texts


def without_seal(text: bytes) -> bytes:
    """Return a manifest's text with zeros for its own digest, as fuzzers' harnesses take it."""
    at = text.index(b',"sha256":"', text.index(b'"library_version"')) + len(b',"sha256":"')
    return text[:at] + b"0" * 64 + text[at + 64 :]


def seeds(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Yield names and contents: archives, manifests, libraries, public keys."""
    manifest, files = made()
    small = replace(manifest, groups=(replace(manifest.groups[0], kernels=manifest.groups[0].kernels[:1], choices=()),))
    small = replace(small, flags={"sm_90a": manifest.flags["sm_90a"]}, tables=())
    for name, found in (("all", manifest), ("small", small)):
        text = found.to_bytes()
        chosen = {file: files[file] for file in found.files}
        container.write(folder / "archive" / name, {**chosen, "manifest.json": without_seal(text)})
        yield f"manifest/{name}", without_seal(text)
    container.write(folder / "archive" / "least", {"manifest.json": b"{}"})
    for name in {file for file in files if file.endswith(".so")}:
        yield f"library/{name[8:20]}", files[name]
    yield "library/shared", shared((1, "libcudart.so.13"), (1, "libc.so.6"), (14, "kernel.so"))
    yield "library/path", shared((1, "libcudart.so.13"), (29, "$ORIGIN/lib"))
    key = ed25519.Ed25519PrivateKey.from_private_bytes(bytes(32)).public_key()
    yield "key/pem", key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    words = sorted(set(re.findall(rb'"[^"]*"', manifest.to_bytes())))
    yield "dictionary", b"".join(b'"%s"\n' % word.replace(b"\\", b"\\\\").replace(b'"', b'\\"') for word in words)


def main(folder: str) -> None:
    """Write all seeds into a folder, one folder for each target."""
    root = Path(folder)
    for name in ("archive", "manifest", "library", "key"):
        (root / name).mkdir(parents=True, exist_ok=True)
    for name, data in seeds(root):
        (root / name).write_bytes(data)


if __name__ == "__main__":
    main(*sys.argv[1:])
