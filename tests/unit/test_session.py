"""Two sessions do not see each other's bundles, kernels and choices, and a call that is served warm asks for none."""

import pytest
import torch
from bundles import packed
from choosing import ODD, SLOW, chosen, user_table
from fake_device import FakeDevice, fake_device
from fake_toolkit import sm80_spec
from signatures import A100

import cutlass_ops as co
from cutlass_ops.artifacts import loader
from cutlass_ops.base import session as sessions
from cutlass_ops.base.session import Session
from cutlass_ops.choose import policies
from cutlass_ops.choose.tables import Measured
from cutlass_ops.compilation.background import Background
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


# ---- Bundles and kernels -------------------------------------------------------------------------------------------


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
