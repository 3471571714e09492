"""Measures GEMMs with a 2:4 sparse weight against dense ones, cuSPARSELt and, if it is installed, torchao.

    python benchmarks/bench_sparse.py --out benchmarks/results/sparse_h200.json
    python benchmarks/bench_sparse.py --type e4m3 --epilogues rows --out /tmp/fp8.json
    python benchmarks/bench_sparse.py --sweep --rows 1 16 64 256 1024 8192 --out /tmp/sweep.json   # races of kernels

The epilogue is none ("plain"), bias + GELU + residual ("gelu"), or scales of a's rows and b's columns ("rows"). Peers:
``ours_dense``, this library's GEMM of the pruned weight, with the same epilogue; ``dense``, PyTorch's product of it,
without; ``cusparselt``, torch._cslt_sparse_mm with its search of algorithms, without; ``torchao``, of FP8, with scales
of rows and columns. torchao is not a part of this repository: put it on PYTHONPATH.

Each row: {"epilogue", "m", "n", "k", "ours_us", "tb_per_s", "tflops", "peers": {name: us}, "over": {name: their time
over ours}, "error", "absent": {name: why}, "kernel"}. Bytes are those of A, of the weight with its metadata, and of D.
"tflops" counts the products of the dense weight. The error is relative, against float64 of the pruned weight. With
--sweep, each row is {"m", "n", "k", "kernels": [[name, us], ...]}, the fastest first.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
from cutlass_ops.kinds.sm90 import sparse as of_sm90
from cutlass_ops.operand.call import device_of
from cutlass_ops.run import requests
from cutlass_ops.run.registry import Registry
from cutlass_ops.tuner.timing import expected_us, rotation
from cutlass_ops.tuner.trial import Trial

WEIGHTS = ((14336, 4096), (4096, 14336), (8192, 8192), (6144, 5120), (17408, 5120))
ROWS = (1, 4, 16, 64, 256, 1024, 4096, 8192)
TYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "e4m3": torch.float8_e4m3fn, "i8": torch.int8}
_SAMPLED = 64


@co.epilogue
def gelu(acc: co.types.Value, bias: co.Row, residual: co.Tile) -> co.types.Value:
    """D = gelu(acc + bias) + residual."""
    return co.e.gelu(acc + bias) + residual


@co.epilogue
def rows(acc: co.types.Value, scale_x: co.Col, scale_w: co.Row) -> co.types.Value:
    """D = acc * scale_x * scale_w."""
    return acc * scale_x * scale_w


EPILOGUES = {"plain": None, "gelu": gelu, "rows": rows}


@dataclass(frozen=True)
class Inputs:
    """One set of a case's tensors."""

    x: Tensor
    sparse: co.Sparse
    given: Mapping[str, Tensor]
    out: Tensor


def draw(m: int, n: int, k: int, dtype: torch.dtype, epilogue: str, device: str = "cuda") -> Inputs:
    """Draw one set of inputs."""

    def normal(*shape: int) -> Tensor:
        x = torch.randn(shape, device=device)
        return ((40 * x) if dtype is torch.int8 else x).to(dtype)

    bf16 = torch.bfloat16
    given = {
        "plain": {},
        "gelu": {"bias": torch.randn(n, device=device).to(bf16), "residual": torch.randn(m, n, device=device).to(bf16)},
        "rows": {"scale_x": torch.rand(m, device=device), "scale_w": torch.rand(n, device=device)},
    }[epilogue]
    out = torch.empty(m, n, device=device, dtype=bf16)
    return Inputs(normal(m, k), co.sparsify(normal(n, k).t()), given, out)


def options(x: Inputs, epilogue: str) -> dict[str, Any]:
    """Return a call's arguments after b."""
    return {} if epilogue == "plain" else {"epilogue": EPILOGUES[epilogue], **x.given}


def call(x: Inputs, epilogue: str) -> Tensor:
    """Call our kernel."""
    return co.gemm(x.x, x.sparse, out=x.out, **options(x, epilogue))


def requested(x: Inputs, epilogue: str) -> requests.Request:
    """Return the op that a user's call is, and its arguments."""
    return requests.requested(co.gemm, x.x, x.sparse, **options(x, epilogue))


# ---- Peers ----------------------------------------------------------------------------------------------------------


