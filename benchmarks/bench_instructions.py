"""Measures what Tensor Core instructions reach by themselves: FP16 with sums in FP16 and in FP32, and those of FP64.

    python benchmarks/bench_instructions.py --out benchmarks/results/instructions_h100.json
    python benchmarks/bench_instructions.py --loops wgmma --seconds 5 --out /tmp/loops.json
    python benchmarks/bench_instructions.py --write      # the part of docs/types.md, from benchmarks/results

Loops of one instruction on operands in registers or shared memory (`cuda/instructions.cu`), on every multiprocessor.
Each round runs every loop in another order: without rests for a while, until the chip is at its power limit, and once
after a rest, when it is not. Kernels read the clocks themselves. Then GEMMs of CUTLASS (`cuda/gemm_sums.cu`), by the
same kernel but for the type of its sums, at some shapes in turns, with their errors against float64.

Each row: {"loop", "clocks" (of a multiprocessor for 1,000,000 products), "sustained_tflops", "sustained_mhz",
"rested_tflops", "rested_mhz"}, or {"gemm", "m", "n", "k", "f32_ms", "f16_ms", "ratio", "ratio_range", "f32_error",
"f16_error"}.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import torch
from over_k import ROOT, Report, Result, Row, shown, table
from torch import Tensor

from cutlass_ops.base import resources
from cutlass_ops.compilation.toolchain import find_toolchain
from cutlass_ops.declare.problem import Problem
from cutlass_ops.tuner.timing import expected_us, rotation

SOURCES = ROOT / "benchmarks" / "cuda"
LOOPS, GEMMS = "instructions", "gemm_sums"
TARGET = "sm_90a"
SHAPES = ((512, 4096, 4096), (4096, 4096, 4096), (8192, 8192, 8192), (4096, 4096, 256), (4096, 14336, 4096))
# What is compared: sums in FP16 over those in FP32.
PAIRS = (
    ("`wgmma` m64n256k16", "wgmma.m64n256k16.f16.f16.f16", "wgmma.m64n256k16.f32.f16.f16"),
    ("`mma.sync` m16n8k16", "mma.m16n8k16.f16.f16.f16", "mma.m16n8k16.f32.f16.f16"),
)
_LAUNCH_MS, _REST_S, _SAMPLED = 4.0, 0.5, 64


def compile_library(name: str, folder: Path) -> Path:
    """Compile a file of :data:`SOURCES` to a shared library, unless the folder has it already.

    Raises
    ------
    subprocess.CalledProcessError
        If nvcc refuses it.
    """
    tools = find_toolchain()
    includes = [
        resources.templates() / "include",
        tools.cutlass_dir / "include",
        tools.cutlass_dir / "tools/util/include",
    ]
    library = folder / f"{name}.so"
    if library.exists():
        return library
    capability = TARGET.removeprefix("sm_")
    flags = ["-std=c++17", "-O3", "-DNDEBUG", "--expt-relaxed-constexpr", "-Xcompiler", "-fPIC", "-shared"]
    flags += [
        f"-gencode=arch=compute_{capability},code={TARGET}",
        "-cudart",
        "shared",
        "-ccbin",
        str(tools.host_compiler),
    ]
    folders = [f"-I{each}" for each in (*includes, *tools.include_dirs)] + [f"-L{each}" for each in tools.lib_dirs]
    source = SOURCES / f"{name}.cu"
    subprocess.run([tools.nvcc, *flags, *folders, source, "-o", library], check=True)
    return library


# ---- Loops -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loop:
    """A loop of one instruction.

    Attributes
    ----------
    name : str
        The instruction, as PTX has it.
    products : int
        Products of one step of a thread block.
    run : callable
        Launches so many steps in every block; takes the tensor of clocks, steps and blocks.
    """

    name: str
    products: int
    run: Callable[[Tensor, int], None]


@dataclass(frozen=True)
class Reading:
    """What the blocks of a launch read of the clocks."""

    clocks: float
    nanoseconds: float

    @classmethod
    def of(cls, passed: Tensor) -> Reading:
        """Return the medians over blocks of a tensor (blocks, 2)."""
        clocks, nanoseconds = passed.double().median(0).values.tolist()
        return cls(clocks, nanoseconds)

    @property
    def mhz(self) -> float:
        """The multiprocessors' clock."""
        return self.clocks / self.nanoseconds * 1e3

    def tflops(self, products: int, blocks: int) -> float:
        """Return the rate, where each block did so many products."""
        return 2e-3 * products * blocks / self.nanoseconds


