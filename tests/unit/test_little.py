"""Calls that autograd records and PyTorch serves: small ones, and others until the kernels of their step are there."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from fake_device import Everything, fake_device
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import cutlass_ops as co
from cutlass_ops.base.errors import ToolchainError
from cutlass_ops.nn import reading
from cutlass_ops.run import little

BF16 = torch.bfloat16
M, K, HIDDEN = 4, 16, 32


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(little, "on_gpu", lambda x: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def leaf(*shape):
    return torch.randn(shape).to(BF16).requires_grad_()


def is_ours(d):
    return "_Recorded" in type(d.grad_fn).__name__


def nodes(d):
    """Return the names of all nodes behind a result."""
    left, found = [d.grad_fn], set()
    while left:
        node = left.pop()
        found.add(type(node).__name__)
        left += [following for following, _ in node.next_functions if following is not None]
    return found


@pytest.mark.parametrize("name", ["Linear", "MLP", "GatedMLP", "RMSNormLinear", "LayerNormLinear"])
def test_pytorch_records_small_layers(name):
    module, x = getattr(co.nn, name)(K, HIDDEN, dtype=BF16), leaf(M, K)
    d = module(x)
    assert not any("Recorded" in node for node in nodes(d)), nodes(d)
    little.LITTLE, usual = -1, little.LITTLE
    try:
        assert (d - module(x)).norm() <= 0.02 * d.norm()
    finally:
        little.LITTLE = usual


def test_pytorch_records_small_calls_of_ops():
    x, w, bias = leaf(M, K), leaf(HIDDEN, K), leaf(HIDDEN)
    op = co.gemm_bias_relu
    for _ in range(3):
        before = op.served_by_pytorch
        d = op(x, w.t(), bias)
        assert op.served_by_pytorch == before + 1
        plain = F.relu(F.linear(x, w, bias))
        assert torch.equal(d, plain)
        assert not is_ours(d)
    g = torch.randn_like(d)
    found, wanted = (torch.autograd.grad(y, [x, w, bias], g) for y in (d, plain))
    assert all(map(torch.equal, found, wanted))


def test_a_wrong_argument_of_a_small_call_is_named_each_time():
    x, w, bias = leaf(M, K), leaf(HIDDEN, K), leaf(HIDDEN)
    co.gemm_bias_relu(x, w.t(), bias)
    for _ in range(2):
        with pytest.raises(ValueError, match="bias has shape"):
            co.gemm_bias_relu(x, w.t(), bias[:-1])
        with pytest.raises(ValueError, match=r"b looks like a weight of shape \(N, K\)"):
            co.gemm_bias_relu(x, w, bias)


@co.epilogue
def several(acc, bias: co.Row):
    return {"d": co.e.relu(acc + bias), "pre": acc + bias}


WHYS = [
    "warmed up",
    "the variable",
    "deterministic",
    "large",
    "no gradients",
    "recomputed",
    "main_grad",
    "main_grad of a view",
    "captured",
    "traced",
    "several",
]


@pytest.mark.parametrize("why", WHYS)
def test_kernels_serve_all_other_calls(monkeypatch, why):
    layer, x = co.nn.Linear(K, HIDDEN, activation="gelu", dtype=BF16), leaf(M, K)
    if why == "large":
        monkeypatch.setattr(little, "LITTLE", M * K * HIDDEN - 1)
    if why == "no gradients":
        with torch.no_grad():
            assert not reading.is_foreign(x, layer.weight)
        return
    if why.startswith("main_grad"):
        layer.weight.main_grad = torch.zeros(HIDDEN, K)
    if why == "captured":
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    if why == "the variable":
        monkeypatch.setenv("CUTLASS_OPS_STAND_IN", "0")
    if why == "deterministic":
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    if why == "traced":
        assert "cutlass_ops" in make_fx(lambda x: layer(x))(x.detach()).code
        return
    if why == "recomputed":
        with co.recompute():
            assert is_ours(layer(x))
        return
    if why == "warmed up":  # it may be captured later
        served = []
        co.warm_up(lambda: served.append(layer(x)))
        assert is_ours(served[0])
        return
    calls = [lambda: layer(x), lambda: co.gemm_bias_gelu(x, layer.weight.t(), layer.bias)]
    if why == "main_grad of a view":
        calls = calls[1:]
    if why == "several":
        calls = [lambda: co.gemm(x, layer.weight.t(), epilogue=several, bias=layer.bias)[0]]
    for call in calls:
        assert all(is_ours(call()) for _ in range(2))


# ---- Large calls -----------------------------------------------------------------------------------------------------


@pytest.fixture
def device(monkeypatch):
    """A device without any kernel, for which every call is large."""
    monkeypatch.setattr(little, "LITTLE", -1)
    with fake_device(monkeypatch) as fake:
        fake.absent = Everything()
        yield fake


def arrive(device, kernels):
    for spec in kernels:
        device.built(spec)


LAYERS = {
    "linear": lambda: co.nn.Linear(K, HIDDEN, activation="gelu", dtype=BF16),
    "mlp": lambda: co.nn.MLP(K, HIDDEN, dtype=BF16),
    "gated": lambda: co.nn.GatedMLP(K, HIDDEN, dtype=BF16),
    "rmsnorm": lambda: co.nn.RMSNormLinear(K, HIDDEN, dtype=BF16),
}


def is_pytorch_s(d):
    return not any("Recorded" in node for node in nodes(d))


@pytest.mark.parametrize("name", LAYERS)
def test_pytorch_records_a_large_layer_until_all_kernels_of_its_step_are_there(device, name):
    layer, x = LAYERS[name](), leaf(M, K)

    def step():
        d = layer(x)
        d.backward(torch.ones_like(d))
        return d

    first = step()  # it finds out which kernels a step needs
    assert not is_pytorch_s(first)
    forward = list(device.wanted)
    assert all(is_pytorch_s(step()) for _ in range(2))
    assert list(device.wanted) == forward
    arrive(device, forward[:1])
    assert len(forward) > 1
    assert is_pytorch_s(step())
    for _ in range(8):  # a later kernel of the step may be asked for only now
        arrive(device, list(device.wanted))
        d = step()
    assert not is_pytorch_s(d)
    assert device.launches
    assert (d - first).norm() <= 0.02 * d.norm()
    # Another number of rows is another step.
    assert not is_pytorch_s(layer(leaf(3 * M, K)))


def test_pytorch_records_an_op_until_the_kernels_of_its_step_are_there(device):
    x, w, bias = leaf(M, K), leaf(HIDDEN, K), leaf(HIDDEN)

    def step():
        d = co.gemm_bias_relu(x, w.t(), bias)
        return d, torch.autograd.grad(d, [x, w, bias], torch.ones_like(d))

    (first, before), (d, gradients) = step(), step()
    assert is_ours(first)
    assert not is_ours(d)
    for found, wanted in zip((first, *before), (d, *gradients), strict=True):
        assert (found - wanted).norm() <= 0.02 * wanted.norm()
    arrive(device, list(device.wanted))
    assert is_ours(step()[0])


def test_a_kernel_that_cannot_be_had_leaves_its_step_to_pytorch(device):
    layer, x = co.nn.Linear(K, HIDDEN, activation="gelu", dtype=BF16), leaf(M, K)
    d = layer(x)
    d.backward(torch.ones_like(d))
    for wanted in device.wanted.values():
        wanted.set_exception(ToolchainError("no compiler"))
    with pytest.warns(RuntimeWarning, match="no compiler"):
        layer(x)
    assert is_pytorch_s(layer(x))


def test_steps_do_not_mix(device):
    x, w, bias = leaf(M, K), leaf(HIDDEN, K), leaf(HIDDEN)
    co.gemm(x, w.t())  # recorded; its backward never runs
    with torch.no_grad():
        co.gemm(leaf(5, K), leaf(2 * HIDDEN, K).t())
    arrive(device, [next(iter(device.wanted))])
    assert is_ours(co.gemm(x, w.t()))
    # Neither that of a call that fails, with what follows it, nor that of another op with such matrices.
    with pytest.raises(ValueError, match="bias has shape"):
        co.gemm_bias(x, w.t(), bias[:-1])
    with torch.no_grad():
        co.gemm(leaf(7, K), leaf(3 * HIDDEN, K).t())
    co.gemm_bias_gelu(x, w.t(), bias)
    assert is_ours(co.gemm_bias(x, w.t(), bias))
    assert is_ours(co.gemm(x, w.t()))


def test_kernels_that_calls_without_gradients_asked_for_count(device):
    x, w = leaf(M, K), leaf(HIDDEN, K)
    with torch.no_grad():
        for _ in range(2):
            co.gemm(x, w.t())
    forward = list(device.wanted)

    def step():
        d = co.gemm(x, w.t())
        d.backward(torch.ones_like(d))
        return d

    step()
    arrive(device, [spec for spec in device.wanted if spec not in forward])
    assert not is_ours(step())
    arrive(device, forward)
    assert is_ours(step())


@pytest.mark.parametrize("arrives", [False, True])
@pytest.mark.parametrize("name", ["op", *LAYERS])
def test_a_checkpoint_records_alike_both_times(device, name, arrives):
    """All extents are equal, so that PyTorch would not notice tensors that are saved in another order."""
    side = 32
    w = leaf(side, side)
    makes = {
        "op": lambda: lambda x: co.gemm(x, w.t()),
        "linear": lambda: co.nn.Linear(side, side, dtype=BF16),
        "mlp": lambda: co.nn.MLP(side, side, dtype=BF16),
        "gated": lambda: co.nn.GatedMLP(side, side, dtype=BF16),
        "rmsnorm": lambda: co.nn.RMSNormLinear(side, side, dtype=BF16),
    }
    layer, x, g = makes[name](), leaf(side, side), torch.randn(side, side).to(BF16)
    little.LITTLE = 1 << 35
    (wanted,) = torch.autograd.grad(layer(x), x, g)
    little.LITTLE = -1
    for _ in range(3):
        d = checkpoint(layer, x, use_reentrant=False)
        if arrives:
            arrive(device, list(device.wanted))
        (found,) = torch.autograd.grad(d, x, g)
        assert (found - wanted).norm() <= 0.02 * wanted.norm()


def test_pytorch_records_batches_of_rows(device):
    x, w, bias, residual = leaf(2, 3, K), leaf(HIDDEN, K), leaf(HIDDEN), leaf(2, 3, HIDDEN)

    @co.epilogue
    def added(acc, bias: co.Row, residual: co.Tile):
        return co.e.relu(acc + bias) + residual

    def step():
        d = co.gemm(x, w.t(), epilogue=added, bias=bias, residual=residual)
        return d, torch.autograd.grad(d, [x, w, bias, residual], torch.ones_like(d))

    (first, before), (d, gradients) = step(), step()
    assert is_ours(first)
    assert not is_ours(d)
    for found, wanted in zip((first, *before), (d, *gradients), strict=True):
        assert found.shape == wanted.shape
        assert (found - wanted).norm() <= 0.02 * wanted.norm()


def test_kernels_record_results_in_another_dtype():
    """PyTorch's product with another dtype has no derivative."""
    d = co.gemm(leaf(M, K), leaf(HIDDEN, K).t(), out_dtype=torch.float32)
    assert is_ours(d)


def test_dtypes_of_a_small_call_are_checked_each_time():
    x, w = leaf(M, K), leaf(HIDDEN, K)
    co.gemm(x, w.t())
    with pytest.raises(TypeError, match="must have the same dtype"):
        co.gemm(x, w.detach().half().t())
