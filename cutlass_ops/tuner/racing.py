"""A race: which of several kernels is the fastest, when every single timing is noisy and the chip's clock drifts.

All entrants run once a round, in a fresh random order, so that drift reaches all of them alike. What counts is the
ratio to the leader's time of the same round, and of these ratios the mean of the middle half: a long kernel may be
ahead at one clock and behind at another, and a median would see only one of them. Whoever is clearly behind leaves
early, and the rounds go to those that are still close.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Entrant = TypeVar("Entrant", bound=Hashable)

# After so many rounds, whoever is slower than the leader by more than this part in all but the luckiest quarter of its
# rounds leaves.
_LIMITS = ((2, 0.25), (3, 0.10), (5, 0.05), (8, 0.03))


@dataclass(frozen=True)
class Standing(Generic[Entrant]):
    """How an entrant came in.

    Attributes
    ----------
    entrant : Entrant
        Whose standing it is.
    times : tuple of float
        Its time in each round that it ran, in the unit of what was measured.
    behind : float
        Its time over the winner's in these rounds, on average, minus one: 0 for the winner, 0.02 for 2% slower.
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
        Distinct and hashable.
    measure : callable
        Runs entrants once in the given order and returns how long each took, more than 0.
    guests : sequence
        Run in every round as well, but compete with nobody: they neither lead nor leave.
    rounds : int
        How often those that stay run.
    seed : int
        Of the random orders.

    Returns
    -------
    list of Standing
        Everyone, the fastest first: those that stayed longer before those that left; then the guests.

    Raises
    ------
    ValueError
        If there is no entrant, one is there twice, or there are no rounds.
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
    """Return who is ahead: the smallest ratio to each round's fastest among those still running, on average."""
    fastest = [min(each) for each in zip(*(times[e] for e in running), strict=True)]
    return min(running, key=lambda e: _middle(_ratios(times[e], fastest)))


def _middle(values: Sequence[float]) -> float:
    """Return the mean of the middle half."""
    cut = len(values) // 4
    return statistics.fmean(sorted(values)[cut : len(values) - cut])


def _ratios(own: Sequence[float], other: Sequence[float]) -> list[float]:
    """Return ratios round by round, as far as both ran."""
    return [a / b for a, b in zip(own, other, strict=False)]


def _hopeless(ratios: Sequence[float], number: int) -> bool:
    limit = next((part for after, part in reversed(_LIMITS) if number >= after), None)
    lucky = sorted(ratios)[len(ratios) // 4]
    return limit is not None and lucky > 1 + limit
