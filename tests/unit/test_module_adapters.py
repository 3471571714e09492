"""Adapters of peft on modules of ours: what they give is what they give on the same modules in plain PyTorch."""

import copy

import pytest
import torch
from test_module_changes import BF16, close
from test_modules import as_pytorch
from test_patching import TOKENS, logits_of, model_of
from torch import nn

import cutlass_ops as co

peft = pytest.importorskip("peft")
K, HIDDEN = 32, 64


class Net(nn.Module):
    """One of each module."""

    def __init__(self):
        super().__init__()
        self.first = co.nn.Linear(K, K)
        self.mlp, self.relu = co.nn.MLP(K, HIDDEN), co.nn.MLP(K, HIDDEN, activation="relu")
        self.gated = co.nn.GatedMLP(K, HIDDEN)
        self.rms = co.nn.RMSNormLinear(K, K, bias=True, activation="gelu")
        self.layer = co.nn.LayerNormLinear(K, K, activation="gelu")
        self.block = co.nn.DecoderBlock(K, HIDDEN, 4)

    def forward(self, x):
        x = self.first(x)
        x = self.relu(self.mlp(x, residual=x), residual=x)
        x = self.gated(x, residual=x)
        return self.block(self.layer(self.rms(x)) + x)


LAYERS = ["first", "fc1", "fc2", "gate_proj", "up_proj", "down_proj", "linear", "q_proj", "v_proj", "o_proj"]


def net_of():
    """A net with parameters that weigh enough for an adapter to show."""
    torch.manual_seed(0)
    net = Net().to(BF16)
    with torch.no_grad():
        for p in net.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return net


def adapted(net, **more):
    """The net with an adapter, the same for every net."""
    found = peft.get_peft_model(net, peft.LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": LAYERS} | more))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, p in found.named_parameters():
            if "lora_" in name and "magnitude" not in name:
                p.copy_(torch.randn_like(p) * 0.15)
    return found


def drawn():
    torch.manual_seed(2)
    return torch.randn(2, 6, K).to(BF16)


def shown(found, before):
    assert (found - before).norm() > 0.1 * before.norm()  # so that what is ignored shows


@pytest.mark.parametrize("dora", [False, True])
def test_adapters_are_added_before_the_activation(dora):
    ours, x = net_of(), drawn()
    before = ours(x)
    close(before, as_pytorch(ours)(x.double()))
    ours = adapted(ours, use_dora=dora)
    plain = as_pytorch(ours)
    d, wanted = ours(x), plain(x.double())
    shown(d, before)
    close(d, wanted)
    trained = [[p for p in net.parameters() if p.requires_grad] for net in (ours, plain)]
    found, exact = (
        torch.autograd.grad(y.double().square().mean(), ps) for y, ps in zip((d, wanted), trained, strict=True)
    )
    for g, e in zip(found, exact, strict=True):
        close(g, e, 0.25 if dora else 0.1)  # peft computes norms of weights in BF16
    with ours.disable_adapter():
        close(ours(x), before)
    kept = copy.deepcopy(ours)
    with torch.no_grad():
        close(ours(x), wanted)
        merged = ours.merge_and_unload()
        close(merged(x), wanted, 0.04)
    assert not [m for m in merged.modules() if type(m).__module__.startswith("peft")]
    close(merged(x), wanted, 0.04)
    close(kept.unload()(x), before)


@torch.no_grad()
def test_two_adapters():
    ours, x = adapted(net_of()), drawn()
    ours.add_adapter("two", peft.LoraConfig(r=4, target_modules=LAYERS, init_lora_weights=False))
    for which in ("default", "two", ["default", "two"]):
        ours.base_model.set_adapter(which)
        wanted = as_pytorch(ours)(x.double())
        close(ours(x), wanted)
    ours.base_model.merge_adapter(["two"])
    close(ours(x), as_pytorch(ours)(x.double()), 0.04)
    ours.base_model.unmerge_adapter()
    close(ours(x), wanted, 0.04)


@pytest.mark.parametrize("whole", [["mlp", "rms"], ["fc2", "linear"]])
def test_modules_to_save(whole):
    ours, x = net_of(), drawn()
    before = ours(x)
    ours = adapted(ours, target_modules=["gate_proj", "first"], modules_to_save=whole)
    with torch.no_grad():
        for name, p in ours.named_parameters():
            if "modules_to_save" in name:
                p.add_(torch.randn_like(p) * 0.2)
    wanted = as_pytorch(ours)(x.double())
    shown(ours(x), before)
    close(ours(x), wanted)
    close(ours.merge_and_unload()(x), wanted, 0.04)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("name", "first"), [("Llama", "patch"), ("Llama", "adapter"), ("GPT2", "patch")])
@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft asks transformers for what has another name by now
def test_adapters_of_a_patched_model(name, first):
    plain = model_of(name)
    patched, before = copy.deepcopy(plain), logits_of(plain)
    targets = ["c_attn", "c_fc", "c_proj"] if name == "GPT2" else LAYERS[3:6] + LAYERS[7:]
    more = {"target_modules": targets, "fan_in_fan_out": name == "GPT2"}
    if first == "patch":
        co.patch(patched, verbose=False)
    plain, patched = (adapted(model, **more) for model in (plain, patched))
    if first == "adapter":
        co.patch(patched, verbose=False)
    wanted = logits_of(plain)
    shown(wanted, before)
    close(logits_of(patched), wanted, 0.03)
    merged = patched.merge_and_unload()
    close(logits_of(merged), wanted, 0.04)
    assert merged is co.patch(merged, verbose=False)
    close(merged(TOKENS).logits, wanted, 0.04)
    assert not [why for why in co.patch(merged, dry_run=True).kept.values() if why != "no GEMM"]
