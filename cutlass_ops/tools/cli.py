"""The command line: ``python -m cutlass_ops``, or ``cutlass-ops``.

Exit codes: 0 success, 1 an error or a negative answer, 2 wrong usage, 3 a kernel does not compile, 4 a compiler, GPU,
store or kernel is missing or unusable, 5 a bundle is invalid, 130 interrupted.

This module parses arguments. ``commands.py`` does the work and is imported only when a command runs, because importing
PyTorch takes a second and help and version do not need it.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import itertools
import json
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand

from cutlass_ops.base import resources, units
from cutlass_ops.base.errors import (
    BundleError,
    CompileError,
    ConfigError,
    CutlassOpsError,
    LoadError,
    MissingKernelError,
    NoDeviceError,
    StoreError,
    ToolchainError,
)
from cutlass_ops.declare import gpus, spelling
from cutlass_ops.tools.options import (
    BatchesOf,
    CatalogueName,
    Command,
    FromBundle,
    GroupsOf,
    Jobs,
    Json,
    MajorOf,
    MinimumVersion,
    OpName,
    Problems,
    PublicKeyFiles,
    Where,
    dtypes_of,
    later,
    readable,
    refuse_given,
    require_dtype,
    require_no_empty,
    require_pattern,
    require_time,
    require_version,
    require_wheel,
    spreads_of,
)

app = typer.Typer(
    name="cutlass-ops",
    help="GEMMs with the epilogue you write in Python, as compiled CUTLASS kernels.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # Plain text: the same in a terminal, a pipe and a log, and rich need not be imported.
    rich_markup_mode=None,
)

_EXIT_CODES: dict[type[Exception], int] = {
    CompileError: 3,
    ToolchainError: 4,
    StoreError: 4,
    MissingKernelError: 4,
    NoDeviceError: 4,
    BundleError: 5,
    LoadError: 4,  # other than of a bundle
}
_WRONG_USAGE = 2
_INTERRUPTED = 130


def main() -> None:
    """Run the command line; errors become one message and an exit code."""
    # SIGTERM acts like an interrupt, so that compilers are stopped and nothing is left half-written.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if sys.stderr is None:  # it is closed: messages would go to standard output, into the JSON
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - until the process ends
    elif sys.__stderr__ is not None and sys.stderr is sys.__stderr__:
        sys.stderr = io.TextIOWrapper(
            io.BufferedWriter(_Messages(sys.stderr.fileno(), "w", closefd=False)),
            encoding=sys.stderr.encoding,
            line_buffering=True,
        )
    for stream in (sys.stdout, sys.stderr):
        # Output of compilers and paths may have characters that the locale lacks.
        if isinstance(stream, io.TextIOWrapper):
            ascii_only = codecs.lookup(stream.encoding).name == "ascii"
            # Typer writes UTF-8 there too, but replaces each undecodable byte by a question mark.
            stream.reconfigure(encoding="utf-8" if ascii_only else None, errors="backslashreplace")
    try:
        app()
    except (CutlassOpsError, ValueError, OSError) as exc:
        message = _message(exc)
        typer.echo(f"error: {message}", err=True)
        _say_error(type(exc).__name__, message)
        sys.exit(next((code for kind, code in _EXIT_CODES.items() if isinstance(exc, kind)), 1))
    except KeyboardInterrupt:
        _end_interrupted()
    except SystemExit as exc:
        if exc.code == _INTERRUPTED:
            _end_interrupted()
        if exc.code == _WRONG_USAGE:
            # Typer has printed the message on standard error, and keeps it in the exception.
            said = getattr(exc.__context__, "format_message", lambda: "see standard error")
            _say_error("UsageError", said())
        raise
    except Exception as exc:
        # A defect of this library: print JSON for programs, and the traceback for people.
        _say_error(type(exc).__name__, str(exc))
        raise


class _Messages(io.FileIO):
    """Standard error, where a message that cannot be written is dropped: its failure must not hide the exit code."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


def _message(exc: Exception) -> str:
    if isinstance(exc, OSError) and exc.filename is not None:
        return f"{exc.filename} cannot be used: {exc.strerror}"
    return str(exc)


def _say_error(kind: str, message: str) -> None:
    if _wants_json(sys.argv[1:]):
        # Standard output itself may have failed.
        with contextlib.suppress(OSError):
            typer.echo(json.dumps({"error": {"kind": kind, "message": message}}))


