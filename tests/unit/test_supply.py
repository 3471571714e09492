"""No call waits for a compiler where another kernel of its signature can serve."""

import logging
import threading
import time

import pytest
import torch
from fake_device import fake_device
from signatures import H100, signature

import cutlass_ops as co
from cutlass_ops.artifacts import loader
from cutlass_ops.artifacts.store import KernelStore
from cutlass_ops.base.errors import CompileError, LoadError, MissingKernelError
from cutlass_ops.base.session import Session
from cutlass_ops.choose import dispatch, policies
from cutlass_ops.choose.tables import Measured, Point, Table
from cutlass_ops.compilation import keys
from cutlass_ops.compilation.background import Background
from cutlass_ops.declare.config import GemvConfig
from cutlass_ops.declare.problem import Problem
from cutlass_ops.epilogue import builtin
from cutlass_ops.kinds.table import KINDS
from cutlass_ops.run import ops, supply
from cutlass_ops.run.registry import Registry

M, N, K = 48, 520, 264
BF16 = torch.bfloat16


def rows(count):
    return torch.randn(count, K).to(BF16) / 8


B, BIAS = torch.randn(N, K).to(BF16).t() / 8, torch.randn(N).to(BF16)


@pytest.fixture
def device(monkeypatch):
    monkeypatch.setattr(supply, "_store_is_quick", lambda: True)
    with fake_device(monkeypatch) as fake:
        yield fake


@pytest.fixture
def op():
    return ops.Op("relu", builtin.bias_relu)


def best(m=M):
    return dispatch.decide(signature(), H100, Problem(m, N, K))


@pytest.fixture
def specs(device):
    """Every kernel of the signature; none of them is compiled."""
    found = dispatch.specs(signature(), H100)
    device.absent.update(found)
    return found


def right(a, d):
    assert torch.equal(d, torch.relu(a.float() @ B.float() + BIAS.float()).to(BF16))


def test_where_the_best_kernel_is_there_it_serves(op, device):
    op(rows(M), B, BIAS)
    assert device.launches[0].spec == best().spec
    assert device.waiting == {}


def test_a_loaded_kernel_stands_in_until_the_best_one_has_come(op, device, specs, caplog):
    caplog.set_level(logging.INFO, "cutlass_ops")
    wanted = best().spec
    other = next(spec for spec, each in best().near() if spec != wanted and each.config.wgmma and each.config.whole_k)
    device.absent.discard(other)
    device.kernel(other)
    a = rows(M)
    for _ in range(2):
        right(a, op(a, B, BIAS))
    assert [launch.spec for launch in device.launches] == [other, other]
    assert op.served_warm == 1
    assert device.queued[0] == wanted
    assert f"{other.slug} serves until {wanted.slug} is there" in caplog.text
    device.built(wanted)
    assert (wanted, a.device) in device.on_device
    for _ in range(2):
        right(a, op(a, B, BIAS))
    assert [launch.spec for launch in device.launches[2:]] == [wanted, wanted]
    assert op.served_warm == 2
    assert device.waiting == {}


def test_a_call_does_not_wait_for_the_store_where_a_loaded_kernel_gives_the_same_bits(device, specs, monkeypatch):
    decision = best()
    spec, other = next(x for x in decision.near() if x[1].config.wgmma and x[0] != decision.spec)
    device.absent -= {decision.spec, spec}
    device.kernel(spec)
    for name in ("alternatives", "beside"):
        monkeypatch.setattr(dispatch.Decision, name, lambda *_: pytest.fail("the model of every kernel"))
    monkeypatch.setattr(device, "at_hand", lambda spec, quickly=False: pytest.fail("a look into the store"))
    found = supply.supply(decision)
    assert (found.serves, found.awaited) == (other, decision.spec)
    assert device.queued == [decision.spec]


@pytest.mark.parametrize(("m", "wgmma"), [(1, False), (8192, True)])
def test_of_several_loaded_kernels_the_fastest_by_the_model_stands_in(device, specs, m, wgmma):
    decision = best(m)
    others = [spec for spec in specs if spec != decision.spec]
    few = min((x for x in others if isinstance(x.config, GemvConfig)), key=lambda x: x.config.rows)
    many = max((x for x in others if x.config.wgmma), key=lambda x: x.config.threadblock.m * x.config.threadblock.n)
    assert decision.beside(device.those) is None
    for spec in (few, many):
        device.absent.discard(spec)
        device.kernel(spec)
    spec, ordered = decision.beside(device.those)
    assert (spec.config, spec.config.wgmma) == (ordered.config, wgmma)


