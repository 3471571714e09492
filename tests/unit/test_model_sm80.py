"""The cost model of Sm80 kernels against its sweep, and the space that it ranks."""

import pytest
from signatures import A100, H100, signature

from cutlass_ops.choose import space
from cutlass_ops.declare.problem import Problem
from cutlass_ops.kinds import legality
from cutlass_ops.kinds.sm80 import model as model_sm80
from cutlass_ops.kinds.sm80.config import Sm80Config
from cutlass_ops.kinds.sm80.kind import SM80
from cutlass_ops.kinds.sm90.config import Sm90Config
from tests.sampling import sampled
from tests.scripts import BENCHMARKS, script

fit_sm80 = script("fit_sm80")
sweep_fp64 = script("sweep_fp64")

ODD = Problem(64, 4096, 4097)


def odd(alignment=1):
    return signature(a=alignment, b=alignment, d=alignment)


@pytest.fixture(scope="module")
def sweep():
    return fit_sm80.read(BENCHMARKS / "results" / "sweep_sm80_h100.json")


@pytest.mark.parametrize(("count", "mean", "worst"), [(3, 1.04, 1.25), (8, 1.005, 1.06)])
def test_the_first_ones_hold_the_fastest(sweep, count, mean, worst):
    assert len(sweep) >= 30
    found_mean, found_worst = fit_sm80.regret(sweep, model_sm80.H100, count)
    assert found_mean <= mean
    assert found_worst <= worst


@pytest.mark.parametrize(("of", "device"), [(odd(1), A100), (odd(2), A100), (signature(), A100)])
def test_what_has_no_wgmma_is_sought_among_sm80_kernels(of, device):
    found = space.ranked(of, ODD, 40, device)
    assert len(set(found)) == 40
    for config in found:
        assert isinstance(config, Sm80Config)
        assert not legality.check(device.spec(of, config))
    assert {c.stream_k for c in space.legal(SM80, of, device)} == {False, True}
    costs = model_sm80.costs_of(device)
    times = [model_sm80.predict(c, ODD, device.multiprocessors, of.a.alignment, costs, target="sm_80") for c in found]
    assert times == sorted(times)


@pytest.mark.slow
@pytest.mark.parametrize("of", sampled(2, (odd(1), odd(2))))
def test_what_tma_cannot_load_is_sought_among_both_kinds(of):
    """To copy operands is little where there are many rows, and as much as the whole product where there are few."""
    few, many = (space.ranked(of, Problem(m, 4096, 4097), 40, H100) for m in (1, 4096))
    assert isinstance(few[0], Sm80Config)
    assert isinstance(many[0], Sm90Config)
    for config in (*few, *many):
        assert not legality.check(H100.spec(of, config))
        assert isinstance(config, Sm80Config) or config.realign
