"""Modules and patched models, the same in PyTorch, and a step of each, for tests of training on a GPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import cutlass_ops as co

BF16 = torch.bfloat16
K, N, HIDDEN = 128, 192, 320
ROWS = (2, 96)


def linear(layer: Any, x: Tensor) -> Tensor:
    """A layer without its activation in PyTorch."""
    return F.linear(x, layer.weight, layer.bias)


def after(m: Any, d: Tensor) -> Tensor:
    """A module's activation in PyTorch."""
    return d if not m.activation else getattr(F, m.activation)(d)


def activated(layer: Any, x: Tensor) -> Tensor:
    """A layer in PyTorch."""
    return after(layer, linear(layer, x))


def two(m: Any, x: Tensor) -> Tensor:
    """Two layers in PyTorch."""
    return linear(m.fc2, after(m, linear(m.fc1, x)))


def gated(m: Any, x: Tensor) -> Tensor:
    """A gated MLP in PyTorch."""
    return linear(m.down_proj, after(m, linear(m.gate_proj, x)) * linear(m.up_proj, x))


def normed(m: Any, x: Tensor) -> Tensor:
    """A norm and a layer in PyTorch."""
    return after(m, linear(m.linear, m.norm(x)))


# A module, and the same in PyTorch.
MODULES: dict[str, tuple[Callable[..., nn.Module], Callable[[Any, Tensor], Tensor]]] = {
    "linear": (lambda **k: co.nn.Linear(K, N, **k), activated),
    "linear_gelu": (lambda **k: co.nn.Linear(K, N, activation="gelu", **k), activated),
    "mlp": (lambda **k: co.nn.MLP(K, HIDDEN, N, **k), two),
    "mlp_relu": (lambda **k: co.nn.MLP(K, HIDDEN, activation="relu", bias=False, **k), two),
    "swiglu": (lambda **k: co.nn.GatedMLP(K, HIDDEN, **k), gated),
    "geglu": (lambda **k: co.nn.GatedMLP(K, HIDDEN, "gelu", bias=True, **k), gated),
    "rmsnorm": (lambda **k: co.nn.RMSNormLinear(K, N, **k), normed),
    "layernorm": (lambda **k: co.nn.LayerNormLinear(K, N, **k), normed),
}
# Every module in BF16; in FP16 those whose steps differ from BF16's.
CASES = [(name, BF16) for name in MODULES] + [(name, torch.float16) for name in ("linear_gelu", "rmsnorm")]
MODELS = ("Llama", "Qwen3", "Mistral", "GPT2")


def made(name: str, dtype: torch.dtype, device: str) -> nn.Module:
    """A module with parameters of a usual scale."""
    torch.manual_seed(0)
    module = MODULES[name][0](device=device, dtype=dtype)
    with torch.no_grad():
        for x in module.parameters():
            x.add_(torch.randn_like(x) * 0.1)
    return module


def drawn(dtype: torch.dtype, device: str) -> Tensor:
    """A module's input."""
    return torch.randn(*ROWS, K, device=device).to(dtype).requires_grad_()


def step(function: Callable[[Tensor], Tensor], module: nn.Module, x: Tensor, grad: Tensor | None = None) -> Any:
    """A result and the gradients of x and of the parameters."""
    d = function(x)
    if grad is None:
        grad = torch.linspace(-1, 1, d.numel(), device=d.device).reshape(d.shape).to(BF16)
    return d.detach(), *torch.autograd.grad(d, [x, *module.parameters()], grad.to(d.dtype))


def model_of(name: str, device: str) -> Any:
    """A small model of transformers, which must be installed."""
    import transformers

    torch.manual_seed(0)
    if name == "GPT2":
        off = {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
        config = transformers.GPT2Config(n_embd=256, n_head=4, n_layer=2, vocab_size=512, **off)
        return transformers.GPT2LMHeadModel(config).to(device, BF16)
    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 4, "num_key_value_heads": 2}
    more = {"head_dim": 64, "num_hidden_layers": 2, "vocab_size": 512}
    config = getattr(transformers, f"{name}Config")(**sizes, **more)
    return getattr(transformers, f"{name}ForCausalLM")(config).to(device, BF16)


def model_step(model: Any, device: str) -> Any:
    """A model's logits and the gradients of its parameters."""
    tokens = torch.arange(128, device=device).reshape(2, 64) * 7 % 512
    logits = model(input_ids=tokens, use_cache=False).logits
    loss = F.cross_entropy(logits.flatten(0, 1).double(), tokens.flatten())
    return logits.detach(), *torch.autograd.grad(loss, list(model.parameters()))


def steps() -> Iterator[Callable[[], Any]]:
    """Every step of the tests, on the CPU."""
    for name, dtype in CASES:
        module, x = made(name, dtype, "cpu"), drawn(dtype, "cpu")
        yield lambda module=module, x=x: step(module, module, x)
        with torch.no_grad():
            yield lambda module=module, x=x: module(x)
        with co.recompute():
            yield lambda module=module, x=x: step(module, module, x)
    try:
        models = [model_of(name, "cpu") for name in MODELS]
    except ImportError:
        return
    for model in models:
        co.patch(model)
        yield lambda model=model: model_step(model, "cpu")


# ---- A package of AOTInductor's, in a process that has nothing but it ------------------------------------------------

_LOADED = """
import sys, torch
import cutlass_ops
package, given, result = sys.argv[1:]
torch.save(torch._inductor.aoti_load_package(package)(torch.load(given)), result)
"""


def packaged(module: nn.Module, device: str, folder: Path) -> tuple[Tensor, Tensor]:
    """Package a module for any number of rows; return what a process with that alone computes, and of what."""
    x, other = (torch.randn(rows, K, device=device).to(BF16) for rows in (40, 64))
    rows = {0: torch.export.Dim("rows", min=2, max=4096)}
    package, given, result = (str(folder / name) for name in ("module.pt2", "given.pt", "result.pt"))
    with torch.no_grad():
        program = torch.export.export(module, (x,), dynamic_shapes=(rows,))
        torch._inductor.aoti_compile_and_package(program, package_path=package)
    torch.save(other, given)
    subprocess.run([sys.executable, "-W", "ignore", "-c", _LOADED, package, given, result], check=True)
    return torch.load(result), other
