"""Measures GEMMs with a packed weight against BF16 ones, PyTorch's INT4 product and, if it is installed, Humming.

    python benchmarks/bench_packed.py --out benchmarks/results/packed_h200.json
    python benchmarks/bench_packed.py --rows 1 16 --weights 8192x8192 --numbers uint4 --group 32 --out /tmp/few.json
    python benchmarks/bench_packed.py --sweep --rows 1 8 16 64 256 4096 --out /tmp/sweep.json   # races of kernels

Operands are BF16. The epilogue is none ("plain"), bias + SiLU ("silu"), or SwiGLU of two packed weights ("swiglu"), to
be compared with twice the plain time. Peers: ``ours_bf16``, this library's GEMM of the dequantised weights, with the
same epilogue; without, for one weight: ``cublas``, torch.mm of it; ``int4pack``, torch._weight_int4pack_mm, up to 64
rows; ``humming``, a HummingLayer. Humming is not a part of this
repository: put it on PYTHONPATH. It compiles a layer in about ten seconds.

Each row: {"epilogue", "m", "n", "k", "ours_us", "tb_per_s", "tflops", "peers": {name: us}, "over": {name: their time
over ours}, "error", "absent": {name: why}, "kernel"}. Bytes are those of A, of the weight with its scales, and of D.
The error is relative, against float64 of the dequantised weight. With --sweep, each row is {"m", "n", "k", "kernels":
[[name, us], ...]}, the fastest first.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import harness
import torch
from torch import Tensor

import cutlass_ops as co
from cutlass_ops.declare.config import Ordered
from cutlass_ops.declare.device import Device
from cutlass_ops.declare.problem import Problem
from cutlass_ops.kinds.legality import is_legal
from cutlass_ops.kinds.packed.kind import candidates
from cutlass_ops.kinds.sm90 import packed as of_sm90
from cutlass_ops.operand.call import device_of
from cutlass_ops.run import requests
from cutlass_ops.run.registry import Registry
from cutlass_ops.tuner.timing import expected_us, rotation
from cutlass_ops.tuner.trial import Trial

WEIGHTS = ((8192, 8192), (28672, 4096), (4096, 14336), (6144, 5120), (17408, 5120))
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_SAMPLED = 64
_INT4PACK_ROWS = 64
_SWEEP_ROWS = 16  # up to which kernels for few rows take part


@co.epilogue
def silu(acc: co.types.Value, bias: co.Row) -> co.types.Value:
    """D = silu(acc + bias)."""
    return co.e.silu(acc + bias)


EPILOGUES = {"plain": None, "silu": silu, "swiglu": None}


@dataclass(frozen=True)
class Inputs:
    """One set of a case's tensors."""

    x: Tensor
    packed: co.Packed
    up: co.Packed | None  # of a gate, whose other weight is `packed`
    bias: Tensor
    out: Tensor

    @property
    def given(self) -> dict[str, Tensor]:
        """The epilogue's inputs."""
        return {"bias": self.bias}


def draw(
    m: int, n: int, k: int, numbers: str, group: int | None, epilogue: str = "plain", device: str = "cuda"
) -> Inputs:
    """Draw one set of inputs."""

    def weight() -> co.Packed:
        w = (torch.randn(k, n, device=device) * k**-0.5).bfloat16()
        return co.Packed.from_dense(w, group=group, symmetric=numbers == "int4")

    x, bias = torch.randn(m, k, device=device).bfloat16(), torch.randn(n, device=device).bfloat16()
    out = torch.empty(m, n, device=device, dtype=torch.bfloat16)
    return Inputs(x, weight(), weight() if epilogue == "swiglu" else None, bias, out)


def call(x: Inputs, epilogue: str) -> Tensor:
    """Call our kernel."""
    if x.up is not None:
        return co.gemm_swiglu(x.x, x.packed, x.up, out=x.out)
    if epilogue == "plain":
        return co.gemm(x.x, x.packed, out=x.out)
    return co.gemm(x.x, x.packed, epilogue=EPILOGUES[epilogue], out=x.out, **x.given)


def requested(x: Inputs, epilogue: str) -> requests.Request:
    """Return the op that a user's call is, and its arguments; of a gate, a plain one of the same extents."""
    if epilogue != "silu":
        return requests.requested(co.gemm, x.x, x.packed)
    return requests.requested(co.gemm, x.x, x.packed, epilogue=EPILOGUES[epilogue], **x.given)


