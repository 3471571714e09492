"""The user's own tuning tables: whatever is wrong with them, or with where they lie, no call fails by it."""

import os
import re
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from choosing import ODD, SLOW, chosen, user_table
from signatures import H100, signature

from cutlass_ops.artifacts.bundles import Bundles
from cutlass_ops.base import env
from cutlass_ops.base.errors import StoreError
from cutlass_ops.choose import dispatch, policies, tables
from cutlass_ops.choose.tables import Measured, Point, Table
from cutlass_ops.declare.config import ClusterShape, ThreadblockShape
from cutlass_ops.declare.problem import Problem
from cutlass_ops.kinds.sm90.config import Sm90Config

FAST = Sm90Config(ThreadblockShape(128, 192, 64), ClusterShape(2, 1))

pytestmark = pytest.mark.usefixtures("session")


@pytest.fixture
def usual():
    return chosen(ODD)


@pytest.fixture
def at_home(monkeypatch, tmp_path):
    """Have nothing but HOME say where things lie."""
    for variable in (env.TUNING_DIR, env.CACHE_DIR, env.XDG_CACHE_HOME):
        monkeypatch.delenv(variable.name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    policies.forget()


def path(of=None):
    return tables.path_of(env.tuning_dir(), H100.name, of or signature())


def raising(error):
    def raises(*_, **__):
        raise error

    return raises


# ---- Nothing is there ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("home", ["", "here", "/dev/null", "/nowhere"])
def test_without_a_home_folder_calls_are_served_as_if_nothing_was_tuned(usual, at_home, monkeypatch, home):
    monkeypatch.setenv("HOME", home)
    policies.forget()
    assert chosen(ODD) == usual


# ---- What is there cannot be used ------------------------------------------------------------------------------------


def warned(*, match):
    """Expect that a choice says what is wrong, once for all signatures and calls, and is what it would be without."""

    def ask():
        for of in (signature(dtype="f16"), signature()):
            policies._policy.cache_clear()
            found = chosen(ODD, of)
        return found

    with pytest.warns(RuntimeWarning, match=match) as said:
        found = ask()
    assert ask() == found
    return found, len(said)


def test_where_warnings_are_errors_no_call_fails(usual, capsys):
    """As they are by `python -W error`, and where tests run: what is wrong is said all the same, and once."""
    path = tables.path_of(env.tuning_dir(), H100.name, signature())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{")
    policies.forget()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chosen(ODD) == usual
        policies._policy.cache_clear()
        assert chosen(ODD) == usual
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("cutlass_ops: a tuning table is ignored: ")


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), OSError(5, "Input/output error")])
def test_a_folder_that_cannot_be_read_is_said_once(usual, monkeypatch, error):
    policies.forget()
    stat = Path.stat

    def refuses(self, **more):
        if self.parent == env.tuning_dir():
            raise error
        return stat(self, **more)

    monkeypatch.setattr(Path, "stat", refuses)
    match = f"ignored: {re.escape(str(env.tuning_dir()))} cannot be read: {error.strerror}.*CUTLASS_OPS_TUNING_DIR"
    assert warned(match=match) == (usual, 1)


def loop(at):
    at.symlink_to(at)


def a_file(at):
    at.write_text("")


def dangling_table(at):
    at.mkdir()
    for of in (signature(), signature(dtype="f16")):
        tables.path_of(at, H100.name, of).symlink_to(at / "none")


@pytest.mark.parametrize("make", [loop, a_file, dangling_table])
def test_a_folder_that_is_none_is_said_once(usual, make):
    make(env.tuning_dir())
    policies.forget()
    assert warned(match=r"ignored: .* cannot be read: .*CUTLASS_OPS_TUNING_DIR") == (usual, 1)


@pytest.mark.parametrize("name", ["relative", "~nobody-has-this-name/tuning"])
def test_a_folder_that_no_variable_can_mean_is_said_once(usual, monkeypatch, name):
    monkeypatch.setenv("CUTLASS_OPS_TUNING_DIR", name)
    policies.forget()
    assert warned(match=f"ignored: CUTLASS_OPS_TUNING_DIR .*{name}") == (usual, 1)


def another_signature():
    user_table(Measured(SLOW, 10.0, 0.0), of=signature(dtype="f16"))
    path(signature(dtype="f16")).rename(path())


def another_device():
    user_table(Measured(SLOW, 10.0, 0.0), device="another")
    tables.path_of(env.tuning_dir(), "another", signature()).rename(path())


def a_folder():
    path().mkdir(parents=True)


def a_pipe():
    path().parent.mkdir()
    os.mkfifo(path())


@pytest.mark.parametrize("make", [another_signature, another_device, a_folder, a_pipe])
def test_a_table_that_is_none_is_left_out(usual, make):
    make()
    policies.forget()
    found, count = warned(match=f"ignored: .*{re.escape(path().name)}")
    assert found == usual
    assert count == 1


def test_what_was_measured_on_a_part_of_a_chip_is_taken(usual):
    """By the same name, with fewer multiprocessors: nothing of the whole chip's table can be merged with it."""
    part = Table(H100.name, 66, signature(), (Point(ODD, "2026-11-21", (Measured(SLOW, 10.0, 0.0),)),)).select()
    tables.update(path(), part)
    policies.forget()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        spec, _ = chosen(ODD, device=replace(H100, multiprocessors=66))
    assert spec.config == SLOW != usual[0].config
    assert len(policies.policy(signature(), replace(H100, multiprocessors=66)).kernels) > 40


def test_a_time_of_what_cannot_be_launched_is_no_time():
    """The model has no time to compare it with, and would know nothing of any other kernel."""
    huge = Problem(64, 16_800_000, 64)
    single = Sm90Config(ThreadblockShape(64, 64, 64), schedule="warp_specialized")
    user_table(Measured(single, 10.0, 0.0), Measured(SLOW, 20.0, 1.0), problem=huge)
    assert chosen(huge)[0].config == single
    for rows in (1, 64, 4096):
        assert chosen(Problem(rows, 16_800_000, 64))[0].config in {s.config for s in dispatch.specs(signature(), H100)}


# ---- Writing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [a_file, loop])
def test_a_folder_that_cannot_be_written_is_an_error_that_names_it(make, tmp_path):
    make(tmp_path / "tuning")
    table = Table(H100.name, 132, signature(), (Point(ODD, "2026-11-21", (Measured(SLOW, 10.0, 0.0),)),))
    for write in (lambda: tables.prepare(tmp_path / "tuning"), lambda: tables.update(path(), table)):
        with pytest.raises(StoreError) as caught:
            write()
        assert str(tmp_path / "tuning") in str(caught.value)
        assert "CUTLASS_OPS_CACHE_DIR" in str(caught.value)


# ---- The store -------------------------------------------------------------------------------------------------------


def spec():
    return chosen(ODD)[0]


def test_what_a_bundle_has_needs_no_home(usual, at_home, monkeypatch):
    """Where a bundle decided nothing between its kernels, tables and the model do: the user's too, if there are any."""
    kernels = (SLOW, FAST, usual[0].config)
    monkeypatch.setattr(Bundles, "configs", lambda *_, **__: kernels)
    monkeypatch.setattr(Bundles, "choice", lambda *_, **__: None)
    for home in ("", "here", "/dev/null"):
        monkeypatch.setenv("HOME", home)
        policies.forget()
        assert chosen(ODD)[0].config == usual[0].config
        assert dispatch.decide(signature(), H100, ODD).peer is None
