"""The time model of kernels for few rows and a packed weight: of memory, of instructions, or of rows of A.

``benchmarks/fit_packed.py`` fitted the numbers to a sweep of an H200 at 1 and 16 rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cutlass_ops.declare.chips import CHIPS, peaks_of
from cutlass_ops.declare.device import Device
from cutlass_ops.kinds.arrays import Extents, Flags, Floats, Problems, columns
from cutlass_ops.kinds.packed.config import PackedRowsConfig
from cutlass_ops.kinds.traits import PlainTimer

_INSTRUCTIONS = 4 * 1.6e3  # that one SM issues per microsecond
_MEASURED = CHIPS["NVIDIA H200"].device


class Numbers(NamedTuple):
    """The fitted parameters, of an H200."""

    bandwidth: float = 4.4  # memory bandwidth in bytes per picosecond
    l2: float = 35.1  # that of the L2 cache, for what another block has read already
    latency: float = 0.0739  # of memory in microseconds, while a warp has one piece on its way
    start: float = 2.1  # fixed time of a launch in microseconds
    # A warp's instructions for a piece of a line, and for eight rows of it
    per_piece: float = 59.0
    per_eight: float = 0.5
    warps: float = 16.0  # resident on one SM
    chain: float = 0.0376  # microseconds that a warp takes for a piece of a line, however few warps there are
    chain_eight: float = 0.00582  # the same for eight rows of it


H200 = Numbers()


class Lines(NamedTuple):
    """The thread blocks of some configurations, as arrays of shape (1, configurations)."""

    rows: Floats
    warps: Floats
    pieces: Floats
    lines: Floats

    @classmethod
    def of(cls, configs: Sequence[PackedRowsConfig]) -> Lines:
        """Return those of some configurations."""
        return cls(*columns([(c.rows, c.warps, c.pieces, c.lines) for c in configs], len(cls._fields)))


def times(
    of: Lines,
    problems: Problems,
    multiprocessors: int,
    widths: tuple[float, float, float] = (2, 0.5, 2),
    numbers: Numbers = H200,
) -> Floats:
    """Return kernels' times in microseconds, with shape (problems, configurations).

    `widths` are the bytes of an element of A, of B with its scales, and of D.
    """
    m, n, k, gemms = Extents.of(problems)
    rows, warps, pieces, lines = of
    of_a, of_b, of_d = widths
    passes = np.ceil(m / rows)
    blocks = gemms * np.ceil(n / (16 * lines)) * passes
    there = np.minimum(blocks, multiprocessors * np.maximum(1, numbers.warps // warps))
    weight, bandwidth = gemms * k * n * of_b, numbers.bandwidth * 1e6
    memory = (weight + of_d * m * n) / bandwidth
    again = weight * (passes - 1) + blocks * np.minimum(m, rows) * k * of_a
    eights, turns = rows / 8, blocks * k / 64  # pieces of all blocks
    each = lines * (numbers.per_piece + numbers.per_eight * eights)
    issued = turns * each / (_INSTRUCTIONS * np.minimum(blocks, multiprocessors))
    chain = numbers.latency / pieces + lines * (numbers.chain + numbers.chain_eight * eights)
    waited = turns * chain / (there * warps)
    # Blocks that are not there at once come in turns.
    late = np.ceil(blocks / there) / (blocks / there)
    found = numbers.start + (np.hypot(memory, issued + waited) + again / (numbers.l2 * 1e6)) * late
    return np.asarray(np.where(n < 16 * lines, np.inf, found))  # a block has whole lines


class PackedRowsTimer(PlainTimer):
    """The time model of some configurations for given traits: see :class:`cutlass_ops.kinds.kind.Timer`."""

    made_by = Lines

    def times(self, problems: Problems, device: Device) -> tuple[Floats, Flags]:
        """Return times in microseconds. These kernels have one order of tiles."""
        traits = self.traits
        widths = traits.element_bytes, traits.element_bytes * traits.narrow, traits.d_bytes
        relative = peaks_of(device.name).memory / peaks_of(_MEASURED.name).memory
        numbers = H200._replace(bandwidth=H200.bandwidth * relative)
        found = times(self.blocks, problems, device.multiprocessors, widths, numbers)
        return found, np.zeros_like(found, np.bool_)
