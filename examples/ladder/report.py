"""The ladder's results as a table, as a plot, and in docs/ladder.md.

    python -m examples.ladder.report    # writes docs/ladder.md and its plot from the committed result

The table comes from benchmarks/results/ladder_h200.json, which `python -m examples.ladder --out` writes. The inner
loops are read from rungs that are compiled for it: they need the toolkit with cuobjdump, and no GPU.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from examples.documents import insert

from .problem import Shape

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "benchmarks" / "results" / "ladder_h200.json"
DOCUMENT = ROOT / "docs" / "ladder.md"
BY = "examples/ladder/report.py"
PLOT = ROOT / "docs" / "ladder" / "rungs.svg"

_WIDTH = 46  # of a title in the printed table
# A loop of thousands of FFMA says nothing that its beginning does not.
_LINES = 40


def table(result: Mapping[str, Any], shape: Shape) -> list[str]:
    """Return a shape's rows of a Markdown table: a line for each rung."""
    from .rungs import RUNGS

    rows = {row["rung"]: row for row in result["rows"] if tuple(row["shape"]) == shape}
    lines = [
        "| Rung | What | Instruction | µs | TFLOP/s | of cuBLAS | Literature |",
        "| --- | --- | --- | ---: | ---: | ---: | --- |",
    ]
    for rung in RUNGS:
        built = result["built"].get(rung.name)
        if built is None:
            continue
        about = f"| {rung.name} | {rung.title} | {built['class']} "
        reported = rung.literature if shape == (4096, 4096, 4096) else None
        literature = ", ".join(map(str, reported.tflops)) if reported else ""
        if rung.name in rows:
            row = rows[rung.name]
            share = "" if row["cublas_over_it"] is None else f"{row['cublas_over_it']:.1%}"
            lines.append(f"{about}| {row['us']:.1f} | {row['tflops']:.1f} | {share} | {literature} |")
        else:
            lines.append(f"{about}| | | | {built['says'] or 'not timed'} |")
    return lines


def compared(result: Mapping[str, Any]) -> list[tuple[str, str, float, int]]:
    """Return each rung with a literature value at 4096 x 4096 x 4096: name, what, TFLOP/s here, and there."""
    from .rungs import RUNGS

    here = {row["rung"]: row["tflops"] for row in result["rows"] if row["shape"] == [4096, 4096, 4096]}
    return [
        (rung.name, rung.literature.what, here[rung.name], reported)
        for rung in RUNGS
        if rung.literature is not None and rung.name in here
        for reported in rung.literature.tflops
    ]


