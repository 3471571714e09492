"""Models with 2:4 sparse weights: patched ones, layers of linear ones, and weights in files of safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cutlass_ops as co


def _pruned(model: nn.Module, *names: str) -> nn.Module:
    for name in names:
        weight = model.get_submodule(name).weight
        with torch.no_grad():
            weight.copy_(co.sparsify(weight.t()).to_dense().t())
    return model


def _model() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 32, bias=False), nn.Linear(32, 8)
    return _pruned(nn.Sequential(*layers).bfloat16(), "0", "2")


def _near(found: Tensor, wanted: Tensor) -> bool:
    return bool((found.double() - wanted.double()).norm() <= 0.01 * wanted.double().norm())


def _calls(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Return the shapes of the sparse weights that layers of a patched model multiply by from now on."""
    from cutlass_ops.nn import patching

    seen: list[torch.Size] = []
    multiplied = patching.multiplied

    def noted(ops: Any, x: Tensor, weight: co.Sparse, *others: Any, **named: Any) -> Tensor:
        seen.append(weight.shape)
        return multiplied(ops, x, weight, *others, **named)

    monkeypatch.setattr(patching, "multiplied", noted)
    return seen


def test_pruned_layers_of_a_patched_model_are_sparse(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, calls = _model(), torch.randn(4, 64).bfloat16(), _calls(monkeypatch)
    wanted, state = model(x), list(model.state_dict())
    co.patch(model, sparse=True, verbose=False)
    found = co.patch(model, dry_run=True)
    assert found.fused["0"] == found.fused["2"] == "a GEMM of its 2:4 sparse weight"
    assert found.fused["3"] == "a GEMM with its bias"
    with torch.no_grad():
        assert _near(model(x), wanted)
    assert calls == [(64, 96), (96, 32)]
    assert list(model.state_dict()) == state
    assert co.unpatch(model) == 3
    assert torch.equal(model(x), wanted)


def test_nothing_is_sparse_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = co.patch(_model(), verbose=False), _calls(monkeypatch)
    with torch.no_grad():
        model(torch.randn(4, 64).bfloat16())
    assert calls == []


def test_a_changed_weight_is_read_again() -> None:
    model, x = co.patch(_model(), sparse=True, verbose=False), torch.randn(4, 64).bfloat16()
    with torch.no_grad():
        model(x)
        model[0].weight.mul_(-1)
        assert _near(model[0](x), torch.nn.functional.linear(x, model[0].weight, model[0].bias))
        model[0].weight.fill_(1.0)
        with pytest.raises(ValueError, match="w is not 2:4 sparse: of column 0, elements 0 to 3"):
            model[0](x)


def test_a_weight_with_gradients_is_multiplied_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = co.patch(_model(), sparse=True, verbose=False), _calls(monkeypatch)
    model(torch.randn(4, 64).bfloat16()).sum().backward()
    assert calls == []
    assert model[0].weight.grad is not None


def test_a_pruned_llama(monkeypatch: pytest.MonkeyPatch) -> None:
    """The MLP is three sparse products, with the activation and the gate in their epilogues."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = transformers.LlamaConfig(num_hidden_layers=1, vocab_size=32, **sizes)
    model = transformers.LlamaForCausalLM(config).bfloat16()
    layers = [f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")]
    _pruned(model, *layers)
    tokens, calls = torch.arange(8)[None], _calls(monkeypatch)
    with torch.no_grad():
        wanted = model(tokens).logits
        co.patch(model, sparse=True, verbose=False)
        assert "model.layers.0.mlp" in co.patch(model, dry_run=True).fused
        assert (model(tokens).logits - wanted).norm() <= 0.02 * wanted.norm()
    assert calls == [(64, 128), (64, 128), (128, 64)]
    model(tokens).logits.sum().backward()
    assert len(calls) == 3
    assert model.get_submodule(layers[0]).weight.grad is not None


def test_the_layer_of_a_linear_one() -> None:
    model, x = _model(), torch.randn(4, 64).bfloat16()
    layer = co.nn.SparseLinear.of(model[0], activation="gelu")
    assert _near(layer(x), model[:2](x))
    with pytest.raises(ValueError, match="not 2:4 sparse"):
        co.nn.SparseLinear.of(model[3])
    found = co.nn.SparseLinear.of(model[3], prune=True)
    assert torch.equal(found.sparse.to_dense(), co.sparsify(model[3].weight.t()).to_dense())
    with pytest.raises(TypeError, match="layer is a GELU"):
        co.nn.SparseLinear.of(model[1])
    assert co.patch(nn.Sequential(layer), dry_run=True).fused == {"0": "a module of cutlass_ops.nn"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int8], ids=str)
def test_a_weight_in_safetensors(dtype: torch.dtype, tmp_path: Path) -> None:
    files = pytest.importorskip("safetensors.torch")
    sparse = co.sparsify((torch.randn(64, 48) * 9).to(dtype))
    files.save_file(sparse.tensors("layer."), tmp_path / "weight.safetensors")
    found = co.Sparse.from_tensors(files.load_file(tmp_path / "weight.safetensors"), "layer.")
    assert torch.equal(found.to_dense().float(), sparse.to_dense().float())
    layer = co.nn.SparseLinear(sparse)
    files.save_model(layer, tmp_path / "layer.safetensors")
    other = co.nn.SparseLinear(co.sparsify(torch.zeros(64, 48).to(dtype)))
    files.load_model(other, tmp_path / "layer.safetensors")
    assert torch.equal(other.sparse.to_dense().float(), sparse.to_dense().float())
