"""Models whose modules get fused forwards: those of transformers, and plain ones."""

import copy
import functools
import pickle

import pytest
import torch
from torch import nn

import cutlass_ops as co

BF16 = torch.bfloat16
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 128,
}
TINY = {"n_embd": 64, "n_head": 4, "n_layer": 2, "vocab_size": 128, "n_positions": 32}


def model_of(name, dtype=BF16, **more):
    """A model of transformers with random weights; dropout is off."""
    transformers = pytest.importorskip("transformers")
    if name == "GPT2":
        off = {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
        config = transformers.GPT2Config(**(TINY | off | more))
    else:
        config = getattr(transformers, f"{name}Config")(**(SIZES | {"num_key_value_heads": 2, "head_dim": 16} | more))
    kind = "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM"
    torch.manual_seed(0)
    model = getattr(transformers, kind)(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return model


TOKENS = torch.arange(24).reshape(2, 12) * 5 % 128
NAMES = ["Llama", "Qwen3", "Mistral", "GPT2"]


def step(model, tokens=TOKENS):
    found = model(input_ids=tokens, labels=tokens)
    return found.logits, torch.autograd.grad(found.loss, list(model.parameters()))


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", NAMES)
def test_a_patched_model_computes_what_it_did(name, capsys):
    model = model_of(name)
    exact = step(copy.deepcopy(model).double())
    theirs = step(model)
    keys, parameters = list(model.state_dict()), list(model.parameters())
    assert co.patch(model) is model
    found = co.patch(model, dry_run=True)
    assert capsys.readouterr().out == f"{found}\n"
    mine = step(model)
    for x, y, z in zip((mine[0], *mine[1]), (theirs[0], *theirs[1]), (exact[0], *exact[1]), strict=True):
        assert (x - z).norm() <= 2 * (y - z).norm() + 0.01 * z.norm()
    assert list(model.state_dict()) == keys
    assert all(x is y for x, y in zip(model.parameters(), parameters, strict=True))
    count = co.unpatch(model)
    assert count == len(found.fused) > 0
    assert all(map(torch.equal, (step(model)[0],), theirs[:1]))
    assert not [m for m in model.modules() if type(m).__module__.startswith("cutlass_ops") or "_fused_ops" in vars(m)]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_replaced_and_what_is_not(name):
    found = co.patch(co.patch(model_of(name)), dry_run=True)
    kinds = {found.classes[n] for n in found.fused}
    if name == "GPT2":
        assert kinds == {"GPT2MLP", "Conv1D", "Linear"}
        assert {found.classes[n] for n in found.kept} == {"Embedding", "LayerNorm"}
        assert len(found.fused) == 2 * 5 + 1
    else:
        assert kinds == {f"{name}MLP", f"{name}DecoderLayer", "Linear"}
        assert {found.classes[n] for n in found.kept} == {"Embedding", f"{name}RMSNorm"}
        assert len(found.fused) == 2 * (7 + 2) + 1
    assert set(found.kept.values()) == {"no GEMM"}
    text = str(found)
    assert text.startswith("fused:\n")
    assert "\nleft as it was:\n" in text
    if name == "GPT2":
        assert "8 x Conv1D: a GEMM with its bias (" in text
        assert "1 x Linear: a GEMM (lm_head)" in text
    else:
        assert "15 x Linear: a GEMM (" in text


FOLDING = ["Llama", "Mistral", "Qwen2", "Qwen3"]


@torch.no_grad()
def logits_of(model, **named):
    return model(TOKENS, **named).logits


@pytest.mark.parametrize("name", FOLDING)
def test_norm_and_projections_are_one_gemm_without_gradients(name):
    model = model_of(name)
    exact = logits_of(copy.deepcopy(model).double())
    theirs, trained = logits_of(model), step(model)
    keys, parameters = list(model.state_dict()), list(model.parameters())
    found = co.patch(co.patch(model, fold_norms=True), dry_run=True)
    what = "norm, q, k and v in one GEMM without gradients"
    if name == "Qwen3":
        what += "; q_norm and k_norm stay PyTorch's"
    assert found.fused["model.layers.0.self_attn"] == found.fused["model.layers.1.self_attn"] == what
    assert f"2 x {name}Attention: {what}" in str(found)
    assert "model.layers.0.input_layernorm" not in found.kept
    mine = logits_of(model)
    assert (mine - exact).norm() <= 2 * (theirs - exact).norm() + 0.01 * exact.norm()
    assert list(model.state_dict()) == keys
    assert all(x is y for x, y in zip(model.parameters(), parameters, strict=True))
    # With gradients, it is the norm and three GEMMs.
    for x, y in zip(step(model)[1], trained[1], strict=True):
        assert (x - y).norm() <= 0.05 * y.norm()
    assert co.unpatch(model) == len(found.fused)
    assert torch.equal(logits_of(model), theirs)
    assert not [m for m in model.modules() if "_fused_ops" in vars(m)]


def test_a_folded_model_follows_its_parameters_and_its_copies():
    model = model_of("Qwen3")
    before = co.patch(co.patch(model), dry_run=True).fused
    folded = co.patch(co.patch(model, fold_norms=True), dry_run=True).fused
    assert len(folded) - len(before) == 2
    assert co.patch(co.patch(model, fold_norms=True), dry_run=True).fused == folded
    first = logits_of(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits_of(other), first)
    with torch.no_grad():
        model.model.layers[0].input_layernorm.weight.mul_(1.5)
        model.model.layers[1].self_attn.k_proj.weight.mul_(-1)
    changed = logits_of(model)
    plain = copy.deepcopy(model)
    co.unpatch(plain)
    wanted = logits_of(plain)
    assert (changed - wanted).norm() <= 0.03 * wanted.norm()
    assert (changed - first).norm() > 0.03 * first.norm()


def test_a_layer_whose_projections_do_not_fit_says_why():
    model = model_of("Llama")
    hooked, other = (layer.self_attn for layer in model.model.layers)
    hooked.k_proj.register_forward_hook(lambda *_: None)
    forward = other.forward
    other.forward = lambda *arguments, **named: forward(*arguments, **named)
    found = co.patch(co.patch(model, fold_norms=True), fold_norms=True, dry_run=True)
    assert found.kept["model.layers.0.self_attn"] == "its layers have hooks or other forwards"
    assert found.kept["model.layers.1.self_attn"] == "it or the norm before it has hooks or another forward"
    assert logits_of(model).isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "fold_norms"), [("Llama", False), ("GPT2", False), ("Qwen3", True)])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")  # not ours
