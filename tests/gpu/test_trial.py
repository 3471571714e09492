"""What the tuner measures on a device: right kernels race, wrong ones are found out first."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

import cutlass_ops as co
from cutlass_ops.declare.config import Ordered
from cutlass_ops.declare.order import TileOrder
from cutlass_ops.declare.problem import Problem
from cutlass_ops.kinds.table import kind_of
from cutlass_ops.operand.call import device_of
from cutlass_ops.run.registry import OpSignature, Registry
from cutlass_ops.tuner.measuring import Measurer
from cutlass_ops.tuner.trial import Trial
from cutlass_ops.tuner.tuning import Effort, tune
from tests.gpu import kernels

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
PROBLEM = Problem(264, 520, 136)
EXACT = {**kernels.configurations(), **kernels.multi_output(), **kernels.drawn_specs()}


def signature_of(spec):
    return OpSignature(spec.epilogue, spec.a, spec.b, spec.d, spec.inputs, spec.outputs)


@pytest.fixture(scope="module")
def spec():
    return next(
        s for s in kernels.configurations().values() if s.config.arch == "sm90" and s.config.schedule == "pingpong"
    )


@pytest.mark.parametrize("name", EXACT)
def test_every_right_kernel_passes_whatever_its_operands_and_outputs(name):
    spec = EXACT[name]
    trial = Trial(signature_of(spec), PROBLEM, DEVICE)
    assert trial.admit(Ordered(spec.config), Registry.current().kernel(spec)) is None


def test_a_race_has_kernels_in_several_orders_and_peers(spec):
    trial, rounds = Trial(signature_of(spec), PROBLEM, DEVICE), []
    assert trial.admit(Ordered(spec.config), Registry.current().kernel(spec)) is None
    trial.admit_peers()
    orders = kind_of(spec.config).orders(spec.config, PROBLEM, device_of(DEVICE))
    measured, peers = trial.race(3, lambda: rounds.append(1))
    assert {m.config for m in measured} == {spec.config}
    assert {m.order for m in measured} == {TileOrder(), *orders}
    assert [m.behind for m in measured] == sorted(m.behind for m in measured)
    assert measured[0].behind == 0
    assert all(1 < m.microseconds < 1000 for m in measured)
    assert {name for name, _ in peers} == {"eager", "cublaslt"}
    assert all(1 < us < 1000 for _, us in peers)
    assert len(rounds) == 6


_ROWS = ("pingpong-plain", "swapped-inputs", "pingpong-gated", "rows-blocks")
_OVER_K = ("pingpong-plain", "swapped-inputs", "pingpong-tiles")
OF_GROUPS = {f"grouped-{what}": Problem(40, 136, 400, 7) for what in _ROWS}
OF_GROUPS |= {f"ragged_k-{what}": Problem(264, 136, 40, 7) for what in _OVER_K}


@pytest.mark.parametrize("name", OF_GROUPS)
def test_kernels_of_groups_race_over_all_spreads(name):
    spec, problem, rounds = (kernels.grouped() | kernels.ragged_k())[name], OF_GROUPS[name], []
    entrant, loaded = Ordered(spec.config), Registry.current().kernel(spec)
    trial = Trial(OpSignature.of(spec), problem, DEVICE)
    assert trial.admit(entrant, loaded) is None
    trial.rehearse(entrant)
    trial.admit_peers()
    measured, peers = trial.race(3, lambda: rounds.append(1))
    assert [m.ordered for m in measured] == [entrant]
    assert 1 < measured[0].microseconds < 1000
    assert (peers, len(rounds)) == ((), 3)
    one = Trial(OpSignature.of(spec), problem, DEVICE, spreads=("one",))
    assert one.admit(entrant, loaded) is None


@pytest.mark.parametrize("name", ["batched-pingpong-inputs", "batched-sm80-inputs", "batched-small-inputs"])
def test_kernels_of_batches_race_pytorch(name):
    spec = kernels.batched()[name]
    trial = Trial(OpSignature.of(spec), Problem(64, 64, 64, 100), DEVICE)
    assert trial.admit(Ordered(spec.config), Registry.current().kernel(spec)) is None
    trial.admit_peers()
    measured, peers = trial.race(3, lambda: None)
    assert measured[0].microseconds > 0
    assert [peer for peer, _ in peers] == ["eager"]


def test_kernels_that_heat_the_chip_race_three_times_as_long(spec):
    trial, rounds = Trial(signature_of(spec), Problem(1024, 4096, 4096), DEVICE), []
    assert trial.admit(Ordered(spec.config), Registry.current().kernel(spec)) is None
    measured, _ = trial.race(3, lambda: rounds.append(1))
    assert len(rounds) == 18
    (again,) = trial._watch.round([Ordered(spec.config)])
    assert measured[0].microseconds / 2 < again < 2 * measured[0].microseconds


def test_a_kernel_may_enter_in_several_orders(spec):
    trial = Trial(signature_of(spec), PROBLEM, DEVICE)
    orders = kind_of(spec.config).orders(spec.config, PROBLEM, device_of(DEVICE))
    for order in (TileOrder(), orders[0], orders[-1]):
        assert trial.admit(Ordered(spec.config, order), Registry.current().kernel(spec)) is None
        trial.rehearse(Ordered(spec.config, order))
    measured, _ = trial.race(3, lambda: None)
    assert [m.order for m in measured].count(orders[0]) == 1
    assert {m.order for m in measured} == {TileOrder(), *orders}


def test_a_workspace_lives_as_long_as_the_graph_that_uses_it():
    spec = next(s for name, s in kernels.configurations().items() if "streamk" in name)
    problem = Problem(640, 640, 8192)
    kernel, trial = Registry.current().kernel(spec), Trial(signature_of(spec), problem, DEVICE)
    size = kernel.workspace_size(*problem, 0, 1)
    assert size > 1 << 20
    before = torch.cuda.memory_allocated()
    assert trial.admit(Ordered(spec.config), kernel) is None
    assert torch.cuda.memory_allocated() - before >= size
    torch.cuda.empty_cache()
    trial.rehearse(Ordered(spec.config))


def test_a_trial_goes_without_the_garbage_collector(spec):
    trial = Trial(signature_of(spec), PROBLEM, DEVICE)
    assert trial.admit(Ordered(spec.config), Registry.current().kernel(spec)) is None
    trial.admit_peers()
    trial.race(3, lambda: None)
    seen, enabled = weakref.ref(trial), gc.isenabled()
    gc.disable()
    try:
        del trial
        assert seen() is None
    finally:
        if enabled:
            gc.enable()


def fake(spec, after=None, run=True):
    """A kernel with something wrong about it."""
    real = Registry.current().kernel(spec)

    def launch(a, b, d, *others):
        status = real.launch(a, b, d, *others) if run else 0
        if after:
            after(d)
        return status

    return SimpleNamespace(launch=launch, workspace_size=real.workspace_size)


@pytest.mark.parametrize(
    ("after", "run", "why"),
    [
        (None, False, "not written"),
        (lambda d: d[-1, -1].fill_(float("nan")), True, "has NaN"),
        (lambda d: d.mul_(1.02), True, "is wrong"),
        (lambda d: d[:8, :8].zero_(), True, "is wrong"),
    ],
)
def test_a_wrong_kernel_does_not_race(spec, after, run, why):
    trial = Trial(signature_of(spec), PROBLEM, DEVICE)
    assert why in trial.admit(Ordered(spec.config), fake(spec, after, run))
    assert trial.race(3, lambda: None) == ((), ())


def test_a_kernel_that_refuses_its_arguments(spec):
    other = next(s for s in kernels.configurations().values() if s.a.dtype.name == "f16" and s.a.major == "col")
    trial = Trial(signature_of(spec), PROBLEM, DEVICE)
    assert "refused argument 0" in trial.admit(Ordered(other.config), Registry.current().kernel(other))


def test_in_a_process_of_its_own(spec):
    folder = Registry.current().kernel(spec).artifact.folder
    with Measurer(0) as measurer:
        outcome = measurer.measure(signature_of(spec), PROBLEM, {Ordered(spec.config): folder}, rounds=3)
    assert {m.config for m in outcome.measured} == {spec.config}
    assert set(outcome.peers) == {"eager", "cublaslt"}
    assert outcome.failed == {}


def test_tuning_from_end_to_end(tmp_path):
    lines = []
    effort = Effort(kernels=2, candidates=2, rounds=3)
    report = tune(
        co.gemm_bias_relu, [(64, 1024, 1024), (64, 1024, 1032)], effort=effort, folder=tmp_path, show=lines.append
    )
    assert (report.measured, report.failed) == (2, {})
    assert len(lines) == 2
    (table,) = report.tables.values()
    assert table.device == torch.cuda.get_device_name(0)
    assert [p.problem.extents for p in table.points] == [(64, 1024, 1024), (64, 1024, 1032)]
    assert [path.suffix for path in tmp_path.iterdir() if not path.name.startswith(".")] == [".json"]
