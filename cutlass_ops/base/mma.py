"""The Tensor Core instructions by operand type, in one table. Nothing else in the library lists types.

Sources: PTX ISA, sections on ``mma.sync`` (shapes), ``wgmma.mma_async`` (shapes, operands' majors) and their types. The
opcodes are nvdisasm's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cutlass_ops.base.arch import WGMMA_K_BYTES
from cutlass_ops.base.dtypes import READ, STORED, DType, bf16, e4m3, e5m2, f16, f32, f64, i8, i32, tf32, tf32x3

Block = tuple[int, int]


@dataclass(frozen=True)
class MmaSpec:
    """The matrix instructions for one pair of operand types.

    Attributes
    ----------
    a, b, accumulator : DType
        Types of A, B and the accumulator.
    shapes : tuple of (M, N, K)
        Instruction shapes of ``mma.sync``, the usual one first.
    opcode, wgmma_opcode : str
        Machine-code opcodes of ``mma.sync`` and ``wgmma``; empty if there is no such instruction.
    result : DType
        Type of D where nothing says otherwise.
    wgmma_k_major_only : bool
        Whether ``wgmma`` needs K-major operands.
    k_major_only : bool
        Whether kernels of ``mma.sync`` need K-major operands as well.
    hopper_shapes : tuple of (int, int, int)
        Further shapes of ``mma.sync``, of which sm_90 is the first to have them; preferred there.
    rate : float
        Peak throughput relative to BF16.
    scalings : tuple of ((int, int), (int, int))
        Blocks of A (elements along M and K) and of B (along K and N) whose scales a main loop applies.
    copyable : bool
        Whether kernels of ``wgmma`` copy operands that it or TMA cannot read (``declare.spec.copied``). FP8 is not
        copied: that would take as long as the quantisation before it, which can write lines along K.
    """

    a: DType
    b: DType
    accumulator: DType
    shapes: tuple[tuple[int, int, int], ...]
    opcode: str
    wgmma_opcode: str
    result: DType
    wgmma_k_major_only: bool = False
    k_major_only: bool = False
    hopper_shapes: tuple[tuple[int, int, int], ...] = ()
    rate: float = 1.0
    scalings: tuple[tuple[Block, Block], ...] = ()
    copyable: bool = False

    @property
    def bits(self) -> int:
        """Size of an element of A and of B in bits."""
        return self.a.bits

    @property
    def wgmma_types(self) -> str:
        """The end of the instruction's name in PTX: K and types. A kernel that computes D^T takes B's type first."""
        types = ".".join(_PTX.get(t, t.name) for t in (self.accumulator, self.a, self.b))
        return f"k{WGMMA_K_BYTES // self.a.bytes}.{types}"

    @property
    def compute(self) -> DType:
        """The type in which the epilogue computes."""
        return f64 if self.accumulator is f64 else f32

    @property
    def read(self) -> tuple[DType, ...]:
        """What an epilogue reads."""
        return READ if self.compute is f32 else (self.compute,)

    @property
    def stored(self) -> tuple[DType, ...]:
        """What an epilogue stores as (M, N)."""
        if self.compute is not f32:
            return (self.compute,)
        return (*STORED, i8) if self.accumulator is i32 else STORED

    @property
    def results(self) -> tuple[DType, ...]:
        """What D may be. Whole numbers of 32 bits are the sums as they are: ``epilogue.integers`` says of which."""
        return (*self.stored, i32) if self.accumulator is i32 else self.stored

    def shapes_on(self, capability: tuple[int, int]) -> tuple[tuple[int, int, int], ...]:
        """Return the shapes of ``mma.sync`` that a device has, the preferred ones first."""
        return (*(self.hopper_shapes if capability >= (9, 0) else ()), *self.shapes)

    def takes_n(self, n: int) -> bool:
        """Whether ``wgmma`` has an N, a multiple of 8 up to 256: of integers it has fewer."""
        return self.accumulator is not i32 or n % 16 == 0 or n in (8, 24)

    @property
    def along_k_only(self) -> bool:
        """Whether every instruction for these types needs K-major operands."""
        return self.wgmma_k_major_only and (self.k_major_only or not self.shapes)

    def takes_majors(self, a: str, b: str, *, wgmma: bool) -> bool:
        """Whether the instruction reads operands of these majors, from shared memory as they are."""
        only = self.wgmma_k_major_only if wgmma else self.k_major_only
        return not only or (a, b) == ("row", "col")

    def scales(self, blocks: tuple[Block | None, Block | None]) -> bool:
        """Whether a main loop applies the scales of such blocks of A and of B, or there are none."""
        return blocks == (None, None) or blocks in self.scalings


# PTX's names of types that are other ones than ours.
_PTX = {i8: "s8", i32: "s32"}
_16_BITS = ((16, 8, 16), (16, 8, 8))
# Elements along K that share a scale, and those whose sums a thread adds up in FP32.
BLOCK_K = 128
_BLOCKS: tuple[tuple[Block, Block], ...] = (((1, BLOCK_K), (BLOCK_K, 128)), ((1, BLOCK_K), (BLOCK_K, 1)))

MMAS: tuple[MmaSpec, ...] = (
    MmaSpec(bf16, bf16, f32, _16_BITS, "HMMA", "HGMMA", bf16, copyable=True),
    MmaSpec(f16, f16, f32, _16_BITS, "HMMA", "HGMMA", f16, copyable=True),
    # FP32, of which a call says so: MATHS.
    MmaSpec(tf32, tf32, f32, ((16, 8, 8),), "HMMA", "HGMMA", f32, wgmma_k_major_only=True, rate=0.5, copyable=True),
    MmaSpec(tf32x3, tf32x3, f32, ((16, 8, 8),), "HMMA", "", f32, rate=1 / 6),
    # PTX ISA, mma: m8n8k4 from sm_80 on, the larger ones from sm_90 on.
    MmaSpec(
        f64, f64, f64, ((8, 8, 4),), "DMMA", "", f64, hopper_shapes=((16, 8, 4), (16, 8, 8), (16, 8, 16)), rate=1 / 16
    ),
    # Whole numbers, whose sums are exact.
    MmaSpec(
        i8,
        i8,
        i32,
        ((16, 8, 32),),
        "IMMA",
        "IGMMA",
        bf16,
        wgmma_k_major_only=True,
        k_major_only=True,
        rate=2.0,
        copyable=True,
    ),
    # FP8, in every combination: wgmma only.
    *(
        MmaSpec(a, b, f32, (), "", "QGMMA", bf16, wgmma_k_major_only=True, rate=2.0, scalings=_BLOCKS)
        for a in (e4m3, e5m2)
        for b in (e4m3, e5m2)
    ),
)
# Types of A and B.
OPERANDS: tuple[DType, ...] = tuple(dict.fromkeys(t for mma in MMAS for t in (mma.a, mma.b)))

# What the Tensor Cores make of FP32 operands, by the name that a call gives; and how sums of FP8 products are added up.
Math = Literal["tf32", "3xtf32", "fast", "promoted"]
MATHS: dict[Math, DType] = {"tf32": tf32, "3xtf32": tf32x3}

# Of FP8 operands: by the Tensor Core alone, or in FP32 every BLOCK_K of K.
ACCUMULATIONS: tuple[Math, ...] = ("fast", "promoted")

_BY_TYPES = {(mma.a, mma.b): mma for mma in MMAS}


def mma_of(a: DType, b: DType) -> MmaSpec | None:
    """Return the instructions for two operand types, or None."""
    return _BY_TYPES.get((a, b))


def math_of(dtype: DType) -> Math | None:
    """Return what a call says to multiply in a type, None for one that needs no word."""
    return next((name for name, element in MATHS.items() if element is dtype), None)


def pairs() -> str:
    """Return the supported pairs of types, for messages."""
    return ", ".join(f"{mma.a} with {mma.b}" for mma in MMAS)


def blocks(extent: int) -> int:
    """Return how many blocks of 128 an extent has: the last one may be shorter."""
    return -(-extent // BLOCK_K)
