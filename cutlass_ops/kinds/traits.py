"""The properties of a signature that affect its kernels' times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np

from cutlass_ops.base import arch
from cutlass_ops.base.dtypes import PACKED, SPARSE
from cutlass_ops.base.mma import mma_of
from cutlass_ops.declare.device import Device
from cutlass_ops.declare.form import GROUPED, RAGGED_K
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.signature import OpSignature
from cutlass_ops.declare.spec import Major, copied
from cutlass_ops.epilogue.graph import Graph
from cutlass_ops.epilogue.nodes import BLOCKS, Kind
from cutlass_ops.kinds.arrays import Extents, Flags, Floats, Places, Problems

# Clocks of the longest epilogues that the tables' times stand for (:func:`clocks`).
_SHORT_CLOCKS = 24.0

# Instructions of an operation, where there are more than one: by the machine code, rounded.
_INSTRUCTIONS = {
    **dict.fromkeys(("div", "log1p", "expm1", "softplus"), 8),
    **dict.fromkeys(("reciprocal", "sqrt", "rsqrt", "exp", "exp2", "log", "log2"), 4),
    **dict.fromkeys(("sigmoid", "silu", "elu"), 6),
    **dict.fromkeys(("tanh", "gelu_tanh", "mish"), 12),
    **dict.fromkeys(("gelu", "ndtr", "pow"), 16),
    **dict.fromkeys(("erf", "sin", "cos"), 20),
    "uniform": 60,
}
_FREE = frozenset(("cast", "to_float"))
# To load and convert an element of a tile, to round and store one, and to add one up.
_TILE, _STORE, _REDUCE = 2, 2, 3
# To find the greatest of a block, to multiply by its inverse, and to store.
_QUANTIZE = 6
# Clocks from one instruction to the next, where a warp has its scheduler to itself (benchmarks/NOTES.md).
_CLOCKS = 2.0


def clocks(epilogue: Graph) -> float:
    """Return the clocks that a warp alone on its scheduler takes for an element of D of each of its threads."""
    kinds = {given.name: given.kind for given in epilogue.inputs}
    each: list[bool] = []  # whether a node has another value for each element
    count = 0
    for node in epilogue.nodes:
        of_element = node.op == "acc" or kinds.get(str(node.attr)) in (Kind.TILE, Kind.PRODUCT)
        each.append(of_element or node.op == "uniform" or any(each[at] for at in node.args))
        if node.args and each[-1] and node.op not in _FREE:
            count += _INSTRUCTIONS.get(node.op, 1)
        elif node.op == "uniform":
            count += _INSTRUCTIONS[node.op]
    count += sum(_TILE for given in epilogue.inputs if given.kind is Kind.TILE)
    for output in epilogue.outputs:
        count += _STORE if output.kind is Kind.TILE else 0 if output.kind in BLOCKS else _REDUCE
    if epilogue.quantized is not None:
        count += _QUANTIZE
    return _CLOCKS * count


Extent = Literal["m", "n", "k"]
_Extents = TypeVar("_Extents", Problem, Extents)


@dataclass(frozen=True)
class Traits:
    """The properties of a signature that affect its kernels' times."""

    # Bytes of an element of A, and of D; less than 1 for packed ones
    element_bytes: float
    d_bytes: float
    narrow: float = 1.0  # bytes of an element of B, relative to one of A
    converts: bool = False  # whether threads convert B before it is multiplied
    sparse: bool = False  # whether B has two of each four elements, which instructions of its own multiply
    majors: tuple[Major, Major] = ("row", "col")  # majors of A and B
    alignments: tuple[int, int] = (8, 8)  # alignments of A and B, in elements
    weights: int = 1  # number of matrices that A is multiplied by. N of a problem is that of one of them.
    scatters: bool = False  # whether D is aligned to one element only, so that each element is stored by itself
    gathers: bool = False  # whether the epilogue uses means of A's rows
    promotes: bool = False  # whether sums of products are added up in FP32 every 128 of K
    scaled: bool = False  # whether blocks of the operands have scales
    grouped: bool = False  # whether rows belong to groups, whose tiles have one order
    rate: float = 1.0  # peak throughput of products relative to BF16
    ragged_k: bool = False  # whether K belongs to groups, whose tiles are not ordered by GPC
    along_k: bool = False  # whether kernels that load by TMA read A and B along K only, or copies of them that lie so
    copied: tuple[bool, bool] = (False, False)  # whether these kernels copy A, and whether they copy B
    # How long an epilogue computes an element of D, where that is longer than in those that were measured
    # (:func:`clocks`)
    clocks: float = 0.0

    @classmethod
    def of(cls, signature: OpSignature) -> Traits:
        """Return the traits of a signature."""
        mma = mma_of(signature.a.dtype, signature.b.dtype)
        unit = None if mma is None else mma.by_tma
        return cls(
            element_bytes=signature.a.dtype.bits / 8,
            d_bytes=signature.d.dtype.bits / 8,
            # A sparse weight has a bit of metadata for each element.
            narrow=(signature.b.dtype.bits + (signature.b.dtype in SPARSE)) / signature.a.dtype.bits,
            converts=signature.b.dtype in PACKED,
            sparse=signature.b.dtype in SPARSE,
            majors=signature.majors,
            alignments=signature.alignments,
            weights=1 + len(signature.epilogue.products),
            scatters=signature.d.alignment == 1,
            gathers=bool(signature.epilogue.gathered),
            promotes=signature.promoted,
            scaled=bool(signature.epilogue.block_scales),
            grouped=signature.form == GROUPED,
            rate=1.0 if mma is None else mma.rate,
            ragged_k=signature.form == RAGGED_K,
            along_k=unit is not None and unit.k_major_only,
            copied=copied(signature.a, signature.b),
            clocks=max(0.0, clocks(signature.epilogue) - _SHORT_CLOCKS),
        )

    @property
    def lines(self) -> tuple[Extent, Extent]:
        """The extents that are contiguous in A and in B, as kernels that load by TMA have them."""
        a, b = ("row", "col") if self.along_k else self.majors
        return ("k" if a == "row" else "m"), ("k" if b == "col" else "n")

    def whole(self, problem: _Extents) -> _Extents:
        """Return a problem, or extents of several, with N of all weights together."""
        return problem if self.weights == 1 else problem._replace(n=problem.n * self.weights)

    def odd(self, problems: Problems) -> Places:
        """Return how many operands have :func:`odd` lines, with shape (problems,)."""
        extents = Extents.of(problems)
        found = np.zeros(extents.size, np.int64)
        for line, relative in zip(self.lines, (1.0, self.narrow), strict=True):
            found += odd(getattr(extents, line).reshape(-1), self.element_bytes * relative)
        return found


def odd(line: Floats, element_bytes: float) -> Flags:
    """Return whether the length of a line, in elements, is not a multiple of the L2 cache's lines."""
    return np.asarray(line * element_bytes % arch.CACHE_LINE_BYTES != 0)


_Own = TypeVar("_Own", bound="PlainTimer")


@dataclass(frozen=True, eq=False)
class PlainTimer:
    """A time model of kernels that do no work besides the GEMM: see :class:`cutlass_ops.kinds.kind.Timer`.

    `blocks` is a named tuple of arrays of shape (1, configurations), which the class makes of configurations.
    """

    blocks: Any
    traits: Traits

    made_by: ClassVar[Any]

    @classmethod
    def of(cls: type[_Own], configs: Sequence[Any], traits: Traits) -> _Own:
        """Return the model of some configurations."""
        return cls(cls.made_by.of(configs), traits)

    def take(self: _Own, places: Places) -> _Own:
        """Return the model of some of these configurations; repeats are allowed."""
        return replace(self, blocks=self.blocks._make(x[:, places] for x in self.blocks))

    def besides(self, problems: Problems, _: Device) -> Floats:
        """Return zeros."""
        return np.zeros(np.broadcast_shapes(Extents.of(problems).m.shape, self.blocks[0].shape))
