"""A campaign: which jobs run beside each other, and what becomes of those that take too long."""

import json
import os
import sys
import time

import pytest

from tests.scripts import script

WORK = (
    "import json, os, pathlib, sys, time; began = time.monotonic(); time.sleep(float(sys.argv[3])); "
    "pathlib.Path(sys.argv[1], sys.argv[2] + '.json').write_text("
    "json.dumps([os.environ['CUDA_VISIBLE_DEVICES'], began, time.monotonic(), sorted(os.sched_getaffinity(0))]))"
)


@pytest.fixture(scope="module")
def campaign():
    return script("campaign")


@pytest.fixture
def ran(campaign, tmp_path):
    """Run jobs of (name, seconds that it works, seconds that it may take, GPUs, whether of the host) on GPUs."""

    def run(jobs, gpus, limit=60.0):
        command = f'{sys.executable} -c "{WORK}" {{out}}'
        wanted = [
            campaign.Job(name, f"{command} {name} {works}", may, needs, host) for name, works, may, needs, host in jobs
        ]
        found = campaign.run(wanted, gpus, tmp_path, limit)
        times = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
        return found, times

    return run


def beside(x, y):
    return x[1] < y[2] and y[1] < x[2]


def test_jobs_run_beside_each_other_on_gpus_of_their_own_and_those_of_the_host_last(ran):
    found, times = ran(
        [("host", 0.2, 9, 1, True), ("a", 1.0, 9, 1, False), ("b", 1.0, 9, 1, False), ("both", 0.2, 9, 2, False)], 2
    )
    assert found == dict.fromkeys(("a", "b", "both", "host"), 0)
    assert beside(times["a"], times["b"])
    assert {times["a"][0], times["b"][0]} == {"0", "1"}
    assert times["both"][0] == "0,1"
    assert not any(beside(times["both"], times[name]) for name in ("a", "b", "host"))
    assert times["host"][1] > max(times[name][2] for name in ("a", "b", "both"))


def test_jobs_of_the_host_have_processors_of_their_own(ran):
    every = os.sched_getaffinity(0)
    found, times = ran([("x", 1.0, 9, 1, True), ("y", 1.0, 9, 1, True), ("other", 0.1, 9, 1, False)], 2)
    assert set(found.values()) == {0}
    assert beside(times["x"], times["y"])
    assert set(times["other"][3]) == every
    mine, yours = set(times["x"][3]), set(times["y"][3])
    if len(every) > 1:
        assert len(mine) == len(yours) == len(every) // 2
        assert not mine & yours


def test_what_takes_too_long_is_ended_and_the_others_go_on(ran, capsys):
    began = time.monotonic()
    found, times = ran([("slow", 60, 1, 1, False), ("quick", 0.1, 9, 1, False)], 1)
    assert found == {"slow": 124, "quick": 0}
    assert list(times) == ["quick"]
    assert time.monotonic() - began < 30
    assert "slow: ended, for its time" in capsys.readouterr().out


def test_without_time_nothing_begins(ran, capsys):
    assert ran([("a", 0.1, 9, 1, False)], 1, limit=5.0) == ({"a": 125}, {})
    assert "no time was left for a" in capsys.readouterr().out


def test_the_jobs_of_the_file_are_found(campaign):
    every = campaign.jobs(campaign.PLAN)
    assert len({job.name for job in every}) == len(every)
    for job in every:
        words = job.command.split()
        named = [word for word in words if word.endswith(".py")]
        assert all((campaign.ROOT / word).exists() for word in named), job.name
    assert [job.name for job in campaign.jobs(campaign.PLAN, ["host", "types"])] == ["host", "types"]
    with pytest.raises(ValueError, match="no job is named hots"):
        campaign.jobs(campaign.PLAN, ["hots"])
