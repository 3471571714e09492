"""Every exception type that this library defines.

Wrong arguments raise ``ValueError`` and ``TypeError``, as usual in Python. All other errors derive from
:class:`CutlassOpsError`, so that one ``except`` clause catches them.
"""

from __future__ import annotations


class CutlassOpsError(Exception):
    """Base class of this library's own errors. Wrong arguments raise ``ValueError`` or ``TypeError`` instead."""

    def __str__(self) -> str:
        # Python reads a path that is not UTF-8 with surrogate characters, which cannot be printed.
        return super().__str__().encode("utf-8", "backslashreplace").decode("utf-8")


class EpilogueError(CutlassOpsError, ValueError):
    """An epilogue function cannot be traced. The message names the function, the file and the line."""


class ConfigError(CutlassOpsError, ValueError):
    """A declaration breaks a rule. The message lists each; ``check()`` returns them."""


class UnsupportedError(CutlassOpsError):
    """The call is valid, but this library has no kernel for it on this device."""


class ToolchainError(CutlassOpsError):
    """nvcc, the CUDA headers or the CUTLASS headers are missing or unusable."""


class CompileError(CutlassOpsError):
    """nvcc could not compile a kernel. The message has its first error and the path of the source."""


class StoreError(CutlassOpsError):
    """The kernel store cannot be used: it is missing, not private or not writable."""


class LoadError(CutlassOpsError):
    """An artifact cannot be loaded or does not match its manifest."""


class BundleError(LoadError):
    """A bundle is unsafe, incomplete, of another format version, or not signed with a trusted key."""


class MissingKernelError(CutlassOpsError):
    """A kernel is in no bundle and no store, and compiling is switched off or impossible."""


class NoDeviceError(CutlassOpsError):
    """There is no usable CUDA device to run a kernel on."""


class MeasuringError(CutlassOpsError):
    """Measuring failed as a whole, not because of a single kernel."""
