"""A kernel that hangs or kills the process it runs in costs itself, and nothing else.

The worker here is a real process that is told what to do: kernels misbehave by the K extent of their tile.
"""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from signatures import signature

from cutlass_ops.base.errors import ConfigError, MeasuringError
from cutlass_ops.choose.tables import Measured, Point, Table
from cutlass_ops.declare.config import Ordered, ThreadblockShape
from cutlass_ops.declare.order import TileOrder
from cutlass_ops.declare.problem import Problem
from cutlass_ops.kinds.sm90.config import Sm90Config
from cutlass_ops.tuner import measuring
from cutlass_ops.tuner.measuring import Measurer

WORKER = """
import json, sys, time
def say(event, **fields):
    print(json.dumps({"event": event, **fields}), flush=True)
def table(job, kernels):
    return {
        "format": 3, "device": "GPU", "multiprocessors": 1, "signature": job["signature"], "fallback": False,
        "deterministic": False, "configs": [c for c, _ in kernels], "orders": [o for _, o in kernels], "kernels": [],
        "points": [{
            "problem": job["problem"], "date": "2026-11-29", "peers": {"eager": 30.0},
            "measured": [[i, i, 10.0 + i, i / 10] for i in range(len(kernels))],
        }],
    }
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
            time.sleep(600)
        if k == 128:
            sys.exit(1)
        if k == 256:
            say("wrong", kernel=number, why="D is wrong")
        else:
            right.append([kernel["config"], kernel["order"]])
    say("peers")
    if mode == "tired":
        time.sleep(600)
    say("racing")
    say("done", table=table(job, right))
"""

GOOD = [Ordered(Sm90Config(ThreadblockShape(64, n, 64)), TileOrder("along_m")) for n in (64, 128)]
HANGS, DIES, WRONG = (Ordered(Sm90Config(ThreadblockShape(64, 64, k))) for k in (32, 128, 256))
PROBLEM = Problem(512, 4096, 4096)


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
    assert [(m.ordered, m.microseconds, m.behind) for m in outcome.measured] == [
        (GOOD[0], 10.0, 0.0),
        (GOOD[1], 11.0, 0.1),
    ]
    assert outcome.peers == {"eager": 30.0}
    assert outcome.failed == {}


def test_a_wrong_kernel_is_named_and_left_out(measurer):
    outcome = measure(measurer(), [WRONG, *GOOD])
    assert [m.ordered for m in outcome.measured] == GOOD
    assert outcome.failed == {WRONG: "D is wrong"}


@pytest.mark.sample(2)
@pytest.mark.parametrize(("bad", "why"), [(DIES, "brought the process down"), (HANGS, "does not end")])
def test_the_others_are_measured_after_a_kernel_brought_the_worker_down(measurer, bad, why):
    one = measurer()
    outcome = measure(one, [GOOD[0], bad, GOOD[1]])
    assert [m.ordered for m in outcome.measured] == GOOD
    assert why in outcome.failed.pop(bad)
    assert outcome.failed == {}
    # The next problem finds a worker that works.
    assert [m.ordered for m in measure(one, GOOD).measured] == GOOD


@pytest.mark.slow
def test_when_no_kernel_is_to_blame_the_problem_is(measurer):
    with pytest.raises(MeasuringError, match="no kernel is to blame"):
        measure(measurer("tired"), GOOD)


def test_a_problem_that_cannot_be_measured_leaves_the_worker_alive(measurer):
    one = measurer()
    with pytest.raises(MeasuringError, match="666x1x1 cannot be measured: too large"):
        measure(one, GOOD, Problem(666, 1, 1))
    assert measure(one, GOOD).measured


def test_a_worker_that_does_not_start(measurer):
    with pytest.raises(MeasuringError, match="did not start"):
        measure(measurer("dead"), GOOD)


# ---- Workers that no worker is -------------------------------------------------------------------------------------


