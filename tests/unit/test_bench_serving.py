"""What benchmarks/bench_serving.py makes of the times of calls."""

import gc
import sys
import threading
import time

import pytest

import cutlass_ops as co
from tests.scripts import BENCHMARKS, script


@pytest.fixture(scope="module")
def bench():
    return script("bench_serving", BENCHMARKS)


def test_calls_at_a_weight_that_was_met_are_counted_apart(bench):
    taken = (("a", 9000, 0), ("a", 10, 0), ("b", 20000, 0), ("b", 8000, 7900), ("a", 6000, 0), ("b", 12, 0))
    found = bench.summary([{"m": 1, "weight": w, "us": us, "gc_us": of, "pytorch_us": 5.0} for w, us, of in taken])
    assert (found["first_us"], found["long_waits"]) == (9000, 3)
    assert (found["known_long_waits"], found["known_long_waits_without_gc"], found["known_longest_us"]) == (2, 1, 8000)


def test_the_garbage_collector_is_timed(bench):
    noted = bench.Collections()
    try:
        gc.collect()
        assert noted.took > 0
    finally:
        gc.callbacks.remove(noted._noted)


def test_where_threads_are_in_a_long_call_is_noted(bench, monkeypatch):
    short, long = [], []
    with bench.watched(short):
        pass
    begun, ended = threading.Event(), threading.Event()

    def other():
        begun.set()
        ended.wait()

    thread = threading.Thread(target=other)
    thread.start()
    begun.wait()
    monkeypatch.setattr(co.run.ops, "op_of", lambda _: time.sleep(0.05))
    with bench.watched(long), pytest.raises(TypeError):
        co.gemm(None, None)
    ended.set()
    thread.join()
    assert short == []
    # Not the other thread, which has not called this library. Threads that earlier tests left may have.
    (found,) = [at for at in long if "test_bench_serving.py:" in at]
    assert found.startswith("test_bench_serving.py:")
    assert " gemm" in found


def test_threads_at_one_place_have_one_entry(bench, monkeypatch):
    found = []

    def op_of(_):
        frame = sys._getframe()
        monkeypatch.setattr(sys, "_current_frames", lambda: {-1: frame, -2: frame, -3: frame.f_back})
        found.extend(bench.stacks(None))

    monkeypatch.setattr(co.run.ops, "op_of", op_of)
    with pytest.raises(TypeError):
        co.gemm(None, None)
    assert [each.split(":")[0] for each in found] == ["2 threads", "ops.py"]
