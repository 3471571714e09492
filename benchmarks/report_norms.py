"""Writes docs/norms.md from the raw results of norms and gates, so that no number there is typed by hand.

    python benchmarks/report_norms.py

Needs no GPU. It reads the files of benchmarks/results that bench_rmsnorm.py, bench_swiglu.py, bench_layer.py and
accuracy_rmsnorm.py wrote; a part whose file does not exist says so.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import report

OUT = report.ROOT / "docs" / "norms.md"
PEERS = ("eager", "eager_one_linear", "compile")
WAYS = ("statistic", "gathered", "beside", "ahead")

Row = dict[str, Any]

INTRODUCTION = """\
# Norms and gates in numbers

<!-- Written by benchmarks/report_norms.py from benchmarks/results. Do not edit: change those, and run it again. -->

The kernels of [rmsnorm.md](rmsnorm.md), measured as [performance.md](performance.md) says: CUDA graphs, inputs in
rotation, ours and the others in random order within each round. **A ratio is the other's time over ours: above 1,
ours is faster**; it is the median of the rounds' ratios, with their range where there is room. `eager` is one PyTorch
operation after another, `compile` is `torch.compile` of these with max-autotune. Results at which any peer is faster
are listed."""


def median(row: Row, name: str) -> float | None:
    """Return a variant's time over that of ours, if it was measured."""
    found = row["over_ours"].get(name)
    return None if found is None else float(found["median"])


def best(row: Row) -> float:
    """Return the least of the peers' times over ours."""
    return min(x for name in PEERS if (x := median(row, name)) is not None)


def number(value: float | None) -> str:
    """Return a ratio as text."""
    return "–" if value is None else f"{value:.3f}"


def own_gemm(row: Row) -> float:
    """Return our time over that of our GEMM without the norm: as the median of the rounds' ratios has it."""
    return 1 / row["over_ours"]["gemm"]["median"]


def losses(rows: Iterable[Row]) -> str:
    """Say at which shapes a peer is faster, and by how much."""
    lost = [(row, name) for row in rows for name in PEERS if (median(row, name) or 1) < 1]
    if not lost:
        return "No peer is faster at any of these shapes."
    each = (f"{r['m']}×{r['n']}×{r['k']} ({name} {number(median(r, name))})" for r, name in lost)
    return "A peer is faster at " + ", ".join(each) + "."


def rmsnorm(data: Row) -> str:
    """Return the table of RMSNorm + GEMM."""
    header = (
        "M",
        "N",
        "K",
        "ours, µs",
        "over own GEMM",
        "eager",
        "compile",
        "best peer",
        "range",
        "were the norm free",
        "kernel",
    )
    cells = []
    for row in data["rows"]:
        name = min((p for p in PEERS if median(row, p) is not None), key=lambda p: median(row, p) or 0)
        spread = row["over_ours"][name]
        cells.append(
            [
                *(row["m"], row["n"], row["k"], report.microseconds(row["ms"]["ours"]), f"{own_gemm(row):.3f}"),
                *(number(median(row, "eager")), number(median(row, "compile")), number(best(row))),
                f"{spread['min']:.3f}–{spread['max']:.3f}",
                number(best(row) * own_gemm(row)),
                f"`{row['kernel']}`",
            ]
        )
    return report.table(header, cells, ("kernel",)) + "\n\n" + losses(data["rows"])


def ways(data: Row) -> str:
    """Return the table of the ways to a row's statistic: each one's time over that of our GEMM without a norm."""
    header = ("M", "N", "K", *WAYS, "kernel")
    cells = []
    for row in data["rows"]:
        taken = "beside" if "beside" in row["kernel"] else "ahead" if "ahead" in row["kernel"] else "gathered"
        gemm = row["over_ours"]["gemm"]["median"]
        over = {name: value["median"] / gemm for name, value in row["over_ours"].items()} | {taken: 1 / gemm}
        cells.append([row["m"], row["n"], row["k"], *(number(over.get(way)) for way in WAYS), f"`{row['kernel']}`"])
    return report.table(header, cells, ("kernel",))


