"""Models whose modules get fused forwards: those of transformers, and plain ones."""

import copy
import pickle

import pytest
import torch
from signatures import A100, H100
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
        config = transformers.GPT2Config(**TINY, **off, **more)
    else:
        config = getattr(transformers, f"{name}Config")(**SIZES, num_key_value_heads=2, head_dim=16, **more)
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


@pytest.mark.parametrize("name", NAMES)
def test_a_patched_model_computes_what_it_did(name, capsys):
    model = model_of(name)
    exact = step(copy.deepcopy(model).double())
    theirs = step(model)
    keys, parameters = list(model.state_dict()), list(model.parameters())
    found = co.patch(model)
    assert capsys.readouterr().out == f"{found}\n"
    mine = step(model)
    for x, y, z in zip((mine[0], *mine[1]), (theirs[0], *theirs[1]), (exact[0], *exact[1]), strict=True):
        assert (x - z).norm() <= 2 * (y - z).norm() + 0.01 * z.norm()
    assert list(model.state_dict()) == keys
    assert all(x is y for x, y in zip(model.parameters(), parameters, strict=True))
    count = co.unpatch(model)
    assert count == len(found.replaced) > 0
    assert all(map(torch.equal, (step(model)[0],), theirs[:1]))
    assert not [m for m in model.modules() if type(m).__module__.startswith("cutlass_ops") or "_fused_ops" in vars(m)]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_replaced_and_what_is_not(name):
    found = co.patch(model_of(name))
    kinds = {found.classes[n] for n in found.replaced}
    if name == "GPT2":
        assert kinds == {"GPT2MLP", "Conv1D", "Linear"}
        assert {found.classes[n] for n in found.kept} == {"Embedding", "LayerNorm"}
        assert len(found.replaced) == 2 * 5 + 1
    else:
        assert kinds == {f"{name}MLP", f"{name}DecoderLayer", "Linear"}
        assert {found.classes[n] for n in found.kept} == {"Embedding", f"{name}RMSNorm"}
        assert len(found.replaced) == 2 * (7 + 2) + 1
    assert set(found.kept.values()) == {"no GEMM"}
    text = str(found)
    assert text.startswith("fused:\n")
    assert "\nleft as it was:\n" in text
    assert "x Linear: a GEMM with its bias" in text


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
    found = co.patch(model, fold_norms=True)
    what = "norm, q, k and v in one GEMM without gradients"
    if name == "Qwen3":
        what += "; q_norm and k_norm stay PyTorch's"
    assert found.replaced["model.layers.0.self_attn"] == found.replaced["model.layers.1.self_attn"] == what
    assert f"2 x {name}Attention: {what}" in str(found)
    assert "model.layers.0.input_layernorm" not in found.kept
    mine = logits_of(model)
    assert (mine - exact).norm() <= 2 * (theirs - exact).norm() + 0.01 * exact.norm()
    assert list(model.state_dict()) == keys
    assert all(x is y for x, y in zip(model.parameters(), parameters, strict=True))
    # With gradients, it is the norm and three GEMMs.
    for x, y in zip(step(model)[1], trained[1], strict=True):
        assert (x - y).norm() <= 0.05 * y.norm()
    assert co.unpatch(model) == len(found.replaced)
    assert torch.equal(logits_of(model), theirs)
    assert not [m for m in model.modules() if "_fused_ops" in vars(m)]


def test_a_folded_model_follows_its_parameters_and_its_copies():
    model = model_of("Qwen3")
    co.patch(model)
    assert len(co.patch(model, fold_norms=True).replaced) == 2
    assert co.patch(model, fold_norms=True).replaced == {}
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


def test_a_folded_model_generates_with_a_cache():
    model = model_of("Qwen3").eval()
    co.patch(model, fold_norms=True)
    assert model.generate(TOKENS, max_new_tokens=4, do_sample=False, pad_token_id=0).shape == (2, 16)
    with torch.no_grad():
        logits = model(TOKENS).logits
        last = model(TOKENS[:, -1:], cache=model(TOKENS[:, :-1], use_cache=True).cache).logits
    assert (last[:, 0] - logits[:, -1]).norm() <= 0.03 * logits[:, -1].norm()


def test_a_layer_whose_projections_do_not_fit_says_why():
    model = model_of("Llama")
    hooked, other = (layer.self_attn for layer in model.model.layers)
    hooked.k_proj.register_forward_hook(lambda *_: None)
    forward = other.forward
    other.forward = lambda *arguments, **named: forward(*arguments, **named)
    found = co.patch(model, fold_norms=True)
    assert found.kept["model.layers.0.self_attn"] == "its layers have hooks or other forwards"
    assert found.kept["model.layers.1.self_attn"] == "it or the norm before it has hooks or another forward"
    assert logits_of(model).isfinite().all()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")  # not ours
def test_a_folded_model_compiles_as_one_graph():
    torch._dynamo.reset()
    model = model_of("Qwen3")
    co.patch(model, fold_norms=True)
    wanted = logits_of(model, use_cache=False)
    found = logits_of(torch.compile(model, backend="aot_eager", fullgraph=True), use_cache=False)
    assert (found - wanted).norm() <= 0.02 * wanted.norm()


