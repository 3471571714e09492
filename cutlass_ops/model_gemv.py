"""How long kernels of ordinary loads take: to read B, and for the arithmetic on what was read.

The numbers were fitted to what tuning measured on an H100 for up to 16 rows (``benchmarks/fit_gemv.py``).
"""

from __future__ import annotations

import math
from typing import NamedTuple

from cutlass_ops.config import GemvConfig

_INSTRUCTIONS = 4 * 1.6e3  # that a multiprocessor issues in a microsecond
_WARPS = 32  # of a multiprocessor, for the registers that they take


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
    latency : float
        Of the memory, in microseconds.
    """

    bandwidth: float = 3.36
    start: float = 2.1
    per_piece: float = 2.08
    per_row: float = 2.68
    per_tile: float = 5.56
    per_eight: float = 3.27
    warps: float = 2.5
    warps_of_tile: float = 2.93
    pieces: float = 2.95
    pieces_of_tile: float = 1.34
    fewer_by_rows: float = 1.95
    by_warps: float = 0.0209
    by_pieces: float = 0.00563
    by_pieces_of_tile: float = 0.0243
    in_vain: float = 0.0959
    latency: float = 0.417


H100 = Numbers()
# By its memory's peak over an H100's.
H200 = Numbers(bandwidth=4.81)


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
    tile = config.threadblock
    blocks = math.ceil(n / tile.n)
    # What is on its way at a time: few thread blocks keep no memory busy.
    resident = min(blocks, multiprocessors * max(1, _WARPS // config.warps))
    on_its_way = element_bytes * resident * tile.n * min(tile.k, k)
    per_byte = math.hypot(1 / (of.bandwidth * 1e6), of.latency / on_its_way)
    memory = element_bytes * (m * k + k * n * passes + m * n) * per_byte
    of_column = k * element_bytes / 16  # pieces
    read = passes * n * math.ceil(of_column / 32)  # by a warp each
    compute = read * per_piece / (_INSTRUCTIONS * min(blocks, multiprocessors))
    step = config.pieces * (4 * config.warps if config.by_tile else 32)
    padding = math.ceil(of_column / step) * step / of_column - 1
    return (of.start + memory + compute) * (1 + unlike + of.in_vain * padding)
