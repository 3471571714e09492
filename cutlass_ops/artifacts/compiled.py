"""What a compilation reports, as it is kept beside the library."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Compiled:
    """Outcome of one compilation.

    Attributes
    ----------
    seconds : float
        Time it took.
    resources : tuple of dict
        For each ``__global__`` function: name, registers for each thread, and in bytes its static shared memory,
        stack, spill stores and spill loads.
    """

    seconds: float
    resources: tuple[dict[str, str | int], ...]