def counted(result: Mapping[str, Any]) -> list[str]:
    """Return a Markdown table of what ncu counted of each rung, if it did."""
    from .rungs import RUNGS

    found = result.get("counters", {})
    if not found:
        return []
    lines = [
        f"What Nsight Compute counts at {'×'.join(map(str, result['counted_at']))}, in percent of the peaks. The last "
        "column has how many cycles a warp waits between two instructions, and for what:",
        "",
        "| Rung | What | Tensor Cores | FP32 pipe | DRAM | L2 | L2 hits | warps | registers | warps wait for |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    columns = ("tensor", "fma", "dram", "l2", "l2_hits", "occupancy")
    for rung in RUNGS:
        if rung.name in found:
            kernel = found[rung.name]
            cells = ["" if kernel[name] is None else f"{kernel[name]:.0f}%" for name in columns]
            waits = sorted(kernel["stalls"], key=lambda name: -kernel["stalls"][name])[:2]
            named = ", ".join(f"{name.replace('_', ' ')} {kernel['stalls'][name]:.1f}" for name in waits)
            lines.append(f"| {rung.name} | {rung.title} | {' | '.join(cells)} | {kernel['registers']} | {named} |")
    return [*lines, ""]


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Draw every shape's TFLOP/s, with the literature's at 4096 x 4096 x 4096.

    Raises
    ------
    ImportError
        If matplotlib is not installed.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    from .rungs import BY_NAME

    mpl.rcParams["svg.hashsalt"] = "ladder"
    shapes = list(dict.fromkeys(tuple(row["shape"]) for row in result["rows"]))
    figure, axes = plt.subplots(1, len(shapes), figsize=(3.6 * len(shapes) + 2.2, 4.6), sharey=True, squeeze=False)
    names = [name for name in BY_NAME if any(row["rung"] == name for row in result["rows"])]
    for axis, shape in zip(axes[0], shapes, strict=True):
        found = {row["rung"]: row["tflops"] for row in result["rows"] if tuple(row["shape"]) == shape}
        values = [found.get(name, 0.0) for name in names]
        axis.barh(range(len(names)), values, color="#4477aa")
        for place, value in enumerate(values):
            axis.annotate(f" {value:.0f}", (value, place), va="center", fontsize=8)
        if shape == (4096, 4096, 4096):
            marks = [
                (tflops, names.index(name))
                for name in names
                if BY_NAME[name].literature is not None
                for tflops in BY_NAME[name].literature.tflops
            ]
            axis.scatter(*zip(*marks, strict=True), marker="|", s=160, color="#cc3311", label="literature")
            axis.legend(fontsize=8, loc="upper right")
        axis.set_title("×".join(map(str, shape)), fontsize=10)
        axis.set_xlabel("TFLOP/s")
        axis.set_xlim(0, 1.18 * max([*values, 1.0]))
    axes[0][0].set_yticks(range(len(names)), [f"{name}  {BY_NAME[name].title}" for name in names], fontsize=8)
    axes[0][0].invert_yaxis()
    figure.suptitle(f"FP16 with FP32 sums on one {result.get('chip', 'GPU')}", fontsize=11)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def numbers(result: Mapping[str, Any]) -> str:
    """Return the part of docs/ladder.md with the measured numbers."""
    versions = ", ".join(f"{name} {result[name]}" for name in ("driver", "torch", "cuda") if result.get(name))
    lines = [f"{result['chip']}, {result['date']}; {versions}.", ""]
    for shape in dict.fromkeys(Shape(*row["shape"]) for row in result["rows"]):
        lines += [f"M×N×K = {'×'.join(map(str, shape))}:", "", *table(result, shape), ""]
    lines += ["![Every rung at every shape](ladder/rungs.svg)", "", *counted(result)]
    lines += ["| Rung | Literature | reported | here | |", "| --- | --- | ---: | ---: | --- |"]
    for name, what, here, reported in compared(result):
        lines.append(f"| {name} | {what} | {reported} | {here:.0f} | {'beaten' if here > reported else 'not beaten'} |")
    return "\n".join(lines)


def loops(libraries: Mapping[str, Path], cuobjdump: Path) -> str:
    """Return the part of docs/ladder.md with the inner loops."""
    from . import proof
    from .rungs import BY_NAME

    lines = []
    for name, library in libraries.items():
        outline = proof.outline(proof.inner_loop(proof.disassemble(library, cuobjdump)))
        more = [f"    … and {len(outline) - _LINES} more lines"] if len(outline) > _LINES else []
        lines += [f"Rung {name}, {BY_NAME[name].title}:", "", "```text", *outline[:_LINES], *more, "```", ""]
    return "\n".join(lines).rstrip()


def main() -> None:
    """Write docs/ladder.md's numbers and loops."""
    from cutlass_ops.compilation.toolchain import find_toolchain

    from . import rungs

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--result", type=Path, default=RESULT)
    args = parser.parse_args()
    text = DOCUMENT.read_text()
    if args.result.exists():
        result = json.loads(args.result.read_text())
        draw(result, PLOT)
        text = insert(text, "numbers", numbers(result), BY)
    else:
        print(f"{args.result} does not exist: the numbers stay as they are")
    cuobjdump = find_toolchain().cuobjdump
    if cuobjdump is None:
        print("cuobjdump is not installed: the inner loops stay as they are. pip install nvidia-cuda-cuobjdump")
    else:
        by_hand = [rung for rung in rungs.RUNGS if rung.source.endswith(".cu")]
        libraries = {rung.name: rungs.build(rung).library for rung in by_hand}
        text = insert(text, "loops", loops(libraries, cuobjdump), BY)
    DOCUMENT.write_text(text)


if __name__ == "__main__":
    main()
