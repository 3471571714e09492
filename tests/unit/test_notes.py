"""What a chip's measurements say of another chip."""

import numpy as np
import pytest

from cutlass_ops.choose.notes import Errors


def errors(of, found):
    """Errors at problems with one coordinate that counts, by problem and kernel."""
    problems = np.array([[at, 1.0, 0.0] for at in of])
    rows, kernels, values = (np.array(x) for x in zip(*found, strict=True))
    return Errors(problems, rows, kernels, np.ones(len(found)), values)


def test_kernels_that_only_another_chip_measured_are_no_faster_for_that():
    own = errors((4.0, 9.0), [(0, 0, 0.06), (0, 1, 0.10), (1, 0, 0.00)])
    other = errors((4.0, 9.0), [(0, 0, 0.01), (0, 1, 0.05), (0, 2, 0.02), (1, 0, 0.00), (1, 3, 0.07)])
    shifted = other.on(own)
    # Two of three: what one measurement says counts as half known.
    assert shifted.errors[:3] - other.errors[:3] == pytest.approx(0.05 * 2 / 3, abs=1e-4)
    assert shifted.errors[3:] == pytest.approx(other.errors[3:], abs=1e-4)
    for x, y in zip(shifted[:4], other[:4], strict=True):
        assert (x == y).all()


def test_without_common_measurements_nothing_is_shifted():
    own, other = errors((4.0,), [(0, 0, 0.06)]), errors((4.0,), [(0, 1, 0.01)])
    assert other.on(own) is other
