"""Folded norms: a copy of the weight that follows its parameters, whatever changes them."""

import copy
import pickle

import pytest
import torch
from test_module_changes import close
from torch import nn
from torch.nn.utils import parametrize

import cutlass_ops as co

BF16 = torch.bfloat16
K, N = 16, 24
KINDS = [co.nn.RMSNormLinear, co.nn.LayerNormLinear]


def made(kind, dtype=BF16):
    torch.manual_seed(0)
    return kind(K, N, dtype=dtype), torch.randn(8, K).to(dtype)


def by_calls(module, x):
    """The same by calling what is inside."""
    return module.linear(module.norm(x))


def train(module, x, optimizer, forward):
    before = by_calls(module, x)
    for _ in range(10):
        forward(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert (by_calls(module, x) - before).norm() > 0.1 * before.norm()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fused", [False, True])
def test_a_folded_norm_follows_an_optimizer(kind, fused):
    module, x = made(kind)
    module.fold()
    train(module, x, torch.optim.AdamW(module.parameters(), 0.05, fused=fused), module)
    with torch.no_grad():
        close(module(x), by_calls(module, x))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_folded_norm_follows_a_compiled_training(kind):
    torch._dynamo.reset()
    module, x = made(kind)
    module.fold()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    train(module, x, torch.optim.AdamW(module.parameters(), 0.05, fused=True), compiled)
    with torch.no_grad():
        close(compiled(x), by_calls(module, x))  # nothing is folded now, and a compiled program folds with each call
        close(module(x), by_calls(module, x))
        close(compiled(x), by_calls(module, x))


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_may_be_exchanged(kind):
    module, x = made(kind)
    module.fold()
    memory = torch.empty(N, K, dtype=BF16)
    with torch.no_grad():
        for _ in range(2):
            module.load_state_dict({n: torch.randn_like(v) for n, v in module.state_dict().items()}, assign=True)
            close(module(x), by_calls(module, x))
        for _ in range(2):  # the second lies where the first did, with the same version
            memory.data.normal_()
            module.linear.weight = nn.Parameter(memory.data)
            close(module(x), by_calls(module, x))


@pytest.mark.parametrize("kind", KINDS)
def test_a_write_by_data_needs_a_fold(kind):
    module, x = made(kind)
    model = nn.Sequential(nn.Identity(), module.fold(), copy.deepcopy(module))
    module.linear.weight.data.mul_(-1)
    assert co.nn.fold_norms(model) == 1  # the copy was not folded
    with torch.no_grad():
        close(module(x), by_calls(module, x))


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_of_inference_mode_are_not_folded(kind):
    with torch.inference_mode():
        module, x = made(kind)
        with pytest.raises(ValueError, match=r"created inside torch\.inference_mode\(\)"):
            module.fold()
        close(module(x), by_calls(module, x))
    module, x = made(kind)
    module.fold()
    with torch.inference_mode():
        close(module(x), by_calls(module, x))
        module.half().bfloat16()  # its parameters are new
        for _ in range(2):
            close(module(x), by_calls(module, x))
            module.linear.weight.mul_(-1)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_copies_and_moves_of_a_folded_norm(kind):
    module, x = made(kind)
    assert module.fold() is module
    assert not copy.deepcopy(module).folds
    assert not pickle.loads(pickle.dumps(module)).folds
    # Gradients are those of the parameters, and not of the copy.
    for found, wanted in zip(gradients(module, module(x)), gradients(module, by_calls(module, x)), strict=True):
        close(found, wanted)
    assert module._folded.value is None
    with torch.no_grad():
        module(x)
    assert module._folded.value is not None
    assert module.half()._folded.value is None
    assert module.folds
    with torch.no_grad():
        close(module(x.half()), by_calls(module, x.half()))


def test_a_norm_without_a_weight_is_folded_as_one_of_ones():
    module, x = made(co.nn.RMSNormLinear)
    module.norm = nn.RMSNorm(K, eps=1e-5, elementwise_affine=False)
    with torch.no_grad():
        before = module(x)
        assert torch.equal(module.fold()(x), before)


def gradients(module, d):
    return torch.autograd.grad(d.float().square().sum(), list(module.parameters()))


def eval_after_data(module):
    module.linear.weight.data.mul_(-1)
    module.eval()


def merged_adapter(module):
    """What peft does: a wrapper takes the layer's place, writes its weight, and puts it back."""
    layer = module.linear
    module.linear = nn.Sequential(layer)
    layer.weight.data *= -1
    module.linear = layer


CHANGES = {
    "none": lambda m: None,
    "norm": lambda m: m.norm.weight.mul_(2.0),
    "weight": lambda m: m.linear.weight.mul_(0.5),
    "load": lambda m: m.load_state_dict({n: v * 1.5 for n, v in m.state_dict().items()}),
    "eval": eval_after_data,
    "adapter": merged_adapter,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_a_folded_weight_follows_changes(kind, change):
    module, x = made(kind)
    module.fold()
    module(x)
    CHANGES[change](module)
    for _ in range(2):
        close(module(x), by_calls(module, x))


class Halved(nn.Module):
    def forward(self, x):
        return x / 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_parametrized_layer_is_not_folded(kind):
    module, x = made(kind)
    module.fold()
    with torch.no_grad():
        module(x)
        parametrize.register_parametrization(module.linear, "weight", Halved())
        for _ in range(3):
            close(module(x), by_calls(module, x))
            module.linear.parametrizations.weight.original.mul_(-1.5)
        with pytest.raises(ValueError, match="a parametrization"):
            module.fold()
        parametrize.remove_parametrizations(module.linear, "weight")
        close(module(x), by_calls(module, x))


@pytest.mark.parametrize("kind", KINDS)
def test_fp32_is_folded_inside_autocast(kind):
    module, x = made(kind, torch.float32)
    with pytest.raises(TypeError, match=r"linear\.weight is torch\.float32: convert the module to torch\.bfloat16, or"):
        module.fold()
    with torch.no_grad():
        for dtype in (BF16, torch.float16):
            with torch.autocast("cpu", dtype):
                module.fold()
                assert module._folded.value.matrix.dtype is dtype
                assert module(x).dtype is dtype
                close(module(x), by_calls(module, x))
        with torch.autocast("cpu", BF16):  # folded in FP16
            assert module(x).dtype is BF16
            close(module(x), by_calls(module, x))
