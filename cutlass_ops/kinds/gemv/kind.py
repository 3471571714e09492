"""The GEMV kind of kernels: rules and shared memory (``templates/include/cutlass_ops/gemv.h``), and search space."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from cutlass_ops.base import arch
from cutlass_ops.base.dtypes import f32
from cutlass_ops.declare.form import DENSE
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.signature import OpSignature
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.kinds.gemv.config import GemvConfig
from cutlass_ops.kinds.kind import Broken, Kind, Rule, late
from cutlass_ops.kinds.serving import in_16_bits

# ---- Rules -----------------------------------------------------------------------------------------------------------

# Maximum registers of a thread for loads in flight and for sums. The rest is for addresses and the epilogue.
_MOST_REGISTERS = 160
_PIECE_REGISTERS = 4


def _lines(spec: KernelSpec, _: GemvConfig) -> Iterator[Broken]:
    for name, operand, major in (("a", spec.a, "row"), ("b", spec.b, "col")):
        if operand.major != major or not operand.aligned:
            along_k = f"{operand.dtype}.{major}"
            yield Broken(
                f"{name} is {operand}, and a GEMV kernel reads K in pieces of 16 bytes",
                advice=lambda others, along_k=along_k: f"use {', or '.join([along_k, *others])}",  # type: ignore[misc]
            )


def _whole_outputs(spec: KernelSpec, _: GemvConfig) -> Iterator[Broken]:
    for output in spec.epilogue.outputs:
        if output.reduction is not None:
            yield Broken(
                f"output {output.name} is a reduction, and GEMV kernels have none",
                advice=lambda others: f"use {' or '.join(others) or 'two GEMMs'}",
            )


def _swap_pairs(spec: KernelSpec, config: GemvConfig) -> Iterator[Broken]:
    if spec.epilogue.swaps_pairs and not config.by_tile and config.warps == 1:
        yield Broken(
            "the epilogue swaps pairs of columns, and a thread block of one warp has one column",
            ({"warps": 2},),
        )


def _registers(spec: KernelSpec, config: GemvConfig) -> Iterator[str]:
    weights = 1 + len(spec.epilogue.products)
    if config.by_tile:
        rows = config.rows // 8
        used = _PIECE_REGISTERS * (config.pieces * (2 * weights + rows) + weights * rows)
    else:
        used = weights * (config.pieces * _PIECE_REGISTERS + config.rows) + config.rows * _PIECE_REGISTERS
    limit = min(_MOST_REGISTERS, arch.REGISTERS_PER_SM // (config.warps * arch.WARP) - 32)
    if used > limit:
        yield (
            f"{config.pieces} pieces of {weights} weights for {config.rows} rows take {used} registers of a thread, "
            f"and {config.warps} warps leave {limit}: use fewer pieces, rows or warps"
        )


def _shared_memory(spec: KernelSpec, config: GemvConfig, stages: int | None = None) -> int:
    """Return the bytes that warps exchange in ``gemv.h``. ``stages`` is ignored.

    These are two sums per row for its means, and products: of a whole tile, or of a column if pairs are swapped.
    """
    columns = config.threadblock.n if config.by_tile else int(spec.epilogue.swaps_pairs)
    numbers = (2 if spec.epilogue.gathered else 0) + (1 + len(spec.epilogue.products)) * columns
    return f32.bytes_of(config.warps * config.rows * numbers)


# ---- Search space ----------------------------------------------------------------------------------------------------

_ROWS = (1, 2, 4, 8, 16)
_WARPS = (4, 8, 16)
_PIECES = {False: (4, 8, 16), True: (1, 2, 4, 8)}  # by column, by tile

# For small M, with K-major operands aligned to 16 bytes.
UNTUNED = (GemvConfig(1), GemvConfig(2), GemvConfig(8, 8, 4), GemvConfig(16, 8, 4))


def candidates(_: OpSignature | None = None) -> Iterator[GemvConfig]:
    """Yield the GEMV configurations that are worth measuring."""
    for rows, warps in product(_ROWS, _WARPS):
        yield from (GemvConfig(rows, warps, pieces) for pieces in _PIECES[GemvConfig(rows).by_tile])


def _untuned(signature: OpSignature) -> tuple[GemvConfig, ...]:
    """Return the choices for a signature without a tuning table."""
    return UNTUNED if min(signature.alignments) > 1 else ()


def _fits(config: GemvConfig, problem: Problem) -> bool:
    """Whether a kernel reads B once for a problem's rows, or is the smallest with Tensor Cores."""
    return config.rows >= problem.m and (config.rows < 2 * problem.m or config.rows == 8)


def _near(one: GemvConfig, other: GemvConfig) -> bool:
    """Return whether two configurations differ only in rows, only in warps or only in pieces."""
    return (one.rows != other.rows) + (one.warps != other.warps) + (one.pieces != other.pieces) == 1


def _unit(config: GemvConfig) -> tuple[str, str]:
    unit = "mma.sync" if config.by_tile else "FP32 arithmetic"
    says = f"{unit}, operands loaded into registers: for so few rows, reading B is all that takes time"
    return says, "element by element"


GEMV = Kind(
    config=GemvConfig,
    forms=(DENSE,),
    multiplies=in_16_bits,
    stores_fp8=True,
    noun="a GemvConfig",
    template="gemv.cu.j2",
    values={"rows": (1, 2, 4, 8, 16), "warps": (1, 2, 4, 8, 16, 32), "pieces": (1, 2, 4, 8, 16)},
    rules=(
        Rule("lines", "policy", _lines),
        Rule("whole_outputs", "policy", _whole_outputs),
        Rule("swap_pairs", "policy", _swap_pairs),
        Rule("registers", "policy", _registers),
    ),
    shared_memory=_shared_memory,
    context=late("gemv.lowering", "context"),
    proof=lambda config, unit: (unit.opcode,) if config.by_tile else (),
    timer=late("gemv.model", "GemvTimer.of"),
    candidates=candidates,
    untuned=_untuned,
    fits=_fits,
    near=_near,
    unit=_unit,
    means=lambda _: "added up by the warps of each thread block together, beside the product",
)
