"""Models quantised by GPTQ, AWQ and compressed-tensors, whose layers get packed weights.

The libraries are not installed: the layers are written here, with their classes' names, homes and attributes, and so
is the dequantised weight that results are compared with.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cutlass_ops as co
from tests.unit.test_packed import _by_group, _codes, _in_eights, _scales
from tests.unit.test_patching import TOKENS, model_of

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
GROUP = 32


class Quantised(nn.Module):
    """What the layers have in common: a weight, and a forward that multiplies by what it stands for."""

    def __init__(self, n: int, k: int, seed: int, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bits = k, n, 4
        self.codes, self.zero = _codes(n, k, seed), _codes(n, k // GROUP, seed + 1).clamp(min=1)
        self.own_scale = _scales(n, k // GROUP, dtype) * 0.01
        self.register_buffer("bias", bias)
        self.store()

    def store(self) -> None:
        raise NotImplementedError

    def exact(self) -> Tensor:
        k = self.in_features
        return (self.codes - _by_group(self.zero, k)) * _by_group(self.own_scale, k)


def forward(self: Any, x: Tensor) -> Tensor:
    self.called = True
    return nn.functional.linear(x, self.exact().to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


class _Gptq(Quantised):
    version = 2

    def store(self) -> None:
        stored = self.zero - (2 - self.version)
        self.register_buffer("qweight", _in_eights(self.codes).t().contiguous())
        self.register_buffer("qzeros", _in_eights(stored.t()))
        self.register_buffer("scales", self.own_scale.t().contiguous())
        self.register_buffer("g_idx", torch.arange(self.in_features, dtype=torch.int32) // GROUP)


class _GptqModel(_Gptq):
    def qzero_format(self) -> int:
        return self.version


class _AutoGptq(_Gptq):
    version = 1


class _Awq(Quantised):
    def store(self) -> None:
        self.w_bit = 4
        self.register_buffer("qweight", _in_eights(self.codes.t(), AWQ_ORDER))
        self.register_buffer("qzeros", _in_eights(self.zero.t(), AWQ_ORDER))
        self.register_buffer("scales", self.own_scale.t().contiguous())


class _Compressed(Quantised):
    def store(self) -> None:
        self.quantization_scheme = SimpleNamespace(weights=SimpleNamespace(num_bits=4))
        self.weight_packed = nn.Parameter(_in_eights(self.codes), requires_grad=False)
        self.weight_zero_point = nn.Parameter(_in_eights(self.zero.t()).t().contiguous(), requires_grad=False)
        self.weight_scale = nn.Parameter(self.own_scale, requires_grad=False)
        self.weight_shape = nn.Parameter(torch.tensor([self.out_features, self.in_features]), requires_grad=False)


def _named(base: type, name: str, home: str) -> Any:
    """Return a class with a name and a home, whose forward is its own as well."""
    made = type(name, (base,), {"__module__": home})
    own: Any = lambda self, x: forward(self, x)  # noqa: E731
    own.__module__, own.__qualname__ = home, f"{name}.forward"
    made.forward = own  # type: ignore[attr-defined]
    return made


LAYERS = {
    "GPTQModel": _named(_GptqModel, "TorchQuantLinear", "gptqmodel.nn_modules.qlinear.torch"),
    "AutoGPTQ": _named(_AutoGptq, "QuantLinear", "auto_gptq.nn_modules.qlinear.qlinear_cuda"),
    "AWQ": _named(_Awq, "WQLinear_GEMM", "awq.modules.linear.gemm"),
    "compressed-tensors": _named(_Compressed, "CompressedLinear", "compressed_tensors.linear.compressed_linear"),
}


def _llama(form: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Return a tiny Llama whose projections are quantised layers."""
    model = model_of("Llama", dtype, intermediate_size=128).requires_grad_(False)
    for seed, (name, layer) in enumerate(list(model.named_modules())):
        if isinstance(layer, nn.Linear) and name != "lm_head":
            n, k = layer.weight.shape
            model.set_submodule(name, LAYERS[form](n, k, seed, layer.bias, torch.float16))
    return model


def _exact(model: Any) -> Any:
    """Return the same model in float64, of the weights that its layers stand for."""
    found = copy.deepcopy(model)
    for name, layer in list(found.named_modules()):
        if isinstance(layer, Quantised):
            dense = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
            dense.weight = nn.Parameter(layer.exact())
            if layer.bias is not None:
                dense.bias = nn.Parameter(layer.bias.clone())
            found.set_submodule(name, dense)
    return found.double()


def _quantised(model: nn.Module) -> list[Quantised]:
    return [layer for layer in model.modules() if isinstance(layer, Quantised)]


