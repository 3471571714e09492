"""Writes docs/performance.md, its plots and README.md's table of speed from the raw results.

    python benchmarks/report.py                                        # all of benchmarks/results
    python benchmarks/report.py /tmp/gemm_a.json --host --compile --out /tmp/report.md    # one file and nothing else

Needs Python 3.11 or later (tomllib), matplotlib for the plots, and no GPU. Causes of losses come from causes.toml.
stale.json says how many kernels no longer serve. README.md is written only together with docs/performance.md.
A row's ratio is the peer's time over ours: above 1, ours is faster. Rows of bench_gemm.py may lack "layout" and "set".
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from report_plots import (
    Figure,
    draw,
    figures,
    overview_figure,
    plot_path,
    ratio_figure,
    roofline_figure,
    roofline_text,
)
from report_results import (
    Case,
    Extents,
    Line,
    Result,
    Row,
    about,
    case,
    cause,
    free,
    losses,
    problem,
    read,
    read_causes,
    shape,
    summary,
    weights,
)

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
CAUSES = ROOT / "benchmarks" / "causes.toml"
STALE = ROOT / "benchmarks" / "stale.json"
OUT = ROOT / "docs" / "performance.md"
README = ROOT / "README.md"


INTRODUCTION = """\
# Performance

<!-- Written by benchmarks/report.py from benchmarks/results. Do not edit: change those, and run it again. -->

This page compares our GEMMs with fused epilogues with other implementations of the same computation, the *peers*.

**A ratio is the peer's time over ours: above 1, ours is faster.**

How a ratio is measured:

- Each call is captured in a CUDA graph, so host time is not part of it.
- Inputs rotate, so the L2 cache is not warm.
- Each round replays ours and all peers, in random order.
- The ratio of a shape is the one to the peer with the lowest median time there.
- A ratio is formed within a round. Tables give the median over the rounds, and the range.
- So a ratio is not exactly the quotient of the two median times.

| Peer | What it runs |
| --- | --- |
| `cublaslt` | `torch._addmm_activation`: cuBLASLt's epilogue of bias and activation. A second kernel adds a residual. |
| `eager` | One PyTorch operation after another. A plain GEMM is then one call of cuBLAS. |
| `compile` | `torch.compile` of these operations, with max-autotune. |

| Set | Shapes ([shapes.py](../benchmarks/shapes.py)) |
| --- | --- |
| grid | Four weights of an 8B model with 1 to 8192 rows, and squares. Tables are tuned on these and others. |
| grid, held out | The grid. Each half is served as if only the other half had been tuned. |
| unseen | Weights and numbers of rows that were not tuned. |
| last | Problems drawn at random after tables and model were finished. |
| decode | Weights of 200 MB and more, with up to 64 rows. |
| misaligned | N or K that is not a multiple of 16 bytes; also N = 1000 and K = 1000, which are multiples. |

*With a free epilogue* is the geometric mean that we would reach if the epilogue took no time. It uses the time of our
GEMM without an epilogue, from the same rounds. If this is a loss too, the GEMM is its cause, not the epilogue.

– means: not measured.

```bash
python benchmarks/bench_gemm.py --out benchmarks/results/gemm_h100.json  # on a GPU; see --help
python benchmarks/bench_host.py --out benchmarks/results/host_h100.json  # on a GPU
python benchmarks/bench_compile.py --out benchmarks/results/compile_2_processors.json  # without a GPU
python benchmarks/stale.py  # rows to measure again, since dispatch chooses another kernel; without a GPU
python benchmarks/report.py  # this document, without a GPU
```

[NOTES.md](../benchmarks/NOTES.md) records experiments and their results.
"""

SUMMARY = """\
*Kernels changed since* counts the shapes of a result at which dispatch no longer chooses the measured kernel.
"""

# README.md has this between its two marks.
MARKS = "<!-- speed: written by benchmarks/report.py -->", "<!-- speed ends -->"


LINES = (
    Line("bias + ReLU, BF16", "gemm_bf16_h100"),
    Line("bias + ReLU, FP16", "gemm_f16_h100"),
    Line("bias + GELU + residual, BF16", "gemm_gelu_h100"),
    Line("bias + SiLU, BF16", "gemm_silu_h100"),
    Line("plain GEMM, BF16", "gemm_plain_h100"),
    Line("plain GEMM, BF16, row-major weight", "gemm_majors_h100", "row-row"),
    Line("bias + ReLU, BF16", "gemm_unseen_h100"),
    Line("bias + SiLU, BF16", "gemm_unseen_silu_h100"),
    Line("plain GEMM, BF16", "gemm_unseen_plain_h100"),
    Line("bias + ReLU, BF16", "gemm_last_h100"),
    Line("plain GEMM, BF16", "gemm_last_plain_h100"),
)


def others(name: str) -> str | None:
    """Return a sentence on how many of a result's kernels are no longer chosen, by stale.py; empty if none."""
    counted = _counted(name)
    if not counted["others"]:
        return None
    return f"Dispatch now chooses another kernel at {share(counted['others'], counted['rows'])} of these shapes."


