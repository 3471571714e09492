"""Gradients and quantised tensors to the last bit: see exact_calls.py. The fuzzer has calls of single kernels."""

import pytest

from tests.gpu import exact_calls

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]


@pytest.mark.parametrize("name", exact_calls.CALLS)
def test_results_are_right_to_the_last_bit(name):
    for seed in range(20):
        exact_calls.check(name, seed)
