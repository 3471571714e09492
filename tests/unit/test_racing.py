"""The race finds the fastest through noise and drift, and spends its rounds on those that are close."""

import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutlass_ops.tuner.timing import race
from tests.strategies import PATIENT


class Chip:
    """Times that drift together, jitter alone, and are now and then far off, as on a chip that others use too."""

    def __init__(self, times, seed, jitter=0.015):
        self.times, self.rng, self.jitter = times, random.Random(seed), jitter
        self.clock, self.runs = 1.0, 0

    def __call__(self, entrants):
        return [self.run(entrant) for entrant in entrants]

    def run(self, entrant):
        self.runs += 1
        self.clock = min(1.07, max(0.93, self.clock + self.rng.gauss(0, 0.002)))
        outlier = 1.5 if self.rng.random() < 0.02 else 1.0
        return self.times[entrant] * self.clock * outlier * (1 + abs(self.rng.gauss(0, self.jitter)))


def field(seed, size=24):
    rng = random.Random(seed)
    return {f"kernel{i}": 20 * (1 + rng.random() ** 2) for i in range(size)}


def test_the_winner_is_hardly_slower_than_the_fastest():
    losses = []
    for seed in range(60):
        times = field(seed)
        winner = race(list(times), Chip(times, seed), seed=seed)[0].entrant
        losses.append(times[winner] / min(times.values()) - 1)
    assert statistics.mean(losses) < 0.003
    assert max(losses) < 0.02


@pytest.mark.slow
@PATIENT
@given(st.dictionaries(st.integers(), st.floats(1e-3, 1e3), min_size=1, max_size=12), st.integers(1, 20))
def test_without_noise_the_fastest_wins_and_nobody_is_lost(times, rounds):
    standings = race(list(times), lambda order: [times[e] for e in order], rounds=rounds)
    assert {s.entrant for s in standings} == set(times)
    assert times[standings[0].entrant] == min(times.values())
    assert len(standings[0].times) == rounds
    assert standings[0].behind == 0


def test_drift_alone_decides_nothing():
    """The same kernel under many names: nobody leaves, whatever the clock does in between."""
    clock = iter(1 + 0.2 * (i // 8 % 5) for i in range(10_000))
    entrants = list(range(8))
    standings = race(entrants, lambda order: [10 * next(clock) for _ in order], rounds=10)
    assert all(len(s.times) == 10 for s in standings)
    assert all(s.behind == 0 for s in standings)


def test_a_kernel_that_is_ahead_at_one_clock_and_far_behind_at_another_does_not_win():
    """Slightly ahead in most rounds: by the median it would."""

    def measure(order):
        number = next(rounds)
        times = {"steady": 1.0, "fickle": 0.985 if number % 20 < 11 else 1.08}
        return [times[e] for e in order]

    rounds = iter(range(100))
    first, second = race(["steady", "fickle"], measure, rounds=40)
    assert (first.entrant, second.entrant) == ("steady", "fickle")
    assert 0.01 < second.behind < 0.05


@pytest.mark.parametrize("pace", [1.0, 40.0])
def test_a_guest_runs_to_the_end_and_sends_nobody_home(pace):
    times = {"a": 10.0, "b": 10.1, "guest": pace}
    standings = race(["a", "b"], lambda order: [times[e] for e in order], guests=["guest"], rounds=10)
    assert [s.entrant for s in standings] == ["a", "b", "guest"]
    assert all(len(s.times) == 10 for s in standings)
    assert standings[0].behind == 0
    assert standings[-1].behind == pytest.approx(pace / 10 - 1)
    with pytest.raises(ValueError, match="distinct"):
        race(["a"], lambda order: [1.0] * len(order), guests=["a"])


@pytest.mark.parametrize(("entrants", "rounds"), [([], 5), (["a", "a"], 5), (["a"], 0)])
def test_what_is_no_race(entrants, rounds):
    with pytest.raises(ValueError, match=r"distinct entrants|at least 1"):
        race(entrants, lambda order: [1.0] * len(order), rounds=rounds)
