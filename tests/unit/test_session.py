"""Two sessions do not see each other's bundles, kernels and choices, and a call that is served warm asks for none."""

import threading
import time

import pytest
import torch
from bundles import packed
from choosing import ODD, SLOW, chosen, user_table
from fake_device import FakeDevice, fake_device
from fake_toolkit import FakeToolkit, sm80_spec
from signatures import A100, signature

import cutlass_ops as co
from cutlass_ops.artifacts import loader
from cutlass_ops.artifacts import store as stores
from cutlass_ops.artifacts.bundles import Bundles
from cutlass_ops.artifacts.store import KernelStore
from cutlass_ops.base import env
from cutlass_ops.base import session as sessions
from cutlass_ops.base.session import Part, Session, cached, current
from cutlass_ops.choose import policies, tables
from cutlass_ops.choose.tables import Measured
from cutlass_ops.compilation import toolchain
from cutlass_ops.compilation.apart import Apart
from cutlass_ops.compilation.background import Background
from cutlass_ops.compilation.builder import build_artifact
from cutlass_ops.run.registry import Registry


@pytest.fixture(autouse=True)
def own(session):
    """Each test has a session of its own."""


@pytest.fixture
def bundle(tmp_path):
    packed(tmp_path, [sm80_spec(3)]).write(tmp_path / "a")
    return tmp_path / "a"


@pytest.fixture
def loaded(monkeypatch):
    """What was to be loaded; no library is."""
    seen = []
    monkeypatch.setattr(loader, "load", lambda artifact: seen.append(artifact) or artifact)
    return seen


# ---- What a session is ---------------------------------------------------------------------------------------------


class Counter(Part):
    """A part of a test's."""

    def __init__(self, session):
        super().__init__(session)
        self.count = 0


def test_a_session_has_one_object_of_each_part():
    first, second = Session(), Session()
    assert first.part(Counter) is first.part(Counter) is not second.part(Counter)
    assert first.part(Counter).session is first
    with first.active():
        assert Counter.current() is first.part(Counter)
        with second.active() as active:
            assert active is current() is second
            assert Counter.current() is second.part(Counter)
        assert current() is first


def test_after_an_error_the_session_before_is_active_again():
    before = current()
    with pytest.raises(ZeroDivisionError), Session().active():
        raise ZeroDivisionError
    assert current() is before


def test_a_test_puts_its_own_parts_in_place_of_others():
    part = object()
    with Session({Counter: part}).active():
        assert Counter.current() is part
    assert isinstance(Counter.current(), Counter)


def test_threads_that_ask_for_a_part_at_the_same_time_have_the_same_one():
    class Slow(Part):
        def __init__(self, session):
            super().__init__(session)
            time.sleep(0.05)

    found, barrier = [], threading.Barrier(4)

    def ask():
        barrier.wait()
        found.append(Slow.current())

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [Slow.current()] * 4


def test_a_session_keeps_what_a_cached_function_returned():
    asked = []

    @cached(maxsize=2)
    def square(x):
        """Return x * x."""
        asked.append(x)
        return x * x

    assert (square.__name__, square.__doc__) == ("square", "Return x * x.")
    assert [square(3), square(3), asked] == [9, 9, [3]]
    with Session().active():
        assert [square(3), square(3), asked] == [9, 9, [3, 3]]
        square.cache_clear()
        assert [square(3), asked] == [9, [3, 3, 3]]
    assert [square(3), len(asked)] == [9, 3]
    assert [square(x) for x in (4, 5, 3)] == [16, 25, 9]
    assert asked == [3, 3, 3, 4, 5, 3]


# ---- Bundles and kernels -------------------------------------------------------------------------------------------


def test_no_session_sees_anothers_bundles(bundle):
    opened = co.load_bundle(bundle)
    with Session().active():
        assert Bundles.current().all() == ()
        assert Bundles.current().find(sm80_spec(3)) is None
    assert Bundles.current().all() == (opened,)


def test_bundles_are_put_aside_for_one_session(bundle):
    co.load_bundle(bundle)
    with Bundles.aside():
        assert Bundles.current().all() == ()
        with Session().active():
            assert co.load_bundle(bundle) in Bundles.current().all()
    assert len(Bundles.current().all()) == 1


