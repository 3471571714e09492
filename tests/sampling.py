"""Which of many cases the quick tests take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any

import pytest


def compiled(kernels: Mapping[str, Sequence[Any]], *, beside_gpu_tests: set[str]) -> list[Any]:
    """Return a table of kernels as cases of a test.

    Those in `beside_gpu_tests` compile only on machines that run the GPU tests. The others cover all their parts.
    """
    assert beside_gpu_tests <= kernels.keys()
    gpu = (pytest.mark.gpu,)
    return [
        pytest.param(*case, id=name, marks=gpu if name in beside_gpu_tests else ()) for name, case in kernels.items()
    ]


def sampled(every: int, *values: Iterable[Any]) -> list[Any]:
    """All combinations of values as cases of a test, all but the first of so many marked slow.

    Where the number of the last values and that number have no common divisor, each of the last values is among those
    that the quick tests take.
    """
    quick, slow = (), (pytest.mark.slow,)
    return [pytest.param(*case, marks=slow if at % every else quick) for at, case in enumerate(product(*values))]


def in_turn(values: Iterable[Any], others: Sequence[Any]) -> list[Any]:
    """All pairs as cases of a test: the quick tests take each of the first values with one of the others, in turn."""
    quick, slow = (), (pytest.mark.slow,)
    return [
        pytest.param(value, other, marks=quick if place == at % len(others) else slow)
        for at, value in enumerate(values)
        for place, other in enumerate(others)
    ]
