"""Launches of kernels that reduce D, whose thread blocks share memory between launches: graphs and streams."""

import pytest
import torch

import cutlass_ops as co
from tests.gpu import cases, edges, kernels
from tests.gpu.cases import Case, captured

pytestmark = pytest.mark.gpu

NAN = float("nan")
REDUCING = edges.stream_k_sums() | kernels.reductions()


def reduced(spec, m, n, k):
    """Return A, B and inputs by name, but for the scalar."""
    case = Case(spec, *cases.fit(spec, (m, n, k)), exact=True)
    return case.a, case.b, {name: x for name, x in case.inputs.items() if name != "alpha"}


@pytest.mark.parametrize("name", list(REDUCING))
def test_a_graph_repeats_reductions(name):
    kernel, (a, b, inputs) = co.build(REDUCING[name]), reduced(REDUCING[name], 136, 264, 1024)
    alpha = torch.tensor(0.5, device="cuda")
    kernel(a, b, **inputs, alpha=alpha)
    graph, results = captured(lambda: kernel(a, b, **inputs, alpha=alpha))
    for value in (0.25, -3.0):
        alpha.fill_(value)
        inputs["bias"].add_(1)
        for x in results:
            x.fill_(NAN)
        graph.replay()
        direct = kernel(a, b, **inputs, alpha=value)
        for name_, x, y in zip(results._fields, results, direct, strict=True):
            assert torch.equal(x, y), name_


@pytest.mark.parametrize("name", list(kernels.reductions()))
def test_reductions_on_several_streams_do_not_meet(name):
    kernel, streams = co.build(REDUCING[name]), [torch.cuda.Stream() for _ in range(3)]
    drawn = [reduced(REDUCING[name], 264 + 8 * i, 520, 256) for i in range(3)]
    wanted = [kernel(a, b, **inputs, alpha=0.5) for a, b, inputs in drawn]
    torch.cuda.synchronize()
    for _ in range(10):
        found = []
        for stream, (a, b, inputs) in zip(streams, drawn, strict=True):
            with torch.cuda.stream(stream):
                found.append([kernel(a, b, **inputs, alpha=0.5) for _ in range(3)])
        torch.cuda.synchronize()
        for right, several in zip(wanted, found, strict=True):
            for each in several:
                assert all(torch.equal(x, y) for x, y in zip(right, each, strict=True))
