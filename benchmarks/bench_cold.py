"""Measures what a user meets before everything is compiled: calls, graphs, torch.compile and training from nothing.

    python benchmarks/bench_cold.py --out benchmarks/results/cold_h200.json
    python benchmarks/bench_cold.py --cpus 4 --seconds 150 --only serve-gemm --out /tmp/four.json
    python benchmarks/bench_cold.py --only serve-gemm serve-bias_relu --budget 500 --out /tmp/a.json
    python benchmarks/bench_cold.py --merge /tmp/a.json /tmp/b.json --out benchmarks/results/cold_h200.json

Nothing is switched off, and no kernel is there. Each scenario, or each part of it, is a process with an empty kernel
store and an empty cache of torch.compile. It sees as many processors as `--cpus` says.

- `serve-FORM`: four weights of a layer of Llama 8B or 70B, drawn, and random numbers of rows from 1 to 4096. Each
  request is computed by this library and by PyTorch's fastest composition, in random order, on rows that no cache
  holds. PyTorch is warm. The row has GPU time and host time per window of 5 s, the calls furthest from the rules, and
  when all calls had the best kernel: some of each 2.5 s are made again when nothing is left to compile (`--warm-up`:
  after co.warm_up, which may take minutes).
- `graph`: two calls, then the third is captured; its replay against that of a graph captured after co.warm_up, and of
  PyTorch's. `graph-thread_local` and `graph-relaxed` are other modes of capture. `graph-sizes` captures 30 sizes.
- `compile-MODE`: torch.compile of a module with two of our ops against the same in PyTorch: the first call of each
  alone, and the tenth iteration in turn.
- `train-LAYER`: steps from nothing, in turn with eager PyTorch's, and the first step of torch.compile.
- `warm-store`: a second process whose store was filled by other requests at the same weights: the first result after
  the import, and calls over 5 ms. `installed` is that with a wheel of kernels (`--wheel`) in place of the store.
- `no-compiler`: README's ten lines where there is no compiler, and the warnings.

A scenario that ended early, or at whose end kernels serve less than 99% of the calls, has "failed": true. "misses" are
aims that it missed. Each row is a scenario with its own date, as results of several runs are merged. Where git does not
know the commit, `--commit` says it.
"""

from __future__ import annotations

import argparse
import compileall
import datetime
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import cold_programs
import cold_serving
import harness

import cutlass_ops as co

SECONDS, SETTLE, FIRST_MS = 60.0, 60.0, 100.0
MODES = ("default", "reduce-overhead", "max-autotune")
# Variables of this library that say where compilers are. All others would change what is measured.
KEPT = ("CUTLASS_OPS_NVCC", "CUTLASS_OPS_CUTLASS_DIR")


class Scenario(NamedTuple):
    """What runs.

    Attributes
    ----------
    parts : tuple of str
        Processes, one after the other.
    serves : int
        How many of them take ``--seconds``.
    more_s : float
        Seconds that it takes besides, roughly.
    shares_store : bool
        Whether the parts have one store.
    sizes : tuple of int
        M of calls that are captured.
    without : dict
        Environment variables.
    """

    parts: tuple[str, ...] = ("only",)
    serves: int = 0
    more_s: float = 60.0
    shares_store: bool = False
    sizes: tuple[int, ...] = ()
    without: Mapping[str, str] = MappingProxyType({})


ONE, THIRTY = cold_programs.GRAPH_SIZES["graph"], cold_programs.GRAPH_SIZES["graph-sizes"]
SCENARIOS = {
    **{f"serve-{form}": Scenario(serves=1) for form in cold_serving.FORMS},
    "graph": Scenario(more_s=120.0, sizes=ONE),
    "graph-thread_local": Scenario(more_s=120.0, sizes=ONE),
    "graph-relaxed": Scenario(more_s=120.0, sizes=ONE),
    "graph-sizes": Scenario(more_s=200.0, sizes=THIRTY),
    **{f"compile-{mode}": Scenario(("ours", "pytorch", "together"), more_s=200.0) for mode in MODES},
    **{name: Scenario(("ours", "compile"), serves=1, more_s=100.0) for name in cold_programs.TRAINED},
    "warm-store": Scenario(("fill", "use"), serves=2, more_s=200.0, shares_store=True),
    "installed": Scenario(("use",), serves=1),
    "no-compiler": Scenario(more_s=20.0, without={"CUTLASS_OPS_NVCC": "/nowhere/nvcc", "PATH": "/nowhere"}),
}


