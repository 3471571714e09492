"""Counts the rows of results whose kernel dispatch no longer chooses, which need measuring again. Needs no GPU.

    python benchmarks/stale.py    # minutes; writes benchmarks/stale.json, which report.py quotes
    python benchmarks/stale.py benchmarks/results/gemm_decode_h100.json --out /tmp/stale.json

Prints each such row with both kernels. Writes {result: {"rows": number of rows, "others": number of such rows}}.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import bench_gemm
import harness
import shapes
import torch
from bench_gemm import Case, Part, halves

from cutlass_ops.choose import dispatch
from cutlass_ops.declare.device import Device
from cutlass_ops.declare.problem import Problem
from cutlass_ops.epilogue import composed
from cutlass_ops.run import norms, ops
from cutlass_ops.run.registry import OpSignature

Row = dict[str, Any]

OUT = Path(__file__).with_name("stale.json")
# Other results have declared kernels, or those of a whole layer.
RESULTS = [
    path
    for kind in ("gemm_*", "rmsnorm_*", "swiglu_*")
    for path in sorted(Path(__file__).with_name("results").glob(f"{kind}.json"))
    if path.stem != "rmsnorm_gathered_h100"
]


def asked(kind: str, row: Row, device: Device) -> tuple[OpSignature, Problem]:
    """Return the signature, device and problem of a row of a result, by the result's name."""
    if kind == "gemm":
        return bench_gemm.asked(_case(row), device)
    m, n, k, dtype = row["m"], row["n"], row["k"], bench_gemm.DTYPES[row["dtype"]]
    x, weight = (torch.empty(shape, device="meta", dtype=dtype) for shape in ((m, k), (n, k)))
    if kind == "rmsnorm":
        return harness.asked(norms.rmsnorm_op(), (x, weight.t(), 1e-5), device)
    return harness.asked(ops.op(composed.swiglu), (x, weight.t(), weight.t()), device)


def _case(row: Row) -> Case:
    return Case(**{field.name: row[field.name] for field in fields(Case)})


def chosen(result: str, rows: list[Row], device: Device) -> Iterator[tuple[Row, str]]:
    """Yield a result's rows, each with the kernel that dispatch chooses now."""
    for part, members in _parts(rows) if "held_out" in result else [(Part([]), rows)]:
        with part.known():
            for row in members:
                signature, problem = asked(result.split("_")[0], row, device)
                yield row, dispatch.choose(signature, device, problem)[0].config.slug


def _parts(rows: list[Row]) -> Iterator[tuple[Part, list[Row]]]:
    """Yield the problems that counted as tuned, and the rows measured with them."""
    # Restore the set's order, by which it was halved: rows measured later are at the end.
    of = {_case(r): r for r in sorted(rows, key=lambda r: shapes.GRID.index((r["m"], r["n"], r["k"])))}
    for part in halves(list(of)):
        yield part, [of[case] for case in part.cases]


def others(path: Path) -> list[tuple[Row, str]]:
    """Return the rows of a result whose kernel differs from dispatch's current choice, each with that choice."""
    result = json.loads(path.read_text())
    device = Device((9, 0), result["multiprocessors"], result["chip"])
    return [(row, slug) for row, slug in chosen(path.stem, result["rows"], device) if slug != row["kernel"]]


def main() -> None:
    """Count, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="*", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    found = {}
    for path in args.results:
        differ = others(path)
        found[path.stem] = {"rows": len(json.loads(path.read_text())["rows"]), "others": len(differ)}
        print(path.stem, found[path.stem], flush=True)
        for row, slug in differ:
            print("   ", *(row.get(name, "") for name in ("op", "layout", "m", "n", "k")), row["kernel"], "→", slug)
    lines = ",\n ".join(f"{json.dumps(name)}: {json.dumps(count)}" for name, count in found.items())
    args.out.write_text(f"{{\n {lines}\n}}\n")


if __name__ == "__main__":
    main()
