"""Compare ways to compute the same: interleaved, and by ratios within a round.

In each round every variant runs once, in a new random order, since the first after a pause has a cooler chip. Ratios
are formed within a round, then the median over rounds. Variants run in graphs, one launch after another
(:func:`time_interleaved`), or as single launches between other kernels (:func:`time_between`).
"""

from __future__ import annotations

import datetime
import logging
import math
import platform
import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cutlass_ops._version import __version__
from cutlass_ops.base import env, programs
from cutlass_ops.compilation.background import Background
from cutlass_ops.tuner.timing import Run, Stopwatch, race

ROUNDS = 25
# Single launches of a variant in a round.
_LAUNCHES = 12
# Cycles for which the GPU waits while the host fills its queue: 4 ms at 1.75 GHz.
_HEAD_START = 7_000_000
# The kernel between launches reads and writes this many times the L2 cache, so that no data of a variant stays in it.
_L2_FULL = 2


@dataclass(frozen=True)
class Timing:
    """Times of one variant, in milliseconds per call, one for each round."""

    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median over the rounds."""
        return statistics.median(self.rounds)


def time_interleaved(variants: Mapping[str, Run], expected_us: float, rounds: int = ROUNDS) -> dict[str, Timing]:
    """Time variants against each other in graphs. This stops background compilation in the process."""
    return _timed(Stopwatch(expected_us), variants, rounds)


def time_between(variants: Mapping[str, Run], rounds: int = ROUNDS) -> dict[str, Timing]:
    """Time single launches between other kernels, which leave nothing in the L2 cache; otherwise as above."""
    return _timed(Between(), variants, rounds)


def _timed(watch: Stopwatch | Between, variants: Mapping[str, Run], rounds: int) -> dict[str, Timing]:
    if env.stand_in():
        raise RuntimeError(f"PyTorch may be timed in place of a kernel: set {env.STAND_IN.name}=0 first")
    # Compilers of kernels for other numbers of rows would take processors from the timed calls.
    Background.current().close()
    for name, run in variants.items():
        watch.add(name, run)
    first, *others = variants
    # One entrant never drops out, and guests never do.
    standings = race([first], watch.round, guests=others, rounds=rounds + 1)
    times = {s.entrant: Timing(tuple(us / 1e3 for us in s.times[1:])) for s in standings}
    return {name: times[name] for name in variants}


class Between:
    """Time single launches, each after a kernel that fills the L2 cache, by events around it.

    An event takes time itself: that of two with nothing between them is subtracted.
    """

    def __init__(self) -> None:
        l2_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        self._other = torch.zeros(_L2_FULL * l2_bytes // 4, device="cuda")
        self._runs: dict[object, Run] = {}

    def add(self, name: object, run: Run) -> None:
        """Take a variant. It runs once, so that it is compiled."""
        run(0)
        torch.cuda.synchronize()
        self._runs[name] = run

    def round(self, names: Sequence[object]) -> list[float]:
        """Run variants in this order; return the median of the microseconds of one call of each."""
        nothing = self._events(lambda _: None)
        found = [self._events(self._runs[name]) for name in names]
        torch.cuda.synchronize()
        empty = _median(nothing)
        return [max(_median(each) - empty, 1e-3) for each in found]

    def _events(self, run: Run) -> list[tuple[torch.cuda.Event, torch.cuda.Event]]:
        torch.cuda._sleep(_HEAD_START)  # type: ignore[no-untyped-call]
        pairs = []
        for index in range(_LAUNCHES):
            self._other.add_(1.0)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            run(index)
            end.record()
            pairs.append((begin, end))
        return pairs


def _median(pairs: Sequence[tuple[torch.cuda.Event, torch.cuda.Event]]) -> float:
    return statistics.median([float(begin.elapsed_time(end)) * 1e3 for begin, end in pairs])


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
    import torch._inductor.config

    torch._dynamo.reset()
    # Threads, since autotuning repeats the compilations of worker processes: 8 s per shape instead of 1.
    torch._inductor.config.compile_threads = 1
    # Not a table of times for each GEMM, nor a trace for each candidate that does not fit: 90 KB for six layers.
    torch._inductor.config.autotune_num_choices_displayed = 0
    logging.getLogger("torch._inductor.select_algorithm").setLevel(logging.CRITICAL)
    return torch.compile(function, mode="max-autotune-no-cudagraphs", dynamic=False)


def error_ratio(found: Tensor, exact: Tensor, eager: Tensor, least: float = 0.0) -> float:
    """Return a result's error over that of PyTorch's result, both against FP64; NaN if an element was not written."""
    ours, theirs = (float((x.double() - exact).norm()) for x in (found, eager))
    theirs = max(theirs, least * float(exact.norm()))
    if not theirs:
        return math.inf if ours else 1.0
    return ours / theirs


def geomean(values: Sequence[float]) -> float:
    """Return the geometric mean."""
    return math.exp(sum(map(math.log, values)) / len(values))


def environment() -> dict[str, Any]:
    """Return the chip, date and versions of a result; no driver if there is no nvidia-smi."""
    properties = torch.cuda.get_device_properties(0)
    driver, power = _driver()
    return {
        "chip": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "driver": driver,
        "power_limit": power,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cutlass_ops": __version__,
    }


def _driver() -> tuple[str | None, str | None]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None, None
    status, said = programs.ask([program, "--query-gpu=driver_version,power.limit", "--format=csv,noheader"], 30.0)
    driver, _, power = said.split("\n")[0].partition(", ")
    return (driver, power) if status == 0 else (None, None)
