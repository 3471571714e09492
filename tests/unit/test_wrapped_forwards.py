"""Libraries that wrap modules and unwrap them: results stay, and what was one kernel is one again."""

import copy

import pytest
import torch
from test_module_changes import BF16, Turned, close
from test_patching import TOKENS, logits_of, model_of
from torch import nn
from torch.nn.utils import parametrize, prune

import cutlass_ops as co

K, HIDDEN = 16, 32


def put_back(layer):
    """What libraries do that wrap a forward and put back the bound one that they found."""
    before = layer.forward
    layer.forward = lambda *args, **named: before(*args, **named)

    def undo():
        layer.forward = before

    return undo


def of_class(layer):
    layer.forward = lambda x: x

    def undo():
        layer.forward = type(layer).forward.__get__(layer)

    return undo


def accelerated(layer):
    hooks = pytest.importorskip("accelerate").hooks
    hooks.add_hook_to_module(layer, hooks.ModelHook())
    return lambda: hooks.remove_hook_from_module(layer)


def hooked(layer):
    handles = [layer.register_forward_hook(lambda *_: None), layer.register_full_backward_pre_hook(lambda *_: None)]
    return lambda: [handle.remove() for handle in handles]


def parametrized(layer):
    parametrize.register_parametrization(layer, "weight", Turned())
    return lambda: parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)


def pruned(layer):
    prune.random_unstructured(layer, "weight", amount=0.5)
    return lambda: prune.remove(layer, "weight")


WRAPS = [put_back, of_class, accelerated, hooked, parametrized, pruned]


def layers_of(model):
    return [m for m in model.modules() if isinstance(m, nn.Linear)]


def launched(model, x, device):
    """The kernels of a call."""
    before = len(device.launches)
    with torch.no_grad():
        model(x)
    return [launch.spec for launch in device.launches[before:]]


def blocks():
    torch.manual_seed(0)
    return nn.Sequential(
        co.nn.Linear(K, K, activation="silu"),
        co.nn.MLP(K, HIDDEN),
        co.nn.GatedMLP(K, HIDDEN),
        co.nn.RMSNormLinear(K, K),
        co.nn.LayerNormLinear(K, K, activation="gelu"),
    ).to(BF16)


@pytest.mark.sample(2)
@pytest.mark.parametrize("wrap", WRAPS)
def test_modules_are_fused_again_when_wrappers_go(wrap, device):
    model, x = blocks(), torch.randn(8, K).to(BF16)
    wanted = launched(model, x, device)
    assert len(wanted) == 1 + 2 + 2 + 1 + 1
    for undo in [wrap(layer) for layer in layers_of(model)]:
        undo()
    assert launched(model, x, device) == wanted


@pytest.mark.sample(2)
@pytest.mark.parametrize("wrap", WRAPS)
def test_a_patched_model_is_fused_again_when_wrappers_go(wrap, device):
    model = model_of("Llama")
    co.patch(model, verbose=False)
    wanted, report = launched(model, TOKENS, device), co.patch(model, dry_run=True)
    undoes = [wrap(layer) for layer in layers_of(model)]
    if wrap not in (parametrized, pruned):  # a layer with these multiplies by another weight, in its own kernel
        assert co.patch(model, dry_run=True).kept.items() > report.kept.items()
    for undo in undoes:
        undo()
    assert launched(model, TOKENS, device) == wanted
    assert co.patch(model, dry_run=True) == report
    plain = copy.deepcopy(model)
    assert co.unpatch(model) == len(report.fused)
    assert not [m for m in model.modules() if "forward" in vars(m)]
    close(logits_of(model), logits_of(plain), 0.03)


@pytest.mark.parametrize("wrap", [put_back, of_class, accelerated])
def test_a_model_may_have_been_wrapped_before_the_patch(wrap, device):
    model, plain = model_of("Llama"), model_of("Llama")
    wanted = launched(co.patch(plain, verbose=False), TOKENS, device)
    undoes = [wrap(m) for m in model.modules() if not list(m.children()) or hasattr(m, "mlp")]
    if wrap is not of_class:
        close(logits_of(co.patch(model, verbose=False)), logits_of(plain), 0.03)
        assert co.patch(model, dry_run=True).kept["lm_head"] == "its forward was replaced"
    for undo in undoes:
        undo()
    assert launched(co.patch(model, verbose=False), TOKENS, device) == wanted
    assert co.patch(model, dry_run=True) == co.patch(plain, dry_run=True)


def test_a_wrapped_module_is_not_unpatched():
    model = nn.Sequential(nn.Linear(K, K, dtype=BF16))
    co.patch(model, verbose=False)
    undo, x = put_back(model[0]), torch.randn(4, K).to(BF16)
    wanted = model(x)
    with pytest.raises(ValueError, match=r"^0 has had another forward since it was patched, such as that of acceler"):
        co.unpatch(model)
    close(model(x), wanted)
    undo()
    assert co.unpatch(model) == 1
    assert type(model[0]) is nn.Linear
    close(model(x), wanted)


def test_accelerate_dispatches_and_offloads_modules():
    accelerate = pytest.importorskip("accelerate")
    model, x = blocks(), torch.randn(8, K).to(BF16)
    plain = nn.Sequential(nn.Linear(K, HIDDEN), nn.Linear(HIDDEN, K)).to(BF16)
    wanted = model(x), plain(x)
    for each in (model, co.patch(plain, verbose=False)):
        accelerate.dispatch_model(each, {"": "cpu"}, main_device="cpu", force_hooks=True)
    for found, exact in zip((model(x), plain(x)), wanted, strict=True):
        close(found, exact)
    for each in (model, plain):
        accelerate.hooks.remove_hook_from_module(each, recurse=True)
        accelerate.cpu_offload(each, torch.device("cpu"))
        assert all(p.is_meta for p in each.parameters())
    for found, exact in zip((model(x), plain(x)), wanted, strict=True):
        close(found, exact)
