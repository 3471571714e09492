"""Modules that others change: hooks, adapters, other forwards, parametrizations, biases that come and go."""

import copy

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrize, prune

import cutlass_ops as co

BF16 = torch.bfloat16
K, HIDDEN = 16, 32


class Adapted(nn.Module):
    """An adapter as peft's, which forwards the weight of the layer that it wraps. Peft's class is called Linear too."""

    def __init__(self, base):
        super().__init__()
        self.base_layer, (n, k) = base, base.weight.shape
        self.down, self.up = nn.Linear(k, 4, bias=False).to(base.weight), nn.Linear(4, n, bias=False).to(base.weight)

    weight = property(lambda self: self.base_layer.weight)
    bias = property(lambda self: self.base_layer.bias)

    def forward(self, x, **named):
        return self.base_layer(x, **named) + self.up(self.down(x))


Adapted.__name__ = "Linear"


class Other(co.nn.Linear):
    """A subclass with another forward."""

    def forward(self, x, **named):
        return -2 * super().forward(x, **named)


def as_subclass(parent, name):
    getattr(parent, name).__class__ = Other


def adapted(parent, name):
    setattr(parent, name, Adapted(getattr(parent, name)))


def hooked(parent, name):
    getattr(parent, name).register_forward_hook(lambda module, x, d: -2 * d)


def hooked_before(parent, name):
    getattr(parent, name).register_forward_pre_hook(lambda module, x: (-2 * x[0],))


def replaced(parent, name):
    """What accelerate's add_hook_to_module does."""
    layer = getattr(parent, name)
    before = layer.forward
    layer.forward = lambda *args, **named: -2 * before(*args, **named)


def pruned(parent, name):
    prune.l1_unstructured(getattr(parent, name), "weight", amount=0.5)


class Turned(nn.Module):
    def forward(self, x):
        return -2 * x


def parametrized(parent, name):
    parametrize.register_parametrization(getattr(parent, name), "weight", Turned())


CHANGES = [as_subclass, adapted, hooked, hooked_before, replaced, pruned, parametrized]
MODULES = {
    "mlp": (lambda: co.nn.MLP(K, HIDDEN, dtype=BF16), ("fc1", "fc2")),
    "gated": (lambda: co.nn.GatedMLP(K, HIDDEN, dtype=BF16), ("gate_proj", "up_proj", "down_proj")),
    "rmsnorm": (lambda: co.nn.RMSNormLinear(K, K, bias=True, dtype=BF16), ("norm", "linear")),
    "layernorm": (lambda: co.nn.LayerNormLinear(K, K, dtype=BF16), ("norm", "linear")),
}
CASES = [
    (module, name, change)
    for module, (_, names) in MODULES.items()
    for name in names
    for change in CHANGES
    if name != "norm" or change in (hooked, hooked_before, replaced, pruned, parametrized)  # it is no linear layer
]


def by_calls(module, x, residual):
    """The same by calling what is inside: linear layers, between which the module computes its activation."""
    if hasattr(module, "norm"):
        return module.linear(module.norm(x))
    if isinstance(module, co.nn.MLP):
        return module.fc2(F.gelu(module.fc1(x))) + residual
    return module.down_proj(F.silu(module.gate_proj(x)) * module.up_proj(x)) + residual


def call(module, x, residual):
    return module(x) if hasattr(module, "norm") else module(x, residual=residual)


def close(found, exact, allowed=0.02):
    assert found.shape == exact.shape
    assert (found.double() - exact.double()).norm() <= allowed * exact.double().norm()


def drawn(count=2):
    return [torch.randn(6, K).to(BF16).requires_grad_() for _ in range(count)]


def weights_scaled(module):
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn_like(p) * 0.3)
    return module


@pytest.mark.sample(2)
@pytest.mark.parametrize(("module", "name", "change"), CASES)
def test_what_is_inside_may_change(module, name, change):
    torch.manual_seed(0)
    made = weights_scaled(MODULES[module][0]())
    given = drawn()
    before = call(made, *given)
    change(made, name)
    d, wanted = call(made, *given), by_calls(made, *given)
    close(d, wanted)
    assert (d - before).norm() > 0.05 * before.norm()  # so that what is ignored shows
    parameters = list(made.parameters())
    grad = torch.randn_like(d)
    found = torch.autograd.grad(d, parameters, grad)
    for x, y in zip(found, torch.autograd.grad(wanted, parameters, grad), strict=True):
        close(x, y, 0.03)


