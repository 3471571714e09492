"""The cost model of Sm80 kernels against its sweep, and the space that it ranks."""

import json
import math
from dataclasses import replace

import pytest
import torch
from signatures import A100, H100, signature

from cutlass_ops.base import arch
from cutlass_ops.choose import space
from cutlass_ops.choose.pool import Pool
from cutlass_ops.declare.config import Sm80Config, Sm90Config, ThreadblockShape, WarpShape
from cutlass_ops.declare.device import Device
from cutlass_ops.declare.problem import Problem
from cutlass_ops.kinds import legality
from cutlass_ops.kinds.sm80 import model as model_sm80
from cutlass_ops.kinds.sm80 import space as space_sm80
from cutlass_ops.kinds.table import kind_of
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


@pytest.mark.parametrize(("alignment", "kernels"), [(1, space_sm80.UNTUNED_UNALIGNED), (2, space_sm80.UNTUNED)])
def test_the_kernels_of_choice_serve_nearly_as_well_as_all(sweep, alignment, kernels):
    losses = [
        math.log(min(times[c] for c in kernels if c in times) / min(times.values()))
        for place, times in sweep.items()
        if place.alignment == alignment
    ]
    assert len(losses) >= 16
    assert sum(losses) / len(losses) < 0.01


@pytest.mark.parametrize("alignment", [1, 2, 4, 8])
@pytest.mark.parametrize("config", [*space_sm80.UNTUNED_UNALIGNED, *space_sm80.UNTUNED])
def test_no_time_is_below_what_memory_allows(config, alignment):
    for m, n, k in ((1, 1, 1), (1, 4096, 4097), (4096, 11008, 4097)):
        time = model_sm80.predict(config, Problem(m, n, k), 132, alignment)
        assert time >= 2 * (m * k + k * n + m * n) / (model_sm80.H100.dram * 1e3)


def test_wider_accesses_are_never_slower():
    for config in space_sm80.UNTUNED_UNALIGNED:
        times = [model_sm80.predict(config, Problem(512, 4096, 4096), 132, alignment) for alignment in (1, 2, 4, 8)]
        assert times == sorted(times, reverse=True)


@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_89", "sm_90"])
@pytest.mark.parametrize("config", [*space_sm80.UNTUNED_UNALIGNED, *space_sm80.UNTUNED])
def test_a_multiprocessor_holds_what_its_own_memory_and_threads_allow(config, target):
    machine, blocks = arch.target(target), model_sm80.resident(config, target=target)
    shared = config.stages * (config.threadblock.m + config.threadblock.n) * config.threadblock.k * 2
    assert blocks == 1 or blocks * (shared + arch.KIB) <= machine.shared_memory_per_sm
    assert blocks * config.warps * arch.WARP <= machine.threads_per_sm


def test_a_kernel_with_much_shared_memory_is_alone_where_there_is_less():
    config = Sm80Config(ThreadblockShape(128, 128, 32), WarpShape(64, 64, 32), stages=4)
    assert [model_sm80.resident(config, target=f"sm_{n}") for n in (80, 86, 89, 90)] == [2, 1, 1, 2]
    smaller, larger = Device((8, 6), 108), Device((8, 0), 108)
    problem, alone = Problem(8192, 4096, 4096), Pool((config,))
    assert alone.times([problem], smaller) > alone.times([problem], larger)


@pytest.mark.parametrize(("of", "device"), [(odd(1), A100), (odd(2), A100), (signature(), A100)])
def test_what_has_no_wgmma_is_sought_among_sm80_kernels(of, device):
    found = space.ranked(of, ODD, 40, device)
    assert len(set(found)) == 40
    for config in found:
        assert isinstance(config, Sm80Config)
        assert not legality.check(device.spec(of, config))
    assert {c.stream_k for c in space.sm80_configurations(of, device)} == {False, True}
    costs = model_sm80.costs_of(device)
    times = [model_sm80.predict(c, ODD, device.multiprocessors, of.a.alignment, costs, target="sm_80") for c in found]
    assert times == sorted(times)


@pytest.mark.parametrize("of", sampled(2, (odd(1), odd(2))))
def test_what_tma_cannot_load_is_sought_among_both_kinds(of):
    """To copy operands is little where there are many rows, and as much as the whole product where there are few."""
    few, many = (space.ranked(of, Problem(m, 4096, 4097), 40, H100) for m in (1, 4096))
    assert isinstance(few[0], Sm80Config)
    assert isinstance(many[0], Sm90Config)
    for config in (*few, *many):
        assert not legality.check(H100.spec(of, config))
        assert isinstance(config, Sm80Config) or config.realign


