"""Warnings about what costs speed, not results: each is given once, and none fails a call."""

from __future__ import annotations

import sys
import warnings

from cutlass_ops.base.session import cached


@cached(maxsize=1024)
def warn_once(message: str) -> None:
    """Give a RuntimeWarning, once in a session."""
    try:
        warnings.warn(message, RuntimeWarning, stacklevel=2)
    except RuntimeWarning:
        # If warnings are errors, print it instead of failing the call.
        print(f"cutlass_ops: {message}", file=sys.stderr)
