"""Measures the time to bundle the default catalogue, and the bundle's size.

    python benchmarks/bench_bundle.py --out benchmarks/results/bundle_2_processors.json   # needs nvcc and g++, no GPU

Each run is `cutlass-ops bundle` in a new process, on an idle machine, into an empty store. Each row: {"seconds"}, as
the command reports them. The top level has what all runs share, such as "manifest_sha256"; runs that made different
bundles are refused.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import harness

import cutlass_ops as co


def build(catalogue: str | None) -> dict[str, Any]:
    """Return the command's report on one bundle of a catalogue, by default the library's own."""
    with tempfile.TemporaryDirectory() as folder:
        which = [] if catalogue is None else [catalogue]
        command = [sys.executable, "-m", "cutlass_ops", "bundle", *which, "--out", f"{folder}/bundle", "--json"]
        variables = os.environ | {"CUTLASS_OPS_CACHE_DIR": f"{folder}/store"}
        said = subprocess.run(command, env=variables, check=True, stdout=subprocess.PIPE, text=True).stdout
    about: dict[str, Any] = json.loads(said)
    del about["path"]
    return about


def summarize(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the result of several runs.

    Raises
    ------
    RuntimeError
        If they made different bundles.
    """
    rows = [{"seconds": run["seconds"]} for run in runs]
    same = [{name: value for name, value in run.items() if name != "seconds"} for run in runs]
    if any(about != same[0] for about in same):
        raise RuntimeError(f"the same catalogue has made different bundles: {same}")
    return {**same[0], "rows": rows}


def main() -> None:
    """Build the bundle several times and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("catalogue", nargs="?", help="A catalogue. Default: the library's own.")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    runs = [build(args.catalogue) for _ in range(args.runs)]
    head = {
        "date": datetime.date.today().isoformat(),
        "machine": platform.machine(),
        "processors": len(os.sched_getaffinity(0)),
        "cutlass_ops": co.__version__,
    }
    harness.save(args.out, {**head, **summarize(runs)})
    print([run["seconds"] for run in runs])


if __name__ == "__main__":
    main()
