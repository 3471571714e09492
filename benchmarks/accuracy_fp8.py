"""Measures errors of FP8 GEMMs over K, beside those of torch._scaled_mm.

    python benchmarks/accuracy_fp8.py --out benchmarks/results/accuracy_fp8_h200.json
    python benchmarks/accuracy_fp8.py --ks 64 1024    # without --out it only prints
    python benchmarks/accuracy_fp8.py --write         # docs/fp8.md, from benchmarks/results

Operands are normal, with one scale for each tensor. Ours is gemm with math="fast" and math="promoted", PyTorch's
torch._scaled_mm with and without use_fast_accum. All are compared with float64 of the operands and scales as they are.
On the CPU, the reference computes.

Each row: {"types" (of A and B), "d", "m", "n", "k", "errors" (by way), "absent" (why, by way)}.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import over_k
import torch
from over_k import Result, Row, table
from torch import Tensor

import cutlass_ops as co
from cutlass_ops.base.mma import ACCUMULATIONS
from cutlass_ops.declare.device import Device
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.run import requests

DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
TYPES = ("e4m3,e4m3", "e4m3,e5m2", "e5m2,e5m2")
DS = {"bf16": torch.bfloat16, "f32": torch.float32}
PEERS = {"scaled_mm_fast": True, "scaled_mm": False}
# How much larger an error may be than another one to count as no worse.
BOUND = 1.1


@dataclass(frozen=True)
class Inputs:
    """A (M, K), B (K, N) and the scale of each."""

    a: Tensor
    b: Tensor
    scale_a: Tensor
    scale_b: Tensor

    def exact(self, rows: Tensor) -> Tensor:
        """Return some rows of D in float64."""
        return self.a[rows].double() @ self.b.double() * (self.scale_a.double() * self.scale_b.double())


def draw(types: str, side: int, k: int, device: str) -> Inputs:
    """Draw and quantise normal operands. Those on "meta" have no data."""
    generator = None if device == "meta" else torch.Generator(device).manual_seed(k)
    (a, scale_a), (w, scale_b) = (
        _quantised(torch.randn(side, k, generator=generator, device=device), DTYPES[name]) for name in types.split(",")
    )
    return Inputs(a, w.t(), scale_a, scale_b)


def _quantised(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax() / torch.finfo(dtype).max
    return (x / scale).to(dtype), scale


def _request(x: Inputs, math: str, d: str) -> requests.Request:
    return requests.requested(co.gemm, co.Scaled(x.a, x.scale_a), co.Scaled(x.b, x.scale_b), math=math, out_dtype=DS[d])


def kernels(device: Device, side: int) -> Iterator[KernelSpec]:
    """Yield the kernels that serve all calls."""
    for types, d, math in itertools.product(TYPES, DS, ACCUMULATIONS):
        yield over_k.kernel(_request(draw(types, side, over_k.KS[0], "meta"), math, d), device)


def measure(ks: Sequence[int], side: int, device: str) -> Iterator[Row]:
    """Yield a row for each pair of types, D and K."""
    for types, k in itertools.product(TYPES, ks):
        x = draw(types, side, k, device)
        rows = torch.linspace(0, side - 1, min(side, over_k.SAMPLED), device=device).long()
        exact = x.exact(rows)
        for d, dtype in DS.items():
            found = {
                math: co.gemm(co.Scaled(x.a, x.scale_a), co.Scaled(x.b, x.scale_b), math=math, out_dtype=dtype)[rows]
                for math in ACCUMULATIONS
            }
            peers = {name: _scaled_mm(x, dtype, fast) for name, fast in PEERS.items()}
            found |= {name: each[rows] for name, each in peers.items() if isinstance(each, Tensor)}
            absent = {name: why for name, why in peers.items() if isinstance(why, str)}
            errors = {name: over_k.error(each.double() - exact, exact) for name, each in found.items()}
            yield {"types": types, "d": d, "m": side, "n": side, "k": k, "errors": errors, "absent": absent}


def _scaled_mm(x: Inputs, dtype: torch.dtype, fast: bool) -> Tensor | str:
    """Return D by PyTorch, or why it has none."""
    try:
        return torch._scaled_mm(x.a, x.b, x.scale_a, x.scale_b, out_dtype=dtype, use_fast_accum=fast)
    except (RuntimeError, ValueError, NotImplementedError) as reason:
        return str(reason).partition("\n")[0][:200]


def within(errors: Mapping[str, float], way: str, others: Iterable[str]) -> bool | None:
    """Whether a way's error is at most the bound times the least one of others; None if there are no others."""
    theirs = [errors[name] for name in others if name in errors]
    return errors[way] <= BOUND * min(theirs) if theirs else None


# What is compared with what.
_COMPARED = (
    ("`fast`, with PyTorch's best", "fast", PEERS),
    ("`promoted`, with PyTorch's best", "promoted", PEERS),
    ("`fast`, with `promoted`", "fast", ("promoted",)),
)


def bounds(rows: Sequence[Row]) -> str:
    """Return a table of the K at which a way's error is within the bound."""
    lines = []
    for types, d in itertools.product(TYPES, DS):
        found = {row["k"]: row["errors"] for row in rows if (row["types"], row["d"]) == (types, d)}
        line = [_title(types), d.upper()]
        for _, way, others in _COMPARED:
            holds = {k: is_so for k, errors in found.items() if (is_so := within(errors, way, others)) is not None}
            line.append(over_k.where(holds) if holds else "PyTorch has none")
        lines.append(line)
    return table(["Operands", "D", *(title for title, *_ in _COMPARED)], lines)


def _title(types: str) -> str:
    return types.replace(",", " × ")


def text(result: Result) -> str:
    """Return the part of docs/fp8.md."""
    numbers = "[all errors](../benchmarks/results/accuracy_fp8_h200.json)"
    told = f"The error is at most {BOUND} times as large at these K ({numbers}):"
    return "\n\n".join([over_k.head(result), told, bounds(result["rows"])])


REPORT = over_k.Report(
    "benchmarks/accuracy_fp8.py", "benchmarks/results/accuracy_fp8_h200.json", "docs/fp8.md", "errors over K", text
)

if __name__ == "__main__":
    over_k.main(__doc__, REPORT, kernels, measure)