def _wants_json(args: list[str]) -> bool:
    """Whether ``--json`` is this program's own option, and not that of a script, nor what follows ``--``."""
    if args[:1] == ["profile"]:
        command: Any = typer.main.get_command(app)
        args = command.commands["profile"].own(args[1:])
    return "--json" in itertools.takewhile(lambda text: text != "--", args)


def _end_interrupted() -> NoReturn:
    message = "finished kernels stay in the store; nothing is left half-written"
    typer.echo(f"interrupted: {message}", err=True)
    _say_error("KeyboardInterrupt", message)
    sys.exit(_INTERRUPTED)


def _say_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"cutlass_ops {resources.library_version()}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def _end(code: int) -> None:
    if code:
        raise typer.Exit(code)


# ---- Commands ------------------------------------------------------------------------------------------------------


@app.command(cls=Command)
def doctor(as_json: Json = False) -> None:
    """Show which compiler, CUTLASS, GPU and store are used, and why.

    Exit code 0 if a kernel can be compiled or run.
    """
    from cutlass_ops.tools import commands

    _end(commands.doctor(as_json))


@app.command(cls=Command)
def generate(
    catalogue: CatalogueName = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write. Default: generated/ of this installation.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Write nothing. Exit code 1 if anything is stale.")] = False,
    as_json: Json = False,
) -> None:
    """Render a catalogue as C++ files and a manifest."""
    if catalogue is not None and out is None:
        raise typer.BadParameter("--out is missing: name a folder for the sources of this catalogue")
    from cutlass_ops.tools import commands

    _end(commands.generate(catalogue, out, check, as_json))


@app.command(cls=Command)
def build(
    names: Annotated[
        list[str], typer.Argument(metavar="SPEC.json|CATALOGUE...", help="Kernel declarations or catalogues.")
    ],
    jobs: Jobs = None,
    executor: Where = None,
    as_json: Json = False,
) -> None:
    """Compile kernels into the store. Kernels that are already there are not compiled again."""
    from cutlass_ops.tools import commands

    _end(commands.build(names, jobs, executor, as_json))


@app.command(cls=Command)
def bundle(
    catalogue: CatalogueName = None,
    out: Annotated[Path, typer.Option(help="The bundle to write.")] = Path("kernels.bundle"),
    folder: Annotated[bool, typer.Option("--folder", help="Write a folder instead of one file.")] = False,
    sign: Annotated[Path | None, typer.Option(help="PEM file of the Ed25519 private key to sign with.")] = None,
    wheel: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            callback=readable(require_wheel),
            help="Also write a wheel of this name, beside the bundle.",
        ),
    ] = None,
    wheel_version: Annotated[
        str | None, typer.Option(callback=readable(require_version), help="Version of the wheel.")
    ] = None,
    jobs: Jobs = None,
    executor: Where = None,
    as_json: Json = False,
) -> None:
    """Build a catalogue's kernels and pack them. No GPU is needed.

    The bundle also has their sources, choices and tuning tables.
    """
    if wheel is not None and folder:
        raise typer.BadParameter("--wheel and --folder exclude each other: a wheel holds one file")
    if wheel_version is not None and wheel is None:
        raise typer.BadParameter("--wheel-version needs --wheel: name the wheel")
    from cutlass_ops.tools import commands

    code = commands.bundle(
        catalogue, out, folder=folder, sign=sign, wheel=wheel, wheel_version=wheel_version, jobs=jobs,
        executor=executor, as_json=as_json,
    )  # fmt: skip
    _end(code)


