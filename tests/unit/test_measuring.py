"""A kernel that hangs or kills the process it runs in costs itself, and nothing else.

The worker here is a real process that is told what to do: kernels misbehave by the K extent of their tile.
"""

import sys
import time

import pytest
from signatures import signature

from cutlass_ops.config import Sm90Config, ThreadblockShape
from cutlass_ops.errors import MeasuringError
from cutlass_ops.measuring import Measurer

WORKER = """
import json, sys, time
def say(event, **fields):
    print(json.dumps({"event": event, **fields}), flush=True)
mode = sys.argv[1]
if mode == "dead":
    sys.exit(3)
say("ready")
for line in sys.stdin:
    job = json.loads(line)
    say("preparing")
    if job["problem"][0] == 666:
        say("impossible", why="too large")
        continue
    right = []
    for number, kernel in enumerate(job["kernels"]):
        say("checking", kernel=number)
        k = kernel["config"]["threadblock"]["k"]
        if k == 32:
            time.sleep(60)
        if k == 128:
            sys.exit(1)
        if k == 256:
            say("wrong", kernel=number, why="D is wrong")
        else:
            right.append(kernel["config"])
    say("peers")
    if mode == "tired":
        time.sleep(60)
    say("racing")
    say("done", measured=[[c, 10.0 + i, i / 10] for i, c in enumerate(right)], peers={"eager": 30.0})
"""

GOOD = [Sm90Config(ThreadblockShape(64, n, 64)) for n in (64, 128)]
HANGS, DIES, WRONG = (Sm90Config(ThreadblockShape(64, 64, k)) for k in (32, 128, 256))
PROBLEM = (512, 4096, 4096)


@pytest.fixture
def measurer(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    opened = []

    def make(mode="well", silence=5.0):
        opened.append(Measurer(0, silence, (sys.executable, str(script), mode)))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


def measure(measurer, configs, problem=PROBLEM):
    return measurer.measure(signature(), problem, dict.fromkeys(configs, measurer_folder), rounds=3)


measurer_folder = "/nowhere"


def test_right_kernels_come_back_in_order(measurer):
    outcome = measure(measurer(), GOOD)
    assert [(m.config, m.microseconds, m.behind) for m in outcome.measured] == [
        (GOOD[0], 10.0, 0.0),
        (GOOD[1], 11.0, 0.1),
    ]
    assert outcome.peers == {"eager": 30.0}
    assert outcome.failed == {}


def test_a_wrong_kernel_is_named_and_left_out(measurer):
    outcome = measure(measurer(), [WRONG, *GOOD])
    assert [m.config for m in outcome.measured] == GOOD
    assert outcome.failed == {WRONG: "D is wrong"}


@pytest.mark.parametrize(("bad", "why"), [(HANGS, "does not end"), (DIES, "brought the process down")])
def test_the_others_are_measured_after_a_kernel_brought_the_worker_down(measurer, bad, why):
    one = measurer(silence=1.0)
    began = time.monotonic()
    outcome = measure(one, [GOOD[0], bad, GOOD[1]])
    assert [m.config for m in outcome.measured] == GOOD
    assert why in outcome.failed.pop(bad)
    assert outcome.failed == {}
    assert time.monotonic() - began < 20
    # The next problem finds a worker that works.
    assert [m.config for m in measure(one, GOOD).measured] == GOOD


def test_several_bad_kernels_at_once(measurer):
    outcome = measure(measurer(silence=1.0), [DIES, HANGS, WRONG, GOOD[1]])
    assert [m.config for m in outcome.measured] == [GOOD[1]]
    assert set(outcome.failed) == {DIES, HANGS, WRONG}


def test_when_no_kernel_is_to_blame_the_problem_is(measurer):
    with pytest.raises(MeasuringError, match="no kernel is to blame"):
        measure(measurer("tired", silence=1.0), GOOD)


def test_a_problem_that_cannot_be_measured_leaves_the_worker_alive(measurer):
    one = measurer()
    with pytest.raises(MeasuringError, match=r"\(666, 1, 1\) cannot be measured: too large"):
        measure(one, GOOD, (666, 1, 1))
    assert measure(one, GOOD).measured


def test_a_worker_that_does_not_start(measurer):
    with pytest.raises(MeasuringError, match="did not start"):
        measure(measurer("dead"), GOOD)
