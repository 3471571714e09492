"""GPT-2 small, trained on bytes by fused modules and by plain PyTorch, with the same weights, batches and seed.

The corpus comes with Python: the topics of its manual, as ``help()`` shows them. Parameters are FP32, and both models
run under ``torch.autocast`` in BF16. A third run is plain PyTorch's with the rows of each batch in reverse order. Its
losses differ from the second's by rounding alone, so it shows how far two right runs drift apart.

On a GPU, the model has the size of GPT-2 small and takes 300 steps. On the CPU, it is smaller and takes a few.

    python examples/train_gpt2_small.py [--steps N] [--plot losses.svg] [--compile]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pydoc_data import topics
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import cutlass_ops as co

VOCABULARY = 256  # bytes


@dataclass(frozen=True)
class Size:
    """Extents of a model and of its training."""

    width: int
    heads: int
    layers: int
    context: int
    batch: int
    steps: int


GPT2_SMALL = Size(width=768, heads=12, layers=12, context=1024, batch=8, steps=300)
TINY = Size(width=64, heads=4, layers=2, context=64, batch=8, steps=30)


class PlainMlp(nn.Module):
    """The feed-forward part in PyTorch, with the parameters of :class:`cutlass_ops.nn.MLP`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """Compute it."""
        return residual + self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class PlainLinear(nn.Linear):
    """A linear layer that adds a residual."""

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Compute it."""
        d = super().forward(x)
        return d if residual is None else residual + d


class Block(nn.Module):
    """A layer of GPT-2 from some kind of linear layer and MLP."""

    def __init__(self, size: Size, linear: Callable[..., Any], mlp: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.heads = size.heads
        self.ln_1, self.ln_2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.c_attn, self.c_proj = linear(size.width, 3 * size.width), linear(size.width, size.width)
        self.mlp = mlp(size.width)

    def forward(self, x: Tensor) -> Tensor:
        """Compute it for (batch, context, width)."""
        heads = self.c_attn(self.ln_1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = self.c_proj(attended.transpose(1, 2).flatten(2), residual=x)
        return self.mlp(self.ln_2(x), residual=x)


class Gpt2(nn.Module):
    """GPT-2 on bytes. Both kinds have parameters of the same names and shapes."""

    def __init__(self, size: Size, *, fused: bool) -> None:
        super().__init__()
        linear, mlp = (co.nn.Linear, _fused_mlp) if fused else (PlainLinear, PlainMlp)
        self.wte, self.wpe = nn.Embedding(VOCABULARY, size.width), nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size, linear, mlp) for _ in range(size.layers))
        self.ln_f = nn.LayerNorm(size.width)
        self.lm_head = linear(size.width, VOCABULARY, bias=False)
        self.lm_head.weight = self.wte.weight
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                deep = (2 * size.layers) ** -0.5 if name.endswith(("c_proj.weight", "fc2.weight")) else 1.0
                nn.init.normal_(parameter, std=0.02 * deep)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (batch, context, 256)."""
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def _fused_mlp(width: int) -> nn.Module:
    return co.nn.MLP(width, 4 * width, activation="gelu_tanh")


def corpus() -> Tensor:
    """Return the bytes of the manual's topics, about 700 kB."""
    text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def losses(size: Size, device: str, *, fused: bool, reverse: bool = False, compiled: bool = False) -> list[float]:
    """Train a model and return the loss of each step, in nats a byte."""
    torch.manual_seed(0)
    model = Gpt2(size, fused=fused).to(device)
    run = torch.compile(model, fullgraph=True) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1)
    warm_up = max(size.steps // 10, 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / warm_up, 1.0))
    data, generator = corpus(), torch.Generator().manual_seed(1)
    found = []
    for _ in range(size.steps):
        starts = torch.randint(len(data) - size.context - 1, (size.batch,), generator=generator)
        batch = torch.stack([data[s : s + size.context + 1] for s in starts.tolist()]).long().to(device)
        if reverse:
            batch = batch.flip(0)
        with torch.autocast(device, torch.bfloat16):
            logits = run(batch[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        found.append(loss.detach())
    return torch.stack(found).tolist()


def plot(path: str, curves: dict[str, list[float]]) -> None:
    """Write a picture of the losses, and of how far each run is from plain PyTorch's."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(7, 6), height_ratios=[2, 1])
    plain = torch.tensor(curves["PyTorch"])
    for name, values in curves.items():
        above.plot(values, label=name)
        if name != "PyTorch":
            below.plot(torch.tensor(values) - plain, label=f"{name}, less PyTorch")
    above.set_ylabel("loss, nats a byte")
    below.set_ylabel("difference")
    below.set_xlabel("step")
    for axes in (above, below):
        axes.legend()
    figure.savefig(path)


def main() -> None:
    """Train three times and compare the losses."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, help="steps of each run")
    parser.add_argument("--plot", metavar="FILE", help="where to write a picture of the losses")
    parser.add_argument("--compile", action="store_true", help="compile the fused model with torch.compile")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = GPT2_SMALL if device == "cuda" else TINY
    size = Size(**{**vars(size), "steps": given.steps or size.steps})
    curves = {
        "cutlass_ops": losses(size, device, fused=True, compiled=given.compile),
        "PyTorch": losses(size, device, fused=False),
        "PyTorch, rows reversed": losses(size, device, fused=False, reverse=True),
    }
    if given.plot:
        plot(given.plot, curves)
    last = max(size.steps // 10, 1)
    ends = {name: sum(values[-last:]) / last for name, values in curves.items()}
    for name, values in curves.items():
        print(f"{name}: loss {values[0]:.4f} at first, {ends[name]:.4f} over the last {last} of {size.steps} steps")
    apart, noise = (abs(ends[name] - ends["PyTorch"]) for name in ("cutlass_ops", "PyTorch, rows reversed"))
    print(f"fused and plain differ by {apart:.1e}, two plain runs by {noise:.1e}")
    # One pair of runs measures the noise only roughly.
    if not apart <= 3 * noise + 0.002 * ends["PyTorch"]:
        sys.exit("the losses differ by more than rounding explains")
    if ends["cutlass_ops"] >= curves["cutlass_ops"][0]:
        sys.exit("the loss did not fall")


if __name__ == "__main__":
    main()