def loops(library: Path) -> list[Loop]:
    """Return the loops of a compiled library."""
    found = ctypes.CDLL(str(library))
    found.loop_name.restype, found.loop_products.restype = ctypes.c_char_p, ctypes.c_int64
    pointer, number = ctypes.c_void_p, ctypes.c_int
    found.loop_run.argtypes = [number, pointer, number, number, pointer, pointer]

    def running(index: int) -> Callable[[Tensor, int], None]:
        def run(passed: Tensor, steps: int) -> None:
            stream = torch.cuda.current_stream().cuda_stream
            error = found.loop_run(index, passed.data_ptr(), steps, len(passed), passed.data_ptr(), stream)
            assert error == 0, f"CUDA error {error}"

        return run

    return [Loop(found.loop_name(i).decode(), found.loop_products(i), running(i)) for i in range(found.loops())]


def measured(loop: Loop, steps: int, passed: Tensor, seconds: float) -> tuple[Reading, Reading]:
    """Return a reading at the power limit, after so many seconds of launches, and one after a rest."""
    begin = time.monotonic()
    while time.monotonic() - begin < seconds:
        for _ in range(8):
            loop.run(passed, steps)
        torch.cuda.synchronize()
    sustained = Reading.of(passed)
    time.sleep(_REST_S)
    loop.run(passed, steps)
    torch.cuda.synchronize()
    return sustained, Reading.of(passed)


def rows_of_loops(every: Sequence[Loop], seconds: float, rounds: int) -> Iterator[Row]:
    """Measure loops in turns, and yield a row for each."""
    blocks = torch.cuda.get_device_properties(0).multi_processor_count
    passed = torch.zeros(blocks, 2, dtype=torch.int64, device="cuda")
    steps: dict[str, int] = {}
    for loop in every:
        loop.run(passed, 1000)
        torch.cuda.synchronize()
        steps[loop.name] = max(1, round(1000 * _LAUNCH_MS * 1e6 / Reading.of(passed).nanoseconds))
    found: dict[str, list[tuple[Reading, Reading]]] = {loop.name: [] for loop in every}
    for number in range(rounds):
        order = list(every)
        random.Random(number).shuffle(order)
        for loop in order:
            found[loop.name].append(measured(loop, steps[loop.name], passed, seconds))
    for loop in every:
        yield row_of(loop.name, loop.products * steps[loop.name], blocks, found[loop.name])


def row_of(name: str, products: int, blocks: int, readings: Sequence[tuple[Reading, Reading]]) -> Row:
    """Return a loop's row: medians over rounds, of so many products of each block."""

    def median(values: Iterator[float]) -> float:
        return statistics.median(values)

    return {
        "loop": name,
        "clocks": round(median(1e6 * reading.clocks / products for reading, _ in readings), 2),
        "sustained_tflops": round(median(reading.tflops(products, blocks) for reading, _ in readings), 1),
        "sustained_mhz": round(median(reading.mhz for reading, _ in readings)),
        "rested_tflops": round(median(reading.tflops(products, blocks) for _, reading in readings), 1),
        "rested_mhz": round(median(reading.mhz for _, reading in readings)),
    }


# ---- GEMMs -----------------------------------------------------------------------------------------------------------


def gemms(library: Path) -> dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], None]]:
    """Return CUTLASS's GEMMs by the type of sums. They take A (M, K), B (K, N) with K adjacent, D (M, N), workspace."""
    loaded = ctypes.CDLL(str(library))
    pointer, number = ctypes.c_void_p, ctypes.c_int
    found = {}
    for name in ("f32", "f16"):
        function = getattr(loaded, f"gemm_{name}")
        function.argtypes = [pointer, pointer, pointer, number, number, number, pointer, ctypes.c_int64, pointer]

        def run(a: Tensor, b: Tensor, d: Tensor, workspace: Tensor, function: Any = function) -> None:
            assert a.stride(1) == b.stride(0) == d.stride(1) == 1
            sizes = a.shape[0], b.shape[1], a.shape[1]
            stream = torch.cuda.current_stream().cuda_stream
            data = a.data_ptr(), b.data_ptr(), d.data_ptr()
            error = function(*data, *sizes, workspace.data_ptr(), workspace.numel(), stream)
            assert error == 0, f"error {error} at {sizes}"

        found[name] = run
    return found