def swiglu(data: Row) -> str:
    """Return the table of SwiGLU."""
    header = ("M", "N", "K", "ours, µs", "two GEMMs of ours", *PEERS, "best peer", "kernel")
    cells = [
        [
            *(row["m"], row["n"], row["k"], report.microseconds(row["ms"]["ours"])),
            *(number(median(row, name)) for name in ("two_gemms", *PEERS)),
            *(number(best(row)), f"`{row['kernel']}`"),
        ]
        for row in data["rows"]
    ]
    return report.table(header, cells, ("kernel",)) + "\n\n" + losses(data["rows"])


def layer(data: Row) -> str:
    """Return the table of the decoder layer."""
    header = ("phase", "M", "cache", "ours, µs", "statistic passed on", "eager", "compile", "best peer")
    cells = [
        [
            *(row["phase"], row["m"], row["cache"], report.microseconds(row["ms"]["ours"])),
            *(number(median(row, name)) for name in ("passed", "eager", "compile")),
            number(best(row)),
        ]
        for row in data["rows"]
    ]
    return report.table(header, cells, ("phase",))


def accuracy(data: Row) -> str:
    """Return the table of errors."""
    header = ("op", "rows of x", "dtype", "statistic", "error", "PyTorch's", "ratio", "worst row's")
    cells = [
        [
            *(f"`{row['op']}`", row["case"], row["dtype"], row["way"], f"{row['error']:.2e}", f"{row['pytorch']:.2e}"),
            *(f"{row['ratio']:.2f}", f"{row['worst_row_ratio']:.2f}"),
        ]
        for row in data["rows"]
    ]
    return report.table(header, cells, ("op", "rows of x", "dtype", "statistic"))


# Title, file in benchmarks/results, what comes before the table, and the table.
PARTS: Sequence[tuple[str, str, str, Callable[[Row], str]]] = (
    (
        "RMSNorm + GEMM",
        "rmsnorm_h100.json",
        "`rmsnorm_gemm(x, prepared, eps=...)` in BF16. *Over own GEMM* is our time with the norm over that without;\n"
        "*were the norm free*, the best peer's time over that.",
        rmsnorm,
    ),
    (
        "Ways to a row's statistic",
        "rmsnorm_h100.json",
        "Times over that of our GEMM without a norm: `statistic` is given the sums of squares that the GEMM before\n"
        "left, the others take them from x, all three with the same tiles. – is not legal.",
        ways,
    ),
    (
        "Gathering from tiles of many rows",
        "rmsnorm_gathered_h100.json",
        "The same while gathering was legal for tiles of any number of rows, before the third way was written: why it\n"
        "no longer is, beyond 64.",
        ways,
    ),
    (
        "SwiGLU",
        "swiglu_h100.json",
        "`gemm_swiglu(x, w_gate, w_up)` in BF16: one kernel, which writes N columns.",
        swiglu,
    ),
    (
        "A decoder layer",
        "layer_h100.json",
        "Llama-3.1-8B's, in BF16: [transformer_block.py](../examples/transformer_block.py), against transformers'.\n"
        "Decoding 16 and 64 sequences has not been measured yet. *Statistic passed on*: by `gemm_residual_rms`,\n"
        "measured before that had an epilogue and a table of its own.",
        layer,
    ),
    (
        "Accuracy",
        "accuracy_rmsnorm_h100.json",
        "Relative errors against float64 in the Frobenius norm, ours over those of PyTorch's two operations.",
        accuracy,
    ),
)


def document(results: Path) -> str:
    """Return the whole document."""
    parts = [INTRODUCTION]
    for title, name, text, table in PARTS:
        path = results / name
        parts += [f"## {title}", text]
        if not path.is_file():
            parts.append("Not measured yet.")
            continue
        data = json.loads(path.read_text())
        where = f"{report.environment(data)} ([{name}](../benchmarks/results/{name}))."
        parts += [where, table(data)]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Write the document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=report.RESULTS)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    args.out.write_text(document(args.results))


if __name__ == "__main__":
    main()
