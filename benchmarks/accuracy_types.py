"""Measures errors of GEMMs in FP16, BF16, TF32, 3xTF32, INT8 and FP64 over K, beside those of PyTorch in the same type.

    python benchmarks/accuracy_types.py --out benchmarks/results/accuracy_types_h200.json
    python benchmarks/accuracy_types.py --ks 64 1024    # without --out it only prints
    python benchmarks/accuracy_types.py --write         # docs/types.md and its plot, from benchmarks/results

Operands are normal, or positive: uniform between 0 and 1. Those of INT8 are whole numbers, normal with a deviation of
32 or uniform from 0 to 127. PyTorch's is torch.mm, torch._int_mm for INT8; for TF32 allow_tf32 is set, and for 3xTF32
it multiplies in FP32. It adds no parts of K up in less than FP32. Results are compared with float64, those in FP64 with
sums of twice its length. On the CPU, the reference computes, and PyTorch's TF32 is FP32.

Each row: {"type", "d", "values", "m", "n", "k", "error", "pytorch", "exact" (whether each sampled element is the exact
sum, rounded once)}.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import over_k
import torch
from over_k import ROOT, Result, Row, shown, table
from torch import Tensor

import cutlass_ops as co
from cutlass_ops.declare.device import Device
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.run import requests
from examples.precision import settings

VALUES = ("normal", "positive")
PLOT = ROOT / "docs" / "types" / "accuracy.svg"
_SAMPLED_IN_FP64 = 16, 64  # rows and columns
_SPLITS = 2.0**27 + 1  # FP64 into two halves


@dataclass(frozen=True)
class Arithmetic:
    """A type of A and B, and of D.

    Attributes
    ----------
    type, d : str
        As tables have them.
    element, d_element : torch.dtype
        The tensors' types.
    math : str, optional
        What the Tensor Cores make of FP32.
    """

    type: str
    d: str
    element: torch.dtype
    d_element: torch.dtype
    math: str | None = None

    def draw(self, values: str, side: int, k: int, device: str) -> tuple[Tensor, Tensor]:
        """Draw A (M, K) and B (K, N). Those on "meta" have no data."""
        generator = None if device == "meta" else torch.Generator(device).manual_seed(k)
        draw = torch.randn if values == "normal" else torch.rand
        # In FP64, all of its bits are drawn.
        dtype = torch.float64 if self.element is torch.float64 else torch.float32
        a, w = (draw(side, k, generator=generator, device=device, dtype=dtype) for _ in range(2))
        if self.element is torch.int8:
            size = 32 if values == "normal" else 128
            a, w = ((x * size).floor().clamp(-128, 127) for x in (a, w))
        return a.to(self.element), w.to(self.element).t()

    def request(self, a: Tensor, b: Tensor) -> requests.Request:
        """Return the op of a call, and its arguments."""
        return requests.requested(co.gemm, a, b, out_dtype=self.d_element, **self._named)

    def ours(self, a: Tensor, b: Tensor) -> Tensor:
        """Return D."""
        return co.gemm(a, b, out_dtype=self.d_element, **self._named)

    def pytorch(self, a: Tensor, b: Tensor) -> Tensor:
        """Return D as PyTorch computes it."""
        if self.element is torch.int8:
            return torch._int_mm(a, b)
        with settings(tf32=self.math == "tf32"):
            if self.element is self.d_element:
                return torch.mm(a, b)
            return torch.mm(a, b, out_dtype=self.d_element) if a.is_cuda else a.float() @ b.float()

    @property
    def _named(self) -> dict[str, Any]:
        return {} if self.math is None else {"math": self.math}


ARITHMETICS = (
    Arithmetic("FP16", "FP16", torch.float16, torch.float16),
    Arithmetic("FP16", "FP32", torch.float16, torch.float32),
    Arithmetic("BF16", "BF16", torch.bfloat16, torch.bfloat16),
    Arithmetic("BF16", "FP32", torch.bfloat16, torch.float32),
    Arithmetic("TF32", "FP32", torch.float32, torch.float32, "tf32"),
    Arithmetic("3xTF32", "FP32", torch.float32, torch.float32, "3xtf32"),
    Arithmetic("INT8", "FP32", torch.int8, torch.float32),
    Arithmetic("FP64", "FP64", torch.float64, torch.float64),
)


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    large = x * _SPLITS
    large = large - (large - x)
    return large, x - large


def exact_in_fp64(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return A @ B of FP64 matrices as two numbers of FP64 each, the sum and what it lacks.

    Products and sums are computed with their rounding errors (Ogita, Rump and Oishi, "Accurate sum and dot product",
    2005), and these are added up beside.
    """
    large, lacks = [], []
    for row in a:
        column, (high_a, low_a), (high_b, low_b) = row[:, None], _halves(row[:, None]), _halves(b)
        sums = column * b
        errors = ((high_a * high_b - sums) + high_a * low_b + low_a * high_b) + low_a * low_b
        while len(sums) > 1:
            half = len(sums) // 2
            first, second, rest = sums[:half], sums[half : 2 * half], sums[2 * half :]
            both = first + second
            part = both - first
            lost = (first - (both - part)) + (second - part)
            errors = torch.cat((errors[:half] + errors[half : 2 * half] + lost, errors[2 * half :]))
            sums = torch.cat((both, rest))
        large.append(sums[0])
        lacks.append(errors[0])
    return torch.stack(large), torch.stack(lacks)


