"""Measures a call's cost on the host: time of a warm call, and memory of a process that runs one op.

    python benchmarks/bench_host.py --out benchmarks/results/host_h100.json

Times are only of enqueueing: rounds are short enough that the device's queue never fills. Each row:
{"problem", "kernel", ratios of ours to others', formed within rounds, "us": {call: [median, least, most]}}.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import torch
import torch.nn.functional as F  # noqa: N812

import cutlass_ops as co
from cutlass_ops.compilation.background import Background

CALLS, ROUNDS = 200, 41

# Peak resident memory with PyTorch and CUDA up, then with one op run; the kernels are in the store already.
MEMORY = """
import json, resource, torch
x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)
w = torch.randn(256, 256, device="cuda", dtype=torch.bfloat16)
b = torch.randn(256, device="cuda", dtype=torch.bfloat16)
torch.relu(torch.nn.functional.linear(x, w, b)); torch.cuda.synchronize()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
import cutlass_ops
cutlass_ops.gemm_bias_relu(x, w.t(), b); torch.cuda.synchronize()
print(json.dumps((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024))
"""


# Problems too small to fill the queue: with few rows, with full tiles, and with rows beyond the matrix along M and N,
# which take two more descriptors.
PROBLEMS = {"few rows": (16, 256, 256), "full tiles": (256, 256, 256), "partly filled tiles": (200, 264, 256)}


@dataclass(frozen=True)
class Calls:
    """Ways to make the same call at one problem, and the kernel of ours."""

    kernel: str
    variants: dict[str, Callable[[], object]]

    @classmethod
    def at(cls, m: int, n: int, k: int) -> Calls:
        """Return the calls to compare."""
        a, weight = (torch.randn(*s, device="cuda", dtype=torch.bfloat16) for s in ((m, k), (n, k)))
        bias, b = torch.randn(n, device="cuda", dtype=torch.bfloat16), weight.t()
        out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
        a3 = a.view(4, m // 4, k)
        choice = co.gemm_bias_relu.plan(a, b, bias)
        launch, (raster, swizzle) = co.build(choice.spec).loaded.launch, choice.order.numbers
        variants: dict[str, Callable[[], object]] = {
            "gemm_bias_relu(out=)": lambda: co.gemm_bias_relu(a, b, bias, out=out),
            "gemm_bias_relu": lambda: co.gemm_bias_relu(a, b, bias),
            "gemm_bias_relu, batch folded": lambda: co.gemm_bias_relu(a3, b, bias),
            "the kernel's launch alone": lambda: launch(a, b, out, bias, raster, swizzle, None),
            "F.linear": lambda: F.linear(a, weight, bias),
            "F.relu(F.linear)": lambda: F.relu(F.linear(a, weight, bias)),
            "torch._addmm_activation": lambda: torch._addmm_activation(bias, a, b),
            "torch.empty": lambda: torch.empty((m, n), device="cuda", dtype=torch.bfloat16),
        }
        return cls(choice.spec.config.slug, variants)


def measure(calls: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Time the calls in interleaved rounds; return microseconds per call for each round."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for number in range(ROUNDS + 3):
        random.Random(number).shuffle(names)
        for name in names:
            call = calls[name]
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(CALLS):
                call()
            times[name].append((time.perf_counter() - begin) / CALLS * 1e6)
    return {name: each[3:] for name, each in times.items()}


def row(name: str, calls: Calls) -> dict[str, Any]:
    """Measure one problem's calls."""
    with torch.no_grad():
        times = measure(calls.variants)

    def ratio(ours: str, peer: str) -> float:
        return round(statistics.median(o / p for o, p in zip(times[ours], times[peer], strict=True)), 3)

    return {
        "problem": name,
        "kernel": calls.kernel,
        "out_over_linear": ratio("gemm_bias_relu(out=)", "F.linear"),
        "no_out_over_linear_relu": ratio("gemm_bias_relu", "F.relu(F.linear)"),
        "no_out_over_linear": ratio("gemm_bias_relu", "F.linear"),
        "us": {call: [round(x, 2) for x in (statistics.median(t), min(t), max(t))] for call, t in times.items()},
    }


def main() -> None:
    """Measure and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    # Compilers of kernels that other numbers of rows may need would take processors from what is timed.
    Background.current().close()
    rows = [row(name, Calls.at(*problem)) for name, problem in PROBLEMS.items()]
    memory = json.loads(subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, check=True).stdout)
    harness.save(args.out, {**harness.environment(), "host_memory_mib": round(memory, 1), "rows": rows})
    print(args.out.read_text())


if __name__ == "__main__":
    main()