# ---- Peers ----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=8)
def humming(n: int, k: int, group: int) -> Any:
    """Return a layer of Humming. Raises ImportError if it is not installed."""
    from humming import HummingLayer  # type: ignore[import-not-found]

    weight = {"dtype": "int4", "group_size": group}
    layer = HummingLayer(shape_n=n, shape_k=k, weight_config=weight, torch_dtype=torch.bfloat16).cuda()
    layer.load_from_unquantized((torch.randn(n, k, device="cuda") * k**-0.5).bfloat16())
    layer.transform()
    return layer


def peers(sets: list[Inputs], epilogue: str, group: int | None) -> Mapping[str, Callable[[], Callable[[int], object]]]:
    """Return what makes each peer's call, by name: each is a function that returns it, or raises."""
    m, k = sets[0].x.shape
    n = sets[0].out.shape[1]
    # As many weights as L2 does not hold, like ours.
    count = rotation(Problem(m, n, k).bytes(2, 2, 2))

    def bf16() -> Callable[[int], object]:
        weights = [sets[i % len(sets)].packed.dequantize().t().contiguous().t() for i in range(count)]
        given = {"epilogue": EPILOGUES[epilogue], **sets[0].given} if epilogue == "silu" else {}
        x, out = sets[0].x, torch.empty_like(sets[0].out)
        if epilogue == "swiglu":
            return lambda index: co.gemm_swiglu(x, weights[index % count], weights[(index + 1) % count], out=out)
        return lambda index: co.gemm(x, weights[index % count], out=out, **given)

    def cublas() -> Callable[[int], object]:
        weights = [sets[i % len(sets)].packed.dequantize().t().contiguous().t() for i in range(count)]
        x, out = sets[0].x, torch.empty_like(sets[0].out)
        return lambda index: torch.mm(x, weights[index % count], out=out)

    def int4pack() -> Callable[[int], object]:
        if m > _INT4PACK_ROWS or group not in (32, 64, 128, 256):
            raise ValueError(f"up to {_INT4PACK_ROWS} rows, in groups of 32 to 256")
        each = []
        for _ in sets:
            bytes_ = torch.randint(0, 256, (n, k // 2), device="cuda", dtype=torch.uint8)
            values = torch._convert_weight_to_int4pack(bytes_, 8)
            each.append((values, torch.rand(k // group, n, 2, device="cuda").bfloat16()))
        x = sets[0].x
        return lambda index: torch._weight_int4pack_mm(x, each[index % len(each)][0], group, each[index % len(each)][1])

    def by_humming() -> Callable[[int], object]:
        layer, x = humming(n, k, group or k), sets[0].x
        return lambda index: layer(x)  # one weight: L2 may hold a part of it

    return {"ours_bf16": bf16, "cublas": cublas, "int4pack": int4pack, "humming": by_humming}


# ---- Cases ----------------------------------------------------------------------------------------------------------


def run_case(
    epilogue: str, m: int, n: int, k: int, numbers: str, group: int | None, names: list[str]
) -> dict[str, Any]:
    """Check and time one case. Raises AssertionError if our result is wrong."""
    gates, of_b = 2 if epilogue == "swiglu" else 1, 0.5 + (2 if numbers == "int4" else 4) / (group or k)
    problem = Problem(m, n, k)
    size = problem.bytes(2, gates * of_b, 2)
    sets = [draw(m, n, k, numbers, group, epilogue) for _ in range(rotation(size))]
    first = sets[0]
    rows = torch.randint(m, (min(m, _SAMPLED),), device="cuda")
    wanted = first.x[rows].double() @ first.packed.dequantize(torch.float64)
    if epilogue == "silu":
        wanted = torch.nn.functional.silu(wanted + first.bias.double())
    if first.up is not None:
        wanted = torch.nn.functional.silu(wanted) * (first.x[rows].double() @ first.up.dequantize(torch.float64))
    first.out.fill_(float("nan"))
    call(first, epilogue)
    error = float((first.out[rows].double() - wanted).norm() / wanted.norm())
    assert error <= 0.01, f"the error is {error:.2g}"
    op, arguments, _ = requested(first, epilogue)
    kernel = op.plan(*arguments).spec.config.slug
    variants: dict[str, Callable[[int], object]] = {"ours": lambda index: call(sets[index % len(sets)], epilogue)}
    absent = {}
    for name, made in peers(sets, epilogue, group).items():
        if name in names:
            try:
                variants[name] = made()
                variants[name](0)
            except (RuntimeError, ValueError, ImportError, TypeError, AttributeError) as reason:
                variants.pop(name, None)
                absent[name] = str(reason).partition("\n")[0][:200]
    times = harness.time_interleaved(variants, expected_us(problem, 1.0))
    mine = times.pop("ours")
    us = 1e3 * mine.median
    return {
        "epilogue": epilogue,
        "m": m,
        "n": n,
        "k": k,
        "ours_us": round(us, 3),
        "tb_per_s": round(size / us / 1e6, 3),
        "tflops": round(2 * gates * m * n * k / us / 1e6, 1),
        "peers": {name: round(1e3 * each.median, 3) for name, each in times.items()},
        "over": {name: harness.ratios(mine, each)["median"] for name, each in times.items()},
        "error": round(error, 6),
        "absent": absent,
        "kernel": kernel,
    }


def sweep(epilogue: str, m: int, n: int, k: int, numbers: str, group: int | None) -> dict[str, Any]:
    """Race the kernels that may serve a problem."""
    device: Device = device_of(torch.device("cuda", 0))
    op, arguments, _ = requested(draw(m, n, k, numbers, group), epilogue)
    signature, problem = harness.asked(op, arguments, device)
    few = [c for c in candidates() if c.rows >= min(m, 8) and (c.rows == 8 or m > 8)] if m <= _SWEEP_ROWS else []
    many = [c for c in of_sm90.untuned(signature) if c.threadblock.n < 4 * m or c.threadblock.n == 8]
    specs = {c: signature.spec(c, c.target_on(device.capability)) for c in (*few, *many)}
    specs = {c: spec for c, spec in specs.items() if is_legal(spec)}
    loaded = Registry.current().kernels(list(specs.values()))  # compiled in parallel
    trial, wrong = Trial(signature, problem, torch.device("cuda", 0)), {}
    for config, kernel in zip(specs, loaded, strict=True):
        why = trial.admit(Ordered(config, config.usual_order(problem)), kernel)
        if why is not None:
            wrong[config.slug] = why
    measured, _ = trial.race(5, lambda: None)
    kernels = [[x.config.slug, round(x.microseconds, 2), str(x.order)] for x in measured]
    return {"m": m, "n": n, "k": k, "epilogue": epilogue, "kernels": kernels, "wrong": wrong}


def main() -> None:
    """Run the grid and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--weights", nargs="+", default=[f"{n}x{k}" for n, k in WEIGHTS], help="NxK")
    parser.add_argument("--numbers", choices=("int4", "uint4"), default="int4")
    parser.add_argument("--group", type=int, default=128, help="0 for all of K")
    parser.add_argument("--epilogues", nargs="+", choices=EPILOGUES, default=["plain"])
    parser.add_argument("--peers", nargs="*", default=["ours_bf16", "cublas", "int4pack", "humming"])
    parser.add_argument("--sweep", action="store_true", help="race kernels instead")
    args = parser.parse_args()
    weights = [tuple(map(int, text.split("x"))) for text in args.weights]
    rows, group = [], args.group or None
    for epilogue in args.epilogues:
        for n, k in weights:
            for m in args.rows:
                if args.sweep:
                    rows.append(sweep(epilogue, m, n, k, args.numbers, group))
                    best = rows[-1]["kernels"][:4]
                    print(f"{m}x{n}x{k}: {best}, wrong: {rows[-1]['wrong']}", flush=True)
                else:
                    rows.append(run_case(epilogue, m, n, k, args.numbers, group, args.peers))
                    row = rows[-1]
                    print(
                        f"{epilogue} {m}x{n}x{k}: {row['ours_us']} us, {row['tb_per_s']} TB/s, {row['over']}",
                        flush=True,
                    )
                about = {
                    "environment": harness.environment(),
                    "numbers": args.numbers,
                    "group": args.group,
                    "rows": rows,
                }
                args.out.write_text(json.dumps(about, indent=1))


if __name__ == "__main__":
    main()
