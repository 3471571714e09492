"""The errors of this library: each is a ``CutlassOpsError``, and says what to do."""

from __future__ import annotations

from cutlass_ops.base.errors import (
    BundleError,
    CompileError,
    ConfigError,
    CutlassOpsError,
    EpilogueError,
    LoadError,
    MeasuringError,
    MissingKernelError,
    NoDeviceError,
    StoreError,
    ToolchainError,
    UnsupportedError,
)

__all__ = [
    "BundleError",
    "CompileError",
    "ConfigError",
    "CutlassOpsError",
    "EpilogueError",
    "LoadError",
    "MeasuringError",
    "MissingKernelError",
    "NoDeviceError",
    "StoreError",
    "ToolchainError",
    "UnsupportedError",
]
