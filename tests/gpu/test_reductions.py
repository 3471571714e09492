"""Launches of kernels that reduce D, whose thread blocks share memory between launches: graphs and streams."""

import pytest
import torch

import cutlass_ops as co
from cutlass_ops.epilogue.nodes import Kind
from tests.gpu import edges, kernels, placement
from tests.gpu.placement import whole
from tests.gpu.test_launch import BF16, NAN, capture, problem

pytestmark = pytest.mark.gpu

REDUCING = edges.stream_k_sums() | kernels.reductions()


def reduced(spec, m, n, k):
    """Return A, B and inputs by name, but for the scalar."""
    a, b, bias = problem(m, n, k)
    tiles = {i.name: whole(m, n).to(BF16) for i in spec.epilogue.inputs if i.kind is Kind.TILE}
    return a, b, {"bias": bias, "scale": whole(m).to(BF16), **tiles}


@pytest.mark.parametrize("name", list(REDUCING))
def test_a_graph_repeats_reductions(name):
    kernel, (a, b, inputs) = co.build(REDUCING[name]), reduced(REDUCING[name], 136, 264, 1024)
    alpha = torch.tensor(0.5, device=placement.DEVICE)
    kernel(a, b, **inputs, alpha=alpha)
    graph, captured = capture(lambda: kernel(a, b, **inputs, alpha=alpha))
    for value in (0.25, -3.0):
        alpha.fill_(value)
        inputs["bias"].add_(1)
        for x in captured:
            x.fill_(NAN)
        graph.replay()
        direct = kernel(a, b, **inputs, alpha=value)
        for name_, x, y in zip(captured._fields, captured, direct, strict=True):
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
