"""The time model of GEMV kernels: the time to read B, plus the time for the arithmetic.

``benchmarks/fit_gemv.py`` fitted the numbers to tuning results on an H100 for M up to 16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cutlass_ops.declare.chips import peaks_of
from cutlass_ops.declare.device import Device
from cutlass_ops.declare.problem import Problem
from cutlass_ops.kinds.arrays import Extents, Flags, Floats, Problems, columns
from cutlass_ops.kinds.gemv.config import GemvConfig
from cutlass_ops.kinds.traits import PlainTimer

_INSTRUCTIONS = 4 * 1.6e3  # instructions that one SM issues per microsecond
_WARPS = 32  # warps resident on one SM, limited by registers


class Numbers(NamedTuple):
    """The fitted parameters."""

    bandwidth: float = 3.36  # memory bandwidth in bytes per picosecond
    start: float = 2.1  # fixed time of a launch in microseconds
    # A warp's instructions per piece of B, and in addition per row of A, or per tile and per eight rows of it
    per_piece: float = 2.08
    per_row: float = 2.68
    per_tile: float = 5.56
    per_eight: float = 3.27
    # Warps and pieces of the fastest thread block, as base-2 logarithms
    warps: float = 2.5
    warps_of_tile: float = 2.93
    pieces: float = 2.95
    pieces_of_tile: float = 1.34
    fewer_by_rows: float = 1.95  # decrease of the best log2(pieces) for each doubling of rows, which need registers
    # Relative slowdown per squared log2 distance from the fastest thread block
    by_warps: float = 0.0209
    by_pieces: float = 0.00563
    by_pieces_of_tile: float = 0.0243
    in_vain: float = 0.0959  # relative slowdown per unit of padding along K
    latency: float = 0.417  # memory latency in microseconds


# Bytes of an element of A and of B, and of D, in what the numbers were fitted to.
_16_BITS = (2, 2)
H100 = Numbers()
# Scaled by the ratio of the peak memory bandwidths.
H200 = Numbers(bandwidth=4.81)
_BY_CHIP = {"NVIDIA H200": H200}


def numbers_of(device: Device) -> Numbers:
    """Return the parameters of a device's chip: those of an H100 with its bandwidth, if nothing was measured there."""
    known = _BY_CHIP.get(device.name)
    return known or H100._replace(bandwidth=H100.bandwidth * peaks_of(device.name).memory)


def predict(
    config: GemvConfig,
    problem: Problem,
    multiprocessors: int,
    widths: tuple[float, float] = _16_BITS,
    of: Numbers = H100,
) -> float:
    """Return :func:`times` for one configuration and one problem."""
    return times(Blocks.of([config]), [problem], multiprocessors, widths, of).item()


class Blocks(NamedTuple):
    """The thread blocks of some configurations, as arrays of shape (1, configurations)."""

    # Rows of A, warps, pieces of B that a lane reads at a time, and the extents of B's part
    rows: Floats
    warps: Floats
    pieces: Floats
    columns: Floats
    depth: Floats
    by_tile: Floats  # 1 if Tensor Cores compute, else 0

    @classmethod
    def of(cls, configs: Sequence[GemvConfig]) -> Blocks:
        """Return those of some configurations."""
        each = [(c.rows, c.warps, c.pieces, c.threadblock.n, c.threadblock.k, c.by_tile) for c in configs]
        return cls(*columns(each, len(cls._fields)))


def times(
    blocks_of: Blocks,
    problems: Problems,
    multiprocessors: int,
    widths: tuple[float, float] = _16_BITS,
    of: Numbers = H100,
) -> Floats:
    """Return kernels' times in microseconds, with shape (problems, configurations).

    Configurations are legal, and each extent is at least 1. `widths` are the bytes of an element of A and B, and of D.
    """
    m, n, k, gemms = Extents.of(problems)
    rows, warps, pieces, columns, depth, tensor_cores = blocks_of
    by_tile = tensor_cores > 0
    element_bytes, d_bytes = widths

    per_piece = of.per_piece + np.where(by_tile, of.per_tile + of.per_eight * rows / 8, of.per_row * rows)
    fastest = np.where(by_tile, of.pieces_of_tile, of.pieces - of.fewer_by_rows * np.log2(rows))
    more_warps = np.log2(warps) - np.where(by_tile, of.warps_of_tile, of.warps)
    more_pieces = np.log2(pieces) - fastest
    unlike = of.by_warps * more_warps**2 + np.where(by_tile, of.by_pieces_of_tile, of.by_pieces) * more_pieces**2

    passes = np.ceil(m / rows)
    blocks = gemms * np.ceil(n / columns)
    # Bytes in flight at a time: few thread blocks cannot saturate the memory.
    resident = np.minimum(blocks, multiprocessors * np.maximum(1, _WARPS // warps))
    on_its_way = element_bytes * resident * columns * np.minimum(depth, k)
    per_byte = np.hypot(1 / (of.bandwidth * 1e6), of.latency / on_its_way)
    memory = gemms * (element_bytes * (m * k + k * n * passes) + d_bytes * m * n) * per_byte
    of_column = k * element_bytes / 16  # pieces
    read = gemms * passes * n * np.ceil(of_column / 32)  # reads by a whole warp
    compute = read * per_piece / (_INSTRUCTIONS * np.minimum(blocks, multiprocessors))
    step = pieces * np.where(by_tile, 4 * warps, 32)
    padding = np.ceil(of_column / step) * step / of_column - 1
    return np.asarray((of.start + memory + compute) * (1 + unlike + of.in_vain * padding))


class GemvTimer(PlainTimer):
    """The time model of some configurations for given traits: see :class:`cutlass_ops.kinds.kind.Timer`."""

    made_by = Blocks

    def times(self, problems: Problems, device: Device) -> tuple[Floats, Flags]:
        """Return times in microseconds. These kernels cannot order tiles by GPC."""
        widths = self.traits.element_bytes, self.traits.d_bytes
        found = times(self.blocks, problems, device.multiprocessors, widths, numbers_of(device))
        return found, np.zeros_like(found, np.bool_)
