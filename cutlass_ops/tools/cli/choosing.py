"""Arguments of commands about which kernel or instruction serves a problem."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from cutlass_ops.declare import gpus, spelling
from cutlass_ops.declare.problem import Problem
from cutlass_ops.tools.cli.options import (
    BatchesOf,
    DtypeOf,
    GroupsOf,
    Json,
    MajorOf,
    OpName,
    Problems,
    Where,
    compiling_on,
    dtypes_of,
    later,
    readable,
    require_dtype,
    require_time,
    show,
)


def spreads_of(texts: list[str]) -> tuple[str, ...]:
    """Read how rows are spread over groups; commas may separate the names. Raises ValueError for an unknown name."""
    from cutlass_ops.kinds import spreads

    return spreads.in_order([each for text in texts for each in text.split(",")])


def tune(
    op: OpName,
    problems: Problems,
    dtypes: Annotated[
        list[str],
        typer.Option(
            "--dtype", metavar="DTYPE", callback=readable(dtypes_of), help=f"{spelling.DTYPES}. May be repeated."
        ),
    ] = ["bf16"],  # noqa: B006
    a: MajorOf = "row",
    b: MajorOf = "col",
    batches: BatchesOf = None,
    groups: GroupsOf = None,
    spread: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            callback=readable(spreads_of),
            help="How rows are spread over the groups: equal, random, Zipf or one. May be repeated. Default: all.",
        ),
    ] = None,
    wgrad: Annotated[
        bool,
        typer.Option(
            "--wgrad", help="With --groups: tune the gradient of weights. K is the mean number of rows of a group."
        ),
    ] = False,
    kernels: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of kernels to compile. Default: 48.")
    ] = None,
    candidates: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of kernels to time at each problem. Default: 12.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds in which kernels are timed. Default: 11.")] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            callback=readable(require_time),
            help="Start no problem after this many seconds. Default: no limit.",
        ),
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(help="Folder of the tables. Default: where calls look for them.")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Measure again what was measured before.")] = False,
    refine: Annotated[
        bool, typer.Option("--refine", help="Search around the fastest kernels of earlier runs.")
    ] = False,
    allow_fallback: Annotated[
        bool, typer.Option("--allow-fallback", help="Let PyTorch serve the problems at which it was faster.")
    ] = False,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Use only kernels that all give the same bits (none that split K).")
    ] = False,
    executor: Where = None,
    as_json: Json = False,
) -> None:
    """Measure which kernels are fastest on this GPU, and keep the result for later calls.

    A stopped run continues where it ended. Exit code 1 if a problem failed or time ran out.
    """
    if allow_fallback and deterministic:
        raise typer.BadParameter(
            "--allow-fallback and --deterministic exclude each other: PyTorch's results differ in the last bits"
        )
    if groups is None and (spread or wgrad):
        option = "--spread" if spread else "--wgrad"
        raise typer.BadParameter(f"{option} needs --groups: say how many groups there are")
    if groups is not None and batches is not None:
        raise typer.BadParameter("--groups and --batches exclude each other: a call has one of them")
    if groups is not None and allow_fallback:
        raise typer.BadParameter("--groups and --allow-fallback exclude each other: PyTorch serves no groups")
    name, several, each_dtype = spelling.op_of(op), spelling.problems_of(problems), dtypes_of(dtypes)
    require_dtype(name, each_dtype, groups)
    limits = {"kernels": kernels, "candidates": candidates, "rounds": rounds, "seconds": seconds}
    from cutlass_ops.base import env
    from cutlass_ops.base.units import counted
    from cutlass_ops.choose import tables
    from cutlass_ops.tools.workload import epilogue_named
    from cutlass_ops.tuner import tuning

    where = folder.absolute() if folder else env.tuning_dir()
    for problem in several:
        _of_batches(problem, batches or groups)
    effort = tuning.Effort(**{n: x for n, x in limits.items() if x is not None}, refine=refine)  # type: ignore[arg-type]
    report, began = tuning.Report(), time.monotonic()
    # One op is tuned for all dtypes at once. Norms have another op for each dtype.
    named = {dtype: epilogue_named(name, dtype) for dtype in each_dtype}
    with compiling_on(executor) as pool:
        for each in dict.fromkeys(named.values()):
            left = effort.seconds - (time.monotonic() - began) if report.tables else effort.seconds
            found = tuning.tune(
                each, several, dtypes=[dtype for dtype in named if named[dtype] == each], a=spelling.major_of(a),
                b=spelling.major_of(b), batches=batches, groups=groups, spreads=spreads_of(spread or []),
                wgrad=wgrad,
                input_dtypes=spelling.INPUT_DTYPES.get(name), effort=replace(effort, seconds=left),
                folder=where if folder else None, again=again, allow_fallback=allow_fallback,
                deterministic=deterministic, executor=pool,
            )  # fmt: skip
            report.tables |= found.tables
            report.failed |= found.failed
            report.measured, report.known = report.measured + found.measured, report.known + found.known
            report.left, report.asked = report.left + found.left, report.asked + found.asked
    files = [str(tables.path_of(where, t.device, s)) for s, t in report.tables.items() if t.points]
    counts = {"measured": report.measured, "known": report.known, "left": report.left, "tables": files}
    lines = [f"failed: {name}: {why}" for name, why in report.failed.items()]
    lines += [f"table: {file}" for file in files]
    summary = f"{counted(report.measured, 'problem')} measured, {report.known} known before, {report.left} left"
    code = 1 if report.measured + report.known < report.asked else 0
    show(as_json, counts | {"failed": report.failed}, *lines, summary, code=code)


def _of_batches(problem: Problem, batches: int | None) -> Problem:
    """Return a problem of ``batches`` batches, or groups. Raises ConfigError if no memory could hold it."""
    return Problem.from_json([*problem.extents, batches or 1])


def explain(
    op: OpName,
    problems: Problems,
    dtype: DtypeOf = "bf16",
    a: MajorOf = "row",
    b: MajorOf = "col",
    batches: BatchesOf = None,
    groups: GroupsOf = None,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="GPU",
            callback=readable(gpus.gpu_named),
            help="The GPU to explain for, such as H200 or sm_80. Default: this machine's GPU, else an H100.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show which kernel serves a problem, its expected time, and why.

    Exit code 1 if nothing serves one.
    """
    if groups is not None and batches is not None:
        raise typer.BadParameter("--groups and --batches exclude each other: a call has one of them")
    name, dtype = spelling.op_of(op), spelling.dtype_of(dtype)
    require_dtype(name, [dtype], groups)
    import torch

    from cutlass_ops.declare.chips import USUAL
    from cutlass_ops.declare.form import BATCHED, DENSE, GROUPED
    from cutlass_ops.operand.call import call_at, device_of
    from cutlass_ops.run import gated
    from cutlass_ops.run.ops import graph_op
    from cutlass_ops.tools.explaining import explain_call
    from cutlass_ops.tools.workload import epilogue_named

    here, note = torch.cuda.is_available(), []
    if device is not None:
        explained_for = gpus.gpu_named(device)
    elif here:
        explained_for = device_of(torch.device("cuda", torch.cuda.current_device()))
    else:
        explained_for = USUAL.device
        note = [f"\nno CUDA device here: explained for {explained_for.name} (--device names another)"]
    form = DENSE if batches is groups is None else BATCHED if groups is None else GROUPED
    inputs, graph = spelling.INPUT_DTYPES.get(name), epilogue_named(name, dtype).graph
    # Only the op knows that two GEMMs serve calls for which no kernel takes both weights, or a GEMM for each batch.
    known = gated.swiglu_op(None) if name == "gemm_swiglu" else graph_op(name, graph) if form == BATCHED else None
    found = []
    for problem in [_of_batches(problem, batches or groups) for problem in spelling.problems_of(problems)]:
        majors = spelling.major_of(a), spelling.major_of(b)
        call = call_at(graph, problem, dtype, *majors, input_dtypes=inputs, form=form)
        found.append(explain_call(name, call, explained_for, known))
    code = 0 if all(each.is_served for each in found) else 1
    show(as_json, [each.to_json() for each in found], "\n\n".join(map(str, found)), *note, code=code)


