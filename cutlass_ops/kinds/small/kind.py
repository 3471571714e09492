"""The kind of small kernels: rules and shared memory (``templates/include/cutlass_ops/small.h``), and search space."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from cutlass_ops.base.dtypes import f32
from cutlass_ops.declare.config import ThreadblockShape
from cutlass_ops.declare.form import BATCHED
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.signature import OpSignature
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.kinds.kind import Broken, Kind, Rule, late
from cutlass_ops.kinds.serving import in_16_bits
from cutlass_ops.kinds.small.config import SmallConfig

_SIDES = (16, 32, 64)


def _tile(_: KernelSpec, config: SmallConfig) -> Iterator[str]:
    for side in ("m", "n", "k"):
        extent = getattr(config.threadblock, side)
        if extent not in _SIDES:
            yield (
                f"threadblock.{side} is {extent}: a warp's instructions and registers fit {_SIDES[0]}, {_SIDES[1]} or "
                f"{_SIDES[2]}; use one of these"
            )


def _swap_pairs(spec: KernelSpec, _: SmallConfig) -> Iterator[Broken]:
    if spec.epilogue.swaps_pairs:
        yield Broken(
            "the epilogue swaps pairs of columns, and small kernels compute one element at a time",
            advice=lambda others: f"use {' or '.join(others) or 'an operation of its own for that'}",
        )


# Elements between the lines of an operand, columns between those of sums, and rows of sums that pass at a time.
_PADDING, _SUMS_PADDING, _SUMS_ROWS = 8, 4, 16


def shared_memory(spec: KernelSpec, config: SmallConfig, stages: int | None = None) -> int:
    """Return the bytes of a thread block: of each warp its stages, and sums on their way to D."""
    tile = config.threadblock
    a = _lines(tile.m, tile.k) if spec.a.major == "row" else _lines(tile.k, tile.m)
    b = _lines(tile.k, tile.n) if spec.b.major == "row" else _lines(tile.n, tile.k)
    sums = f32.bytes_of(_SUMS_ROWS * (tile.n + _SUMS_PADDING))
    return config.warps * (spec.a.dtype.bytes_of((stages or config.stages) * (a + b)) + sums)


def _lines(count: int, length: int) -> int:
    return count * (length + _PADDING)


# ---- Search space ----------------------------------------------------------------------------------------------------

_STAGES = (2, 3, 4)
_WARPS = (1, 2, 4)
_SMALL = 128  # extents of D up to which small kernels are worth a race

# One for each size, with so many stages that a multiprocessor has most of its share of a thousand batches on its way.
UNTUNED = (
    SmallConfig(ThreadblockShape(64, 64, 64), stages=2),
    SmallConfig(ThreadblockShape(32, 64, 64), stages=2),
    SmallConfig(ThreadblockShape(64, 32, 64), stages=2),
    SmallConfig(ThreadblockShape(32, 32, 32), warps=4),
    SmallConfig(ThreadblockShape(16, 16, 16), stages=4, warps=4),
)


def candidates(_: OpSignature | None = None) -> Iterator[SmallConfig]:
    """Yield all combinations of tile, stages and warps."""
    for m, n, k, stages, warps in product(_SIDES, _SIDES, _SIDES, _STAGES, _WARPS):
        yield SmallConfig(ThreadblockShape(m, n, k), stages, warps)


def _untuned(signature: OpSignature) -> tuple[SmallConfig, ...]:
    """Return the choices for a signature without a tuning table."""
    return UNTUNED if signature.form == BATCHED else ()


def _fits(config: SmallConfig, problem: Problem) -> bool:
    """Whether a warp's tile is no larger than a batch's D needs, and that is small."""
    sides = ((config.threadblock.m, problem.m), (config.threadblock.n, problem.n))
    return all(extent <= _SMALL and (side <= 16 or side < 2 * extent) for side, extent in sides)


def _near(one: SmallConfig, other: SmallConfig) -> bool:
    """Return whether two configurations differ in exactly one of: tile M, N, K, stages, warps."""
    mine, its = ((c.threadblock.m, c.threadblock.n, c.threadblock.k, c.stages, c.warps) for c in (one, other))
    return sum(x != y for x, y in zip(mine, its, strict=True)) == 1


SMALL = Kind(
    config=SmallConfig,
    forms=(BATCHED,),
    multiplies=in_16_bits,
    noun="a SmallConfig",
    template="small.cu.j2",
    values={"warps": (1, 2, 4, 8)},
    rules=(Rule("small_tile", "policy", _tile), Rule("small_pairs", "policy", _swap_pairs)),
    shared_memory=shared_memory,
    context=late("small.lowering", "context"),
    proof=lambda _, unit: (unit.opcode,),
    timer=late("small.model", "SmallTimer.of"),
    candidates=candidates,
    in_tables=False,
    untuned=_untuned,
    fits=_fits,
    near=_near,
    unit=lambda _: ("mma.sync, a warp for each tile, operands loaded ahead by cp.async or registers", None),
    means=lambda _: "by no small kernel",
)
