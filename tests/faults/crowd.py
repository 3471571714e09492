"""Processes that build kernels with a compiler that takes no time, started by the hundred and killed at will."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from multiprocessing import forkserver
from pathlib import Path

import pytest
from fake_toolkit import HMMA, FakeToolkit, library, sm80_spec
from signatures import signature

from cutlass_ops.artifacts.entry import FORMAT, open_entry
from cutlass_ops.artifacts.store import KernelStore
from cutlass_ops.base import arch, executors, locks
from cutlass_ops.compilation.builder import build_artifact, build_many
from cutlass_ops.compilation.compiler import compile_kernel
from cutlass_ops.compilation.toolchain import Toolchain
from cutlass_ops.declare.config import Ordered
from cutlass_ops.declare.problem import Problem
from cutlass_ops.tuner.measuring import Measurer

LIBRARY = library(*[HMMA] * 200)
SPECS = tuple(sm80_spec(stages) for stages in (2, 3, 4))

# Written in three parts, so that there is something half-written to be found.
SLOWLY = 'head -c 150 "$here/library" > "$out"; sleep 0.02; head -c 250 "$here/library" > "$out"; sleep 0.02; '


def context() -> multiprocessing.context.ForkServerContext:
    """Fresh processes in no time, and not by forking this one, which has threads."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(["pytest", "crowd"])
    with pytest.MonkeyPatch.context() as patch:
        # The server does not take over sys.path, and would skip what it cannot import.
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *sys.path]))
        forkserver.ensure_running()
    return found


def build_one(root: Path, toolchain: Toolchain) -> str:
    return build_artifact(SPECS[0], source="source", store=KernelStore(root), toolchain=toolchain).sha256


def build_all(root: Path, toolchain: Toolchain) -> None:
    os.environ["CUTLASS_OPS_PROGRESS"] = "0"
    build_many(SPECS, jobs=2, store=KernelStore(root), toolchain=toolchain)


def build_all_in_a_session_of_its_own(root: Path, toolchain: Toolchain) -> None:
    os.setsid()
    build_all(root, toolchain)


def build_some(root: Path, toolchain: Toolchain, limit: int, seed: int) -> int:
    """Build, look up and read kernels at random in a store that is too small for all of them."""
    os.environ["CUTLASS_OPS_CACHE_SIZE"] = str(limit)
    rng, store = random.Random(seed), KernelStore(root)
    sources = [f"// {number}" for number in range(8)]
    for _ in range(60):
        source = rng.choice(sources)
        artifact = build_artifact(SPECS[0], source=source, store=store, toolchain=toolchain)
        assert artifact.read_library() == LIBRARY
        assert artifact.read_source().decode() == source
        store.find({k: v for k, v in artifact.manifest["identity"].items() if k != "toolchain"})
    return 60


def count_up(path: Path, times: int) -> None:
    """Add to a number in a file, a step at a time, as only one may do at a time."""
    for _ in range(times):
        with locks.held(path.with_name("lock"), "the number", ""):
            number = int(path.read_text())
            path.write_text("")
            path.write_text(str(number + 1))


def slow_kit(root: Path) -> FakeToolkit:
    kit = FakeToolkit(root)
    kit.makes(LIBRARY, before=SLOWLY)
    return kit


def visible(store: KernelStore) -> list[bytes]:
    """The libraries of all entries; a single one that is not whole is an error."""
    return [open_entry(folder).read_library() for folder in (store.root / f"v{FORMAT}").glob("*/*")]


def left_over(store: KernelStore) -> list[str]:
    return [p.name for folder in ("tmp", "failed") for p in (store.root / folder).glob("*")]


def _end_on_hangup() -> None:
    """As programs usually do: what runs under nohup ignores it, and so would its children."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def compile_until_ended(folder: Path, toolchain: Toolchain) -> None:
    if threading.current_thread() is threading.main_thread():
        _end_on_hangup()
    compile_kernel(folder, "kernel.cu", "kernel.so", arch.target("sm_80"), toolchain)


def compile_and_exit(folder: Path, toolchain: Toolchain) -> None:
    """End without a word to anybody, while a thread compiles."""
    threading.Thread(target=compile_until_ended, args=(folder, toolchain), daemon=True).start()
    groups_in(folder)
    os._exit(0)


def compile_beside_a_fork(folder: Path, toolchain: Toolchain) -> None:
    """Have a fork that outlives this process, as a program with workers may."""
    threading.Thread(target=compile_until_ended, args=(folder, toolchain), daemon=True).start()
    groups_in(folder)
    fork = os.fork()
    if fork == 0:
        time.sleep(600)
        os._exit(0)
    (folder / "fork.new").write_text(str(fork))
    (folder / "fork.new").rename(folder / "fork")
    time.sleep(600)


def compile_elsewhere(root: Path, nvcc: str, host: str) -> None:
    os.environ.update(CUTLASS_OPS_NVCC=nvcc, NVCC_CCBIN=host, CUTLASS_OPS_PROGRESS="0")
    with executors.named("processes:1") as pool:
        build_many(SPECS[:1], store=KernelStore(root), executor=pool)


def begin_a_job_late(folder: Path) -> None:
    """As a worker that was told to end between two jobs."""
    with contextlib.suppress(SystemExit):
        executors._quit()
    (folder / "told").touch()
    executors._job((folder / "begun").touch)
    (folder / "went on").touch()


def measure_until_ended(folder: Path) -> None:
    """Measure in a worker that hangs, and has started a process of its own."""
    _end_on_hangup()
    worker = f"""
import contextlib
import json, os, subprocess, time
subprocess.Popen(["sleep", "600"])
print(json.dumps({{"event": "ready"}}), flush=True)
input()
for name in ("device.new", "host.new"):
    open(os.path.join({str(folder)!r}, name), "w").write(str(os.getpgrp()))
    os.rename(os.path.join({str(folder)!r}, name), os.path.join({str(folder)!r}, name[:-4]))
time.sleep(600)
"""
    with Measurer(command=(sys.executable, "-c", worker)) as measurer:
        measurer.measure(signature(), Problem(1, 1, 1), {Ordered(SPECS[0].config): folder}, rounds=1)


def groups_in(folder: Path, child: multiprocessing.process.BaseProcess | None = None) -> list[int]:
    """The process groups of both compilers that a child, or this process, has work in a folder, once they are there."""
    while not all((folder / name).exists() for name in ("device", "host")):
        assert child is None or child.is_alive()
        time.sleep(0.01)
    return [int((folder / name).read_text()) for name in ("device", "host")]
