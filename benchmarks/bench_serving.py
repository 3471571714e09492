"""Measures what calls of a server wait for: 2,000 requests of 1 to 8192 rows at the four weights of an 8B layer.

    python benchmarks/bench_serving.py --store cold --out benchmarks/results/serving_cold_h200.json
    python benchmarks/bench_serving.py --store warm --out benchmarks/results/serving_warm_h200.json
    python benchmarks/bench_serving.py --store warm --warm-up --pause 0 --out benchmarks/results/serving_ready_h200.json
    cutlass-ops distribution sm_90a --op gemm_bias_relu --dtype bf16 --out dist
    python benchmarks/bench_serving.py --wheel dist/*.whl --out benchmarks/results/serving_installed_h200.json

Each request is one call of gemm_bias_relu with a number of rows drawn with equal probability on each scale, at a weight
drawn at random. "cold" begins with an empty kernel store, in a folder of its own. "warm" runs the same requests once
before, in another process, until all that it compiles in the background is there. With --warm-up, the server calls
co.warm_up for each weight before its first request, as a careful one does, and gc.freeze() after that. A wheel of
kernels is installed, in effect: what it holds is on the path before the first call, and the store is cold. Timed is the
host side of each call: until it returns, which is before the GPU is done; and in its turn PyTorch's linear and relu,
which waits for no kernel. "known" are the calls at a weight that was met before. "gc_us" is what Python's garbage
collector took within a call. Of a call that took more than 5 ms, "at" says where each thread was after these: the
innermost functions first.
Each row: {"m", "weight", "us", "gc_us", "at", "pytorch_us"}.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import harness
import torch
import torch.nn.functional as F  # noqa: N812

import cutlass_ops as co
from cutlass_ops.compilation.background import Background

# N and K of the linear layers of Llama-3.1-8B: q and kv, o, gate and up, down.
WEIGHTS = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
REQUESTS, MOST_ROWS = 2_000, 8192
LONG_US = 5_000.0  # a wait that a user would notice


def requests(count: int, seed: int = 0) -> list[tuple[int, str]]:
    """Return the rows and the weight of each request."""
    rng = random.Random(seed)
    return [(round(2 ** rng.uniform(0, 13)), rng.choice(list(WEIGHTS))) for _ in range(count)]


class Collections:
    """What Python's garbage collector took so far, in seconds."""

    def __init__(self) -> None:
        self.took = self._began = 0.0
        gc.callbacks.append(self._noted)

    def _noted(self, phase: str, _: object) -> None:
        if phase == "start":
            self._began = time.perf_counter()
        else:
            self.took += time.perf_counter() - self._began


@contextmanager
def watched(found: list[str]) -> Iterator[None]:
    """Add where threads are if the block takes long; of a call that keeps the interpreter's lock, where it returns to.

    By a signal: what faulthandler looks at meanwhile is not there any more when it reads it (benchmarks/NOTES.md).
    """
    before = signal.signal(signal.SIGALRM, lambda _, frame: found.extend(stacks(frame)))
    signal.siginterrupt(signal.SIGALRM, False)
    signal.setitimer(signal.ITIMER_REAL, LONG_US / 1e6)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def stacks(interrupted: FrameType | None) -> list[str]:
    """Return the innermost functions of each thread that has called this library; this one's are of a given frame.

    Of threads that are at the same place, there is one entry, with their number.
    """
    frames = [interrupted, *(f for at, f in sys._current_frames().items() if at != threading.get_ident())]
    threads = [list(traceback.walk_stack(frame)) for frame in frames if frame is not None]
    places = Counter(
        " < ".join(f"{Path(f.f_code.co_filename).name}:{line} {f.f_code.co_name}" for f, line in stack[:_FRAMES])
        for stack in threads
        if any("cutlass_ops" in Path(f.f_code.co_filename).parts for f, _ in stack)
    )
    return [place if count == 1 else f"{count} threads: {place}" for place, count in places.items()]


_FRAMES = 4


