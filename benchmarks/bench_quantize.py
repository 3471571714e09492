"""Measures dynamic scales: SwiGLU quantised in its GEMM's epilogue, and the kernel that quantises a tensor.

    python benchmarks/bench_quantize.py --out benchmarks/results/quantize_h100.json
    python benchmarks/bench_quantize.py --parts gate --rows 1024 4096 --skip scaled_mm --out /tmp/gate.json
    python benchmarks/bench_quantize.py --resume /tmp/gate.json --out /tmp/all.json    # only missing rows

A row of the part "gate": {"part", "math", "m", "n", "k", "error", "kernel", "ms": {name: ms}, "over_ours": {name:
ratio, range}}. Operands are in FP8, with a scale for each row of A and each column of B. D has N columns, in FP8 with a
scale for each 1x128. All variants add products up in one way, `fast` or `promoted`. They are:

- "gemm": this library's FP8 GEMM of the same M, 2 N and K, with D in BF16: what the multiplication alone takes.
- "separate": this library's SwiGLU in BF16, then its kernel that quantises a tensor.
- "scaled_mm": torch._scaled_mm of both weights at once, then SwiGLU and quantisation by torch.compile.
- with --kernels, as many others of this library's kernels for the same, by their names: the best of each schedule that
  was not chosen, then the next ones, as the choice ranks them.

Errors are those of sampled rows over the error of quantising the exact values.

A row of the part "tensor": {"part", "dtype", "m", "n", "block", "ms", "over_ours", "gb_per_s", "of_copy"}. "copy"
copies as many bytes as are read and written, and "compile" is the same quantisation by torch.compile. `of_copy` is the
copy's time over ours.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import harness
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

import cutlass_ops as co
from cutlass_ops.base.mma import BLOCK_K, Math
from cutlass_ops.choose import policies
from cutlass_ops.compilation.builder import build_many
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.epilogue.composed import quantized_swiglu
from cutlass_ops.operand import reference
from cutlass_ops.operand.call import device_of
from cutlass_ops.run import ops, requests
from cutlass_ops.tuner.timing import expected_us, rotation

PARTS = ("gate", "tensor")
MATHS: tuple[Math, ...] = ("fast", "promoted")
PEERS = ("gemm", "separate", "scaled_mm")
ROWS = (16, 64, 256, 1024, 2048, 4096, 8192)
GATES = ((14336, 4096), (28672, 8192))
# Rows, columns, dtype, and columns that share a scale: inputs of projections, and one row of each model's width.
TENSORS = (
    *product((16, 256, 1024, 4096, 16384), (4096, 14336), ("bf16",), (BLOCK_K,)),
    *product((4096,), (4096, 14336), ("bf16",), (None,)),
    *product((4096,), (4096,), ("f16", "f32"), (BLOCK_K,)),
)
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
E4M3 = torch.float8_e4m3fn
_LARGEST = torch.finfo(E4M3).max
_SAMPLED = 64
_BYTES_PER_US = 2.8e6
# Of the values' own rounding, how much more the kernel's may be: sums of FP8 products are not exact.
_ALLOWED = 1.1


@co.epilogue
def swiglu_alone(acc, up: co.Product, scale_x: co.Col, scale_gate: co.Row, scale_up: co.Row):  # noqa: ANN001, ANN201
    """D = silu(gate) * up in BF16."""
    return co.e.silu(acc * scale_x * scale_gate) * (up * scale_x * scale_up)


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x in FP8 and a scale for each 1x128, by operations that torch.compile fuses; N is a multiple of 128."""
    blocks = x.float().view(x.shape[0], -1, BLOCK_K)
    most = blocks.abs().amax(2).clamp(min=2.0**-110)
    narrow = (blocks * (_LARGEST / most)[..., None]).clamp(-_LARGEST, _LARGEST).to(E4M3)
    return narrow.view(x.shape), most / _LARGEST


