"""Measures mixtures of experts, as Qwen3-30B-A3B and Mixtral-8x7B have them, against transformers' under torch.compile.

    python benchmarks/bench_moe.py --out benchmarks/results/moe_h100.json
    python benchmarks/bench_moe.py --models qwen3 --tokens 1 16 --skip batched --out /tmp/r.json
    python benchmarks/bench_moe.py --resume /tmp/r.json --out /tmp/all.json    # only missing rows
    python benchmarks/bench_moe.py --parts --out benchmarks/results/moe_parts_h100.json

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

With `--parts` the layer is timed against itself without some steps, to know how much they take of it, and each step by
itself, under torch.compile. `no_gather` is given the rows that its first GEMM reads: a kernel that read rows by
index could hardly be faster than this, though it would read each token's row from memory once. `no_combine` returns the
rows of all slots: a kernel that added them up per token could at most be as fast. `neither` is both. Steps have their
names in the example. `route_maxima` finds experts by one maximum after the other. Of experts that are equally likely it
may choose others than topk does. `arrange_sort` sorts any number of slots, and `arrange_wide` as INT64. `combine_sum`
is a sum over a dimension of slots.
`combine_bag` adds up by embedding_bag and `combine_add` by index_add, that is by atomic additions; both without
torch.compile, which has other kernels for the latter.
Each row: {"model", "phase", "tokens", "active", "errors", "elsewhere", "ms": {name: ms}, "gain": {name: ratio and
range}}, with gains of the layer over itself without steps. A table of them is printed at the end.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import harness
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from cutlass_ops.declare.problem import Problem
from cutlass_ops.tuner.timing import Run, expected_us, rotation

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import moe_layer
from moe_layer import MoeLayer, Slots

TOKENS = (4096, 1, 16, 64)
PEERS = ("plain", "compile", "batched", "eager")
STEPS = ("route", "arrange", "gather", "expand", "project", "combine")
# The layer without steps, and whether it gathers and combines.
WITHOUT = {"no_gather": (False, True), "no_combine": (True, False), "neither": (False, False)}
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


class State(NamedTuple):
    """A layer's input, and what each step makes of it."""

    tokens: Tensor
    shares: Tensor
    experts: Tensor
    slots: Slots
    gathered: Tensor
    gated: Tensor
    rows: Tensor

    @classmethod
    def of(cls, layer: MoeLayer, x: Tensor) -> State:
        """Run a layer's steps on x (sequences, positions, hidden)."""
        tokens = x.flatten(0, -2)
        shares, experts = layer.route(tokens)
        slots = layer.arrange(shares, experts)
        gathered = layer.gather(tokens, slots)
        gated = layer.expand(gathered, slots)
        return cls(tokens, shares, experts, slots, gathered, gated, layer.project(gated, slots))


def whole(layer: MoeLayer, gathers: bool, combines: bool, state: State) -> Tensor:
    """Run a layer, perhaps with the rows that it would gather, and perhaps up to those that it would combine."""
    slots = layer.arrange(*layer.route(state.tokens))
    gathered = layer.gather(state.tokens, slots) if gathers else state.gathered
    rows = layer.project(layer.expand(gathered, slots), slots)
    return layer.combine(rows, slots) if combines else rows


