"""Measures mixtures of experts, as Qwen3-30B-A3B and Mixtral-8x7B have them, against transformers' under torch.compile.

    python benchmarks/bench_moe.py --out benchmarks/results/moe_h100.json
    python benchmarks/bench_moe.py --models qwen3 --tokens 1 16 --skip batched --out /tmp/r.json
    python benchmarks/bench_moe.py --resume /tmp/r.json --out /tmp/all.json    # only missing rows

The layer is that of examples/moe_layer.py, router included. `ours` runs under torch.compile, `plain` without.
`compile` is transformers' block with torch.nn.functional.grouped_mm, its default, under torch.compile with
max-autotune; `eager` is the same without. `batched` is transformers' other way to compute experts without waiting for
the device, torch.bmm with a copy of each row's weights, under torch.compile with max-autotune, of at most 16 tokens.
Up to 64 tokens are sequences of one position each; more are one sequence. Calls rotate through other tokens, which
choose other experts, so that no weight is still in the L2 cache.

Each row: {"model", "phase", "tokens", "active", "errors": {name: error}, "elsewhere": {name: tokens},
"ms": {name: ms}, "over_ours": {name: ratio and range}}. Active experts have tokens, in the first of the calls. Errors
are relative, against float64 with the experts that the router chooses in BF16. A compiled router rounds otherwise, and
may choose another expert where two are about as likely. Such tokens are counted as elsewhere, and are in no error.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import harness
import torch
from torch import Tensor

from cutlass_ops.declare.problem import Problem
from cutlass_ops.tuner.timing import Run, expected_us, rotation

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import moe_layer
from moe_layer import MoeLayer

TOKENS = (4096, 1, 16, 64)
PEERS = ("plain", "compile", "batched", "eager")
# More tokens than these are one sequence.
_DECODED = 64
# Each token's copies of weights would fill the memory with more.
_BATCHED = 16
# The relative error of a token from which on it had other experts. BF16's rounding gives a tenth of it.
_ELSEWHERE = 2.0**-4


def draw(layer: MoeLayer, tokens: int, sets: int) -> list[Tensor]:
    """Draw sets of hidden states (sequences, positions, hidden)."""
    shape = (tokens, 1) if tokens <= _DECODED else (1, tokens)
    hidden, device = layer.gate.shape[1], layer.gate.device
    return [torch.randn(*shape, hidden, device=device, dtype=moe_layer.DTYPE) for _ in range(sets)]


def active(layer: MoeLayer, x: Tensor) -> int:
    """Return how many experts have tokens."""
    _, experts = layer.route(x.flatten(0, -2))
    return len(experts.unique())


def problem(layer: MoeLayer, x: Tensor) -> Problem:
    """Return a GEMM for each active expert that takes about as long as the layer."""
    experts, (_, hidden, inner) = active(layer, x), layer.gate.shape
    return Problem(max(1, x.shape[:-1].numel() * layer.chosen // experts), 3 * inner, hidden, experts)


def by(block: torch.nn.Module, way: str) -> torch.nn.Module:
    """Return a block with the same weights, whose experts compute by another of transformers' ways."""
    other = copy.deepcopy(block, {id(parameter): parameter for parameter in block.parameters()})
    other.experts.config._experts_implementation = way
    return other


def variants(
    layer: MoeLayer, block: torch.nn.Module, tokens: int, names: list[str]
) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return `ours` and those peers that there are for a number of tokens."""
    # First, since it forgets what was compiled before.
    compiled = harness.compiled(lambda block, x: block(x))
    known: dict[str, Callable[[Tensor], Tensor]] = {
        "ours": torch.compile(layer, dynamic=False, fullgraph=True),
        "plain": layer,
        "compile": partial(compiled, block),
        "batched": partial(compiled, by(block, "batched_mm")),
        "eager": block,
    }
    return {name: known[name] for name in ("ours", *names) if name != "batched" or tokens <= _BATCHED}


def compared(found: Tensor, exact: Tensor) -> tuple[float, int]:
    """Return a result's error, and the number of tokens left out of it: those far off, or not written."""
    wrong, size = (t.flatten(0, -2).norm(dim=-1) for t in (found.double() - exact, exact))
    near = wrong <= _ELSEWHERE * size
    return round(float(wrong[near].norm() / size[near].norm()), 6), int((~near).sum())


def errors(block: torch.nn.Module, x: Tensor, results: dict[str, Tensor]) -> dict[str, dict[str, Any]]:
    """Return the errors of results.

    Raises
    ------
    AssertionError
        If more than 1% of our tokens are far off, or the error of the others is more than 1.5 times that of
        transformers' block.
    """
    exact, tokens = moe_layer.exact_output(block, x), x.shape[:-1].numel()
    found = {name: compared(result, exact) for name, result in results.items()}
    (mine, elsewhere), (theirs, _) = found["ours"], compared(block(x), exact)
    assert elsewhere <= tokens // 100, f"{elsewhere} of {tokens} tokens are far off"
    assert mine <= 1.5 * theirs, f"error is {mine:.2g}, and transformers' is {theirs:.2g}"
    return {
        "errors": {name: error for name, (error, _) in found.items()},
        "elsewhere": {name: count for name, (_, count) in found.items() if count},
    }


def run_case(name: str, layer: MoeLayer, block: torch.nn.Module, tokens: int, peers: list[str]) -> dict[str, Any]:
    """Check and time one number of tokens."""
    (first,) = draw(layer, tokens, 1)
    alike = problem(layer, first)
    sets = [first, *draw(layer, tokens, rotation(alike.bytes(2, 2, 2)) - 1)]
    calls = variants(layer, block, tokens, peers)
    checked = errors(block, first, {name: call(first) for name, call in calls.items()})
    runs: dict[str, Run] = {
        name: lambda index, call=call: call(sets[index % len(sets)])  # type: ignore[misc]
        for name, call in calls.items()
    }
    return {
        "model": name, "phase": "decode" if tokens <= _DECODED else "prefill", "tokens": tokens,
        "active": active(layer, first), **checked, **harness.compare(runs, expected_us(alike)),
    }  # fmt: skip


def build_ahead(layer: MoeLayer, tokens: list[int]) -> None:
    """Compile the kernels of all numbers of tokens in parallel."""
    harness.side_by_side(partial(layer, x) for each in tokens for x in draw(layer, each, 1))


@torch.no_grad()
def main() -> None:
    """Run both models and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(moe_layer.MODELS), choices=moe_layer.MODELS)
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--skip", nargs="+", default=[], choices=PEERS, help="variants to leave out")
    parser.add_argument("--resume", nargs="+", type=Path, default=[], help="result with rows to keep")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    head = harness.begin()
    rows = harness.measured(args.resume, head)
    harness.save(args.out, {**head, "rows": rows})
    done = {(row["model"], row["tokens"]) for row in rows}
    torch.manual_seed(0)
    for name in args.models:
        left = [tokens for tokens in args.tokens if (name, tokens) not in done]
        if not left:
            continue
        model = moe_layer.MODELS[name]
        block = moe_layer.random_block(model, model.full, "cuda")
        layer = MoeLayer.of(block)
        build_ahead(layer, left)
        for tokens in left:
            rows.append(run_case(name, layer, block, tokens, [peer for peer in PEERS if peer not in args.skip]))
            print(rows[-1], flush=True)
            harness.save(args.out, {**head, "rows": rows})
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
