"""The program: which commands it has, and how it ends."""

from __future__ import annotations

import codecs
import contextlib
import io
import itertools
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Annotated, Any, NoReturn

import typer

from cutlass_ops.base import resources
from cutlass_ops.base.errors import CutlassOpsError
from cutlass_ops.tools.cli import choosing, kernels, measuring, shipping
from cutlass_ops.tools.cli.options import EXIT_CODES, INTERRUPTED, WRONG_USAGE, Command

app = typer.Typer(
    name="cutlass-ops",
    help="Compile, tune and ship CUTLASS GEMM kernels with epilogues written in Python.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # Plain text: the same in a terminal, a pipe and a log, and rich need not be imported.
    rich_markup_mode=None,
)

# In the order in which help lists them.
_COMMANDS: tuple[Callable[..., None], ...] = (
    kernels.doctor,
    kernels.generate,
    kernels.build,
    shipping.bundle,
    shipping.distribution,
    shipping.verify,
    choosing.tune,
    choosing.explain,
    choosing.contract,
    measuring.profile,
    measuring.bench,
    kernels.list_kernels,
    kernels.inspect,
    kernels.clean,
    kernels.cmakedir,
)
_NAMES = {kernels.list_kernels: "list"}
_CLASSES = {measuring.profile: measuring.Program}
for _command in _COMMANDS:
    app.command(_NAMES.get(_command), cls=_CLASSES.get(_command, Command))(_command)


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
        sys.exit(next((code for kind, code in EXIT_CODES.items() if isinstance(exc, kind)), 1))
    except KeyboardInterrupt:
        _end_interrupted()
    except SystemExit as exc:
        if exc.code == INTERRUPTED:
            _end_interrupted()
        if exc.code == WRONG_USAGE:
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
    sys.exit(INTERRUPTED)


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