def surroundings(scenario: Scenario, folder: Path, site: Path | None) -> dict[str, str]:
    """Return the environment of a part: an empty store, empty caches, and nothing else of this library's."""
    found = {name: of for name, of in os.environ.items() if not name.startswith("CUTLASS_OPS_") or name in KEPT}
    found |= {
        "CUTLASS_OPS_CACHE_DIR": str(folder / "store"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
    }
    if site is not None:
        found["PYTHONPATH"] = os.pathsep.join(filter(None, (found.get("PYTHONPATH"), str(site))))
    return {**found, **scenario.without}


class FailedError(Exception):
    """A part did not come to its end."""


def run_part(scenario: Scenario, options: dict[str, Any], folder: Path, site: Path | None, limit: float | None) -> Any:
    """Run a part in a process of its own; return what it wrote.

    Raises
    ------
    FailedError
        If it failed, or took too long. The message has the end of what it said.
    """
    report, said = folder / "report.json", folder / "said.txt"
    report.unlink(missing_ok=True)
    command = [sys.executable, str(Path(__file__).with_name("cold_process.py"))]
    command.append(json.dumps({**options, "report": str(report)}))
    with said.open("w") as out:
        try:
            done = subprocess.run(
                command, env=surroundings(scenario, folder, site), stdout=out, stderr=out, timeout=limit
            )
            why = f"ended with status {done.returncode}"
        except subprocess.TimeoutExpired:
            why = f"took longer than {limit:.0f} s"
    if report.exists():
        return json.loads(report.read_text())
    tail = said.read_text(errors="replace")[-2000:].strip()
    raise FailedError(f"{options['scenario']}, part {options['part']} {why}: {tail}")


def run_scenario(name: str, options: dict[str, Any], site: Path | None, limit: float | None) -> dict[str, Any]:
    """Run a scenario's parts; return its row."""
    scenario, began = SCENARIOS[name], time.monotonic()
    row: dict[str, Any] = {"scenario": name, "date": today(), "seconds": options["seconds"]}
    parts: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as shared:
        try:
            for part in scenario.parts:
                with tempfile.TemporaryDirectory() as own:
                    left = None if limit is None else limit - (time.monotonic() - began)
                    of_part = {**options, "scenario": name, "part": part, "sizes": scenario.sizes}
                    folder = Path(shared if scenario.shares_store else own)
                    parts[part] = run_part(scenario, of_part, folder, site if name == "installed" else None, left)
            row |= judge(name, parts)
        except FailedError as exc:
            row |= {"failed": True, "misses": [str(exc)], "parts": parts}
    return row | {"wall_s": round(time.monotonic() - began, 1)}


def judge(name: str, parts: dict[str, Any]) -> dict[str, Any]:
    """Return what a scenario's parts show."""
    kind = name.split("-")[0]
    if kind == "serve":
        return dict(parts["only"])
    if kind in ("warm", "installed"):
        return judge_store(parts)
    judges = {
        "graph": cold_programs.judge_graph,
        "compile": cold_programs.judge_compile,
        "train": cold_programs.judge_training,
        "no": cold_programs.judge_compiler,
    }
    return judges[kind](parts)


def judge_store(parts: dict[str, Any]) -> dict[str, Any]:
    """Return the row of a process whose kernels were all there: calls must not take long on the host."""
    found, misses = parts["use"], list(parts["use"]["misses"])
    if found["first_ms"] > FIRST_MS:
        misses.append(f"first result after {found['first_ms']} ms")
    if found["long_host"]["ours"]:
        misses.append(f"{found['long_host']['ours']} calls took more than 5 ms on the host")
    filled = {name: parts["fill"][name] for name in ("kernels", "background_done")} if "fill" in parts else {}
    return {**found, "misses": misses, "filled": filled}


def today() -> str:
    """Return the date, in UTC."""
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")


def expected_s(name: str, seconds: float) -> float:
    """Return roughly how long a scenario takes."""
    return SCENARIOS[name].serves * (seconds + 30.0) + SCENARIOS[name].more_s


def pin(cpus: int | None) -> int:
    """Have this process, and those that it starts, see so many processors; return how many these are.

    Raises
    ------
    SystemExit
        If there are fewer.
    """
    there = sorted(os.sched_getaffinity(0))
    if cpus is not None:
        if not 1 <= cpus <= len(there):
            raise SystemExit(f"--cpus is {cpus}: there are {len(there)} processors")
        os.sched_setaffinity(0, there[:cpus])
    return cpus or len(there)


def merged(paths: list[Path]) -> dict[str, Any]:
    """Return one result of several, with the latest date.

    Raises
    ------
    SystemExit
        If they are of different chips, versions, commits or processors, or have the same scenario.
    """
    heads, rows = [], {}
    for path in paths:
        result = json.loads(path.read_text())
        for row in result.pop("rows"):
            if row["scenario"] in rows:
                raise SystemExit(f"{row['scenario']} of {path} is in another result too: merge one of them")
            rows[row["scenario"]] = row
        heads.append(result)
        same = (heads[0].keys() | result.keys()) - {"date", "state"}
        differs = {key for key in same if heads[0].get(key) != result.get(key)}
        if differs:
            raise SystemExit(f"{path} and {paths[0]} differ in {', '.join(sorted(differs))}: measure one again")
    known = [name for name in SCENARIOS if name in rows]
    return {**heads[0], "date": max(head["date"] for head in heads), "rows": [rows[name] for name in known]}


def table(rows: list[dict[str, Any]]) -> str:
    """Return a few numbers of each scenario, and the aims that it missed."""
    lines = []
    for row in rows:
        state = "failed" if row["failed"] else "missed" if row["misses"] else "met"
        lines.append(f"{row['scenario']:24} {state:7} {'  '.join(_numbers(row))}")
        lines += [f"{'':33}{miss.splitlines()[-1][:150]}" for miss in row["misses"][:_MISSES]]
        if len(row["misses"]) > _MISSES:
            lines.append(f"{'':33}and {len(row['misses']) - _MISSES} more")
    return "\n".join(lines)


_MISSES = 4


def _numbers(row: dict[str, Any]) -> list[str]:
    found = []
    if "windows" in row:
        ratios = [each["gpu_ratio"] for each in row["windows"] if each["gpu_ratio"] is not None]
        found.append(f"GPU {ratios[0]} first, {max(ratios)} worst, {ratios[-1]} last" if ratios else "no GPU time")
        found.append(f"settled {row['settled_s']} s, kernels {row['kernels']}")
    names = ("first_ms", "first_s", "capture_s", "over_warm", "over_pytorch", "ratio", "later_ratio", "warnings")
    found += [f"{name} {row[name]}" for name in names if name in row]
    return found


def main() -> None:
    """Run scenarios, or merge results, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(SCENARIOS), help="scenarios; by default all")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="how long a scenario serves or trains")
    parser.add_argument("--settle", type=float, default=SETTLE, help="most seconds to wait then for the background")
    parser.add_argument("--warm-up", action="store_true", help="call co.warm_up before calls are made again")
    parser.add_argument("--cpus", type=int, help="how many processors there are; by default all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget", type=float, help="seconds after which no scenario begins that would not end")
    parser.add_argument("--wheel", type=Path, help="a wheel of kernels for the scenario installed")
    parser.add_argument("--commit", default=harness.commit(), help="by default what git says")
    parser.add_argument("--merge", nargs="+", type=Path, metavar="FILE", help="merge results; run nothing")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    result = merged(args.merge) if args.merge else measured(args)
    if args.out:
        harness.save(args.out, result)
    print(table(result["rows"]))


def measured(args: argparse.Namespace) -> dict[str, Any]:
    """Run scenarios, and write the JSON after each; return the result."""
    began = time.monotonic()
    names = args.only or [name for name in SCENARIOS if name != "installed" or args.wheel]
    if "installed" in names and args.wheel is None:
        raise SystemExit("installed needs --wheel")
    processors = pin(args.cpus)
    # As an installer does: a first call compiles no Python.
    compileall.compile_dir(Path(co.__file__).parent, quiet=2)
    names_of_weights = cold_serving.drawn_weights("bias_relu", args.seed)
    of_first = next(cold_serving.requests(1000 * args.seed))
    options = {
        "seed": args.seed,
        "seconds": args.seconds,
        "settle": args.settle,
        "warm_up": args.warm_up,
        "processors": processors,
        "first": (of_first.m, *cold_serving.LLAMA[names_of_weights[of_first.weight]]),
    }
    with tempfile.TemporaryDirectory() as folder:
        try:
            head = run_part(Scenario(), {**options, "scenario": "all", "part": "about"}, Path(folder), None, 120.0)
        except FailedError as exc:
            raise SystemExit(str(exc)) from None
        site = None
        if args.wheel:
            site = Path(folder, "site")
            shutil.unpack_archive(args.wheel, site, "zip")
        head |= {"processors": processors, "seed": args.seed, "commit": args.commit}
        result: dict[str, Any] = {**head, "rows": []}
        for at, name in enumerate(names):
            left = None if args.budget is None else args.budget - (time.monotonic() - began)
            if left is not None and expected_s(name, args.seconds) > left:
                print(f"no time is left: run these later with --only {' '.join(names[at:])}", flush=True)
                break
            row = run_scenario(name, options, site, left)
            print(json.dumps({key: row[key] for key in ("scenario", "failed", "misses", "wall_s")}), flush=True)
            result["rows"].append(row)
            if args.out:
                harness.save(args.out, result)
    return result


if __name__ == "__main__":
    main()
