"""The choice of a few kernels for many problems, by each kernel's loss to the fastest at each problem."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

Kernel = TypeVar("Kernel", bound=Hashable)

# The loss of a kernel that was not measured, and the largest loss that counts: twice as slow.
_MOST = math.log(2.0)
# Weight of a loss's square: one loss of 5% counts twice as much as ten losses of 0.5%.
_SQUARES = 20.0
# A kernel must reduce the cost by more than this: smaller differences come from the order of sums.
_ROUNDING = 1e-12


def chosen(losses: Sequence[Mapping[Kernel, float]], count: int) -> tuple[Kernel, ...]:
    """Choose kernels so that exchanging any one for another would not help."""
    table = _Losses.of(losses)
    kept = table.exchanged(table.extended([], count))
    return tuple(table.kernels[at] for at in table.extended([], count, among=kept))


def extended(losses: Sequence[Mapping[Kernel, float]], first: Sequence[Kernel], count: int) -> tuple[Kernel, ...]:
    """Add to the first kernels, one at a time, the one that helps most, until `count` or until none helps."""
    table = _Losses.of(losses)
    known = [table.kernels.index(k) for k in first if k in table.kernels]
    further = table.extended(known, count - len(first) + len(known))[len(known) :]
    return (*first, *(table.kernels[at] for at in further))


@dataclass(frozen=True, eq=False)
class _Losses(Generic[Kernel]):
    """Losses as a matrix of shape (problems, kernels). Kernels are named by their indices."""

    kernels: tuple[Kernel, ...]
    each: NDArray[np.float64]

    @classmethod
    def of(cls, losses: Sequence[Mapping[Kernel, float]]) -> _Losses[Kernel]:
        kernels = tuple(dict.fromkeys(k for known in losses for k in known))
        rows = [[min(known.get(k, _MOST), _MOST) for k in kernels] for known in losses]
        return cls(kernels, np.array(rows, np.float64).reshape(len(losses), len(kernels)))

    def extended(self, first: Sequence[int], count: int, among: Sequence[int] | None = None) -> list[int]:
        """Add the kernel that helps most, until `count` or until none helps."""
        kept = list(first)
        while len(kept) < count:
            costs = self._costs(kept)
            if among is not None:
                costs[[at for at in range(len(costs)) if at not in among]] = math.inf
            if not len(costs) or costs.min() >= self._cost(kept) - _ROUNDING:
                break
            kept.append(int(costs.argmin()))
        return kept

    def exchanged(self, kept: Sequence[int]) -> list[int]:
        """Exchange single kernels as long as that helps."""
        mine, before = list(kept), math.inf
        while (now := self._cost(mine)) < before:
            before = now
            for place in mine:
                others = [at for at in mine if at != place]
                costs = self._costs(others)
                if costs.min() < costs[place] - _ROUNDING:
                    mine = [*others, int(costs.argmin())]
        return mine

    def _costs(self, kept: Sequence[int]) -> NDArray[np.float64]:
        """Return the cost of the kept kernels together with each single kernel."""
        return np.asarray(_cost(np.minimum(self._reached(kept)[:, None], self.each)).sum(0))

    def _cost(self, kept: Sequence[int]) -> float:
        return float(_cost(self._reached(kept)).sum())

    def _reached(self, kept: Sequence[int]) -> NDArray[np.float64]:
        return np.asarray(self.each[:, list(kept)].min(1, initial=_MOST))


def _cost(losses: NDArray[np.float64]) -> NDArray[np.float64]:
    return losses + _SQUARES * losses**2
