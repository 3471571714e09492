"""Measures how long a process takes to find kernels in the store, with their keys from files and without.

    python benchmarks/bench_lookup.py --out benchmarks/results/lookup_2_processors.json

Builds three kernels in a store of its own. Each run is a new process that has imported PyTorch and this library. Those
with and without kept keys alternate. Needs no GPU. Each row: {"keys": whether there are any} and the milliseconds that
each look took: for an Sm90 kernel, for another one, and for a GEMV kernel, which has another template.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import harness

import cutlass_ops as co
from cutlass_ops.compilation.builder import build_many

ROUNDS = 9

_RUN = """
import json, sys, time, torch
import cutlass_ops as co
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.run.registry import Registry
specs = [KernelSpec.from_json(each) for each in json.load(sys.stdin)]
found = []
for spec in specs:
    began = time.perf_counter()
    assert Registry.current().found(spec) is not None
    found.append(round(1e3 * (time.perf_counter() - began), 2))
print(json.dumps(found))
"""


def specs() -> list[co.KernelSpec]:
    """Return the declarations of the kernels."""
    configs = {
        co.Sm90Config(co.ThreadblockShape(128, 128, 64)): "sm_90a",
        co.Sm90Config(co.ThreadblockShape(64, 128, 64)): "sm_90a",
        co.types.GemvConfig(): "sm_90",
    }
    types = {"a": "bf16.row", "b": "bf16.col", "d": "bf16.row"}
    epilogue = co.gemm_bias_relu.epilogue
    return [co.KernelSpec(**types, epilogue=epilogue, config=each, target=to) for each, to in configs.items()]


def took(wanted: list[co.KernelSpec], store: Path) -> list[float]:
    """Return the milliseconds that a new process takes to find each kernel."""
    environment = os.environ | {"CUTLASS_OPS_CACHE_DIR": str(store)}
    given = json.dumps([spec.to_json() for spec in wanted])
    run = subprocess.run(
        [sys.executable, "-c", _RUN], input=given, env=environment, check=True, capture_output=True, text=True
    )
    found: list[float] = json.loads(run.stdout)
    return found


def main() -> None:
    """Measure, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    wanted, rows = specs(), []
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder, "store")
        os.environ["CUTLASS_OPS_CACHE_DIR"] = str(store)
        build_many(wanted)
        for _ in range(args.rounds):
            rows.append({"keys": True, "ms": took(wanted, store)})
            shutil.rmtree(store / "memo")
            rows.append({"keys": False, "ms": took(wanted, store)})  # writes them again
    found = {}
    for name, kept in (("with_keys_ms", True), ("without_ms", False)):
        taken = [row["ms"] for row in rows if row["keys"] is kept]
        found[name] = [statistics.median(each) for each in zip(*taken, strict=True)]
    print(found)
    if args.out:
        head = harness.about("cpu") | {"processors": len(os.sched_getaffinity(0))}
        harness.save(args.out, {**head, "summary": found, "rows": rows})


if __name__ == "__main__":
    main()
