"""Patched models that others change: adapters, hooks, other forwards and classes, before the patch and after it."""

import copy
import inspect
import pickle
from dataclasses import replace

import pytest
import torch
from signatures import H100
from test_module_changes import Adapted, Quantised, hooked, hooked_before, parametrized, pruned, quantised, replaced
from test_patching import FOLDING, TOKENS, logits_of, model_of
from torch import nn
from torch.nn.modules import module as of_all
from torch.nn.utils import parametrize

import cutlass_ops as co
from cutlass_ops.nn import reading

BF16 = torch.bfloat16


def adapted(parent, name):
    torch.manual_seed(1)
    layer = getattr(parent, name)
    wrapper = Adapted(layer)
    if type(layer).__name__ == "Conv1D":  # its weight is (K, N)
        k, n = layer.weight.shape
        wrapper.down, wrapper.up = nn.Linear(k, 4, bias=False, dtype=BF16), nn.Linear(4, n, bias=False, dtype=BF16)
    setattr(parent, name, wrapper)


def wrapped(parent, name):
    """A wrapper without a weight."""
    setattr(parent, name, nn.Sequential(getattr(parent, name), nn.Tanh()))


CHANGES = [adapted, wrapped, hooked, hooked_before, replaced, pruned, parametrized]
WITHIN = [("Llama", n) for n in ("gate_proj", "up_proj", "down_proj", "act_fn")]
WITHIN += [("GPT2", n) for n in ("c_fc", "c_proj", "act")]


def layers_of(model):
    return model.model.layers if hasattr(model, "model") else model.transformer.h


def near(found, exact, allowed=0.03):
    assert found.shape == exact.shape
    assert (found - exact).norm() <= allowed * exact.norm()


def louder(model):
    """MLPs whose results weigh enough for a change to show."""
    with torch.no_grad():
        for layer in layers_of(model):
            for p in layer.mlp.parameters():
                p.add_(torch.randn_like(p) * 0.2)
    return model


def step(model, parameters):
    found = model(input_ids=TOKENS, labels=TOKENS)
    return found.logits, torch.autograd.grad(found.loss, parameters)


CASES = [
    (name, f"mlp.{within}", change)
    for name, within in WITHIN
    for change in CHANGES
    if not within.startswith("act") or change in (wrapped, hooked, hooked_before, replaced)
]
CASES += [
    ("Llama", within, change)
    for within in ("mlp", "post_attention_layernorm", "self_attn.v_proj", "input_layernorm")
    for change in (hooked, hooked_before, replaced, wrapped)
]


@pytest.mark.sample(20)
@pytest.mark.parametrize(("case", "first"), [(case, ("patch", "change")[at % 2]) for at, case in enumerate(CASES)])
def test_what_is_inside_a_layer_may_change(case, first):
    name, within, change = case
    inside, _, last = within.rpartition(".")
    layers = 2 if within.startswith("self_attn") else 1  # what one attention changes hardly shows
    plain = louder(model_of(name, **{"n_layer" if name == "GPT2" else "num_hidden_layers": layers}))
    model, before = copy.deepcopy(plain), logits_of(plain)
    if first == "patch":
        co.patch(model, fold_norms=name == "Llama")
    for each in (plain, model):
        for layer in layers_of(each):
            change(layer.get_submodule(inside), last)
    if first == "change":
        co.patch(model, fold_norms=name == "Llama")
    near(logits_of(model), logits_of(plain))
    d, found = step(model, [p for p in model.parameters() if p.ndim > 1])
    wanted, gradients = step(plain, [p for p in plain.parameters() if p.ndim > 1])
    near(d, wanted)
    assert (wanted - before).norm() > 0.05 * before.norm()  # so that what is ignored shows
    for x, y in zip(found, gradients, strict=True):
        near(x, y, 0.06)


@pytest.mark.parametrize("first", ["patch", "change"])
def test_a_model_may_be_quantised(first):
    plain = louder(model_of("Llama"))
    model, before = copy.deepcopy(plain), logits_of(plain)
    if first == "patch":
        co.patch(model)
    for each in (plain, model):
        for parent in list(each.modules()):
            for name, layer in parent.named_children():
                if isinstance(layer, nn.Linear):
                    quantised(parent, name)
    if first == "change":
        co.patch(model)
    assert isinstance(model.lm_head.weight, Quantised)
    wanted = logits_of(plain)
    near(logits_of(model), wanted)
    assert (wanted - before).norm() > 0.05 * before.norm()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", ["sparse", "strided", "jagged"])
