"""Legality rules for GEMV kernels (``templates/include/cutlass_ops/gemv.h``)."""

from __future__ import annotations

from collections.abc import Iterator

from cutlass_ops.base import arch
from cutlass_ops.declare.config import GemvConfig
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.kinds.rules import Broken, Rule
from cutlass_ops.kinds.serving import sm80_serves, sm90_serves

# Maximum registers of a thread for loads in flight and for sums. The rest is for addresses and the epilogue.
_MOST_REGISTERS = 160
_PIECE_REGISTERS = 4


def _lines(spec: KernelSpec, _: GemvConfig) -> Iterator[str]:
    for name, operand, major in (("a", spec.a, "row"), ("b", spec.b, "col")):
        if operand.major != major or not operand.aligned:
            other = ", or an Sm80Config" if sm80_serves(spec) else ""
            yield (
                f"{name} is {operand}: a GEMV kernel reads K in pieces of 16 bytes; use {operand.dtype}.{major}{other}"
            )


def _whole_outputs(spec: KernelSpec, _: GemvConfig) -> Iterator[str]:
    for output in spec.epilogue.outputs:
        if output.reduction is not None:
            kinds = ["an Sm80Config"] * sm80_serves(spec) + ["an Sm90Config"] * sm90_serves(spec)
            other = " or ".join(kinds) or "two GEMMs"
            yield f"output {output.name} is a reduction, and GEMV kernels have none: use {other}"


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


GEMV: tuple[Rule[GemvConfig], ...] = (
    Rule("lines", "policy", _lines),
    Rule("whole_outputs", "policy", _whole_outputs),
    Rule("swap_pairs", "policy", _swap_pairs),
    Rule("registers", "policy", _registers),
)