class Quantised(torch.Tensor):
    """A weight as torchao's: its class multiplies by it, and nothing else can."""

    @staticmethod
    def __new__(cls, integers, scale, dtype):
        return torch.Tensor._make_wrapper_subclass(cls, integers.shape, dtype=dtype)

    def __init__(self, integers, scale, dtype):
        self.integers, self.scale = integers, scale

    def __tensor_flatten__(self):  # for torch.compile
        return ["integers", "scale"], self.dtype

    @classmethod
    def __tensor_unflatten__(cls, parts, dtype, size, stride):
        return cls(parts["integers"], parts["scale"], dtype)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is F.linear:
            x, weight, *bias = args
            return F.linear(x, (weight.integers * weight.scale).to(x.dtype), *bias)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return cls(args[0].integers, args[0].scale, args[0].dtype)
        raise NotImplementedError(f"{function} of a quantised weight")


def quantised(parent, name):
    layer = getattr(parent, name)
    scale = layer.weight.detach().float().abs().amax(1, keepdim=True) / 7  # coarse, so that what is ignored shows
    integers = (layer.weight.detach() / scale).round().to(torch.int8)
    layer.weight = nn.Parameter(Quantised(integers, scale, layer.weight.dtype), requires_grad=False)


@pytest.mark.parametrize(("module", "name"), [(m, n) for m, (_, ns) in MODULES.items() for n in ns if n != "norm"])
def test_a_weight_may_be_quantised(module, name):
    torch.manual_seed(0)
    made = weights_scaled(MODULES[module][0]())
    (x, residual), plain = drawn(), copy.deepcopy(made)
    before = call(made, x, residual)
    quantised(made, name)
    weight = getattr(made, name).weight
    with torch.no_grad():
        getattr(plain, name).weight.copy_(weight.integers * weight.scale)
    d, wanted = call(made, x, residual), call(plain, x, residual)
    close(d, wanted)
    assert (d - before).norm() > 0.05 * before.norm()
    for found, exact in zip(*(torch.autograd.grad(y.float().sum(), x) for y in (d, wanted)), strict=True):
        close(found, exact, 0.03)


@pytest.mark.parametrize("module", ["mlp", "gated"])
def test_a_hook_that_drops_arguments_keeps_the_residual(module):
    made, names = MODULES[module][0](), MODULES[module][1]
    x, residual = drawn()
    wanted = made(x, residual=residual)
    getattr(made, names[-1]).register_forward_pre_hook(lambda module, given: given[0])
    close(made(x, residual=residual), wanted)
    with pytest.raises(TypeError, match="positional"):
        made(x, residual)


@pytest.mark.parametrize("layer", [nn.Linear, lambda *a, **k: nn.Sequential(nn.Linear(*a, **k), nn.Tanh())])
def test_a_layer_may_be_replaced_by_any_module(layer):
    mlp, gated = co.nn.MLP(K, HIDDEN, dtype=BF16), co.nn.GatedMLP(K, HIDDEN, dtype=BF16)
    mlp.fc1, gated.up_proj = (layer(K, HIDDEN, dtype=BF16) for _ in range(2))
    x, residual = drawn()
    close(mlp(x, residual=residual), by_calls(mlp, x, residual))
    close(gated(x, residual=residual), by_calls(gated, x, residual))
    mlp.fc2, gated.down_proj = (layer(HIDDEN, K, dtype=BF16) for _ in range(2))
    close(mlp(x, residual=residual), by_calls(mlp, x, residual))
    close(gated(x, residual=residual), by_calls(gated, x, residual))