@pytest.mark.parametrize("form", LAYERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_llama_has_packed_forwards(form: str, dtype: torch.dtype) -> None:
    """Its logits are those of the dequantised model, its layers' own forwards do not run, and all of it is undone."""
    model = _llama(form, dtype)
    wanted = _exact(model)(input_ids=TOKENS).logits
    before, keys = model(input_ids=TOKENS).logits, list(model.state_dict())
    found = co.patch(co.patch(model, verbose=False), dry_run=True)
    name = type(_quantised(model)[0]).__name__
    fused = [what for each, what in found.fused.items() if found.classes[each] == name]
    assert fused == ["a GEMM of its packed weight"] * 14
    assert {what for each, what in found.fused.items() if each.endswith("mlp")} == {
        "gate and up with the activation between them, then down"
    }
    for layer in _quantised(model):
        layer.called = False
    logits = model(input_ids=TOKENS).logits
    assert not any(layer.called for layer in _quantised(model))
    assert (logits.double() - wanted).norm() <= 0.02 * wanted.norm()
    assert list(model.state_dict()) == keys
    co.unpatch(model)
    assert torch.equal(model(input_ids=TOKENS).logits, before)


def test_gradients_pass_through_a_patched_model() -> None:
    model = _llama("GPTQModel", torch.float16)
    exact = _exact(model)
    co.patch(model, verbose=False)
    embedded = model.model.embed_tokens(TOKENS)

    def gradient(of: Any, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(of(inputs_embeds=x).logits.square().mean(), x)[0]

    found, wanted = gradient(model, embedded), gradient(exact, embedded.double())
    assert (found.double() - wanted).norm() <= 0.02 * wanted.norm()


@pytest.mark.parametrize("form", LAYERS)
def test_a_layer_may_be_replaced(form: str) -> None:
    bias, x = torch.randn(48).half(), torch.randn(5, 64).bfloat16()
    layer = LAYERS[form](48, 64, 0, bias, torch.float16)
    found = co.nn.PackedLinear.of(layer, activation="silu", dtype=torch.bfloat16)
    wanted = nn.functional.silu(x.double() @ layer.exact().t() + bias.double())
    assert (found(x).double() - wanted).norm() <= 0.02 * wanted.norm()


def test_a_change_of_the_tensors_is_seen() -> None:
    layer = LAYERS["AWQ"](48, 64, 0, None, torch.float16)
    model, x = co.patch(nn.Sequential(layer), verbose=False), torch.randn(5, 64).half()
    first = model(x)
    layer.scales.mul_(2)
    torch.testing.assert_close(model(x), 2 * first, rtol=1e-2, atol=1e-2)


def test_a_call_without_kernels_runs_the_layers_own_forward() -> None:
    layer = LAYERS["AWQ"](48, 64, 0, None, torch.float16)
    model = co.patch(nn.Sequential(layer), verbose=False)
    for x in (torch.randn(5, 64), torch.randn(5, 64).double()):
        layer.called = False
        assert model(x).dtype == x.dtype
        assert layer.called


def test_a_patched_model_is_copied_and_compiled() -> None:
    layer, x = LAYERS["GPTQModel"](48, 64, 0, None, torch.float16), torch.randn(5, 64).half()
    model = co.patch(nn.Sequential(layer), verbose=False)
    wanted = model(x)
    assert torch.equal(copy.deepcopy(model)(x), wanted)
    layer.called = False
    assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(x), wanted)
    assert not layer.called


def _changed(form: str, change: Any) -> nn.Module:
    layer = LAYERS[form](48, 64, 0, None, torch.float16)
    change(layer)
    return nn.Sequential(layer)


def _set(name: str, value: Any) -> Any:
    return lambda layer: setattr(layer, name, value)


@pytest.mark.parametrize(
    ("form", "change", "said"),
    [
        ("GPTQModel", _set("g_idx", torch.arange(64, dtype=torch.int32) % 2), "activation order"),
        ("GPTQModel", _set("bits", 8), "8 bits"),
        ("GPTQModel", _set("adapter", object()), "adapter"),
        ("GPTQModel", _set("qweight", None), "no qweight"),
        ("AWQ", _set("qweight", torch.zeros(64, 12, dtype=torch.int16)), "qweight is torch.int16"),
        ("AWQ", _set("in_features", 128), "another order"),
        ("compressed-tensors", lambda layer: delattr(layer, "quantization_scheme"), "quantization_scheme"),
    ],
)
def test_what_cannot_be_packed_is_said(form: str, change: Any, said: str) -> None:
    model = _changed(form, change)
    found = co.patch(co.patch(model, verbose=False), dry_run=True)
    assert not found.fused
    assert said in found.kept["0"]
    with pytest.raises(ValueError, match=said):
        co.nn.PackedLinear.of(model[0])  # type: ignore[index]


@pytest.mark.parametrize("home", ["auto_gptq.nn_modules.qlinear.qlinear_marlin", "somewhere.else"])
def test_other_classes_of_a_name_are_not_taken(home: str) -> None:
    layer = _named(_AutoGptq, "QuantLinear", home)(48, 64, 0, None, torch.float16)
    assert not co.patch(nn.Sequential(layer), verbose=False, dry_run=True).fused
    with pytest.raises(TypeError, match=r"does not know how it holds its weight"):
        co.nn.PackedLinear.of(layer)
