"""The Tensor Core instructions by operand type, in one table. Nothing else in the library lists types.

Sources: PTX ISA, sections on ``mma.sync`` (shapes), ``wgmma.mma_async`` (shapes, operands' majors) and their types. The
opcodes are nvdisasm's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cutlass_ops.base.arch import MMA_SYNC, WGMMA, Family
from cutlass_ops.base.dtypes import (
    FP8,
    OWN,
    PACKED,
    READ,
    STORED,
    DType,
    bf16,
    bf16s,
    e4m3s,
    e5m2s,
    f16,
    f16s,
    f32,
    f64,
    i8,
    i8s,
    i32,
    tf32,
    tf32x3,
)

Block = tuple[int, int]
Scaling = tuple[Block | None, Block | None]  # of A and of B; None without scales
Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Unit:
    """The instructions of one family for a pair of operand types."""

    family: Family
    opcode: str  # in machine code
    # (M, N, K) of ``mma.sync``, the usual one first; those of ``wgmma`` follow from the family
    shapes: tuple[Shape, ...] = ()
    hopper_shapes: tuple[Shape, ...] = ()  # further shapes, which sm_90 is the first to have; preferred there
    k_major_only: bool = False  # whether operands must be K-major
    # Whether kernels copy operands that the instruction or TMA cannot read (``declare.spec.copied``). FP8 is not
    # copied: that would take as long as the quantisation before it, which can write lines along K.
    copyable: bool = False
    # blocks of A (elements along M and K) and of B (along K and N) whose scales a main loop applies
    scalings: tuple[Scaling, ...] = ()
    promotes: bool = False  # whether a main loop may add up sums in FP32, as they have fewer bits

    def shapes_on(self, capability: tuple[int, int]) -> tuple[Shape, ...]:
        """Return the shapes of ``mma.sync`` that a device has, the preferred ones first."""
        return (*(self.hopper_shapes if capability >= (9, 0) else ()), *self.shapes)

    def takes_majors(self, a: str, b: str) -> bool:
        """Whether the instruction reads operands of these majors, from shared memory as they are."""
        return not self.k_major_only or (a, b) == ("row", "col")


@dataclass(frozen=True)
class MmaSpec:
    """The matrix instructions for one pair of operand types."""

    a: DType
    b: DType
    accumulator: DType
    result: DType  # type of D if nothing says otherwise
    units: tuple[Unit, ...]  # Families with instructions for these types. Kernels of other families refuse these types.
    rate: float = 1.0  # peak throughput relative to BF16
    error: float = 1e-4  # the relative error that sums may have, besides that of rounding them to D's type

    def by(self, family: Family) -> Unit | None:
        """Return a family's unit for these types, or None."""
        return next((unit for unit in self.units if unit.family == family), None)

    @property
    def by_tma(self) -> Unit | None:
        """The unit of a family whose kernels load by TMA, for these types, or None."""
        return next((unit for unit in self.units if unit.family.tma), None)

    @property
    def scalings(self) -> tuple[Scaling, ...]:
        """Blocks of A and of B whose scales some main loop applies."""
        return tuple(dict.fromkeys(blocks for unit in self.units for blocks in unit.scalings))

    @property
    def promotes(self) -> bool:
        """Whether some main loop adds up sums of products in FP32, as they have fewer bits."""
        return any(unit.promotes for unit in self.units)

    @property
    def bits(self) -> int:
        """Size of an element of A and of B in bits."""
        return self.a.bits

    @property
    def own(self) -> bool:
        """Whether B is a weight in a form of its own, which only main loops for it read."""
        return self.b in OWN

    @property
    def wgmma_types(self) -> str:
        """The end of the instruction's name in PTX: K and types. A kernel that computes D^T takes B's type first."""
        types = ".".join(_PTX.get(t, t.name) for t in (self.accumulator, self.a, self.b))
        return f"k{self.a.count_in(WGMMA.k_bytes)}.{types}"

    @property
    def compute(self) -> DType:
        """The type in which the epilogue computes."""
        return f64 if self.accumulator is f64 else f32

    @property
    def read(self) -> tuple[DType, ...]:
        """Types that an epilogue reads."""
        return READ if self.compute is f32 else (self.compute,)

    @property
    def stored(self) -> tuple[DType, ...]:
        """Types that an epilogue stores as (M, N)."""
        if self.compute is not f32:
            return (self.compute,)
        return (*STORED, i8) if self.accumulator is i32 else STORED

    @property
    def results(self) -> tuple[DType, ...]:
        """Types of D. Whole numbers of 32 bits are the unchanged sums: ``epilogue.integers`` says for which."""
        return (*self.stored, i32) if self.accumulator is i32 else self.stored

    @property
    def longest_k(self) -> int | None:
        """The greatest K at which no sum overflows, whatever the values; None of types whose sums have no end.

        The accumulator holds sums up to 2**31 - 1. Beyond, ``wgmma`` wraps, and ``mma.sync`` with ``.satfinite`` clamps
        each step (PTX ISA). The largest product is that of the two smallest numbers, (-128)² = 2**14.
        """
        if self.accumulator is not i32:
            return None
        return ((1 << i32.bits - 1) - 1) // (1 << 2 * self.bits - 2)

    def takes_n(self, n: int) -> bool:
        """Whether ``wgmma`` has an N, a multiple of 8 up to 256: of integers it has fewer."""
        return self.accumulator is not i32 or n % 16 == 0 or n in (8, 24)

    @property
    def along_k_only(self) -> bool:
        """Whether every instruction for these types needs K-major operands."""
        return all(unit.k_major_only for unit in self.units)

    def scales(self, blocks: Scaling) -> bool:
        """Whether a main loop applies the scales of such blocks of A and of B, or there are none."""
        return blocks == (None, None) or blocks in self.scalings


