"""The time model of small kernels: the time of memory, or of instructions.

No measurement has fitted the numbers: they are the bandwidth and the rate of instructions of the GEMV model, and counts
of the instructions in ``small.h``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cutlass_ops.base import arch
from cutlass_ops.declare.device import Device
from cutlass_ops.kinds.arrays import Extents, Flags, Floats, Problems, columns
from cutlass_ops.kinds.gemv import model as gemv
from cutlass_ops.kinds.small.config import SmallConfig
from cutlass_ops.kinds.traits import PlainTimer

_INSTRUCTIONS = 4 * 1.6e3  # that one SM issues per microsecond
# Such instructions, or the time of as many: for an access of each lane, whose bytes go to shared memory; for 16x8x16
# products, which take Tensor Cores the time of eight, with the loads of their operands; and for an element of D of each
# lane.
_PER_ACCESS, _PER_PRODUCT, _PER_ELEMENT = 8.0, 12.0, 10.0
_PER_TILE = 200.0
_TURN = 1.0  # microseconds from a tile's first load to its last store
_AGAIN = 0.6  # of the bytes that a further tile reads again, from the L2 cache
_ACCESS_BYTES = 16


class Tiles(NamedTuple):
    """The tiles of some configurations, as arrays of shape (1, configurations)."""

    rows: Floats
    columns: Floats
    depth: Floats
    stages: Floats
    warps: Floats

    @classmethod
    def of(cls, configs: Sequence[SmallConfig]) -> Tiles:
        """Return those of some configurations."""
        each = [(c.threadblock.m, c.threadblock.n, c.threadblock.k, c.stages, c.warps) for c in configs]
        return cls(*columns(each, len(cls._fields)))


class SmallTimer(PlainTimer):
    """The time model of some configurations for given traits: see :class:`cutlass_ops.kinds.kind.Timer`."""

    made_by = Tiles

    def times(self, problems: Problems, device: Device) -> tuple[Floats, Flags]:
        """Return times in microseconds. These kernels have one order of tiles."""
        m, n, k, gemms = Extents.of(problems)
        rows, across_tile, depth, stages, warps = self.blocks
        traits, numbers = self.traits, gemv.numbers_of(device)
        down, across, steps = np.ceil(m / rows), np.ceil(n / across_tile), np.ceil(k / depth)
        count = gemms * down * across
        width, d_width = traits.element_bytes, traits.d_bytes
        again = m * k * (across - 1) + k * n * (down - 1)
        moved = gemms * (width * (m * k + k * n + _AGAIN * again) + d_width * m * n)
        # A multiprocessor has as many warps as its shared memory holds.
        own = stages * (rows + across_tile) * (depth + 8) * width + 64 * (across_tile + 4)
        resident = np.floor(arch.target("sm_90").shared_memory / (own * warps)) * warps
        there = np.minimum(count, device.multiprocessors * np.maximum(1, resident))
        on_its_way = (
            there * (stages - 1) * width * (np.minimum(m, rows) + np.minimum(n, across_tile)) * np.minimum(k, depth)
        )
        per_byte = np.hypot(1 / (numbers.bandwidth * 1e6), numbers.latency / on_its_way)
        memory = moved * per_byte
        bytes_of_access = np.array([min(_ACCESS_BYTES, a * width) for a in traits.alignments], np.float64)
        accesses = steps * depth * width * (rows / bytes_of_access[0] + across_tile / bytes_of_access[1]) / arch.WARP
        products = rows / 16 * across_tile / 8 * np.ceil(k / 16)
        elements = rows * across_tile / arch.WARP
        each = _PER_TILE + _PER_ACCESS * accesses + _PER_PRODUCT * products + _PER_ELEMENT * elements
        compute = count * each / (_INSTRUCTIONS * np.minimum(count, device.multiprocessors))
        # A warp waits for its loads of K one after the other, as far as they are not ahead.
        turn = _TURN + (steps - 1) * numbers.latency / (stages - 1)
        waiting = np.maximum(1, count / there) * turn
        found = np.asarray(numbers.start + np.sqrt(memory**2 + compute**2 + waiting**2))
        return found, np.zeros_like(found, np.bool_)
