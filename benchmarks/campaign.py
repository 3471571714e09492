"""Runs what a GPU must show, side by side on all GPUs of a machine and within a time: tests, benchmarks, examples.

    python benchmarks/campaign.py --out /tmp/results                        # all of campaign.toml
    python benchmarks/campaign.py --only types training --limit 500 --out /tmp/results
    python benchmarks/campaign.py --list

Each job has a GPU of its own, and its output goes to OUT/NAME.log. In a command, {out} is that folder. Jobs that
measure the host run after the others, each on processors of its own: as many as a machine of one GPU has. What takes
longer than it may, or than the limit leaves, is ended. The exit status is that of the worst job.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import tomllib

from cutlass_ops.base import env

PLAN = Path(__file__).with_suffix(".toml")
ROOT = Path(__file__).parents[1]
_POLL = 0.2  # seconds
_TAIL = 12  # lines of a job's output that are shown
_LEAST = 10.0  # seconds that must be left for a job to begin


@dataclass(frozen=True)
class Job:
    """One command.

    Attributes
    ----------
    name : str
        Name, of the log as well.
    command : str
        What runs, from the repository's root. {out} stands for the folder of results, python for this Python.
    seconds : float
        How long it may take.
    gpus : int
        How many GPUs it needs.
    host : bool
        Whether it measures the host: nothing may run meanwhile but other such jobs, on other processors.
    """

    name: str
    command: str
    seconds: float
    gpus: int = 1
    host: bool = False


class Running:
    """A job that was started."""

    def __init__(self, job: Job, gpus: list[int], out: Path, limit: float, processors: set[int]) -> None:
        self.job, self.gpus, self.log = job, gpus, out / f"{job.name}.log"
        self.began, self.ends = time.monotonic(), time.monotonic() + min(job.seconds, limit)
        shared = {"CI_KERNELS": str(env.cache_dir())}  # tests use the kernels of benchmarks
        gpu = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)), "PYTHONUNBUFFERED": "1"}
        with self.log.open("w") as log:
            program, *arguments = shlex.split(job.command.format(out=out))
            self.process = subprocess.Popen(
                [sys.executable if program == "python" else program, *arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=shared | os.environ | gpu,
                cwd=ROOT,
                start_new_session=True,
                preexec_fn=lambda: os.sched_setaffinity(0, processors),
            )

    def ended(self) -> int | None:
        """Return the exit status once it has ended, 124 if it was ended; None while it runs."""
        status = self.process.poll()
        if status is None and time.monotonic() >= self.ends:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            status = 124
        return status


def jobs(path: Path, only: Iterable[str] = ()) -> list[Job]:
    """Return the jobs of a file, or those of some names.

    Raises
    ------
    ValueError
        If there is no job of a name.
    """
    found = {each["name"]: Job(**each) for each in tomllib.loads(path.read_text())["job"]}
    unknown = [name for name in only if name not in found]
    if unknown:
        raise ValueError(f"no job is named {', '.join(unknown)}: there are {', '.join(found)}")
    return [found[name] for name in only] or list(found.values())


def run(wanted: Iterable[Job], gpus: int, out: Path, limit: float) -> dict[str, int]:
    """Run jobs; return each one's exit status: 124 if it was ended, 125 if no time was left to begin it.

    Parameters
    ----------
    wanted : iterable of Job
        The jobs, in the order in which they begin.
    gpus : int
        How many GPUs there are.
    out : Path
        Where logs and results go.
    limit : float
        Seconds until everything has ended.
    """
    ends, found, running = time.monotonic() + limit, dict[str, int](), list[Running]()
    waiting, free = sorted(wanted, key=lambda job: job.host), set(range(gpus))
    everywhere = sorted(os.sched_getaffinity(0))
    share = max(1, len(everywhere) // gpus)

    def processors(job: Job, mine: Iterable[int]) -> set[int]:
        own = {p for gpu in mine for p in everywhere[gpu * share : (gpu + 1) * share]}
        return own if job.host and own else set(everywhere)

    def may_begin(job: Job) -> bool:
        beside = all(each.job.host == job.host for each in running)
        return beside and len(free) >= min(job.gpus, gpus) and ends - time.monotonic() > _LEAST

    while running or any(map(may_begin, waiting)):
        for job in waiting[:]:
            if may_begin(job):
                waiting.remove(job)
                mine = sorted(free)[: min(job.gpus, gpus)]
                free.difference_update(mine)
                running.append(Running(job, mine, out, ends - time.monotonic(), processors(job, mine)))
        for each in running[:]:
            status = each.ended()
            if status is not None:
                running.remove(each)
                free.update(each.gpus)
                found[each.job.name] = status
                _say(each, status)
        time.sleep(_POLL)
    if waiting:
        print(f"no time was left for {', '.join(job.name for job in waiting)}")
    return found | {job.name: 125 for job in waiting}


def _say(ended: Running, status: int) -> None:
    how = {0: "well", 124: "ended, for its time"}.get(status, f"exit status {status}")
    print(f"== {ended.job.name}: {how}, {time.monotonic() - ended.began:.0f} s", flush=True)
    for line in ended.log.read_text(errors="replace").splitlines()[-_TAIL:]:
        print(f"   {line[:200]}", flush=True)


def main() -> None:
    """Run a campaign."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", type=Path, default=PLAN, help="file of jobs")
    parser.add_argument("--only", nargs="+", default=[], metavar="JOB", help="only these, in this order")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds until everything has ended")
    parser.add_argument("--gpus", type=int, help="number of GPUs; by default, all there are")
    parser.add_argument("--list", action="store_true", help="print the jobs and run nothing")
    parser.add_argument("--out", type=Path, help="folder of logs and results")
    args = parser.parse_args()
    try:
        wanted = jobs(args.plan, args.only)
    except ValueError as exc:
        parser.error(str(exc))
    if args.list:
        for job in wanted:
            print(f"{job.name:20} {job.seconds:4.0f} s  {'host   ' if job.host else ''}{job.command}")
        return
    if args.out is None:
        parser.error("--out is needed: where logs and results go")
    args.out.mkdir(parents=True, exist_ok=True)
    count = args.gpus
    if count is None:
        import torch

        count = torch.cuda.device_count()
    found = run(wanted, max(count, 1), args.out.resolve(), args.limit)
    bad = [name for name, status in found.items() if status]
    print("all well" if not bad else f"not well: {', '.join(bad)}")
    sys.exit(max(found.values(), default=0))


if __name__ == "__main__":
    main()