@app.command(cls=Command)
def distribution(
    arch: Annotated[
        str,
        typer.Argument(
            metavar="ARCH",
            callback=later("ship.distributing", "require_arch"),
            help="sm_80, sm_86, sm_89 or sm_90a.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder of the wheel.")] = Path("dist"),
    op: Annotated[
        list[str] | None,
        typer.Option(callback=later("ship.distributing", "require_op"), help="Only this named op. May be repeated."),
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(callback=readable(dtypes_of), help="Only this dtype of A and B. May be repeated."),
    ] = None,
    behind: Annotated[
        float,
        typer.Option(
            min=0, max=100, help="A tuned problem may be at most this many percent slower than with its table's kernel."
        ),
    ] = 3.0,
    most: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of kernels of a signature, the most useful ones.")
    ] = None,
    only: Annotated[
        int | None, typer.Option(min=1, help="Compile at most this many of the missing kernels; run again to go on.")
    ] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Print what would be built, and compile nothing.")] = False,
    sign: Annotated[Path | None, typer.Option(help="PEM file of the Ed25519 private key to sign with.")] = None,
    version: Annotated[
        str | None, typer.Option(callback=readable(require_version), help="Version. Default: this library's.")
    ] = None,
    jobs: Jobs = None,
    executor: Where = None,
    as_json: Json = False,
) -> None:
    """Build the distribution of ready kernels for an architecture: a wheel. No GPU is needed.

    Compiled kernels stay in the store, so an interrupted build goes on where it was.
    """
    if plan and only is not None:
        raise typer.BadParameter("--plan and --only exclude each other: --plan compiles nothing")
    if dtype is not None:
        from cutlass_ops.ship import distributing

        try:
            distributing.require_served(arch, op or distributing.OPS, dtypes_of(dtype))
        except ConfigError as exc:
            others = "" if op else ". Name ops that do by --op"
            raise typer.BadParameter(f"{exc}{others}") from None
    from cutlass_ops.tools import commands

    code = commands.distribution(
        arch, out, ops=op, dtypes=None if dtype is None else dtypes_of(dtype), behind=behind / 100, most=most,
        only=only, plan=plan, sign=sign, version=version, jobs=jobs, executor=executor, as_json=as_json,
    )  # fmt: skip
    _end(code)


@app.command(cls=Command)
def verify(
    path: Annotated[Path, typer.Argument(metavar="BUNDLE", help="A bundle: a file or a folder.")],
    key: PublicKeyFiles = None,
    minimum_version: MinimumVersion = None,
    as_json: Json = False,
) -> None:
    """Check everything that a bundle claims.

    Compares hashes, keys, targets, symbols, instructions and the signature. Exit code 5 if anything is wrong.
    """
    from cutlass_ops.tools import commands

    _end(commands.verify(path, key, minimum_version, _EXIT_CODES[BundleError], as_json))


@app.command(cls=Command)
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
        typer.Option("--wgrad", help="Of groups, tune grouped_gemm_wgrad: K is the mean of an expert's rows."),
    ] = False,
    kernels: Annotated[int | None, typer.Option(min=1, help="Most kernels to compile. Default: 48.")] = None,
    candidates: Annotated[
        int | None, typer.Option(min=1, help="Most kernels to race at one problem. Default: 12.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds of each race. Default: 11.")] = None,
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
    again: Annotated[bool, typer.Option("--again", help="Also measure problems measured before.")] = False,
    refine: Annotated[bool, typer.Option("--refine", help="Also try neighbours of the best kernels so far.")] = False,
    allow_fallback: Annotated[
        bool, typer.Option("--allow-fallback", help="Let PyTorch serve calls for which it was faster.")
    ] = False,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Use only kernels that give bit-identical results.")
    ] = False,
    executor: Where = None,
    as_json: Json = False,
) -> None:
    """Measure which kernels are fastest, and keep the result.

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
    from cutlass_ops.tools import commands

    code = commands.tune(
        spelling.op_of(op), spelling.problems_of(problems), dtypes_of(dtypes),
        spelling.major_of(a), spelling.major_of(b),
        batches=batches, groups=groups, spreads=spreads_of(spread or []), wgrad=wgrad,
        effort={name: value for name, value in effort.items() if value is not None} | {"refine": refine},
        folder=folder, again=again, allow_fallback=allow_fallback, deterministic=deterministic, executor=executor,
        as_json=as_json,
    )  # fmt: skip
    _end(code)


@app.command(cls=Command)
def explain(
    op: OpName,
    problems: Problems,
    dtype: Annotated[
        str,
        typer.Option(
            metavar="DTYPE", callback=readable(spelling.dtype_of), help=f"Dtype of A and B: {spelling.DTYPES}."
        ),
    ] = "bf16",
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
    from cutlass_ops.tools import commands

    code = commands.explain(
        spelling.op_of(op), spelling.problems_of(problems), spelling.dtype_of(dtype), spelling.major_of(a),
        spelling.major_of(b), batches=batches, groups=groups,
        device=None if device is None else gpus.gpu_named(device), as_json=as_json,
    )  # fmt: skip
    _end(code)


@app.command(cls=Command)
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
            help="Whose rules: library (CUTLASS, cuBLAS, this library), triton or wmma. Default: library.",
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
    num_warps: Annotated[int, typer.Option(min=1, max=32, help="num_warps of a Triton kernel.")] = 4,
    num_stages: Annotated[int, typer.Option(min=1, max=64, help="num_stages of a Triton kernel.")] = 3,
    as_json: Json = False,
) -> None:
    """Predict which instruction multiplies, and what to change for a faster one. Nothing is compiled.

    Exit code 1 if a condition of the fastest instruction is broken.
    """
    if block is None:
        if program == "triton":
            raise typer.BadParameter("--program triton needs --block, such as --block 128x128x64")
        refuse_given(context, ("num_warps", "num_stages"), "without --block: they are of a Triton kernel, as its tile")
    elif program not in (None, "triton"):
        raise typer.BadParameter(
            f"--block and --program {program} exclude each other: only Triton's choice depends on it"
        )
    else:
        from cutlass_ops.tools.contract.triton import Tile

        readable(lambda text: Tile(*spelling.tile_of(text), num_warps, num_stages))(block)
    if precision is not None:
        from cutlass_ops.tools.contract.given import require_effect

        readable(lambda each: require_effect(each, a, b))(precision)
    from cutlass_ops.tools import commands

    code = commands.contract(
        spelling.problems_of(problems), a, b, arch=arch, program=program, precision=precision,
        block=None if block is None else spelling.tile_of(block), num_warps=num_warps, num_stages=num_stages,
        as_json=as_json,
    )  # fmt: skip
    _end(code)


# Options of `profile` that only ncu heeds, and those of running anything.
_COUNTING = ("kernels", "launches", "skip", "save", "plot")
_RUNNING = ("dtype", "kernels", "launches", "skip", "save", "no_ncu", "no_trace", "timeout")


class _Program(Command):
    """A command that runs a program: what follows a script is the script's own, and an op has nothing of its own.

    So do ``python -m cProfile`` and ``torchrun``.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
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


