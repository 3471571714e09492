"""Arguments of commands that time programs and ops."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from cutlass_ops.declare import gpus, spelling
from cutlass_ops.tools.cli.options import (
    Command,
    DtypeOf,
    Json,
    MajorOf,
    OpName,
    Problems,
    later,
    readable,
    refuse_given,
    require_dtype,
    require_no_empty,
    require_pattern,
    require_time,
    show,
)

# Options of `profile` that only ncu heeds, and those of running anything.
_COUNTING = ("kernels", "launches", "skip", "save", "plot")
_RUNNING = ("dtype", "kernels", "launches", "skip", "save", "no_ncu", "no_trace", "timeout")


class Program(Command):
    """A command that runs a program: what follows a script is the script's own, and an op has nothing of its own.

    So do ``python -m cProfile`` and ``torchrun``.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse arguments, none of which may be empty up to a script."""
        own = self.own(args)
        ctx.allow_interspersed_args = not (own and spelling.is_script(own[-1]))
        require_no_empty(own)
        return TyperCommand.parse_args(self, ctx, args)

    def own(self, args: list[str]) -> list[str]:
        """Return the arguments of this command: all up to a script, or all if there is none."""
        takes_value = {name for param in self.params if not getattr(param, "is_flag", True) for name in param.opts}
        rest = iter(enumerate(args, 1))
        for count, text in rest:
            if text in takes_value:
                next(rest, None)
            elif not text.startswith("-"):
                return args[:count] if spelling.is_script(text) else args
        return args


def profile(
    context: typer.Context,
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="SCRIPT|OP", help="A Python script, or an op and its problem. Options come before a script."
        ),
    ] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGUMENT|MxNxK]...", help="The script's arguments, or the problem.")
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype", metavar="DTYPE", callback=readable(spelling.dtype_of), help="For an op: dtype of A and B."
        ),
    ] = "bf16",
    kernels: Annotated[
        str | None,
        typer.Option(
            metavar="REGEX",
            callback=readable(require_pattern),
            help="Profile only kernels whose name matches. ncu runs each kernel several times, so select few.",
        ),
    ] = None,
    launches: Annotated[int | None, typer.Option(min=1, help="Maximum number of launches to profile.")] = None,
    skip: Annotated[int | None, typer.Option(min=0, help="Number of launches to skip first.")] = None,
    counters: Annotated[
        Path | None,
        typer.Option("--csv", metavar="FILE", help="Read this CSV of ncu, recorded elsewhere, and run nothing."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(metavar="GPU", callback=readable(gpus.gpu_named), help="With --csv: the GPU, for the roofline."),
    ] = None,
    save: Annotated[Path | None, typer.Option(metavar="FILE", help="Save ncu's CSV in this file.")] = None,
    plot: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            callback=later("tools.profile.plotting", "require_name"),
            help="Draw the roofline: .svg or .png. May be repeated.",
        ),
    ] = None,
    no_ncu: Annotated[
        bool, typer.Option("--no-ncu", help="Only measure times by torch.profiler; do not run ncu.")
    ] = False,
    no_trace: Annotated[
        bool, typer.Option("--no-trace", help="Do not measure times by torch.profiler; only run ncu.")
    ] = False,
    timeout: Annotated[
        float, typer.Option(callback=readable(require_time), help="Seconds after which a run is stopped.")
    ] = 1800.0,
    as_json: Json = False,
) -> None:
    """Profile the kernels of a program with Nsight Compute, and say what limits each.

    Works with any PyTorch script. If ncu cannot read counters, it prints times by torch.profiler, and
    its exit code is 4.
    """
    if no_ncu and no_trace:
        raise typer.BadParameter("--no-ncu and --no-trace exclude each other: nothing would be measured")
    if (target is None) == (counters is None):
        raise typer.BadParameter("give a script or an op to run, or --csv with counters that ncu wrote; not both")
    if no_ncu:
        refuse_given(context, _COUNTING, "with --no-ncu: only ncu reads counters and selects kernels")
    if counters is not None:
        refuse_given(context, _RUNNING, "with --csv: nothing runs")
    else:
        refuse_given(context, ("device",), "without --csv: kernels run on this machine's GPU")
    if target is not None and spelling.is_script(target):
        refuse_given(context, ("dtype",), "on a script: it is only for an op")
    elif target is not None:
        name = readable(spelling.op_of)(target)
        if not arguments:
            raise typer.BadParameter(f"give M, N and K of {name}, such as 512x4096x4096")
        readable(spelling.problem_of)(arguments)
        require_dtype(spelling.op_of(name), [spelling.dtype_of(dtype)])
    from cutlass_ops.base.errors import ConfigError
    from cutlass_ops.tools.profile import plotting, profiling

    for path in plot or []:
        plotting.require(path)
    if counters is not None or target is None:
        report, refusal = profiling.read(counters or Path(), device), None
    else:
        asked = profiling.Asked(
            target, tuple(arguments or ()), spelling.dtype_of(dtype), kernels, launches, skip, not no_ncu,
            not no_trace, timeout,
        )  # fmt: skip
        report, refusal = profiling.run(asked, save)
    for path in plot or []:
        if report.chip is None or not report.points():
            raise ConfigError(f"{path} was not drawn: a roofline needs counters of ncu, and a known GPU (--device)")
        plotting.roofline(report.points(), report.chip, path)
    value = report.to_json() | ({"refusal": refusal.why, "command": list(refusal.command)} if refusal else {})
    show(as_json, value, *report.lines(), *(["", str(refusal)] if refusal else []), code=4 if refusal else 0)


def bench(
    op: OpName,
    problems: Problems,
    dtype: DtypeOf = "bf16",
    a: MajorOf = "row",
    b: MajorOf = "col",
    against: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            callback=later("tools.bench.benching", "require_way"),
            help="eager, cublaslt, compile, triton or quack. May be repeated. Default: all.",
        ),
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Number of measured rounds. Default: 25.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the result as JSON to this file.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write one HTML page with plots to this file.")] = None,
    as_json: Json = False,
) -> None:
    """Time an op against cuBLASLt, eager PyTorch, torch.compile, Triton and quack on this GPU.

    All are interleaved, in CUDA graphs and as single launches between other kernels.
    """
    require_dtype(spelling.op_of(op), [spelling.dtype_of(dtype)])
    from cutlass_ops.base import disk
    from cutlass_ops.tools.bench import benching, rivals
    from cutlass_ops.tuner.comparing import ROUNDS

    for path in (out, html):
        if path is not None:
            disk.require_file(path)
    found = benching.bench(
        spelling.op_of(op), [p.extents for p in spelling.problems_of(problems)], dtype=dtype, a=a, b=b,
        against=against or rivals.NAMES, rounds=ROUNDS if rounds is None else rounds,
    )  # fmt: skip
    value = found.to_json()
    if out is not None:
        out.write_text(json.dumps(value, indent=1) + "\n")
    if html is not None:
        html.write_text(found.html())
    show(as_json, value, *found.lines())