def test_a_patched_model_compiles_as_one_graph(name, fold_norms):
    torch._dynamo.reset()
    model = co.patch(model_of(name), fold_norms=fold_norms, verbose=False)

    def results(call):
        with torch.no_grad():
            without = call(input_ids=TOKENS, use_cache=False).logits
        logits = call(input_ids=TOKENS, use_cache=False).logits
        return without, logits, *torch.autograd.grad(logits.float().logsumexp(-1).sum(), list(model.parameters()))

    wanted, found = results(model), results(torch.compile(model, backend="aot_eager", fullgraph=True))
    assert torch.equal(found[1], wanted[1])  # the same ops run
    for x, y in zip(found, wanted, strict=True):
        assert (x - y).norm() <= 0.02 * y.norm()


@pytest.mark.parametrize("fold_norms", [False, True])
def test_generation_with_a_cache(fold_norms):
    model = co.patch(model_of("Qwen3").eval(), fold_norms=fold_norms, verbose=False)
    assert model.generate(TOKENS, max_new_tokens=4, do_sample=False, pad_token_id=0).shape == (2, 16)
    with torch.no_grad():
        logits, cached = model(TOKENS).logits, model(TOKENS[:, :-1], use_cache=True).cache
        last = model(TOKENS[:, -1:], cache=cached).logits
    assert (last[:, 0] - logits[:, -1]).norm() <= 0.03 * logits[:, -1].norm()


def test_fp32_is_fused_inside_autocast_alone():
    model = model_of("Llama", torch.float32)
    found = co.patch(co.patch(model), dry_run=True)
    assert found.fused == {}
    assert "its weight is torch.float32: convert the model to torch.bfloat16" in str(found)
    outside = model(TOKENS).logits
    with torch.autocast("cpu", BF16):
        wanted = model(TOKENS).logits
        assert len(co.patch(co.patch(model), dry_run=True).fused) == 19
        assert (model(TOKENS).logits - wanted).norm() <= 0.03 * wanted.norm()
    assert torch.equal(model(TOKENS).logits, outside)


