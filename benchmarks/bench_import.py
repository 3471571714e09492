"""Measures the import of this library beyond PyTorch's, and what is left of it for the first op and the first call.

    python benchmarks/bench_import.py --out FILE                      # no GPU
    python benchmarks/bench_import.py --other CHECKOUT --out FILE     # an older checkout and this one, in turns

Each run is a new process that has imported PyTorch and collected garbage. It has byte code, as an installed package
does; with --source, it compiles every module anew. Each row: {"which": "this" or "other"} and processor time in ms
from the beginning: {"import"} of the library, {"op"} until gemm_bias_relu is there, {"call"} until it has returned on
the CPU, {"norm"} until rmsnorm_gemm has too. "clock" is the import by the clock. The summary has medians.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import harness

import cutlass_ops as co

ROOT = Path(__file__).parents[1]

_RUN = """
import gc, json, time, torch
gc.collect()
clock, began = time.perf_counter(), time.process_time()
def passed():
    return round((time.process_time() - began) * 1e3, 2)
import cutlass_ops as co
found = {"import": passed(), "clock": round((time.perf_counter() - clock) * 1e3, 2)}
op = co.gemm_bias_relu
found["op"] = passed()
x, w, bias = torch.ones(2, 8).bfloat16(), torch.ones(8, 8).bfloat16(), torch.ones(8).bfloat16()
op(x, w, bias)
found["call"] = passed()
co.rmsnorm_gemm(x, w, eps=1e-6)
found["norm"] = passed()
print(json.dumps({"at": co.__file__, **found}))
"""


def install(checkout: Path, folder: Path, *, byte_code: bool) -> Path:
    """Copy a checkout's package into a folder, with byte code as an installer makes it."""
    shutil.copytree(checkout / "cutlass_ops", folder / "cutlass_ops", ignore=shutil.ignore_patterns("__pycache__"))
    if byte_code:
        compileall.compile_dir(folder / "cutlass_ops", quiet=2)
    return folder


def run(folder: Path) -> dict[str, float]:
    """Return the times of one process.

    Raises
    ------
    RuntimeError
        If it imported another package.
    """
    variables = {"PATH": os.environ["PATH"], "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", _RUN]
    said = subprocess.run(command, env=variables, cwd=folder, check=True, stdout=subprocess.PIPE, text=True).stdout
    found: dict[str, Any] = json.loads(said)
    if Path(found["at"]).parents[1] != folder:
        raise RuntimeError(f"{found['at']} was imported in place of the package in {folder}")
    del found["at"]
    return found


def summary(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the medians of each package's times."""
    found = {}
    for name in dict.fromkeys(row["which"] for row in rows):
        runs = [{k: v for k, v in row.items() if k != "which"} for row in rows if row["which"] == name]
        found[name] = {k: statistics.median(row[k] for row in runs) for k in runs[0]}
    return found


def main() -> None:
    """Run the processes in turns and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", type=Path, help="another checkout, measured in turns with this one")
    parser.add_argument("--source", action="store_true", help="without byte code")
    parser.add_argument("--runs", type=int, default=15, help="number of processes of each")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    checkouts = {"this": ROOT} | ({"other": args.other} if args.other else {})
    with tempfile.TemporaryDirectory() as folder:
        there = {
            which: install(checkout.resolve(), Path(folder).resolve() / which, byte_code=not args.source)
            for which, checkout in checkouts.items()
        }
        for each in there.values():
            run(each)  # brings the files into memory
        rows: list[dict[str, Any]] = []
        for turn in range(args.runs):
            order = list(there)[:: -1 if turn % 2 else 1]
            rows.extend({"which": which, **run(there[which])} for which in order)
    head = {"cutlass_ops": co.__version__, "torch": harness.torch.__version__, "python": platform.python_version()}
    head |= {"processors": len(os.sched_getaffinity(0)), "byte_code": not args.source}
    found = summary(rows)
    harness.save(args.out, {**head, "summary": found, "rows": rows})
    print(found)


if __name__ == "__main__":
    main()
