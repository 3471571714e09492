"""Compiles what a campaign's jobs need where there is no GPU, so that the GPU's time goes into running them.

    python benchmarks/ahead.py --only training fp8_blocks backward_tests
    python benchmarks/ahead.py --only training --gpu H100 --list kernels.json    # notes the kernels and compiles none
    python benchmarks/ahead.py --adopt STORE                            # on the GPU's machine

Each job begins as it would on a GPU, by default an H200, in a process that pretends to have one, and ends where it
needs the GPU itself; tests run on a device that is made up (`tests/gpu/foreseen.py`). What a job compiles later than
that is not known here.

A kernel's key has the compilers' digests, so that a machine looks for kernels of its own. `--adopt` copies those of
another machine's store, by the same releases of nvcc, CUTLASS and tvm-ffi, as if they had been compiled where it runs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import campaign

from cutlass_ops.artifacts.entry import Compiled, identity_key
from cutlass_ops.artifacts.store import KernelStore
from cutlass_ops.compilation import builder
from cutlass_ops.compilation.toolchain import find_toolchain
from cutlass_ops.declare.gpus import gpu_named
from cutlass_ops.declare.quantizing import Declaration, declaration_from_json
from tests.gpu import foreseen

ROOT = Path(__file__).parents[1]
_TESTS = re.compile(r"tests/gpu/test_\w+\.py")


def note(words: list[str], path: Path, gpu: str) -> None:
    """Begin a script here as if there were such a GPU, and write what it would compile to a file."""
    found: dict[Declaration, None] = {}

    def build_many(specs: Iterable[Declaration], **_: Any) -> list[None]:
        wanted = list(specs)
        found.update(dict.fromkeys(wanted))
        return [None] * len(wanted)

    foreseen.pretend(gpu_named(gpu))
    builder.build_many = build_many  # type: ignore[assignment]
    is_module = words[0] == "-m"
    sys.argv = words[1:] if is_module else words
    sys.path[0] = str(ROOT if is_module else Path(words[0]).parent)
    try:
        if is_module:
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[0], run_name="__main__")
    except Exception as exc:  # whatever it is that a GPU is lacking for
        where = traceback.extract_tb(exc.__traceback__)
        ours = next(frame for frame in reversed(where) if "site-packages" not in frame.filename)
        print(f"   ends at {Path(ours.filename).name}:{ours.lineno}, {type(exc).__name__}: {str(exc)[:90]}", flush=True)
    path.write_text(json.dumps([json.loads(spec.canonical()) for spec in found]))


def environment() -> dict[str, str]:
    """Return the environment in which jobs find this repository's modules, and no GPU."""
    return os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'benchmarks'}", "CUDA_VISIBLE_DEVICES": ""}


def kernels(job: campaign.Job, folder: Path, gpu: str) -> list[Declaration]:
    """Return the kernels that a job is known to need on a GPU."""
    path, words = folder / f"{job.name}.json", shlex.split(job.command.format(out=folder))[1:]
    tests = _TESTS.findall(job.command)
    if tests:
        command = ["-m", "pytest", "-q", "--tb=no", "-p", "no:cacheprovider", "-p", "tests.gpu.foreseen", *tests]
        command += ["--foreseen", str(path), "--gpu", gpu]
    elif words[0].endswith(".py") or words[0] == "-m":
        command = [__file__, "--note", str(path), gpu, *words]
    else:
        return []
    empty = str(folder / "store")
    around = environment() | {"CUTLASS_OPS_CACHE_DIR": empty, "CI_KERNELS": empty}
    subprocess.run([sys.executable, *command], cwd=ROOT, env=around, stdout=None if not tests else subprocess.DEVNULL)
    return [declaration_from_json(each) for each in json.loads(path.read_text())]


def adopt(other: Path) -> tuple[int, int]:
    """Copy another store's kernels under this machine's keys; return how many, and how many of other releases."""
    store, mine = KernelStore.default(), find_toolchain().identity
    copied = others = 0
    for artifact in KernelStore(other).entries():
        identity = dict(artifact.manifest["identity"])
        theirs = identity["toolchain"]
        if any(_release(theirs[name]) != _release(mine[name]) for name in ("nvcc", "cutlass", "tvm_ffi")):
            others += 1
            continue
        identity["toolchain"] = mine
        key = identity_key(identity)
        with store.lock(key):
            if store.lookup(key) is None:
                folder = store.workspace(key, artifact.read_source().decode())
                (folder / artifact.library.name).write_bytes(artifact.read_library())
                report = Compiled(artifact.manifest["compile_seconds"], tuple(artifact.manifest["resources"]))
                store.publish(folder, identity, artifact.manifest["sass"], report)
                copied += 1
    return copied, others


def _release(version: str) -> str:
    return version.partition("+")[0]


def main() -> None:
    """Find the kernels of jobs, and compile them together."""
    if sys.argv[1:2] == ["--note"]:
        note(sys.argv[4:], Path(sys.argv[2]), sys.argv[3])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="JOB", help="jobs of campaign.toml")
    parser.add_argument("--gpu", default=foreseen.USUAL, help="GPU as the driver names it, or a part of that")
    parser.add_argument("--list", type=Path, help="file that the kernels are written to, instead of compiling them")
    parser.add_argument("--adopt", type=Path, metavar="STORE", help="copy another machine's kernels, and end")
    args = parser.parse_args()
    if args.adopt:
        copied, others = adopt(args.adopt)
        print(f"{copied} kernels copied, {others} of other releases left out")
        return
    found: dict[Declaration, None] = {}
    with tempfile.TemporaryDirectory() as folder:
        for job in campaign.jobs(campaign.PLAN, args.only):
            each = kernels(job, Path(folder), args.gpu)
            found.update(dict.fromkeys(each))
            print(f"{job.name}: {len(each)} kernels", flush=True)
    if args.list:
        args.list.write_text(json.dumps([json.loads(spec.canonical()) for spec in found]))
    else:
        builder.build_many(found)


if __name__ == "__main__":
    main()
