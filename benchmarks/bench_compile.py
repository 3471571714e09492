"""Measures the time to compile kernels: one against plain nvcc on the same file, or several in one file.

    python benchmarks/bench_compile.py --out benchmarks/results/compile_h100.json   # needs nvcc and g++, no GPU
    python benchmarks/bench_compile.py --files CHECKOUT --out benchmarks/results/together_2_processors.json

Ours is the wait of a first call with a cold cache: rendering, both halves, the link and the proofs. The peer is one
nvcc that makes a shared library of the same source. They take turns, one kernel at a time, on an idle machine.
Each row: {"kernel", "ours_s", "nvcc_s", "ratio"}. The ratio is ours over nvcc's: below 1, ours is faster.

With --files, four kernels are compiled alone, in pairs and together, and beside that as another checkout does it. The
processor time counts, which other programs change less than the wait. A row is one size of file, with seconds per
kernel: {"kernels", "device_s", "host_s"}. "before" is the mean of these kernels in the other checkout, which compiles
each alone. "ratios" are the rows' sums over it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import harness
from bench_gemm import BENCHMARKS

import cutlass_ops as co
from cutlass_ops.artifacts.store import KernelStore
from cutlass_ops.base import arch
from cutlass_ops.compilation import compiler
from cutlass_ops.compilation.builder import build_artifact
from cutlass_ops.compilation.toolchain import Toolchain, environment, find_toolchain
from cutlass_ops.declare.spec import KernelSpec, Operand
from cutlass_ops.kinds import render
from cutlass_ops.run import ops
from cutlass_ops.run.registry import OpSignature


def kernels() -> list[KernelSpec]:
    """Return one kernel of each kind that serves shapes of the grid."""
    tile, cluster = co.ThreadblockShape, co.ClusterShape
    configs = [
        co.Sm90Config(tile(128, 128, 64), cluster(1, 2), schedule="pingpong"),
        co.Sm90Config(tile(128, 256, 64), cluster(2, 1), schedule="cooperative"),
        co.Sm90Config(tile(64, 16, 256), schedule="warp_specialized", swap_ab=True),
        co.Sm80Config(tile(128, 128, 32), co.WarpShape(64, 64, 32), stages=4),
    ]
    specs = [_signature(BENCHMARKS["bias_relu"].op, 1).spec(config) for config in configs]
    return [*specs, _signature(BENCHMARKS["bias_gelu_residual"].op, 2).spec(configs[0])]


def _signature(op: ops.Op, inputs: int) -> OpSignature:
    row, bias = Operand.of("bf16.row"), Operand.of("bf16.row.align1")
    return OpSignature(op.graph, row, row.transposed, row, (bias, row)[:inputs], ())


def ours(spec: KernelSpec, toolchain: Toolchain, folder: Path) -> float:
    """Return the seconds of a build into an empty store."""
    began = time.monotonic()
    build_artifact(spec, store=KernelStore(folder / "store"), toolchain=toolchain)
    return time.monotonic() - began


def plain(spec: KernelSpec, toolchain: Toolchain, folder: Path) -> float:
    """Return the seconds of one nvcc that makes a shared library of the same source."""
    flags = [
        f for f in compiler.compile_flags(arch.target(spec.target))["device"] if f not in ("-fatbin", "-Xptxas=-v")
    ]
    compiler.link_inputs(folder, toolchain)
    (folder / "kernel.cu").write_text(render.render(spec))
    command = [
        str(toolchain.nvcc), f"-ccbin={toolchain.host_compiler}", *flags, "-Xcompiler=-fPIC,-fvisibility=hidden",
        "-shared", "-cudart=shared", "-cudadevrt=none", "-Llib", "-ltvm_ffi", "-o", "kernel.so", "kernel.cu",
    ]  # fmt: skip
    began = time.monotonic()
    subprocess.run(command, cwd=folder, env=environment(toolchain.path), check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - began


def row(spec: KernelSpec, toolchain: Toolchain, rounds: int) -> dict[str, Any]:
    """Build a kernel both ways, in turns."""
    times: dict[str, list[float]] = {"ours": [], "nvcc": []}
    for number in range(rounds):
        ways = [("ours", ours), ("nvcc", plain)]
        for name, way in ways[:: 1 if number % 2 else -1]:
            with tempfile.TemporaryDirectory() as folder:
                times[name].append(way(spec, toolchain, Path(folder)))
    ratio = statistics.median(o / n for o, n in zip(times["ours"], times["nvcc"], strict=True))
    return {
        "kernel": f"{spec.config.slug}, {len(spec.inputs)} inputs",
        "ours_s": round(statistics.median(times["ours"]), 2),
        "nvcc_s": round(statistics.median(times["nvcc"]), 2),
        "ratio": round(ratio, 3),
    }


# ---- Processor time of files of several --------------------------------------------------------------------------

# Prints what another checkout runs to compile one kernel: a source, its flags, and its folder of headers.
_OTHER = """
import json, sys
from cutlass_ops.base import arch, resources
from cutlass_ops.compilation.compiler import compile_flags
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.kinds import render
spec = KernelSpec.from_json(json.load(sys.stdin))
print(json.dumps([render.render(spec), compile_flags(arch.target(spec.target)), str(resources.include())]))
"""


def alike() -> list[KernelSpec]:
    """Return four of Hopper's kernels that a cold start compiles together."""
    tile, cluster = co.ThreadblockShape, co.ClusterShape
    configs = [
        co.Sm90Config(tile(128, 128, 64), cluster(1, 2), schedule="pingpong"),
        co.Sm90Config(tile(128, 256, 64), cluster(2, 1), schedule="cooperative"),
        co.Sm90Config(tile(64, 16, 256), schedule="warp_specialized", swap_ab=True),
        co.Sm90Config(tile(128, 192, 64), schedule="cooperative"),
    ]
    return [_signature(BENCHMARKS["bias_relu"].op, 1).spec(config) for config in configs]


