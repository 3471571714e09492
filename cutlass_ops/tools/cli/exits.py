"""Exit codes of the command line."""

from __future__ import annotations

import typer

from cutlass_ops.base.errors import (
    BundleError,
    CompileError,
    LoadError,
    MissingKernelError,
    NoDeviceError,
    StoreError,
    ToolchainError,
)

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


def end(code: int) -> None:
    """End a command with an exit code."""
    if code:
        raise typer.Exit(code)
