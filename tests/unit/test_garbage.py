"""Work without collections of garbage."""

import gc

import pytest

from cutlass_ops.base.garbage import uncollected


@uncollected()
def fails():
    assert not gc.isenabled()
    raise KeyError


def test_nothing_is_collected_inside_and_what_was_on_is_on_again():
    assert gc.isenabled()
    with pytest.raises(KeyError):
        fails()
    assert gc.isenabled()


def test_what_was_off_stays_off():
    gc.disable()
    try:
        with uncollected():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()
