"""The shared memory of a GEMV kernel (``templates/include/cutlass_ops/gemv.h``)."""

from __future__ import annotations

from cutlass_ops.base.dtypes import f32
from cutlass_ops.declare.config import GemvConfig
from cutlass_ops.declare.spec import KernelSpec


def shared_memory(spec: KernelSpec, config: GemvConfig, stages: int | None = None) -> int:
    """Return the bytes that warps exchange in ``gemv.h``. ``stages`` is ignored.

    These are two sums per row for its means, and products: of a whole tile, or of a column if pairs are swapped.
    """
    columns = config.threadblock.n if config.by_tile else int(spec.epilogue.swaps_pairs)
    numbers = (2 if spec.epilogue.gathered else 0) + (1 + len(spec.epilogue.products)) * columns
    return config.warps * config.rows * numbers * f32.bytes
