"""Which kernels are chosen: those that were, before choosing was changed without meaning to change a choice.

Where choices are meant to change, `python benchmarks/choices.py` writes them down again.
"""

import pytest

from cutlass_ops.base.session import Session
from tests.scripts import script

choices = script("choices")
GOLDEN = choices.read()


@pytest.fixture(scope="module", autouse=True)
def session(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch, Session().active() as own:
        patch.setenv("CUTLASS_OPS_TUNING_DIR", str(tmp_path_factory.mktemp("tuning")))
        yield own


@pytest.mark.slow
def test_enough_was_written_down():
    asked = [(g.case.signature, g.case.device, p) for g in GOLDEN for p in g.case.problems]
    assert len(set(asked)) > 12_000
    shipped = list(choices.shipped())
    for golden, case in zip(GOLDEN, shipped, strict=False):
        assert golden.case == case
    assert {g.case.device.capability for g in GOLDEN} == {(9, 0), (8, 0), (8, 6), (8, 9)}
    ties = [chosen for g in GOLDEN for chosen in g.chosen if len(chosen) > 1]
    assert len(ties) < 0.05 * len(asked)
    assert choices.GOLDEN.stat().st_size < 500_000


def compare(golden):
    assert choices.changed(golden) == []
    for (us, source), (before, its) in zip(golden.case.times(), golden.times, strict=True):
        assert us == pytest.approx(before, rel=1e-6)
        assert source == its
    assert golden.case.kept() == golden.kept


# Some in a moment; all take a minute.
@pytest.mark.slow
@pytest.mark.parametrize("at", range(0, len(GOLDEN), 13))
def test_choices_times_and_kernels_kept_are_the_same(at):
    compare(GOLDEN[at])


@pytest.mark.slow
@pytest.mark.parametrize("part", range(1, 13))  # the quick tests have every thirteenth
def test_they_are_the_same_everywhere(part):
    for golden in GOLDEN[part::13]:
        compare(golden)


def test_a_choice_that_changed_is_found():
    golden = GOLDEN[0]
    other = next(c for chosen in golden.chosen for c in chosen if c not in golden.chosen[0])
    wrong = choices.Golden(golden.case, ((other,), *golden.chosen[1:]), golden.times, golden.kept)
    assert choices.changed(wrong) == [(golden.case.problems[0], other, golden.chosen[0][0])]
