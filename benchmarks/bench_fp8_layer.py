"""Measures a Llama-3.1-8B decoder layer in FP8 against the same layer in BF16, and against dynamic FP8 in PyTorch.

    python benchmarks/bench_fp8_layer.py --out benchmarks/results/fp8_layer_h100.json
    python benchmarks/bench_fp8_layer.py --rows 16 --cache 4096 --skip rowwise --out /tmp/r.json
    python benchmarks/bench_fp8_layer.py --resume /tmp/r.json --out /tmp/all.json    # only missing rows

The layers are those of examples/fp8_layer.py and examples/transformer_block.py. In `ours`, scales are static, and were
calibrated on 1024 rows. `bf16` computes each norm's statistic in the norm's own kernel; `bf16_passed` gets it from the
GEMM before, as `ours` does. `rowwise` quantises rows dynamically, under torch.compile with max-autotune. All run under
torch.compile; `plain` is `ours` without.
Up to 64 rows are sequences of one position each, over a cache of keys and values; more rows are one sequence.
Each row: {"phase", "m", "cache", "error", "rowwise_error", "ms": {name: ms}, "over_ours": {name: ratio and range}}.
Errors are those of what the layer adds to its input, against transformers' layer in BF16.
"""

from __future__ import annotations

import argparse
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
import fp8_layer
import transformer_block as block

ROWS = (16, 1024, 4096)
PEERS = ("bf16", "bf16_passed", "rowwise", "plain")
_CALIBRATED_ON = 1024
# More rows than these are one sequence.
_DECODED = 64
# Columns that all of the layer's weights would have side by side, at K = 4096.
_COLUMNS = 6144 + 4096 + 3 * 14336


class Layers(NamedTuple):
    """One layer's weights in every form."""

    config: Any
    exact: torch.nn.Module
    fp8: fp8_layer.Fp8Layer
    state: co.nn.Fp8State
    bf16: block.FusedLayer
    bf16_passed: block.FusedLayer
    rowwise: fp8_layer.RowwiseLayer

    @classmethod
    def draw(cls, config: Any, device: str, rows: int = _CALIBRATED_ON) -> Layers:
        """Draw weights, and calibrate the scales of activations."""
        exact = block.random_layer(config, device)
        taken, passed = (block.FusedLayer.of(exact, config, way) for way in block.Statistic)
        # As if each layer were followed by one with the same norm.
        ours = fp8_layer.Fp8Layer(exact, config, exact.input_layernorm.weight)
        found = cls(
            config, exact, ours, co.nn.Fp8State(device=device), taken, passed, fp8_layer.RowwiseLayer(exact, config)
        )
        x = torch.randn(1, rows, config.hidden_size, device=device, dtype=block.DTYPE)
        positions = torch.arange(rows, device=device)[None].float()
        fp8_layer.calibrate([ours], found.state, lambda: ours(found.stream(x), positions))
        return found

    def stream(self, x: Tensor) -> fp8_layer.Stream:
        """Return what the layer before would give."""
        return fp8_layer.entering(x, self.exact.input_layernorm.weight, self.state, self.config.rms_norm_eps)


class Inputs(NamedTuple):
    """A layer's inputs: the stream, positions, transformers' cosines and sines, and caches."""

    stream: fp8_layer.Stream
    positions: Tensor
    rope: tuple[Tensor, Tensor]
    cache: Any
    paired: Any  # the same cache, with keys as the fused layers have them


def draw(layers: Layers, m: int, length: int, device: str) -> Inputs:
    """Draw the inputs of a number of rows."""
    batch, sequence = (m, 1) if m <= _DECODED else (1, m)
    cache = block.Cache(batch, length, layers.config, device) if m <= _DECODED else None
    x = torch.randn(batch, sequence, layers.config.hidden_size, device=device, dtype=block.DTYPE)
    first = 0 if cache is None else length - 1
    positions = torch.arange(first, first + sequence, device=device).repeat(batch, 1)
    rope = block.LlamaRotaryEmbedding(layers.config).to(device)(x, positions[:1])
    return Inputs(layers.stream(x), positions.float(), rope, cache, None if cache is None else cache.in_pairs())


