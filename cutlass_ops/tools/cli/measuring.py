"""Arguments of commands that time programs and ops."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from cutlass_ops.declare import gpus, spelling
from cutlass_ops.tools.cli.exits import end
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
    from cutlass_ops.tools.commands import measuring as commands

    code = commands.profile(
        target, arguments or [], dtype=spelling.dtype_of(dtype), kernels=kernels, launches=launches, skip=skip,
        counters=counters, device=device, save=save, plots=plot or [], ncu=not no_ncu, traced=not no_trace,
        timeout=timeout, as_json=as_json,
    )  # fmt: skip
    end(code)


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
    from cutlass_ops.tools.commands import measuring as commands

    code = commands.bench(
        spelling.op_of(op), spelling.problems_of(problems), spelling.dtype_of(dtype), spelling.major_of(a),
        spelling.major_of(b), against=against, rounds=rounds, out=out, html=html, as_json=as_json,
    )  # fmt: skip
    end(code)
