"""The kind of kernels for few rows and a packed weight (``packed_rows.h``): rules, shared memory and search space."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from cutlass_ops.base.dtypes import PACKED, f32, u4
from cutlass_ops.base.mma import WHOLE_K
from cutlass_ops.declare.form import DENSE
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.signature import OpSignature
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.kinds.kind import Broken, Kind, Rule, late
from cutlass_ops.kinds.packed.config import PackedRowsConfig

_STATIC_BYTES = 48 * 1024  # static shared memory of a thread block
_PITCH = 64 * 2 + 16  # bytes of a row's part of a piece (kPitch in packed_rows.h)
_PART_PADDING = 4  # of a row of sums (kPartPitch)
# Numbers and scales in flight, sums and rows of A of a thread, in registers. It has 128: the rest is for addresses,
# conversion and the epilogue. At 68 some spill (nvcc 13.0).
_MOST_REGISTERS = 64


def _packed_rows(spec: KernelSpec, _: PackedRowsConfig) -> Iterator[str | Broken]:
    if spec.a.major != "row" or not spec.a.aligned:
        yield Broken(
            f"a is {spec.a}, and this kernel copies its rows in pieces of 16 bytes",
            advice=lambda others: f"use {', or '.join([f'{spec.a.dtype}.row', *others])}",
        )
    for output in spec.epilogue.outputs:
        if output.reduction is not None:
            yield Broken(
                f"output {output.name} is a reduction, and these kernels have none",
                advice=lambda others: f"use {' or '.join(others) or 'two GEMMs'}",
            )
    if spec.epilogue.products or spec.epilogue.gathered:
        what = ", ".join((*spec.epilogue.products, *spec.epilogue.gathered))
        yield Broken(
            f"the epilogue takes {what}, and these kernels have one product and no means", advice="use two ops"
        )
    scales = [operand.dtype for given, operand in spec.typed_inputs if given.name in spec.epilogue.parts]
    if any(dtype is not spec.a.dtype for dtype in scales):
        yield f"b is {spec.b} with scales in {scales[0]}, and a is {spec.a}: use scales in a's type"


def _registers(spec: KernelSpec, config: PackedRowsConfig) -> Iterator[str]:
    scales = max(1, 64 // (spec.b.scaling or (WHOLE_K, 1))[0]) * (2 if spec.b.dtype is u4 else 1)
    used = config.lines * ((4 + scales) * config.pieces + 4 * config.rows // 8) + config.rows
    if used > _MOST_REGISTERS:
        yield (
            f"{config.pieces} pieces of {config.lines} lines for {config.rows} rows take {used} registers of a thread, "
            f"and more than {_MOST_REGISTERS} are too many: use fewer pieces, lines or rows"
        )


def _memory(spec: KernelSpec, config: PackedRowsConfig) -> Iterator[str]:
    needed = shared_memory(spec, config)
    if needed > _STATIC_BYTES:
        yield (
            f"{config.warps} warps with {config.pieces} pieces for {config.rows} rows and {config.lines} lines take "
            f"{needed} bytes of shared memory, and {_STATIC_BYTES} are there: use fewer warps, pieces or lines"
        )


def shared_memory(_: KernelSpec, config: PackedRowsConfig, stages: int | None = None) -> int:
    """Return the bytes for rows of A, and later for sums, of all warps. ``stages`` is ignored."""
    staged = config.pieces * config.rows * _PITCH
    sums = f32.bytes_of(config.rows * (16 * config.lines + _PART_PADDING))
    return config.warps * max(staged, sums)


_ROWS, _WARPS, _PIECES, _LINES = (8, 16), (4, 8, 16), (1, 2, 4), (1, 2, 4, 8)

UNTUNED = (
    PackedRowsConfig(8, 8, 2, 4),
    PackedRowsConfig(8, 8, 2, 2),
    PackedRowsConfig(8, 8, 4, 2),
    PackedRowsConfig(8, 8, 4, 1),
    PackedRowsConfig(8, 16, 2, 2),
    PackedRowsConfig(16, 8, 2, 2),
    PackedRowsConfig(16, 8, 2, 1),
)


def candidates(_: OpSignature | None = None) -> Iterator[PackedRowsConfig]:
    """Yield the configurations that are worth measuring."""
    for rows, warps, pieces, lines in product(_ROWS, _WARPS, _PIECES, _LINES):
        yield PackedRowsConfig(rows, warps, pieces, lines)


def _untuned(signature: OpSignature) -> tuple[PackedRowsConfig, ...]:
    return UNTUNED if signature.b.dtype in PACKED and signature.a.alignment > 1 else ()


def _fits(config: PackedRowsConfig, problem: Problem) -> bool:
    """Whether a kernel reads B once for a problem's rows, and has no more rows than it needs."""
    return config.rows >= problem.m and (config.rows < 2 * problem.m or config.rows == 8)


def _near(one: PackedRowsConfig, other: PackedRowsConfig) -> bool:
    """Return whether two configurations differ in one field only."""
    mine, its = ((c.rows, c.warps, c.pieces, c.lines) for c in (one, other))
    return sum(x != y for x, y in zip(mine, its, strict=True)) == 1


PACKED_ROWS = Kind(
    config=PackedRowsConfig,
    forms=(DENSE,),
    multiplies=lambda mma: mma.b in PACKED,
    stores_fp8=True,
    scales_blocks=True,
    noun="a PackedRowsConfig",
    template="gemv.cu.j2",
    values={"rows": _ROWS, "warps": _WARPS, "pieces": _PIECES, "lines": _LINES},
    rules=(
        Rule("packed_rows", "policy", _packed_rows),
        Rule("packed_registers", "policy", _registers),
        Rule("packed_memory", "hardware", _memory),
    ),
    shared_memory=shared_memory,
    context=late("packed.lowering", "context"),
    proof=lambda _, unit: (unit.opcode,),
    timer=late("packed.model", "PackedRowsTimer.of"),
    candidates=candidates,
    in_tables=False,
    untuned=_untuned,
    fits=_fits,
    near=_near,
    unit=lambda _: (
        "mma.sync, a packed weight converted in registers: for so few rows, reading it is all that takes time",
        "element by element",
    ),
    means=lambda _: "by no such kernel",
)
