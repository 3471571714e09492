"""Measures the time to compile one kernel, against plain nvcc on the same file.

    python benchmarks/bench_compile.py --out benchmarks/results/compile_h100.json   # needs nvcc and g++, no GPU

Ours is the wait of a first call with a cold cache: rendering, both halves, the link and the proofs. The peer is one
nvcc that makes a shared library of the same source. They take turns, one kernel at a time, on an idle machine.
Each row: {"kernel", "ours_s", "nvcc_s", "ratio"}. The ratio is ours over nvcc's: below 1, ours is faster.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import harness
from bench_gemm import BENCHMARKS

import cutlass_ops as co
from cutlass_ops.artifacts.store import KernelStore
from cutlass_ops.base import arch
from cutlass_ops.compilation import compiler
from cutlass_ops.compilation.builder import build_artifact
from cutlass_ops.compilation.toolchain import Toolchain, environment, find_toolchain
from cutlass_ops.declare.spec import KernelSpec, Operand
from cutlass_ops.kinds import render
from cutlass_ops.run import ops
from cutlass_ops.run.registry import OpSignature


def kernels() -> list[KernelSpec]:
    """Return one kernel of each kind that serves shapes of the grid."""
    tile, cluster = co.ThreadblockShape, co.ClusterShape
    configs = [
        co.Sm90Config(tile(128, 128, 64), cluster(1, 2), schedule="pingpong"),
        co.Sm90Config(tile(128, 256, 64), cluster(2, 1), schedule="cooperative"),
        co.Sm90Config(tile(64, 16, 256), schedule="warp_specialized", swap_ab=True),
        co.Sm80Config(tile(128, 128, 32), co.WarpShape(64, 64, 32), stages=4),
    ]
    specs = [_signature(BENCHMARKS["bias_relu"].op, 1).spec(config) for config in configs]
    return [*specs, _signature(BENCHMARKS["bias_gelu_residual"].op, 2).spec(configs[0])]


def _signature(op: ops.Op, inputs: int) -> OpSignature:
    row, bias = Operand.of("bf16.row"), Operand.of("bf16.row.align1")
    return OpSignature(op.graph, row, row.transposed, row, (bias, row)[:inputs], ())


def ours(spec: KernelSpec, toolchain: Toolchain, folder: Path) -> float:
    """Return the seconds of a build into an empty store."""
    began = time.monotonic()
    build_artifact(spec, store=KernelStore(folder / "store"), toolchain=toolchain)
    return time.monotonic() - began


def plain(spec: KernelSpec, toolchain: Toolchain, folder: Path) -> float:
    """Return the seconds of one nvcc that makes a shared library of the same source."""
    flags = [
        f for f in compiler.compile_flags(arch.target(spec.target))["device"] if f not in ("-fatbin", "-Xptxas=-v")
    ]
    compiler.link_inputs(folder, toolchain)
    (folder / "kernel.cu").write_text(render.render(spec))
    command = [
        str(toolchain.nvcc), f"-ccbin={toolchain.host_compiler}", *flags, "-Xcompiler=-fPIC,-fvisibility=hidden",
        "-shared", "-cudart=shared", "-cudadevrt=none", "-Llib", "-ltvm_ffi", "-o", "kernel.so", "kernel.cu",
    ]  # fmt: skip
    began = time.monotonic()
    subprocess.run(command, cwd=folder, env=environment(toolchain.path), check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - began


def row(spec: KernelSpec, toolchain: Toolchain, rounds: int) -> dict[str, Any]:
    """Build a kernel both ways, in turns."""
    times: dict[str, list[float]] = {"ours": [], "nvcc": []}
    for number in range(rounds):
        ways = [("ours", ours), ("nvcc", plain)]
        for name, way in ways[:: 1 if number % 2 else -1]:
            with tempfile.TemporaryDirectory() as folder:
                times[name].append(way(spec, toolchain, Path(folder)))
    ratio = statistics.median(o / n for o, n in zip(times["ours"], times["nvcc"], strict=True))
    return {
        "kernel": f"{spec.config.slug}, {len(spec.inputs)} inputs",
        "ours_s": round(statistics.median(times["ours"]), 2),
        "nvcc_s": round(statistics.median(times["nvcc"]), 2),
        "ratio": round(ratio, 3),
    }


def main() -> None:
    """Build every kernel both ways and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    toolchain = find_toolchain()
    rows = []
    for spec in kernels():
        rows.append(row(spec, toolchain, args.rounds))
        print(rows[-1], flush=True)
    head = {
        "date": datetime.date.today().isoformat(),
        "machine": platform.machine(),
        "processors": len(os.sched_getaffinity(0)),
        "cutlass_ops": co.__version__,
        **toolchain.identity,
    }
    ratios = [r["ratio"] for r in rows]
    summary = {"geomean": round(harness.geomean(ratios), 3), "worst": max(ratios)}
    harness.save(args.out, {**head, "summary": summary, "rows": rows})
    print(summary)


if __name__ == "__main__":
    main()
