"""Measures the host time to choose a kernel: for a process, a signature, a weight, a number of rows; and the memory.

    python benchmarks/bench_choose.py
    python benchmarks/bench_choose.py --other CHECKOUT --out FILE    # an older checkout and this one, in turns

Two times of each: what passes, and in parentheses that of processors over all threads, so that other programs matter
little. Both are the minimum of several tries, each with empty caches. The first choice of a process is measured in
processes of their own, apart from imports: one that finds nothing in files, and one after it that finds what that
one decided. Needs no GPU. The file has the first choices of each process, in milliseconds.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

IMPORTING = time.process_time()

import numpy as np  # noqa: E402

from cutlass_ops.choose import dispatch, policies  # noqa: E402
from cutlass_ops.declare.device import Device  # noqa: E402
from cutlass_ops.declare.problem import Problem  # noqa: E402
from cutlass_ops.declare.signature import OpSignature  # noqa: E402
from cutlass_ops.epilogue import builtin, composed  # noqa: E402
from cutlass_ops.tuner.tuning import signature_at  # noqa: E402

IMPORTED = time.process_time()

H100 = Device((9, 0), 132, "NVIDIA H100 80GB HBM3")
A100 = Device((8, 0), 108, "NVIDIA A100-SXM4-80GB")
EPILOGUES = {e.name: e for e in (builtin.bias_relu, composed.rms_norm)}
WEIGHTS = ((4096, 4096), (28672, 8192), (5000, 3000))
ROWS = (1, 17, 100, 513, 3000, 7777)
# Of the memory.
MANY_ROWS, MANY_WEIGHTS = range(1, 8193), [(4096 + 512 * at, 4096) for at in range(8)]
TRIES = 3
FIRST = "--first"
ROOT = Path(__file__).parents[1]


class Took(NamedTuple):
    """Milliseconds: what passes, and those of processors."""

    wall: float
    processor: float

    def __str__(self) -> str:
        return f"{self.wall:.3g} ({self.processor:.3g})"


def took(do: Callable[[], object]) -> Took:
    """Return the milliseconds that a function takes."""
    wall, processor = time.perf_counter(), time.process_time()
    do()
    return Took(1e3 * (time.perf_counter() - wall), 1e3 * (time.process_time() - processor))


def least(runs: list[Took], place: float = 0) -> Took:
    """Return the smallest of each time, or those at another place of the sorted times, from 0 to 1."""
    wall, processor = (sorted(each)[int(place * len(runs))] for each in zip(*runs, strict=True))
    return Took(wall, processor)


def signature_of(epilogue: str, device: Device) -> OpSignature:
    """Return a signature of an epilogue."""
    graph = EPILOGUES[epilogue].graph
    return signature_at(graph, Problem(64, 4096, 4096), "bf16", "row", "col", None, device)


def decide(signature: OpSignature, device: Device, problem: Problem) -> None:
    """Take a decision, and what a call asks of it."""
    decision = dispatch.decide(signature, device, problem)
    assert decision is not None
    assert decision.spec in decision.specs


def first_of_a_process(epilogue: str, checkout: Path, kept: str) -> dict[str, Any]:
    """Return the milliseconds of imports, of the first decision, of that about another weight and of what that left.

    Parameters
    ----------
    epilogue : str
        Of the decisions.
    checkout : Path
        The checkout whose package decides.
    kept : str
        The folder where decisions are kept.
    """
    command = [sys.executable, str(checkout / "benchmarks" / Path(__file__).name), FIRST, epilogue]
    settings = {"PYTHONPATH": str(checkout), "CUTLASS_OPS_CACHE_DIR": kept, "CUTLASS_OPS_CHOICES": "1"}
    run = subprocess.run(command, env=os.environ | settings, check=True, capture_output=True, text=True)
    imports, *spent = map(float, run.stdout.split())
    # An older checkout may leave something to a thread.
    return {"imports": imports, "first": spent[:2], "weight": spent[2:4], "left": spent[4:] or [0.0, 0.0]}


def firsts(epilogue: str, checkouts: Mapping[str, Path]) -> list[dict[str, Any]]:
    """Return what processes of each checkout take in turns: where nothing is kept in files, and where decisions are."""
    rows = []
    for turn in range(TRIES):
        for which in list(checkouts)[:: -1 if turn % 2 else 1]:
            with tempfile.TemporaryDirectory() as folder:
                for kept in (False, True):
                    found = first_of_a_process(epilogue, checkouts[which].resolve(), folder)
                    rows.append({"which": which, "epilogue": epilogue, "kept": kept, **found})
    return rows


def said(rows: list[dict[str, Any]]) -> str:
    """Return the least times of processes in words."""
    first, weight, left, first_kept, weight_kept, _ = (
        least([Took(*row[name]) for row in rows if row["kept"] == kept])
        for kept in (False, True)
        for name in ("first", "weight", "left")
    )
    imports = min(row["imports"] for row in rows)
    return (
        f"the first decision of a process {first} ms, after {imports:.0f} of imports; a weight {weight}, which leaves "
        f"{left} to a thread; both kept in files, {first_kept} and {weight_kept}"
    )


def times(signature: OpSignature, device: Device) -> tuple[Took, ...]:
    """Return the milliseconds of the first choice of a signature, of a weight's, and of one at another M."""
    first: list[Took] = []
    weights: list[Took] = []
    rows: list[Took] = []
    for _ in range(TRIES):
        policies.forget(shipped=True)
        first.append(took(lambda: policies.policy(signature, device)))
        for n, k in WEIGHTS:
            weights.append(took(lambda n=n, k=k: decide(signature, device, Problem(1, n, k))))
            rows += [took(lambda m=m, n=n, k=k: decide(signature, device, Problem(m, n, k))) for m in ROWS]
    return least(first), least(weights), least(rows, 0.5)