def test_a_call_that_can_be_served_does_not_examine_the_compilers(device, specs, monkeypatch):
    known = []
    monkeypatch.setattr(supply, "_store_is_quick", lambda: bool(known))
    many = best(4096)
    other = H100.spec(signature(), next(c.config for c in many.alternatives() if not c.config.whole_k))
    device.absent -= {many.spec, other}
    device.kernel(other)
    assert supply.supply(many).spec == other
    device.noted.add(many.spec)  # its key needs no compilers
    assert supply.supply(many).spec == many.spec
    device.noted.clear()
    device.loaded.pop(many.spec)
    assert supply.supply(many).spec == other
    known.append(True)
    assert supply.supply(many).spec == many.spec


def test_a_call_that_can_be_served_does_not_fail_by_a_kernel_that_cannot_be_loaded(device, specs, monkeypatch):
    monkeypatch.setattr(supply, "_store_is_quick", lambda: False)
    many = best(4096)
    other = H100.spec(signature(), next(c.config for c in many.alternatives() if not c.config.whole_k))
    device.absent -= {many.spec, other}
    device.kernel(other)

    def damaged(spec, quickly=False):
        raise LoadError("damaged")

    monkeypatch.setattr(device, "at_hand", damaged)
    assert supply.supply(many).spec == other
    assert device.queued == [many.spec]
    device.loaded.clear()
    with pytest.raises(LoadError, match="damaged"):
        supply.supply(many)


def test_nor_where_it_would_be_far_slower_or_give_other_bits(device, specs):
    many = dispatch.decide(signature(), H100, Problem(8192, 28672, 4096))
    few = dispatch.decide(signature(), H100, Problem(64, 28672, 4096))
    assert few.config.wgmma
    assert few.config in many.kept
    for config in (few.config, next(c.config for c in many.alternatives() if not c.config.whole_k)):
        spec = H100.spec(signature(), config)
        device.absent -= {many.spec, spec}
        device.kernel(spec)
        found = supply.supply(many)
        assert (found.spec, found.awaited) == (many.spec, None)
        device.loaded.clear()


def test_the_fastest_of_those_that_are_there_stands_in(op, device, specs):
    decision = best()
    others = [c.config for c in decision.alternatives()]
    first, second, *_ = (H100.spec(signature(), c) for c in others if c in decision.kept)
    device.absent -= {first, second}
    assert supply.supply(decision).spec == first
    device.kernel(second)  # what is loaded needs no look into the store
    device.loaded.pop(first, None)
    device.absent.add(first)
    assert supply.supply(decision).spec == second


def test_with_no_kernel_at_all_the_call_waits_for_the_one_that_compiles_fastest(op, device, specs, caplog):
    caplog.set_level(logging.INFO, "cutlass_ops")
    a = rows(M)
    right(a, op(a, B, BIAS))
    (launch,) = device.launches
    assert "a call waits for the compiler" in caplog.text
    assert isinstance(launch.spec.config, GemvConfig)
    assert device.queued[0] == best().spec
    device.built(best().spec)
    right(a, op(a, B, BIAS))
    assert device.launches[1].spec == best().spec


def test_only_kernels_of_the_weight_are_looked_for_in_the_store(device, specs, monkeypatch):
    decision, asked = best(), []
    monkeypatch.setattr(device, "at_hand", lambda spec, quickly=False: asked.append(spec))
    supply.supply(decision)
    assert asked[0] == decision.spec
    assert set(asked) == set(decision.specs)
    # While it is compiled, nobody looks for it.
    device.waiting[decision.spec] = []
    asked.clear()
    supply.supply(decision)
    assert asked == []