def processor_seconds(command: Sequence[str], folder: Path, toolchain: Toolchain) -> float:
    """Run a compiler and return the processor seconds of it and its parts."""
    with (folder / "said").open("wb") as said:
        program = subprocess.Popen(command, cwd=folder, env=environment(toolchain.path), stdout=said, stderr=said)
        _, status, used = os.wait4(program.pid, 0)
    if status != 0:
        raise RuntimeError(f"{command[0]} failed: {(folder / 'said').read_text(errors='replace')[-1000:]}")
    program.returncode = 0
    return used.ru_utime + used.ru_stime


def file_row(specs: Sequence[KernelSpec], toolchain: Toolchain, folder: Path) -> dict[str, Any]:
    """Compile kernels in one file, one compiler after the other; return their processor seconds per kernel."""
    target, sources = arch.target(specs[0].target), [render.render(spec) for spec in specs]
    flags, nvcc = compiler.compile_flags(target), (str(toolchain.nvcc), f"-ccbin={toolchain.host_compiler}")
    compiler.link_inputs(folder, toolchain)
    (folder / "kernel.cu").write_text(compiler.joined(sources))
    device = processor_seconds(compiler.ptx_step("kernel.cu", target, toolchain).command, folder, toolchain)
    host = 0.0
    for at, source in enumerate(sources):
        name = f"kernel_{at}.cu"
        (folder / name).write_text(source)
        own = compiler.own_functions(folder / "kernels.ptx", folder / name)
        fatbin = (*nvcc, *flags["device"], f"--entries={own}", "-o", f"{name}.fatbin", "kernels.ptx")
        device += processor_seconds(fatbin, folder, toolchain)
        command = (str(toolchain.host_compiler), *flags["host"], "-o", f"{name}.o", name)
        host += processor_seconds(command, folder, toolchain)
    count = len(specs)
    return {"kernels": count, "device_s": round(device / count, 2), "host_s": round(host / count, 2)}


