"""Tunes the tables that ship with the library, over the shapes of shapes.py.

    python benchmarks/tune_tables.py --op gemm_bias_relu --dtypes bf16 --folder cutlass_ops/tuned
    python benchmarks/tune_tables.py --op scaled --math fast --dtypes e4m3 --shapes fp8_tuning --folder /tmp/tuned
    python benchmarks/tune_tables.py --op scaled_blocks --dtypes e4m3 --shapes fp8_tuning --folder /tmp --plan H200
    python benchmarks/tune_tables.py --op fp8_added --dtypes e4m3 --shapes fp8_added --folder cutlass_ops/tuned

A stopped run continues where it ended, and --seconds stops one. --plan needs no GPU: it prints the kernels that a run
on such a one would compile and race. With several GPUs, give each an op of its own (CUDA_VISIBLE_DEVICES), and each
process its part of the processors (CUTLASS_OPS_JOBS).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path

import shapes
import torch

import cutlass_ops as co
from cutlass_ops.base import mma
from cutlass_ops.choose import tables
from cutlass_ops.declare.config import Config, config_from_json
from cutlass_ops.declare.gpus import gpu_named
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.spec import Major
from cutlass_ops.epilogue import composed
from cutlass_ops.epilogue.graph import Graph
from cutlass_ops.epilogue.nodes import Kind
from cutlass_ops.kinds.gemv import kind as kind_gemv
from cutlass_ops.run import named, norms, ops
from cutlass_ops.run.gemm import op_for
from cutlass_ops.run.requests import requested
from cutlass_ops.tuner import tuning
from cutlass_ops.tuner.tuning import Effort, tune

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import fp8_layer
import transformer_block

_SETS = (
    "grid",
    "tuning",
    "norms",
    "gates",
    "residuals",
    "few",
    "few_grid",
    "few_gates",
    "majors",
    "lines",
    "means",
    "fp8",
    "fp8_tuning",
    "fp8_gates",
    "fp8_qkv",
    "fp8_up",
    "fp8_added",
)
_SUMS = {"row_sum_square": "f32"}
_D = {"fp8_up": torch.float8_e4m3fn}  # of an op whose D has not its usual dtype
SHAPES = {name: getattr(shapes, name.upper()) for name in _SETS}


def main() -> None:
    """Tune, and print failures."""
    ops_by_name = {op.name: op for op in named.NAMED}
    ops_by_name |= {
        "rmsnorm": norms.rmsnorm_op(),
        "swiglu": ops.op(composed.swiglu),
        "rmsnorm_swiglu": norms.rmsnorm_op(composed.swiglu),
        "rmsnorm_sums": norms.rmsnorm_op(given="sums"),
        "rmsnorm_swiglu_sums": norms.rmsnorm_op(composed.swiglu, given="sums"),
        "residual_rms": norms.residual_rms_op(torch.bfloat16),
        "scaled": op_for(None, "dense", (False, False, False)),
        "scaled_rows": op_for(None, "dense", (True, True, False)),
        "scaled_blocks": op_for(None, "dense", (False, False, True)),
        "quantized_swiglu": ops.op(composed.quantized_swiglu),
        **fp8_layer_ops(),
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", choices=list(ops_by_name), default="gemm_bias_relu")
    parser.add_argument("--dtypes", nargs="+", default=["bf16"])
    parser.add_argument(
        "--math", choices=mma.ACCUMULATIONS, help="how sums of FP8 products are added up; by default by K"
    )
    parser.add_argument("--majors", nargs=2, choices=["row", "col"], default=["row", "col"], help="majors of A and B")
    parser.add_argument("--shapes", choices=list(SHAPES), default="tuning")
    parser.add_argument("--kernels", type=int, default=96)
    parser.add_argument("--candidates", type=int, default=12)
    parser.add_argument(
        "--within", type=float, default=1.15, help="race kernels predicted to take up to this factor longer"
    )
    parser.add_argument("--seconds", type=float, default=1e9, help="start no problem after this many seconds")
    parser.add_argument("--again", action="store_true", help="also measure problems measured before")
    parser.add_argument("--refine", action="store_true", help="also try neighbours of the best kernels so far")
    parser.add_argument("--below", type=float, help="only if the best peer's time over ours was less, or unknown")
    parser.add_argument("--pool", type=Path, help="the only kernels to measure, from choose_pool.py")
    parser.add_argument("--gemv", action="store_true", help="only GEMV kernels, and the best others at few rows")
    parser.add_argument("--problems", nargs="+", help="only these shapes, such as 4096x4096x14336")
    parser.add_argument("--part", default="0/1", help="2/3: the last third of the shapes, taken at regular distances")
    parser.add_argument("--plan", metavar="GPU", help="only print what a run on a GPU of this name would do")
    parser.add_argument("--folder", type=Path, required=True)
    args = parser.parse_args()
    op = ops_by_name[args.op]
    pool = tuple(map(config_from_json, json.loads(args.pool.read_text()))) if args.pool else ()
    if args.gemv:
        pool = _few_rows(args.folder, op.graph)
    effort = Effort(
        kernels=max(args.kernels, len(pool)), candidates=args.candidates, refine=args.refine, seconds=args.seconds,
        pool=pool, within=args.within,
    )  # fmt: skip
    wanted = SHAPES[args.shapes]
    if args.below is not None:
        done = _at_least(args.below, args.folder, op.graph)
        wanted = tuple(shape for shape in wanted if shape not in done)
    if args.problems:
        wanted = tuple(shape for shape in wanted if "x".join(map(str, shape)) in args.problems)
    first, step = map(int, args.part.split("/"))
    # Results are reported over the grid, so every part has it.
    wanted = tuple(shape for at, shape in enumerate(wanted) if at % step == first or shape in shapes.GRID)
    if args.op.startswith(("scaled", "quantized", "fp8_")):
        of_operands = (Kind.PRODUCT, Kind.TILE)
        inputs = {each.name: "f32" for each in op.graph.inputs if each.kind not in of_operands and each.name != "gamma"}
    else:
        inputs = _SUMS if args.op.endswith("_sums") else None
    op = op if args.math is None else op.in_math(args.math)
    if args.plan:
        _show_plan(op, wanted, args.dtypes, args.majors, args.plan, effort, inputs, _D.get(args.op))
        return
    report = tune(
        op, wanted,
        dtypes=args.dtypes, a=args.majors[0], b=args.majors[1], effort=effort,
        input_dtypes=inputs, out_dtype=_D.get(args.op), folder=args.folder.absolute(), again=args.again,
        show=print,
    )  # fmt: skip
    print(f"{report.measured} measured, {report.known} known before, {report.left} left")
    for name, why in report.failed.items():
        print(f"failed: {name}: {why}")


def _show_plan(
    op: ops.Op,
    wanted: tuple[shapes.Shape, ...],
    dtypes: list[str],
    majors: list[Major],
    gpu: str,
    effort: Effort,
    inputs: Mapping[str, str] | None,
    out_dtype: torch.dtype | None,
) -> None:
    """Print what would be compiled and raced for each signature, if nothing were known of it."""
    device, problems = gpu_named(gpu), {}
    for dtype in dtypes:
        for problem in map(Problem.of, wanted):
            signature = tuning.signature_at(op.graph, problem, dtype, *majors, out_dtype, device, inputs, math=op.math)
            problems.setdefault(signature, []).append(problem)
    for signature, each in problems.items():
        planned = tuning.plan({signature: each}, device, effort)
        raced = [len(task.entrants) for task in planned]
        kernels = {entrant.config for task in planned for entrant in task.entrants}
        for task in planned:
            print(f"{task.problem}: {' '.join(map(str, task.entrants))}")
        print(f"{signature.a} {signature.b}: {len(kernels)} kernels for {len(each)} problems, {sum(raced)} entrants")


def fp8_layer_ops() -> dict[str, ops.Op]:
    """Return the ops of examples/fp8_layer.py by name, as they are when its scales are static."""
    x = co.Scaled(torch.ones(16, 32).to(fp8_layer.FP8), 1.0)
    w = co.prepare(torch.ones(32, 32, dtype=torch.bfloat16), dtype=fp8_layer.FP8)
    stream, of_rows, columns = torch.ones(16, 32, dtype=torch.bfloat16), torch.ones(16), torch.ones(32)
    normed = {"rstd": co.RowStatistic(of_rows, 32, 1e-5), "math": fp8_layer.SUMS}
    copied = {"scale_out": 1.0, "gamma": columns.bfloat16(), "eps": 1e-5}
    rotation = {"epilogue": transformer_block.rotary, "position": of_rows, "frequency": columns}
    return {
        "fp8_qkv": requested(co.rmsnorm_gemm, x, w, **normed, **rotation).op,
        "fp8_up": requested(co.gemm_swiglu, x, w, w, scale_out=1.0, out_dtype=fp8_layer.FP8, **normed).op,
        "fp8_added": requested(co.gemm_residual_rms, x, w, stream, math=fp8_layer.SUMS, **copied).op,
    }


def _few_rows(folder: Path, epilogue: Graph) -> tuple[Config, ...]:
    """Return all GEMV kernels, and the two best of an epilogue's tables at each problem with few rows."""
    best = [
        measured.config
        for table in map(tables.load, folder.glob("*.json"))
        if table.signature.epilogue == epilogue
        for point in table.points
        if point.problem.m <= max(shapes.FEW_ROWS)
        for measured in point.measured[:2]
    ]
    return tuple(dict.fromkeys([*kind_gemv.candidates(), *best]))


def _at_least(ratio: float, folder: Path, epilogue: Graph) -> set[shapes.Shape]:
    """Return the problems at which no peer in an epilogue's tables is faster by more than a ratio."""
    return {
        point.problem.extents
        for table in map(tables.load, folder.glob("*.json"))
        for point in table.points
        if table.signature.epilogue == epilogue
        and point.peers
        and min(time for _, time in point.peers) >= ratio * point.measured[0].microseconds
    }


if __name__ == "__main__":
    main()