def product(x: Tensor, w: Tensor) -> Callable[[], Tensor]:
    """Return PyTorch's product of an x (M, K) and a dense w (K, N), contiguous along K."""
    if x.dtype is torch.int8:
        return lambda: torch._int_mm(x, w)
    if x.itemsize == 1:
        one = torch.ones((), device=x.device)
        return lambda: torch._scaled_mm(x, w, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
    return lambda: x @ w


def peers(sets: list[Inputs], epilogue: str) -> Mapping[str, Callable[[], Callable[[int], object]]]:
    """Return what makes each peer's call, by name: each is a function that returns it, or raises."""
    first, count = sets[0], len(sets)
    x, given = first.x, options(first, epilogue)

    def in_turn(calls: list[Callable[[], object]]) -> Callable[[int], object]:
        return lambda index: calls[index % count]()

    def dense_weights() -> list[Tensor]:
        return [each.sparse.to_dense().t().contiguous().t() for each in sets]

    def ours_dense() -> Callable[[int], object]:
        weights, out = dense_weights(), torch.empty_like(first.out)
        return lambda index: co.gemm(x, weights[index % count], out=out, **given)

    def dense() -> Callable[[int], object]:
        return in_turn([product(x, w) for w in dense_weights()])

    def cusparselt() -> Callable[[int], object]:
        compressed = [torch._cslt_compress(w.t().contiguous()) for w in dense_weights()]
        how: dict[str, Any] = {"transpose_result": True}
        if x.itemsize == 1:
            how["out_dtype"] = torch.bfloat16
        algorithm = torch._cslt_sparse_mm_search(compressed[0], x.t(), **how)
        return lambda index: torch._cslt_sparse_mm(compressed[index % count], x.t(), alg_id=algorithm, **how)

    def torchao() -> Callable[[int], object]:
        from torchao import ops  # type: ignore[import-not-found]

        weights = [ops.to_sparse_semi_structured_cutlass_sm9x_f8(w.t().contiguous()) for w in dense_weights()]
        of_x, of_w = torch.rand(x.shape[0], 1, device="cuda"), torch.rand(first.out.shape[1], 1, device="cuda")
        multiply = ops.rowwise_scaled_linear_sparse_cutlass_f8f8
        return lambda index: multiply(x, of_x, *weights[index % count], of_w, None, torch.bfloat16)

    return {"ours_dense": ours_dense, "dense": dense, "cusparselt": cusparselt, "torchao": torchao}


# ---- Cases ----------------------------------------------------------------------------------------------------------


def run_case(epilogue: str, m: int, n: int, k: int, dtype: torch.dtype, names: list[str]) -> dict[str, Any]:
    """Check and time one case. Raises AssertionError if our result is wrong."""
    problem, width = Problem(m, n, k), dtype.itemsize
    size = problem.bytes(width, width / 2 + 1 / 8, 2)
    sets = [draw(m, n, k, dtype, epilogue) for _ in range(rotation(size))]
    first = sets[0]
    chosen = torch.randint(m, (min(m, _SAMPLED),), device="cuda")
    wanted = first.x[chosen].double() @ first.sparse.to_dense().double()
    if epilogue == "gelu":
        bias, residual = (first.given[name].double() for name in ("bias", "residual"))
        wanted = torch.nn.functional.gelu(wanted + bias) + residual[chosen]
    if epilogue == "rows":
        wanted = wanted * first.given["scale_x"][chosen, None].double() * first.given["scale_w"].double()
    first.out.fill_(float("nan"))
    call(first, epilogue)
    error = float((first.out[chosen].double() - wanted).norm() / wanted.norm())
    assert error <= 0.01, f"the error is {error:.2g}"
    op, arguments, _ = requested(first, epilogue)
    kernel = op.plan(*arguments).spec.config.slug
    variants: dict[str, Callable[[int], object]] = {"ours": lambda index: call(sets[index % len(sets)], epilogue)}
    absent = {}
    for name, made in peers(sets, epilogue).items():
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
        "tflops": round(2 * m * n * k / us / 1e6, 1),
        "peers": {name: round(1e3 * each.median, 3) for name, each in times.items()},
        "over": {name: harness.ratios(mine, each)["median"] for name, each in times.items()},
        "error": round(error, 6),
        "absent": absent,
        "kernel": kernel,
    }


def sweep(epilogue: str, m: int, n: int, k: int, dtype: torch.dtype) -> dict[str, Any]:
    """Race the kernels that may serve a problem."""
    device: Device = device_of(torch.device("cuda", 0))
    op, arguments, _ = requested(draw(m, n, k, dtype, epilogue), epilogue)
    signature, problem = harness.asked(op, arguments, device)
    of = [c for c in of_sm90.untuned(signature) if c.threadblock.n < 4 * m or c.threadblock.n == 8]
    specs = {c: signature.spec(c, c.target_on(device.capability)) for c in of}
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
    parser.add_argument("--type", choices=TYPES, default="bf16")
    parser.add_argument("--epilogues", nargs="+", choices=EPILOGUES, default=["plain"])
    parser.add_argument("--peers", nargs="*", default=["ours_dense", "dense", "cusparselt", "torchao"])
    parser.add_argument("--sweep", action="store_true", help="race kernels instead")
    args = parser.parse_args()
    weights = [tuple(map(int, text.split("x"))) for text in args.weights]
    found, dtype = [], TYPES[args.type]
    for epilogue in args.epilogues:
        for n, k in weights:
            for m in args.rows:
                if args.sweep:
                    found.append(sweep(epilogue, m, n, k, dtype))
                    print(f"{m}x{n}x{k}: {found[-1]['kernels'][:4]}, wrong: {found[-1]['wrong']}", flush=True)
                else:
                    row = run_case(epilogue, m, n, k, dtype, args.peers)
                    found.append(row)
                    text = f"{row['ours_us']} us, {row['tb_per_s']} TB/s, {row['tflops']} TFLOP/s, {row['over']}"
                    print(f"{epilogue} {m}x{n}x{k}: {text}", flush=True)
                about = {"environment": harness.environment(), "type": args.type, "rows": found}
                args.out.write_text(json.dumps(about, indent=1))


if __name__ == "__main__":
    main()
