"""What a graph consists of: inputs, operations, outputs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class Kind(str, Enum):
    """How an input or an output spans the (M, N) result.

    ``ROW`` is one value for each column of D, shape (N,); ``COL`` one value for each row of D, shape (M,);
    ``TILE`` one value for each element, shape (M, N); ``SCALAR`` a single value. ``PRODUCT`` is an input of shape
    (K, N) whose product with A has one value for each element: that value is what the epilogue computes with.
    ``INTEGER`` is a single whole number of 64 bits: a seed. ``BLOCKS_A`` and ``BLOCKS_B`` are the scales of blocks of A
    and of B. The main loop applies them to the accumulator, so no operation reads them. ``BLOCKS_D`` is an output: the
    scales of D's blocks of 1x128, shape (M, N / 128), rounded up. ``GROUPS_I4``, ``GROUPS_U4`` and ``GROUPS_E2M1`` are
    the scales of groups along K of a packed B, which also say what its numbers are. ``META_B`` says where the stored
    elements of a 2:4 sparse B are.
    """

    ROW = "row"
    COL = "col"
    TILE = "tile"
    SCALAR = "scalar"
    PRODUCT = "product"
    INTEGER = "integer"
    BLOCKS_A = "blocks_a"
    BLOCKS_B = "blocks_b"
    BLOCKS_D = "blocks_d"
    GROUPS_I4 = "groups_i4"
    GROUPS_U4 = "groups_u4"
    GROUPS_E2M1 = "groups_e2m1"
    META_B = "meta_b"


class Part(NamedTuple):
    """What a tensor of an operand is that the operand has besides its matrix. The main loop reads it."""

    operand: str  # ``"a"`` or ``"b"``
    noun: str  # what messages call it
    shape: str  # for ``help``
    dtypes: tuple[str, ...] = ("f32",)  # the element types that it may have, the usual one first


_16_BITS = ("bf16", "f16")
# Kinds of inputs that are parts of an operand. No operation reads them: the accumulator has them already.
PARTS: dict[Kind, Part] = {
    Kind.BLOCKS_A: Part("a", "scales of blocks", "(..., M, K / 128), FP32, rounded up"),
    Kind.BLOCKS_B: Part("b", "scales of blocks", "(N / 128, K / 128) or (N, K / 128), FP32, rounded up"),
    Kind.GROUPS_I4: Part("b", "scales of groups along K", "(N, K / group), in a's type, packed", _16_BITS),
    Kind.GROUPS_U4: Part("b", "scales and zero points of groups along K", "(N, 2 K / group), packed", _16_BITS),
    Kind.GROUPS_E2M1: Part("b", "scales of groups along K", "(N, K / group), in a's type, packed", _16_BITS),
    Kind.META_B: Part("b", "metadata of a sparse weight", "(N / 64, 8 K), UINT8, both rounded up", ("u8",)),
}
# Scales of which both operands have some, or neither.
BLOCKS = (Kind.BLOCKS_A, Kind.BLOCKS_B)
# The name of the scales of D.
D_SCALE = "d_scale"


class Input(NamedTuple):
    """One named input of an epilogue."""

    name: str  # the parameter's name; a valid C++ identifier as well
    kind: Kind


@dataclass(frozen=True, eq=False)
class Node:
    """One value, and how it is computed."""

    # ``"acc"``, ``"input"``, ``"const"``, ``"integer"``, ``"seed"``, or a name in `GATHERED`, `INDICES` or `OPS`
    # of :mod:`cutlass_ops.epilogue.operations`.
    op: str
    args: tuple[int, ...] = ()  # indices of earlier nodes
    # The input's name for ``"input"``, the value for ``"const"`` (an FP32 value), ``"integer"`` (of 32 bits) and
    # ``"seed"`` (of 64), the element type for ``"cast"``.
    attr: str | float | int | None = None

    # Constants are equal when their bits are: 0.0 and -0.0 are two kernels, and NaN equals itself.
    def _key(self) -> tuple[object, ...]:
        return self.op, self.args, self.attr.hex() if isinstance(self.attr, float) else self.attr

    def __eq__(self, other: object) -> bool:
        return self._key() == other._key() if isinstance(other, Node) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key())


class Output(NamedTuple):
    """One result of an epilogue."""

    name: str  # ``"d"`` for the GEMM's result, else the name that the function gave it
    node: int  # index of the node that holds its value
    # ``TILE`` for an (M, N) tensor, ``COL`` for a reduction over each row, shape (M,), ``ROW`` for one over each
    # column, shape (N,), ``BLOCKS_D`` for the scales of D's blocks.
    kind: Kind = Kind.TILE
    # A name in `REDUCTIONS` of :mod:`cutlass_ops.epilogue.operations`; None for a tile; D's FP8 type for scales.
    reduce: str | None = None

    @property
    def reduction(self) -> str | None:
        """The name of the reduction that it is, or None."""
        return None if self.kind is Kind.BLOCKS_D else self.reduce
