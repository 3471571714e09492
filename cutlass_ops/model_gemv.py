"""How long kernels of ordinary loads take: to read B, and for the arithmetic on what was read.

The numbers were fitted to what tuning measured on an H100 for up to 16 rows (``benchmarks/fit_gemv.py``).
"""

from __future__ import annotations

import math
from typing import NamedTuple

from cutlass_ops.config import GemvConfig

_INSTRUCTIONS = 4 * 1.6e3  # that a multiprocessor issues in a microsecond


class Numbers(NamedTuple):
    """What was fitted.

    Attributes
    ----------
    bandwidth : float
        Of the memory, in bytes a picosecond.
    start : float
        Microseconds before and after.
    per_piece, per_row, per_tile, per_eight : float
        Instructions of a warp for each piece of B, and besides for each row of A, or for a tile and each eight rows of
        it.
    warps, warps_of_tile, pieces, pieces_of_tile : float
        Of the fastest thread block, as logarithms to base 2.
    fewer_by_rows : float
        By how much fewer pieces are best for each doubling of rows, which cost registers.
    by_warps, by_pieces, by_pieces_of_tile : float
        What another thread block loses: for each squared doubling.
    in_vain : float
        Of what the last step of K reads in vain, how much costs time.
    """

    bandwidth: float = 3.37
    start: float = 1.9
    per_piece: float = 3.6
    per_row: float = 4.8
    per_tile: float = 9.4
    per_eight: float = 5.6
    warps: float = 2.29
    warps_of_tile: float = 2.92
    pieces: float = 3.19
    pieces_of_tile: float = 1.63
    fewer_by_rows: float = 2.0
    by_warps: float = 0.0144
    by_pieces: float = 0.0054
    by_pieces_of_tile: float = 0.052
    in_vain: float = 0.086


H100 = Numbers()


def predict(
    config: GemvConfig, problem: tuple[int, int, int], multiprocessors: int, element_bytes: int = 2, of: Numbers = H100
) -> float:
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
    of : Numbers
        The chip's.
    """
    m, n, k = problem
    warps, pieces = math.log2(config.warps), math.log2(config.pieces)
    if config.by_tile:
        per_piece = of.per_piece + of.per_tile + of.per_eight * config.rows / 8
        unlike = (
            of.by_warps * (warps - of.warps_of_tile) ** 2 + of.by_pieces_of_tile * (pieces - of.pieces_of_tile) ** 2
        )
    else:
        per_piece = of.per_piece + of.per_row * config.rows
        fastest = of.pieces - of.fewer_by_rows * math.log2(config.rows)
        unlike = of.by_warps * (warps - of.warps) ** 2 + of.by_pieces * (pieces - fastest) ** 2
    passes = math.ceil(m / config.rows)
    memory = element_bytes * (m * k + k * n * passes + m * n) / (of.bandwidth * 1e6)
    of_column = k * element_bytes / 16  # pieces
    read = passes * n * math.ceil(of_column / 32)  # by a warp each
    compute = read * per_piece / (_INSTRUCTIONS * multiprocessors)
    step = config.pieces * (4 * config.warps if config.by_tile else 32)
    padding = math.ceil(of_column / step) * step / of_column - 1
    return (of.start + memory + compute) * (1 + unlike + of.in_vain * padding)
