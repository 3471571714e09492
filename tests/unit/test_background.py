"""Kernels are compiled behind the caller's back: each once, failures left to whoever needs them, nothing at the end."""

import os
import subprocess
import sys
import threading
import time

import pytest
from fake_toolkit import sm80_spec
from processes import WITHOUT_PYTORCH

from cutlass_ops.base.session import Session
from cutlass_ops.compilation import background as background_module
from cutlass_ops.compilation.background import Background

SPECS = [sm80_spec(stages) for stages in (2, 3, 4, 5)]


@pytest.fixture
def built():
    return []


@pytest.fixture
def background(built, monkeypatch):
    monkeypatch.setenv("CUTLASS_OPS_JOBS", "2")
    lock = threading.Lock()

    def build(spec, cancel):
        with lock:
            built.append((spec, threading.current_thread().name))
        time.sleep(0.01)
        if spec == SPECS[1]:
            raise RuntimeError("this one cannot be built")

    return Background(Session(), build)


def test_each_is_built_once_and_a_failure_stops_nothing(background, built):
    background.add(SPECS)
    background.add(SPECS[::-1])
    background.wait()
    assert sorted(s.slug for s, _ in built) == sorted(s.slug for s in SPECS)
    assert {name for _, name in built} == {"cutlass_ops_background"}
    background.add([sm80_spec(2, "f16")])
    background.wait()
    assert len(built) == 5


def test_what_a_wrong_variable_has_left_out_is_built_later(background, built, monkeypatch):
    monkeypatch.setenv("CUTLASS_OPS_JOBS", "many")
    with pytest.raises(ValueError, match="CUTLASS_OPS_JOBS"):
        background.add(SPECS[:1])
    assert not background.pending(SPECS[0])
    monkeypatch.setenv("CUTLASS_OPS_JOBS", "1")
    background.add(SPECS[:1])
    background.wait()
    assert [spec for spec, _ in built] == SPECS[:1]


def test_threads_that_may_hold_the_interpreter_s_lock_give_way_to_nobody():
    found = []

    def nice(*_):
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return lambda: None

    background = Background(Session(), nice)
    background.add(SPECS[:1], then=nice)
    background.wait()
    assert found == [os.getpriority(os.PRIO_PROCESS, threading.get_native_id())] * 2


def test_the_caller_does_not_wait():
    go, in_time = threading.Event(), []
    background = Background(Session(), lambda spec, cancel: in_time.append(go.wait(60)))
    background.add(SPECS)
    assert in_time == []
    go.set()
    background.wait()
    assert in_time == [True] * len(SPECS)


def test_what_calls_left_is_done_in_turn_once_it_is_calm(caplog, monkeypatch):
    monkeypatch.setattr(background_module, "_CALM", 1.0)
    done = []
    background = Background(Session(), lambda spec, cancel: lambda: spec)
    begin = time.monotonic()
    background.later(lambda: done.append((threading.current_thread().name, time.monotonic())))
    background.later(lambda: 1 / 0)
    time.sleep(0.1)
    assert done == []
    background.later(lambda: done.append((threading.current_thread().name, time.monotonic())))
    # Kernels do not wait for it.
    background.add(SPECS[:1], then=lambda spec, artifact: done.append((spec, time.monotonic())))
    background.wait()
    (first, _), *others = done
    assert first == SPECS[0]
    assert [name for name, _ in others] == ["cutlass_ops_left"] * 2
    assert all(at > begin + 1.1 for _, at in others)
    assert "division by zero" in caplog.text


def test_what_calls_left_is_done_at_the_end_for_a_moment(monkeypatch):
    monkeypatch.setattr(background_module, "_CALM", 60)
    monkeypatch.setattr(background_module, "_AT_THE_END", 1.0)
    done, released = [], threading.Event()
    background = Background(Session(), lambda spec, cancel: lambda: spec)
    background.later(lambda: done.append(1))
    background.later(lambda: released.wait(60))
    background.later(lambda: done.append(2))
    threading.Timer(2 * background_module._AT_THE_END, released.set).start()
    background.close()
    background.later(lambda: done.append(3))
    background.wait()
    assert done == [1]


def test_a_process_that_ends_soon_leaves_its_decisions_to_the_next(tmp_path):
    code = """
import sys
sys.path.insert(0, "tests/unit")
from signatures import H100, signature
from cutlass_ops.choose import dispatch
from cutlass_ops.compilation.background import Background
from cutlass_ops.declare.problem import Problem
decision = dispatch.decide(signature(), H100, Problem(100, 4096, 2560))
print(decision.is_finished)
Background.current().later(decision.finish)
"""
    given = os.environ | {"CUTLASS_OPS_CACHE_DIR": str(tmp_path / "store"), "CUTLASS_OPS_CHOICES": "1"}
    run = [sys.executable, "-c", WITHOUT_PYTORCH + code]
    assert [subprocess.check_output(run, text=True, env=given).strip() for _ in range(2)] == ["False", "True"]


def test_closing_cancels_what_runs_and_drops_what_waits(monkeypatch):
    monkeypatch.setenv("CUTLASS_OPS_JOBS", "2")
    seen, cancelled = [], []

    def build(spec, cancel):
        seen.append(spec)
        cancelled.append(cancel.wait(60))

    background = Background(Session(), build)
    background.add(SPECS)
    while not seen:
        time.sleep(0.001)
    background.close()
    background.add([sm80_spec(2, "f16")])
    background.wait()
    assert sm80_spec(2, "f16") not in seen
    assert len(seen) < len(SPECS)
    assert cancelled == [True] * len(seen)


def test_the_interpreter_ends_at_once():
    code = """
import os, sys
sys.path.insert(0, "tests/unit")
from fake_toolkit import sm80_spec
from cutlass_ops.base.session import Session
from cutlass_ops.compilation.background import Background
def build(spec, cancel):
    os.write(1, b"begun ")
    os.write(1, b"cancelled " if cancel.wait(600) else b"waited ")
background = Background(Session(), build)
background.add([sm80_spec(2), sm80_spec(3)])
"""
    said = subprocess.check_output([sys.executable, "-c", WITHOUT_PYTORCH + code], text=True).split()
    assert "waited" not in said


def test_a_forked_process_has_threads_of_its_own(tmp_path):
    code = """
import os, sys
sys.path.insert(0, "tests/unit")
from fake_toolkit import sm80_spec
from cutlass_ops.base.session import Session
from cutlass_ops.compilation.background import Background
built = []
background = Background(Session(), lambda spec, cancel: built.append(spec))
background.add([sm80_spec(2)])
background.wait()
child = os.fork()
if child == 0:
    background.add([sm80_spec(3)])
    background.wait()
    os._exit(0 if built[-1] == sm80_spec(3) else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", WITHOUT_PYTORCH + code], check=True)
