"""Which few kernels serve many problems: chosen by what each of them loses to the fastest at each problem."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

Kernel = TypeVar("Kernel", bound=Hashable)

# What a kernel loses where it was not measured, and the most that any other counts: it would be twice as slow.
_MOST = math.log(2.0)
# Of what weight a loss's square is: one of a twentieth counts twice as much as ten of a two-hundredth.
_SQUARES = 20.0
# A kernel helps only if it costs so much less: what differs by less are sums in another order.
_ROUNDING = 1e-12


def chosen(losses: Sequence[Mapping[Kernel, float]], count: int) -> tuple[Kernel, ...]:
    """Choose the kernels of which none can be exchanged for another that would help more.

    Parameters
    ----------
    losses : sequence of mapping of Kernel to float
        For each problem, logarithms of kernels' times over the fastest's there.
    count : int
        How many at most.

    Returns
    -------
    tuple of Kernel
        The most useful first.
    """
    table = _Losses.of(losses)
    kept = table.exchanged(table.extended([], count))
    return tuple(table.kernels[at] for at in table.extended([], count, among=kept))


def extended(losses: Sequence[Mapping[Kernel, float]], first: Sequence[Kernel], count: int) -> tuple[Kernel, ...]:
    """Add to the first kernels, one after the other, the one that helps most, until none helps or there are enough."""
    table = _Losses.of(losses)
    known = [table.kernels.index(k) for k in first if k in table.kernels]
    further = table.extended(known, count - len(first) + len(known))[len(known) :]
    return (*first, *(table.kernels[at] for at in further))


@dataclass(frozen=True, eq=False)
class _Losses(Generic[Kernel]):
    """Losses as a matrix of shape (problems, kernels); kernels are named by their places."""

    kernels: tuple[Kernel, ...]
    each: NDArray[np.float64]

    @classmethod
    def of(cls, losses: Sequence[Mapping[Kernel, float]]) -> _Losses[Kernel]:
        kernels = tuple(dict.fromkeys(k for known in losses for k in known))
        rows = [[min(known.get(k, _MOST), _MOST) for k in kernels] for known in losses]
        return cls(kernels, np.array(rows, np.float64).reshape(len(losses), len(kernels)))

    def extended(self, first: Sequence[int], count: int, among: Sequence[int] | None = None) -> list[int]:
        """Add the kernel that helps most, until none helps or there are enough."""
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
        """Exchange one kernel for another as long as that helps."""
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
        """Return what some kernels cost together with each of all."""
        return np.asarray(_cost(np.minimum(self._reached(kept)[:, None], self.each)).sum(0))

    def _cost(self, kept: Sequence[int]) -> float:
        return float(_cost(self._reached(kept)).sum())

    def _reached(self, kept: Sequence[int]) -> NDArray[np.float64]:
        return np.asarray(self.each[:, list(kept)].min(1, initial=_MOST))


def _cost(losses: NDArray[np.float64]) -> NDArray[np.float64]:
    return losses + _SQUARES * losses**2