def changed(name: str) -> str:
    """Return the same number as a table's cell."""
    counted = _counted(name)
    return f"{counted['others']} of {counted['rows']}" if counted["others"] else "–"


def _counted(name: str) -> dict[str, int]:
    return json.loads(STALE.read_text()).get(name, {"others": 0})


# ---- Markdown


def table(header: Sequence[object], rows: Iterable[Sequence[object]], text: Sequence[str]) -> str:
    """Return a Markdown table; the columns named in ``text`` are aligned to the left, numbers to the right."""
    rule = ["---" if name in text else "---:" for name in header]
    return "\n".join("| " + " | ".join(map(str, cells)) + " |" for cells in [header, rule, *rows])


def share(part: int, whole: int) -> str:
    """Return a part as numbers and per cent."""
    return f"{part} of {whole} ({100 * part / whole:.0f}%)"


def microseconds(ms: float | None) -> str:
    """Return a time as text; a peer that was not measured has none."""
    return "–" if ms is None else f"{ms * 1e3:.2f}"


def environment(head: dict[str, Any]) -> str:
    """Return chip, date and versions of a result, as far as the file has them."""
    keys = ("driver", "power_limit", "python", "torch", "cuda", "cutlass_ops")
    parts = [f"`{key}` {head[key]}" for key in keys if key in head]
    return ", ".join([head["chip"], f"measured on {head['date']}", *parts])


def summary_table(cases: dict[Case, list[Row]]) -> str:
    """Return one line for each case."""
    lines = []
    for of, rows in cases.items():
        found = summary(rows)
        count, worst = found["shapes"], found["worst"]
        ones = (share(found[key], count) for key in ("from_1", "from_0.99"))
        worst_text = f"{worst['ratio_to_best_peer']:.4f} at {shape(worst)}"
        most = free(rows)
        means = (f"{found['geomean']:.4f}", "–" if most is None else f"{most:.4f}")
        lines.append((of.set, of.op, of.dtype, of.layout, count, *means, worst_text, *ones))
    header = (
        "set", "op", "dtype", "layout", "shapes", "geometric mean", "with a free epilogue", "worst ratio", "≥ 1.0",
        "≥ 0.99",
    )  # fmt: skip
    return table(header, lines, text=header[:4])


def overview_table(results: Iterable[Result]) -> str:
    """Return one line for each case of all results, with its losses."""
    lines = []
    for result in results:
        name = f"[{result.name}](#{anchor(title(result))})"
        for of, rows in result.cases().items():
            lines.append((name, of.set, of.op, of.dtype, of.layout, *_speed(rows), changed(result.name)))
    header = ("result", "set", "op", "dtype", "layout", *_SPEED, "kernels changed since")
    return table(header, lines, text=(*header[:5], "against", "worst"))


_SPEED = ("against", "shapes", "geometric mean", "worst", "losses")


def _speed(rows: Sequence[Row]) -> tuple[object, ...]:
    found = summary(rows)
    worst = f"{found['worst']['ratio_to_best_peer']:.4f} ({shape(found['worst'])})"
    return ", ".join(peers(rows)), len(rows), f"{found['geomean']:.4f}", worst, len(losses(rows))


def readme_lines(results: Iterable[Result]) -> list[tuple[Line, Result, list[Row]]]:
    """Return the lines of README.md's table whose results are among these, with their rows."""
    by_name = {result.name: result for result in results}
    return [
        (line, by_name[line.result], [row for row in by_name[line.result].rows if row["layout"] == line.layout])
        for line in LINES
        if line.result in by_name
    ]


def readme_text(results: Iterable[Result]) -> str:
    """Return what README.md has between its marks: where and when it was measured, the table, and the picture."""
    found = readme_lines(results)
    where = {(result.head["chip"], result.head["date"]) for _, result, _ in found}
    chips = " and ".join(f"{chip}, {date}" for chip, date in sorted(where))
    cells = [(line.title, rows[0]["set"], *_speed(rows)) for line, _, rows in found]
    header = ("op", "set", *_SPEED)
    plot = link(plot_path(overview_figure(found), OUT), README)
    return "\n\n".join(
        [
            f"{chips}. A ratio is the fastest peer's time over ours: above 1, ours is faster.",
            table(header, cells, text=("op", "set", "against", "worst")),
            f"![Every ratio of these cases]({plot})",
        ]
    )


