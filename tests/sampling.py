"""Which of many cases the quick tests take."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def sampled(every: int, *values: Iterable[Any]) -> list[Any]:
    """All combinations of values as cases of a test, all but the first of so many marked slow.

    Where the number of the last values and that number have no common divisor, each of the last values is among those
    that the quick tests take.
    """
    quick, slow = (), (pytest.mark.slow,)
    return [pytest.param(*case, marks=slow if at % every else quick) for at, case in enumerate(product(*values))]