ODD = """
import json, os, sys, time
mode, start = sys.argv[1], time.monotonic()
def write(text):
    data = text.encode()
    while data:
        data = data[os.write(1, data):]
def say(event, **fields):
    write(json.dumps({"event": event, **fields}) + "\\n")
def junk(text):
    write(text + "\\n")
if mode == "polluted":
    print("Hello from a library", flush=True)
write('{"event": "ready"}\\n' + '{"event": "preparing"}\\n' * (mode == "unasked"))
if mode == "deaf":
    time.sleep(600)
job = json.loads(sys.stdin.readline())
c = [[kernel["config"], kernel["order"]] for kernel in job["kernels"]]
say("preparing")
if mode == "line without end":
    write("x" * (6 << 20))
    time.sleep(600)
if mode == "dripping":
    while True:
        write("x")
        time.sleep(0.05)
if mode == "half a line":
    write('{"event": "peers"')
    time.sleep(600)
if mode == "events without end":
    while True:
        say("racing")
if mode == "closed":
    os.close(1)
    time.sleep(600)
if mode == "children":
    if os.fork() == 0:
        time.sleep(600)
        os._exit(0)
    time.sleep(600)
if mode == "print in between":
    junk("a library's warning")
if mode.startswith("{") or mode.startswith("["):
    junk(mode)
time.sleep(600)
"""


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return f"{pid} (" in Path(f"/proc/{pid}/stat").read_text() and " Z " not in Path(f"/proc/{pid}/stat").read_text()


@pytest.fixture
def odd(tmp_path):
    """What comes of a job for a worker that behaves in some way; it is ended in any case."""
    script = tmp_path / "odd.py"
    script.write_text(ODD)

    def run(mode, silence):
        with Measurer(0, silence, (sys.executable, str(script), mode)) as one:
            with pytest.raises(MeasuringError) as error:
                measure(one, GOOD)
            assert one._worker is None
        return str(error.value)

    return run


@pytest.fixture
def pids(monkeypatch):
    """Of all workers that are started."""
    found = []
    popen = subprocess.Popen

    def start(*arguments, **options):
        process = popen(*arguments, **options)
        found.append(process.pid)
        return process

    monkeypatch.setattr(subprocess, "Popen", start)
    return found


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("mode", "why"),
    [
        ("polluted", "did not start: b'Hello from a library': it is not valid JSON"),
        ("unasked", ", before it has a job"),
        ("line without end", "a line of more than 4194304 bytes"),
        ("dripping", "no kernel is to blame: the process says nothing"),
        ("half a line", "no kernel is to blame: the process says nothing"),
        ("events without end", "its events do not end"),
        ("closed", "no kernel is to blame: the process has ended, or closed its output"),
        ("print in between", 'b"a library\'s warning": it is not valid JSON'),
    ],
)
def test_a_worker_that_no_worker_is_ends_with_one_error(odd, pids, mode, why):
    # On a busy machine a worker that has something to say needs its time.
    assert why in odd(mode, 1.0 if "says nothing" in why else 60.0)
    assert len(pids) == 1
    assert not alive(pids[0])