def with_speed(readme: str, text: str) -> str:
    """Return README.md with this text between its marks."""
    before, _, rest = readme.partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    return f"{before}{MARKS[0]}\n{text}\n{MARKS[1]}{after}"


def matrix(rows: Sequence[Row]) -> str:
    """Return the ratios of each weight over M, losses in bold."""
    found = {problem(row): row["ratio_to_best_peer"] for row in rows}
    columns = sorted({row["m"] for row in rows})

    def cell(key: Extents) -> str:
        if key not in found:
            return ""
        # All digits of the file: 0.9999 is a loss, and must not read 1.000.
        return f"**{found[key]:.4f}**" if found[key] < 1 else f"{found[key]:.4f}"

    lines = [(f"{n}×{k}", *(cell((m, n, k)) for m in columns)) for n, k in weights(rows)]
    corner = "N×K \\ M"
    return table((corner, *columns), lines, text=[corner])


def peers(rows: Iterable[Row]) -> list[str]:
    """Return each peer's name once, in order."""
    return list(dict.fromkeys(name for row in rows for name in row["peers"]))


def times_table(rows: Sequence[Row]) -> str:
    """Return kernels and times of all shapes, folded away."""
    names = peers(rows)
    lines = [
        (f"`{row['kernel']}`", *problem(row), *map(microseconds, (row["ours_ms"], *map(row["peers"].get, names))))
        for row in rows
    ]
    header = ("kernel", "M", "N", "K", "ours, µs", *(f"{name}, µs" for name in names))
    folded = table(header, lines, text=["kernel"])
    return f"<details><summary>Kernels and times</summary>\n\n{folded}\n\n</details>"


def loss_table(result: Result, entries: Sequence[dict[str, Any]]) -> str:
    """Return every loss with its cause."""
    lines = []
    for row in losses(result.rows):
        low, high = row["ratio_range"]
        times = microseconds(row["ours_ms"]), microseconds(row["peers"][row["best_peer"]])
        ratio = f"{row['ratio_to_best_peer']:.4f}", f"{low:.4f} to {high:.4f}"
        why = cause(entries, result.name, row)
        lines.append((case(row), shape(row), row["best_peer"], *times, *ratio, why))
    header = ("case", "M×N×K", "peer", "ours, µs", "peer's, µs", "ratio", "range over the rounds", "cause")
    return table(header, lines, text=["case", "M×N×K", "peer", "cause"])


def title(result: Result) -> str:
    """Return the title of a result's section."""
    return f"{result.name}: {result.head['chip']}, {result.head['date']}"


def anchor(heading: str) -> str:
    """Return a title's anchor, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def link(target: Path, out: Path) -> str:
    """Return a file's address in a document."""
    return Path(os.path.relpath(target, out.parent)).as_posix()


def image(figure: Figure, out: Path) -> str:
    """Return the Markdown that shows a figure."""
    return f"![{figure.title}]({link(plot_path(figure, out), out)})"


def section(result: Result, causes: dict[str, list[dict[str, Any]]], out: Path) -> list[str]:
    """Return the paragraphs of one file of results."""
    count = len(losses(result.rows))
    text = about(causes["about"], result)
    parts = [
        f"## {title(result)}",
        f"{environment(result.head)}. Raw results: [{result.path.name}]({link(result.path, out)}).",
        *(said for said in (text, others(result.name)) if said),
        summary_table(result.cases()),
        f"### Losses of {result.name}",
        f"Ratio below 1, worst first: {share(count, len(result.rows))}.",
        *([loss_table(result, causes["cause"])] if count else []),
        f"### Roofline of {result.name}",
        roofline_text(result),
        image(roofline_figure(result), out),
    ]
    for of, rows in result.cases().items():
        parts += [f"### {result.name}: {of}", "Ratio of each weight over M; losses are bold.", matrix(rows)]
        parts += [image(ratio_figure(result, of, rows), out), times_table(rows)]
    return parts


