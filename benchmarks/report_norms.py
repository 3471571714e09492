"""Writes docs/norms.md from the raw results of norms and gates.

    python benchmarks/report_norms.py

Needs no GPU. It reads the results of bench_rmsnorm.py, bench_swiglu.py, bench_layer.py, profile_layer.py and
accuracy_rmsnorm.py in benchmarks/results. A part without its file says so.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
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

[rmsnorm.md](rmsnorm.md) describes the kernels. [performance.md](performance.md) says how they are measured, and what
`eager` and `compile` are. `eager_one_linear` multiplies by both weights of SwiGLU at once, and then gates.

**A ratio is the other's time over ours: above 1, ours is faster.** Each ratio is the median over the rounds. The line
below a table lists every shape at which a peer is faster.

## Summary"""


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
    """Return our time over that of our GEMM without the norm, the median of the rounds' ratios."""
    return 1 / row["over_ours"]["gemm"]["median"]


def _case(row: Row) -> str:
    return f"{row['phase']} M = {row['m']}" if "phase" in row else f"{row['m']}×{row['n']}×{row['k']}"


def losses(rows: Iterable[Row]) -> str:
    """Return the shapes at which a peer is faster, and by how much, as text."""
    lost = [(row, name) for row in rows for name in PEERS if (median(row, name) or 1) < 1]
    if not lost:
        return "No peer is faster at any of these shapes."
    each = (f"{_case(r)} ({name} {number(median(r, name))})" for r, name in lost)
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
        "with a free norm",
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
    ranges: dict[str, dict[str, list[float]]] = {"M ≤ 64": {}, "M > 64": {}}
    for row in data["rows"]:
        taken = "beside" if "beside" in row["kernel"] else "ahead" if "ahead" in row["kernel"] else "gathered"
        gemm = row["over_ours"]["gemm"]["median"]
        over = {name: value["median"] / gemm for name, value in row["over_ours"].items()} | {taken: 1 / gemm}
        cells.append([row["m"], row["n"], row["k"], *(number(over.get(way)) for way in WAYS), f"`{row['kernel']}`"])
        for way in WAYS:
            if way in over:
                ranges["M ≤ 64" if row["m"] <= 64 else "M > 64"].setdefault(way, []).append(over[way])
    spans = [
        (rows, *(f"{min(of[way]):.3f} to {max(of[way]):.3f}" if way in of else "–" for way in WAYS))
        for rows, of in ranges.items()
    ]
    return report.table(("rows", *WAYS), spans, ("rows",)) + "\n\n" + report.table(header, cells, ("kernel",))


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
    return report.table(header, cells, ("phase",)) + "\n\n" + losses(data["rows"])


def layer_kernels(data: Row) -> str:
    """Return the table of a decoder layer's kernels that take at least 1% of its time."""
    cells = []
    for phase, m, variant in dict.fromkeys((row["phase"], row["m"], row["variant"]) for row in data["rows"]):
        mine = [r for r in data["rows"] if (r["phase"], r["m"], r["variant"]) == (phase, m, variant)]
        total = sum(row["us"] for row in mine)
        cells.append([phase, m, variant, "all", f"{sum(r['count'] for r in mine):.0f}", f"{total:.1f}"])
        cells += [
            [phase, m, variant, f"`{row['kernel'].strip()}`", f"{row['count']:.0f}", f"{row['us']:.1f}"]
            for row in mine
            if row["us"] >= total / 100
        ]
    table = report.table(("phase", "M", "variant", "kernel", "launches", "µs"), cells, ("phase", "variant", "kernel"))
    return f"<details><summary>Kernels</summary>\n\n{table}\n\n</details>"


@dataclass(frozen=True)
class Target:
    """A target of a result.

    Attributes
    ----------
    what : str
        Description.
    file : str
        The result, in benchmarks/results.
    concerns : callable
        Whether a row counts.
    value, reached : callable
        The measured value of a row, and whether it reaches the target.
    missed : str
        Why the target is missed, if it is.
    """

    what: str
    file: str
    concerns: Callable[[Row], bool]
    value: Callable[[Row], float]
    reached: Callable[[float], bool]
    missed: str = ""


def _at_least(bound: float) -> Callable[[float], bool]:
    return lambda value: value >= bound