@pytest.mark.parametrize("name", ["Llama", "GPT2"])
def test_copies_pickles_and_a_second_patch(name, capsys):
    model = model_of(name)
    co.patch(model)
    wanted = step(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        found = step(other)
        assert torch.equal(found[0], wanted[0])
        assert all(map(torch.equal, found[1], wanted[1]))
        assert co.unpatch(other) > 0
        other.load_state_dict(model.state_dict())
    assert co.patch(model).replaced == {}
    assert torch.equal(step(model)[0], wanted[0])


def test_generation_with_a_cache():
    model = model_of("Llama", torch.bfloat16).eval()
    wanted = model.generate(TOKENS, max_new_tokens=4, do_sample=False, pad_token_id=0)
    co.patch(model)
    found = model.generate(TOKENS, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert found.shape == wanted.shape
    with torch.no_grad():
        logits, cached = model(TOKENS).logits, model(TOKENS, use_cache=True)
        last = model(TOKENS[:, -1:], cache=model(TOKENS[:, :-1], use_cache=True).cache).logits
    assert (last[:, 0] - logits[:, -1]).norm() <= 0.03 * logits[:, -1].norm()
    assert torch.equal(cached.logits, logits)


def test_checkpoints_and_hidden_states():
    model = model_of("Llama")
    co.patch(model)
    wanted = step(model)
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    model.train()
    found = step(model)
    assert torch.equal(found[0], wanted[0])
    for x, y in zip(found[1], wanted[1], strict=True):
        assert (x - y).norm() <= 0.01 * y.norm()
    assert len(model(TOKENS, output_hidden_states=True).hidden_states) == 3


@pytest.mark.parametrize("name", ["Llama", "GPT2"])
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")  # not ours
def test_a_patched_model_compiles_as_one_graph(name):
    torch._dynamo.reset()
    model = model_of(name)
    co.patch(model)

    def logits_and_gradients(model, parameters):
        logits = model(input_ids=TOKENS, use_cache=False).logits
        return logits, *torch.autograd.grad(logits.float().logsumexp(-1).sum(), parameters)

    wanted = logits_and_gradients(model, list(model.parameters()))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for x, y in zip(logits_and_gradients(compiled, list(model.parameters())), wanted, strict=True):
        assert (x - y).norm() <= 0.02 * y.norm()


def test_fp32_is_fused_inside_autocast_alone():
    model = model_of("Llama", torch.float32)
    found = co.patch(model)
    assert found.replaced == {}
    assert "its weight is torch.float32: convert the model to torch.bfloat16" in str(found)
    with torch.autocast("cpu", BF16):
        wanted = model(TOKENS).logits
        assert len(co.patch(model).replaced) == 19
        assert (model(TOKENS).logits - wanted).norm() <= 0.03 * wanted.norm()


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
    found = co.patch(model)
    assert found.kept["model.layers.0.mlp"] == "its layers have hooks or other forwards"
    assert found.kept["model.layers.1.mlp"] == "its layers are not all Linear"
    assert found.kept["model.layers.0"] == found.kept["model.layers.1"] == "its MLP is not fused"
    assert found.kept["lm_head"] == "its forward was replaced"
    assert found.kept["model.layers.1.mlp.gate_proj"] == "a class that patch does not know"
    model(TOKENS)
    assert calls == [1]


def test_a_layer_that_returns_a_tuple_is_left_as_it_was(monkeypatch):
    model = model_of("Llama")
    kind = type(model.model.layers[0])
    monkeypatch.setitem(kind.forward.__annotations__, "return", tuple)
    found = co.patch(model)
    assert "does not say that it returns a tensor" in found.kept["model.layers.0"]
    assert found.replaced["model.layers.0.mlp"]
    assert model(TOKENS).logits.isfinite().all()


def test_a_plain_model_and_what_is_no_model():
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8, bias=False)).to(BF16)
    x = torch.randn(4, 16).to(BF16)
    wanted = model(x)
    found = co.patch(model)
    assert list(found.replaced) == ["0", "2"]
    assert (model(x) - wanted).norm() <= 0.01 * wanted.norm()
    assert isinstance(model[0], nn.Linear)
    assert str(co.patch(nn.ReLU())) == "the model has no parameters"
    with pytest.raises(TypeError, match=r"^model is a int: pass a torch\.nn\.Module"):
        co.patch(3)
    single = nn.Linear(8, 8).to(BF16)
    assert "the model itself" in str(co.patch(single))


@pytest.mark.parametrize("gpu", [H100, A100])
@pytest.mark.parametrize("name", ["Llama", "GPT2"])
def test_kernels_serve_a_patched_model(name, gpu, device):
    model = model_of(name)
    co.patch(model)
    device.device = gpu
    first = step(model)
    launched = len(device.launches)
    device.closed = True
    assert torch.equal(step(model)[0], first[0])
    assert len(device.launches) == 2 * launched
    # Forward and backward of each linear layer have three GEMMs.
    layers = [m for m in model.modules() if isinstance(m, nn.Linear) or type(m).__name__.endswith("Conv1D")]
    assert launched >= 3 * len(layers)


@pytest.mark.parametrize("name", ["Llama", "Qwen3"])
def test_folded_norms_launch_fewer_kernels(name, device):
    model = model_of(name)
    co.patch(model)
    logits_of(model)
    launched = len(device.launches)
    assert co.patch(model, fold_norms=True).replaced
    logits_of(model)
    # Of each of two layers, one kernel where three were, besides the norm's own.
    assert len(device.launches) - launched == launched - 2 * 2
    device.closed = True
    served = [launch.spec.slug for launch in device.launches]
    logits_of(model)
    assert [launch.spec.slug for launch in device.launches[len(served) :]] == served[launched:]
