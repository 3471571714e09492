"""Timing of variants against each other with :mod:`cutlass_ops.tuner.timing`, ratios per round, and result files.

In each round every variant runs once, in a new random order, since the first after a pause has a cooler chip. Ratios
are formed within a round, then the median over rounds.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
import random
import statistics
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config
from torch import Tensor

from cutlass_ops.base import env
from cutlass_ops.choose import dispatch
from cutlass_ops.compilation.background import Background
from cutlass_ops.compilation.builder import build_many
from cutlass_ops.declare.device import Device
from cutlass_ops.declare.problem import Problem
from cutlass_ops.run.call import device_of, signature_of
from cutlass_ops.run.ops import Op
from cutlass_ops.run.registry import OpSignature
from cutlass_ops.tuner.timing import Run, Stopwatch

ROUNDS = 25


@dataclass(frozen=True)
class Timing:
    """Times of one variant, in milliseconds per call, one for each round."""

    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median over the rounds."""
        return statistics.median(self.rounds)


def time_interleaved(variants: Mapping[str, Run], expected_us: float, rounds: int = ROUNDS) -> dict[str, Timing]:
    """Time variants against each other. This stops background compilation in the process.

    Parameters
    ----------
    variants : mapping of str to callable
        Each takes a launch index, by which it chooses its inputs.
    expected_us : float
        Rough time of one call, to decide the number of calls in a replay.
    rounds : int
        Rounds that count; one more warms up.

    Raises
    ------
    RuntimeError
        If a kernel may stand in for the one that a call chooses.
    """
    if env.stand_in():
        raise RuntimeError("a kernel that stands in may be timed: call harness.begin() first")
    # Compilers of kernels that other numbers of rows may need would take processors from what is timed.
    Background.current().close()
    watch = Stopwatch(expected_us)
    for name, run in variants.items():
        watch.add(name, run)
    names = list(variants)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 1):
        random.Random(number).shuffle(names)
        for name, microseconds in zip(names, watch.round(names), strict=True):
            times[name].append(microseconds / 1e3)
    return {name: Timing(tuple(each[1:])) for name, each in times.items()}


def ratios(ours: Timing, peer: Timing) -> dict[str, float]:
    """Return peer / ours: the median over the rounds, and the range."""
    each = sorted(p / o for o, p in zip(ours.rounds, peer.rounds, strict=True))
    return {"median": round(statistics.median(each), 4), "min": round(each[0], 4), "max": round(each[-1], 4)}


def compare(variants: Mapping[str, Run], expected_us: float) -> dict[str, Any]:
    """Time variants against each other; return milliseconds, and the others' times over the first one's."""
    times = time_interleaved(variants, expected_us)
    ours, *others = variants
    return {
        "ms": {name: round(times[name].median, 5) for name in variants},
        "over_ours": {name: ratios(times[ours], times[name]) for name in others},
    }


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function with torch.compile and max-autotune, for one shape."""
    torch._dynamo.reset()
    # Threads, since autotuning repeats the compilations of worker processes: 8 s per shape instead of 1.
    torch._inductor.config.compile_threads = 1
    return torch.compile(function, mode="max-autotune-no-cudagraphs", dynamic=False)


def side_by_side(calls: Iterable[Callable[[], object]]) -> None:
    """Make calls in parallel, so that their kernels are compiled in parallel."""
    waiting = list(calls)
    with ThreadPoolExecutor(max(1, len(waiting))) as pool:
        for future in [pool.submit(call) for call in waiting]:
            future.result()


def asked(op: Op, arguments: Sequence[Any], device: Device) -> tuple[OpSignature, Problem]:
    """Return the signature, device and problem of an op's call, whose tensors need no data."""
    a, b, *inputs = arguments
    call = op.checked_call(a, b, inputs, None)
    return signature_of(call, device), call.problem


def build_ahead(calls: Iterable[tuple[Op, Sequence[Any]]]) -> None:
    """Compile the kernels of calls in parallel. Each is an op and its arguments, with tensors on "meta"."""
    device = device_of(torch.device("cuda", 0))
    specs = {}
    for op, arguments in calls:
        signature, problem = asked(op, arguments, device)
        specs[dispatch.choose(signature, device, problem)[0]] = None
    build_many(list(specs))


def check(found: Tensor, exact: Tensor, eager: Tensor) -> float:
    """Return a result's error over PyTorch's own.

    Raises
    ------
    AssertionError
        If the error is more than twice eager PyTorch's, or an element was not written.
    """
    assert not found.isnan().any(), "output left unwritten"
    ours, theirs = ((x.double() - exact).norm() / exact.norm() for x in (found, eager))
    ratio = float(ours / theirs)
    assert ratio <= 2, f"error is {ratio:.2f} times eager's"
    return ratio


def geomean(values: list[float]) -> float:
    """Return the geometric mean."""
    return math.exp(sum(map(math.log, values)) / len(values))


def begin() -> dict[str, Any]:
    """Have calls wait for the kernels that they choose, so that no stand-in is timed; return :func:`environment`."""
    os.environ[env.STAND_IN.name] = "0"
    return environment()


def environment() -> dict[str, Any]:
    """Return the chip, date and versions of a result."""
    import cutlass_ops

    properties = torch.cuda.get_device_properties(0)
    query = ["nvidia-smi", "--query-gpu=driver_version,power.limit", "--format=csv,noheader"]
    driver, power = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split("\n")[0].split(", ")
    return {
        "chip": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "driver": driver,
        "power_limit": power,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cutlass_ops": cutlass_ops.__version__,
    }


def measured(paths: list[Path], environment: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of earlier results.

    Raises
    ------
    SystemExit
        If a result has another chip, date or version, since one table never mixes them.
    """
    rows: list[dict[str, Any]] = []
    for path in paths:
        result = json.loads(path.read_text())
        differs = {key: (result.get(key), value) for key, value in environment.items() if result.get(key) != value}
        if differs:
            raise SystemExit(f"{path} was measured elsewhere: {differs}; measure it again")
        rows += result["rows"]
    return rows


def save(path: Path, result: Mapping[str, Any]) -> None:
    """Write a result, one row per line, for readable diffs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    head = {key: value for key, value in result.items() if key != "rows"}
    rows = ",\n  ".join(json.dumps(row) for row in result["rows"])
    path.write_text(json.dumps(head, indent=1)[:-2] + f',\n "rows": [\n  {rows}\n ]\n}}\n')
