"""Measures small problems whose operands TMA cannot read: kernels that copy them, that read them as they are, torch.mm.

    python benchmarks/bench_misaligned.py --out benchmarks/results/misaligned_h100.json

Each row: {"problem", "kernel", "model_us", "graph_us", "host_us"}. "graph_us" is a launch's time on the GPU, replayed
in a chain from a CUDA graph; "host_us" what enqueueing it takes, with the memory for its copies. Both are medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import harness
import torch

from cutlass_ops.choose import policies
from cutlass_ops.choose.dispatch import decide
from cutlass_ops.compilation.builder import build_many
from cutlass_ops.declare.order import TileOrder
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.epilogue import builtin
from cutlass_ops.kinds.sm80.config import Sm80Config
from cutlass_ops.kinds.sm90.config import Sm90Config
from cutlass_ops.operand.call import device_of
from cutlass_ops.run.registry import Registry
from cutlass_ops.tuner.tuning import signature_at

PROBLEMS = [
    Problem(*extents)
    for extents in (
        (2, 3, 5), (17, 33, 65), (64, 64, 62), (255, 257, 127), (200, 251, 253), (64, 1000, 999), (512, 513, 511),
        (1000, 1002, 1006),
    )
]  # fmt: skip
EACH = 2  # kernels that copy operands, and as many that do not
CHAIN, ROUNDS = 50, 15


def kernels(problem: Problem) -> list[tuple[KernelSpec, TileOrder, float]]:
    """Return the best kernels that copy operands and that do not, with their orders of tiles and expected times."""
    device = device_of(torch.device("cuda", 0))
    signature = signature_at(builtin.identity.graph, problem, "bf16", "row", "col", None, device)
    decision = decide(signature, device, problem)
    assert decision is not None
    best = decision.candidates()[0]
    others = policies.policy(signature, device).every(problem)
    every = [best, *(c for c in others if c.config != best.config)]
    found = [c for kind in (Sm90Config, Sm80Config) for c in [c for c in every if isinstance(c.config, kind)][:EACH]]
    return [(device.spec(signature, c.config), c.order, c.microseconds) for c in found]


def launch(spec: KernelSpec, order: TileOrder, problem: Problem, *matrices: torch.Tensor) -> None:
    """Launch a kernel on A, B and D."""
    kernel = Registry.current().kernel(spec)
    size = int(kernel.workspace_size(*problem, *order.numbers))
    workspace = matrices[0].new_empty_strided((size,), (1,), dtype=torch.uint8) if size else None
    assert kernel.launch(*matrices, *order.numbers, workspace) == 0


def graph_us(call: Callable[[], object]) -> float:
    """Return the GPU's time for a launch in a chain."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CHAIN):
            call()
    times = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / CHAIN)
    return round(statistics.median(times), 2)


def host_us(call: Callable[[], object]) -> float:
    """Return the host's time for a launch."""
    times = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(CHAIN):
            call()
        times.append((time.perf_counter() - began) * 1e6 / CHAIN)
    torch.cuda.synchronize()
    return round(statistics.median(times), 2)


def rows(problem: Problem) -> list[dict[str, Any]]:
    """Check and time all kernels at a problem."""
    m, n, k = problem.extents
    a, b = torch.randn(m, k, device="cuda").bfloat16(), torch.randn(n, k, device="cuda").bfloat16().t()
    exact, theirs = a.double() @ b.double(), torch.empty(m, n, device="cuda", dtype=torch.bfloat16)

    def pytorch() -> object:
        return torch.mm(a, b, out=theirs)

    found = [{"kernel": "torch.mm", "model_us": None, "graph_us": graph_us(pytorch), "host_us": host_us(pytorch)}]
    for spec, order, model in kernels(problem):
        d = torch.full_like(theirs, torch.nan)
        ours = partial(launch, spec, order, problem, a, b, d)
        ours()
        harness.check(d, exact, theirs)
        times = {"graph_us": graph_us(ours), "host_us": host_us(ours)}
        found.append({"kernel": spec.config.slug, "model_us": round(model, 2), **times})
    return [{"problem": [m, n, k], **row} for row in found]


def main() -> None:
    """Measure, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    build_many(dict.fromkeys(spec for problem in PROBLEMS for spec, _, _ in kernels(problem)))
    measured = [row for problem in PROBLEMS for row in rows(problem)]
    harness.save(args.out, {**harness.environment(), "rows": measured})
    print(args.out.read_text())


if __name__ == "__main__":
    main()
