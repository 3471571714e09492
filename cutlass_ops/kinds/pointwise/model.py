"""The time model of pointwise kernels: the time of memory, or of instructions.

No measurement has fitted the numbers: they are the bandwidth and the rate of instructions of the GEMV model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from cutlass_ops.base.dtypes import f32
from cutlass_ops.declare.config import PointwiseConfig
from cutlass_ops.declare.device import Device
from cutlass_ops.kinds.arrays import Extents, Flags, Floats, Places, Problems
from cutlass_ops.kinds.gemv import model as gemv
from cutlass_ops.kinds.traits import Traits

_INSTRUCTIONS = 4 * 1.6e3  # that one SM issues per microsecond
_PER_ELEMENT = 40.0  # instructions, of an epilogue with one costly function
_RESIDENT = 2  # thread blocks that an SM has at a time
_TURN = 1.5  # microseconds from a block's first load to its last store, besides what its rows take
_TILES = 3.0  # tiles of D's size that are read and written


@dataclass(frozen=True, eq=False)
class PointwiseTimer:
    """The time model of some configurations for given traits: see :class:`cutlass_ops.kinds.kind.Timer`."""

    rows: Floats
    columns: Floats
    traits: Traits

    @classmethod
    def of(cls, configs: Sequence[PointwiseConfig], traits: Traits) -> PointwiseTimer:
        """Return the model of some configurations."""
        tiles = np.array([(c.threadblock.m, c.threadblock.n) for c in configs], np.float64).reshape(-1, 2)
        rows, columns = tiles.T[:, None]
        return cls(rows, columns, traits)

    def take(self, places: Places) -> PointwiseTimer:
        """Return the model of some of these configurations, each as often as it is named."""
        return replace(self, rows=self.rows[:, places], columns=self.columns[:, places])

    def times(self, problems: Problems, device: Device) -> tuple[Floats, Flags]:
        """Return times in microseconds. These kernels have one order of tiles."""
        m, n, _, gemms = Extents.of(problems)
        numbers = gemv.numbers_of(device)
        blocks = gemms * np.ceil(m / self.rows) * np.ceil(n / self.columns)
        waves = np.ceil(blocks / (_RESIDENT * device.multiprocessors))
        whole = waves * _RESIDENT * device.multiprocessors * self.rows * self.columns  # elements, idle places included
        parts = gemms * np.ceil(m / self.rows) * n  # of a reduction of columns, written and read
        moved = _TILES * self.traits.d_bytes * whole + 2 * f32.bytes * parts
        memory = moved / (numbers.bandwidth * 1e6)
        compute = _PER_ELEMENT / 32 * whole / (_INSTRUCTIONS * device.multiprocessors)
        found = np.asarray(numbers.start + _TURN + np.hypot(memory, compute))
        return found, np.zeros_like(found, np.bool_)

    def besides(self, problems: Problems, _: Device) -> Floats:
        """Return zeros: there is no GEMM."""
        return np.zeros(np.broadcast_shapes(Extents.of(problems).m.shape, self.rows.shape))