TARGETS: Sequence[Target] = (
    Target(
        "`rmsnorm_gemm`, N = 6144, M ≥ 1024: ratio to the best peer ≥ 1.10",
        "rmsnorm_h100.json", lambda r: r["n"] == 6144 and r["m"] >= 1024, best, _at_least(1.10),
        "The column *with a free norm* shows the ratio that we would reach if the norm took no time. PyTorch's norm\n"
        "is one pass over x, which takes at most a tenth of the time of so narrow a GEMM. Both GEMMs, ours and\n"
        "cuBLASLt's, run at the chip's power limit.",
    ),
    Target(
        "`rmsnorm_gemm`, N = 28672, M ≥ 1024: ratio ≥ 1.02",
        "rmsnorm_h100.json", lambda r: r["n"] == 28672 and r["m"] >= 1024, best, _at_least(1.02),
    ),
    Target(
        "`rmsnorm_gemm`, M < 1024: ratio ≥ 1.05",
        "rmsnorm_h100.json", lambda r: r["m"] < 1024, best, _at_least(1.05),
        "Our kernel and PyTorch's read the weight once, which takes nearly all of the time. For one row,\n"
        "torch.compile's generated kernel does what ours does. Both are near the memory's bandwidth.",
    ),
    Target(
        "`rmsnorm_gemm`, M ≥ 1024: time over that of our GEMM without the norm ≤ 1.02",
        "rmsnorm_h100.json", lambda r: r["m"] >= 1024, own_gemm, lambda value: value <= 1.02,
        "The idle warps that compute the means share issue slots and the L2 cache with the main loop. The last\n"
        "epilogues wait for them. Reading x is a third of the cost, as kernels with constants for the means show.\n"
        "The two ops also have tables of their own, and the tuner did not always find the same kernel for both. Races\n"
        "in which the chip rests in every second round found nothing faster (benchmarks/NOTES.md).",
    ),
    Target(
        "`gemm_swiglu`, M ≥ 1024: ratio ≥ 1.10",
        "swiglu_h100.json", lambda r: r["m"] >= 1024, best, _at_least(1.10),
    ),
    Target("`gemm_swiglu`: no shape loses", "swiglu_h100.json", lambda _: True, best, _at_least(1.0)),
    Target("`rmsnorm_gemm`: no shape loses", "rmsnorm_h100.json", lambda _: True, best, _at_least(1.0)),
    Target(
        "The decoder layer: ratio ≥ 1.10",
        "layer_h100.json", lambda _: True, best, _at_least(1.10),
        "GEMMs are eight tenths of a long layer's time. cuBLASLt's are as fast as ours there, or faster where the\n"
        "chip has power to spare: see the kernels below. Fusion saves only in the rest: torch.compile's kernels\n"
        "for norms, the rotation of Q and K, the residual and SwiGLU. Attention is the same in both.",
    ),
)  # fmt: skip


def overview(results: Path) -> str:
    """Return one line for each result with peers: shapes, geometric mean, worst and losses."""
    cells = []
    for title, name, _, table in PARTS:
        path = results / name
        if table not in (rmsnorm, swiglu, layer) or not path.is_file():
            continue
        rows = json.loads(path.read_text())["rows"]
        worst = min(rows, key=best)
        mean = statistics.geometric_mean(map(best, rows))
        against = ", ".join(peer for peer in PEERS if any(median(row, peer) is not None for row in rows))
        lost = sum(best(row) < 1 for row in rows)
        since = report.changed(path.stem)
        cells.append([title, against, len(rows), f"{mean:.4f}", f"{best(worst):.4f} ({_case(worst)})", lost, since])
    header = ("case", "against", "shapes", "geometric mean", "worst", "losses", "kernels changed since")
    return report.table(header, cells, ("case", "against", "worst"))