def test_a_patched_layer_takes_what_is_no_dense_matrix(layout):
    plain = nn.Sequential(nn.Linear(16, 24, dtype=BF16), nn.Linear(24, 8, dtype=BF16))
    model, parts = copy.deepcopy(plain), [torch.randn(rows, 16).to(BF16) for rows in (2, 5)]
    co.patch(model)
    sparse = layout == "sparse"
    x = parts[0].to_sparse() if sparse else torch.nested.nested_tensor(parts, layout=getattr(torch, layout))
    found, wanted = ([y] if sparse else y.unbind() for y in (model(x), plain(x)))
    for d, exact in zip(found, wanted, strict=True):
        near(d, exact)


def test_hooks_of_all_modules_see_what_is_inside():
    model, seen = model_of("Llama"), []
    co.patch(model, fold_norms=True)
    hook = of_all.register_module_forward_hook(lambda m, *_: seen.append(m))
    try:
        logits_of(model)
    finally:
        hook.remove()
    layer = model.model.layers[0]
    assert {layer.mlp.up_proj, layer.self_attn.q_proj, layer.input_layernorm, layer.mlp.act_fn} <= set(seen)


# ---- Forwards of others ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("within", ["model.layers.0.mlp", "model.layers.0", "lm_head"])
@pytest.mark.parametrize("of_class", [False, True])
def test_a_forward_that_was_replaced_is_kept(within, of_class, monkeypatch):
    model, called = model_of("Llama"), []
    module = model.get_submodule(within)
    before = type(module).forward

    def forward(self, *args, **named):
        called.append(self)
        return before(self, *args, **named)

    if of_class:
        monkeypatch.setattr(type(module), "forward", forward)
    else:
        module.forward = forward.__get__(module)
    wanted = logits_of(model)
    said = "its class's forward was replaced" if of_class else "its forward was replaced"
    assert co.patch(co.patch(model), dry_run=True).kept[within] == said
    called.clear()
    near(logits_of(model), wanted)
    assert module in called


@pytest.mark.parametrize("name", FOLDING)
def test_a_layer_takes_arguments_by_position(name):
    plain = model_of(name)
    model = copy.deepcopy(plain)
    co.patch(model, fold_norms=True)
    x, positions = torch.randn(2, 12, 64).to(BF16), torch.arange(12)[None]
    embeddings = plain.model.rotary_emb(x, positions)
    theirs, layer = plain.model.layers[0], model.model.layers[0]
    wanted = theirs(x, None, positions, None, False, embeddings)
    for found in (
        layer(x, None, positions, None, False, embeddings),
        layer(hidden_states=x, position_ids=positions, position_embeddings=embeddings),
    ):
        near(found, wanted)
    with torch.no_grad():
        near(layer(x, None, positions, None, False, embeddings), wanted)
    with pytest.raises(TypeError, match="forward got attention_mask by position and by name"):
        layer(x, None, attention_mask=None)
    with pytest.raises(TypeError, match="forward takes 6 arguments by position: 8 were given"):
        layer(x, None, None, None, None, None, None, None)


@pytest.mark.parametrize("name", ["Llama", "GPT2"])
def test_names_and_signatures_stay(name):
    plain = model_of(name)
    model = copy.deepcopy(plain)
    found = co.patch(co.patch(model), dry_run=True)
    for (where, theirs), mine in zip(plain.named_modules(), model.modules(), strict=True):
        assert type(mine).__name__ == type(theirs).__name__
        assert isinstance(mine, type(theirs))
        assert inspect.signature(mine.forward) == inspect.signature(theirs.forward)
        assert (type(mine) is type(theirs)) == (where not in found.fused)
    assert "bias=False, fused)" in repr(model.lm_head)


# ---- Operands --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fold_norms", [False, True])
def test_a_patched_model_keeps_some_logits(fold_norms):
    model = model_of("Llama")
    wanted = logits_of(model, logits_to_keep=3)
    co.patch(model, fold_norms=fold_norms)
    near(logits_of(model, logits_to_keep=3), wanted)
    x = torch.randn(12, 2, 64).to(BF16).transpose(0, 1)
    embeddings = model.model.rotary_emb(x, torch.arange(12)[None])
    with torch.no_grad():
        found, exact = (model.model.layers[0](v, position_embeddings=embeddings) for v in (x, x.contiguous()))
    near(found, exact)


