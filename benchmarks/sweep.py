"""Times a pool of Sm90 configurations over shapes: raw data for the cost model.

    python benchmarks/sweep.py --pool decode --out benchmarks/results/sweep_decode_h100.json

Bias + ReLU, BF16, A row-major and B column-major. Each row: {"m", "n", "k", "peer_ms", "times": {config: ms}}, where a
config reads "<slug>|<raster>|<swizzle>" and the peer is cuBLASLt's fused bias + ReLU.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import bench_gemm
import harness
import shapes
import torch
from torch import Tensor

from cutlass_ops.artifacts.loader import LoadedKernel
from cutlass_ops.declare.config import ClusterShape, ThreadblockShape
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.kinds.sm90.config import Schedule, Sm90Config
from cutlass_ops.run import named
from cutlass_ops.run.registry import Registry
from cutlass_ops.tuner.timing import expected_us

RASTERS = {"along_m": 1, "along_n": 2}


def config(m: int, n: int, k: int, schedule: Schedule, cluster: str = "1x1", swap_ab: bool = False) -> Sm90Config:
    """Return a configuration from its usual spelling."""
    along_m, along_n = map(int, cluster.split("x"))
    return Sm90Config(ThreadblockShape(m, n, k), ClusterShape(along_m, along_n), schedule=schedule, swap_ab=swap_ab)


def decode_pool() -> list[Sm90Config]:
    """Up to 128 rows: swapped with a narrow side for the rows, or 64 and 128 rows with an even split of N."""
    alone: Schedule = "warp_specialized"
    swapped = [(16, 64), (16, 128), (16, 256), (32, 64), (32, 256), (64, 64), (64, 128), (128, 64)]
    return [
        *(config(64, n, k, alone, c, True) for n, k in swapped for c in ("1x1", "2x1")),
        *(config(64, 64, k, alone, "1x2", True) for k in (64, 128)),
        *(config(64, n, k, alone, "4x1", True) for n, k in ((16, 64), (32, 64), (64, 64))),
        *(config(128, n, 64, alone, "1x1", True) for n in (16, 32, 64)),
        *(config(64, n, 64, alone, "1x1") for n in (48, 64, 96, 112, 128, 160, 176, 192, 208, 224, 256)),
        *(config(64, n, 64, alone, "1x2") for n in (48, 64, 96, 112, 128, 224)),
        *(config(64, n, 64, alone, "1x4") for n in (48, 64, 96)),
        *(config(64, n, 128, alone, "1x1") for n in (48, 64, 96, 112, 128)),
        *(config(64, n, 64, alone, "2x1") for n in (48, 64, 96, 112, 128)),
        *(config(128, n, 64, alone, "1x1") for n in (48, 64, 96, 112, 128, 176, 208, 224)),
        *(config(128, n, 64, alone, "1x2") for n in (48, 64, 96, 112)),
    ]


def short_pool() -> list[Sm90Config]:
    """From 128 rows: one wave of tiles or many."""
    return [
        *(config(64, 128, k, "warp_specialized", c) for k in (64, 128) for c in ("1x1", "2x1")),
        *(config(128, 64, k, "warp_specialized", "1x2") for k in (64, 128)),
        *(config(128, n, 64, "warp_specialized", "2x1") for n in (96, 128)),
        *(config(64, n, 64, "pingpong", "2x1") for n in (128, 192, 256)),
        *(config(128, n, 64, "pingpong", "2x1") for n in (96, 112, 128, 144, 160, 176, 192, 208)),
        *(config(128, n, 64, "pingpong", "1x2") for n in (128, 192)),
        *(config(128, n, 64, "cooperative", "2x1") for n in (128, 192, 224, 256)),
        *(config(128, n, 64, "cooperative", "1x2") for n in (128, 256)),
        *(config(256, n, 64, "cooperative", "2x1") for n in (96, 112, 128, 144, 160, 176, 192)),
        *(config(256, n, 64, "cooperative", "1x2") for n in (128, 192)),
        config(128, 128, 128, "cooperative", "2x1"),
    ]


SHORT = ((1024, 1024, 1024), (1536, 1536, 1536), (2048, 2048, 2048), (512, 2048, 2048), (256, 8192, 1024))
POOLS: dict[str, Callable[[], list[Sm90Config]]] = {"decode": decode_pool, "short": short_pool}
SHAPES: dict[str, Sequence[tuple[int, int, int]]] = {
    "decode": [(m, n, k) for n, k in shapes.WEIGHTS for m in (1, 16, 64, 128)],
    "short": [*SHORT, (8192, 8192, 8192)]
    + [(m, n, k) for n, k in shapes.WEIGHTS for m in (256, 512, 1024, 2048, 4096)],
}


def spec_of(config: Sm90Config) -> KernelSpec:
    """Return the kernel of a configuration."""
    return KernelSpec(a="bf16.row", b="bf16.col", d="bf16.row", epilogue=named.gemm_bias_relu.graph, config=config)


# Runs a kernel over a set of inputs and returns its status.
Launch = Callable[[bench_gemm.Inputs], int]


def launching(kernel: LoadedKernel, raster: int, swizzle: int, workspace: Tensor | None = None) -> Launch:
    """Return a function that launches a kernel with a tile order."""
    return lambda x: kernel.launch(x.a, x.b, x.out, x.bias, raster, swizzle, workspace)


def measure(
    problem: tuple[int, int, int], launches: Mapping[str, Launch], expected: float, rounds: int
) -> tuple[float, dict[str, float]]:
    """Check kernels of bias + ReLU in BF16 at a problem, then time them against cuBLASLt.

    Parameters
    ----------
    problem : tuple of int
        M, N and K.
    launches : mapping of str to callable
        The kernels by name.
    expected : float
        Rough time of one call in microseconds.
    rounds : int
        Number of timings of each.

    Returns
    -------
    float, dict of str to float
        Milliseconds of cuBLASLt's fused bias + ReLU, and of each kernel.

    Raises
    ------
    AssertionError
        If a kernel refuses the problem or is wrong.
    """
    sets = bench_gemm.make_inputs(*problem, torch.bfloat16)
    exact = torch.relu(sets[0].a.double() @ sets[0].b.double() + sets[0].bias.double())
    for name, launch in launches.items():
        sets[0].out.fill_(float("nan"))
        status = launch(sets[0])
        error = float((sets[0].out.double() - exact).norm() / exact.norm())
        assert status == 0, f"{name} refused {problem}: {status}"
        assert error < 4e-3, f"{name} is wrong at {problem}: {error}"

    def peer(x: bench_gemm.Inputs) -> object:
        return torch._addmm_activation(x.bias, x.a, x.b, use_gelu=False)

    def rotating(run: Callable[[bench_gemm.Inputs], object]) -> Callable[[int], object]:
        return lambda index: run(sets[index % len(sets)])

    variants = {name: rotating(run) for name, run in {"peer": peer, **launches}.items()}
    timed = harness.time_interleaved(variants, expected, rounds=rounds)
    times = {name: round(t.median, 5) for name, t in timed.items()}
    return times.pop("peer"), times


def main() -> None:
    """Build the pool, check each kernel, time it at each shape and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pool", choices=list(POOLS), required=True)
    parser.add_argument("--swizzles", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--limit", type=float, default=1e9, help="stop after this many seconds")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    head, begin = harness.begin(), time.monotonic()
    pool = POOLS[args.pool]()
    kernels = dict(zip(pool, Registry.current().kernels([spec_of(c) for c in pool]), strict=True))
    print(f"{len(kernels)} kernels after {time.monotonic() - begin:.0f} s", flush=True)
    rows = []
    for m, n, k in SHAPES[args.pool]:
        if time.monotonic() - begin > args.limit:
            print(f"stopped at the limit before {m}x{n}x{k}")
            break
        launches: dict[str, Launch] = {}
        for configuration, kernel in kernels.items():
            for raster, number in RASTERS.items():
                for swizzle in args.swizzles:
                    if configuration.schedule == "warp_specialized" and (number, swizzle) != (1, 1):
                        continue  # the grid itself is the order
                    name = f"{configuration.slug}|{raster}|{swizzle}"
                    launches[name] = launching(kernel, number, swizzle)
        peer_ms, times = measure((m, n, k), launches, expected_us(Problem(m, n, k)), rounds=9)
        best = sorted(times, key=lambda name: times[name])
        kinds = list(dict.fromkeys(name.split("|")[0] for name in best))[:5]
        rows.append({"m": m, "n": n, "k": k, "peer_ms": peer_ms, "times": times})
        firsts = [next(b for b in best if b.split("|")[0] == kind) for kind in kinds]
        shown = " ".join(f"{b} {times[b] * 1e3:.1f}" for b in firsts)
        print(f"{m}x{n}x{k}: peer {peer_ms * 1e3:.1f} us, {shown}", flush=True)
        harness.save(args.out, {**head, "pool": args.pool, "rows": rows})


if __name__ == "__main__":
    main()
