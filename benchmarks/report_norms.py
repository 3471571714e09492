"""Writes docs/norms.md from the raw results of norms and gates, so that no number there is typed by hand.

    python benchmarks/report_norms.py

Needs no GPU. It reads the files of benchmarks/results that bench_rmsnorm.py, bench_swiglu.py, bench_layer.py,
profile_layer.py and accuracy_rmsnorm.py wrote; a part whose file does not exist says so.
"""

from __future__ import annotations

import argparse
import json
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


def _case(row: Row) -> str:
    return f"{row['phase']} M = {row['m']}" if "phase" in row else f"{row['m']}×{row['n']}×{row['k']}"


def losses(rows: Iterable[Row]) -> str:
    """Say at which shapes a peer is faster, and by how much."""
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
    return report.table(header, cells, ("phase",)) + "\n\n" + losses(data["rows"])


def layer_kernels(data: Row) -> str:
    """Return the table of a decoder layer's kernels, those that take a hundredth of its time or more."""
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
    """What a result was to reach.

    Attributes
    ----------
    what : str
        In words.
    file : str
        The result, in benchmarks/results.
    concerns : callable
        Whether a row is meant.
    value, reached : callable
        What was measured, and whether that is enough.
    missed : str
        Why it is not reached, where that is so.
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
        "`rmsnorm_gemm`, N = 6144 and M ≥ 1024: the best peer takes 1.10 times as long",
        "rmsnorm_h100.json", lambda r: r["n"] == 6144 and r["m"] >= 1024, best, _at_least(1.10),
        "The column *were the norm free* says what there is to gain with our GEMM as it is: PyTorch's norm is one\n"
        "pass over x, a tenth of so narrow a GEMM's time at most, and the GEMMs themselves, ours and cuBLASLt's, run\n"
        "at the chip's power limit.",
    ),
    Target(
        "`rmsnorm_gemm`, N = 28672 and M ≥ 1024: 1.02 times",
        "rmsnorm_h100.json", lambda r: r["n"] == 28672 and r["m"] >= 1024, best, _at_least(1.02),
    ),
    Target(
        "`rmsnorm_gemm`, M < 1024: 1.05 times",
        "rmsnorm_h100.json", lambda r: r["m"] < 1024, best, _at_least(1.05),
        "Both read the weight once, in one kernel, and do nothing else that takes time: torch.compile's generated\n"
        "kernel does for one row what ours does, and little of the memory's bandwidth is left to gain.",
    ),
    Target(
        "`rmsnorm_gemm`, M ≥ 1024: at most 1.02 times the time of our GEMM without the norm",
        "rmsnorm_h100.json", lambda r: r["m"] >= 1024, own_gemm, lambda value: value <= 1.02,
        "Idle warps that take the means share issue slots and the L2 cache with the main loop, and the last epilogues\n"
        "wait; reading itself is a third of it, by kernels with constants for means. Besides, the two have tables of\n"
        "their own, and what the tuner found for one is not always what it found for the other. Races in which the\n"
        "chip rests in every second round found nothing faster (benchmarks/NOTES.md).",
    ),
    Target(
        "`gemm_swiglu`, M ≥ 1024: 1.10 times",
        "swiglu_h100.json", lambda r: r["m"] >= 1024, best, _at_least(1.10),
    ),
    Target("`gemm_swiglu`: no shape loses", "swiglu_h100.json", lambda _: True, best, _at_least(1.0)),
    Target("`rmsnorm_gemm`: no shape loses", "rmsnorm_h100.json", lambda _: True, best, _at_least(1.0)),
    Target(
        "The decoder layer: 1.10 times",
        "layer_h100.json", lambda _: True, best, _at_least(1.10),
        "Eight tenths of a long layer are GEMMs, in which cuBLASLt's kernels are as fast as ours, or faster where the\n"
        "chip has power to spare: see the kernels below. What fusion saves is the rest, torch.compile's kernels for\n"
        "norms, the rotation of Q and K, the residual and SwiGLU; attention is the same in both.",
    ),
)  # fmt: skip


def targets(results: Path) -> str:
    """Say which targets are reached, and at which shapes others are not, and why."""
    lines = []
    for target in TARGETS:
        path = results / target.file
        if not path.is_file():
            lines.append(f"- {target.what}: not measured yet.")
            continue
        rows = [row for row in json.loads(path.read_text())["rows"] if target.concerns(row)]
        missed = [row for row in rows if not target.reached(target.value(row))]
        if not missed:
            lines.append(f"- {target.what}: **reached** at all {len(rows)}.")
            continue
        each = ", ".join(f"{_case(row)} ({target.value(row):.4f})" for row in missed)
        why = target.missed.replace("\n", "\n  ") or "No cause is known."
        lines.append(f"- {target.what}: **missed** at {len(missed)} of {len(rows)}: {each}. {why}")
    return "\n".join(lines)


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
        "RMSNorm + GEMM on an H200",
        "rmsnorm_h200.json",
        "The same on a chip that has no table of norms: kernels are chosen by an H100's, and by what the H200 has of\n"
        "other epilogues.",
        rmsnorm,
    ),
    (
        "RMSNorm + GEMM at unseen shapes",
        "rmsnorm_unseen_h100.json",
        "Weights and numbers of rows that nobody tuned. What loses has one wave of tiles, whose epilogues wait until\n"
        "idle warps have read all rows: *over own GEMM* says how long.",
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
        "SwiGLU at unseen shapes",
        "swiglu_unseen_h100.json",
        "Weights and numbers of rows that nobody tuned.",
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
        "Llama-3.1-8B's, in BF16: [transformer_block.py](../examples/transformer_block.py), against transformers'.\n"
        "*Statistic passed on*: by `gemm_residual_rms`.",
        layer,
    ),
    (
        "Where the layer's time goes",
        "layer_kernels_h100.json",
        "By PyTorch's profiler, for one call. Ten calls do not bring the chip to its power limit, as the benchmark\n"
        "above does, so clocks are higher here. A kernel that starts while the one before it ends is counted from its\n"
        "start: what it waits is in its time.",
        layer_kernels,
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
    parts = [INTRODUCTION, "## Targets", targets(results)]
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