def memory(signature: OpSignature, device: Device) -> float:
    """Return the MB that are kept for many weights, once they were decided at many numbers of rows."""
    policies.forget(shipped=True)
    dispatch.decide(signature, device, Problem(1, 64, 64))
    tracemalloc.start()
    for n, k in MANY_WEIGHTS:
        for m in MANY_ROWS:
            dispatch.decide(signature, device, Problem(m, n, k))
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return kept / 1e6


def main() -> None:
    """Print the times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(FIRST, choices=tuple(EPILOGUES), help="measure this in this process alone")
    parser.add_argument("--other", type=Path, help="another checkout, measured in turns with this one")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.first is not None:
        signature = signature_of(args.first, H100)
        spent = [took(lambda n=n: decide(signature, H100, Problem(100, n, 4096))) for n in (4096, 28672)]
        print(1e3 * (IMPORTED - IMPORTING), *itertools.chain.from_iterable(spent))
        return
    os.environ["CUTLASS_OPS_CHOICES"] = "0"
    checkouts = {"this": ROOT} | ({"other": args.other} if args.other else {})
    rows = []
    for epilogue in EPILOGUES:
        found = firsts(epilogue, checkouts)
        for which in checkouts:
            print(f"{H100.name}, {epilogue}, {which}: {said([row for row in found if row['which'] == which])}")
        rows += found
    if args.out is not None:
        import harness

        head = {"python": platform.python_version(), "numpy": np.__version__}
        harness.save(args.out, {**head, "processors": len(os.sched_getaffinity(0)), "rows": rows})
    print("milliseconds: the first of a signature, of a weight, of a number of rows (median); MB of eight weights")
    for device in (H100, A100):
        for epilogue in EPILOGUES:
            signature = signature_of(epilogue, device)
            # Tables are read once in a process.
            policies.policy(signature, device)
            found = ", ".join(map(str, times(signature, device)))
            print(f"{device.name}, {epilogue}: {found}; {memory(signature, device):.2f}")


if __name__ == "__main__":
    main()
