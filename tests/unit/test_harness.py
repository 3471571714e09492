"""What the benchmarks share: what they time has the processors to itself."""

import pytest
from fake_toolkit import sm80_spec
from signatures import H100, signature

from cutlass_ops.base import env
from cutlass_ops.base.errors import MissingKernelError
from cutlass_ops.base.session import Session
from cutlass_ops.choose import dispatch
from cutlass_ops.compilation.background import Background
from cutlass_ops.declare.problem import Problem
from cutlass_ops.run.registry import Registry
from cutlass_ops.tuner import comparing
from tests.scripts import script

HARNESS = script("harness")


def test_nothing_is_compiled_in_the_background_of_what_is_timed(monkeypatch):
    built = []
    background = Background(Session(), lambda spec, cancel: built.append(spec))

    class Watch:
        def __init__(self, expected_us):
            self.runs = {}

        def add(self, name, run):
            self.runs[name] = run

        def round(self, names):
            return [self.runs[name](0) for name in names]

    def timed(index):
        background.add([sm80_spec(2 + len(built))])
        background.wait()
        return 1000.0 + len(built)

    monkeypatch.setattr(comparing, "Stopwatch", Watch)
    with pytest.raises(RuntimeError, match="stands in"):
        HARNESS.time_interleaved({"ours": timed}, 10.0)
    monkeypatch.setenv("CUTLASS_OPS_STAND_IN", "0")

    assert timed(0) == 1001.0
    with Session({Background: background}).active():
        found = HARNESS.time_interleaved({"ours": timed, "peer": timed}, 10.0, rounds=3)
    assert built == [sm80_spec(2)]
    assert found["ours"].rounds == (1.001,) * 3


def test_nothing_is_compiled_in_the_background_of_kernels_that_a_benchmark_waits_for(monkeypatch):
    built = []
    background = Background(Session(), lambda spec, cancel: built.append(spec))
    monkeypatch.setenv("CUTLASS_OPS_STAND_IN", "1")  # so that what begin() sets does not stay
    monkeypatch.setattr(HARNESS, "environment", lambda: {"chip": "none"})
    with Session({Background: background}).active():
        assert HARNESS.begin() == {"chip": "none"}
    background.add([sm80_spec(2)])
    background.wait()
    assert built == []
    assert not env.stand_in()


@pytest.mark.compile
@pytest.mark.slow
def test_calls_are_served_by_the_kernels_of_a_script_alone(monkeypatch):
    monkeypatch.setenv("CUTLASS_OPS_JIT", "1")
    small, large = Problem(2, 512, 512), Problem(5, 512, 512)
    spec, _ = dispatch.choose(signature(), H100, small)
    other = signature(dtype="f16")
    with HARNESS.serve_only([spec, spec]):
        for problem in (small, large):
            found = dispatch.decide(signature(), H100, problem)
            assert (found.spec, found.bundled) == (spec, True)
        assert "bundle" in Registry.current().origin(spec)
        with pytest.raises(MissingKernelError):
            Registry.current().kernel(dispatch.choose(other, H100, large)[0])
    assert not dispatch.decide(signature(), H100, large).bundled
    assert env.jit_enabled()
