"""The command line's arguments, answers and exit codes: what several commands share."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import re
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from cutlass_ops.base import env, executors
from cutlass_ops.base.errors import (
    BundleError,
    CompileError,
    LoadError,
    MissingKernelError,
    NoDeviceError,
    StoreError,
    ToolchainError,
)
from cutlass_ops.declare import spelling
from cutlass_ops.declare.problem import MOST_EXTENT

EXIT_CODES: dict[type[Exception], int] = {
    CompileError: 3,
    ToolchainError: 4,
    StoreError: 4,
    MissingKernelError: 4,
    NoDeviceError: 4,
    BundleError: 5,
    LoadError: 4,  # other than of a bundle
}
WRONG_USAGE = 2
INTERRUPTED = 130

# ---- Answers ---------------------------------------------------------------------------------------------------------


def show(as_json: bool, value: Any, *lines: str, code: int = 0) -> None:
    """Print an answer as JSON or as lines, and end the command with an exit code."""
    for line in [json.dumps(_finite(value), indent=1)] if as_json else lines:
        print(line, flush=True)
    if code:
        raise typer.Exit(code)


def _finite(value: Any) -> Any:
    """Return a JSON value with null for what JSON has no number, such as the time of a kernel that cannot run."""
    if isinstance(value, dict):
        return {name: _finite(x) for name, x in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def compiling_on(name: str | None) -> contextlib.AbstractContextManager[Executor | None]:
    """Return the place to compile: an executor by its name, or this process without a name."""
    return contextlib.nullcontext() if name is None else executors.named(name)


def required(key: list[Path] | None, minimum_version: int | None) -> tuple[Sequence[Path] | None, int | None]:
    """Return the required keys and version of a bundle: from the command line, else from the environment."""
    least = env.bundle_version() if minimum_version is None else minimum_version
    return key or env.bundle_keys(), least


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
    """Read dtypes, each once; commas may separate them. Raises ValueError if no operand has one of them."""
    return list(dict.fromkeys(spelling.dtype_of(each) for text in texts for each in text.split(",")))


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
        help="Number of groups, as co.Groups has. M is then the mean number of rows of a group. Default: no groups.",
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