def host_section(path: Path, out: Path) -> list[str]:
    """Return the paragraphs of one file of bench_host.py."""
    data = json.loads(path.read_text())
    rows = data["rows"]
    problems = [row["problem"] for row in rows]
    ratios = {
        "gemm_bias_relu(out=) over F.linear": "out_over_linear",
        "gemm_bias_relu over F.relu(F.linear)": "no_out_over_linear_relu",
        "gemm_bias_relu over F.linear": "no_out_over_linear",
    }

    def times(call: str) -> list[str]:
        return ["{:.2f} ({:.2f} to {:.2f})".format(*row["us"][call]) for row in rows]

    kernels = [(row["problem"], f"`{row['kernel']}`") for row in rows]
    lines = [(call, *times(call)) for call in rows[0]["us"]]
    quotients = [(name, *(_quotient(row[key]) for row in rows)) for name, key in ratios.items()]
    return [
        f"## Host time: {data['chip']}, {data['date']}",
        f"{environment(data)}. Raw results: [{path.name}]({link(path, out)}).",
        "The time to enqueue one warm call, in µs: the median over the rounds, and the range. The problems are too "
        "small to fill the queue. Here a ratio is our time over the other's, formed within a round: below 1, our call "
        "costs less. Losses are bold.",
        table(("problem", "our kernel"), kernels, text=["problem", "our kernel"]),
        table(("call", *problems), lines, text=["call"]),
        table(("ratio", *problems), quotients, text=["ratio"]),
        *forms_tables(data),
        f"Importing the library and calling one op raises the peak of the process's host memory by "
        f"{data['host_memory_mib']} MiB. PyTorch and CUDA already run, and the kernel is in the store.",
    ]


def _quotient(ratio: float) -> str:
    """Return our host time over another's, in bold if ours is the longer."""
    return f"**{ratio:.3f}**" if ratio > 1 else f"{ratio:.3f}"


def forms_tables(data: dict[str, Any]) -> list[str]:
    """Return what a file of bench_host.py says about each form of call, if it does."""
    forms = data.get("forms", [])
    if not forms:
        return []
    calls = {"ours": "ours", "PyTorch": "PyTorch", "with `out`": "ours(out=)", "prepared": "launch()"}
    calls |= {"prepared, other tensors": "launch(a=, out=)"}
    ratios = {"ours / PyTorch": "over_pytorch", "prepared / with `out`": "launch_over_out"}

    def cells(form: dict[str, Any]) -> list[str]:
        times = [form["us"].get(call) for call in calls.values()]
        found = ["–" if x is None else "{:.2f} ({:.2f} to {:.2f})".format(*x) for x in times]
        return [*found, *("–" if form.get(key) is None else _quotient(form[key]) for key in ratios.values())]

    return [
        f"Every form of call, on {data['processors']} cores of {data['processor']}, against PyTorch for the same "
        "result. *Prepared* is a launch of `co.prepare_launch`, which has its own `out`.",
        table(("form", *calls, *ratios), [(form["form"], *cells(form)) for form in forms], text=["form"]),
    ]


def compile_section(path: Path, out: Path) -> list[str]:
    """Return the paragraphs of one file of bench_compile.py."""
    data = json.loads(path.read_text())
    lines = [
        (f"`{r['kernel']}`", f"{r['ours_s']:.1f}", f"{r['nvcc_s']:.1f}", f"{r['ratio']:.2f}") for r in data["rows"]
    ]
    return [
        f"## Compile time: {data['processors']} processors, {data['date']}",
        f"nvcc {data['nvcc']}, {data['host_compiler']}, CUTLASS {data['cutlass']}, "
        f"`cutlass_ops` {data['cutlass_ops']}. Raw results: [{path.name}]({link(path, out)}).",
        "One kernel on an idle machine, in seconds. *Ours* is all that a first call waits for, into an empty store. "
        "*nvcc* is one nvcc that makes a shared library of the same source. The ratio is ours over nvcc's.",
        table(("kernel", "ours, s", "nvcc, s", "ratio"), lines, text=["kernel"]),
    ]


def document(
    results: Sequence[Result],
    hosts: Sequence[Path],
    compiles: Sequence[Path],
    causes: dict[str, list[dict[str, Any]]],
    out: Path,
) -> str:
    """Return the whole document, as it stands at ``out``."""
    parts = [INTRODUCTION.strip(), "## Summary", SUMMARY.strip(), overview_table(results)]
    for result in results:
        parts += section(result, causes, out)
    for path in hosts:
        parts += host_section(path, out)
    for path in compiles:
        parts += compile_section(path, out)
    return "\n\n".join(parts) + "\n"


# ---- the command


def main() -> None:
    """Write the document and its plots, and with docs/performance.md also README.md's table of speed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="*", type=Path, default=sorted(RESULTS.glob("gemm*.json")))
    parser.add_argument("--host", nargs="*", type=Path, default=sorted(RESULTS.glob("host*.json")))
    parser.add_argument("--compile", nargs="*", type=Path, default=sorted(RESULTS.glob("compile*.json")))
    parser.add_argument("--causes", type=Path, default=CAUSES)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    results = [read(path) for path in args.results]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(document(results, args.host, args.compile, read_causes(args.causes), args.out))
    drawn = figures(results)
    if args.out == OUT:
        README.write_text(with_speed(README.read_text(), readme_text(results)))
        drawn.append(overview_figure(readme_lines(results)))
    for figure in drawn:
        draw(figure, plot_path(figure, args.out))


if __name__ == "__main__":
    main()