def test_no_session_sees_anothers_kernels(bundle, loaded):
    co.load_bundle(bundle)
    co.registry.kernel(sm80_spec(3))
    first = co.registry
    assert [e.spec for e in first.entries()] == [sm80_spec(3)]
    with Session().active():
        assert co.registry is Registry.current() is not first
        assert co.registry.entries() == ()
        co.load_bundle(bundle)
        co.registry.kernel(sm80_spec(3))
        assert len(loaded) == 2
    assert co.registry is first
    co.registry.kernel(sm80_spec(3))
    assert len(loaded) == 2


def test_a_registry_and_a_background_look_in_their_own_sessions_bundles(bundle, loaded, monkeypatch):
    first = current()
    co.load_bundle(bundle)
    asked = []
    monkeypatch.setattr(Apart, "build", lambda apart, spec, cancel: asked.append(spec))
    with Session().active() as second:
        first.part(Registry).kernel(sm80_spec(3))
        first.part(Background).add([sm80_spec(3)])
        first.part(Background).wait()
        assert (len(loaded), asked) == (1, [])
        second.part(Background).add([sm80_spec(3)])
        second.part(Background).wait()
        assert asked == [sm80_spec(3)]
    assert first.part(Registry).entries()


# ---- Choices and other things that are kept ------------------------------------------------------------------------


def test_no_session_sees_anothers_choices():
    before = chosen(ODD)
    with Session().active():
        user_table(Measured(SLOW, 10.0, 0.0))
        assert chosen(ODD)[0].config == SLOW != before[0].config
    # It has not read the table, and does when it is told to.
    assert chosen(ODD) == before
    policies.forget()
    assert chosen(ODD)[0].config == SLOW


def test_each_session_says_what_is_wrong_with_a_table():
    path = tables.path_of(env.tuning_dir(), A100.name, signature())
    path.parent.mkdir()
    path.write_text("{")
    for session in (current(), Session()):
        with session.active(), pytest.warns(RuntimeWarning, match="a tuning table is ignored"):
            chosen(ODD, device=A100)


def test_each_session_examines_the_compiler_and_reads_the_store(tmp_path, monkeypatch):
    kit, store, asked = FakeToolkit(tmp_path / "kit"), KernelStore(tmp_path / "store"), []
    examined, source_key = toolchain._examined, stores.source_key
    monkeypatch.setattr(toolchain, "_examined", lambda *of: asked.append("compiler") or examined(*of))
    monkeypatch.setattr(stores, "source_key", lambda of: asked.append("store") or source_key(of))
    build_artifact(sm80_spec(), store=store, toolchain=kit.find())
    monkeypatch.setenv("CUTLASS_OPS_JIT", "0")
    for session in (current(), Session()):
        with session.active():
            for _ in range(2):
                kit.find()
                build_artifact(sm80_spec(), store=store)
    assert asked == ["compiler", "store"] * 2


# ---- Warm calls ----------------------------------------------------------------------------------------------------

A, B, BIAS = torch.ones(48, 264).bfloat16(), torch.ones(520, 264).bfloat16().t(), torch.ones(520)


def test_no_session_sees_how_another_served_a_call(monkeypatch):
    op = co.gemm_bias_relu
    with fake_device(monkeypatch, A100) as first:
        for _ in range(2):
            op(A, B, BIAS)
        served = op.served_warm
        second = FakeDevice(A100)
        with Session({Registry: second, Background: second.background}).active():
            op(A, B, BIAS)
            assert (op.served_warm, len(second.launches), len(first.launches)) == (served, 1, 2)
            op(A, B, BIAS)
            assert (op.served_warm, len(second.launches)) == (served + 1, 2)
        # It has to look again, and loads nothing.
        first.closed = True
        op(A, B, BIAS)
        assert (op.served_warm, len(first.launches)) == (served + 1, 3)


def test_a_warm_call_asks_for_no_session(monkeypatch):
    op = co.gemm_bias_relu
    with fake_device(monkeypatch, A100) as device:
        d = op(A, B, BIAS)
        with monkeypatch.context() as patch:
            patch.setattr(sessions, "_current", None)
            assert torch.equal(op(A, B, BIAS), d)
            with pytest.raises(AttributeError):
                op(A[:1], B, BIAS)
        assert len(device.launches) == 2
