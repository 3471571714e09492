"""Pools of configurations, and their times by the models of their kinds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from cutlass_ops.declare.config import Config
from cutlass_ops.declare.device import Device
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.signature import OpSignature
from cutlass_ops.kinds.arrays import Extents, Flags, Floats, Places, Problems
from cutlass_ops.kinds.kind import Kind, Timer
from cutlass_ops.kinds.table import kind_of
from cutlass_ops.kinds.traits import Traits

# Problems times configurations to compare at once: bounds memory, and keeps intermediate arrays in a core's cache.
AT_ONCE = 1 << 14
_USUAL = Traits(element_bytes=2, d_bytes=2)
_LAYOUT = ("element_bytes", "majors", "alignments", "scatters")


@dataclass(frozen=True, eq=False)
class Pool:
    """Configurations that are compared with each other."""

    configs: tuple[Config, ...]  # configurations of any kind
    traits: Traits = _USUAL  # traits of the signature that they serve

    @classmethod
    def of(cls, configs: Iterable[Config], signature: OpSignature) -> Pool:
        """Return configurations that serve a signature."""
        return cls(tuple(configs), Traits.of(signature))

    def is_like(self, signature: OpSignature) -> bool:
        """Whether a signature's operands have the same layout as this pool's, in bytes."""
        mine, theirs = self.traits, Traits.of(signature)
        return all(getattr(theirs, name) == getattr(mine, name) for name in _LAYOUT)

    @cached_property
    def _timers(self) -> list[tuple[Places, Timer]]:
        """The model of each kind, and the indices of its configurations."""
        places: dict[Kind[Any], list[int]] = {}
        for at, config in enumerate(self.configs):
            places.setdefault(kind_of(config), []).append(at)
        return [
            (np.array(found), kind.timer([self.configs[at] for at in found], self.traits))
            for kind, found in places.items()
        ]

    @cached_property
    def _kinds(self) -> tuple[Places, Places]:
        """Each configuration's kind, as an index into :attr:`_timers`, and its index there."""
        kinds, places = np.zeros((2, len(self.configs)), np.int64)
        for kind, (found, _) in enumerate(self._timers):
            kinds[found], places[found] = kind, np.arange(len(found))
        return kinds, places

    def times(self, problems: Problems, device: Device) -> Floats:
        """Return microseconds, infinite for kernels that cannot be launched, of shape (problems, configurations)."""
        return self.times_and_order(problems, device)[0]

    def times_and_order(self, problems: Problems, device: Device) -> tuple[Floats, Flags]:
        """Return the times in the better of the usual order of tiles and one by GPC, and whether it is the latter."""
        whole = self.traits.whole(Extents.of(problems))
        times = np.zeros((whole.size, len(self.configs)))
        gpc = np.zeros_like(times, np.bool_)
        with np.errstate(all="ignore"):  # an underflow is 0, even if the process makes NumPy raise
            for places, timer in self._timers:
                step = max(1, AT_ONCE // max(1, len(places)))
                for part in (slice(at, at + step) for at in range(0, whole.size, step)):
                    times[part, places], gpc[part, places] = timer.times(whole.part(part), device)
        return times, gpc

    def times_of(self, places: Places, problems: Extents, device: Device) -> tuple[Floats, Flags]:
        """Return the results of :meth:`times_and_order` for one configuration at each problem: shapes (problems,)."""
        times, gpc = np.empty(len(places)), np.zeros(len(places), np.bool_)
        with np.errstate(all="ignore"):
            for part, timer, whole in self._beside(places, problems):
                times[part], gpc[part] = (x[0] for x in timer.times(whole, device))
        return times, gpc

    def besides_of(self, places: Places, problems: Extents, device: Device) -> Floats:
        """Return the extra microseconds of one configuration at each problem for work besides a GEMM.

        That is means of A's rows, copies of misaligned operands, and stores of single elements of D.
        """
        found = np.empty(len(places))
        with np.errstate(all="ignore"):
            for part, timer, whole in self._beside(places, problems):
                found[part] = timer.besides(whole, device)[0]
        return found

    def _beside(self, places: Places, problems: Extents) -> Iterator[tuple[Places, Timer, Extents]]:
        """Yield the indices of some problems of one kind's configurations, with these and the problems side by side."""
        kinds, theirs = self._kinds
        whole = self.traits.whole(problems)
        for kind, (_, timer) in enumerate(self._timers):
            mine = np.flatnonzero(kinds[places] == kind)
            for part in (mine[at : at + AT_ONCE] for at in range(0, len(mine), AT_ONCE)):
                yield part, timer.take(theirs[places[part]]), whole.part(part).beside()

    def tiles(self, problems: Problems) -> Floats:
        """Return the number of tiles, in whole clusters, that cover problems, of shape (problems, configurations)."""
        return self._tiles(Extents.of(problems), self._extents)

    def tiles_of(self, places: Places, problems: Extents) -> Floats:
        """Return the result of :meth:`tiles` for one configuration at each problem, of shape (problems,)."""
        return np.asarray(self._tiles(problems.beside(), self._extents[:, places])[0])

    def _tiles(self, problems: Extents, extents: Floats) -> Floats:
        m, n, _, gemms = self.traits.whole(problems)
        tile_m, tile_n, cluster_m, cluster_n = extents
        rows, columns = np.ceil(np.ceil(m / tile_m) / cluster_m), np.ceil(np.ceil(n / tile_n) / cluster_n)
        return np.asarray(gemms * rows * cluster_m * columns * cluster_n)

    @property
    def cluster_rows(self) -> Floats:
        """The rows of each kernel's cluster of tiles: between their multiples, the number of tiles is the same."""
        tile_m, _, cluster_m, _ = self._extents
        return np.asarray(tile_m * cluster_m)

    @cached_property
    def _extents(self) -> Floats:
        """Extents of each kernel's tile along M and N, and of its cluster in tiles: shape (4, configurations)."""
        sides = [c.along_problem for c in self.configs]
        extents = np.array([(*tile, *cluster) for tile, cluster in sides], np.float64).reshape(-1, 4)
        return np.ascontiguousarray(extents.T)


def predict(config: Config, problem: Problem, device: Device) -> float:
    """Return one configuration's time in microseconds, as :meth:`Pool.times` does."""
    return Pool((config,)).times([problem], device).item()
