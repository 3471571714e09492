"""Has torch.compile's candidates compiled by many processes, before bench_gemm.py measures one shape after the other.

    python benchmarks/compile_ahead.py --ops bias_silu --dtypes bf16

Nothing of what is timed here counts: caches of choices and of whole graphs are off, so that bench_gemm.py chooses anew
on a quiet GPU. What stays is Triton's cache of compiled kernels. With 16 cores that turns six seconds a shape into one.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
import traceback

import bench_gemm
import shapes
import torch
import torch._inductor.config


def compile_one(case: bench_gemm.Case) -> str:
    """Compile what torch.compile considers for a case; return what went wrong, if anything."""
    torch._inductor.config.autotune_local_cache = False
    torch._inductor.config.fx_graph_cache = False
    try:
        inputs = bench_gemm.make_inputs(case.m, case.n, case.k, bench_gemm.DTYPES[case.dtype], case.layout, count=1)
        with torch.no_grad():
            bench_gemm.compiled(bench_gemm.BENCHMARKS[case.op])(inputs[0])
        torch.cuda.synchronize()
    except Exception:
        return f"{case}: {traceback.format_exc(limit=1)}"
    finally:
        torch.cuda.empty_cache()
    return ""


def main() -> None:
    """Compile, and say how long it took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", choices=list(shapes.SETS), default="grid")
    parser.add_argument("--ops", nargs="+", default=["bias_relu"], choices=list(bench_gemm.BENCHMARKS))
    parser.add_argument("--dtypes", nargs="+", default=["bf16"], choices=list(bench_gemm.DTYPES))
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    args = parser.parse_args()
    begin = time.monotonic()
    cases = [
        bench_gemm.Case(args.set, op, dtype, "row-col", m, n, k)
        for op in args.ops
        for dtype in args.dtypes
        for m, n, k in shapes.SETS[args.set]
    ]
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        for failure in filter(None, pool.imap_unordered(compile_one, cases)):
            print(failure)
    print(f"{len(cases)} cases by {args.processes} processes in {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
