"""A kernel's orientation: which operands lie along its own M and N.

A kernel computes D, or D^T = B^T A^T. Tiles, clusters and the epilogue's visitors use the kernel's orientation;
declared operands, inputs and outputs use the problem's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from cutlass_ops.base.dtypes import DType
from cutlass_ops.declare.config import ThreadblockShape
from cutlass_ops.declare.spec import KernelSpec, Operand, loaded
from cutlass_ops.epilogue.nodes import Kind


@dataclass(frozen=True)
class Side:
    """A or B as one side of the kernel's tile."""

    name: str  # ``"a"`` or ``"b"``: the operand's name in the spec
    dtype: DType
    k_major: bool  # whether neighbours along K are adjacent in the memory from which the kernel loads its tiles
    side: Literal["m", "n"]  # ``"m"`` or ``"n"``: the operand's dimension besides K
    extent: int  # the tile's extent along that side, in elements


def swapped(spec: KernelSpec) -> bool:
    """Whether the kernel computes D^T. Sm90's configuration decides; Sm80's epilogue writes rows of D."""
    return spec.config.transposes(spec.d.major == "col")


def oriented(spec: KernelSpec, operand: Operand) -> Operand:
    """Return the type of an (M, N) tensor as the kernel sees it."""
    return operand.transposed if swapped(spec) else operand


def sides(spec: KernelSpec) -> tuple[Side, Side]:
    """Return the operand along the kernel's M and the one along its N."""
    tile = spec.config.threadblock
    of_a, of_b = loaded(spec.a, spec.b) if spec.config.copies else (spec.a, spec.b)
    a, b = ("a", of_a.dtype, of_a.major == "row"), ("b", of_b.dtype, of_b.major == "col")
    first, second = (b, a) if swapped(spec) else (a, b)
    return Side(*first, "m", tile.m), Side(*second, "n", tile.n)


def halved(spec: KernelSpec, tile: ThreadblockShape) -> ThreadblockShape:
    """Return the part of D that a tile computes: half of the tile if two weights share it."""
    if not spec.epilogue.products:
        return tile
    # At least 1, so that the memory of any illegal declaration can still be computed.
    return replace(tile, m=max(1, tile.m // 2)) if swapped(spec) else replace(tile, n=max(1, tile.n // 2))


def along_n(spec: KernelSpec, kind: Kind) -> bool:
    """Whether an input or output of this kind has one value for each of the kernel's columns."""
    return kind is (Kind.COL if swapped(spec) else Kind.ROW)


def reduced_along_m(spec: KernelSpec) -> Iterator[str]:
    """Yield the names of the outputs that reduce each of the kernel's columns to one value."""
    return (o.name for o in spec.epilogue.outputs if o.reduce is not None and along_n(spec, o.kind))
