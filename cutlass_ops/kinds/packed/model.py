"""The time model of kernels for few rows and a packed weight: of memory, of instructions, or of rows of A.

No measurement has fitted the numbers: they are those of the GEMV model, and counts of the instructions in
``packed_rows.h``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cutlass_ops.declare.device import Device
from cutlass_ops.kinds.arrays import Extents, Flags, Floats, Problems, columns
from cutlass_ops.kinds.gemv import model as gemv
from cutlass_ops.kinds.packed.config import PackedRowsConfig
from cutlass_ops.kinds.traits import PlainTimer

_INSTRUCTIONS = 4 * 1.6e3  # that one SM issues per microsecond
# A warp's instructions for a piece of a line, for eight rows of it, and for a piece of eight rows of A.
_PER_PIECE, _PER_EIGHT, _PER_ROWS = 62.0, 8.0, 12.0
_WARPS = 16  # warps resident on one SM, limited by registers
_L2 = 1.4  # bandwidth of the L2 cache relative to that of memory, for rows of A that each thread block reads


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


class PackedRowsTimer(PlainTimer):
    """The time model of some configurations for given traits: see :class:`cutlass_ops.kinds.kind.Timer`."""

    made_by = Lines

    def times(self, problems: Problems, device: Device) -> tuple[Floats, Flags]:
        """Return times in microseconds. These kernels have one order of tiles."""
        m, n, k, gemms = Extents.of(problems)
        rows, warps, pieces, lines = self.blocks
        traits, numbers = self.traits, gemv.numbers_of(device)
        width = traits.element_bytes
        passes, blocks = np.ceil(m / rows), gemms * np.ceil(n / (16 * lines))
        there = np.minimum(blocks, device.multiprocessors * np.maximum(1, _WARPS // warps))
        of_piece = 64 * 16 * width * traits.narrow  # bytes
        on_its_way = there * warps * pieces * lines * of_piece
        per_byte = np.hypot(1 / (numbers.bandwidth * 1e6), numbers.latency / on_its_way)
        weight = gemms * k * n * passes * width * traits.narrow
        of_a = blocks * passes * np.minimum(m, rows) * k * width
        memory = (weight + traits.d_bytes * m * n) * per_byte + of_a / (_L2 * numbers.bandwidth * 1e6)
        each = lines * (_PER_PIECE + _PER_EIGHT * rows / 8) + _PER_ROWS * rows / 8
        compute = blocks * passes * k / 64 * each / (_INSTRUCTIONS * np.minimum(blocks, device.multiprocessors))
        # Blocks that are not there at once come in turns.
        turns = np.ceil(blocks / there) / (blocks / there)
        found = np.asarray(numbers.start + np.hypot(memory, compute) * turns)
        found = np.where(n < 16 * lines, np.inf, found)  # a block has whole lines
        return found, np.zeros_like(found, np.bool_)
