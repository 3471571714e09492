"""Measures the time to compile the same kernels by two versions of this package, in turns.

    git worktree add /tmp/before v0.1.0
    python benchmarks/compare_compile.py --before /tmp/before --out benchmarks/results/compare_compile.json

Needs nvcc and g++, no GPU. Each turn is a process of its own, with an empty store. Each row: {"version", "wall_s",
"processor_s"}; "wall" and "processor" are the medians of "after" over "before": below 1, the later version is faster.
"""

import argparse
import datetime
import importlib
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def build(jobs: int) -> None:
    """Compile kernels of all kinds into an empty store, with names that both versions have."""
    import cutlass_ops as co

    try:
        from cutlass_ops.compilation.builder import build_many
    except ImportError:  # the folder's older name
        build_many = importlib.import_module("cutlass_ops.builder").build_many

    tile, cluster = co.ThreadblockShape, co.ClusterShape
    configs = [
        co.Sm90Config(tile(128, 128, 64), cluster(2, 1), schedule="pingpong"),
        co.Sm90Config(tile(256, 128, 64), cluster(2, 1), schedule="cooperative"),
        co.Sm90Config(tile(64, 64, 128), schedule="warp_specialized", swap_ab=True),
        co.Sm90Config(tile(64, 8, 256), schedule="warp_specialized", swap_ab=True),
        co.Sm80Config(tile(128, 128, 32), co.WarpShape(64, 64, 32), stages=3),
        co.types.GemvConfig(4, 8, 8),
    ]

    @co.epilogue
    def sums(acc: Any, bias: co.Row) -> dict[str, Any]:
        d = co.silu(acc + bias)
        return {"d": d, "s": co.sum(d, dim=1)}

    wanted = [(e, c) for e in (co.gemm_bias_relu.epilogue, co.gemm_bias_gelu.epilogue) for c in configs]
    wanted += [(sums, c) for c in configs[:2]]
    specs = []
    for epilogue, config in wanted:
        target = {} if isinstance(config, co.Sm90Config) else {"target": "sm_90"}
        specs.append(
            co.KernelSpec(a="bf16.row", b="bf16.col", d="bf16.row", epilogue=epilogue, config=config, **target)
        )
    build_many(specs, jobs=jobs)


def turn(version: str, folder: Path, jobs: int) -> dict[str, Any]:
    """Compile with the package of a folder, in a process of its own."""
    with tempfile.TemporaryDirectory() as store:
        env = {**os.environ, "CUTLASS_OPS_CACHE_DIR": store, "CUTLASS_OPS_PROGRESS": "0"}
        env["PYTHONPATH"] = os.pathsep.join([str(folder), env.get("PYTHONPATH", "")])
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        subprocess.run([sys.executable, __file__, "--jobs", str(jobs), "--turn"], env=env, cwd=store, check=True)
        wall, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return {"version": version, "wall_s": round(wall, 1), "processor_s": round(processor, 1)}


def main() -> None:
    """Compile in turns and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="a checkout of the version to compare with")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--turn", action="store_true", help="compile once, with the package that is found")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.turn:
        build(args.jobs)
        return
    if not args.before or not args.out:
        parser.error("--before and --out are needed")
    folders, rows = {"before": args.before.resolve(), "after": ROOT}, []
    for number in range(args.rounds):
        for version in list(folders)[:: 1 if number % 2 else -1]:
            rows.append(turn(version, folders[version], args.jobs))
            print(rows[-1], flush=True)

    def ratio(of: str) -> float:
        times = {v: statistics.median(r[of] for r in rows if r["version"] == v) for v in folders}
        return round(times["after"] / times["before"], 3)

    import harness

    head = {
        "date": datetime.date.today().isoformat(),
        "machine": platform.machine(),
        "processors": len(os.sched_getaffinity(0)),
    }
    summary = {"wall": ratio("wall_s"), "processor": ratio("processor_s")}
    harness.save(args.out, {**head, "summary": summary, "rows": rows})
    print(summary)


if __name__ == "__main__":
    main()