def rows_of_gemms(library: Path) -> Iterator[Row]:
    """Measure both GEMMs at each shape."""
    runs = gemms(library)
    workspace = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
    for m, n, k in SHAPES:
        problem = Problem(m, n, k)

        def draw(m: int = m, n: int = n, k: int = k) -> tuple[Tensor, Tensor, Tensor]:
            a, b = (torch.randn(side, k, dtype=torch.float16, device="cuda") for side in (m, n))
            return a, b.div_(k**0.5).t(), torch.empty(m, n, dtype=torch.float16, device="cuda")

        sets = [draw() for _ in range(rotation(problem.bytes(2, 2, 2)))]
        a, b, d = sets[0]
        errors, rows = {}, torch.randint(m, (_SAMPLED,), device="cuda")
        exact = a[rows].double() @ b.double()
        for name, run in runs.items():
            d.fill_(float("nan"))
            run(a, b, d, workspace)
            errors[name] = float((d[rows].double() - exact).norm() / exact.norm())
        variants: dict[str, Callable[[int], object]] = {
            name: lambda index, run=run, sets=sets: run(*sets[index % len(sets)], workspace)
            for name, run in runs.items()
        }
        times = harness.time_interleaved(variants, expected_us(problem))
        ratio = harness.ratios(times["f16"], times["f32"])
        yield {
            "gemm": "128x256x64 cooperative, 2x1",
            "m": m,
            "n": n,
            "k": k,
            **{f"{name}_ms": round(times[name].median, 5) for name in runs},
            "ratio": ratio["median"],
            "ratio_range": [ratio["min"], ratio["max"]],
            **{f"{name}_error": errors[name] for name in runs},
        }


# ---- The document ----------------------------------------------------------------------------------------------------


def by_name(result: Result) -> dict[str, Row]:
    """Return the rows of loops by name."""
    return {row["loop"]: row for row in result["rows"] if "loop" in row}


def text(result: Result) -> str:
    """Return the part of docs/types.md."""
    found = by_name(result)
    header = ("", "clocks for 10⁶ products", "TFLOP/s at the power limit", "MHz there", "TFLOP/s after a rest")
    parts = [
        f"{result['chip']}, {result['date']}. One instruction in a loop, on each multiprocessor:",
        table(
            header,
            [
                (f"`{name}`", row["clocks"], row["sustained_tflops"], row["sustained_mhz"], row["rested_tflops"])
                for name, row in found.items()
            ],
        ),
    ]
    ratios = [
        f"{title} {found[half]['sustained_tflops'] / found[single]['sustained_tflops']:.3f} at the power limit and "
        f"{found[half]['rested_tflops'] / found[single]['rested_tflops']:.3f} after a rest"
        for title, half, single in PAIRS
        if {half, single} <= set(found)
    ]
    if ratios:
        parts.append(f"The rate with sums in FP16, over that in FP32: {'; '.join(ratios)}.")
    members = [row for row in result["rows"] if "gemm" in row]
    if members:
        lines = [
            (
                f"{row['m']}×{row['n']}×{row['k']}",
                *(f"{row[f'{name}_ms'] * 1e3:.1f}" for name in ("f16", "f32")),
                f"{row['ratio']:.3f}",
                *(shown(row[f"{name}_error"]) for name in ("f16", "f32")),
            )
            for row in members
        ]
        header = ("M×N×K", "FP16 sums, µs", "FP32 sums, µs", "speed-up", "error, FP16 sums", "error, FP32 sums")
        parts += [f"The same GEMM of CUTLASS ({members[0]['gemm']}) with either:", table(header, lines)]
    return "\n\n".join(parts)


REPORT = Report(
    "benchmarks/bench_instructions.py",
    "benchmarks/results/instructions_h200.json",
    "docs/types.md",
    "instructions alone",
    text,
)


def main() -> None:
    """Compile, measure, print and write the JSON; or write the document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loops", nargs="*", default=None, help="only those whose names contain one of these")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each loop in a round, without rests")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-gemms", action="store_true", help="loops alone")
    parser.add_argument("--folder", type=Path, help="where libraries are kept that were compiled; by default nowhere")
    parser.add_argument("--build", action="store_true", help="compile into that folder, which needs no GPU, and end")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--write", action="store_true", help=f"write {REPORT.document} from {REPORT.result}, and end")
    args = parser.parse_args()
    if args.write:
        REPORT.write()
        return
    if args.build:
        if args.folder is None:
            parser.error("--build needs --folder: where libraries go")
        args.folder.mkdir(parents=True, exist_ok=True)
        for name in (LOOPS, GEMMS):
            print(compile_library(name, args.folder))
        return
    head, rows = harness.begin(), []
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        every = loops(compile_library(LOOPS, folder))
        wanted = [loop for loop in every if args.loops is None or any(part in loop.name for part in args.loops)]
        rows += rows_of_loops(wanted, args.seconds, args.rounds)
        if not args.no_gemms:
            rows += rows_of_gemms(compile_library(GEMMS, folder))
    for row in rows:
        print(json.dumps(row))
    result = {**head, "rows": rows}
    if args.out is not None:
        harness.save(args.out, result)
    print(text(result))


if __name__ == "__main__":
    main()
