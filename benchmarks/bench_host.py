"""Measures a call's cost on the host: time of a warm call, and memory of a process that runs one op.

    python benchmarks/bench_host.py --out benchmarks/results/host_h100.json

Times are only of enqueueing: rounds are short enough that the device's queue never fills. Each row:
{"problem", "kernel", ratios of ours to others', formed within rounds, "us": {call: [median, least, most]}}.
Each of "forms", a form of call against PyTorch's for the same result: {"form", "kernel", "over_pytorch",
"launch_over_out", "other_tensors_over_out", "us"}. The last two ratios are those of a prepared launch, without
arguments and with another A, to the ordinary call with `out`; they are missing where no launch can be prepared.
"new_rows": calls at numbers of rows that were not met before, and the memory of their plans.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import torch
import torch.nn.functional as F  # noqa: N812

import cutlass_ops as co

CALLS, ROUNDS = 200, 41
DEVICE = "cuda"

# Resident memory with PyTorch and CUDA up, then with one op run; the kernels are in the store already.
MEMORY = """
import json, torch
def resident():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS:")) / 1024
x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)
w = torch.randn(256, 256, device="cuda", dtype=torch.bfloat16)
b = torch.randn(256, device="cuda", dtype=torch.bfloat16)
torch.relu(torch.nn.functional.linear(x, w, b)); torch.cuda.synchronize()
before = resident()
import cutlass_ops
cutlass_ops.gemm_bias_relu(x, w.t(), b); torch.cuda.synchronize()
print(json.dumps(resident() - before))
"""


# Problems too small to fill the queue: with few rows, with full tiles, and with rows beyond the matrix along M and N,
# which take two more descriptors.
PROBLEMS = {"few rows": (16, 256, 256), "full tiles": (256, 256, 256), "partly filled tiles": (200, 264, 256)}


@dataclass(frozen=True)
class Calls:
    """Ways to make the same call at one problem, and the kernel of ours."""

    kernel: str
    variants: dict[str, Callable[[], object]]

    @classmethod
    def at(cls, m: int, n: int, k: int) -> Calls:
        """Return the calls to compare."""
        a, weight = (torch.randn(*s, device="cuda", dtype=torch.bfloat16) for s in ((m, k), (n, k)))
        bias, b = torch.randn(n, device="cuda", dtype=torch.bfloat16), weight.t()
        out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
        a3 = a.view(4, m // 4, k)
        choice = co.gemm_bias_relu.plan(a, b, bias)
        launch, (raster, swizzle) = co.build(choice.spec).loaded.launch, choice.order.numbers
        variants: dict[str, Callable[[], object]] = {
            "gemm_bias_relu(out=)": lambda: co.gemm_bias_relu(a, b, bias, out=out),
            "gemm_bias_relu": lambda: co.gemm_bias_relu(a, b, bias),
            "gemm_bias_relu, batch folded": lambda: co.gemm_bias_relu(a3, b, bias),
            "the kernel's launch alone": lambda: launch(a, b, out, bias, raster, swizzle, None),
            "F.linear": lambda: F.linear(a, weight, bias),
            "F.relu(F.linear)": lambda: F.relu(F.linear(a, weight, bias)),
            "torch._addmm_activation": lambda: torch._addmm_activation(bias, a, b),
            "torch.empty": lambda: torch.empty((m, n), device="cuda", dtype=torch.bfloat16),
        }
        return cls(choice.spec.config.slug, variants)


def measure(calls: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Time the calls in interleaved rounds; return microseconds per call for each round."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for number in range(ROUNDS + 3):
        random.Random(number).shuffle(names)
        for name in names:
            call = calls[name]
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(CALLS):
                call()
            times[name].append((time.perf_counter() - begin) / CALLS * 1e6)
    return {name: each[3:] for name, each in times.items()}


def ratio_of(times: dict[str, list[float]], ours: str, other: str) -> float:
    """Return the median over the rounds of one call's time over another's."""
    return round(statistics.median(o / p for o, p in zip(times[ours], times[other], strict=True)), 3)


def summary(times: dict[str, list[float]]) -> dict[str, list[float]]:
    """Return the median, least and most of each call's times."""
    return {call: [round(x, 2) for x in (statistics.median(t), min(t), max(t))] for call, t in times.items()}