def contract(
    context: typer.Context,
    problems: Problems,
    a: Annotated[
        str,
        typer.Option(
            metavar="OPERAND",
            callback=later("tools.contract.given", "require_text"),
            help="A (M, K): type and major, such as f16.row or bf16.row.align4.",
        ),
    ] = "bf16.row",
    b: Annotated[
        str,
        typer.Option(
            metavar="OPERAND",
            callback=later("tools.contract.given", "require_text"),
            help="B (K, N). A weight (N, K) passed as weight.t() is col.",
        ),
    ] = "bf16.col",
    arch: Annotated[
        str | None,
        typer.Option(
            callback=later("tools.contract.predicting", "where"),
            help="sm_70 to sm_120, or a GPU such as H200. Default: this machine's GPU, else sm_90.",
        ),
    ] = None,
    program: Annotated[
        str | None,
        typer.Option(
            callback=later("tools.contract.predicting", "require_program"),
            help="Kind of program: library (this one, CUTLASS, cuBLAS), triton or wmma. Default: library.",
        ),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            callback=later("tools.contract.predicting", "require_precision"),
            help="How FP32 operands are multiplied: ieee, tf32 or tf32x3. Default: ieee.",
        ),
    ] = None,
    block: Annotated[
        str | None,
        typer.Option(
            metavar="MxNxK",
            callback=readable(spelling.tile_of),
            help="BLOCK_M, BLOCK_N and BLOCK_K of a Triton kernel, such as 128x128x64.",
        ),
    ] = None,
    num_warps: Annotated[
        int | None, typer.Option(min=1, max=32, help="num_warps of a Triton kernel. Default: 4.")
    ] = None,
    num_stages: Annotated[
        int | None, typer.Option(min=1, max=64, help="num_stages of a Triton kernel. Default: 3.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Predict which instruction a GEMM will run, and what to change for a faster one. Nothing is compiled.

    Exit code 1 if a condition of the fastest instruction is broken.
    """
    from cutlass_ops.tools.contract import triton

    if block is None and program == "triton":
        raise typer.BadParameter("--program triton needs --block, such as --block 128x128x64")
    given = {"--num-warps": num_warps, "--num-stages": num_stages}
    readable(lambda is_given: triton.require_effect("--block", is_given, program, given))(block is not None)
    readable(lambda text: triton.Tile.of(spelling.tile_of(text), num_warps, num_stages))(block)
    if precision is not None:
        from cutlass_ops.tools.contract.given import require_effect

        readable(lambda each: require_effect(each, a, b))(precision)
    from cutlass_ops.tools.contract import predicting

    extents = () if block is None else spelling.tile_of(block)
    tile = dict(zip(("block_m", "block_n", "block_k"), extents, strict=False))
    found = [
        predicting.contract(
            a, b, m=problem.m, n=problem.n, k=problem.k, arch=arch, program=program, precision=precision, **tile,
            num_warps=num_warps, num_stages=num_stages,
        )
        for problem in spelling.problems_of(problems)
    ]  # fmt: skip
    code = 0 if all(each.kept for each in found) else 1
    show(as_json, [each.to_json() for each in found], "\n\n".join(map(str, found)), code=code)
