"""Kernels are found, compiled and loaded behind the caller's back: each once, what calls need first."""

import subprocess
import sys
import time
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from fake_toolkit import FakeToolkit, sm80_spec
from processes import WITHOUT_PYTORCH

from cutlass_ops.artifacts.bundles import Bundles
from cutlass_ops.base.errors import CompileError, StoreError, ToolchainError
from cutlass_ops.base.session import Session
from cutlass_ops.compilation import background as background_module
from cutlass_ops.compilation import lookup
from cutlass_ops.compilation.apart import Apart, Lost
from cutlass_ops.compilation.background import Background

SPECS = [sm80_spec(stages) for stages in (2, 3, 4, 5)]


class Compilers:
    """Stand for the process apart: they build what they are given when a test says so."""

    def __init__(self):
        self.asked, self.futures = [], {}

    def __call__(self, spec, needed):
        self.asked.append((spec, needed))
        return self.futures.setdefault(spec, Future())

    def built(self, spec):
        self.futures[spec].set_result(SimpleNamespace(spec=spec, where="here"))


@pytest.fixture
def compilers():
    return Compilers()


@pytest.fixture
def stored(monkeypatch):
    """What the store has."""
    found = {}
    monkeypatch.setattr(lookup, "recalled", found.get)
    return found


@pytest.fixture
def background(compilers, stored):
    session = Session({Bundles: SimpleNamespace(find=lambda spec: None)})
    found = Background(session, compilers)
    yield found
    found._ends = True


def test_a_kernel_is_compiled_once_and_loaded_once_for_all_who_need_it(background, compilers):
    loaded = []
    wanted = [background.need(SPECS[0], loaded.append) for _ in range(3)]
    assert wanted[0].looked.wait(300)
    assert loaded == []
    compilers.built(SPECS[0])
    assert wanted[0].result(300).spec == SPECS[0]
    assert [each is wanted[0] for each in wanted] == [True] * 3
    assert compilers.asked == [(SPECS[0], True)]
    assert [each.spec for each in loaded] == SPECS[:1]


@pytest.mark.parametrize(
    ("error", "attempts"),
    [
        (StoreError("no space is left"), 2),
        (ToolchainError("ptxas was killed"), 2),
        (OSError(28, "No space left on device"), 2),
        (CompileError("error: x"), 1),
    ],
)
def test_what_a_machine_lacks_for_a_while_is_not_held_against_a_kernel(compilers, monkeypatch, error, attempts):
    now = [0.0]
    monkeypatch.setattr(lookup, "recalled", lambda spec: None)
    monkeypatch.setattr(background_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    background = Background(Session({Bundles: SimpleNamespace(find=lambda spec: None)}), compilers)
    first = background.need(SPECS[0], print)
    assert first.looked.wait(300)
    compilers.futures.pop(SPECS[0]).set_exception(error)
    assert first.exception(300) is error
    for now[0] in (1.0, 59.0):
        assert background.need(SPECS[0], print) is first
    now[0] = 61.0
    second = background.need(SPECS[0], print)
    assert (second is first) == (attempts == 1)
    assert second.looked.wait(300)
    assert len(compilers.asked) == attempts
    if attempts == 2:
        compilers.built(SPECS[0])
        assert second.result(300).spec == SPECS[0]
    background._ends = True


def test_what_the_store_has_is_loaded_without_a_compiler_also_while_others_are_compiled(background, compilers, stored):
    background.guess(SPECS[1:], lambda spec, artifact: None)
    while len(compilers.asked) < 3:
        time.sleep(0.001)
    stored[SPECS[0]] = SimpleNamespace(where="the store")
    loaded = []
    assert background.need(SPECS[0], loaded.append).result(300).where == "the store"
    assert len(loaded) == 1
    assert SPECS[0] not in [spec for spec, _ in compilers.asked]


def test_a_guess_that_a_call_needs_later_is_compiled_before_the_others(background, compilers):
    background.guess(SPECS, lambda spec, artifact: None)
    while len(compilers.asked) < 4:
        time.sleep(0.001)
    assert compilers.asked == [(spec, False) for spec in SPECS]
    wanted = background.need(SPECS[2], lambda artifact: None)
    assert not background.wait(0, needed=True)
    while len(compilers.asked) < 5:
        time.sleep(0.001)
    assert compilers.asked[-1] == (SPECS[2], True)
    compilers.built(SPECS[2])
    assert background.wait(300, needed=True)
    assert wanted.done()
    assert not background.wait(0.01)  # the guesses


def test_a_failure_stops_nothing_and_is_remembered(background, compilers, caplog):
    first, second = (background.need(spec, lambda artifact: None) for spec in SPECS[:2])
    assert second.looked.wait(300)
    compilers.futures[SPECS[0]].set_exception(CompileError("too complex"))
    compilers.built(SPECS[1])
    assert second.result(300)
    assert str(first.exception(300)) == "too complex"
    assert background.need(SPECS[0], lambda artifact: None) is first
    assert "cannot be compiled in the background" in caplog.text


@pytest.mark.parametrize("lost", [True, False], ids=["no process", "removed since it was built"])
@pytest.mark.usefixtures("session")
def test_a_kernel_that_no_process_has_built_is_built_here(tmp_path, monkeypatch, lost):
    kit = FakeToolkit(tmp_path / "kit")
    for name, value in (("CACHE_DIR", tmp_path / "store"), ("NVCC", kit.nvcc)):
        monkeypatch.setenv(f"CUTLASS_OPS_{name}", str(value))
    monkeypatch.setenv("NVCC_CCBIN", str(kit.host))
    answer = Future()
    answer.set_exception(Lost("it has ended")) if lost else answer.set_result("0" * 64)
    monkeypatch.setattr(Apart, "submit", lambda apart, spec, urgent: answer)
    loaded = []
    assert Background.current().need(SPECS[0], loaded.append).result(300).spec == SPECS[0]
    assert (len(loaded), kit.compilations) == (1, 1)


def test_the_interpreter_ends_at_once():
    code = """
import sys
sys.path.insert(0, "tests/unit")
from concurrent.futures import Future
from fake_toolkit import FakeToolkit, sm80_spec
from cutlass_ops.base.session import Session
from cutlass_ops.compilation.background import Background
background = Background(Session(), lambda spec, needed: Future())
background.need(sm80_spec(2), lambda artifact: None)
background.soon(lambda: None)
"""
    subprocess.run([sys.executable, "-c", WITHOUT_PYTORCH + code], check=True, timeout=300)


def test_a_forked_process_has_a_thread_of_its_own():
    code = """
import os, sys
sys.path.insert(0, "tests/unit")
from cutlass_ops.base.session import Session
from cutlass_ops.compilation.background import Background
done = []
background = Background(Session())
background.soon(lambda: done.append(os.getpid()))
background.wait()
child = os.fork()
if child == 0:
    background.soon(lambda: done.append(os.getpid()))
    background.wait()
    os._exit(0 if done[-1] == os.getpid() else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", WITHOUT_PYTORCH + code], check=True, timeout=300)