def test_what_others_changed_is_left_as_it_was(capsys):
    model = model_of("Llama")
    hooked, renamed, other = (model.model.layers[0].mlp, model.model.layers[1].mlp, model.lm_head)
    calls = []
    hooked.up_proj.register_forward_hook(lambda *_: calls.append(1))

    class Adapter(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 1.0

    renamed.gate_proj.__class__ = Adapter
    forward = other.forward
    other.forward = lambda x: forward(x)
    found = co.patch(co.patch(model), dry_run=True)
    assert found.kept["model.layers.0.mlp"] == "its layers have hooks or other forwards"
    assert found.kept["model.layers.1.mlp"] == "its layers are not all Linear"
    assert found.kept["model.layers.0"] == found.kept["model.layers.1"] == "its MLP is not fused"
    assert found.kept["lm_head"] == "its forward was replaced"
    assert found.kept["model.layers.1.mlp.gate_proj"] == "a class that patch does not know"
    model(TOKENS)
    assert calls == [1]


def test_a_plain_model_and_what_is_no_model(capsys):
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8, bias=False)).to(BF16)
    x = torch.randn(4, 16).to(BF16)
    wanted = model(x)
    assert co.patch(model, dry_run=True).kept == dict.fromkeys("02", "not patched yet")
    found = co.patch(co.patch(model, verbose=False), dry_run=True)
    assert capsys.readouterr().out == ""
    assert found.fused == {"0": "a GEMM with its bias", "2": "a GEMM"}
    assert (model(x) - wanted).norm() <= 0.01 * wanted.norm()
    assert isinstance(model[0], nn.Linear)
    co.unpatch(model)
    assert co.patch(model, dry_run=True).kept == dict.fromkeys("02", "not patched yet")
    assert str(co.patch(nn.ReLU(), dry_run=True)) == "the model has no parameters"
    for call in (co.patch, functools.partial(co.patch, dry_run=True), co.unpatch, co.nn.fold_norms):
        with pytest.raises(TypeError, match=r"^model is a int: pass a torch\.nn\.Module"):
            call(3)
    single = nn.Linear(8, 8).to(BF16)
    assert "the model itself" in str(co.patch(co.patch(single), dry_run=True))


# ---- What patch says -------------------------------------------------------------------------------------------------


def test_modules_of_ours_are_fused_without_a_patch():
    made = co.nn.Linear(8, 8), co.nn.MLP(8, 8), co.nn.GatedMLP(8, 8), co.nn.RMSNormLinear(8, 8)
    model = nn.Sequential(*made, co.nn.DecoderBlock(8, 8, 1)).to(BF16)
    report = co.patch(co.patch(model, verbose=False), dry_run=True)
    assert {"0", "1", "1.fc1", "2", "3", "4", "4.mlp", "4.self_attn.o_proj"} <= set(report.fused)
    assert set(report.fused.values()) == {"a module of cutlass_ops.nn"}
    assert report.kept == dict.fromkeys(("4.input_layernorm", "4.post_attention_layernorm"), "no GEMM")
    assert not [m for m in model.modules() if "_fused_ops" in vars(m)]
    model[1].fc2.register_forward_hook(lambda *_: None)
    model[2].up_proj = nn.Sequential(model[2].up_proj)
    model[0].float()
    kept = co.patch(model, dry_run=True).kept
    called = "its layers have hooks, adapters or other forwards, and are called"
    assert (kept["1"], kept["2"]) == (called, called)
    assert kept["0"].startswith("its weight is torch.float32")


@pytest.mark.parametrize("name", ["Gemma2", "Phi3", "GPTNeoX"])
def test_an_mlp_of_another_class_is_listed(name):
    transformers = pytest.importorskip("transformers")
    more = {} if name == "GPTNeoX" else {"num_key_value_heads": 2, "pad_token_id": 0}
    config = getattr(transformers, f"{name}Config")(**SIZES, **more)
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(BF16)
    wanted = logits_of(model)
    report = co.patch(co.patch(model, verbose=False), dry_run=True)
    said = "an MLP that patch does not know: its activation is a kernel of its own"
    assert [report.classes[n] for n, why in report.kept.items() if why == said] == [f"{name}MLP"] * 2
    assert f"2 x {name}MLP: {said}" in str(report)
    assert (logits_of(model) - wanted).norm() <= 0.03 * wanted.norm()


@pytest.mark.parametrize("name", ["Llama", "Qwen3"])
def test_folded_norms_launch_fewer_kernels(name, device):
    model = model_of(name)
    co.patch(model)
    logits_of(model)
    launched = len(device.launches)
    co.patch(model, fold_norms=True)
    logits_of(model)
    # Of each of two layers, one kernel where three were, besides the norm's own.
    assert len(device.launches) - launched == launched - 2 * 2
    device.closed = True
    served = [launch.spec.slug for launch in device.launches]
    logits_of(model)
    assert [launch.spec.slug for launch in device.launches[len(served) :]] == served[launched:]
