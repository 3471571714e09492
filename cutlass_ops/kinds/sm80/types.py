"""How CUTLASS 2.x's main loop multiplies each type of A and B: a row for those that are not like 16 bits."""

from __future__ import annotations

from dataclasses import dataclass

from cutlass_ops.base import arch
from cutlass_ops.base.dtypes import DType, f32, f64, i8, tf32, tf32x3


@dataclass(frozen=True)
class Multiplied:
    """What rules, search space and lowering ask of a type."""

    operator: str = "OpMultiplyAdd"  # CUTLASS's name of what a product of two elements is
    known_as: DType | None = None  # as what CUTLASS loads it, if that is another type
    by_element: bool = False  # whether threads copy one element at a time, a warp 16 x 2 of them
    # Accumulators may use one such part of a thread's registers. Operands and the epilogue need the rest.
    register_share: int = 2
    part: int = 1  # rows and columns of a warp's tile that are read at a time
    warps: tuple[int, int] = (1, arch.MAX_THREADS // arch.WARP)  # the fewest and the most of a thread block
    tiles_k: tuple[int, ...] = ()  # the only extents of a tile along K; any if empty
    tiles_k_bytes: tuple[int, ...] = (64, 128)  # those worth measuring, in bytes
    every_instruction: bool = False  # whether all instructions are worth measuring, not the preferred one alone
    small_warps: bool = False  # whether tables' warps have too large tiles, since operands have two parts
    no_two_stages: str = ""  # why a kernel cannot have two stages
    whole_lines: bool = False  # whether narrow loads are not tested
    spills_with_stream_k: int | None = None  # K of an instruction from which stream-K leaves too few registers


_USUAL = Multiplied()
_OF_FP32 = "and CUTLASS's main loop of two stages multiplies FP32 in FP16"
_UNTESTED = "for which two stages are not tested"
_TYPES = {
    # CUTLASS rounds what warps read of shared memory, which the instruction would cut, if it knows FP32.
    # DefaultMma<float, ..., 2, ...> in gemm/threadblock/default_mma.h: OpMultiplyAddFastF16.
    tf32: Multiplied(known_as=f32, no_two_stages=_OF_FP32),
    # Operands in two parts take twice as many registers.
    tf32x3: Multiplied("OpMultiplyAddFastF32", f32, register_share=4, small_warps=True, no_two_stages=_OF_FP32),
    i8: Multiplied("OpMultiplyAddSaturate", whole_lines=True, no_two_stages=_UNTESTED),
    # gemm/threadblock/default_mma_core_sm80.h, double: a warp copies 16 x 2 elements at a time, one a lane, and
    # multiplies parts of 16 rows and 16 columns. With 8 warps its maps share tiles of these K evenly:
    # tests/compile/test_doubles_on_the_host.py. With stream-K, 88 bytes of a thread spill at 128 x 64 x 32.
    f64: Multiplied(
        by_element=True,
        part=16,
        warps=(2, 8),
        tiles_k=(16, 32),
        tiles_k_bytes=(128, 256),
        every_instruction=True,
        no_two_stages=_UNTESTED,
        spills_with_stream_k=16,
    ),
}


def multiplied(dtype: DType) -> Multiplied:
    """Return how a type of A and B is multiplied."""
    return _TYPES.get(dtype, _USUAL)