def row(name: str, calls: Calls) -> dict[str, Any]:
    """Measure one problem's calls."""
    times = measure(calls.variants)
    return {
        "problem": name,
        "kernel": calls.kernel,
        "out_over_linear": ratio_of(times, "gemm_bias_relu(out=)", "F.linear"),
        "no_out_over_linear_relu": ratio_of(times, "gemm_bias_relu", "F.relu(F.linear)"),
        "no_out_over_linear": ratio_of(times, "gemm_bias_relu", "F.linear"),
        "us": summary(times),
    }


# ---- Every form ------------------------------------------------------------------------------------------------------


@co.epilogue
def with_pre(acc: co.Value, bias: co.Row) -> dict[str, co.Value]:
    """Keep what the activation reads."""
    pre = acc + bias
    return {"d": co.e.relu(pre), "pre": pre}


@dataclass(frozen=True)
class Form:
    """A form of call: ours, and PyTorch's for the same result, unfused where it has no fused one."""

    op: Any
    arguments: tuple[Any, ...]
    named: dict[str, Any]
    out: torch.Tensor
    peer: Callable[[], object]
    prepares: bool = True

    def ours(self) -> object:
        """Make the call."""
        return self.op(*self.arguments, **self.named)

    def calls(self) -> tuple[str, dict[str, Callable[[], object]]]:
        """Return our kernel, and all ways to make the call."""
        op, arguments, named, out = self.op, self.arguments, self.named, self.out
        calls: dict[str, Callable[[], object]] = {
            "ours": lambda: op(*arguments, **named),
            "PyTorch": self.peer,
            "ours(out=)": lambda: op(*arguments, out=out, **named),
        }
        if not self.prepares:
            return "", calls
        launch, other = co.prepare_launch(op, *arguments, out=out, **named), like(arguments[0])
        calls["launch()"] = launch
        calls["launch(a=, out=)"] = lambda: launch(a=other, out=out)
        return launch.spec.config.slug if launch.spec else "", calls


def like(x: torch.Tensor) -> torch.Tensor:
    """Return a copy with the same strides, and as far from a multiple of 16 bytes."""
    offset = x.storage_offset()
    buffer = x.new_empty(offset + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) + 1)
    return buffer.as_strided(x.shape, x.stride(), offset).copy_(x)


def draw(*shape: int, offset: int = 0) -> torch.Tensor:
    """Draw a contiguous tensor that begins some elements after an aligned address."""
    count = offset + math.prod(shape)
    return torch.randn(count, device=DEVICE).to(torch.bfloat16)[offset:].view(shape)


def forms() -> dict[str, Form]:
    """Return every form of call, at problems too small to fill the queue."""
    m, n, k, eps = 256, 256, 256, 1e-5
    x, weight, up, bias, gamma = draw(m, k), draw(n, k), draw(n, k), draw(n), draw(k)
    w, w_up, residual, d = weight.t(), up.t(), draw(m, n), draw(m, n)
    prepared, prepared_up = co.prepare(w, gamma), co.prepare(w_up, gamma)
    layer = co.prepare_layernorm(w, gamma, bias)

    def gemm(rows: int, columns: int, inner: int, offset: int = 0) -> Form:
        a, b = draw(rows, inner, offset=offset), draw(columns, inner, offset=offset).t()
        return Form(co.gemm, (a, b), {}, draw(rows, columns), lambda: torch.mm(a, b))

    def layer_of(rows: torch.Tensor) -> Form:
        peer = lambda: F.relu(F.linear(rows, weight, bias))  # noqa: E731 - as the others
        return Form(co.gemm_bias_relu, (rows, w, bias), {}, draw(len(rows), n), peer)

    def normed(scale: torch.Tensor | None) -> torch.Tensor:
        return F.rms_norm(x, (k,), scale, eps)

    def gated(rows: torch.Tensor) -> torch.Tensor:
        return F.silu(F.linear(rows, weight)) * F.linear(rows, up)

    def kept() -> tuple[torch.Tensor, torch.Tensor]:
        pre = F.linear(x, weight, bias)
        return F.relu(pre), pre

    def summed() -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.addmm(residual, x, w)
        return y, y.float().square().sum(-1)

    rms = {"eps": eps}
    return {
        "plain": gemm(m, n, k),
        "plain, misaligned": gemm(255, 257, 127),
        # After aligned operands of this shape, whose kernel refuses these.
        "plain, misaligned by its address": gemm(m, n, k, offset=1),
        "plain, tiny (2×3×5)": gemm(2, 3, 5),
        "bias + ReLU": layer_of(x),
        "bias + ReLU, 16 rows": layer_of(draw(16, k)),
        "bias + ReLU, 1 row": layer_of(draw(1, k)),
        "further outputs": Form(co.gemm, (x, w), {"epilogue": with_pre, "bias": bias}, d, kept),
        "residual and sums of squares": Form(co.gemm_residual_rms, (x, w, residual), rms, d, summed),
        "RMSNorm, prepared": Form(co.rmsnorm_gemm, (x, prepared), rms, d, lambda: F.linear(normed(gamma), weight)),
        "RMSNorm, not prepared": Form(
            co.rmsnorm_gemm, (x, w, gamma), rms, d, lambda: F.linear(normed(gamma), weight), prepares=False
        ),
        "RMSNorm, no gamma": Form(co.rmsnorm_gemm, (x, w), rms, d, lambda: F.linear(normed(None), weight)),
        "LayerNorm, prepared": Form(
            co.layernorm_gemm, (x, layer), rms, d, lambda: F.linear(F.layer_norm(x, (k,), gamma, bias, eps), weight)
        ),
        "SwiGLU": Form(co.gemm_swiglu, (x, w, w_up), {}, d, lambda: gated(x)),
        "RMSNorm and SwiGLU, prepared": Form(
            co.gemm_swiglu, (x, prepared, prepared_up), rms, d, lambda: gated(normed(gamma))
        ),
    }


