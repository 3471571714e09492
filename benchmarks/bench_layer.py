"""Measures a Llama-3.1-8B decoder layer on fused GEMMs, against transformers' layer, eager and with torch.compile.

    python benchmarks/bench_layer.py --out benchmarks/results/layer_h100.json
    python benchmarks/bench_layer.py --phases decode --cache 4096 --skip compile --out /tmp/r.json
    python benchmarks/bench_layer.py --resume /tmp/r.json --out /tmp/all.json    # only missing rows

The layer is that of examples/transformer_block.py. In `ours`, each norm's kernel computes the statistic of its rows. In
`passed`, it is given, also that of the layer's input. Both run under torch.compile; `plain` is `ours` without.
Prefill is one sequence of M positions. Decoding is M sequences of one position each, over a cache of keys and values.
Each row: {"phase", "m", "cache", "error_over_eager", "ms": {name: ms}, "over_ours": {name: ratio and range}}.
"""

from __future__ import annotations

import argparse
import copy
import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import harness
import torch
from torch import Tensor

import cutlass_ops as co
from cutlass_ops.declare.problem import Problem
from cutlass_ops.tuner.timing import Run, expected_us

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import transformer_block as block

PREFILL, DECODE = (1024, 4096), (1, 16, 64)
PEERS = ("passed", "plain", "eager", "compile")
# Columns that all of the layer's weights would have side by side, at K = 4096.
_COLUMNS = 6144 + 4096 + 3 * 14336


class Variants(NamedTuple):
    """Layers by name, each called with a launch index, and the largest error of ours over eager's."""

    runs: dict[str, Run]
    error: float


class Inputs(NamedTuple):
    """A layer's input, positions, transformers' cosines and sines, statistic, and caches."""

    x: Tensor
    positions: Tensor
    rope: tuple[Tensor, Tensor]
    statistic: co.RowStatistic
    cache: Any
    paired: Any  # the same cache, with keys as the fused layer has them


def draw(config: Any, phase: str, m: int, length: int) -> Inputs:
    """Draw a layer's arguments."""
    batch, sequence = (1, m) if phase == "prefill" else (m, 1)
    cache = None if phase == "prefill" else block.Cache(batch, length, config, "cuda")
    x = torch.randn(batch, sequence, config.hidden_size, device="cuda", dtype=block.DTYPE)
    first = 0 if cache is None else length - 1
    positions = torch.arange(first, first + sequence, device="cuda").repeat(batch, 1)
    rope = block.LlamaRotaryEmbedding(config).to("cuda")(x, positions[:1])
    statistic = co.RowStatistic(x.float().square().sum(-1), config.hidden_size, config.rms_norm_eps)
    return Inputs(x, positions.float(), rope, statistic, cache, None if cache is None else cache.in_pairs())


def build_ahead(config: Any, cases: list[tuple[str, int]], length: int) -> None:
    """Compile the kernels of all cases in parallel."""
    layer = block.random_layer(config, "cuda")
    fused = [block.FusedLayer.of(layer, config, way) for way in block.Statistic]
    drawn = [draw(config, *case, length) for case in cases]
    harness.side_by_side(
        partial(each, inputs.x, inputs.positions, given, inputs.paired)
        for inputs in drawn
        for each, given in zip(fused, (None, inputs.statistic), strict=True)
    )


def variants(config: Any, phase: str, m: int, length: int, peers: list[str]) -> Variants:
    """Return `ours` and its peers at one number of rows, checked."""
    layer = block.random_layer(config, "cuda")

    def eager(x: Tensor, rope: tuple[Tensor, Tensor], cache: Any = None) -> Tensor:
        return transformers_output(layer, x, rope, cache)

    # First, since it forgets what was compiled before.
    compiled = harness.compiled(eager) if "compile" in peers else eager
    plain, passing = (block.FusedLayer.of(layer, config, way) for way in block.Statistic)
    taken, passed = (torch.compile(each, dynamic=False, fullgraph=True) for each in (plain, passing))
    x, positions, rope, statistic, cache, paired = draw(config, phase, m, length)
    found = [taken(x, positions, None, paired)[0], passed(x, positions, statistic, paired)[0]]
    theirs, exact = eager(x, rope, cache), exact_output(layer, x, rope, cache)
    error = max(harness.check(each, exact, theirs) for each in found)
    known: dict[str, Run] = {
        "ours": lambda _: taken(x, positions, None, paired),
        "passed": lambda _: passed(x, positions, statistic, paired),
        "plain": lambda _: plain(x, positions, None, paired),
        "eager": lambda _: eager(x, rope, cache),
        "compile": lambda _: compiled(x, rope, cache),
    }
    return Variants({name: known[name] for name in ("ours", *peers)}, error)


def run_case(config: Any, phase: str, m: int, length: int, peers: list[str]) -> dict[str, Any]:
    """Check and time the layer at one number of rows."""
    found = variants(config, phase, m, length, peers)
    return {
        "phase": phase, "m": m, "cache": length if phase == "decode" else 0,
        "error_over_eager": round(found.error, 3),
        **harness.compare(found.runs, expected_us(Problem(m, _COLUMNS, 4096))),
    }  # fmt: skip


def transformers_output(layer: torch.nn.Module, x: Tensor, rope: tuple[Tensor, Tensor], cache: Any) -> Tensor:
    """Return the layer's output by transformers."""
    # By position, after a mask and positions: its name has changed between versions.
    return layer(x, None, None, cache, position_embeddings=rope)


def exact_output(layer: torch.nn.Module, x: Tensor, rope: tuple[Tensor, Tensor], cache: Any) -> Tensor:
    """Return the layer's output in FP64, with the same cache."""
    wide = copy.deepcopy(layer).double()
    doubled = None if cache is None else cache.double()
    cosines, sines = (t.double() for t in rope)
    return transformers_output(wide, x.double(), (cosines, sines), doubled)


def main() -> None:
    """Run both phases and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--phases", nargs="+", default=["prefill", "decode"], choices=["prefill", "decode"])
    parser.add_argument("--cache", type=int, default=1024, help="positions of the cache, including the new one")
    parser.add_argument("--skip", nargs="+", default=[], choices=PEERS, help="variants to leave out")
    parser.add_argument("--resume", nargs="+", type=Path, default=[], help="result with rows to keep")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    head = harness.begin()
    rows = harness.measured(args.resume, head)
    done = {(row["phase"], row["m"]) for row in rows if row["cache"] in (0, args.cache)}
    cases = [(phase, m) for phase in args.phases for m in (PREFILL if phase == "prefill" else DECODE)]
    cases = [case for case in cases if case not in done]
    torch.manual_seed(0)
    config = block.configuration(block.EIGHT_B)
    with torch.no_grad():
        build_ahead(config, cases, args.cache)
        for phase, m in cases:
            rows.append(run_case(config, phase, m, args.cache, [p for p in PEERS if p not in args.skip]))
            print(rows[-1], flush=True)
            harness.save(args.out, {**head, "rows": rows})


if __name__ == "__main__":
    main()