def quantised_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x in FP8 and a scale for each row."""
    most = x.float().abs().amax(1).clamp(min=2.0**-110)
    return (x.float() * (_LARGEST / most)[:, None]).clamp(-_LARGEST, _LARGEST).to(E4M3), most / _LARGEST


def gated(both: Tensor) -> tuple[Tensor, Tensor]:
    """Return SwiGLU of both products in FP8, and its scales."""
    gate, up = both.chunk(2, dim=-1)
    return quantised(F.silu(gate.float()) * up.float())


class Gate:
    """One set of inputs: x (M, K) and both weights (2 N, K), the gate's first, in FP8 with a scale for each row."""

    def __init__(self, math: Math, m: int, n: int, k: int, device: str = "cuda") -> None:
        self.math: Math = math
        self.x, self.scale_x = co.Scaled.quantize(torch.randn(m, k, device=device), "e4m3", block=None)
        self.w, self.scale_w = co.Scaled.quantize(torch.randn(2 * n, k, device=device) / k**0.5, "e4m3", block=None)
        self.n = n
        self.out = {
            "d": torch.empty(m, n, dtype=E4M3, device=device),
            "d_scale": torch.empty(-(-n // BLOCK_K), m, device=device).t(),
        }
        self.products = torch.empty(m, 2 * n, dtype=torch.bfloat16, device=device)

    def inputs(self) -> dict[str, Tensor]:
        """Return what the epilogues take."""
        scale_gate, scale_up = self.scale_w.chunk(2)
        return {"up": self.w[self.n :].t(), "scale_x": self.scale_x, "scale_gate": scale_gate, "scale_up": scale_up}

    def ours(self) -> Any:
        """Quantise in the epilogue."""
        gate, how = self.w[: self.n].t(), self.math
        return co.gemm(self.x, gate, epilogue=quantized_swiglu, out=self.out, math=how, **self.inputs())

    def gemm(self) -> Any:
        """Multiply alone."""
        return co.gemm(
            co.Scaled(self.x, self.scale_x), co.Scaled(self.w.t(), self.scale_w), out=self.products, math=self.math
        )

    def separate(self) -> Any:
        """Quantise by a kernel of its own."""
        h = co.gemm(self.x, self.w[: self.n].t(), epilogue=swiglu_alone, math=self.math, **self.inputs())
        return co.Scaled.quantize(h, "e4m3", out=self.out)

    def scaled_mm(self, then: Any) -> Any:
        """Multiply by PyTorch, and go on with a compiled function."""
        scale_x, scale_w = self.scale_x[:, None], self.scale_w[None]
        fast = self.math == "fast"
        found = torch._scaled_mm(self.x, self.w.t(), scale_x, scale_w, out_dtype=torch.bfloat16, use_fast_accum=fast)
        return then(found)

    def exact(self, rows: Tensor) -> Tensor:
        """Return some rows of SwiGLU in float64."""
        x = self.x[rows].double() * self.scale_x[rows, None].double()
        gate, up = (x @ (self.w.double() * self.scale_w[:, None].double()).t()).chunk(2, dim=-1)
        return F.silu(gate) * up


def error(d: Tensor, scale: Tensor, exact: Tensor) -> float:
    """Return the relative error of a result over that of quantising the exact values.

    Raises
    ------
    AssertionError
        If it is larger than sums of FP8 products explain, or an element was not written.
    """

    def of(d: Tensor, scale: Tensor) -> float:
        spread = scale.double().repeat_interleave(BLOCK_K, 1)[:, : exact.shape[1]]
        return float((d.double() * spread - exact).norm() / exact.norm())

    quotient, scales = reference.quantized(exact, E4M3)
    ratio = of(d, scale) / of(reference.rounded(quotient, E4M3), scales)
    assert ratio <= _ALLOWED, f"error is {ratio:.3f} times that of quantising the exact values"
    return ratio


def further(x: Gate, count: int) -> list[KernelSpec]:
    """Return other kernels for the same, the best of each schedule first."""
    device = device_of(torch.device("cuda", 0))
    signature, problem = harness.asked(
        ops.op(quantized_swiglu).in_math(x.math), (x.x, x.w[: x.n].t(), *x.inputs().values()), device
    )
    chosen, *others = [each.ordered.config for each in policies.policy(signature, device).every(problem)]
    best = {c.schedule: c for c in reversed(others)}
    ranked = dict.fromkeys([*(c for s, c in best.items() if s != chosen.schedule), *others])
    return [device.spec(signature, config) for config in list(ranked)[:count]]


def run_gate(math: Math, m: int, n: int, k: int, peers: list[str], kernels: int) -> dict[str, Any]:
    """Check and time one problem."""
    problem = Problem(m, 2 * n, k)
    sets = [Gate(math, m, n, k) for _ in range(rotation(problem.bytes(1, 1, 2)))]
    first = sets[0]
    for each in first.out.values():
        each.fill_(float("nan"))
    found, rows = first.ours(), torch.randint(m, (_SAMPLED,), device="cuda")
    ratio = error(found.d[rows], found.d_scale[rows], first.exact(rows))
    then = harness.compiled(gated) if "scaled_mm" in peers else gated
    known = {
        "ours": lambda i: sets[i % len(sets)].ours(),
        "gemm": lambda i: sets[i % len(sets)].gemm(),
        "separate": lambda i: sets[i % len(sets)].separate(),
        "scaled_mm": lambda i: sets[i % len(sets)].scaled_mm(then),
    }
    for spec in further(first, kernels):
        kernel, name = co.build(spec), spec.config.slug
        found = kernel(first.x, first.w[:n].t(), **first.inputs(), out=first.out)
        error(found.d[rows], found.d_scale[rows], first.exact(rows))

        def other(index: int, kernel: Any = kernel) -> object:
            x = sets[index % len(sets)]
            return kernel(x.x, x.w[:n].t(), **x.inputs(), out=x.out)

        known[name] = other
    timed = {name: run for name, run in known.items() if name not in PEERS or name in peers}
    decision = ops.op(quantized_swiglu).in_math(math).plan(first.x, first.w[:n].t(), **first.inputs())
    return {
        "part": "gate", "math": math, "m": m, "n": n, "k": k,
        "error": round(ratio, 4),
        "kernel": decision.spec.config.slug,
        **harness.compare(timed, expected_us(problem, 1)),
    }  # fmt: skip


def build_ahead(gates: Iterable[Sequence[Any]], kernels: int) -> None:
    """Compile what the gates need, as many kernels at a time as there are processors."""
    calls, others = [], {}
    for gate in gates:
        x = Gate(*gate, "meta")
        others |= dict.fromkeys(further(x, kernels))
        of_gate = requests.requested(co.gemm, co.Scaled(x.x, x.scale_x), co.Scaled(x.w.t(), x.scale_w), math=x.math)
        calls.append((of_gate.op, of_gate.arguments))
        calls += [
            (ops.op(epilogue).in_math(x.math), (x.x, x.w[: x.n].t(), *x.inputs().values()))
            for epilogue in (quantized_swiglu, swiglu_alone)
        ]
    harness.build_ahead(calls)
    build_many(list(others))


def run_tensor(m: int, n: int, dtype: str, block: int | None) -> dict[str, Any]:
    """Check and time one tensor."""
    of_x = DTYPES[dtype].itemsize
    scales = m if block is None else m * -(-n // block)
    moved = m * n * (of_x + 1) + 4 * scales
    count = rotation(moved)
    sets = []
    for _ in range(count):
        shape = (m,) if block is None else (-(-n // block), m)
        scale = torch.empty(shape, device="cuda")
        out = {"d": torch.empty(m, n, dtype=E4M3, device="cuda"), "d_scale": scale if block is None else scale.t()}
        source = torch.randn(m, n, device="cuda").to(DTYPES[dtype])
        half = torch.empty(-(-moved // 2), dtype=torch.uint8, device="cuda")
        sets.append((source, out, half, torch.empty_like(half)))
    x, out, *_ = sets[0]
    for each in out.values():
        each.fill_(float("nan"))
    found = co.Scaled.quantize(x, "e4m3", block, out=out)
    quotient, wanted = reference.quantized(x.float(), E4M3, block)
    assert torch.equal(found.scale.view(m, -1) if block is None else found.scale, wanted)
    assert torch.equal(found.values.view(torch.uint8), reference.rounded(quotient, E4M3).view(torch.uint8))
    then = harness.compiled(quantised if block else quantised_rows)

    def ours(index: int) -> object:
        x, out, *_ = sets[index % count]
        return co.Scaled.quantize(x, "e4m3", block, out=out)

    def copy(index: int) -> object:
        *_, source, to = sets[index % count]
        return to.copy_(source)

    timed = harness.compare(
        {"ours": ours, "copy": copy, "compile": lambda i: then(sets[i % count][0])}, moved / _BYTES_PER_US + 4.0
    )
    return {
        "part": "tensor", "dtype": dtype, "m": m, "n": n, "block": block,
        "gb_per_s": round(moved / timed["ms"]["ours"] / 1e6, 1),
        "of_copy": timed["over_ours"]["copy"]["median"],
        **timed,
    }  # fmt: skip


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarise each part: geometric mean and worst of the others' times over ours."""
    result: dict[str, Any] = {}
    for part in ("gate", *(f"gate {math}" for math in MATHS), "tensor"):
        members = [r for r in rows if part == " ".join((r["part"], *((r["math"],) if "math" in r else ())))]
        for name in dict.fromkeys(name for r in members for name in r["over_ours"]):
            found = [(r["over_ours"][name]["median"], [r["m"], r["n"]]) for r in members if name in r["over_ours"]]
            result[f"{part} {name}"] = {
                "geomean": round(harness.geomean([ratio for ratio, _ in found]), 4),
                "worst": min(found)[0],
                "worst_shape": min(found)[1],
                "shapes": len(found),
            }
    return result


def cases(parts: list[str], rows: list[int] | None, maths: Sequence[Math] = MATHS) -> list[tuple[Any, ...]]:
    """Return the arguments of each measurement, its part first."""
    gates = [("gate", math, m, n, k) for math, (n, k), m in product(maths, GATES, ROWS) if rows is None or m in rows]
    tensors = [("tensor", *each) for each in TENSORS if rows is None or each[0] in rows]
    return [each for each in (*gates, *tensors) if each[0] in parts]


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return the case of a row, as :func:`cases` has it."""
    names = ("part", "math", "m", "n", "k") if row["part"] == "gate" else ("part", "m", "n", "dtype", "block")
    return tuple(row[name] for name in names)


def main() -> None:
    """Run the cases and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--math", nargs="+", default=list(MATHS), choices=MATHS, help="how gates add products up")
    parser.add_argument("--rows", nargs="+", type=int, default=None, help="only these M")
    parser.add_argument("--skip", nargs="+", default=[], choices=PEERS, help="variants of a gate to leave out")
    parser.add_argument("--kernels", type=int, default=0, help="how many other kernels of a gate to time as well")
    parser.add_argument("--limit", type=float, default=1e9, help="stop after this many seconds")
    parser.add_argument("--resume", nargs="+", type=Path, default=[], help="result with rows to keep")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    environment = harness.begin()
    begin, rows = time.monotonic(), harness.measured(args.resume, environment)
    done = set(map(key, rows))
    peers = [name for name in PEERS if name not in args.skip]
    with torch.no_grad():
        left = [case for case in cases(args.parts, args.rows, args.math) if case not in done]
        build_ahead((of for part, *of in left if part == "gate"), args.kernels)
        for part, *of in left:
            if time.monotonic() - begin > args.limit:
                print(f"stopped at the limit before {part} {of}")
                break
            rows.append(run_gate(*of, peers, args.kernels) if part == "gate" else run_tensor(*of))
            print(rows[-1], flush=True)
            harness.save(args.out, {**environment, "summary": summary(rows), "rows": rows})
    print(summary(rows))


if __name__ == "__main__":
    main()