def errors(layers: Layers, x: Inputs) -> dict[str, float]:
    """Return the errors of FP8 layers, of what they add to the stream.

    Raises
    ------
    AssertionError
        If ours is more than 1.5 times that of dynamic scales of rows.
    """
    y = x.stream.y
    wanted = layers.exact(y, None, None, x.cache, position_embeddings=x.rope).double() - y.double()
    ours = layers.fp8(x.stream, x.positions, x.paired).y
    error, other = (block.error(found.double() - y, wanted) for found in (ours, layers.rowwise(y, x.rope, x.cache)))
    assert error <= 1.5 * other, f"error is {error:.3f}, and {other:.3f} with dynamic scales of rows"
    return {"error": round(error, 5), "rowwise_error": round(other, 5)}


def variants(layers: Layers, x: Inputs, names: list[str]) -> dict[str, Run]:
    """Return `ours` and its peers, each called with a launch index."""
    # First, since it forgets what was compiled before.
    rowwise = harness.compiled(layers.rowwise) if "rowwise" in names else layers.rowwise
    ours, bf16, passed = (
        torch.compile(each, dynamic=False, fullgraph=True) for each in (layers.fp8, layers.bf16, layers.bf16_passed)
    )
    stream, positions = x.stream, x.positions
    known: dict[str, Run] = {
        "ours": lambda _: ours(stream, positions, x.paired),
        "bf16": lambda _: bf16(stream.y, positions, None, x.paired),
        "bf16_passed": lambda _: passed(stream.y, positions, stream.statistic, x.paired),
        "rowwise": lambda _: rowwise(stream.y, x.rope, x.cache),
        "plain": lambda _: layers.fp8(stream, positions, x.paired),
    }
    return {name: known[name] for name in ("ours", *names)}


def run_case(layers: Layers, m: int, length: int, names: list[str]) -> dict[str, Any]:
    """Check and time the layers at one number of rows."""
    x = draw(layers, m, length, "cuda")
    decoded = m <= _DECODED
    return {
        "phase": "decode" if decoded else "prefill", "m": m, "cache": length if decoded else 0, **errors(layers, x),
        **harness.compare(variants(layers, x, names), expected_us(Problem(m, _COLUMNS, 4096))),
    }  # fmt: skip


def build_ahead(layers: Layers, rows: list[int], length: int) -> None:
    """Compile the kernels of all numbers of rows in parallel."""
    drawn = [draw(layers, m, length, "cuda") for m in rows]
    harness.side_by_side(
        call
        for x in drawn
        for call in (
            partial(layers.fp8, x.stream, x.positions, x.paired),
            partial(layers.bf16, x.stream.y, x.positions, None, x.paired),
            partial(layers.bf16_passed, x.stream.y, x.positions, x.stream.statistic, x.paired),
        )
    )


def main() -> None:
    """Run all numbers of rows and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--cache", type=int, default=1024, help="positions of the cache, including the new one")
    parser.add_argument("--skip", nargs="+", default=[], choices=PEERS, help="variants to leave out")
    parser.add_argument("--resume", nargs="+", type=Path, default=[], help="result with rows to keep")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    head = harness.begin()
    rows = harness.measured(args.resume, head)
    done = {row["m"] for row in rows if row["cache"] in (0, args.cache)}
    cases = [m for m in args.rows if m not in done]
    if not cases:
        harness.save(args.out, {**head, "rows": rows})
        return
    torch.manual_seed(0)
    with torch.no_grad():
        layers = Layers.draw(block.configuration(block.EIGHT_B), "cuda")
        build_ahead(layers, cases, args.cache)
        for m in cases:
            rows.append(run_case(layers, m, args.cache, [p for p in PEERS if p not in args.skip]))
            print(rows[-1], flush=True)
            harness.save(args.out, {**head, "rows": rows})


if __name__ == "__main__":
    main()
