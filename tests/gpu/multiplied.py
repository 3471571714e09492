"""The kernels and calls that the tests of the other types make, so that they are compiled side by side before."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import cutlass_ops as co
from cutlass_ops.base.dtypes import tf32
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.kinds.sm80.space import UNTUNED_FP64
from cutlass_ops.operand import matrices
from cutlass_ops.run import requests
from tests.gpu import kernels, tensors


@co.epilogue
def plain(acc):
    return acc


@co.epilogue
def fused(acc, bias: co.Row, scale: co.Col, r: co.Tile):
    """Every kind of input, and reductions in both directions."""
    d = co.e.gelu(acc * scale + bias) + r
    return {"d": d, "row": co.e.sum(d, dim=1), "column": co.e.max(d, dim=0)}


@co.epilogue
def elementwise(acc, bias: co.Row, scale: co.Col, r: co.Tile):
    """The same inputs where nothing is reduced."""
    return co.e.gelu(acc * scale + bias) + r


@co.epilogue
def functions(acc, scale: co.Col, r: co.Tile):
    """Every function that an epilogue in FP64 has, of values near 1."""
    e = co.e
    x = acc * scale
    small = e.sigmoid(x) + 0.5
    d = e.exp(small) + e.exp2(small) + e.expm1(x * 0.5) + e.log(small) + e.log2(small) + e.log1p(small) + e.erf(x)
    d += e.sin(x) + e.cos(x) + e.tanh(x) + e.sqrt(small) + e.rsqrt(small) + e.pow(small, 1.5) + e.reciprocal(small)
    d += e.floor(x) + e.ceil(x) + e.round(x * 3) + e.trunc(x) + e.abs(x) + e.sign(x) + e.square(x) + x / 3
    d += (
        e.relu(x)
        + e.leaky_relu(x, 0.25)
        + e.elu(x, 0.5)
        + e.gelu(x)
        + e.gelu(x, approximate="tanh")
        + e.silu(x)
        + e.mish(x)
    )
    d += e.softplus(x) + e.hardswish(x) + e.minimum(x, r) + e.maximum(x, 0.125)
    return e.where((x > 0) & ~e.isnan(r), d, r - d)


@co.epilogue
def gated(acc, up: co.Product):
    return co.e.silu(acc) * up


@co.epilogue
def bias_relu(acc, bias: co.Row):
    return co.e.relu(acc + bias)


@co.epilogue
def requantised(acc, bias: co.Row, scale: co.Col):
    return acc * scale + bias


_shape, _cluster = co.ThreadblockShape, co.ClusterShape
_MAJORS = (("row", "col"), ("row", "row"), ("col", "col"), ("col", "row"))


def declare(types: str, epilogue: Any, config: Any, tail: str = "", read: str = "f32") -> KernelSpec:
    """Return a kernel whose inputs have one type; tiles are aligned as the operands."""
    taken = {i.name for i in epilogue.graph.inputs}
    inputs = {"bias": read, "scale": read, "r": f"{read}.row{tail}"}
    return kernels.declare(types, epilogue, config, **{name: of for name, of in inputs.items() if name in taken})


def specs() -> dict[str, KernelSpec]:
    """Return kernels of every instruction, schedule and way to sum, by name."""
    return _of_wgmma() | _of_mma_sync() | _of_fp64() | _of_copies() | _of_integers()


def _of_wgmma() -> dict[str, KernelSpec]:
    def config(m: int, n: int, bytes_k: int, element: int, *clusters: int, **named: Any) -> co.Sm90Config:
        return co.Sm90Config(_shape(m, n, bytes_k // element), _cluster(*(clusters or (1, 1))), **named)

    found = {}
    for dtype, size, d in (("tf32", 4, "f32"), ("i8", 1, "f32"), ("i8", 1, "bf16")):
        each = {
            "pingpong": (fused, config(128, 128, 128, size, 2, 1, schedule="pingpong")),
            "swapped": (fused, config(64, 16, 256, size, schedule="pingpong", swap_ab=True)),
            "few_rows": (elementwise, config(64, 8, 256, size, schedule="warp_specialized", swap_ab=True)),
        }
        if d == "f32":
            each |= {
                "plain": (plain, config(128, 96, 128, size, 1, 2, schedule="pingpong")),
                "cooperative": (elementwise, config(256, 128, 128, size, 2, 1, schedule="cooperative")),
                "side_by_side": (bias_relu, config(192, 128, 128, size, schedule="cooperative")),
                "narrow": (plain, config(64, 48, 128, size, schedule="warp_specialized", swap_ab=True)),
                "resident": (plain, config(128, 16, 256, size, schedule="warp_specialized", swap_ab=True, resident=2)),
            }
        if dtype == "tf32":
            each |= {
                "split_k": (elementwise, config(64, 64, 128, size, schedule="warp_specialized", split_k=4)),
                "stream_k": (elementwise, config(128, 128, 128, size, schedule="cooperative", scheduler="stream_k")),
                "gated": (gated, config(128, 64, 128, size, schedule="pingpong")),
            }
        for name, (epilogue, one) in each.items():
            found[f"{dtype}-{d}-wgmma-{name}"] = declare(f"{dtype}.row {dtype}.col {d}.row", epilogue, one)
    return found


def _of_mma_sync() -> dict[str, KernelSpec]:
    def config(k: int, instruction: int, **named: Any) -> co.Sm80Config:
        tile, warp = _shape(64, 128, k), co.WarpShape(32, 64, k)
        return co.Sm80Config(tile, warp, co.InstructionShape(16, 8, instruction), **{"stages": 3, **named})

    found = {}
    for (a, b), tail in itertools.product(_MAJORS, ("", ".align1")):
        types = f"tf32.{a}{tail} tf32.{b}{tail} f32.row{tail}"
        found[f"tf32-mma_sync-{a}-{b}{tail}"] = declare(types, fused, config(32, 8), tail)
    of_three = replace(config(16, 8, stages=4), warp=co.WarpShape(32, 32, 16))
    for a, b, tail in (("row", "col", ""), ("row", "row", ".align1"), ("col", "row", "")):
        types = f"tf32x3.{a}{tail} tf32x3.{b}{tail} f32.row{tail}"
        found[f"tf32x3-{a}-{b}{tail}"] = declare(types, fused, of_three, tail)
    stream_k = config(16, 8, stages=4, stream_k=True)
    found["tf32-mma_sync-stream_k"] = declare("tf32.row tf32.row bf16.row", elementwise, stream_k)
    for d, tail, epilogue in (("f32", "", plain), ("f32", "", fused), ("bf16", "", fused), ("f16", ".align1", fused)):
        types = f"i8.row i8.col {d}.row{tail}"
        found[f"i8-mma_sync-{d}{tail}-{epilogue.name}"] = declare(types, epilogue, config(64, 32), tail)
    return found


def _of_fp64() -> dict[str, KernelSpec]:
    """Return kernels of each instruction in each pair of majors, and every kernel of choice that divides K."""

    def config(m: int, n: int, k: int, warp: tuple[int, int], *instruction: int, **named: Any) -> co.Sm80Config:
        return co.Sm80Config(_shape(m, n, k), co.WarpShape(*warp, k), co.InstructionShape(*instruction), **named)

    def of(a: str, b: str, tail: str, one: co.Sm80Config, d: str = "row", epilogue: Any = elementwise) -> KernelSpec:
        return declare(f"f64.{a}{tail} f64.{b}{tail} f64.{d}{tail}", epilogue, one, tail, "f64")

    found = {}
    for a, b in _MAJORS:
        for instruction, tail in (((16, 8, 4), ""), ((16, 8, 4), ".align1"), ((8, 8, 4), ".align1")):
            one = config(64, 128, 16, (32, 64), *instruction, stages=4)
            found[f"f64-{'x'.join(map(str, instruction))}-{a}-{b}{tail}"] = of(a, b, tail, one)
        # The larger instructions of Hopper.
        tail = "" if b == "col" else ".align1"
        eight = config(64, 64, 16, (32, 32), 16, 8, 8, stages=4, stream_k=a != b)
        sixteen = config(128, 64, 32, (32, 32), 16, 8, 16, stages=3)
        found |= {f"f64-16x8x{one.instruction.k}-{a}-{b}{tail}": of(a, b, tail, one) for one in (eight, sixteen)}
    usual = config(128, 64, 16, (64, 32), 16, 8, 4, stages=3)
    found["f64-functions"] = of("row", "col", "", usual, epilogue=functions)
    found["f64-turned"] = of("row", "col", "", usual, "col")
    divided = {c.slug: c for c in UNTUNED_FP64 if c.stream_k}
    few = min(divided.values(), key=lambda c: c.threadblock.m)
    found |= {f"f64-stream_k-{name}": of("row", "col", "", one) for name, one in divided.items()}
    found["f64-stream_k-odd"] = of("col", "row", ".align1", few)
    found["f64-stream_k-odd-along_k"] = of("row", "col", ".align1", few)
    found["f64-stream_k-turned"] = of("row", "row", "", few, "col")
    return found


def _of_copies() -> dict[str, KernelSpec]:
    """Return kernels that copy operands to lines along K: across K, or at any address, in each orientation."""
    majors = (("row", "row"), ("col", "row"), ("col", "col"), ("row", "col"))
    found = {}
    for dtype, size in (("tf32", 4), ("i8", 1)):
        configs = (
            co.Sm90Config(_shape(128, 128, 128 // size), _cluster(2, 1), schedule="pingpong", realign=True),
            co.Sm90Config(_shape(64, 16, 256 // size), schedule="warp_specialized", swap_ab=True, realign=True),
            co.Sm90Config(_shape(256, 128, 128 // size), _cluster(1, 2), schedule="cooperative", realign=True),
            co.Sm90Config(_shape(64, 64, 256 // size), schedule="pingpong", realign=True),
        )
        epilogue = plain if dtype == "i8" else elementwise
        for ((a, b), config), tail in itertools.product(zip(majors, configs, strict=True), ("", ".align1")):
            if (a, b, tail) != ("row", "col", ""):  # nothing to copy
                types = f"{dtype}.{a}{tail} {dtype}.{b}{tail} f32.row{tail}"
                found[f"{dtype}-copied-{a}-{b}{tail}"] = declare(types, epilogue, config, tail)
    split = co.Sm90Config(_shape(64, 64, 32), schedule="warp_specialized", split_k=4, realign=True)
    found["tf32-copied-split_k"] = declare("tf32.col tf32.row f32.row", plain, split)
    return found


def _of_integers() -> dict[str, KernelSpec]:
    """Return kernels whose D is INT8 or INT32, stored by TMA or element by element, and as D^T."""
    sm80 = co.Sm80Config(_shape(64, 128, 64), co.WarpShape(32, 64, 64), co.InstructionShape(16, 8, 32), stages=3)
    configs: dict[str, tuple[str, Any]] = {
        "pingpong": ("", co.Sm90Config(_shape(128, 128, 128), _cluster(2, 1), schedule="pingpong")),
        "cooperative": ("", co.Sm90Config(_shape(256, 128, 128), _cluster(1, 2), schedule="cooperative")),
        "side_by_side": ("", co.Sm90Config(_shape(192, 128, 128), schedule="cooperative")),
        "swapped": ("", co.Sm90Config(_shape(64, 16, 256), schedule="pingpong", swap_ab=True)),
        "odd": (".align1", co.Sm90Config(_shape(64, 64, 128), schedule="warp_specialized")),
        "odd-swapped": (".align1", co.Sm90Config(_shape(64, 16, 256), schedule="warp_specialized", swap_ab=True)),
        "mma_sync": ("", sm80),
        "mma_sync-odd": (".align1", sm80),
    }
    found = {
        f"i8-{d}-{name}": declare(f"i8.row i8.col {d}.row{tail}", epilogue, config, tail)
        for d, epilogue in (("i8", requantised), ("i32", plain))
        for name, (tail, config) in configs.items()
    }
    whole = co.Sm90Config(_shape(128, 128, 128), schedule="pingpong")
    for name, config in (("i8-i8-tile", whole), ("i8-i8-tile-mma_sync", sm80)):
        found[name] = declare("i8.row i8.col i8.row", elementwise, config)
    return found


# ---- Calls -----------------------------------------------------------------------------------------------------------


def floats(rows: int, columns: int, major: str = "row", *, aligned: bool = True) -> Tensor:
    """Draw an operand in FP32."""
    return tensors.matrix(rows, columns, "f32", major, aligned=aligned)


def doubles(rows: int, columns: int, major: str = "row", *, aligned: bool = True) -> Tensor:
    """Draw an operand in FP64, with lines as those of :func:`floats`."""
    found = floats(rows, columns, major, aligned=aligned)
    lines = found if major == "row" else found.t()
    buffer = torch.randn(
        lines.shape[0], lines.stride(0) if lines.shape[0] > 1 else lines.shape[1], device="cuda"
    ).double()
    drawn = buffer[:, : lines.shape[1]]
    return drawn if major == "row" else drawn.t()


def several(rows: int, columns: int) -> Tensor:
    """Draw a batch of three in FP32."""
    return torch.randn(3, rows, columns, device="cuda")


def whole(*shape: int) -> Tensor:
    """Draw an operand in INT8, whose lines begin at multiples of 16 bytes."""
    *others, columns = shape
    padded = -(-columns // 16) * 16
    return torch.randint(-128, 128, (*others, padded), dtype=torch.int8, device="cuda")[..., :columns]


def laid(x: Tensor, major: str, *, aligned: bool = True) -> Tensor:
    """Return a matrix with lines of a major, which begin at multiples of 16 bytes, or an element further apart."""
    lines = x if major == "row" else x.t()
    size = x.element_size()
    pad = -lines.shape[1] * size % 16 // size if aligned else 1
    buffer = torch.zeros(lines.shape[0], lines.shape[1] + pad, dtype=x.dtype, device=x.device)
    buffer[:, : lines.shape[1]] = lines
    found = buffer[:, : lines.shape[1]]
    return found if major == "row" else found.t()


def exact(x: Tensor, w: Tensor, math: str | None = "tf32") -> Tensor:
    """Return what the Tensor Cores multiply, in float64, which has every sum of INT8."""
    if x.dtype in (torch.int8, torch.float64) or math == "3xtf32":
        return x.double() @ w.double()
    return matrices.as_multiplied(x, tf32).double() @ matrices.as_multiplied(w, tf32).double()


def _fp32(m: int, n: int, k: int, a: str, b: str, *, aligned: bool = True, math: str = "tf32") -> requests.Request:
    x, w = floats(m, k, a, aligned=aligned), floats(k, n, b, aligned=aligned)
    return requests.requested(co.gemm, x, w, epilogue=bias_relu, bias=torch.randn(n, device="cuda"), math=math)


def _fp64(m: int, n: int, k: int, a: str, b: str, *, aligned: bool = True) -> requests.Request:
    x, w = doubles(m, k, a, aligned=aligned), doubles(k, n, b, aligned=aligned)
    return requests.requested(co.gemm, x, w, epilogue=bias_relu, bias=torch.randn(n, device="cuda").double())


def _int8(m: int, n: int, k: int, out_dtype: torch.dtype) -> requests.Request:
    bias = torch.randn(n, device="cuda")
    return requests.requested(co.gemm, whole(m, k), whole(n, k).t(), epilogue=bias_relu, bias=bias, out_dtype=out_dtype)


def _across(
    m: int, n: int, k: int, a: str, b: str, out_dtype: torch.dtype, *, aligned: bool = True
) -> requests.Request:
    x, w = laid(whole(m, k), a, aligned=aligned), laid(whole(k, n), b, aligned=aligned)
    if out_dtype is torch.int32:
        return requests.requested(co.gemm, x, w, out_dtype=out_dtype)
    bias, scale = torch.randn(n, device="cuda"), torch.rand(m, device="cuda") / k**0.5 / 64
    return requests.requested(co.gemm, x, w, epilogue=requantised, bias=bias, scale=scale, out_dtype=out_dtype)


def _batches(x: Tensor, w: Tensor, math: str | None) -> requests.Request:
    wide = x.dtype == torch.float64
    bias = torch.zeros(w.shape[-1], device="cuda", dtype=x.dtype if wide else torch.float32)
    named: dict[str, Any] = {} if wide else {"math": math} if math else {"out_dtype": torch.float32}
    return requests.requested(co.gemm, x, w, epilogue=bias_relu, bias=bias, **named)


# What a caller writes: odd extents and addresses, one row, every pair of majors, batches.
CALLS: dict[str, Callable[[], requests.Request]] = {
    "tf32 one row": lambda: _fp32(1, 256, 512, "row", "col"),
    "tf32 several tiles": lambda: _fp32(333, 512, 1024, "row", "col"),
    "tf32 lines across K": lambda: _fp32(333, 512, 1024, "col", "row"),
    "tf32 odd": lambda: _fp32(129, 251, 1037, "row", "col", aligned=False),
    "tf32 odd across K": lambda: _fp32(65, 33, 13, "col", "row", aligned=False),
    "tf32 batches": lambda: _batches(several(65, 136), several(136, 72), "tf32"),
    "tf32 batches along K": lambda: _batches(several(65, 136), several(72, 136).mT, "tf32"),
    "3xtf32 several tiles": lambda: _fp32(333, 512, 1024, "row", "col", math="3xtf32"),
    "3xtf32 odd": lambda: _fp32(129, 251, 1037, "col", "row", aligned=False, math="3xtf32"),
    "f64 one row": lambda: _fp64(1, 256, 512, "row", "col"),
    "f64 few rows": lambda: _fp64(17, 264, 4096, "row", "col"),
    "f64 few rows, odd": lambda: _fp64(31, 251, 4097, "row", "row", aligned=False),
    "f64 few columns": lambda: _fp64(264, 9, 4096, "row", "col"),
    "f64 long K": lambda: _fp64(129, 251, 16385, "col", "row", aligned=False),
    "f64 several tiles": lambda: _fp64(333, 512, 1024, "row", "row"),
    "f64 odd": lambda: _fp64(129, 251, 1037, "col", "row", aligned=False),
    "f64 batches": lambda: _batches(several(65, 136).double(), several(72, 136).double().mT, None),
    "i8 one row": lambda: _int8(1, 256, 512, torch.bfloat16),
    "i8 several tiles": lambda: _int8(333, 512, 4096, torch.float32),
    "i8 odd": lambda: _int8(129, 251, 1037, torch.float16),
    "i8 small": lambda: _int8(17, 33, 16, torch.float32),
    "tf32 copied": lambda: _fp32(2048, 1024, 1024, "col", "row"),
    "tf32 copied odd": lambda: _fp32(2049, 1031, 1037, "row", "row", aligned=False),
    "i8 across K": lambda: _across(333, 512, 1024, "col", "row", torch.int32),
    "i8 across K, odd": lambda: _across(129, 251, 1037, "row", "row", torch.int32, aligned=False),
    "i8 along K, odd": lambda: _across(65, 33, 77, "row", "col", torch.int8, aligned=False),
    "i8 to i8": lambda: _across(333, 512, 4096, "row", "col", torch.int8),
    "i8 to i8, odd": lambda: _across(129, 251, 1040, "col", "col", torch.int8),
    "i8 batches": lambda: _batches(whole(3, 65, 144), whole(3, 72, 144).mT, None),
}
