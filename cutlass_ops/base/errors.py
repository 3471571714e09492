"""Every exception type that this library raises itself.

Callers' mistakes are ``ValueError`` and ``TypeError``, as everywhere in Python. What remains derives from
:class:`CutlassOpsError`, so that one ``except`` clause catches what this library alone can report.
"""

from __future__ import annotations


class CutlassOpsError(Exception):
    """Base of every error type that this library defines."""

    def __str__(self) -> str:
        # A path may hold bytes that are no text, which Python has as characters that cannot be written.
        return super().__str__().encode("utf-8", "backslashreplace").decode("utf-8")


class EpilogueError(CutlassOpsError, ValueError):
    """An epilogue function cannot be traced; the message shows the function, the file and the line."""


class ConfigError(CutlassOpsError, ValueError):
    """A declaration breaks the Tensor Cores' contract; ``check()`` lists the reasons."""


class UnsupportedError(CutlassOpsError):
    """The request is well formed, but no kernel of this library can serve it on this device."""


class ToolchainError(CutlassOpsError):
    """nvcc, the CUDA headers or the CUTLASS headers are missing or unusable."""


class CompileError(CutlassOpsError):
    """The CUDA compiler refused a rendered kernel; the message carries its first error and the source's path."""


class StoreError(CutlassOpsError):
    """The kernel store cannot be used: not private, not writable, not there."""


class LoadError(CutlassOpsError):
    """An artifact could not be loaded, or is not what its manifest says."""


class BundleError(LoadError):
    """A bundle is not safe, not whole, not of this version's format, or not signed as it should be."""


class MissingKernelError(CutlassOpsError):
    """Nothing can be compiled here, and no bundle and no store has the kernel that the message names."""


class NoDeviceError(CutlassOpsError):
    """A kernel was asked to run, and this process sees no usable CUDA device."""


class MeasuringError(CutlassOpsError):
    """Nothing could be measured, for a reason that is no single kernel's fault."""
