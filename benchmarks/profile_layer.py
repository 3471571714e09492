"""Profiles a decoder layer kernel by kernel with PyTorch's profiler: ours and torch.compile's.

    python benchmarks/profile_layer.py --out benchmarks/results/layer_kernels_h100.json
    python benchmarks/profile_layer.py --fp8 --cases decode:16 --out benchmarks/results/fp8_layer_kernels_h100.json

The layers are those of bench_layer.py, or of bench_fp8_layer.py. Overlapping kernels are counted in full and gaps
between kernels not at all, so the sum is not the layer's time. Each row: {"phase", "m", "variant", "kind", "kernel",
"count", "us"} for one call of the layer. The kind is "gemm", "attention" or "other".
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import bench_fp8_layer
import bench_layer
import harness
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from cutlass_ops.tuner.timing import Run

CALLS = 10
# Parts of kernels' names, in lower case.
KINDS = {
    "attention": ("flash", "fmha", "attention", "splitkv"),
    "gemm": ("gemm", "nvjet", "cutlass", "triton_mm", "_mm_", "triton_tem"),
}


def kind_of(kernel: str) -> str:
    """Return the kind of a kernel by its name."""
    # torch.compile names a pointwise kernel after its neighbours too.
    if "triton_poi" in kernel:
        return "other"
    return next((kind for kind, parts in KINDS.items() if any(part in kernel.lower() for part in parts)), "other")


def kernels_of(run: Callable[[], object]) -> list[dict[str, Any]]:
    """Return the kernels of one call, longest first."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        for _ in range(CALLS):
            run()
        torch.cuda.synchronize()
    totals: dict[str, list[float]] = defaultdict(list)
    for event in found.events() or ():
        if event.device_type == DeviceType.CUDA and event.device_time_total > 0:
            totals[event.name].append(event.device_time_total)
    rows = [
        {
            "kind": kind_of(name),
            "kernel": name[:120],
            "count": round(len(times) / CALLS, 1),
            "us": round(sum(times) / CALLS, 2),
        }
        for name, times in totals.items()
    ]
    return sorted(rows, key=lambda row: -float(row["us"]))


def of_16_bits(cases: list[str], cache: int) -> Iterator[tuple[str, dict[str, Run]]]:
    """Yield the calls of layers in BF16, case by case."""
    config = bench_layer.block.configuration(bench_layer.block.EIGHT_B)
    for case in cases:
        phase, m = case.split(":")
        yield case, bench_layer.variants(config, phase, int(m), cache, ["passed", "compile"]).runs


def of_fp8(cases: list[str], cache: int) -> Iterator[tuple[str, dict[str, Run]]]:
    """Yield the calls of layers in FP8, case by case."""
    layers = bench_fp8_layer.Layers.draw(bench_layer.block.configuration(bench_layer.block.EIGHT_B), "cuda")
    for case in cases:
        inputs = bench_fp8_layer.draw(layers, int(case.split(":")[1]), cache, "cuda")
        yield case, bench_fp8_layer.variants(layers, inputs, ["rowwise"])


def main() -> None:
    """Profile both layers in both phases and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=["prefill:4096", "decode:1", "decode:64"])
    parser.add_argument(
        "--fp8", action="store_true", help="layers in FP8: ours and the compiled one with scales of rows"
    )
    parser.add_argument("--cache", type=int, default=1024, help="positions of the cache, including the new one")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    head = harness.begin()
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    with torch.no_grad():
        for case, runs in (of_fp8 if args.fp8 else of_16_bits)(args.cases, args.cache):
            phase, m = case.split(":")
            for name, run in runs.items():
                kernels = kernels_of(lambda run=run: run(0))
                rows += [{"phase": phase, "m": int(m), "variant": name, **kernel} for kernel in kernels]
                sums = {k: round(sum(r["us"] for r in kernels if r["kind"] == k), 1) for k in (*KINDS, "other")}
                print(case, name, sums, flush=True)
            harness.save(args.out, {**head, "rows": rows})


if __name__ == "__main__":
    main()
