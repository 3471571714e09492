"""How long kernels of ordinary loads take: as long as reading B does, or the arithmetic on what was read.

The numbers are those of an H100 (benchmarks/NOTES.md, 2026-11-22). Shapes of thread blocks differ by a twentieth: this
says whether any is worth measuring, and measurement which.
"""

from __future__ import annotations

import math

from cutlass_ops.config import GemvConfig

_DRAM = 3.1e6  # bytes a microsecond
_START = 1.2  # microseconds
# Instructions of a warp for each piece of B, and for each row of A or each eight besides; how many a multiprocessor
# issues in a microsecond.
_PER_PIECE, _PER_ROW, _PER_EIGHT = 10.0, 18.0, 8.0
_INSTRUCTIONS = 4 * 1.6e3


def predict(config: GemvConfig, problem: tuple[int, int, int], multiprocessors: int, element_bytes: int = 2) -> float:
    """Return a kernel's time in microseconds.

    Parameters
    ----------
    config : GemvConfig
        A legal configuration.
    problem : tuple of int
        M, N and K, each at least 1.
    multiprocessors : int
        How many there are.
    element_bytes : int
        Width of an operand's element.
    """
    m, n, k = problem
    passes = math.ceil(m / config.rows)
    memory = element_bytes * (m * k + k * n * passes + m * n) / _DRAM
    pieces = passes * n * math.ceil(k * element_bytes / 16 / 32)  # of a warp
    rows = _PER_EIGHT * config.rows / 8 if config.by_tile else _PER_ROW * config.rows
    compute = pieces * (_PER_PIECE + rows) / (_INSTRUCTIONS * multiprocessors)
    # Among kernels that all wait for memory, the one with the least padding wins.
    padding = 1 + 0.01 * (min(4.0, passes * config.rows / m) - 1)
    # Blocks of 8 warps with 8 pieces each, or 4 of two columns, are the fastest more often than others.
    unusual = abs(math.log2(config.warps / 8)) + abs(math.log2(config.pieces / (4 if config.by_tile else 8)))
    return (max(memory, compute) + _START) * (1 + 0.01 * unusual) * padding
