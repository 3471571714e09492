"""Folded norms: a copy of the weight that follows its parameters, whatever changes them."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import cutlass_ops as co

BF16 = torch.bfloat16
K, N = 16, 24
KINDS = [co.nn.RMSNormLinear, co.nn.LayerNormLinear]


def made(kind, dtype=BF16):
    torch.manual_seed(0)
    return kind(K, N, dtype=dtype), torch.randn(8, K).to(dtype)


def close(found, exact, allowed=0.02):
    assert found.shape == exact.shape
    assert (found.double() - exact.double()).norm() <= allowed * exact.double().norm()


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
    with pytest.raises(TypeError, match=r"^model is a str: pass a torch\.nn\.Module"):
        co.nn.fold_norms("module")


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


@pytest.mark.parametrize("kind", KINDS)
def test_a_module_that_moved_is_folded_again(kind):
    module, x = made(kind)
    module.fold().half()
    with torch.no_grad():
        close(module(x.half()), by_calls(module, x.half()))
    assert module._folded.value.matrix.dtype is torch.float16
    assert module.folds
