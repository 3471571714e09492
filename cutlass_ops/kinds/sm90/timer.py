"""The time of Sm90 kernels for a signature: the model, plus work besides the GEMM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from cutlass_ops.base import arch
from cutlass_ops.declare.config import Means, Sm90Config
from cutlass_ops.declare.device import Device
from cutlass_ops.declare.problem import Problem
from cutlass_ops.kinds.arrays import Flags, Floats
from cutlass_ops.kinds.sm90 import model
from cutlass_ops.kinds.sm90.order import WAVES_BY_GPC
from cutlass_ops.kinds.traits import Traits


@dataclass(frozen=True, eq=False)
class Sm90Timer:
    """The time model of some configurations for given traits: see :class:`cutlass_ops.kinds.kind.Timer`."""

    configs: Sequence[Sm90Config]
    traits: Traits

    def times(self, problems: Sequence[Problem], device: Device) -> tuple[Floats, Flags]:
        """Return times in microseconds with the better order of tiles, and whether that is the order by GPC."""
        usual, by_gpc = self._times_by_order(problems, device)
        better = np.minimum(usual, by_gpc)
        return better + self._besides(problems, better, device), by_gpc < usual

    def besides(self, problems: Sequence[Problem], device: Device) -> Floats:
        """Return microseconds for means of A's rows, copies of operands, and stores of single elements of D."""
        return self._besides(problems, np.minimum(*self._times_by_order(problems, device)), device)

    def _besides(self, problems: Sequence[Problem], times: Floats, device: Device) -> Floats:
        traits = self.traits
        copied = realigning(traits, problems) * self._copies
        stored = model.scattering([p._replace(n=p.n // traits.weights) for p in problems]) * ~self._swapped
        found = copied + stored if traits.scatters else copied
        if not traits.gathers:
            return found
        return found + model.means(self._batch, problems, times, model.costs_of(device), traits.element_bytes)

    def _times_by_order(self, problems: Sequence[Problem], device: Device) -> tuple[Floats, Floats]:
        chip = model.costs_of(device)
        cover = model.grid(self._batch, problems, chip)
        widths, lines = (self.traits.element_bytes, self.traits.d_bytes), self.traits.lines
        usual, by_gpc = (model.times(b, problems, chip, widths, lines) for b in (self._batch, self._by_gpc))
        worth = self._ordered & (cover.waves <= WAVES_BY_GPC)
        return np.where(self._launchable(cover), usual, np.inf), np.where(worth, by_gpc, np.inf)

    def _launchable(self, cover: model.Grid) -> Flags:
        """Return whether the grid's y extent is in range: a kernel that is not persistent has a block per tile."""
        batch = self._batch
        second = np.where(self._swapped, cover.rows, cover.columns)
        # With split K, x is the split, and y and z are the tiles' extents.
        second = np.where(batch.split_k > 1, np.maximum(cover.rows, cover.columns), second)
        persistent = (batch.schedule != model.SCHEDULES.index("warp_specialized")) & (batch.split_k == 1)
        return np.asarray(persistent | (second <= arch.MAX_GRID_Y))

    @cached_property
    def _batch(self) -> model.Batch:
        return model.Batch.of(self.configs)

    @cached_property
    def _by_gpc(self) -> model.Batch:
        return model.Batch.of(self.configs, by_gpc=True)

    @cached_property
    def _ordered(self) -> Flags:
        return np.array([[c.ordered for c in self.configs]])

    @cached_property
    def _copies(self) -> Flags:
        return np.array([[c.realign for c in self.configs]])

    @cached_property
    def _swapped(self) -> Flags:
        return np.array([[c.swap_ab for c in self.configs]])


def realigning(traits: Traits, problems: Sequence[Problem]) -> Floats:
    """Return microseconds to copy operands so that TMA can read them."""
    a, b = (alignment * traits.element_bytes < arch.TMA_ALIGNMENT_BYTES for alignment in traits.alignments)
    return model.realigning(a, b, problems, traits.element_bytes)


def usual_means(config: Sm90Config) -> Means:
    """Return the cheapest way to compute means of A's rows for a tile: gathered if the tile has few rows."""
    (rows, _), _ = config.along_problem
    gathered = model.TAKING.gathered + model.TAKING.gathered_row * rows
    return "gathered" if gathered <= model.TAKING.beside.of(config.schedule) else "beside"
