"""How long kernels of ordinary loads take: to read B, and for the arithmetic on what was read.

The numbers were fitted to what tuning measured on an H100 for up to 16 rows (``benchmarks/fit_gemv.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from cutlass_ops.declare.config import GemvConfig
from cutlass_ops.declare.device import Device
from cutlass_ops.declare.problem import Problem
from cutlass_ops.kinds.arrays import Extents, Flags, Floats
from cutlass_ops.kinds.traits import Traits

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
_BY_CHIP = {"NVIDIA H200": H200}


def predict(
    config: GemvConfig, problem: Problem, multiprocessors: int, element_bytes: int = 2, of: Numbers = H100
) -> float:
    """Return one kernel's time in microseconds; :func:`times` for one configuration and problem."""
    return times([config], [problem], multiprocessors, element_bytes, of).item()


def times(
    configs: Sequence[GemvConfig],
    problems: Sequence[Problem],
    multiprocessors: int,
    element_bytes: int = 2,
    of: Numbers = H100,
) -> Floats:
    """Return kernels' times in microseconds, of shape (problems, configurations).

    Parameters
    ----------
    configs : sequence of GemvConfig
        Legal configurations.
    problems : sequence of Problem
        Each extent at least 1.
    multiprocessors : int
        How many there are.
    element_bytes : int
        Width of an operand's element.
    of : Numbers
        The chip's.
    """
    m, n, k, gemms = Extents.of(problems)
    each = [(c.rows, c.warps, c.pieces, c.threadblock.n, c.threadblock.k) for c in configs]
    rows, warps, pieces, columns, depth = np.array(each, np.float64).reshape(-1, 5).T
    by_tile = np.array([c.by_tile for c in configs], np.bool_)

    per_piece = of.per_piece + np.where(by_tile, of.per_tile + of.per_eight * rows / 8, of.per_row * rows)
    fastest = np.where(by_tile, of.pieces_of_tile, of.pieces - of.fewer_by_rows * np.log2(rows))
    more_warps = np.log2(warps) - np.where(by_tile, of.warps_of_tile, of.warps)
    more_pieces = np.log2(pieces) - fastest
    unlike = of.by_warps * more_warps**2 + np.where(by_tile, of.by_pieces_of_tile, of.by_pieces) * more_pieces**2

    passes = np.ceil(m / rows)
    blocks = gemms * np.ceil(n / columns)
    # What is on its way at a time: few thread blocks keep no memory busy.
    resident = np.minimum(blocks, multiprocessors * np.maximum(1, _WARPS // warps))
    on_its_way = element_bytes * resident * columns * np.minimum(depth, k)
    per_byte = np.hypot(1 / (of.bandwidth * 1e6), of.latency / on_its_way)
    memory = element_bytes * gemms * (m * k + k * n * passes + m * n) * per_byte
    of_column = k * element_bytes / 16  # pieces
    read = gemms * passes * n * np.ceil(of_column / 32)  # by a warp each
    compute = read * per_piece / (_INSTRUCTIONS * np.minimum(blocks, multiprocessors))
    step = pieces * np.where(by_tile, 4 * warps, 32)
    padding = np.ceil(of_column / step) * step / of_column - 1
    return np.asarray((of.start + memory + compute) * (1 + unlike + of.in_vain * padding))


@dataclass(frozen=True, eq=False)
class GemvTimer:
    """The model of some configurations for operands with some traits; see :class:`cutlass_ops.kinds.kind.Timer`."""

    configs: Sequence[GemvConfig]
    traits: Traits

    def times(self, problems: Sequence[Problem], device: Device) -> tuple[Floats, Flags]:
        """Return microseconds; their tiles have no order by GPC."""
        found = times(self.configs, problems, device.multiprocessors, of=_BY_CHIP.get(device.name, H100))
        return found, np.zeros_like(found, np.bool_)

    def besides(self, problems: Sequence[Problem], _: Device) -> Floats:
        """Return zeros: what these kernels do besides a GEMM is part of their times."""
        return np.zeros((len(problems), len(self.configs)))
