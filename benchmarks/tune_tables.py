"""Tunes the tables that ship with the library, over the shapes of shapes.py.

    python benchmarks/tune_tables.py --op gemm_bias_relu --dtypes bf16 --folder cutlass_ops/tuned

Stopped and started again, it goes on where it was.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import shapes

from cutlass_ops import ops
from cutlass_ops.tuning import Effort, tune


def main() -> None:
    """Tune, and say what failed."""
    named = {op.name: op for op in ops.NAMED}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", choices=list(named), default="gemm_bias_relu")
    parser.add_argument("--dtypes", nargs="+", default=["bf16"])
    parser.add_argument("--shapes", choices=("grid", "tuning"), default="tuning")
    parser.add_argument("--kernels", type=int, default=96)
    parser.add_argument("--candidates", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin nothing new after so long")
    parser.add_argument("--again", action="store_true", help="measure again what was measured before")
    parser.add_argument("--refine", action="store_true", help="look around what was measured to be the best")
    parser.add_argument("--folder", type=Path, required=True)
    args = parser.parse_args()
    effort = Effort(kernels=args.kernels, candidates=args.candidates, refine=args.refine, seconds=args.seconds)
    wanted = shapes.GRID if args.shapes == "grid" else shapes.TUNING
    report = tune(
        named[args.op], wanted, dtypes=args.dtypes, effort=effort, folder=args.folder.absolute(), again=args.again,
        show=print,
    )  # fmt: skip
    print(f"{report.measured} measured, {report.known} known before, {report.left} left")
    for name, why in report.failed.items():
        print(f"failed: {name}: {why}")


if __name__ == "__main__":
    main()
