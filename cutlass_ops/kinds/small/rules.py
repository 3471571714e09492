"""Legality rules for small kernels (``templates/include/cutlass_ops/small.h``)."""

from __future__ import annotations

from collections.abc import Iterator

from cutlass_ops.declare.config import SmallConfig
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.kinds.rules import Broken, Rule
from cutlass_ops.kinds.serving import sm80_serves

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
        other = "an Sm80Config or " if sm80_serves(spec) else ""
        yield Broken(
            "the epilogue swaps pairs of columns, and small kernels compute one element at a time",
            advice=f"use {other}an Sm90Config",
        )


SMALL: tuple[Rule[SmallConfig], ...] = (
    Rule("small_tile", "policy", _tile),
    Rule("small_pairs", "policy", _swap_pairs),
)
