"""Which kernels are chosen: those that were, before choosing was changed without meaning to change a choice.

Where choices are meant to change, `python benchmarks/choices.py` writes them down again.
"""

import pytest

from cutlass_ops import policies
from tests.scripts import script

choices = script("choices")
GOLDEN = choices.read()
# So many problems of each case are compared in a moment: those of few weights.
FIRST = 8

pytestmark = pytest.mark.usefixtures("no_user_tables")


@pytest.fixture(scope="module", autouse=True)
def no_user_tables(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUTLASS_OPS_TUNING_DIR", str(tmp_path_factory.mktemp("tuning")))
        policies.forget()
        yield
    policies.forget()


def test_enough_was_written_down():
    asked = [(g.case.signature, g.case.device, p) for g in GOLDEN for p in g.case.problems]
    assert len(set(asked)) > 13_000
    shipped = list(choices.shipped())
    for golden, case in zip(GOLDEN, shipped, strict=False):
        assert golden.case == case
    assert {g.case.device.capability for g in GOLDEN} == {(9, 0), (8, 0), (8, 6), (8, 9)}
    ties = [chosen for g in GOLDEN for chosen in g.chosen if len(chosen) > 1]
    assert len(ties) < 0.05 * len(asked)
    assert choices.GOLDEN.stat().st_size < 500_000


def test_the_same_kernels_are_chosen():
    assert [one for golden in GOLDEN for one in choices.changed(golden, FIRST)] == []


@pytest.mark.slow
def test_the_same_kernels_are_chosen_everywhere():
    assert [one for golden in GOLDEN for one in choices.changed(golden)] == []


def test_a_choice_that_changed_is_found():
    golden = GOLDEN[0]
    other = next(c for chosen in golden.chosen for c in chosen if c not in golden.chosen[0])
    wrong = choices.Golden(golden.case, ((other,), *golden.chosen[1:]), golden.times, golden.kept)
    assert choices.changed(wrong, 1) == [(golden.case.problems[0], other, golden.chosen[0][0])]


def test_times_are_the_same():
    for golden in GOLDEN:
        for (us, source), (before, its) in zip(golden.case.times(), golden.times, strict=True):
            assert us == pytest.approx(before, rel=1e-6)
            assert source == its


def test_weights_keep_the_same_kernels():
    for golden in GOLDEN:
        assert golden.case.kept() == golden.kept
