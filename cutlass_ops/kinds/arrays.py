"""Arrays of the time models: their types, and the extents of problems."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from cutlass_ops.declare.problem import Problem

Floats = NDArray[np.float64]
Places = NDArray[np.int64]
Flags = NDArray[np.bool_]


class Extents(NamedTuple):
    """M, N, K and the number of GEMMs of problems, as arrays of two dimensions that meet those of configurations.

    M has the shape (problems, 1). What all problems share has the shape (1, 1), so that what depends on nothing else is
    computed once for all. Where each problem is for one configuration beside it, all shapes are (1, problems) instead.
    """

    m: Floats
    n: Floats
    k: Floats
    gemms: Floats

    @classmethod
    def of(cls, problems: Problems) -> Extents:
        """Return those of some problems."""
        if isinstance(problems, Extents):
            return problems
        # Ten times as fast as np.array, which asks each named tuple what it is.
        flat = np.fromiter(chain.from_iterable(problems), np.float64)
        return cls.of_array(flat.reshape(len(problems), len(cls._fields)))

    @classmethod
    def of_array(cls, problems: Floats | Places) -> Extents:
        """Return those of problems as an array of shape (problems, 4)."""
        m, *others = np.asarray(problems, np.float64).T[:, :, None]
        return cls(m, *(x[:1] if len(x) == 1 or (len(x) and (x == x[0]).all()) else x for x in others))

    @classmethod
    def of_rows(cls, rows: Sequence[int] | Places, n: int, k: int, gemms: int) -> Extents:
        """Return those of one weight's problems."""
        m = np.asarray(rows, np.float64)[:, None]
        return cls(m, *np.array([[[n]], [[k]], [[gemms]]], np.float64))

    @property
    def size(self) -> int:
        """The number of problems."""
        return self.m.size

    def part(self, which: slice | Places | Flags) -> Extents:
        """Return those of some of the problems."""
        return Extents(*(x[which] if len(x) == len(self.m) else x for x in self))

    def beside(self) -> Extents:
        """Return the same problems with shapes (1, problems), each for one configuration."""
        return Extents(*(x.reshape(1, -1) for x in self))


def columns(rows: Sequence[Sequence[float]], count: int) -> Floats:
    """Return the `count` numbers of each configuration as arrays of shape (1, configurations)."""
    return np.moveaxis(np.array(rows, np.float64).reshape(1, -1, count), 2, 0)


# Problems as a model takes them.
Problems: TypeAlias = Extents | Sequence[Problem]
