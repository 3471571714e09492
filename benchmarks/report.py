"""Writes docs/performance.md, its data and picture, and README.md's table of speed, from the raw results.

    python benchmarks/report.py            # from all of benchmarks/results
    python benchmarks/report.py --check    # writes nothing, and fails if something is not up to date

Needs Python 3.11 or later (tomllib), matplotlib for the picture, and no GPU. PARTS says which results are told, causes
of losses are in causes.toml, aims in report_aims.py. stale.json says how many kernels no longer serve.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import report_aims
import report_host
import report_plots
from report_results import Case, Part, Row, cause, read_all, read_causes

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
CAUSES = ROOT / "benchmarks" / "causes.toml"
STALE = ROOT / "benchmarks" / "stale.json"
README = ROOT / "README.md"
OUT = ROOT / "docs" / "performance.md"
DATA = ROOT / "docs" / "performance" / "shapes.csv"
PICTURE = ROOT / "docs" / "performance" / "overview.svg"

# README.md has its table between these.
MARKS = "<!-- speed: written by benchmarks/report.py -->", "<!-- speed ends -->"
README_CASES = ("gemm_bf16_h100", "gemm_unseen_h100", "gemm_unseen_plain_h100")
PICTURED = (
    "gemm_bf16_h100", "gemm_f16_h100", "gemm_gelu_h100", "gemm_silu_h100", "gemm_plain_h100", "gemm_unseen_h100",
    "gemm_unseen_silu_h100", "gemm_unseen_plain_h100", "gemm_last_h100", "gemm_last_plain_h100",
)  # fmt: skip

_PEERS = ("eager", "eager_one_linear", "compile", "liger")
_GEMM = ("op", "dtype", "layout", "set")

PARTS = (
    Part("GEMMs", "gemm_*", fields=_GEMM),
    Part("Norms and gates", "rmsnorm_h?00", "RMSNorm + GEMM, grid", peers=_PEERS),
    Part("Norms and gates", "rmsnorm_unseen_*", "RMSNorm + GEMM, unseen", peers=_PEERS),
    Part("Norms and gates", "swiglu_h100", "SwiGLU, grid", peers=_PEERS),
    Part("Norms and gates", "swiglu_unseen_*", "SwiGLU, unseen", peers=_PEERS),
    Part("FP8", "fp8_fast_*", "fast sums", ("scales",)),
    Part("FP8", "fp8_promoted_*", "promoted sums", ("scales",)),
    Part("FP8", "fp8_blocks_*", "promoted sums", ("scales",)),
    Part("FP8", "gates_*", "quantised SwiGLU", ("math",), ("scaled_mm",)),
    Part("FP8", "gates_*", "quantised SwiGLU, over two kernels of ours", ("math",), ("separate",)),
    Part("FP8", "quantize_h200", "quantising a tensor", (), ("compile",), ("part", "tensor")),
    Part("FP8", "quantize_h200", "quantising a tensor, over a copy", (), ("copy",), ("part", "tensor")),
    Part("FP8", "fp8_layer_h?00", "decoder layer", (), ("rowwise",)),
    Part("FP8", "fp8_layer_h?00", "decoder layer, over ours in BF16", (), ("bf16",)),
    Part("Groups of rows", "grouped_h?00", "BF16", ("groups",)),
    Part("Groups of rows", "grouped_fp8_*", "FP8, fast sums", ("groups",)),
    Part("Groups of rows", "grouped_promoted_*", "FP8, promoted sums", ("groups",)),
    Part("Groups of rows", "wgrad_*", "gradient of the weights", ("groups",)),
    Part("Groups of rows", "moe_h?00", "mixture of experts", ("model",), ("compile", "batched")),
    Part("Groups of rows", "moe_64_*", "mixture of experts", ("model",), ("compile",)),
    Part("Other types and batches", "types_h200", fields=("case",)),
    Part("Other types and batches", "types_all_h200", fields=("case",)),
    Part("Other types and batches", "batched_*", "batches", ("epilogue",)),
    Part("Layers and programs", "layer_h100", "decoder layer, BF16", (), _PEERS),
    Part("Layers and programs", "training_h200", "training step", ("layer",), _PEERS),
    Part("Layers and programs", "language_h100", "epilogue program", ("program",), _PEERS),
)

INTRODUCTION = """\
# Performance

<!-- Written by benchmarks/report.py from benchmarks/results. Do not edit: change those, and run it again. -->

**A ratio is the time of the fastest other implementation over ours: above 1, ours is faster.** Its columns:

- *against*: what was measured beside ours ([below](#how-it-is-measured)).
- *mean*: the geometric mean over the shapes. *worst*: the lowest ratio, and its shape (M×N×K).
- *losses*: the shapes with a ratio below 1.

[shapes.csv](performance/shapes.csv) has every shape with kernel, times, range over the rounds, and the cause of a loss.
The link of a case leads to its raw results.

## Summary
"""

PICTURE_TEXT = "![Every ratio of GEMMs on an H100](performance/overview.svg)"

METHOD = """\
## How it is measured

- Each call is captured in a CUDA graph, so host time is not part of it. Training steps are launched one by one.
- Inputs rotate, so the L2 cache is not warm.
- Each round replays ours and all others, in random order. Ratios are formed within a round, and the median counts.
- Results are checked against float64 first.

| Against | What it runs |
| --- | --- |
| `eager` | one PyTorch operation after another; a plain GEMM is then one call of cuBLAS |
| `cublaslt` | `torch._addmm_activation`: cuBLASLt's epilogue of bias and activation |
| `compile` | `torch.compile` of the PyTorch operations, with max-autotune; of transformers' block for experts |
| `eager_one_linear` | both weights of SwiGLU multiplied at once, and then gated |
| `scaled_mm`, `scaled_mm_fast` | `torch._scaled_mm` without and with fast sums |
| `recipes` | `torch.nn.functional.scaled_mm` |
| `rowwise` | the layer with dynamic row scales, compiled |
| `grouped_mm` | `torch._grouped_mm`, `torch._scaled_grouped_mm` |
| `bmm`, `baddbmm`, `bmm_relu`, `batched` | `torch.bmm` and what follows it |
| `liger` | Liger-Kernel |

| Set | Shapes ([shapes.py](../benchmarks/shapes.py)) |
| --- | --- |
| grid | Four weights of an 8B model with 1 to 8192 rows, and squares. Tables are tuned on these and others. |
| grid, held out | The grid. Each half is served as if only the other half had been tuned. |
| unseen | Weights and numbers of rows that were not tuned. |
| last | Problems drawn at random after tables and model were finished. |
| decode | Weights of 200 MB and more, with up to 64 rows. |
| misaligned | N or K that is not a multiple of 16 bytes; also N = 1000 and K = 1000, which are multiples. |

`python benchmarks/report.py` writes this page without a GPU. [CONTRIBUTING.md](../CONTRIBUTING.md) lists the
benchmarks, and [NOTES.md](../benchmarks/NOTES.md) what they taught.
"""

WORST = """\
## Worst shapes

Every case with a ratio below {limit}, by its worst shape. *Below* counts such shapes.
"""

AIMS = """\
## Missed aims

*Reached* has how many shapes reach the aim, and the one that is furthest off. Times of tests and of CI, with
two missed limits, are in [CONTRIBUTING.md](../CONTRIBUTING.md).
"""

_LIMIT = 0.95


# ---- Markdown


def table(header: Sequence[object], rows: Iterable[Sequence[object]], text: Sequence[str]) -> str:
    """Return a Markdown table; the columns named in ``text`` are aligned to the left, numbers to the right."""
    rule = ["---" if name in text else "---:" for name in header]
    return "\n".join("| " + " | ".join(map(str, cells)) + " |" for cells in [header, rule, *rows])


def folded(summary: str, text: str) -> str:
    """Return text that a click unfolds."""
    return f"<details markdown><summary>{summary}</summary>\n\n{text}\n\n</details>"


def raw(result: str, text: str | None = None) -> str:
    """Return a link to a file of results."""
    return f"[{text or result}](../benchmarks/results/{result}.json)"


def short(chip: str) -> str:
    """Return a chip's name without its maker and memory."""
    return chip.removeprefix("NVIDIA ").split()[0]


def _speed(case: Case) -> tuple[object, ...]:
    worst = f"{case.worst.ratio:.4f} ({case.worst.shape})"
    return ", ".join(case.peers), len(case.shapes), f"{case.geomean:.4f}", worst, len(case.losses())


_SPEED = ("against", "shapes", "mean", "worst", "losses")


def group_tables(cases: Sequence[Case]) -> list[str]:
    """Return a section for each group, with a line for each case."""
    parts = []
    for group in dict.fromkeys(part.group for part in PARTS):
        members = [case for case in cases if case.part.group == group]
        lines = [(raw(c.result, c.name), short(c.chip), c.date, *_speed(c)) for c in members]
        header = ("case", "GPU", "date", *_SPEED)
        cells = table(header, lines, text=("case", "GPU", "date", "against", "worst"))
        parts += [f"## {group}", folded(f"{len(lines)} cases", cells)]
        if text := changed({case.result: None for case in members}):
            parts.append(text)
    return parts


def summary_table(cases: Sequence[Case]) -> str:
    """Return a line for each group: how many shapes, how many losses, and the worst."""
    lines = []
    for group in dict.fromkeys(part.group for part in PARTS):
        members = [case for case in cases if case.part.group == group]
        worst = min(members, key=lambda case: case.worst.ratio)
        means = [case.geomean for case in members]
        counts = (len(members), sum(len(c.shapes) for c in members), sum(len(c.losses()) for c in members))
        at = f"{worst.worst.ratio:.3f} ({worst.name}, {short(worst.chip)}: {worst.worst.shape})"
        lines.append((f"[{group}](#{anchor(group)})", *counts, f"{min(means):.2f} to {max(means):.2f}", at))
    header = ("group", "cases", "shapes", "losses", "means of cases", "worst")
    return table(header, lines, text=("group", "means of cases", "worst"))


def anchor(heading: str) -> str:
    """Return a heading's anchor, as GitHub makes it."""
    return heading.lower().replace(" ", "-")


def changed(results: Iterable[str]) -> str:
    """Return how many kernels of these results are no longer chosen, by stale.py."""
    counted = json.loads(STALE.read_text())
    found = [f"{counted[name]['others']} of {counted[name]['rows']} ({name})" for name in results if others(name)]
    return f"Dispatch now chooses another kernel at some of these shapes: {', '.join(found)}." if found else ""


def others(result: str) -> int:
    """Return at how many of a result's shapes dispatch chooses another kernel now."""
    return int(json.loads(STALE.read_text()).get(result, {"others": 0})["others"])


def worst_table(cases: Iterable[Case], causes: Sequence[Row], limit: float = _LIMIT) -> str:
    """Return the worst shape of every case that has one below the limit, with its cause."""
    lines = []
    for case in cases:
        if found := case.losses(limit):
            worst, count = found[0], f"{len(found)} of {len(case.shapes)}"
            name = f"{case.part.group}: {raw(case.result, case.name)}"
            ratio = f"{worst.ratio:.3f} ({worst.low:.3f} to {worst.high:.3f})"
            lines.append((name, short(case.chip), count, worst.shape, ratio, worst.peer, cause(causes, worst)))
    header = ("case", "GPU", "below", "worst shape", "ratio (range)", "against", "cause")
    return table(header, lines, text=header)


def aims_tables(results: Path) -> list[str]:
    """Return the missed aims, and those that are reached."""
    found = [report_aims.cells(aim, results) for aim in report_aims.AIMS]
    missed = [(what, value, why, raw(file)) for good, (what, value, why, file) in found if not good]
    reached = [(what, value, raw(file)) for good, (what, value, _, file) in found if good]
    headers = ("aim", "reached", "cause", "file"), ("aim", "reached", "file")
    return [
        table(headers[0], missed, text=headers[0]),
        folded(f"{len(reached)} aims that are reached", table(headers[1], reached, text=headers[1])),
    ]


def document(cases: Sequence[Case], causes: Sequence[Row]) -> str:
    """Return docs/performance.md."""
    parts = [
        INTRODUCTION.strip(), summary_table(cases), PICTURE_TEXT,
        AIMS.strip(), *aims_tables(RESULTS),
        WORST.format(limit=_LIMIT).strip(), worst_table(cases, causes), *group_tables(cases),
        *report_host.sections(RESULTS, table, raw), METHOD.strip(),
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def shapes_text(cases: Iterable[Case], causes: Sequence[Row]) -> str:
    """Return shapes.csv: a line for each shape."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    names = ("result", "gpu", "group", "case", "shape", "kernel")
    writer.writerow((*names, "ours_us", "against", "their_us", "ratio", "low", "high", "cause"))
    for case in cases:
        for s in case.shapes:
            numbers = (f"{s.ours:.2f}", s.peer, f"{s.theirs:.2f}", f"{s.ratio:.4f}", f"{s.low:.4f}", f"{s.high:.4f}")
            why = cause(causes, s) if s.ratio < 1 else ""
            writer.writerow((s.result, short(case.chip), case.part.group, s.case, s.shape, s.kernel, *numbers, why))
    return file.getvalue()


def readme_text(cases: Iterable[Case]) -> str:
    """Return what README.md has between its marks: where and when it was measured, and the table."""
    found = [case for case in cases if case.result in README_CASES]
    chips = " and ".join(sorted({f"{case.chip}, {case.date}" for case in found}))
    rows = [(case.name, *_speed(case)) for case in found]
    return "\n\n".join(
        [
            f"{chips}. A ratio is the fastest other implementation's time over ours: above 1, ours is faster.",
            table(("case", *_SPEED), rows, text=("case", "against", "worst")),
        ]
    )


def with_speed(readme: str, text: str) -> str:
    """Return README.md with this text between its marks."""
    before, _, rest = readme.partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    return f"{before}{MARKS[0]}\n{text}\n{MARKS[1]}{after}"


def files() -> dict[Path, str]:
    """Return every file but the picture, as it should be."""
    cases, causes = read_all(RESULTS, PARTS), read_causes(CAUSES)
    return {
        OUT: document(cases, causes),
        DATA: shapes_text(cases, causes),
        README: with_speed(README.read_text(), readme_text(cases)),
    }


def picture() -> report_plots.Figure:
    """Return the picture's data."""
    found = {case.result: case for case in read_all(RESULTS, PARTS)}
    return report_plots.overview(found[name] for name in PICTURED)


def stale() -> list[Path]:
    """Return the files that are not as they should be."""
    wrong = [path for path, text in files().items() if not path.is_file() or path.read_text() != text]
    fresh = PICTURE.is_file() and picture().digest() in PICTURE.read_text()
    return wrong if fresh else [*wrong, PICTURE]


def main() -> None:
    """Write everything, or check it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    if parser.parse_args().check:
        wrong = [str(path.relative_to(ROOT)) for path in stale()]
        sys.exit(f"not up to date: {', '.join(wrong)}" if wrong else 0)
    for path, text in files().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    report_plots.draw(picture(), PICTURE)


if __name__ == "__main__":
    main()
