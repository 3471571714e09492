"""Measures forward and backward of layers: fused modules against eager PyTorch, torch.compile and Liger-Kernel.

    python benchmarks/bench_training.py --out benchmarks/results/training_h100.json
    python benchmarks/bench_training.py --layers linear_gelu --shapes 4096x14336x4096 --out /tmp/r.json
    python benchmarks/bench_training.py --resume /tmp/r.json --out /tmp/all.json    # only missing rows and variants

A step computes the layer, and the gradients of its input and of all parameters, which are BF16. `recompute` is the
fused module under ``co.recompute()``, `ours_compiled` the fused module under torch.compile. `liger` is left out where
it is not installed. M is the number of rows, K the layer's width, N what its first matrix gives.

Each row: {"layer", "m", "n", "k", "error_over_eager", "ms": {name: ms}, "over_ours": {name: ratio and range},
"peak_mib": {name: MiB}, "launches": {name: number}}. The error is the largest over the result and all gradients, in
FP64. Peak memory is that of one step, without the parameters and inputs. A step's kernels, copies and fills are its
launches.

torch.compile takes minutes for a layer. With ``--skip compile`` and ``--resume`` later, the variants that rows lack are
measured in alternation with ours once more. So a row's ratios may be of several runs, each with its own rounds of ours;
the milliseconds of ours are those of the first.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import harness
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import cutlass_ops as co
from cutlass_ops.declare.problem import Problem
from cutlass_ops.run.recorded import PlainCall, calls_of
from cutlass_ops.tuner.timing import expected_us, rotation

DTYPE = torch.bfloat16
PEERS = ("recompute", "ours_compiled", "eager", "compile", "liger")
# M×N×K of layers. The first is the one that is quoted; the others are layers of GPT-2, Llama and Qwen.
SHAPES = {
    "linear_gelu": (
        *((4096, 14336, 4096), (4096, 4096, 14336), (4096, 4096, 4096), (8192, 14336, 4096)),
        *((2048, 14336, 4096), (1024, 14336, 4096), (8192, 3072, 768), (16384, 3072, 768)),
        *((8192, 5120, 1280), (4096, 8192, 2048), (8192, 8192, 8192), (4096, 28672, 8192)),
    ),
    "mlp": ((4096, 14336, 4096), (8192, 3072, 768), (8192, 14336, 4096), (4096, 8192, 2048)),
    "swiglu": ((4096, 14336, 4096), (8192, 14336, 4096), (4096, 12288, 4096), (8192, 8192, 2048)),
    "decoder": ((4096, 14336, 4096), (8192, 14336, 4096)),
}

Gradients = Sequence[Tensor]
Layer = Callable[[Tensor], Tensor]


class Variants(NamedTuple):
    """Ways to compute one layer, by name: functions of x, all of the same parameters."""

    module: nn.Module
    layers: dict[str, Layer]
    plain: Callable[[nn.Module, Tensor], Tensor]


# ---- The layers in PyTorch, of the fused modules' parameters ---------------------------------------------------------


def plain_linear(m: Any, x: Tensor) -> Tensor:
    """Compute a linear layer with GELU."""
    return F.gelu(F.linear(x, m.weight, m.bias))


def plain_mlp(m: Any, x: Tensor) -> Tensor:
    """Compute two linear layers with GELU between them."""
    return F.linear(plain_linear(m.fc1, x), m.fc2.weight, m.fc2.bias)


def plain_swiglu(m: Any, x: Tensor) -> Tensor:
    """Compute a gated MLP."""
    return F.linear(F.silu(F.linear(x, m.gate_proj.weight)) * F.linear(x, m.up_proj.weight), m.down_proj.weight)


def plain_decoder(m: Any, x: Tensor) -> Tensor:
    """Compute a decoder layer."""
    return _decoder(m, x, plain_swiglu)


def _decoder(m: Any, x: Tensor, mlp: Callable[[Any, Tensor], Tensor]) -> Tensor:
    attention, normed = m.self_attn, m.input_layernorm(x)
    heads = [
        F.linear(normed, p.weight).unflatten(-1, (-1, attention.head_dim)).transpose(-3, -2)
        for p in (attention.q_proj, attention.k_proj, attention.v_proj)
    ]
    cos, sin = (t.unsqueeze(-3) for t in attention._angles(x.shape[-2], x))
    query, key = (h * cos + torch.cat((-h.chunk(2, -1)[1], h.chunk(2, -1)[0]), -1) * sin for h in heads[:2])
    attended = F.scaled_dot_product_attention(query, key, heads[2], is_causal=True, enable_gqa=attention.is_grouped)
    y = x + F.linear(attended.transpose(-3, -2).flatten(-2), attention.o_proj.weight)
    return y + mlp(m.mlp, m.post_attention_layernorm(y))


def _liger_swiglu(m: Any, x: Tensor) -> Tensor:
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    gate, up = F.linear(x, m.gate_proj.weight), F.linear(x, m.up_proj.weight)
    return F.linear(LigerSiLUMulFunction.apply(gate, up), m.down_proj.weight)


def _liger_decoder(m: Any, x: Tensor) -> Tensor:
    return _decoder(m, x, _liger_swiglu)


_PLAIN = {"linear_gelu": plain_linear, "mlp": plain_mlp, "swiglu": plain_swiglu, "decoder": plain_decoder}
_LIGER = {"swiglu": _liger_swiglu, "decoder": _liger_decoder}


def module_of(layer: str, n: int, k: int, **draw: Any) -> nn.Module:
    """Return a fused module. Llama's heads have 128 columns, and 4 share keys and values."""
    if layer == "linear_gelu":
        return co.nn.Linear(k, n, activation="gelu", **draw)
    if layer == "mlp":
        return co.nn.MLP(k, n, **draw)
    if layer == "swiglu":
        return co.nn.GatedMLP(k, n, **draw)
    heads = max(k // 128, 4)
    return co.nn.DecoderBlock(k, n, heads, heads // 4, **draw)


def variants(layer: str, n: int, k: int, peers: Sequence[str], **draw: Any) -> Variants:
    """Return a layer's variants: `ours` and some peers."""
    torch.manual_seed(0)
    module, plain = module_of(layer, n, k, **draw), _PLAIN[layer]

    def recomputing(x: Tensor) -> Tensor:
        with co.recompute():
            found: Tensor = module(x)
        return found

    known: dict[str, Callable[[], Layer]] = {
        # First, since they forget what was compiled before.
        "compile": lambda: harness.compiled(lambda x: plain(module, x)),
        "ours_compiled": lambda: torch.compile(module, dynamic=False, fullgraph=True),
        "recompute": lambda: recomputing,
        "eager": lambda: lambda x: plain(module, x),
    }
    if layer in _LIGER:
        known["liger"] = lambda: lambda x: _LIGER[layer](module, x)
    made = {name: make() for name, make in known.items() if name in peers}
    return Variants(module, {"ours": module, **{name: made[name] for name in peers}}, plain)


def peers_of(layer: str, skipped: Sequence[str]) -> list[str]:
    """Return the names of a layer's variants besides ours, as far as they are there and not to be left out."""
    has_liger = layer in _LIGER and importlib.util.find_spec("liger_kernel") is not None
    return [name for name in PEERS if name not in skipped and (name != "liger" or has_liger)]


def step(layer: Layer, parameters: Sequence[Tensor], x: Tensor, grad: Tensor) -> Gradients:
    """Return a layer's result, and the gradients of x and of the parameters."""
    d = layer(x)
    return d.detach(), *torch.autograd.grad(d, [x, *parameters], grad)


def error(found: Variants, x: Tensor, grad: Tensor) -> float:
    """Return the largest error of ours over eager's, of the result and all gradients.

    Raises
    ------
    AssertionError
        If one is more than twice as large.
    """
    parameters = list(found.module.parameters())
    ours = step(found.module, parameters, x, grad)
    theirs = step(lambda x: found.plain(found.module, x), parameters, x, grad)
    wide = copy.deepcopy(found.module).double()
    exact = step(
        lambda x: found.plain(wide, x), list(wide.parameters()), x.detach().double().requires_grad_(), grad.double()
    )
    return max(harness.check(*each) for each in zip(ours, exact, theirs, strict=True))


def peak_mib(layer: Layer, parameters: Sequence[Tensor], x: Tensor, grad: Tensor) -> float:
    """Return the memory that a step takes besides what is there before and after it.

    Raises
    ------
    RuntimeError
        If every step leaves something, so that no two begin alike.
    """
    step(layer, parameters, x, grad)
    for _ in range(5):
        before = harness.memory_at_rest()
        torch.cuda.reset_peak_memory_stats()
        step(layer, parameters, x, grad)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
        if harness.memory_at_rest() == before:
            return round((peak - before) / 2**20, 1)
    raise RuntimeError("each of five steps left memory behind: what one takes is not known")


def run_case(layer: str, m: int, n: int, k: int, peers: Sequence[str]) -> dict[str, Any]:
    """Check and time one layer."""
    found = variants(layer, n, k, peers, device="cuda", dtype=DTYPE)
    parameters = list(found.module.parameters())
    size = sum(p.numel() for p in parameters)
    count = rotation(2 * (sum(x.numel() for x in operands(layer, m, n, k, "meta")) + size))
    sets = [operands(layer, m, n, k, "cuda") for _ in range(count)]
    worst = error(found, *sets[0])
    torch.cuda.empty_cache()
    memory = {name: peak_mib(each, parameters, *sets[0]) for name, each in found.layers.items()}
    launches = {
        name: harness.launches(lambda each=each: step(each, parameters, *sets[0]))
        for name, each in found.layers.items()
    }
    runs = {name: lambda i, each=each: step(each, parameters, *sets[i % count]) for name, each in found.layers.items()}
    # Forward and two gradients multiply each weight once.
    return {
        "layer": layer, "m": m, "n": n, "k": k,
        "error_over_eager": round(worst, 3),
        **harness.compare(runs, 3 * expected_us(Problem(m, max(size // k, 1), k))),
        "peak_mib": memory,
        "launches": launches,
    }  # fmt: skip


# What a row has for each variant, ours among them in all but the ratios.
_OF_VARIANTS = ("ms", "over_ours", "peak_mib", "launches")


def joined(row: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
    """Return a row with the variants that a later one has besides."""
    known = {key: row.get(key, {}) for key in _OF_VARIANTS}
    more = {key: {n: x for n, x in later[key].items() if n not in known[key]} for key in _OF_VARIANTS}
    return {**row, **{key: {**known[key], **more[key]} for key in _OF_VARIANTS}}


def operands(layer: str, m: int, n: int, k: int, device: str) -> tuple[Tensor, Tensor]:
    """Return a layer's input and the gradient of its result. A decoder layer's rows are one sequence."""
    rows, of_d = (1, m) if layer == "decoder" else (m,), n if layer == "linear_gelu" else k
    x = torch.randn(*rows, k, device=device, dtype=DTYPE).requires_grad_()
    return x, torch.randn(*rows, of_d, device=device, dtype=DTYPE)


def calls(layer: str, m: int, n: int, k: int) -> list[PlainCall]:
    """Return the GEMMs of a step, found without data."""
    module = module_of(layer, n, k, device="meta", dtype=DTYPE)
    return calls_of(lambda: step(module, list(module.parameters()), *operands(layer, m, n, k, "meta")))


def build_ahead(cases: Sequence[tuple[str, int, int, int]]) -> None:
    """Compile the kernels of all layers in parallel: first the GEMMs, then what a step of each needs besides."""
    found = [call for case in cases for call in calls(*case)]
    harness.build_ahead([(c.called, (c.a, c.b, *c.inputs)) for c in found], [c.out_dtype for c in found])

    def first(layer: str, m: int, n: int, k: int) -> None:
        module = module_of(layer, n, k, device="cuda", dtype=DTYPE)
        step(module, list(module.parameters()), *operands(layer, m, n, k, "cuda"))

    harness.side_by_side(partial(first, *case) for case in cases)
    torch.cuda.empty_cache()


def main() -> None:
    """Run all layers and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--shapes", nargs="+", default=None, metavar="MxNxK", help="only these")
    parser.add_argument("--skip", nargs="+", default=[], choices=PEERS, help="variants to leave out")
    parser.add_argument("--resume", nargs="+", type=Path, default=[], help="result with rows to keep")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    head = harness.begin()
    rows: dict[tuple[str, int, int, int], dict[str, Any]] = {}
    for row in harness.measured(args.resume, head):
        _add(rows, row)
    wanted = None if args.shapes is None else {tuple(map(int, shape.split("x"))) for shape in args.shapes}
    cases = [(layer, *shape) for layer in args.layers for shape in SHAPES[layer] if wanted is None or shape in wanted]
    peers = {
        case: [p for p in peers_of(case[0], args.skip) if p not in rows.get(case, {}).get("ms", ())] for case in cases
    }
    left = [case for case in cases if case not in rows or peers[case]]
    build_ahead(left)

    def save() -> None:
        harness.save(args.out, {**head, "rows": list(rows.values())})

    save()
    for case in left:
        row = run_case(*case, peers[case])
        print(row, flush=True)
        _add(rows, row)
        save()


def _add(rows: dict[tuple[str, int, int, int], dict[str, Any]], row: dict[str, Any]) -> None:
    """Add a row to those that are there, by layer and extents, or what it has besides to the one that is."""
    case = row["layer"], row["m"], row["n"], row["k"]
    rows[case] = joined(rows[case], row) if case in rows else row


if __name__ == "__main__":
    main()