@app.command(cls=_Program)
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
        str, typer.Option(metavar="DTYPE", callback=readable(spelling.dtype_of), help="Of an op: dtype of A and B.")
    ] = "bf16",
    kernels: Annotated[
        str | None,
        typer.Option(
            metavar="REGEX",
            callback=readable(require_pattern),
            help="Only kernels whose name matches. Fewer take less time.",
        ),
    ] = None,
    launches: Annotated[int | None, typer.Option(min=1, help="Most launches to count.")] = None,
    skip: Annotated[int | None, typer.Option(min=0, help="Launches to skip first.")] = None,
    counters: Annotated[
        Path | None,
        typer.Option("--csv", metavar="FILE", help="Read this CSV of ncu, recorded elsewhere, and run nothing."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(metavar="GPU", callback=readable(gpus.gpu_named), help="With --csv: the GPU, for the roofline."),
    ] = None,
    save: Annotated[Path | None, typer.Option(metavar="FILE", help="Keep ncu's CSV in this file.")] = None,
    plot: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            callback=later("tools.profile.plotting", "require_name"),
            help="Draw the roofline: .svg or .png. May be repeated.",
        ),
    ] = None,
    no_ncu: Annotated[bool, typer.Option("--no-ncu", help="Take times by torch.profiler only.")] = False,
    no_trace: Annotated[bool, typer.Option("--no-trace", help="Take no times by torch.profiler.")] = False,
    timeout: Annotated[
        float, typer.Option(callback=readable(require_time), help="Seconds until a run is ended.")
    ] = 1800.0,
    as_json: Json = False,
) -> None:
    """Count what the kernels of a program do, with Nsight Compute, and say what limits each.

    Works with any PyTorch script. Exit code 4 if there are no counters: times by torch.profiler are printed then.
    """
    if no_ncu and no_trace:
        raise typer.BadParameter("--no-ncu and --no-trace exclude each other: nothing would be measured")
    if (target is None) == (counters is None):
        raise typer.BadParameter("give a script or an op to run, or --csv with counters that ncu wrote; not both")
    if no_ncu:
        refuse_given(context, _COUNTING, "with --no-ncu: ncu alone counts, and selects kernels")
    if counters is not None:
        refuse_given(context, _RUNNING, "with --csv: nothing runs")
    else:
        refuse_given(context, ("device",), "without --csv: kernels run on this machine's GPU")
    if target is not None and spelling.is_script(target):
        refuse_given(context, ("dtype",), "on a script: it is an op's")
    elif target is not None:
        name = readable(spelling.op_of)(target)
        if not arguments:
            raise typer.BadParameter(f"give M, N and K of {name}, such as 512x4096x4096")
        readable(spelling.problem_of)(arguments)
        require_dtype(spelling.op_of(name), [spelling.dtype_of(dtype)])
    from cutlass_ops.tools import commands

    code = commands.profile(
        target, arguments or [], dtype=spelling.dtype_of(dtype), kernels=kernels, launches=launches, skip=skip,
        counters=counters, device=device, save=save, plots=plot or [], ncu=not no_ncu, traced=not no_trace,
        timeout=timeout, as_json=as_json,
    )  # fmt: skip
    _end(code)


