"""The compiler's report, which is stored with the library."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Compiled:
    """Result of one compilation.

    Attributes
    ----------
    seconds : float
        Compile time.
    resources : tuple of dict
        For each ``__global__`` function: name, registers per thread, and static shared memory, stack, spill stores and
        spill loads in bytes.
    """

    seconds: float
    resources: tuple[dict[str, str | int], ...]
