"""Measures the time from the import of this library to a first result from a bundle, in a process without compilers.

    cutlass-ops bundle examples/deploy/catalogue.toml --out kernels.bundle
    python benchmarks/bench_first_call.py kernels.bundle --out benchmarks/results/first_call_h100.json

Each run is examples/deploy/serve.py in a new process, in an environment with only PyTorch, this library and their
requirements, all as byte code. With --key, the bundle's signature is checked too, with cryptography. A wheel of kernels
in place of the bundle is installed there, and found without being named:

    cutlass-ops distribution sm_90a --op gemm_bias_relu --dtype bf16 --out dist
    python benchmarks/bench_first_call.py dist/*.whl --out benchmarks/results/first_call_installed_h100.json

Half of the processes run garbage collection before the call ("collected"); the others leave it to chance. Each row, in
milliseconds: {"torch", "device"} before the clock starts, then {"first"} and its parts {"import", "bundle", "call"}.
"""

from __future__ import annotations

import argparse
import compileall
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

import harness
from packaging.requirements import Requirement

import cutlass_ops as co

SERVE = Path(__file__).parents[1] / "examples" / "deploy" / "serve.py"
_FIRST = re.compile(r"first result on (\w+) after (\d+) ms \(import (\d+), bundle (\d+), call (\d+)\)")
_BEFORE = re.compile(r"PyTorch's import (\d+) ms, the device's start (\d+) ms")


def required(*names: str) -> set[str]:
    """Return packages and all their installed requirements."""
    found: dict[str, set[str]] = {}
    left = [Requirement(name) for name in names]
    while left:
        wanted = left.pop()
        name = re.sub(r"[-_.]+", "-", wanted.name).lower()
        extras = {"", *wanted.extras}
        if not extras <= found.get(name, set()):
            found[name] = found.get(name, set()) | extras
            its = map(Requirement, metadata.requires(name) or ())
            left += [r for r in its if r.marker is None or any(r.marker.evaluate({"extra": e}) for e in extras)]
    return set(found)


def make_environment(folder: Path, packages: set[str]) -> None:
    """Fill a folder with links to installed packages, and with this library."""
    for package in packages:
        for name in {file.parts[0] for file in metadata.files(package) or ()} - {"..", "__pycache__", "bin"}:
            here = Path(str(metadata.distribution(package).locate_file(name)))
            if here.exists() and not (folder / name).exists():
                (folder / name).symlink_to(here)
    # Copy with byte code, as an installer does.
    for module in ("cutlass_ops", "tvm_ffi"):
        (folder / module).unlink(missing_ok=True)
        source = Path(co.__file__).parent if module == "cutlass_ops" else _package(module)
        shutil.copytree(source, folder / module, ignore=shutil.ignore_patterns("__pycache__"))
        compileall.compile_dir(folder / module, quiet=2)


def _package(module: str) -> Path:
    return Path(str(metadata.distribution("apache-tvm-ffi").locate_file(module)))


def run(environment: Path, arguments: list[str]) -> dict[str, Any]:
    """Run the program once and return its times."""
    command = [sys.executable, "-S", str(SERVE), *arguments]
    bare = {"PATH": "/nowhere", "HOME": "/nonexistent", "CUTLASS_OPS_JIT": "0", "PYTHONPATH": str(environment)}
    return read(subprocess.run(command, env=bare, check=True, stdout=subprocess.PIPE, text=True).stdout)


def read(said: str) -> dict[str, Any]:
    """Return the times that the program printed."""
    first, before = _FIRST.search(said), _BEFORE.search(said)
    if first is None or before is None:
        raise RuntimeError(f"{SERVE.name} did not say how long it took:\n{said}")
    names = ("torch", "device", "first", "import", "bundle", "call")
    return {"on": first[1], **dict(zip(names, map(int, (*before.groups(), *first.groups()[1:])), strict=True))}


def _summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    medians = {
        name: statistics.median(row[name] for row in rows) for name in rows[0] if name not in ("on", "collected")
    }
    return medians | {"least": min(row["first"] for row in rows), "most": max(row["first"] for row in rows)}


def main() -> None:
    """Run the program several times and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path, help="a bundle, or a wheel of kernels")
    parser.add_argument("--key", type=Path, help="check the bundle's signature with this key")
    parser.add_argument("--runs", type=int, default=12, help="number of processes of each kind")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    os.environ["CUTLASS_OPS_STAND_IN"] = "1"  # as users have it
    installed = args.bundle.suffix == ".whl"
    arguments = [str(path.resolve()) for path in (None if installed else args.bundle, args.key) if path]
    with tempfile.TemporaryDirectory() as folder:
        signing = ["cryptography"] if args.key else []
        make_environment(Path(folder), required("torch", "numpy", "apache-tvm-ffi", *signing))
        if installed:
            shutil.unpack_archive(args.bundle, folder, "zip")
        run(Path(folder), arguments)  # brings the files into memory
        rows = []
        for collected in [True, False] * args.runs:
            further = [] if collected else ["--no-collect"]
            rows.append({"collected": collected} | run(Path(folder), arguments + further))
    summary = {"collected": _summary([r for r in rows if r["collected"]])}
    summary["not_collected"] = _summary([r for r in rows if not r["collected"]])
    head = harness.environment() | {"processors": len(os.sched_getaffinity(0)), "signed": args.key is not None}
    head |= {"installed": args.bundle.name} if installed else {}
    harness.save(args.out, {**head, "summary": summary, "rows": rows})
    print(summary)


if __name__ == "__main__":
    main()