def test_what_tma_can_load_is_sought_among_sm90_kernels():
    assert {type(c) for c in space.ranked(signature(), ODD, 40, H100)} == {Sm90Config}


def test_neighbours_differ_in_one_thing():
    centre = Sm80Config(ThreadblockShape(64, 64, 64), WarpShape(32, 32, 64), stages=2)
    near = space.neighbours(odd(), centre, H100)
    assert centre not in near
    assert Sm80Config(ThreadblockShape(64, 64, 64), WarpShape(32, 32, 64), stages=2, stream_k=True) in near
    assert Sm80Config(ThreadblockShape(128, 64, 64), WarpShape(32, 32, 64), stages=2) in near
    assert Sm80Config(ThreadblockShape(64, 64, 32), WarpShape(32, 32, 32), stages=2) in near
    assert Sm80Config(ThreadblockShape(128, 128, 64), WarpShape(32, 32, 64), stages=2) not in near
    assert 3 <= len(near) <= 12


def test_every_swizzle_is_an_order_of_tiles():
    config = space_sm80.UNTUNED_UNALIGNED[3]
    assert not config.stream_k
    assert [o.swizzle for o in kind_of(config).orders(config, ODD, H100)] == [1, 2, 4, 8]
    assert kind_of(space_sm80.UNTUNED_UNALIGNED[0]).orders(space_sm80.UNTUNED_UNALIGNED[0], ODD, H100) == []


# ---- FP64 ------------------------------------------------------------------------------------------------------------


def test_the_sweep_of_fp64_has_what_calls_choose_from():
    for majors in sweep_fp64.MAJORS:
        configs = [spec.config for spec in sweep_fp64.specs(majors, H100)]
        assert {c.instruction.k for c in set(sweep_fp64.configs()) - set(configs) if c.stream_k} == {16}
        assert set(configs) > set(space_sm80.UNTUNED_FP64)
    assert {c.instruction.k for c in configs} == {4, 8, 16}


@pytest.mark.parametrize("majors", sweep_fp64.MAJORS)
def test_the_sweep_of_fp64_checks_results(majors):
    a, b, out = sweep_fp64.draw(5, 7, 33, majors, "cpu")
    assert (a.stride(1) == 1, b.stride(1) == 1) == tuple(major == "row" for major in majors.split(","))
    sweep_fp64.checked({"mm": lambda a, b, out: torch.mm(a, b, out=out)}, a, b, out)
    for wrong in (lambda a, b, out: torch.mm(a, b, out=out).mul_(1 + 1e-12), lambda a, b, out: None):
        with pytest.raises(AssertionError, match="wrong is wrong at 5x7x33"):
            sweep_fp64.checked({"wrong": wrong}, a, b, out)


def test_costs_of_fp64_are_fitted_to_kernels_that_the_model_knows(tmp_path):
    """Times by other costs are predicted better after the fit; kernels of other instructions do not count."""
    truth = replace(model_sm80.H100_FP64, products=180.0, adding_up=6.0)
    rows = []
    for m, n, k in sweep_fp64.problems([32, 256, 1024]):
        place = fit_sm80.Place(2, Problem(m, n, k), 8)
        times = fit_sm80.predicted(place, sweep_fp64.configs(), truth)
        found = {c.slug: us / 1e3 * (1 if c.instruction.k == 4 else 0.5) for c, us in times.items()}
        rows.append({"alignment": 2, "element_bytes": 8, "m": m, "n": n, "k": k, "peer_ms": 1.0, "times": found})
    path = tmp_path / "sweep.json"
    path.write_text(json.dumps({"rows": rows}))
    every = fit_sm80.read(path)
    known = fit_sm80.known(every)
    assert {str(c.instruction) for times in known.values() for c in times} == {"16x8x4"}
    slower = fit_sm80.by_instruction(every)
    assert slower["16x8x4"] > 1.3
    fitted = fit_sm80.fit(known, model_sm80.H100_FP64, 300)
    assert fit_sm80.loss(known, truth) < 1e-12
    assert fit_sm80.loss(known, fitted) < 0.2 * fit_sm80.loss(known, model_sm80.H100_FP64)
