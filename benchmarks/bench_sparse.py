"""Measures GEMMs with a 2:4 sparse weight against dense ones, cuSPARSELt and, if it is installed, torchao.

    python benchmarks/bench_sparse.py --out benchmarks/results/sparse_h200.json
    python benchmarks/bench_sparse.py --type e4m3 --epilogues rows --out /tmp/fp8.json
    python benchmarks/bench_sparse.py --updates --out /tmp/updates.json
    python benchmarks/bench_sparse.py --sweep --weights 8192x8192 --rows 1024 8192 --out /tmp/sweep.json

The epilogue is none ("plain"), bias + GELU + residual ("gelu"), or scales of a's rows and b's columns ("rows"). Peers:
``ours_dense``, this library's GEMM of the pruned weight, with the same epilogue; ``dense``, PyTorch's product of it,
without; ``cusparselt``, torch._cslt_sparse_mm with its search of algorithms, without; ``torchao``, of FP8, with scales
of rows and columns. torchao is not a part of this repository: put it on PYTHONPATH.

Each row: {"epilogue", "m", "n", "k", "ours_us", "tb_per_s", "tflops", "peers": {name: us}, "over": {name: their time
over ours}, "error", "absent": {name: why}, "kernel"}. Bytes are those of A, of the weight with its metadata, and of D.
"tflops" counts the products of the dense weight. The error is relative, against float64 of the pruned weight. With
--updates, weights are updated in place, beside a copy of the dense weight, and each row is {"n", "k", "us": {name: us},
"tb_per_s"}. With --sweep, kernels race instead, those that the model expects to be fastest, and the orders of tiles of
the best. Each row is {"m", "n", "k", "kernels": [[name, us, order], ...]}, the fastest first.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import torch
from torch import Tensor

import cutlass_ops as co
from cutlass_ops.base.dtypes import DECLARED
from cutlass_ops.base.dtypes import dtype as named
from cutlass_ops.choose import policies, space
from cutlass_ops.choose.pool import Pool
from cutlass_ops.compilation import builder
from cutlass_ops.declare.compressing import CompressSpec
from cutlass_ops.declare.config import Config, Ordered
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.signature import OpSignature
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.operand.call import call_at, device_of, signature_of
from cutlass_ops.run import requests
from cutlass_ops.run.registry import Registry
from cutlass_ops.run.sparse import _SPARSE
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


@dataclass(frozen=True)
class Field:
    """The kernels that race for a problem."""

    epilogue: str
    signature: OpSignature
    problem: Problem
    specs: Mapping[Config, KernelSpec]


def field(epilogue: str, m: int, n: int, k: int, dtype: str, most: int) -> Field:
    """Return the kernels that the model expects to be fastest: of those that calls choose from, and of all."""
    problem, chosen, device = Problem(m, n, k), EPILOGUES[epilogue], device_of(torch.device("cuda", 0))
    graph = _SPARSE.graph if chosen is None else _SPARSE.graph.then(chosen.graph)
    signature = signature_of(call_at(graph, problem, dtype, "row", "col"), device)
    known = [c for c in policies.policy(signature, device).kernels if not c.few_rows]
    every = dict.fromkeys((*known, *space.ranked(signature, problem, most, device)))
    times = Pool.of(every, signature).times([problem], device)[0]
    fastest = [c for _, c in sorted(zip(times, every, strict=True), key=lambda x: x[0])]
    # Half are those that calls choose from, whatever the model thinks of the others.
    mine = [c for c in fastest if c in known][: most // 2]
    others = [c for c in fastest if c not in mine][: most - len(mine)]
    return Field(epilogue, signature, problem, {c: device.spec(signature, c) for c in (*mine, *others)})


def sweep(of: Field) -> dict[str, Any]:
    """Race kernels, then the orders of tiles of the fastest."""
    loaded = Registry.current().kernels(list(of.specs.values()))
    trial, wrong = Trial(of.signature, of.problem, torch.device("cuda", 0)), {}
    for config, kernel in zip(of.specs, loaded, strict=True):
        why = trial.admit(Ordered(config, config.usual_order(of.problem)), kernel)
        if why is not None:
            wrong[config.slug] = why
    measured, _ = trial.race(5, lambda: None)
    kernels = [[x.config.slug, round(x.microseconds, 2), str(x.order)] for x in measured]
    m, n, k = of.problem.extents
    return {"m": m, "n": n, "k": k, "epilogue": of.epilogue, "kernels": kernels, "wrong": wrong}


def run_update(n: int, k: int, dtype: torch.dtype) -> dict[str, Any]:
    """Time a weight's update in place, at its places and pruned anew, beside a copy of the dense weight."""
    weights = [draw(1, n, k, dtype, "plain") for _ in range(rotation(2 * n * k * dtype.itemsize))]
    dense = [x.sparse.to_dense().t().contiguous() for x in weights]
    copies = [torch.empty_like(w) for w in dense]
    for prune in (False, True):
        spec = CompressSpec(named(str(dtype), DECLARED), prune, "sm_90")
        Registry.current().kernel(spec)  # PyTorch would serve until it is there
    count = len(weights)
    variants: dict[str, Callable[[int], object]] = {
        "placed": lambda i: weights[i % count].sparse.update_(dense[i % count].t()),
        "pruned": lambda i: weights[i % count].sparse.update_(dense[i % count].t(), prune=True),
        "copy": lambda i: copies[i % count].copy_(dense[i % count]),
    }
    times = harness.time_interleaved(variants, 20.0)
    us = {name: round(1e3 * each.median, 3) for name, each in times.items()}
    moved = n * k * dtype.itemsize
    size = {"placed": 1.5 * moved + n * k / 8, "pruned": 1.5 * moved + n * k / 8, "copy": 2.0 * moved}
    return {"n": n, "k": k, "us": us, "tb_per_s": {name: round(size[name] / us[name] / 1e6, 3) for name in us}}


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
    parser.add_argument("--most", type=int, default=24, help="kernels of a race")
    parser.add_argument("--updates", action="store_true", help="time updates of weights instead")
    args = parser.parse_args()
    weights = [tuple(map(int, text.split("x"))) for text in args.weights]
    if args.updates:
        updates = [run_update(n, k, TYPES[args.type]) for n, k in weights]
        print(*updates, sep="\n", flush=True)
        about = {"environment": harness.environment(), "type": args.type, "rows": updates}
        args.out.write_text(json.dumps(about, indent=1))
        return
    cases = [(epilogue, m, *weight) for epilogue in args.epilogues for weight in weights for m in args.rows]
    jobs: list[Callable[[], dict[str, Any]]]
    if args.sweep:
        fields = [field(*case, args.type, args.most) for case in cases]
        builder.build_many(list(dict.fromkeys(spec for each in fields for spec in each.specs.values())))
        jobs = [functools.partial(sweep, each) for each in fields]
    else:
        jobs = [functools.partial(run_case, *case, TYPES[args.type], args.peers) for case in cases]
    found: list[dict[str, Any]] = []
    for (epilogue, m, n, k), job in zip(cases, jobs, strict=True):
        row = job()
        found.append(row)
        if args.sweep:
            said = f"{row['kernels'][:4]}, wrong: {row['wrong']}"
        else:
            said = f"{row['ours_us']} us, {row['tb_per_s']} TB/s, {row['tflops']} TFLOP/s, {row['over']}"
        print(f"{epilogue} {m}x{n}x{k}: {said}", flush=True)
        about = {"environment": harness.environment(), "type": args.type, "rows": found}
        args.out.write_text(json.dumps(about, indent=1))


if __name__ == "__main__":
    main()