# ---- Dtypes that no kernel multiplies -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["Qwen2", "GPT2"])
def test_a_patched_model_may_get_another_dtype(name, dtype):
    model = model_of(name)
    plain = copy.deepcopy(model).to(dtype)
    co.patch(model, fold_norms=name == "Qwen2", verbose=False)
    logits_of(model)  # which folds
    model.to(dtype)
    assert torch.equal(logits_of(model), logits_of(plain))
    found, exact = (step(m, list(m.parameters())) for m in (model, plain))
    assert all(map(torch.equal, (found[0], *found[1]), (exact[0], *exact[1])))
    assert co.patch(model, dry_run=True).fused.keys() <= {"model.layers.0.self_attn", "model.layers.1.self_attn"}
    model.to(BF16)
    near(logits_of(model), logits_of(plain.to(BF16)))


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")  # PyTorch's own
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_one_layer_of_a_patched_model_may_get_another_dtype(dtype):
    """As ``lm_head.float()`` in programs that want logits in FP32."""
    model = model_of("Llama")
    co.patch(model, verbose=False)
    plain, x = copy.deepcopy(model.lm_head), torch.randn(2, model.lm_head.in_features, dtype=dtype)
    model.lm_head.to(dtype)
    wanted = torch.nn.functional.linear(x, plain.weight.to(dtype))
    assert torch.equal(model.lm_head(x), wanted)


TRANSFORMS = {
    "vmap": lambda f, x: torch.func.vmap(f)(x),
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).float().square().sum())(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,))[1],
    "jacrev": lambda f, x: torch.func.jacrev(f)(x[0, 0]),
    "forward mode": lambda f, x: _tangent(f, x),
}


def _tangent(f, x):
    with torch.autograd.forward_ad.dual_level():
        return torch.autograd.forward_ad.unpack_dual(f(torch.autograd.forward_ad.make_dual(x, x))).tangent


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # PyTorch's own
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_patched_layer_may_be_transformed(transform):
    plain, x = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 8)).to(BF16), torch.randn(2, 3, 16).to(BF16)
    model = co.patch(copy.deepcopy(plain), verbose=False)
    near(TRANSFORMS[transform](model, x), TRANSFORMS[transform](plain, x))
    gated = co.nn.GatedMLP(16, 8, dtype=BF16)
    assert TRANSFORMS[transform](gated, x).isfinite().all()


@pytest.mark.sample(4)
@pytest.mark.parametrize(("capability", "served"), [((7, 5), False), ((9, 0), True), ((10, 0), False)])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_device_without_kernels_is_pytorch_s(capability, served, compiled, device, monkeypatch):
    monkeypatch.setattr(reading, "device_of", lambda _: replace(H100, capability=capability))
    monkeypatch.setattr(reading, "_HAS_KERNELS", {})
    cuda = {torch.device("cpu"): reading.has_kernels(torch.device("cuda", 0))}
    monkeypatch.setattr(reading, "_HAS_KERNELS", cuda)
    torch._dynamo.reset()
    model, x = nn.Sequential(nn.Linear(16, 8), co.nn.MLP(8, 16)).to(BF16), torch.randn(4, 16).to(BF16)
    wanted = model[1](model[0](x))
    launched = len(device.launches)
    co.patch(model)
    with torch.no_grad():
        near((torch.compile(model, backend="eager") if compiled else model)(x), wanted)
    assert len(device.launches) - launched == (3 if served else 0)
    assert not reading.has_kernels(torch.device("xpu"))


# ---- Folded norms ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", ["added", "removed"])
def test_biases_of_projections_may_change(bias):
    model = model_of("Qwen2" if bias == "removed" else "Llama")
    co.patch(model, fold_norms=True)
    logits_of(model)
    for layer in model.model.layers:
        for each in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
            each.bias = None if bias == "removed" else nn.Parameter(torch.randn(len(each.weight)).to(BF16))
            found = logits_of(model)
    co.unpatch(model)
    near(found, logits_of(model))


# ---- Patch and unpatch -----------------------------------------------------------------------------------------------


def test_a_class_that_came_later_is_not_lost():
    model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 8)).to(BF16)
    co.patch(model)
    parametrized(model, "1")
    x = torch.randn(4, 16).to(BF16)
    wanted = model(x)
    with pytest.raises(ValueError, match=r"^1 has had another class since it was patched"):
        co.unpatch(model)
    near(model(x), wanted)
    near(copy.deepcopy(model)(x), wanted)
    with pytest.raises(RuntimeError, match="parametrized"):
        pickle.dumps(model)
    parametrize.remove_parametrizations(model[1], "weight")
    assert co.unpatch(model) == 2
    assert type(model[1]) is nn.Linear
    near(model(x), wanted)
