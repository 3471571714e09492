"""The time model of pointwise kernels: the time of memory, or of instructions.

No measurement has fitted the numbers: they are the bandwidth and the rate of instructions of the GEMV model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cutlass_ops.base.dtypes import f32
from cutlass_ops.declare.device import Device
from cutlass_ops.kinds.arrays import Extents, Flags, Floats, Problems, columns
from cutlass_ops.kinds.gemv import model as gemv
from cutlass_ops.kinds.pointwise.config import PointwiseConfig
from cutlass_ops.kinds.traits import PlainTimer

_INSTRUCTIONS = 4 * 1.6e3  # that one SM issues per microsecond
_PER_ELEMENT = 40.0  # instructions, of an epilogue with one costly function
_RESIDENT = 2  # thread blocks that an SM has at a time
_TURN = 1.5  # microseconds from a block's first load to its last store, besides what its rows take
_PART_BYTES = f32.bits // 8
_TILES = 3.0  # tiles of D's size that are read and written


class Tiles(NamedTuple):
    """The tiles of some configurations, as arrays of shape (1, configurations)."""

    rows: Floats
    columns: Floats

    @classmethod
    def of(cls, configs: Sequence[PointwiseConfig]) -> Tiles:
        """Return those of some configurations."""
        return cls(*columns([(c.threadblock.m, c.threadblock.n) for c in configs], len(cls._fields)))


class PointwiseTimer(PlainTimer):
    """The time model of some configurations for given traits: see :class:`cutlass_ops.kinds.kind.Timer`."""

    made_by = Tiles

    def times(self, problems: Problems, device: Device) -> tuple[Floats, Flags]:
        """Return times in microseconds. These kernels have one order of tiles."""
        m, n, _, gemms = Extents.of(problems)
        numbers = gemv.numbers_of(device)
        blocks = gemms * np.ceil(m / self.blocks.rows) * np.ceil(n / self.blocks.columns)
        waves = np.ceil(blocks / (_RESIDENT * device.multiprocessors))
        whole = (
            waves * _RESIDENT * device.multiprocessors * self.blocks.rows * self.blocks.columns
        )  # elements, idle places included
        parts = gemms * np.ceil(m / self.blocks.rows) * n  # of a reduction of columns, written and read
        moved = _TILES * self.traits.d_bytes * whole + 2 * _PART_BYTES * parts
        memory = moved / (numbers.bandwidth * 1e6)
        compute = _PER_ELEMENT / 32 * whole / (_INSTRUCTIONS * device.multiprocessors)
        found = np.asarray(numbers.start + _TURN + np.hypot(memory, compute))
        return found, np.zeros_like(found, np.bool_)
