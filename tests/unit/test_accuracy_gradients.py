"""The benchmark of gradients' accuracy, with a few epilogues, on the CPU."""

import pytest
import torch

from tests.scripts import script


@pytest.mark.slow
def test_gradients_are_as_exact_as_pytorch_s():
    bench = script("accuracy_gradients")
    graphs = bench.named() | bench.drawn(5)
    rows = list(bench.measure(graphs, ["bf16", "f16"], "cpu"))
    assert len(rows) == len(graphs) * 4 == 15 * 4
    assert max(row["ratio"] for row in rows) <= 2
    assert {row["recompute"] for row in rows} == {False, True}


def test_a_worse_gradient_shows():
    bench = script("accuracy_gradients")
    exact = [torch.ones(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)]
    ours = [exact[0], exact[1] * 1.1]
    row = bench._worst(["a", "b"], ours, [x * 1.02 for x in exact], exact, 2**-8)
    assert (row["of"], row["ratio"]) == ("b", 5.0)
    with pytest.raises(AssertionError, match="the gradient of a is not 0"):
        bench._worst(["a"], [exact[0]], [exact[0]], [exact[0] * 0], 2**-8)
