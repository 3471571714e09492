"""The user's own tuning tables: whatever is wrong with them, or with where they lie, no call fails by it."""

import json
import os
import re
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from choosing import ODD, SLOW, chosen, user_table
from signatures import H100, signature

from cutlass_ops.artifacts.bundles import Bundles
from cutlass_ops.artifacts.store import KernelStore
from cutlass_ops.base import env
from cutlass_ops.base.errors import ConfigError, MissingKernelError, StoreError
from cutlass_ops.choose import dispatch, policies, tables
from cutlass_ops.choose.tables import Measured, Point, Table
from cutlass_ops.compilation.builder import build_artifact, build_many
from cutlass_ops.declare.config import ClusterShape, Sm90Config, ThreadblockShape
from cutlass_ops.declare.problem import Problem
from cutlass_ops.tuner import tuning
from tests.sampling import sampled

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


@pytest.mark.parametrize(
    "error", [RuntimeError("Could not determine home directory."), KeyError("uid not found: 12345")]
)
def test_a_user_that_the_system_does_not_know_has_no_tables(usual, at_home, monkeypatch, error):
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(Path, "home", raising(error))
    policies.forget()
    assert chosen(ODD) == usual
    with pytest.raises(StoreError, match=r"no kernel store.*no home folder.*CUTLASS_OPS_CACHE_DIR"):
        KernelStore.default()
    with pytest.raises(StoreError, match=r"tuning tables.*no home folder.*CUTLASS_OPS_CACHE_DIR"):
        tuning._folder()


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
    with pytest.raises(ValueError, match="CUTLASS_OPS_TUNING_DIR"):
        env.tuning_dir()


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


def holding(change):
    """Leave a table that holds what no tuner writes."""

    def make():
        user_table(Measured(SLOW, 10.0, 0.0), Measured(FAST, 20.0, 1.0))
        data = json.loads(path().read_text())
        change(data["points"][0]["measured"][1])
        path().write_text(json.dumps(data))

    return make


HOSTILE = {
    "a time of 0": holding(lambda row: row.__setitem__(2, 0)),
    "a time without an end": holding(lambda row: row.__setitem__(2, 10**400)),
    "a part of -1": holding(lambda row: row.__setitem__(3, -1)),
    "a part below": holding(lambda row: row.__setitem__(3, -3.5)),
    "a part without an end": holding(lambda row: row.__setitem__(3, 10**400)),
    "a part that is none": holding(lambda row: row.__setitem__(3, float("nan"))),
}


@pytest.mark.parametrize(
    "make",
    [another_signature, another_device, a_folder, a_pipe, *sampled(3, HOSTILE.values())],
    ids=["another signature", "another device", "a folder", "a pipe", *HOSTILE],
)
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


def test_a_disk_that_is_full_or_read_only_is_one_too(tmp_path, monkeypatch):
    for error in (OSError(28, "No space left on device"), OSError(30, "Read-only file system")):
        monkeypatch.setattr(tables.tempfile, "TemporaryFile", raising(error))
        with pytest.raises(StoreError, match=rf"{re.escape(str(tmp_path))}.*{error.strerror}.*CUTLASS_OPS_CACHE_DIR"):
            tables.prepare(tmp_path)


def test_preparing_leaves_an_empty_private_folder(tmp_path):
    folder = tmp_path / "a" / "b"
    tables.prepare(folder)
    tables.prepare(folder)
    assert list(folder.iterdir()) == []
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_table_in_the_way_is_no_matter_of_the_folder(tmp_path):
    path().parent.mkdir()
    path().write_text("{")
    with pytest.raises(ConfigError, match="is not a tuning table"):
        tables.update(path(), Table(H100.name, 132, signature()))


# ---- The store -------------------------------------------------------------------------------------------------------


def spec():
    return chosen(ODD)[0]


@pytest.mark.parametrize("home", ["", "here", "/dev/null"])
def test_with_compilation_switched_off_a_store_that_cannot_be_used_has_no_kernel(at_home, monkeypatch, home):
    monkeypatch.setenv("HOME", home)
    monkeypatch.setenv("CUTLASS_OPS_JIT", "0")
    for build in (build_artifact, lambda spec: build_many([spec])):
        with pytest.raises(MissingKernelError, match="CUTLASS_OPS_JIT=0"):
            build(spec())


def test_a_store_that_may_not_be_looked_into_has_none_either(at_home, monkeypatch, tmp_path):
    monkeypatch.setenv("CUTLASS_OPS_JIT", "0")
    root, stat = KernelStore.default().root, Path.stat

    def refuses(self, **more):
        if self == root:
            raise PermissionError(13, "Permission denied", str(self))
        return stat(self, **more)

    monkeypatch.setattr(Path, "stat", refuses)
    with pytest.raises(MissingKernelError, match=rf"{re.escape(str(root))} cannot be used.*CUTLASS_OPS_CACHE_DIR"):
        build_artifact(spec())
    monkeypatch.delenv("CUTLASS_OPS_JIT")
    with pytest.raises(StoreError, match=r"cannot be used.*CUTLASS_OPS_CACHE_DIR"):
        KernelStore.default().lookup("0" * 64)


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
