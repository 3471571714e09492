"""The exact shared memory of an Sm80 kernel.

The formulas follow CUTLASS's headers and give ``sizeof(GemmKernel::SharedStorage)``.
``tests/compile/test_legality_compile.py`` compares them with the compiler. They accept any declaration with valid field
values, legal or not.

Sources: the headers of CUTLASS 4.2, named at each formula relative to ``cutlass/``.
"""

from __future__ import annotations

from cutlass_ops.base.dtypes import f32
from cutlass_ops.base.mma import sums_of
from cutlass_ops.declare.orientation import reduced_along_m
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.epilogue.operations import REDUCTIONS
from cutlass_ops.kinds.layout import Block, struct, union
from cutlass_ops.kinds.sm80.config import Sm80Config


def shared_memory(spec: KernelSpec, config: Sm80Config, stages: int | None = None) -> int:
    """``SharedStorage`` in ``gemm/kernel/gemm_universal.h``: a union of main loop and epilogue."""
    tile = config.threadblock
    row_bytes = spec.a.dtype.bytes_of(tile.k * (config.stages if stages is None else stages))
    mainloop = struct(Block(tile.m * row_bytes), Block(tile.n * row_bytes))
    return union(mainloop, _epilogue(spec, config)).size


def _epilogue(spec: KernelSpec, config: Sm80Config) -> Block:
    """``EpilogueWithVisitorCallbacks::SharedStorage``: eight rows of accumulators per warp, and visitors' storage."""
    tile, warp = config.threadblock, config.warp
    # CUTLASS exchanges twice as many rows of FP32 at once if D's accesses have 16 bytes (default_epilogue_tensor_op.h).
    sums = sums_of(spec.a.dtype, spec.b.dtype)
    fragments = 2 if spec.d.aligned and sums is f32 else 1
    padding = 8
    rows = tile.m // warp.m * 8 * fragments
    accumulators = Block(sums.bytes_of(rows * (tile.n + padding)))
    along_m = set(reduced_along_m(spec))
    kept = [REDUCTIONS[o.reduce].kept_bytes for o in spec.epilogue.outputs if o.reduce and o.name in along_m]
    reductions = [Block(config.warps * tile.n * each, each) for each in kept]
    return struct(accumulators, struct(*reductions) if reductions else Block(1, 1))