# Elements along K of a packed weight that share a scale. The last one stands for all of K, whatever that is.
WHOLE_K = 1 << 16
GROUPS = (16, 32, 64, 128, WHOLE_K)
_GROUPS: tuple[Scaling, ...] = tuple((None, (group, 1)) for group in GROUPS)
# Elements of a sparse weight, along K and N, whose metadata lie together: operand/sparsity.py.
META_BLOCK = 64
_META: tuple[Scaling, ...] = ((None, (META_BLOCK, META_BLOCK)),)

# PTX's names of types that are other ones than ours.
_PTX = {i8: "s8", i32: "s32"}
_16_BITS = ((16, 8, 16), (16, 8, 8))
# Elements along K that share a scale, and those whose sums a thread adds up in FP32.
BLOCK_K = 128
_BLOCKS: tuple[Scaling, ...] = (((1, BLOCK_K), (BLOCK_K, 128)), ((1, BLOCK_K), (BLOCK_K, 1)))

_QGMMA = Unit(WGMMA, "QGMMA", k_major_only=True, scalings=_BLOCKS, promotes=True)

MMAS: tuple[MmaSpec, ...] = (
    *(
        MmaSpec(each, each, f32, each, (Unit(MMA_SYNC, "HMMA", _16_BITS), Unit(WGMMA, "HGMMA", copyable=True)))
        for each in (bf16, f16)
    ),
    # A packed weight: threads convert it to A's type.
    *(
        MmaSpec(
            *(each, packed, f32, each),
            (
                Unit(MMA_SYNC, "HMMA", ((16, 8, 16),), k_major_only=True, scalings=_GROUPS),
                Unit(WGMMA, "HGMMA", k_major_only=True, scalings=_GROUPS),
            ),
            error=2.0**-8,  # a number times its scale is rounded to A's type
        )
        for each in (bf16, f16)
        for packed in PACKED
    ),
    # A weight with two of four elements: twice the products in the same time.
    *(
        MmaSpec(
            *(a, b, sums, result),
            (Unit(WGMMA, opcode, k_major_only=True, scalings=_META),),
            rate=rate,
            error=error,
        )
        for a, b, sums, result, opcode, rate, error in (
            (bf16, bf16s, f32, bf16, "HGMMA.SP", 2.0, 1e-4),
            (f16, f16s, f32, f16, "HGMMA.SP", 2.0, 1e-4),
            *((a, b, f32, bf16, "QGMMA.SP", 4.0, 2.0**-9) for a in FP8 for b in (e4m3s, e5m2s)),
            (i8, i8s, i32, bf16, "IGMMA.SP", 4.0, 2.0**-9),
        )
    ),
    # FP32, if a call says so: MATHS.
    MmaSpec(
        *(tf32, tf32, f32, f32),
        (Unit(MMA_SYNC, "HMMA", ((16, 8, 8),)), Unit(WGMMA, "HGMMA", k_major_only=True, copyable=True)),
        rate=0.5,
        error=2.0**-10,  # operands are first rounded to 10 bits of fraction
    ),
    MmaSpec(tf32x3, tf32x3, f32, f32, (Unit(MMA_SYNC, "HMMA", ((16, 8, 8),)),), rate=1 / 6),
    # PTX ISA, mma: m8n8k4 from sm_80 on, the larger ones from sm_90 on.
    MmaSpec(
        *(f64, f64, f64, f64),
        (Unit(MMA_SYNC, "DMMA", ((8, 8, 4),), ((16, 8, 4), (16, 8, 8), (16, 8, 16))),),
        rate=1 / 16,
        error=1e-6,
    ),
    # Whole numbers, whose sums are exact.
    MmaSpec(
        *(i8, i8, i32, bf16),
        (
            Unit(MMA_SYNC, "IMMA", ((16, 8, 32),), k_major_only=True),
            Unit(WGMMA, "IGMMA", k_major_only=True, copyable=True),
        ),
        rate=2.0,
        error=2.0**-9,
    ),
    # FP8, in every combination: wgmma only. The Tensor Core adds up these products with fewer bits (docs/fp8.md).
    *(MmaSpec(a, b, f32, bf16, (_QGMMA,), rate=2.0, error=2.0**-9) for a in FP8 for b in FP8),
)
# Types of A and B, but for weights in forms of their own: a call names A's type.
_PLAIN = tuple(mma for mma in MMAS if not mma.own)
OPERANDS: tuple[DType, ...] = tuple(dict.fromkeys(t for mma in _PLAIN for t in (mma.a, mma.b)))