def serve(wanted: list[tuple[int, str]], pause: float, *, ready: bool = False) -> list[dict[str, Any]]:
    """Serve requests one after the other, with a pause between them; return each one's microseconds on the host.

    Where the server is to be ready, all kernels of its weights are loaded before.
    """

    def took(call: Callable[[], object], watched: AbstractContextManager[None]) -> float:
        with watched:
            began = time.perf_counter()
            call()
            found = round(1e6 * (time.perf_counter() - began), 1)
        torch.cuda.synchronize()
        time.sleep(pause)
        return found

    half = torch.bfloat16
    weights = {name: torch.randn(n, k, device="cuda", dtype=half) for name, (n, k) in WEIGHTS.items()}
    biases = {name: torch.randn(n, device="cuda", dtype=half) for name, (n, _) in WEIGHTS.items()}
    inputs = {k: torch.randn(MOST_ROWS, k, device="cuda", dtype=half) for _, k in WEIGHTS.values()}
    F.relu(F.linear(inputs[4096][:16], weights["o"], biases["o"]))  # PyTorch's own start
    if ready:
        for name, weight in weights.items():
            co.warm_up(co.gemm_bias_relu, inputs[WEIGHTS[name][1]], weight.t(), biases[name])
        gc.collect()
        gc.freeze()
    torch.cuda.synchronize()
    rows = []
    collections = Collections()
    for m, name in wanted:
        a, b, bias = inputs[WEIGHTS[name][1]][:m], weights[name].t(), biases[name]
        collections.took = 0.0
        at: list[str] = []
        us = took(lambda: co.gemm_bias_relu(a, b, bias), watched(at))  # noqa: B023 - called at once
        gc_us = round(1e6 * collections.took, 1)
        theirs = took(lambda: F.relu(F.linear(a, weights[name], bias)), nullcontext())  # noqa: B023
        rows.append({"m": m, "weight": name, "us": us, "gc_us": gc_us, "at": at, "pytorch_us": theirs})
    return rows


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return how long calls took: the first, those that waited, and the others."""
    first, *others = [row["us"] for row in rows]
    met = {row["weight"]: at for at, row in reversed(list(enumerate(rows)))}
    known = [row for at, row in enumerate(rows) if at != met[row["weight"]]]
    found = {"first_us": first, "long_waits": sum(us > LONG_US for us in others)} | _spread(others)
    found |= {"known_long_waits": sum(row["us"] > LONG_US for row in known)}
    found |= {"known_long_waits_without_gc": sum(row["us"] - row["gc_us"] > LONG_US for row in known)}
    found |= {f"known_{name}": us for name, us in _spread([row["us"] for row in known]).items()}
    return found | {f"pytorch_{name}": us for name, us in _spread([row["pytorch_us"] for row in rows[1:]]).items()}


def _spread(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {
        "longest_us": ordered[-1],
        "median_us": statistics.median(ordered),
        "p99_us": ordered[int(0.99 * len(ordered))],
        "p999_us": ordered[int(0.999 * len(ordered))],
    }


def main() -> None:
    """Serve, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", choices=["cold", "warm"], default="cold")
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--pause", type=float, default=0.01, help="seconds between requests")
    parser.add_argument("--warm-up", action="store_true", help="call co.warm_up for each weight before")
    parser.add_argument("--folder", type=Path, help="the kernel store; by default a new one, which is removed")
    parser.add_argument("--wheel", type=Path, help="a wheel of kernels to install")
    parser.add_argument("--fill", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["CUTLASS_OPS_CACHE_DIR"] = str(args.folder or Path(folder, "store"))
        if args.wheel:
            site = Path(folder, "site")
            shutil.unpack_archive(args.wheel, site, "zip")
            sys.path.append(str(site))
        wanted = requests(args.requests)
        if args.fill:
            serve(wanted, 0.0)
            Background.current().wait()
            return
        if args.store == "warm":
            store = os.environ["CUTLASS_OPS_CACHE_DIR"]
            fill = [sys.executable, __file__, "--store", "cold", "--fill", "--folder", store]
            subprocess.run([*fill, "--requests", str(args.requests)], check=True)
        rows = serve(wanted, args.pause, ready=args.warm_up)
        found = summary(rows)
        Background.current().close()
    print(found)
    if args.out:
        head = harness.environment() | {
            "processors": len(os.sched_getaffinity(0)),
            "store": "installed" if args.wheel else args.store,
            "pause": args.pause,
            "warm_up": args.warm_up,
        }
        harness.save(args.out, {**head, "summary": found, "rows": rows})


if __name__ == "__main__":
    main()
