"""Arrays of the time models: their types, and the extents of problems."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cutlass_ops.declare.problem import Problem

Floats = NDArray[np.float64]
Places = NDArray[np.int64]
Flags = NDArray[np.bool_]


class Extents(NamedTuple):
    """M, N, K and the number of GEMMs of problems, each as an array of shape (problems, 1)."""

    m: Floats
    n: Floats
    k: Floats
    gemms: Floats

    @classmethod
    def of(cls, problems: Sequence[Problem]) -> Extents:
        """Return those of some problems."""
        return cls(*np.array(problems, np.float64).reshape(len(problems), len(cls._fields)).T[:, :, None])