@pytest.mark.parametrize("name", ["gate_proj", "up_proj", "down_proj"])
def test_a_gate_s_layer_may_have_another_activation(name):
    made, (x, residual) = co.nn.GatedMLP(K, HIDDEN, dtype=BF16), drawn()
    n, k = getattr(made, name).weight.shape
    setattr(made, name, co.nn.Linear(k, n, dtype=BF16, activation="relu"))
    close(made(x, residual=residual), by_calls(made, x, residual))


@pytest.mark.parametrize("kind", [co.nn.RMSNormLinear, co.nn.LayerNormLinear])
def test_a_norm_and_its_layer_may_be_exchanged(kind):
    made, (x, _) = kind(K, K, dtype=BF16), drawn()
    made.linear = co.nn.Linear(K, K, dtype=BF16, activation="relu")
    close(made(x), by_calls(made, x, None))
    for norm in (nn.RMSNorm(K, dtype=BF16), nn.LayerNorm(K, 1e-2, elementwise_affine=False)):
        made.norm = norm
        close(made(x), by_calls(made, x, None))
    made.linear = nn.Linear(K, HIDDEN, dtype=BF16)
    close(made(x), by_calls(made, x, None))


BIASED = {
    "mlp": lambda bias: co.nn.MLP(K, HIDDEN, bias=bias, dtype=BF16),
    "gated": lambda bias: co.nn.GatedMLP(K, HIDDEN, bias=bias, dtype=BF16),
    "layernorm": lambda bias: co.nn.LayerNormLinear(K, K, bias=bias, dtype=BF16),
}


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("module", BIASED)
def test_a_bias_may_come_and_go(module, biased):
    made, given = BIASED[module](biased), drawn()
    for layer in (m for m in made.modules() if isinstance(m, co.nn.Linear)):
        layer.bias = None if biased else nn.Parameter(torch.randn(layer.out_features).to(BF16))
        close(call(made, *given), by_calls(made, *given))
    with torch.no_grad():
        close(call(made, *given), by_calls(made, *given))


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", [co.nn.RMSNormLinear, co.nn.LayerNormLinear])
@torch.no_grad()
def test_what_is_folded_is_not_of_a_tracer_nor_of_weights_before(kind):
    made, x = kind(K, HIDDEN, dtype=BF16), torch.randn(5, K).to(BF16)
    made.fold()
    made.linear.weight.mul_(2)
    make_fx(made, tracing_mode="fake", _allow_non_fake_inputs=True)(x)
    other = kind(K, HIDDEN, dtype=BF16)
    other.load_state_dict(made.state_dict())
    assert torch.equal(made(x), other.fold()(x))
    made.load_state_dict(kind(K, HIDDEN, dtype=BF16).state_dict())
    wanted = copy.deepcopy(made)(x)
    torch._dynamo.reset()
    torch.testing.assert_close(
        torch.compile(made, backend="aot_eager", fullgraph=True)(x), wanted, rtol=0.05, atol=0.05
    )


class Named(torch.Tensor):
    """A tensor whose class changes nothing."""


@pytest.mark.slow
def test_modules_compile_with_a_weight_whose_class_changes_nothing():
    torch._dynamo.reset()
    made, (x, residual) = co.nn.MLP(K, HIDDEN, dtype=BF16), drawn()
    wanted = made(x, residual=residual)
    made.fc1.weight = nn.Parameter(made.fc1.weight.data.as_subclass(Named))
    for each in (made, torch.compile(made, backend="aot_eager", fullgraph=True)):
        torch.testing.assert_close(each(x, residual=residual).as_subclass(torch.Tensor), wanted)


@pytest.mark.slow
def test_compiled_modules_notice_what_changes():
    torch._dynamo.reset()
    made, (x, residual) = co.nn.GatedMLP(K, HIDDEN, dtype=BF16), drawn()
    compiled = torch.compile(made, backend="aot_eager", fullgraph=True)
    compiled(x, residual=residual)
    for change, name in ((replaced, "up_proj"), (adapted, "gate_proj"), (as_subclass, "down_proj")):
        other = copy.deepcopy(made)
        change(other, name)
        compiled = torch.compile(other, backend="aot_eager", fullgraph=True)
        close(compiled(x, residual=residual), by_calls(other, x, residual))
