"""Find the fastest of several kernels although timings are noisy and the chip's clock drifts.

All entrants run once per round, in a new random order, so that drift affects all of them equally. Entrants are compared
by their times relative to the leader's in the same round, averaged over the middle half of the rounds. (A long kernel
may be ahead at one clock and behind at another; a median would see only one of them.) Entrants that are clearly behind
drop out early.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Entrant = TypeVar("Entrant", bound=Hashable)

# (rounds, limit): after this many rounds, an entrant drops out if it is slower than the leader by more than the limit
# in all but its best quarter of rounds.
_LIMITS = ((2, 0.25), (3, 0.10), (5, 0.05), (8, 0.03))


@dataclass(frozen=True)
class Standing(Generic[Entrant]):
    """An entrant's result.

    Attributes
    ----------
    entrant : Entrant
        The entrant.
    times : tuple of float
        Its time in each of its rounds, in the unit of the measurement.
    behind : float
        Average time relative to the winner's, minus one: 0 for the winner, 0.02 for 2% slower.
    """

    entrant: Entrant
    times: tuple[float, ...]
    behind: float

    @property
    def median(self) -> float:
        """The median of its times."""
        return statistics.median(self.times)


def race(
    entrants: Sequence[Entrant],
    measure: Callable[[Sequence[Entrant]], Sequence[float]],
    *,
    guests: Sequence[Entrant] = (),
    rounds: int = 15,
    seed: int = 0,
) -> list[Standing[Entrant]]:
    """Run a race.

    Parameters
    ----------
    entrants : sequence
        Distinct, hashable entrants.
    measure : callable
        Runs entrants once in the given order and returns their times, which must be positive.
    guests : sequence
        Entrants that run in every round but never lead or drop out.
    rounds : int
        Number of rounds.
    seed : int
        Seed of the random orders.

    Returns
    -------
    list of Standing
        All standings, fastest first: entrants that ran more rounds come before those that dropped out; guests are last.

    Raises
    ------
    ValueError
        If there is no entrant, an entrant is listed twice, or there are no rounds.
    """
    everyone = [*entrants, *guests]
    if not entrants or len(set(everyone)) != len(everyone):
        raise ValueError(f"a race needs distinct entrants, and at least one: {everyone}")
    if rounds < 1:
        raise ValueError(f"rounds is {rounds}: use at least 1")
    rng = random.Random(seed)
    times: dict[Entrant, list[float]] = {e: [] for e in everyone}
    running = list(entrants)
    for number in range(1, rounds + 1):
        order = [*running, *guests]
        rng.shuffle(order)
        for entrant, time in zip(order, measure(order), strict=True):
            times[entrant].append(time)
        leader = _leader(times, running)
        running = [e for e in running if not _hopeless(_ratios(times[e], times[leader]), number)]
    winner = _leader(times, running)
    standings = [Standing(e, tuple(t), _middle(_ratios(t, times[winner])) - 1) for e, t in times.items()]
    invited = set(guests)
    return sorted(standings, key=lambda s: (s.entrant in invited, -len(s.times), s.behind))


def _leader(times: dict[Entrant, list[float]], running: Sequence[Entrant]) -> Entrant:
    """Return the running entrant with the smallest average ratio to the fastest time of each round."""
    fastest = [min(each) for each in zip(*(times[e] for e in running), strict=True)]
    return min(running, key=lambda e: _middle(_ratios(times[e], fastest)))


def _middle(values: Sequence[float]) -> float:
    """Return the mean of the middle half."""
    cut = len(values) // 4
    return statistics.fmean(sorted(values)[cut : len(values) - cut])


def _ratios(own: Sequence[float], other: Sequence[float]) -> list[float]:
    """Return the ratios of the rounds that both ran."""
    return [a / b for a, b in zip(own, other, strict=False)]


def _hopeless(ratios: Sequence[float], number: int) -> bool:
    limit = next((part for after, part in reversed(_LIMITS) if number >= after), None)
    lucky = sorted(ratios)[len(ratios) // 4]
    return limit is not None and lucky > 1 + limit
