"""Measures the host time to choose a kernel: first for a signature, for a weight, and for a number of rows.

    python benchmarks/bench_choose.py

Milliseconds of processor time over all threads, so that other programs matter little: the minimum of several tries,
each with empty caches. Needs no GPU.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

from cutlass_ops.choose import dispatch, policies
from cutlass_ops.declare.device import Device
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.signature import OpSignature
from cutlass_ops.epilogue import builtin
from cutlass_ops.tuner.tuning import signature_at

H100 = Device((9, 0), 132, "NVIDIA H100 80GB HBM3")
A100 = Device((8, 0), 108, "NVIDIA A100-SXM4-80GB")
WEIGHTS = ((4096, 4096), (28672, 8192), (5000, 3000))
ROWS = (1, 17, 100, 3000)
TRIES = 3


def took(do: Callable[[], object]) -> float:
    """Return the milliseconds that a function takes."""
    began = time.process_time()
    do()
    return 1e3 * (time.process_time() - began)


def times(signature: OpSignature, device: Device) -> tuple[float, float, float]:
    """Return the milliseconds of the first choice of a signature, of a weight's kernels, and of a number of rows."""
    first, weights, rows = [], [], []
    for _ in range(TRIES):
        policies.forget()
        first.append(took(lambda: policies.policy(signature, device)))
        for n, k in WEIGHTS:
            weights.append(took(lambda n=n, k=k: dispatch.specs_for(signature, device, n, k)))
            rows += [took(lambda m=m, n=n, k=k: dispatch.choose(signature, device, Problem(m, n, k))) for m in ROWS]
    return min(first), min(weights), min(rows)


def main() -> None:
    """Print the times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    print("milliseconds: the first of a signature, of a weight, of a number of rows")
    for device in (H100, A100):
        for epilogue in (builtin.bias_relu, builtin.rms_norm):
            signature = signature_at(epilogue.graph, Problem(64, 4096, 4096), "bf16", "row", "col", None, device)
            # Tables are read once in a process.
            policies.policy(signature, device)
            found = ", ".join(f"{ms:.2f}" for ms in times(signature, device))
            print(f"{device.name}, {epilogue.name}: {found}")


if __name__ == "__main__":
    main()