def route_by_maxima(layer: MoeLayer, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return what a layer's router does. torch.compile can make one kernel of these maxima and the softmax."""
    likely = F.softmax(F.linear(tokens, layer.router), dim=-1, dtype=torch.float32)
    found = []
    for _ in range(layer.chosen):
        share, expert = likely.max(-1)
        found.append((share, expert))
        likely = torch.where(layer.every == expert[:, None], -1.0, likely)
    shares, experts = (torch.stack(parts, -1) for parts in zip(*found, strict=True))
    return shares / shares.sum(-1, keepdim=True) if layer.normalizes else shares, experts


def steps(layer: MoeLayer) -> dict[str, Callable[[State], Any]]:
    """Return a layer's steps by name, and other ways to route, to arrange slots and to combine them."""
    many = replace(layer, counted=range(0))
    wide = replace(many, every=layer.every.long())
    return {
        "route": lambda s: layer.route(s.tokens),
        "arrange": lambda s: layer.arrange(s.shares, s.experts),
        "gather": lambda s: layer.gather(s.tokens, s.slots),
        "expand": lambda s: layer.expand(s.gathered, s.slots),
        "project": lambda s: layer.project(s.gated, s.slots),
        "combine": lambda s: layer.combine(s.rows, s.slots),
        "route_maxima": lambda s: route_by_maxima(layer, s.tokens),
        "arrange_sort": lambda s: many.arrange(s.shares, s.experts),
        "arrange_wide": lambda s: wide.arrange(s.shares, s.experts),
        "combine_sum": lambda s: s.rows[s.slots.back].unflatten(0, (-1, layer.chosen)).sum(1),
    }


def other_combines(layer: MoeLayer) -> dict[str, Callable[[State], Tensor]]:
    """Return other ways to add up the rows of each token, by name."""
    chosen = layer.chosen
    return {
        "combine_bag": lambda s: F.embedding_bag(s.slots.back.unflatten(0, (-1, chosen)), s.rows, mode="sum"),
        "combine_add": lambda s: torch.zeros_like(s.tokens).index_add_(0, s.slots.tokens, s.rows),
    }


def run_parts(name: str, layer: MoeLayer, block: torch.nn.Module, tokens: int) -> dict[str, Any]:
    """Check a layer, and time it, itself without some steps, and each step."""
    torch._dynamo.reset()
    (first,) = draw(layer, tokens, 1)
    alike = problem(layer, first)
    sets = [first, *draw(layer, tokens, rotation(alike.bytes(2, 2, 2)) - 1)]
    states = [State.of(layer, x) for x in sets]
    parts = {
        part: lambda state, has=has: whole(layer, *has, state)
        for part, has in {"layer": (True, True), **WITHOUT}.items()
    }
    calls = {
        part: torch.compile(call, dynamic=False, fullgraph=True) for part, call in {**parts, **steps(layer)}.items()
    }
    calls |= other_combines(layer)
    checked = errors(block, first, {"ours": calls["layer"](states[0]).view_as(first)})
    runs: dict[str, Run] = {
        part: lambda index, call=call: call(states[index % len(states)])  # type: ignore[misc]
        for part, call in calls.items()
    }
    times = harness.time_interleaved(runs, expected_us(alike))
    return {
        "model": name, "phase": "decode" if tokens <= _DECODED else "prefill", "tokens": tokens,
        "active": active(layer, first), **checked,
        "ms": {part: round(time.median, 5) for part, time in times.items()},
        "gain": {without: harness.ratios(times[without], times["layer"]) for without in WITHOUT},
    }  # fmt: skip


def table(rows: Iterable[dict[str, Any]]) -> str:
    """Return what parts take as a table in Markdown: microseconds, and what the layer would gain without steps."""
    heads = ("Model", "Tokens", "Layer, µs", *STEPS, *WITHOUT)
    lines = ["| " + " | ".join(heads) + " |", "|---" + "|---:" * (len(heads) - 1) + "|"]
    for row in rows:
        times = [f"{row['ms'][part] * 1e3:.1f}" for part in ("layer", *STEPS)]
        gains = [f"{row['gain'][without]['median']:.3f}" for without in WITHOUT]
        lines.append("| " + " | ".join([row["model"], str(row["tokens"]), *times, *gains]) + " |")
    return "\n".join(lines)


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
    parser.add_argument("--parts", action="store_true", help="time the layer's steps, and the layer without some")
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
            if args.parts:
                rows.append(run_parts(name, layer, block, tokens))
            else:
                rows.append(run_case(name, layer, block, tokens, [peer for peer in PEERS if peer not in args.skip]))
            print(rows[-1], flush=True)
            harness.save(args.out, {**head, "rows": rows})
            torch.cuda.empty_cache()
    if args.parts:
        print(table(rows))


if __name__ == "__main__":
    main()
