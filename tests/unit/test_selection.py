"""The few kernels of a table: those that together lose least, and nowhere much."""

import math

from hypothesis import example, given
from hypothesis import strategies as st

from cutlass_ops.choose import selection
from tests.strategies import PATIENT

HALF = math.log(2.0)


def cost(losses, kept):
    reached = [min([HALF, *(known[k] for k in kept if k in known)]) for known in losses]
    return sum(x + 20 * x * x for x in reached)


def test_a_pair_may_serve_better_than_the_best_one_with_another():
    # "a" is the best alone; "b" and "c" leave nothing to be desired together.
    losses = [{"a": 0.02, "b": 0.0}, {"a": 0.02, "c": 0.0}, {"a": 0.02, "b": 0.0}, {"a": 0.02, "c": 0.0}]
    assert selection.chosen(losses, 1) == ("a",)
    assert set(selection.chosen(losses, 2)) == {"b", "c"}
    assert selection.extended(losses, ["a"], 2)[0] == "a"


def test_one_large_loss_is_worse_than_small_ones_everywhere():
    even = [{"even": 0.011, "uneven": 0.0}] * 9 + [{"even": 0.011, "uneven": 0.1}]
    assert selection.chosen(even, 1) == ("even",)


def test_the_most_useful_comes_first_and_no_kernel_that_does_not_help():
    losses = [{"a": 0.0, "b": 0.1, "c": 0.0}, {"a": 0.3, "b": 0.0}, {"a": 0.0, "c": 0.2}, {"a": 0.0}]
    assert selection.chosen(losses, 9) == ("a", "b")
    assert selection.extended(losses, ["c"], 9) == ("c", "a", "b")
    assert selection.extended(losses, ["unknown"], 2) == ("unknown", "a")
    assert selection.chosen([], 3) == ()


@example([{}, {}, {}, {0: 0.0, 1: 0.0}, {}, {0: 0.034194591552186855}], 2)  # sums that differ by a rounding
@PATIENT
@given(
    st.lists(st.dictionaries(st.integers(0, 6), st.floats(0, 1), max_size=7), min_size=1, max_size=12),
    st.integers(1, 4),
)
def test_no_exchange_of_one_helps(losses, count):
    kept = selection.chosen(losses, count)
    assert len(set(kept)) == len(kept) <= count
    everyone = {k for known in losses for k in known}
    for place in range(len(kept)):
        others = kept[:place] + kept[place + 1 :]
        for other in everyone - set(others):
            assert cost(losses, (*others, other)) >= cost(losses, kept) - 1e-9


@PATIENT
@given(st.lists(st.dictionaries(st.integers(0, 6), st.floats(0, 1), max_size=7), max_size=12))
def test_two_never_cost_more_than_one(losses):
    assert cost(losses, selection.chosen(losses, 2)) <= cost(losses, selection.chosen(losses, 1)) + 1e-9