def times(**changes):
    """Return a worker's table: each kernel's times, or a table that is changed."""
    rows = changes.pop("rows", [[0, 0, 10.0, 0.0], [1, 0, 11.0, 0.1]])
    measured = tuple(Measured(e.config, 10.0, 0.0, e.order) for e in GOOD)
    point = Point(PROBLEM, "2026-11-29", measured, (("eager", 30.0),))
    data = Table("GPU", 1, signature(), (point,)).to_json() | changes
    for each in data["points"]:
        each["measured"] = rows
    return json.dumps({"event": "done", "table": data})


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"event": "checking"}', "checking must have the fields event kernel"),
        ('{"event": "checking", "kernel": 2}', "must be an integer from 0 to 1"),
        ('{"event": "wrong", "kernel": 7, "why": ""}', "must be an integer from 0 to 1"),
        ('{"event": "wrong", "kernel": 0, "why": 3}', "why is 3: a text is needed"),
        ('{"event": "peers", "more": 1}', "peers must have the fields event"),
        ('{"event": "ready"}', "that it is ready, in the middle of a job"),
        ('{"event": "exploding"}', "it is no event"),
        ("[]", "it must be an object, not list"),
        ('{"event": "peers", "event": "peers"}', "the key 'event' twice"),
        ("[" * 100_000, "nested too deeply"),
        ('{"event": %s}' % ("9" * 5000), "is not a 64-bit integer"),
        ('{"event": "done", "table": NaN}', "NaN is not a JSON number"),
        ('{"event": "done", "table": null}', "a tuning table must be an object"),
        (times(format=2), "format is 2: this version reads 3"),
        (times(rows=[[0, 0, 10.0, 0.0]]), "times of other kernels than those that are right"),
        (times(points=[], rows=[]), "times of other kernels than those that are right"),
        (times(rows=[[0, 0, 1.0, 0.0], [0, 0, 1.0, 0.0], [1, 0, 1.0, 0.0]]), "a kernel's times, twice"),
        (times(rows=[[0, 0, 1.0, 0.5], [1, 0, 1.0, 0.0]]), "another order than the fastest first"),
        (times(rows=[[0, 0, 1e300, 0.0], [1, 0, 1.0, 0.0]]), "measured must be a number from 0.001 to 1e+12"),
        (times(rows=[[0, 0, 1.0, 0.0], [1, 0, 1.0, 1e300]]), "measured must be a number from -0.9 to 1e+06"),
        (times(rows=[[0, 0, 1.0]]), "measured has rows of 3"),
        (times(configs=[{}]), "unknown configuration arch"),
    ],
)
def test_what_is_well_formed_and_no_event_ends_the_worker(line, why):
    """Read as one event after the other: a process for each would take long."""
    with pytest.raises(ConfigError, match=re.escape(why)):
        measuring._Reading(GOOD, measuring.Outcome()).takes(measuring._event(line.encode()))


def test_a_worker_that_reads_nothing_does_not_hold_up_what_it_is_told(odd, pids, monkeypatch):
    """A pipe takes some 64 KB; a job may have more."""
    monkeypatch.setattr(measuring, "signature_to_json", lambda _: "x" * (1 << 20))
    assert "no kernel is to blame: the process does not take its job" in odd("deaf", 0.5)
    assert not alive(pids[0])


def test_what_a_worker_started_ends_with_it(odd, pids, tmp_path):
    assert "says nothing" in odd("children", 0.5)
    group = pids[0]
    # A process that was killed goes when the system comes to it.
    for _ in range(6000):
        if not [p for p in Path("/proc").glob("[0-9]*") if _group(p) == group]:
            return
        time.sleep(0.01)
    pytest.fail("what the worker started runs on")


def _group(process):
    """Of a process that is not a zombie."""
    try:
        state, _, group = (process / "stat").read_text().rpartition(")")[2].split()[:3]
    except (OSError, ValueError):
        return None
    return None if state == "Z" else int(group)


def test_a_command_that_is_none_is_an_error_that_says_so(tmp_path):
    for command in ((str(tmp_path / "none"),), (str(tmp_path),)):
        with Measurer(0, 1.0, command) as one, pytest.raises(MeasuringError, match=r"did not start: .* see above"):
            measure(one, GOOD)


def test_an_interrupted_job_leaves_no_answer_for_the_next(measurer, monkeypatch, pids):
    one = measurer()
    line = measuring._Worker.line

    def interrupt(self, limit):
        found = line(self, limit)
        if b"checking" in found:
            raise KeyboardInterrupt
        return found

    with monkeypatch.context() as patch:
        patch.setattr(measuring._Worker, "line", interrupt)
        with pytest.raises(KeyboardInterrupt):
            measure(one, GOOD)
    assert measure(one, GOOD[:1]).measured[0].ordered == GOOD[0]
    assert len(pids) == 2