@pytest.mark.parametrize("plan", [supply.supply, supply.stand_in])
def test_a_call_looks_at_templates_and_compilers_once_for_all_its_candidates(device, specs, monkeypatch, plan):
    looks, asked = [], []

    def look(spec, quickly=False):
        asked.append(keys.place(KernelStore.default(), spec))

    monkeypatch.setattr(keys, "_situation", lambda: looks.append(None) or "situation")
    monkeypatch.setattr(device, "at_hand", look)
    monkeypatch.setattr(device, "found", look)
    decision = best()
    plan(decision)
    assert len(set(asked)) == len(decision.specs) > 10
    assert len(looks) == 2  # one for the best kernel, and one for all others
    plan(decision)
    assert len(looks) > 2  # what changed since the first call is noticed


def test_where_that_is_the_best_one_nothing_stands_in(device, specs):
    decision = dispatch.decide(signature(), H100, Problem(1, 28672, 4096))
    assert isinstance(decision.config, GemvConfig)
    found = supply.supply(decision)
    assert (found.spec, found.awaited) == (decision.spec, None)
    assert device.loaded == {}  # the plan compiles it


def test_kinds_are_told_apart_by_what_a_compilation_takes():
    assert [kind.config.arch for kind in sorted(KINDS, key=lambda k: k.compile_seconds)] == [
        "gemv",
        "pointwise",
        "small",
        "sm80",
        "sm90",
    ]


def test_a_setting_has_calls_wait_for_the_best_kernel(op, device, specs, monkeypatch):
    monkeypatch.setenv("CUTLASS_OPS_STAND_IN", "0")
    device.kernel(specs[-1])
    op(rows(M), B, BIAS)
    assert device.launches[0].spec == best().spec
    monkeypatch.setenv("CUTLASS_OPS_STAND_IN", "perhaps")
    with pytest.raises(ValueError, match="CUTLASS_OPS_STAND_IN"):
        op(rows(M + 1), B, BIAS)


def test_what_cannot_be_compiled_is_said_and_the_stand_in_stays(op, device, specs, caplog):
    other = next(s for s in best().specs if s != best().spec)
    device.absent.discard(other)
    device.failed[best().spec] = CompileError("too complex")
    a = rows(M)
    for _ in range(2):
        right(a, op(a, B, BIAS))
    assert {launch.spec for launch in device.launches} == {other}
    assert op.served_warm == 1
    assert "cannot be compiled: too complex" in caplog.text


def test_a_stand_in_that_cannot_be_compiled_is_none(op, device, specs, monkeypatch, caplog):
    compile_it = device.kernel

    def kernel(spec):
        if isinstance(spec.config, GemvConfig):
            raise CompileError("too simple")
        return compile_it(spec)

    monkeypatch.setattr(device, "kernel", kernel)
    op(rows(M), B, BIAS)
    assert device.launches[0].spec == best().spec
    assert "too simple" in caplog.text


def test_where_no_choice_may_change_a_bit_only_kernels_that_give_the_same_bits_stand_in(op, device, specs, monkeypatch):
    kernels = tuple(c for c in policies.policy(signature(), H100).kernels if c.whole_k)
    point = Point(
        Problem(M, N, K), "2026-11-26", tuple(Measured(c, 10.0 + i, i / 10) for i, c in enumerate(kernels[:3]))
    )
    table = Table(H100.name, 132, signature(), (point,), kernels=kernels, deterministic=True)
    policy = policies.Policy.of([table], signature(), H100, kernels)
    monkeypatch.setattr(policies, "policy", lambda *_: policy)
    gemv = H100.spec(signature(), GemvConfig(rows=16))
    device.absent.discard(gemv)
    device.kernel(gemv)
    op(rows(M), B, BIAS)
    (launch,) = device.launches
    assert launch.spec.config.whole_k