def targets(results: Path) -> str:
    """Return a table of targets: whether each is reached, and if not, at which shapes and why."""
    cells = []
    for target in TARGETS:
        path = results / target.file
        if not path.is_file():
            cells.append((target.what, "not measured yet", "", "", ""))
            continue
        rows = [row for row in json.loads(path.read_text())["rows"] if target.concerns(row)]
        missed = [row for row in rows if not target.reached(target.value(row))]
        share = f"{len(rows) - len(missed)} of {len(rows)}"
        if not missed:
            cells.append((target.what, "**reached**", share, "", ""))
            continue
        each = ", ".join(f"{_case(row)} ({target.value(row):.4f})" for row in missed)
        why = target.missed.replace("\n", " ") or "No cause is known."
        cells.append((target.what, "**missed**", share, each, why))
    header = ("target", "result", "shapes that reach it", "shapes that miss it", "why")
    return report.table(header, cells, header)


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
        "`rmsnorm_gemm(x, prepared, eps=...)` in BF16. *Over own GEMM* is our time with the norm over our time\n"
        "without. *With a free norm* is the best peer's time over our time without the norm.",
        rmsnorm,
    ),
    (
        "RMSNorm + GEMM on an H200",
        "rmsnorm_h200.json",
        "The same on an H200, for which there is no table of norms. The H100's table of norms and the H200's tables\n"
        "of other epilogues choose the kernels.",
        rmsnorm,
    ),
    (
        "RMSNorm + GEMM at unseen shapes",
        "rmsnorm_unseen_h100.json",
        "Weights and numbers of rows that were not tuned. The shape that loses has one wave of tiles. Its epilogues\n"
        "wait until idle warps have read all rows: *over own GEMM* shows for how long.",
        rmsnorm,
    ),
    (
        "RMSNorm + GEMM at unseen shapes on an H200",
        "rmsnorm_unseen_h200.json",
        "The same on an H200.",
        rmsnorm,
    ),
    (
        "Ways to a row's statistic",
        "rmsnorm_h100.json",
        "Each number is a time over that of our GEMM without a norm: above 1, it is slower. `statistic` gets the\n"
        "sums of squares from the previous GEMM. The other three compute them from x, with the same tiles.\n"
        "– means: not legal.",
        ways,
    ),
    (
        "Gathering from tiles of many rows",
        "rmsnorm_gathered_h100.json",
        "The same from an earlier version, in which `gathered` was legal for tiles of any number of rows and\n"
        "`beside` did not exist. It shows why `gathered` is now limited to 64 rows.",
        ways,
    ),
    (
        "SwiGLU",
        "swiglu_h100.json",
        "`gemm_swiglu(x, w_gate, w_up)` in BF16. It is one kernel that writes N columns.",
        swiglu,
    ),
    (
        "SwiGLU at unseen shapes",
        "swiglu_unseen_h100.json",
        "Weights and numbers of rows that were not tuned.",
        swiglu,
    ),
    (
        "SwiGLU at unseen shapes on an H200",
        "swiglu_unseen_h200.json",
        "The same on an H200.",
        swiglu,
    ),
    (
        "A decoder layer",
        "layer_h100.json",
        "A layer of Llama-3.1-8B in BF16: [transformer_block.py](../examples/transformer_block.py) against the\n"
        "one of transformers. *Statistic passed on* is a variant in which `gemm_residual_rms` passes on the\n"
        "norm's statistic; the number is its time over ours.",
        layer,
    ),
    (
        "Where the layer's time goes",
        "layer_kernels_h100.json",
        "Times are from PyTorch's profiler, for one call. Clocks are higher here than in the benchmark above: ten\n"
        "calls do not bring the chip to its power limit. A kernel may start before the previous one ends. Its\n"
        "time then includes the wait.",
        layer_kernels,
    ),
    (
        "Accuracy",
        "accuracy_rmsnorm_h100.json",
        "Relative errors against float64, in the Frobenius norm. The ratio is our error over that of PyTorch's two\n"
        "operations, a norm and a linear layer. If a row's mean is large, `layernorm_gemm` loses digits, and the\n"
        "ratio is far above 1: [rmsnorm.md](rmsnorm.md) gives the limits.",
        accuracy,
    ),
)


def document(results: Path) -> str:
    """Return the whole document."""
    parts = [INTRODUCTION, overview(results), "## Targets", targets(results)]
    for title, name, text, table in PARTS:
        path = results / name
        parts += [f"## {title}", text]
        if not path.is_file():
            parts.append("Not measured yet.")
            continue
        data = json.loads(path.read_text())
        where = f"{report.environment(data)} ([{name}](../benchmarks/results/{name}))."
        said = report.others(path.stem)
        parts += [where, *([said] if said else []), table(data)]
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