@app.command(cls=Command)
def bench(
    op: OpName,
    problems: Problems,
    dtype: Annotated[
        str,
        typer.Option(
            metavar="DTYPE", callback=readable(spelling.dtype_of), help=f"Dtype of A and B: {spelling.DTYPES}."
        ),
    ] = "bf16",
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
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds that count. Default: 25.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the result as JSON to this file.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write one HTML page with plots to this file.")] = None,
    as_json: Json = False,
) -> None:
    """Time an op against cuBLASLt, eager PyTorch, torch.compile, Triton and quack on this GPU.

    All are interleaved, in CUDA graphs and as single launches between other kernels.
    """
    require_dtype(spelling.op_of(op), [spelling.dtype_of(dtype)])
    from cutlass_ops.tools import commands

    code = commands.bench(
        spelling.op_of(op), spelling.problems_of(problems), spelling.dtype_of(dtype), spelling.major_of(a),
        spelling.major_of(b), against=against, rounds=rounds, out=out, html=html, as_json=as_json,
    )  # fmt: skip
    _end(code)


@app.command(name="list", cls=Command)
def list_kernels(
    in_bundle: FromBundle = None,
    key: PublicKeyFiles = None,
    minimum_version: MinimumVersion = None,
    installed: Annotated[bool, typer.Option("--installed", help="List installed distributions of kernels.")] = False,
    as_json: Json = False,
) -> None:
    """List the kernels in the store, in a bundle, or in installed distributions."""
    if installed and in_bundle is not None:
        raise typer.BadParameter("--installed and --bundle exclude each other")
    _require_bundle(in_bundle, key, minimum_version)
    from cutlass_ops.tools import commands

    _end(commands.list_kernels(in_bundle, key, minimum_version, installed, as_json))


@app.command(cls=Command)
def inspect(
    kernels: Annotated[
        list[str], typer.Argument(metavar="KERNEL...", help="A kernel's folder, or the beginning of its key or slug.")
    ],
    in_bundle: FromBundle = None,
    key: PublicKeyFiles = None,
    minimum_version: MinimumVersion = None,
    as_json: Json = False,
) -> None:
    """Report on compiled kernels.

    Shows Tensor Core instructions, registers, shared memory, spills, stages and occupancy.
    """
    _require_bundle(in_bundle, key, minimum_version)
    from cutlass_ops.tools import commands

    _end(commands.inspect(kernels, in_bundle, key, minimum_version, as_json))


def _require_bundle(in_bundle: Path | None, key: list[Path] | None, minimum_version: int | None) -> None:
    if in_bundle is not None:
        return
    if key:
        raise typer.BadParameter("--key needs --bundle: kernels in the store are not signed")
    if minimum_version is not None:
        raise typer.BadParameter("--minimum-version needs --bundle: kernels in the store have no version")


@app.command(cls=Command)
def clean(
    older_than: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            callback=readable(lambda text: units.duration(text, "--older-than")),
            help="Remove only kernels unused for this long, such as 30d or 12h.",
        ),
    ] = None,
    keep_size: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            callback=readable(lambda text: units.size(text, "--keep-size")),
            help="Remove the least recently used kernels beyond this size, such as 1GB.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Remove kernels from the store: all, or unused ones."""
    from cutlass_ops.tools import commands

    unused_for = None if older_than is None else units.duration(older_than, "--older-than")
    keep = None if keep_size is None else units.size(keep_size, "--keep-size")
    _end(commands.clean(unused_for, keep, as_json))


@app.command(cls=Command)
def cmakedir(as_json: Json = False) -> None:
    """Print the folder of the CMake package.

    C++ programs use it to open bundles.
    """
    from cutlass_ops.tools import commands

    _end(commands.cmakedir(as_json))
