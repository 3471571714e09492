"""How the model takes rows to be spread over groups."""

import numpy as np
import pytest

from cutlass_ops.declare.problem import Problem
from cutlass_ops.kinds.arrays import Extents
from cutlass_ops.kinds.spreads import ASSUMED


@pytest.mark.sample(2)
@pytest.mark.parametrize("spread", ASSUMED, ids=lambda spread: spread.name)
@pytest.mark.parametrize("experts", [1, 2, 3, 8, 64, 256, 1000, 1025])
@pytest.mark.parametrize("mean", [1, 4, 37, 512])
def test_a_spread_has_all_rows_and_no_more_groups(spread, experts, mean):
    found = spread.of(Extents.of([Problem(mean, 64, 64, experts)]))
    assert found.rows.min() >= 1
    assert 1 <= found.counts.sum() <= experts
    # Groups have whole rows, so that half of one may be lost or added in each.
    assert abs((found.rows * found.counts).sum() - mean * experts) <= found.counts.sum() / 2


@pytest.mark.parametrize("spread", ASSUMED, ids=lambda spread: spread.name)
@pytest.mark.parametrize(("rows", "groups"), [(1, 1), (3, 8), (64, 8), (1024, 64), (5000, 7), (100, 1000)])
def test_groups_are_drawn_as_the_model_takes_them_to_be(spread, rows, groups):
    sizes = spread.drawn(rows, groups, np.random.default_rng(0))
    assert (len(sizes), sum(sizes), min(sizes) >= 0) == (groups, rows, True)
    shares = 1 / np.arange(1, groups + 1)
    largest = {"equal": -(-rows // groups), "one": rows, "Zipf": rows * shares[0] / shares.sum()}
    if spread.name in largest:
        assert abs(max(sizes) - largest[spread.name]) < 1
    if spread.name == "equal":
        assert max(sizes) - min(sizes) <= 1
    assert sizes == spread.drawn(rows, groups, np.random.default_rng(0))
