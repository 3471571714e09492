"""Gradients on a GPU: those of the kernels that serve a backward, against PyTorch's."""

import pytest
import torch

import cutlass_ops as co
from tests.layers import LAYERS, tuple_of
from tests.scripts import script

pytestmark = [
    pytest.mark.gpu,
    # PyTorch's compiler warns of its own past, and its thread of gradients of a context that it makes at once.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning"),
]


@pytest.mark.parametrize("backend", [None, "inductor"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_has_gradients_as_exact_as_pytorch_s(name, dtype, backend):
    torch._dynamo.reset()
    generator = torch.Generator("cuda").manual_seed(0)
    mine, theirs, shapes = LAYERS[name]
    # (56, 128) @ (128, 64), with a norm's or a weight's extents to match.
    shapes = [tuple(8 * x if x > 1 else x for x in s) for s in shapes]
    given = [torch.randn(s, device="cuda", generator=generator).to(dtype) / 2 for s in shapes]
    function = mine if backend is None else torch.compile(mine, backend=backend, fullgraph=True)
    grads = None

    def gradients(run, values):
        nonlocal grads
        values = [x.detach().requires_grad_() for x in values]
        found = tuple_of(run(*values))
        if grads is None:
            grads = [torch.randn(x.shape, device="cuda", generator=generator).to(dtype) for x in found]
        return torch.autograd.grad(found, values, [g.to(x.dtype) for g, x in zip(grads, found, strict=True)])

    exact = gradients(theirs, [x.double() for x in given])
    found, eager = gradients(function, given), gradients(theirs, given)
    for x, y, z in zip(found, eager, exact, strict=True):
        assert x.dtype == dtype
        # Twice the error of PyTorch's own, or of one rounding.
        allowed = 2 * (y - z).norm() + torch.finfo(dtype).eps * z.norm()
        assert (x - z).norm() <= allowed


def test_further_steps_compile_nothing_and_keep_no_memory(monkeypatch):
    x, w, bias = (torch.randn(s, device="cuda").bfloat16().requires_grad_() for s in ((256, 128), (192, 128), (192,)))

    def step():
        d = co.gemm_bias_gelu(x, w.t(), bias)
        return torch.autograd.grad(d, [x, w, bias], torch.ones_like(d))

    at_rest = script("harness").memory_at_rest
    first = step()
    before = at_rest()
    monkeypatch.setenv("CUTLASS_OPS_JIT", "0")
    for _ in range(3):
        assert all(map(torch.equal, step(), first))
    assert at_rest() == before


def test_forward_and_backward_are_captured():
    x, w, bias = (torch.randn(s, device="cuda").bfloat16().requires_grad_() for s in ((256, 128), (192, 128), (192,)))

    def step():
        d = co.gemm_bias_relu(x, w.t(), bias)
        return torch.autograd.grad(d, [x, w, bias], torch.ones_like(d))

    wanted = step()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found = step()
    graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, found, wanted))
