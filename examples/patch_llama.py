"""A Llama of Hugging Face's transformers with fused forwards, in one line, and a training step and inference with both.

The model has random weights, since this example downloads nothing. Yours comes from
``AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)``. On a GPU the layers have the size of
Llama-3.1-8B's, on the CPU they are small.
"""

from __future__ import annotations

import copy
import sys

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import cutlass_ops as co

EIGHT_B = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
SMALL = {"hidden_size": 128, "intermediate_size": 352, "num_attention_heads": 4, "num_key_value_heads": 2}


def model_of(device: str) -> LlamaForCausalLM:
    """Return a Llama of two layers with random weights."""
    torch.manual_seed(0)
    sizes = EIGHT_B if device == "cuda" else SMALL
    config = LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=4096, rms_norm_eps=1e-5)
    return LlamaForCausalLM(config).to(device, torch.bfloat16)


def step(model: LlamaForCausalLM, tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return logits, and the gradients of all parameters."""
    found = model(input_ids=tokens, labels=tokens, use_cache=False)
    return found.logits, list(torch.autograd.grad(found.loss, list(model.parameters())))


def error(found: tuple[Tensor, list[Tensor]], exact: tuple[Tensor, list[Tensor]]) -> tuple[float, float]:
    """Return the relative errors of logits and of gradients, the greatest over all parameters."""
    logits, *grads = (
        ((x.double() - y.double()).norm() / y.double().norm()).item()
        for x, y in zip((found[0], *found[1]), (exact[0], *exact[1]), strict=True)
    )
    return logits, max(grads)


def main() -> None:
    """Patch a model, and compare it before and after with FP32."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = model_of(device)
    tokens = torch.randint(4096, (2, 64), device=device)
    exact = step(copy.deepcopy(model).float(), tokens)
    theirs = error(step(model, tokens), exact)
    model = co.patch(model)
    ours = error(step(model, tokens), exact)
    print(f"errors against FP32, of logits and gradients: plain {theirs[0]:.2e}, {theirs[1]:.2e}")
    print(f"fused {ours[0]:.2e}, {ours[1]:.2e}")
    if any(x > 2 * y for x, y in zip(ours, theirs, strict=True)):
        sys.exit("the result is wrong")
    co.patch(model, fold_norms=True)  # for inference: the norm before an attention, q, k and v in one GEMM
    with torch.no_grad():
        logits = model(input_ids=tokens, use_cache=False).logits
    folded = ((logits.double() - exact[0].double()).norm() / exact[0].double().norm()).item()
    print(f"with folded norms, logits {folded:.2e}")
    if folded > 2 * theirs[0]:
        sys.exit("the result is wrong")
    print(f"co.unpatch gives {co.unpatch(model)} modules their own forwards again")


if __name__ == "__main__":
    main()