def form_row(name: str, form: Form) -> dict[str, Any]:
    """Measure one form's calls."""
    kernel, calls = form.calls()
    times = measure(calls)
    pairs = {"over_pytorch": ("ours", "PyTorch")}
    if form.prepares:
        pairs |= {
            "launch_over_out": ("launch()", "ours(out=)"),
            "other_tensors_over_out": ("launch(a=, out=)", "ours(out=)"),
        }
    return {
        "form": name,
        "kernel": kernel,
        **{key: ratio_of(times, *pair) for key, pair in pairs.items()},
        "us": summary(times),
    }


# ---- New numbers of rows ---------------------------------------------------------------------------------------------

MOST_ROWS, WEIGHTS = 8192, 8


def new_rows() -> dict[str, Any]:
    """Time calls at numbers of rows that were not met before, and again; and the memory of all plans.

    Returns
    -------
    dict
        Microseconds of a first and of a second call (median, 99th percentile, most), and the MB that 8192 numbers of
        rows at 8 weights keep.
    """
    k = 256
    x = draw(MOST_ROWS, k)
    layers = [(draw(256 + 8 * at, k).t(), draw(256 + 8 * at)) for at in range(WEIGHTS)]
    for w, bias in layers:
        co.warm_up(co.gemm_bias_relu, x[:16], w, bias)
        co.gemm_bias_relu(x[:16], w, bias)
    first, second = [], []
    for m in range(17, 2000, 4):
        a = x[:m]
        for times in (first, second):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            co.gemm_bias_relu(a, *layers[0])
            times.append((time.perf_counter() - begin) * 1e6)
    gc.collect()
    tracemalloc.start()
    for w, bias in layers:
        for m in range(1, MOST_ROWS + 1):
            co.gemm_bias_relu(x[:m], w, bias)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    def told(times: list[float]) -> list[float]:
        ordered = sorted(times)
        return [round(ordered[int(share * (len(ordered) - 1))], 1) for share in (0.5, 0.99, 1.0)]

    return {"first_us": told(first), "second_us": told(second), "plans_mb": round(kept / 1e6, 2)}


def processor() -> str:
    """Return the name of this machine's processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def main() -> None:
    """Measure and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    environment = harness.begin()
    with torch.no_grad():
        asked = forms()
        kernels = [lambda problem=problem: Calls.at(*problem) for problem in PROBLEMS.values()]
        harness.side_by_side([*kernels, *(form.ours for form in asked.values())])
        rows = [row(name, Calls.at(*problem)) for name, problem in PROBLEMS.items()]
        every = [form_row(name, form) for name, form in asked.items()]
        met = new_rows()
    memory = json.loads(subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, check=True).stdout)
    head = {**environment, "processor": processor(), "processors": len(os.sched_getaffinity(0))}
    harness.save(args.out, {**head, "host_memory_mib": round(memory, 1), "new_rows": met, "rows": rows, "forms": every})
    print(args.out.read_text())


if __name__ == "__main__":
    main()
