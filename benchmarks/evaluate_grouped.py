"""Compares the time model with measurements of groups of rows, and says what the choice of kernels loses by the model.

    python benchmarks/evaluate_grouped.py benchmarks/results/grouped_h100.json

For each row without an epilogue: the time measured over that which the model predicts for these groups; then the kernel
that is chosen now, how much longer than the best one it takes by the model, and the ratio to the best peer that follows
if the measured kernel is replaced by it. No GPU is needed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import harness
import numpy as np
import torch
from bench_grouped import DTYPE, Case

from cutlass_ops.choose import dispatch, policies
from cutlass_ops.declare.config import Config
from cutlass_ops.declare.device import Device
from cutlass_ops.declare.signature import OpSignature
from cutlass_ops.kinds.arrays import Extents
from cutlass_ops.kinds.sm90 import model
from cutlass_ops.kinds.spreads import Groups
from cutlass_ops.operand import groups
from cutlass_ops.operand.call import signature_of
from cutlass_ops.run.gemm import op_for


def signature(device: Device) -> OpSignature:
    """Return the signature of calls without an epilogue."""
    x, w = (torch.empty(*shape, dtype=DTYPE, device="meta") for shape in ((64, 64), (4, 64, 64)))
    offsets = torch.empty(4, dtype=torch.int32, device="meta")
    return signature_of(op_for(None, "grouped").checked(x, w.mT, (offsets,), {}, None, None), device)


def predicted(kernels: tuple[Config, ...], row: dict[str, Any], device: Device) -> dict[str, float]:
    """Return the predicted milliseconds of kernels, by slug, for the groups of a row."""
    case = Case(row["experts"], row["tokens"], row["groups"])
    sizes, counts = np.unique([size for size in case.sizes if size], return_counts=True)
    known = Groups(sizes.reshape(-1, 1, 1).astype(np.float64), counts.reshape(-1, 1, 1).astype(np.float64))
    problem = groups.typical(case.tokens, row["n"], row["k"], case.experts)
    batch, chip = model.Batch.of(kernels), model.costs_of(device)
    means, cover = model.of_groups(batch, Extents.of([problem]), known, chip)
    times = model.times(batch, means, chip, cover=cover)[0] / 1e3
    return dict(zip((c.slug for c in kernels), times.tolist(), strict=True))


def main() -> None:
    """Print a line for each row, and the means."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    result = json.loads(parser.parse_args().results.read_text())
    device = Device((9, 0), result["multiprocessors"], result["chip"])
    of = signature(device)
    kernels = policies.policy(of, device).kernels
    expected: dict[str, list[float]] = {}
    for row in result["rows"]:
        if row["epilogue"] != "none" or "form" in row:
            continue
        problem = groups.typical(row["tokens"], row["n"], row["k"], row["experts"])
        decision = dispatch.decide(of, device, problem)
        assert decision is not None
        times, mine = predicted(kernels, row, device), decision.config.slug
        then = row["kernel"]
        ratio = row["ratio_to_best_peer"] * times[then] / times[mine]
        expected.setdefault(row["groups"], []).append(ratio)
        print(
            f"{row['experts']:4} experts {row['tokens']:6} tokens {row['groups']:9} {then}: measured over predicted "
            f"{row['ours_ms'] / times[then]:.2f}, ratio {row['ratio_to_best_peer']:.2f}. {mine}: loses "
            f"{times[mine] / min(times.values()) - 1:.1%}, ratio {ratio:.2f} expected"
        )
    for name, ratios in expected.items():
        print(f"{name}: {harness.geomean(ratios):.3f} expected, worst {min(ratios):.3f}")


if __name__ == "__main__":
    main()