def before(spec: KernelSpec, checkout: Path, toolchain: Toolchain, folder: Path) -> dict[str, float]:
    """Compile a kernel as another checkout does, one half after the other; return their processor seconds."""
    asked = subprocess.run(
        [sys.executable, "-c", _OTHER],
        env=os.environ | {"PYTHONPATH": str(checkout)},
        input=json.dumps(spec.to_json()),
        capture_output=True,
        text=True,
        check=True,
    )
    source, flags, include = json.loads(asked.stdout)
    compiler.link_inputs(folder, toolchain)
    (folder / "inc" / "cutlass_ops").unlink()
    (folder / "inc" / "cutlass_ops").symlink_to(include)
    (folder / "kernel.cu").write_text(source)
    nvcc, host = str(toolchain.nvcc), str(toolchain.host_compiler)
    device = (nvcc, f"-ccbin={host}", *flags["device"], "-o", "kernel.fatbin", "kernel.cu")
    return {
        "device_s": round(processor_seconds(device, folder, toolchain), 2),
        "host_s": round(processor_seconds((host, *flags["host"], "-o", "kernel.o", "kernel.cu"), folder, toolchain), 2),
    }


def files(checkout: Path, toolchain: Toolchain, head: dict[str, Any], out: Path) -> None:
    """Compile kernels in files of several sizes, and as another checkout does; write what is known so far."""
    specs, found, others, lock = alike(), list[dict[str, Any]](), list[dict[str, float]](), threading.Lock()

    def save() -> None:
        rows = [
            _mean([row for row in found if row["kernels"] == size]) for size in sorted({r["kernels"] for r in found})
        ]
        result = head | {"load": round(os.getloadavg()[0], 1), "rows": rows}
        if others:
            result["before"] = {"kernels": len(others), **_mean(others)}
            whole = result["before"]["device_s"] + result["before"]["host_s"]
            result["ratios"] = {str(r["kernels"]): round((r["device_s"] + r["host_s"]) / whole, 3) for r in rows}
        harness.save(out, result)
        print(found[-1:], others[-1:], flush=True)

    def ours_of(group: Sequence[KernelSpec]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            row = file_row(group, toolchain, Path(folder))
        with lock:
            found.append(row)
            save()

    def theirs_of(spec: KernelSpec) -> None:
        with tempfile.TemporaryDirectory() as folder:
            row = before(spec, checkout, toolchain, Path(folder))
        with lock:
            others.append(row)
            save()

    # Both at the same time: what else runs slows both alike.
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        tasks = [
            one.submit(ours_of, group) for group in (specs[:1], specs, specs[1:2], specs[2:3], specs[3:], specs[:2])
        ]
        tasks += [other.submit(theirs_of, spec) for spec in specs]
        for task in tasks:
            task.result()


def _mean(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    means = {name: statistics.fmean(row[name] for row in rows) for name in rows[0]}
    return {name: int(mean) if name == "kernels" else round(mean, 2) for name, mean in means.items()}


def main() -> None:
    """Build every kernel both ways and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--files", type=Path, metavar="CHECKOUT", help="files of several, compared with a checkout")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    toolchain = find_toolchain()
    head = {
        "date": datetime.date.today().isoformat(),
        "machine": platform.machine(),
        "processors": len(os.sched_getaffinity(0)),
        "cutlass_ops": co.__version__,
        **toolchain.identity,
    }
    if args.files is not None:
        files(args.files, toolchain, head, args.out)
        return
    rows = []
    for spec in kernels():
        rows.append(row(spec, toolchain, args.rounds))
        print(rows[-1], flush=True)
    ratios = [r["ratio"] for r in rows]
    summary = {"geomean": round(harness.geomean(ratios), 3), "worst": max(ratios)}
    harness.save(args.out, {**head, "summary": summary, "rows": rows})
    print(summary)


if __name__ == "__main__":
    main()