# What the Tensor Cores make of FP32 operands, by the name that a call gives; and how sums of FP8 products are added up.
Math = Literal["tf32", "3xtf32", "fast", "promoted"]
MATHS: dict[Math, DType] = {"tf32": tf32, "3xtf32": tf32x3}

# For FP8 operands: by the Tensor Core alone, or in FP32 every BLOCK_K of K.
ACCUMULATIONS: tuple[Math, ...] = ("fast", "promoted")

_BY_TYPES = {(mma.a, mma.b): mma for mma in MMAS}


def mma_of(a: DType, b: DType) -> MmaSpec | None:
    """Return the instructions for two operand types, or None."""
    return _BY_TYPES.get((a, b))


def unit_of(a: DType, b: DType, family: Family) -> Unit | None:
    """Return what a family of instructions has for two operand types, or None."""
    mma = mma_of(a, b)
    return None if mma is None else mma.by(family)


def sums_of(a: DType, b: DType) -> DType:
    """Return the accumulator's type for two operand types; FP32 if nothing multiplies them."""
    mma = mma_of(a, b)
    return f32 if mma is None else mma.accumulator


def math_of(dtype: DType) -> Math | None:
    """Return the argument with which a call asks for a type, None for a type that needs none."""
    return next((name for name, element in MATHS.items() if element is dtype), None)


def pairs() -> str:
    """Return the supported pairs of types, for messages: without weights in forms of their own."""
    return ", ".join(f"{mma.a} with {mma.b}" for mma in _PLAIN)


def blocks(extent: int) -> int:
    """Return how many blocks of 128 an extent has: the last one may be shorter."""
    return -(-extent // BLOCK_K)
