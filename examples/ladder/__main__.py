"""Build every rung, prove it by its machine code, check it against float64, time it, and print the table.

Without a GPU, rungs are built and proven. The rest says what it lacks.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from . import report
from .problem import EDGES, SHAPES, Shape, parse_shape
from .proof import class_of
from .rungs import REFUSED, Built, Missing, Rung, build, select


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.ladder", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rungs", nargs="+", help="such as 5 8 9a; 9 means 9a, 9b and 9c")
    parser.add_argument("--shapes", nargs="+", type=_shape, default=SHAPES, help="M, N and K, such as 4096x4096x1024")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    parser.add_argument("--plot", type=Path, help="draw the result, as SVG or PNG; needs matplotlib")
    parser.add_argument("--counters", action="store_true", help="count what each rung does at the first shape, by ncu")
    parser.add_argument("--folder", type=Path, help="keep compiled rungs here, and compile only what has changed")
    parser.add_argument("--once", action="store_true", help="run each rung once and time nothing, for a profiler")
    return parser.parse_args()


def _shape(text: str) -> Shape:
    try:
        return parse_shape(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from None


def build_all(
    rungs: tuple[Rung, ...], shapes: tuple[Shape, ...], folder: Path | None = None
) -> tuple[dict[Rung, Built], list[str]]:
    """Build rungs, say what each was proven to be, and return those that there are, and what failed."""
    found: dict[Rung, Built] = {}
    failed = []
    for rung in rungs:
        try:
            found[rung] = build(rung, folder, shapes)
        except Missing as exc:
            print(f"rung {rung.name:4} not built: it needs {exc}")
            continue
        except Exception as exc:  # whatever a compiler raises: the other rungs are built
            print(f"rung {rung.name:4} FAILED: {exc}")
            failed.append(rung.name)
            continue
        counts = ", ".join(f"{number} {name}" for name, number in found[rung].counts.items())
        print(f"rung {rung.name:4} {rung.title}: {counts or found[rung].says}", flush=True)
    return found, failed


def check_and_time(found: dict[Rung, Built], shapes: tuple[Shape, ...]) -> tuple[list[dict[str, Any]], list[str]]:
    """Check every rung, then time those that are right; return the rows, and what failed."""
    from . import measuring

    products, errors, failed = {}, {}, []
    for rung, built in found.items():
        if built.product is None:
            continue
        try:
            errors[rung.name] = measuring.check_all(built.product, shapes + (EDGES if rung.edges else ()))
            products[rung.name] = built.product
            print(f"rung {rung.name:4} right at every shape; error {errors[rung.name]:.2f} times PyTorch's", flush=True)
        except measuring.WrongResult as exc:
            print(f"rung {rung.name:4} WRONG: {exc}", flush=True)
            failed.append(rung.name)
        except RuntimeError as exc:  # a fault leaves nothing to go on with
            sys.exit(f"rung {rung.name:4} stopped: {exc}\nClimb the others with --rungs.")
    rows = []
    for shape in shapes:
        times = measuring.time_all(products, shape)
        rows += [measuring.row(name, shape, times, errors[name]) for name in products]
    return rows, failed


def run_once(found: dict[Rung, Built], shapes: tuple[Shape, ...]) -> None:
    """Run each rung once at each shape, between marks for a profiler, after a run without."""
    from . import measuring

    for shape in shapes:
        a, b = measuring.operands(shape, "normal", 0)
        for rung, built in found.items():
            if built.product is not None:
                print(f"{shape}, rung {rung.name}", flush=True)
                d = a.new_empty(shape.m, shape.n)
                built.product(a, b, d)
                torch.cuda.synchronize()
                torch.cuda.profiler.start()
                built.product(a, b, d)
                torch.cuda.synchronize()
                torch.cuda.profiler.stop()


def main() -> None:
    """Climb the ladder."""
    options = _options()
    shapes = tuple(options.shapes)
    try:
        rungs = select(options.rungs)
    except ValueError as exc:
        sys.exit(str(exc))
    os.environ["CUTLASS_OPS_STAND_IN"] = "0"  # calls wait for the kernels that they choose, which are timed
    # Parts of K are added up in FP32 by cuBLAS as well.
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    with tempfile.TemporaryDirectory(prefix="ladder.") as temporary:
        _climb(options, rungs, shapes, options.folder or Path(temporary))


def _climb(options: argparse.Namespace, rungs: tuple[Rung, ...], shapes: tuple[Shape, ...], folder: Path) -> None:
    found, failed = build_all(rungs, shapes, folder)
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        has = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
        print(f"Nothing was checked or timed: that needs a Hopper GPU with PyTorch for CUDA, and there is {has}.")
        sys.exit(f"failed: rungs {', '.join(failed)}" if failed else 0)
    if options.once:
        run_once(found, shapes)
        sys.exit(f"failed: rungs {', '.join(failed)}" if failed else 0)
    rows, wrong = check_and_time(found, shapes)
    result = {**_environment(), "built": {r.name: _described(r, b) for r, b in found.items()}, "rows": rows}
    if options.counters:
        result |= _counted([row["rung"] for row in rows if row["shape"] == list(shapes[0])], shapes[0], folder)
    for shape in shapes:
        print(f"\nM x N x K = {shape}", *report.table(result, shape), sep="\n")
    if options.out is not None:
        _save(options.out, result)
    if options.plot is not None:
        _draw(result, options.plot)
    if failed or wrong:
        sys.exit(f"failed: rungs {', '.join(failed + wrong)}")


def _counted(names: list[str], shape: Shape, folder: Path) -> dict[str, Any]:
    from . import counting

    try:
        return {"counters": counting.count(names, shape, folder), "counted_at": list(shape)}
    except (counting.NotCounted, TimeoutError) as exc:
        print(f"no counters: {exc}")
        return {}


def _environment() -> dict[str, Any]:
    from benchmarks.harness import environment

    return environment()


def _save(path: Path, result: dict[str, Any]) -> None:
    from benchmarks.harness import save

    save(path, result)


def _described(rung: Rung, built: Built) -> dict[str, Any]:
    kind = REFUSED if built.product is None else class_of(built.counts) if built.counts else ""
    return {"title": rung.title, "class": kind, "instructions": built.counts, "says": built.says}


def _draw(result: dict[str, Any], path: Path) -> None:
    try:
        report.draw(result, path)
    except ImportError:
        print("there is no plot without matplotlib: pip install matplotlib")


if __name__ == "__main__":
    main()
