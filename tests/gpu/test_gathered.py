"""Kernels that take means of A's rows: all alike, and what their launches share."""

import pytest
import torch

import cutlass_ops as co
from cutlass_ops.kinds.sm90.config import Sm90Config
from tests.gpu import kernels, tensors
from tests.gpu.cases import Case, check_written_just_before

pytestmark = pytest.mark.gpu

WHOLE = {
    name: spec
    for name, spec in kernels.gathering().items()
    if name.startswith("norm-sm90") and isinstance(spec.config, Sm90Config) and spec.config.whole_k
}
# With a kernel before the GEMM, and a row-major A; those that copy A as well.
REALIGNED = kernels.realigned()
AHEAD = {
    name: spec
    for name, spec in (kernels.gathering() | REALIGNED).items()
    if name.startswith("norm-")
    and spec.a.major == "row"
    and (name in REALIGNED or spec.config.arch == "sm80" or spec.config.means != "gathered")
}


@pytest.mark.parametrize("shape", [(70, 136, 328), (1030, 1000, 1024), (130, 136, 9000)], ids=str)
def test_every_way_gives_the_same_bits(shape):
    m, n, k = shape
    x, weight = tensors.matrix(m, k, "bf16"), tensors.matrix(n, k, "bf16")
    found = {name: co.build(spec)(x, weight.t(), eps=1e-5) for name, spec in WHOLE.items()}
    first = next(iter(found.values()))
    assert [name for name, d in found.items() if not torch.equal(d, first)] == []


@pytest.mark.parametrize("name", AHEAD)
def test_means_ahead_follow_what_was_written_just_before(name):
    """The kernel that takes them may start early, and the GEMM after it as well: neither may read A too soon."""
    # A of another size each time, and so of other means.
    check_written_just_before(Case(AHEAD[name], 300, 512, 515 if name in REALIGNED else 512), (1, 2, 3))


# Kernels that share memory between launches, which each launch leaves as it found it.
BESIDE = [
    name for name, spec in kernels.gathering().items() if spec.config.arch == "sm90" and spec.config.means == "beside"
]


def beside(name):
    """Return a kernel, and what calls it with x (M, 512) and one weight."""
    spec = kernels.gathering()[name]
    kernel, dtype = co.build(spec), spec.a.dtype.name
    weight = tensors.matrix(264, 512, dtype).t()
    values = {"eps": 0.5}
    if "up" in spec.epilogue.products:
        values["up"] = tensors.matrix(264, 512, dtype).t()
    if any(i.name == "column_sum" for i in spec.epilogue.inputs):
        values["column_sum"] = tensors.vector(264, dtype)
    return dtype, lambda x, **out: kernel(x, weight, **values, **out)


@pytest.mark.parametrize("name", BESIDE)
def test_launches_of_any_number_of_rows_follow_each_other(name):
    dtype, call = beside(name)
    rows = (1, 700, 3, 129, 2500, 64, 2501, 1)  # memory grows, and serves fewer rows afterwards
    inputs = [tensors.matrix(m, 512, dtype) for m in rows]
    wanted = []
    for x in inputs:
        wanted.append(call(x))
        torch.cuda.synchronize()
    for _ in range(20):
        found = [call(x) for x in inputs]  # nothing waits in between
        assert [m for m, d, right in zip(rows, found, wanted, strict=True) if not torch.equal(d, right)] == []


@pytest.mark.parametrize("name", BESIDE[:3])
def test_streams_share_nothing(name):
    dtype, call = beside(name)
    streams = [torch.cuda.Stream() for _ in range(3)]
    inputs = [tensors.matrix(m, 512, dtype) for m in (300, 1100, 40)]
    wanted = [call(x) for x in inputs]
    torch.cuda.synchronize()
    found = [[] for _ in streams]
    for _ in range(50):
        for stream, x, results in zip(streams, inputs, found, strict=True):
            with torch.cuda.stream(stream):
                results.append(call(x))
    torch.cuda.synchronize()
    for results, right in zip(found, wanted, strict=True):
        assert all(torch.equal(d, right) for d in results)


@pytest.mark.parametrize("name", BESIDE[:3])
def test_graphs_share_nothing_with_each_other_nor_with_calls(name):
    dtype, call = beside(name)
    inputs = [tensors.matrix(m, 512, dtype) for m in (300, 1100)]
    wanted = [call(x) for x in inputs]
    graphs, found, stream = [], [], torch.cuda.Stream()
    for x in inputs:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            found.append([call(x) for _ in range(3)])
        graphs.append(graph)
    others = [torch.cuda.Stream() for _ in graphs]
    for _ in range(20):
        for results in found:
            for d in results:
                d.fill_(float("nan"))
        torch.cuda.synchronize()
        for graph, other in zip(graphs, others, strict=True):
            with torch.cuda.stream(other):
                graph.replay()
        with torch.cuda.stream(stream):
            called = [call(x) for x in inputs]
        torch.cuda.synchronize()
        for results, d, right in zip(found, called, wanted, strict=True):
            assert all(torch.equal(each, right) for each in (*results, d))
