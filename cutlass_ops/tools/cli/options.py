"""The command line's arguments: how they are read and checked, and those that several commands have."""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from cutlass_ops.base import env, executors
from cutlass_ops.declare import spelling
from cutlass_ops.declare.problem import MOST_EXTENT

# ---- Reading ---------------------------------------------------------------------------------------------------------


def readable(read: Callable[[Any], object]) -> Callable[[Any], Any]:
    """Return a check that reports a value that `read` refuses as wrong usage."""

    def check(value: Any) -> Any:
        try:
            if value is not None:
                read(value)
        except ValueError as exc:
            raise typer.BadParameter(str(exc)) from None
        return value

    return check


def dtypes_of(texts: list[str]) -> list[str]:
    """Read dtypes, separated by commas as well; each once.

    Raises
    ------
    ValueError
        If one is no operand's.
    """
    return list(dict.fromkeys(spelling.dtype_of(each) for text in texts for each in text.split(",")))


def spreads_of(texts: list[str]) -> tuple[str, ...]:
    """Read how rows are spread over groups, separated by commas as well.

    Raises
    ------
    ValueError
        If one has no such name.
    """
    from cutlass_ops.kinds import spreads

    return spreads.in_order([each for text in texts for each in text.split(",")])


def later(module: str, name: str) -> Callable[[Any], Any]:
    """Return a check of a value, or of each of several, by a function of a module that is imported with it."""

    def read(value: Any) -> None:
        require = getattr(importlib.import_module(f"cutlass_ops.{module}"), name)
        for each in value if isinstance(value, list) else [value]:
            require(each)

    return readable(read)


def require_dtype(op: str, dtypes: list[str], groups: int | None = None) -> None:
    """Require dtypes that an op takes; with groups, if there are any."""
    for dtype in dtypes:
        readable(lambda each: spelling.epilogue_of(op, each))(dtype)
        if groups is not None:
            readable(lambda each: spelling.require_groups(op, each))(dtype)


def refuse_given(context: typer.Context, names: Sequence[str], why: str) -> None:
    """Refuse options that were given and would have no effect. The message names them, and then says why."""
    options = {param.name: param.opts[0] for param in context.command.params}
    given = [name for name in names if _is_given(context, name)]
    if given:
        verb = "has" if len(given) == 1 else "have"
        raise typer.BadParameter(f"{' and '.join(options[name] for name in given)} {verb} no effect {why}")


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def require_pattern(text: str) -> None:
    """Require a regular expression; raise ValueError otherwise."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about what later versions of Python may read otherwise
            re.compile(text)
    except (re.error, OverflowError, RecursionError) as exc:
        raise ValueError(f"{text!r} is not a regular expression: {exc}") from None


def require_time(seconds: float) -> None:
    """Require a positive time; raise ValueError otherwise."""
    if not seconds > 0:
        raise ValueError(f"{seconds} is not a time: pass a positive number of seconds")


def require_wheel(name: str) -> None:
    """Require a name that a package may have; raise ValueError otherwise."""
    from cutlass_ops.ship import packing

    packing.require_wheel(name, None)


def require_version(version: str) -> None:
    """Require a version that a package may have; raise ValueError otherwise."""
    from cutlass_ops.ship import packing

    packing.require_wheel("name", version)


def require_no_empty(args: Sequence[str]) -> None:
    """Refuse an empty argument."""
    if "" in args:
        raise typer.BadParameter("an argument is empty: give it a value. Is a shell variable not set?")


class Command(TyperCommand):
    """A command whose arguments are not empty: an empty path would be the current folder."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse arguments, none of which may be empty."""
        require_no_empty(args)
        return super().parse_args(ctx, args)


# ---- Arguments of several commands -----------------------------------------------------------------------------------

Json = Annotated[bool, typer.Option("--json", help="Print one JSON value instead of lines.")]
CatalogueName = Annotated[
    str | None,
    typer.Argument(metavar="[CATALOGUE]", help="A TOML or Python file, or MODULE:NAME. Default: the library's own."),
]
Jobs = Annotated[
    int | None,
    typer.Option(
        min=1, help=f"Kernels to compile at the same time. Default: {env.JOBS.name}, else the number of CPUs."
    ),
]
Where = Annotated[
    str | None,
    typer.Option(
        "--executor",
        metavar="EXECUTOR",
        callback=readable(executors.require_named),
        help=f"Where to compile: {executors.FORMS}. Default: this process.",
    ),
]
PublicKeyFiles = Annotated[
    list[Path] | None,
    typer.Option(
        "--key",
        help=f"PEM file of an Ed25519 public key. If repeated, any of them may sign. Default: {env.BUNDLE_KEY.name}.",
    ),
]
MinimumVersion = Annotated[
    int | None,
    typer.Option(
        min=1, help=f"Refuse a bundle with a lower version or without one. Default: {env.BUNDLE_VERSION.name}."
    ),
]
FromBundle = Annotated[Path | None, typer.Option("--bundle", help="Use this bundle instead of the store.")]
OpName = Annotated[
    str,
    typer.Argument(
        metavar="OP",
        callback=readable(spelling.op_of),
        help=f"{', '.join(spelling.OPS)}, or MODULE:NAME of your own epilogue.",
    ),
]
Problems = Annotated[
    list[str],
    typer.Argument(
        metavar="MxNxK...",
        callback=readable(spelling.problems_of),
        help="Problems such as 512x4096x4096. M, N and K may each be a list, such as 1,16,64x4096x4096.",
    ),
]
BatchesOf = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=MOST_EXTENT,
        help="Number of batches: A is (batches, M, K), B is (batches, K, N). Default: one B.",
    ),
]
GroupsOf = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=MOST_EXTENT,
        help="Number of experts of grouped_gemm. M is then the mean number of rows of an expert. Default: no groups.",
    ),
]
DtypeOf = Annotated[
    str,
    typer.Option(
        "--dtype",  # typer 0.27 names an option after a metavar that is alike: --DTYPE
        metavar="DTYPE",
        callback=readable(spelling.dtype_of),
        help=f"Dtype of A and B: {spelling.DTYPES}.",
    ),
]
MajorOf = Annotated[
    str,
    typer.Option(
        metavar="MAJOR",
        callback=readable(spelling.major_of),
        help="Major of the operand: row or col. A weight (N, K) passed as weight.t() is col.",
    ),
]
