"""Memory of a training step: what a forward saved is overwritten or let go as soon as nothing reads it."""

import gc

import pytest
import torch
import torch.utils.checkpoint
from accounting import peak_bytes

import cutlass_ops as co
from cutlass_ops.epilogue import Row, epilogue, functions
from cutlass_ops.run import backward
from tests.scripts import script

BF16 = torch.bfloat16


class Forgetful(list):
    """Notes no launches, whose outputs would stay."""

    def append(self, launch):
        pass


@pytest.fixture
def counted(device, monkeypatch):
    """A made-up device that also has the kernels of elementwise parts, and keeps no outputs."""
    monkeypatch.setattr(backward, "has_kernels", lambda a: True)
    device.launches = Forgetful()
    return device


@pytest.fixture(scope="module")
def bench():
    return script("bench_training")


def peak_kib(run):
    """Return the memory of a step whose kernels and plans are there."""
    run()
    gc.collect()
    return peak_bytes(run) / 1024


# Many rows, where tiles count, and few, where gradients of weights do: rows, columns, width.
SHAPES = [(512, 448, 128), (128, 448, 128)]
# The most that is there at once, of the tile behind the first GEMM, the result, a weight, and x's gradient.
AT_ONCE = {
    "linear_gelu": lambda h, d, w, x: max(2 * h, 2 * h + w + x),
    "mlp": lambda h, d, w, x: d + max(2 * h + w, h + 2 * w + x),
    # The gradient of x is a sum in FP32, then rounded.
    "swiglu": lambda h, d, w, x: d + max(3 * h + w, 2 * h + w + 3 * x, 2 * h + 2 * w + x),
}


@pytest.mark.slow
@pytest.mark.parametrize(("layer", "shape"), [("linear_gelu", SHAPES[0]), ("mlp", SHAPES[1]), ("swiglu", SHAPES[0])])
def test_what_is_there_at_once(layer, shape, bench, counted):
    m, n, k = shape
    module = bench.module_of(layer, n, k, dtype=BF16)
    parameters, given = list(module.parameters()), bench.operands(layer, m, n, k, "cpu")
    tiles = [2 * extent / 1024 for extent in (m * n, m * k, n * k, m * k)]
    found = peak_kib(lambda: bench.step(module, parameters, *given))
    # Gradients of biases, parts of their sums, and the zeros that stand for operands are small.
    assert 0 <= found - AT_ONCE[layer](*tiles) <= 20


def gelu(x, w, bias):
    return co.gemm_bias_gelu(x, w.t(), bias)


def drawn(*shapes):
    torch.manual_seed(0)
    return [torch.randn(s).to(BF16).requires_grad_() for s in shapes]


def places(device):
    """Return where the forward's hidden output lay, and where D of the backward's first launch does."""
    forward, elementwise = device.launches[:2]
    return forward.outputs[1].data_ptr(), elementwise.outputs[0].data_ptr()


@pytest.fixture
def noted(device, monkeypatch):
    """The same device with its launches."""
    monkeypatch.setattr(backward, "has_kernels", lambda a: True)
    return device


def test_the_gradient_overwrites_what_only_the_backward_knows(noted):
    given = drawn((128, 64), (256, 64), (256,))
    gelu(*given).backward(torch.ones(128, 256).to(BF16))
    saved, gradient = places(noted)
    assert saved == gradient


def test_a_graph_that_is_retained_has_another_backward(noted):
    given = drawn((128, 64), (256, 64), (256,))
    d, grad = gelu(*given), torch.ones(128, 256).to(BF16)
    first = torch.autograd.grad(d, given, grad, retain_graph=True)
    saved, gradient = places(noted)
    assert saved != gradient
    for retained in (True, False):
        again = torch.autograd.grad(d, given, grad, retain_graph=retained)
        assert all(map(torch.equal, first, again))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(d, given, grad)


def test_hooks_of_saved_tensors_may_keep_them(noted):
    given, held = drawn((128, 64), (256, 64), (256,)), []

    def pack(x):
        held.append((x, x.detach().clone()))
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        d = gelu(*given)
    d.backward(torch.ones_like(d))
    assert len(held) == 4
    assert all(torch.equal(x, before) for x, before in held)


@epilogue
def activated_beside(acc, bias: Row):
    z = acc + bias
    return {"d": functions.gelu(z), "pre": z}


def test_what_the_op_returns_is_the_caller_s(noted):
    x, w, bias = drawn((128, 64), (256, 64), (256,))
    d, pre = co.gemm(x, w.t(), epilogue=activated_beside, bias=bias)
    before = [v.detach().clone() for v in (d, pre)]
    d.backward(torch.ones_like(d))
    assert all(map(torch.equal, (d, pre), before))


def test_a_backward_that_failed_is_not_repeated_with_what_it_overwrote(noted, monkeypatch):
    given = drawn((120, 64), (256, 64), (256,))  # of another shape than other tests, whose steps may be recorded
    d = gelu(*given)
    with monkeypatch.context() as patch:
        patch.setattr(backward.Step, "of_a", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            d.backward(torch.ones_like(d))
    with pytest.raises(RuntimeError, match="second time"):
        d.backward(torch.ones_like(d))