def kernels(device: Device, side: int) -> Iterator[KernelSpec]:
    """Yield the kernels that serve all calls."""
    for each in ARITHMETICS:
        yield over_k.kernel(each.request(*each.draw("normal", side, over_k.KS[0], "meta")), device)


def measure(ks: Sequence[int], side: int, device: str) -> Iterator[Row]:
    """Yield a row for each arithmetic, kind of values and K."""
    for each, values, k in itertools.product(ARITHMETICS, VALUES, ks):
        a, b = each.draw(values, side, k, device)
        count, columns = _SAMPLED_IN_FP64 if each.element is torch.float64 else (over_k.SAMPLED, side)
        rows = torch.linspace(0, side - 1, min(side, count), device=device).long()
        if each.element is torch.float64:
            exact, lacks = exact_in_fp64(a[rows], b[:, :columns])
        else:
            exact, lacks = a[rows].double() @ b[:, :columns].double(), torch.zeros((), device=device)
        ours, theirs = (d[rows, :columns] for d in (each.ours(a, b), each.pytorch(a, b)))
        errors = [over_k.error((d.double() - exact) - lacks, exact) for d in (ours, theirs)]
        yield {
            "type": each.type, "d": each.d, "values": values, "m": side, "n": side, "k": k,
            "error": errors[0], "pytorch": errors[1], "exact": torch.equal(ours, (exact + lacks).to(ours.dtype)),
        }  # fmt: skip


def errors_table(rows: Sequence[Row], values: str) -> str:
    """Return a table of errors, ours and PyTorch's, at every fourth K, and of the greatest ratio at any K."""
    mine = [row for row in rows if row["values"] == values]
    ks = sorted({row["k"] for row in mine})
    some = [k for k in ks if math.log2(k / ks[0]) % 2 == 0 or k == ks[-1]]
    lines = []
    for each in ARITHMETICS:
        at = {row["k"]: row for row in mine if (row["type"], row["d"]) == (each.type, each.d)}
        worst = max(row["error"] / row["pytorch"] if row["pytorch"] else 0.0 for row in at.values())
        lines.append([f"{each.type} to {each.d}", *(_cell(at[k]) for k in some), f"{worst:.2f}" if worst else "–"])
    return table(["A and B to D", *(f"K = {k}" for k in some), "largest ratio"], lines)


def _cell(row: Row) -> str:
    if row["type"] == "INT8" and row["exact"]:  # whose sums are exact, and D has FP32's bits
        return "exact" if row["error"] == 0 else f"{shown(row['error'])}, one rounding"
    return f"{shown(row['error'])} ({shown(row['pytorch'])})"


def text(result: Result) -> str:
    """Return the part of docs/types.md."""
    parts = [over_k.head(result)]
    for values in VALUES:
        parts += [f"Errors with {values} values; PyTorch's in brackets:", errors_table(result["rows"], values)]
    return "\n\n".join([*parts, "![Errors over K](types/accuracy.svg)"])


def draw(result: Result) -> None:
    """Draw errors over K, a panel for each kind of values. PyTorch's are dotted."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.hashsalt": "cutlass_ops", "svg.fonttype": "none"}):
        canvas = Figure(figsize=(10, 5), layout="constrained")
        panels = canvas.subplots(1, len(VALUES), sharey=True)
        for axes, values in zip(panels, VALUES, strict=True):
            for color, each in enumerate(ARITHMETICS):
                meant = each.type, each.d, values
                at = [row for row in result["rows"] if (row["type"], row["d"], row["values"]) == meant]
                for whose, style, title in (("error", "-", f"{each.type} to {each.d}"), ("pytorch", ":", None)):
                    points = [(row["k"], row[whose]) for row in at if row[whose] > 0]
                    if points:
                        axes.loglog(*zip(*points, strict=True), f"C{color}{style}", marker=".", label=title)
            axes.set_xscale("log", base=2)
            axes.set(title=f"{values} values", xlabel="K")
            axes.grid(alpha=0.3)
        panels[0].set_ylabel("error, relative to the norm of D")
        titles = {title: line for axes in panels for line, title in zip(*axes.get_legend_handles_labels(), strict=True)}
        canvas.legend(titles.values(), titles, loc="outside right upper", fontsize="small")
        canvas.suptitle(
            f"Errors against exact sums, ours (lines) and PyTorch's (dotted): {result['chip']}", fontsize=11
        )
        PLOT.parent.mkdir(parents=True, exist_ok=True)
        canvas.savefig(PLOT, format="svg", metadata={"Date": None, "Creator": None})


REPORT = over_k.Report(
    "benchmarks/accuracy_types.py",
    "benchmarks/results/accuracy_types_h200.json",
    "docs/types.md",
    "errors over K",
    text,
    draw,
)

if __name__ == "__main__":
    over_k.main(__doc__, REPORT, kernels, measure)
