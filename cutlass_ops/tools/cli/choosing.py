"""Arguments of commands about which kernel or instruction serves a problem."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cutlass_ops.declare import gpus, spelling
from cutlass_ops.tools.cli.exits import end
from cutlass_ops.tools.cli.options import (
    BatchesOf,
    DtypeOf,
    GroupsOf,
    Json,
    MajorOf,
    OpName,
    Problems,
    Where,
    dtypes_of,
    later,
    readable,
    require_dtype,
    require_time,
    spreads_of,
)


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
            "--wgrad", help="With --groups: tune grouped_gemm_wgrad. K is the mean number of rows of an expert."
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
        raise typer.BadParameter(f"{option} needs --groups: say how many experts there are")
    if groups is not None and batches is not None:
        raise typer.BadParameter("--groups and --batches exclude each other: a call has one of them")
    if groups is not None and allow_fallback:
        raise typer.BadParameter("--groups and --allow-fallback exclude each other: PyTorch serves no groups")
    require_dtype(spelling.op_of(op), dtypes_of(dtypes), groups)
    effort = {"kernels": kernels, "candidates": candidates, "rounds": rounds, "seconds": seconds}
    from cutlass_ops.tools.commands import choosing as commands

    code = commands.tune(
        spelling.op_of(op), spelling.problems_of(problems), dtypes_of(dtypes),
        spelling.major_of(a), spelling.major_of(b),
        batches=batches, groups=groups, spreads=spreads_of(spread or []), wgrad=wgrad,
        effort={name: value for name, value in effort.items() if value is not None} | {"refine": refine},
        folder=folder, again=again, allow_fallback=allow_fallback, deterministic=deterministic, executor=executor,
        as_json=as_json,
    )  # fmt: skip
    end(code)


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
    require_dtype(spelling.op_of(op), [spelling.dtype_of(dtype)], groups)
    from cutlass_ops.tools.commands import choosing as commands

    code = commands.explain(
        spelling.op_of(op), spelling.problems_of(problems), spelling.dtype_of(dtype), spelling.major_of(a),
        spelling.major_of(b), batches=batches, groups=groups,
        device=None if device is None else gpus.gpu_named(device), as_json=as_json,
    )  # fmt: skip
    end(code)


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
    from cutlass_ops.tools.commands import choosing as commands

    code = commands.contract(
        spelling.problems_of(problems), a, b, arch=arch, program=program, precision=precision,
        block=None if block is None else spelling.tile_of(block), num_warps=num_warps, num_stages=num_stages,
        as_json=as_json,
    )  # fmt: skip
    end(code)