def test_a_captured_call_takes_only_what_is_loaded(op, device, specs, monkeypatch):
    monkeypatch.setattr(supply.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(supply.torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(MissingKernelError, match=r"cutlass_ops\.warm_up before"):
        op(rows(M), B, BIAS)
    other = next(s for s in best().specs if s != best().spec)
    device.absent.discard(other)
    device.kernel(other)
    op(rows(M), B, BIAS)
    assert device.launches[0].spec == other


@pytest.mark.parametrize("captured", [False, True])
def test_a_first_call_leaves_the_weight_s_other_steps_to_a_thread(op, device, monkeypatch, captured):
    def decided():
        return [(d.config, d.order) for d in map(best, (5, 77, 1001, 5003))]

    monkeypatch.setattr(supply.torch.cuda, "is_available", lambda: captured)
    monkeypatch.setattr(supply.torch.cuda, "is_current_stream_capturing", lambda: captured)
    policies.forget(shipped=True)
    monkeypatch.setattr(policies.Weight, "finish", lambda weight: pytest.fail("the call did it"))
    op(rows(M), B, BIAS)
    (left,) = device.left
    assert not best().is_finished
    before = decided()
    monkeypatch.undo()
    left()
    assert best().is_finished
    assert decided() == before
    with fake_device(monkeypatch) as again:
        other = ops.Op("relu", builtin.bias_relu)
        other(rows(M), B, BIAS)
        assert again.left == []
        assert again.launches[0].spec == device.launches[0].spec


def test_nothing_is_left_after_a_warm_up(op, device):
    policies.forget(shipped=True)
    op.warm_up(rows(M), B, BIAS)
    assert best().is_finished
    op(rows(M), B, BIAS)
    assert device.left == []


def test_what_a_weight_needs_is_loaded_meanwhile_on_the_call_s_device(op, device):
    a = rows(M)
    op(a, B, BIAS)
    decision = best()
    others = [spec for spec in decision.specs if spec != decision.spec]
    assert set(device.queued) == set(others)
    assert set(device.loaded) == {decision.spec}
    for spec in others:
        device.built(spec)
    assert set(device.loaded) == {decision.spec, *others}
    assert device.on_device == {(spec, a.device) for spec in others}
    # So calls with other numbers of rows find their best kernels.
    device.queued.clear()
    for m in (1, 17, 300, 4000):
        op(rows(m), B, BIAS)
        assert device.launches[-1].spec == best(m).spec
    assert device.queued == []


def test_warm_up_loads_on_the_device(device):
    a = rows(M)
    assert co.warm_up(co.gemm_bias_relu, a, B, BIAS) == len(best().specs)
    assert device.on_device == {(spec, a.device) for spec in best().specs}


def test_explain_says_what_serves_meanwhile(device, specs):
    other = next(s for s in best().specs if s != best().spec)
    a = rows(M)
    assert "now" not in {f.name for f in co.explain(co.gemm_bias_relu, a, B, BIAS).contract}
    device.absent.discard(other)
    found = co.explain(co.gemm_bias_relu, a, B, BIAS)
    (says,) = [f.says for f in found.contract if f.name == "now"]
    assert other.slug in says
    assert found.served_by == best().spec.slug
    assert device.loaded == {}
    device.absent.clear()
    assert "now" not in {f.name for f in co.explain(co.gemm_bias_relu, a, B, BIAS).contract}


def test_explain_says_where_the_kernel_comes_from(device, specs):
    a = rows(M)
    assert "kernel" not in {f.name for f in co.explain(co.gemm_bias_relu, a, B, BIAS).contract}
    device.absent.clear()
    (says,) = [f.says for f in co.explain(co.gemm_bias_relu, a, B, BIAS).contract if f.name == "kernel"]
    assert says == "compiled here"


def test_the_best_kernel_is_fetched_before_another_is_compiled(op, device, specs):
    device.remote.add(best().spec)
    op(rows(M), B, BIAS)
    assert [launch.spec for launch in device.launches] == [best().spec]
    assert device.queued[:1] != [best().spec]
    assert device.waiting == {}


def test_where_a_kernel_stands_in_the_remote_store_is_not_asked_by_the_call(op, device, specs):
    other = next(s for s in best().specs if s != best().spec)
    device.absent.discard(other)
    device.remote.add(best().spec)
    op(rows(M), B, BIAS)
    assert [launch.spec for launch in device.launches] == [other]
    assert device.queued[0] == best().spec


def test_the_log_has_the_kernel_of_each_new_shape(op, device, caplog):
    caplog.set_level(logging.DEBUG, "cutlass_ops")
    for _ in range(2):
        op(rows(M), B, BIAS)
    said = [r.getMessage() for r in caplog.records if r.name == "cutlass_ops"]
    assert said == [f"relu {M}x{N}x{K}: {best().spec.slug} serves"]


# ---- The background ------------------------------------------------------------------------------------------------


def test_what_a_call_awaits_comes_first(session, monkeypatch, specs_of_sm80):
    monkeypatch.setenv("CUTLASS_OPS_JOBS", "1")
    begun, go, built = threading.Event(), threading.Event(), []

    def build(spec, cancel):
        begun.set()
        go.wait(60)
        built.append(spec)
        return lambda: spec

    background, arrived = Background(session, build), []
    first, second, third, fourth = specs_of_sm80
    background.add([first, second, third])
    begun.wait(60)
    background.add([third], first=True)
    background.add([fourth], first=True)
    background.when_built(third, arrived.append)
    go.set()
    background.wait()
    assert built == [first, third, fourth, second]
    assert arrived == [third]


def test_kernels_are_given_away_by_a_thread_that_calls_do_not_wait_for(session, specs_of_sm80, caplog):
    caplog.set_level(logging.INFO, "cutlass_ops")
    first, second, third, fourth = specs_of_sm80
    taken, released = [], threading.Event()

    def then(spec, artifact):
        assert (artifact, threading.current_thread().name) == (spec, "cutlass_ops_arrivals")
        released.wait(60)
        taken.append(spec)
        if spec == second:
            raise RuntimeError("no memory for it")

    background = Background(session, lambda spec, cancel: lambda: spec)
    background.add([first, second], then=then)
    background.add([second, third], then=then)  # each once
    background.add([fourth])
    background.when_built(fourth, lambda artifact: then(fourth, artifact))
    assert taken == []
    released.set()
    background.wait()
    assert sorted(taken, key=specs_of_sm80.index) == specs_of_sm80
    assert "no memory for it" in caplog.text
    # What was built before is given away by that thread as well.
    background.when_built(first, lambda artifact: then(first, artifact))
    background.wait()
    assert taken[4:] == [first]


def test_what_a_call_awaits_is_given_away_before_the_others(session, specs_of_sm80):
    first, second, third, fourth = specs_of_sm80
    taken, begun, released = [], threading.Event(), threading.Event()

    def then(spec, artifact):
        begun.set()
        released.wait(60)
        taken.append(spec)

    background = Background(session, lambda spec, cancel: lambda: spec)
    background.add([first], then=then)
    assert begun.wait(60)  # the others wait for the first one
    background.add([second, third], then=then)
    while background._queue.unfinished_tasks:
        time.sleep(0.001)
    background.add([fourth], first=True, then=then)
    background.when_built(third, lambda artifact: None)  # one that was built already
    while background._queue.unfinished_tasks:
        time.sleep(0.001)
    released.set()
    background.wait()
    assert (taken[0], {*taken[1:3]}, taken[3]) == (first, {third, fourth}, second)


def test_why_a_kernel_could_not_be_built_is_kept_and_logged(session, specs_of_sm80, caplog):
    def build(spec, cancel):
        raise CompileError("too complex")

    background = Background(session, build)
    background.when_built(specs_of_sm80[0], lambda _: pytest.fail("it is not built"))
    background.add(specs_of_sm80[:1])
    background.wait()
    assert str(background.failure(specs_of_sm80[0])) == "too complex"
    assert background.failure(specs_of_sm80[1]) is None
    assert "too complex" in caplog.text


@pytest.fixture
def specs_of_sm80():
    from fake_toolkit import sm80_spec

    return [sm80_spec(stages) for stages in (2, 3, 4, 5)]


def test_what_is_ready_and_what_arrives_is_loaded_on_the_device(monkeypatch):
    gpu, found = torch.device("cuda", 1), []

    class Loaded:
        def __init__(self, name):
            self.name = name

        def load_on(self, device):
            found.append((self.name, device))

    registry = Registry(Session())
    monkeypatch.setattr(registry, "kernels", lambda specs: [Loaded(each) for each in specs])
    assert registry.ready(["one", "two"], gpu) == 2
    monkeypatch.setattr(loader, "load", Loaded)
    registry.take("three", "artifact", gpu)
    registry.take("three", "artifact", gpu)  # is there already
    assert found == [("one", gpu), ("two", gpu), ("artifact", gpu)]
    assert registry.has("three")
