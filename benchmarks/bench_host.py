"""Measures what calls cost on the host, against PyTorch's for the same results.

    python benchmarks/bench_host.py --out /tmp/1.json                              # stops after 8 minutes
    python benchmarks/bench_host.py --resume /tmp/1.json --out /tmp/all.json       # only missing rows
    python benchmarks/bench_host.py --only scaled_gemm "stride changes" --out /tmp/scaled.json
    python benchmarks/bench_host.py --dry                                          # each row once, on the CPU

Times are only of enqueueing: problems are small, so that the device's queue does not fill. A round makes 1,000 calls of
each way, in a random order; there are ten rounds. Each row: {"form", "kernel", "over_pytorch", "launch_over_ours",
"launch_over_out", "other_tensors_over_out", "us": {way: [median, least, most]}}. Ratios are formed within a round, and
are medians of the ten: up to 1.03, two ways are equal. "launch()" is a prepared launch, and "launch(a=, out=)" the same
with another A. In a row whose name ends in "changes", two calls are made in turn, between which this changes. "absent"
says why a row was not measured.

"new numbers of rows" has times of calls at numbers of rows that were not met before, and again ([median, 99th
percentile, most]), and the memory of their plans; "memory" the MiB of a process that a first call adds.
"""

from __future__ import annotations

import argparse
import copy
import gc
import importlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
import tracemalloc
import unittest.mock
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import harness
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from trained_layers import PLAIN, plain_swiglu

import cutlass_ops as co
from cutlass_ops.base import env

CALLS, ROUNDS, AHEAD = 1000, 10, 20
DEVICE = "cuda"
TIE = 1.03
TOGETHER = 16  # rows whose kernels are compiled together
SIZE, EPS = 256, 1e-5  # of the problems, and of norms
E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
Way = Callable[[], object]

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


@dataclass(frozen=True)
class Draw:
    """Draws operands.

    Attributes
    ----------
    dtype, device
        Of what is drawn, unless another dtype is asked for.
    pad : int
        Elements between lines.
    grad : bool
        Whether A or x requires grad.
    """

    dtype: torch.dtype = BF16
    device: str | None = None
    pad: int = 0
    grad: bool = False

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return values like a layer's."""
        found = torch.randn(*shape[:-1], shape[-1] + self.pad, device=self.device or DEVICE) / 2
        if dtype is torch.int8:
            found = found * 8
        return found.to(dtype or self.dtype)[..., : shape[-1]]

    def x(self, *shape: int) -> Tensor:
        """Return an operand that may require grad."""
        return self(*shape).requires_grad_(self.grad)

    def scales(self, *shape: int) -> Tensor:
        """Return positive FP32 numbers."""
        return torch.rand(*shape, device=self.device or DEVICE) + 0.5

    def integers(self, *values: int) -> Tensor:
        """Return INT32."""
        return torch.tensor(values, dtype=torch.int32, device=self.device or DEVICE)


new = Draw()


@dataclass(frozen=True)
class Form:
    """A form of call: ours, and the peer's for the same result, unfused if it has no fused one.

    Attributes
    ----------
    ours, peer : callable
        The calls.
    x : Tensor or None
        The operand that "size changes" resizes.
    out : callable, optional
        Our call with a given output.
    prepare : callable, optional
        Returns a prepared launch, and the same with another A.
    context : callable
        Returns the context of all calls.
    """

    ours: Way
    peer: Way
    x: Tensor | None = None
    out: Way | None = None
    prepare: Callable[[], tuple[Any, Way]] | None = None
    context: Callable[[], AbstractContextManager[Any]] = torch.no_grad


def of_op(op: Any, *arguments: Any, peer: Way, prepares: bool = True, out: bool = True, **named: Any) -> Form:
    """Return a form of an op or of a function of this library."""
    ours = partial(op, *arguments, **named)
    x = arguments[0].values if isinstance(arguments[0], co.Scaled) else arguments[0]
    if x.requires_grad:
        return Form(ours, peer, x, context=torch.enable_grad)
    if not out:
        return Form(ours, peer, x)
    d = torch.empty_like(_tensors(ours())[0])

    def prepare() -> tuple[Any, Way]:
        launch = co.prepare_launch(op, *arguments, out=d, **named)
        other = like(x)
        return launch, lambda: launch(a=other, out=d)

    return Form(ours, peer, x, partial(ours, out=d), prepare if prepares else None)


def like(x: Tensor) -> Tensor:
    """Return a copy with the same strides, and as far from a multiple of 16 bytes."""
    offset = x.storage_offset()
    buffer = x.new_empty(offset + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) + 1)
    return buffer.as_strided(x.shape, x.stride(), offset).copy_(x)


# ---- Rows ------------------------------------------------------------------------------------------------------------


@co.epilogue
def with_pre(acc: co.types.Value, bias: co.Row) -> dict[str, co.types.Value]:
    """Keep what the activation reads."""
    pre = acc + bias
    return {"d": co.e.relu(pre), "pre": pre}


def _gemm(draw: Draw, m: int = SIZE, n: int = SIZE, k: int = SIZE, offset: int = 0) -> Form:
    a, b = draw.x(m, k), draw(n, k)
    if offset:
        a, b = (draw(offset + x.numel())[offset:].view(x.shape) for x in (a, b))
    return of_op(co.gemm, a, b.t(), peer=lambda: torch.mm(a, b.t()))


def _into(draw: Draw) -> Form:
    a, b, d = draw(SIZE, SIZE), draw(SIZE, SIZE).t(), draw(SIZE, SIZE)
    return Form(lambda: co.gemm(a, b, out=d), lambda: torch.mm(a, b, out=d), a)


def _layer(draw: Draw, m: int = SIZE, n: int = SIZE) -> Form:
    x, weight, bias = draw.x(m, SIZE), draw(n, SIZE), draw(n)
    return of_op(co.gemm_bias_relu, x, weight.t(), bias, peer=lambda: F.relu(F.linear(x, weight, bias)))


def _several(draw: Draw) -> Form:
    x, weight, bias = draw(SIZE, SIZE), draw(SIZE, SIZE), draw(SIZE)

    def peer() -> tuple[Tensor, Tensor]:
        pre = F.linear(x, weight, bias)
        return F.relu(pre), pre

    return of_op(co.gemm, x, weight.t(), peer=peer, epilogue=with_pre, bias=bias)


def _batched(draw: Draw) -> Form:
    a, b = draw.x(8, 64, SIZE), draw(8, 64, SIZE)
    return of_op(co.gemm, a, b.mT, peer=lambda: torch.bmm(a, b.mT))


def _swiglu(draw: Draw) -> Form:
    x, gate, up = draw.x(SIZE, SIZE), draw(SIZE, SIZE), draw(SIZE, SIZE)
    peer = lambda: F.silu(F.linear(x, gate)) * F.linear(x, up)  # noqa: E731
    return of_op(co.gemm_swiglu, x, gate.t(), up.t(), peer=peer)


def _tf32(draw: Draw) -> Form:
    a, b = draw(SIZE, SIZE, dtype=torch.float32), draw(SIZE, SIZE, dtype=torch.float32).t()
    return of_op(co.gemm, a, b, peer=lambda: torch.mm(a, b), math="tf32")


def _int32(draw: Draw) -> Form:
    a, b = draw(SIZE, SIZE, dtype=torch.int8), draw(SIZE, SIZE, dtype=torch.int8).t()
    return of_op(co.gemm, a, b, peer=lambda: torch._int_mm(a, b), out_dtype=torch.int32)


def _autocast(draw: Draw) -> Form:
    a, b = (draw(SIZE, SIZE, dtype=torch.float32) for _ in range(2))
    context = lambda: torch.autocast(DEVICE, BF16)  # noqa: E731
    return Form(lambda: co.gemm(a, b.t()), lambda: torch.mm(a, b.t()), a, context=context)


# Of each kind of scales: those of A and of B.
SCALES: dict[str, Callable[[Draw], tuple[Any, Any]]] = {
    "numbers": lambda draw: (0.5, 2.0),
    "one element": lambda draw: (draw.scales(1), draw.scales(1)),
    "rows (M,)": lambda draw: (draw.scales(SIZE), draw.scales(SIZE)),
    "rows (M, 1)": lambda draw: (draw.scales(SIZE, 1), draw.scales(1, SIZE)),
    "blocks": lambda draw: (draw.scales(SIZE, SIZE // 128), draw.scales(SIZE // 128, SIZE // 128)),
}


def _scaled(kind: str, math: Any, draw: Draw) -> Form:
    a, b = (draw(SIZE, SIZE, dtype=E4M3) for _ in range(2))
    ours, on = SCALES[kind](draw), draw.device or DEVICE
    theirs = [torch.tensor(s, device=on) if isinstance(s, float) else s for s in ours]
    if kind == "rows (M,)":
        theirs = [theirs[0][:, None], theirs[1][None]]
    if kind == "blocks":
        theirs[1] = theirs[1].t()

    def peer() -> Tensor:
        return torch._scaled_mm(a, b.t(), *theirs, out_dtype=BF16, use_fast_accum=math == "fast")

    named = {} if math is None else {"math": math}
    return of_op(co.gemm, *map(co.Scaled, (a, b.t()), ours), peer=peer, **named)


def _groups(form: str, draw: Draw) -> Form:
    rows, experts = 64, 4
    x, w, offsets = draw.x(rows * experts, SIZE), draw(experts, SIZE, SIZE), draw.integers(*range(rows, 257, rows))
    if form == "wgrad":
        y = draw(rows * experts, SIZE)
        groups = co.Groups(offsets)
        return of_op(co.gemm, x.mT, y, groups=groups, peer=lambda: torch._grouped_mm(x.t(), y, offs=offsets))
    if form == "masked":
        room, counts = x.view(experts, rows, SIZE), draw.integers(*[rows] * experts)
        return of_op(co.gemm, room, w.mT, groups=co.Groups(counts=counts), peer=lambda: torch.bmm(room, w.mT))
    if form == "FP8":
        scales = draw.scales(rows * experts), draw.scales(experts, SIZE)
        x, w = x.to(E4M3), w.to(E4M3)

        def peer() -> Tensor:
            return torch._scaled_grouped_mm(x, w.mT, *scales, offs=offsets, out_dtype=BF16, use_fast_accum=True)

        operands = map(co.Scaled, (x, w.mT), scales)
        return of_op(co.gemm, *operands, groups=co.Groups(offsets), peer=peer, math="fast")
    return of_op(co.gemm, x, w.mT, groups=co.Groups(offsets), peer=lambda: torch._grouped_mm(x, w.mT, offs=offsets))


def _norm(form: str, draw: Draw) -> Form:
    x, weight, up, gamma, bias = draw.x(SIZE, SIZE), draw(SIZE, SIZE), draw(SIZE, SIZE), draw(SIZE), draw(SIZE)
    w = weight.t()

    def rms(of: Tensor | None = gamma) -> Tensor:
        return F.rms_norm(x, (SIZE,), of, EPS)

    def residual() -> tuple[Tensor, Tensor]:
        y = torch.addmm(up, x, w)
        return y, y.float().square().sum(-1)

    def layer() -> Tensor:
        return F.linear(F.layer_norm(x, (SIZE,), gamma, bias, EPS), weight)

    rows: dict[str, Callable[[], Form]] = {
        "RMSNorm, prepared": lambda: of_op(
            co.rmsnorm_gemm, x, co.prepare(w, gamma), peer=lambda: F.linear(rms(), weight), eps=EPS
        ),
        "RMSNorm, not prepared": lambda: of_op(
            co.rmsnorm_gemm, x, w, gamma, peer=lambda: F.linear(rms(), weight), prepares=False, eps=EPS
        ),
        "RMSNorm, no gamma": lambda: of_op(co.rmsnorm_gemm, x, w, peer=lambda: F.linear(rms(None), weight), eps=EPS),
        "LayerNorm, prepared": lambda: of_op(
            co.layernorm_gemm, x, co.prepare(w, gamma, bias, norm="layer"), peer=layer, eps=EPS
        ),
        "LayerNorm, not prepared": lambda: of_op(
            co.layernorm_gemm, x, w, gamma, bias, peer=layer, prepares=False, eps=EPS
        ),
        "residual and sums of squares": lambda: of_op(co.gemm_residual_rms, x, w, up, peer=residual, eps=EPS),
        "RMSNorm and SwiGLU, prepared": lambda: of_op(
            co.gemm_swiglu, x, co.prepare(w, gamma), co.prepare(up.t(), gamma), eps=EPS,
            peer=lambda: F.silu(F.linear(rms(), weight)) * F.linear(rms(), up),
        ),
    }  # fmt: skip
    return rows[form]()


def _plain_norm(m: Any, x: Tensor) -> Tensor:
    return F.linear(m.norm(x), m.linear.weight)


def _hugging_face(**draw: Any) -> tuple[nn.Module, Callable[[Any, Tensor], Any]]:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    own = LlamaMLP(LlamaConfig(hidden_size=SIZE, intermediate_size=2 * SIZE)).to(**draw)
    return co.patch(copy.deepcopy(own), verbose=False), plain_swiglu


# A layer, and the same in PyTorch of its parameters.
LAYERS: dict[str, Callable[..., tuple[nn.Module, Callable[[Any, Tensor], Any]]]] = {
    "nn.Linear + ReLU": lambda **d: (
        co.nn.Linear(SIZE, SIZE, activation="relu", **d), lambda m, x: F.relu(F.linear(x, m.weight, m.bias)),
    ),
    "MLP": lambda **d: (co.nn.MLP(SIZE, 2 * SIZE, **d), PLAIN["mlp"]),
    "GatedMLP": lambda **d: (co.nn.GatedMLP(SIZE, 2 * SIZE, **d), PLAIN["swiglu"]),
    "RMSNormLinear": lambda **d: (co.nn.RMSNormLinear(SIZE, SIZE, **d), _plain_norm),
    "DecoderBlock": lambda **d: (co.nn.DecoderBlock(SIZE, 2 * SIZE, 4, 4, **d), PLAIN["decoder"]),
    "Hugging Face's LlamaMLP": _hugging_face,
}  # fmt: skip
PASSES = ("inference", "forward", "backward", "both", "both by kernels")


def _pass(layer: str, what: str, draw: Draw) -> Form:
    module, plain = LAYERS[layer](device=draw.device or DEVICE, dtype=draw.dtype)
    x = (draw(1, SIZE, SIZE) if layer == "DecoderBlock" else draw(SIZE, SIZE)).contiguous()
    ways = (lambda: module(x)), (lambda: plain(module, x))
    if what == "inference":
        module.requires_grad_(False)
        if isinstance(module, co.nn.RMSNormLinear):
            module.fold()

        def prepare() -> tuple[Any, Way]:
            launch, other = module.prepare(x), like(x)  # type: ignore[operator]
            return launch, lambda: launch(other)

        return Form(*ways, x, prepare=None if layer == "DecoderBlock" else prepare)
    parameters = [x.requires_grad_(), *module.parameters()]
    of_d = torch.randn_like(ways[1]())

    def step(way: Way) -> Way:
        if what == "forward":
            return way
        if what == "both":
            return lambda: torch.autograd.grad(way(), parameters, of_d)
        if what == "both by kernels":

            def kernels() -> None:
                way().backward(of_d)
                for parameter in parameters:
                    parameter.grad = None

            return kernels
        with torch.enable_grad():
            d = way()
        return lambda: torch.autograd.grad(d, parameters, of_d, retain_graph=True)

    return Form(*map(step, ways), context=torch.enable_grad)


def _jax(draw: Draw) -> Form:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    cj: Any = importlib.import_module("cutlass_ops.jax")
    a, b = (jax.numpy.asarray(draw(SIZE, SIZE).float().cpu().numpy(), jax.numpy.bfloat16) for _ in range(2))
    ours, peer = jax.jit(lambda a, b: cj.gemm(a, b.T)), jax.jit(lambda a, b: a @ b.T)
    return Form(lambda: ours(a, b), lambda: peer(a, b))


def _cupy(draw: Draw) -> Form:
    import cupy

    cc: Any = importlib.import_module("cutlass_ops.cupy")
    a, b = (cupy.asarray(draw(SIZE, SIZE, dtype=torch.float16)) for _ in range(2))
    return Form(lambda: cc.gemm(a, b.T), lambda: a @ b.T)


ROWS: dict[str, Callable[[Draw], Form]] = {
    "gemm": _gemm,
    "gemm, out=": _into,
    "misaligned": partial(_gemm, m=255, n=257, k=127),
    # After aligned operands of this shape, whose kernel refuses these.
    "misaligned by its address": partial(_gemm, offset=1),
    "tiny (2×3×5)": partial(_gemm, m=2, n=3, k=5),
    "bias + ReLU": _layer,
    "bias + ReLU, partly filled tiles": partial(_layer, m=200, n=264),
    "bias + ReLU, 16 rows": partial(_layer, m=16),
    "bias + ReLU, 1 row": partial(_layer, m=1),
    "several outputs": _several,
    "batched": _batched,
    "SwiGLU": _swiglu,
    "TF32": _tf32,
    "INT8 to INT32": _int32,
    "autocast of FP32": _autocast,
    **{
        f"scaled_gemm, {kind}, {math}": partial(_scaled, kind, math)
        for kind in SCALES
        for math in (("promoted",) if kind == "blocks" else ("fast", "promoted"))
    },
    **{f"groups, {form}": partial(_groups, form) for form in ("rows", "masked", "wgrad", "FP8")},
    **{
        form: partial(_norm, form)
        for form in (
            *("RMSNorm, prepared", "RMSNorm, not prepared", "RMSNorm, no gamma", "LayerNorm, prepared"),
            *("LayerNorm, not prepared", "residual and sums of squares", "RMSNorm and SwiGLU, prepared"),
        )
    },
    **{f"{layer}, {what}": partial(_pass, layer, what) for layer in LAYERS for what in PASSES},
    "JAX": _jax,
    "CuPy": _cupy,
}

# How a second call differs from the one before it, and the rows in which it does.
CHANGES: dict[str, Draw] = {
    "stride": Draw(pad=16),
    "dtype": Draw(dtype=torch.float16),
    "device": Draw(device="cuda:1"),
    "requires_grad": Draw(grad=True),
}
_ALL = (*CHANGES, "size")
CHANGING: dict[str, Sequence[str]] = {
    "gemm": _ALL,
    "bias + ReLU": _ALL,
    "SwiGLU": _ALL,
    "batched": tuple(CHANGES),
    "groups, rows": tuple(CHANGES),
    "TF32": ("stride", "device", "size"),
    "INT8 to INT32": ("stride", "device", "size"),
    "scaled_gemm, numbers, fast": ("stride", "device", "size"),
    "groups, masked": ("dtype", "device"),
    "RMSNorm, prepared": ("stride", "dtype", "device", "size"),
    **{f"{layer}, inference": ("dtype", "device", "size") for layer in LAYERS if layer != "DecoderBlock"},
}


def changing(make: Callable[[Draw], Form], change: str) -> Form:
    """Return two calls in turn, between which something changes."""
    one = make(new)
    if change == "size":
        x = one.x
        assert x is not None
        x, m = x.detach(), len(x)

        def both(way: Way) -> None:
            one.x.resize_(m // 2, SIZE)  # type: ignore[union-attr]
            way()
            one.x.resize_(m, SIZE)  # type: ignore[union-attr]
            way()

        return Form(partial(both, one.ours), partial(both, one.peer))
    two = make(CHANGES[change])
    return Form(
        lambda: (one.ours(), two.ours()), lambda: (one.peer(), two.peer()), context=two.context,
    )  # fmt: skip


def table() -> dict[str, Callable[[], Form]]:
    """Return every row, by name."""
    found: dict[str, Callable[[], Form]] = {name: partial(make, new) for name, make in ROWS.items()}
    for name, changes in CHANGING.items():
        for change in changes:
            if change != "device" or torch.cuda.device_count() > 1:
                found[f"{name}, {change} changes"] = partial(changing, ROWS[name], change)
    return found


# ---- Measuring -------------------------------------------------------------------------------------------------------


def measure(ways: Mapping[str, Way]) -> dict[str, list[float]]:
    """Time calls in interleaved rounds; return microseconds per call for each round."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for way in ways.values():
        for _ in range(AHEAD):
            way()
    for number in range(ROUNDS):
        random.Random(number).shuffle(names)
        for name in names:
            way = ways[name]
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(CALLS):
                way()
            times[name].append((time.perf_counter() - begin) / CALLS * 1e6)
    return times


def ratio_of(times: Mapping[str, Sequence[float]], ours: str, other: str) -> float:
    """Return the median over the rounds of one call's time over another's."""
    return round(statistics.median(o / p for o, p in zip(times[ours], times[other], strict=True)), 3)


# Each ratio: of which way's time to which.
RATIOS = {
    "over_pytorch": ("ours", "PyTorch"),
    "launch_over_ours": ("launch()", "ours"),
    "launch_over_out": ("launch()", "ours(out=)"),
    "other_tensors_over_out": ("launch(a=, out=)", "ours(out=)"),
}


def measured(name: str, form: Form) -> dict[str, Any]:
    """Measure a row."""
    ways: dict[str, Way] = {"ours": form.ours, "PyTorch": form.peer}
    kernel = ""
    if form.out is not None:
        ways["ours(out=)"] = form.out
    if form.prepare is not None:
        ways["launch()"], ways["launch(a=, out=)"] = form.prepare()
        specs = [each.spec for each in getattr(ways["launch()"], "launches", [ways["launch()"]])]
        kernel = ", ".join(spec.config.slug for spec in specs if spec is not None)
    # PyTorch records small layers, as it does for users. The variable says that kernels do.
    by_pytorch = name.endswith((", forward", ", backward", ", both"))
    with unittest.mock.patch.dict(os.environ, {env.STAND_IN.name: "01"[by_pytorch]}), form.context():
        times = measure(ways)
    ratios = {key: ratio_of(times, *pair) for key, pair in RATIOS.items() if all(each in times for each in pair)}
    us = {way: [round(x, 2) for x in (statistics.median(t), min(t), max(t))] for way, t in times.items()}
    return {"form": name, "kernel": kernel, **ratios, "us": us}


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
    x = new(MOST_ROWS, k)
    layers = [(new(256 + 8 * at, k).t(), new(256 + 8 * at)) for at in range(WEIGHTS)]
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


def memory() -> dict[str, Any]:
    """Measure the memory that a process takes for a first call."""
    said = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, check=True).stdout
    return {"mib": round(json.loads(said), 1)}


# Rows that are no calls in turn with PyTorch's.
OTHERS: dict[str, Callable[[], dict[str, Any]]] = {"new numbers of rows": new_rows, "memory": memory}


def made(make: Callable[[], Form]) -> Form | str:
    """Return a row's calls, each made once; or why there are none: a package or a kernel of the peer is missing.

    Raises
    ------
    AssertionError
        If the results differ.
    """
    try:
        form = make()
    except ImportError as exc:
        return str(exc)
    with form.context():
        ours = form.ours()
        try:
            theirs = form.peer()
        except Exception as exc:
            return f"{type(exc).__name__}: {str(exc).splitlines()[0]}"
        for x, y in zip(_tensors(ours), _tensors(theirs), strict=True):
            wrong = float((x.detach().double() - y.detach().double()).norm() / y.detach().double().norm())
            assert wrong < 0.05, f"the relative error is {wrong}"
    return form


def _tensors(results: Any) -> list[Tensor]:
    """Return the tensors of a call's results. Other packages have arrays, and others return statistics."""
    if isinstance(results, co.types.ResidualRms):
        return [results.y, results.rstd.sum_square]
    if isinstance(results, tuple | list):
        return [x for each in results for x in _tensors(each)]
    return [results] if isinstance(results, Tensor) else []


def main() -> None:
    """Measure and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="rows whose name has one of these")
    parser.add_argument("--limit", type=float, default=450.0, help="begin no row after this many seconds")
    parser.add_argument("--resume", nargs="+", type=Path, default=[], help="result with rows to keep")
    parser.add_argument("--dry", action="store_true", help="make each row's calls once, on the CPU, and time nothing")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    begin, wanted = time.monotonic(), lambda name: any(text in name for text in args.only)
    asked = {name: make for name, make in table().items() if wanted(name)}
    if args.dry:
        global DEVICE
        DEVICE = "cpu"
        for name, make in asked.items():
            found = made(make)
            print(f"{name}: {found if isinstance(found, str) else 'runs'}")
        return
    if args.out is None:
        parser.error("--out is missing")
    head = harness.begin() | {"processor": processor(), "processors": len(os.sched_getaffinity(0))}
    rows = harness.measured(args.resume, head)
    done = {row["form"] for row in rows}
    asked = {name: make for name, make in asked.items() if name not in done}
    names = list(asked)
    for at, name in enumerate(names):
        if time.monotonic() - begin > args.limit:
            break
        if at % TOGETHER == 0:
            harness.side_by_side(partial(made, asked[each]) for each in names[at : at + TOGETHER])
        form = made(asked[name])
        rows.append({"form": name, "absent": form} if isinstance(form, str) else measured(name, form))
        print(rows[-1], flush=True)
        harness.save(args.out, {**head, "rows": rows})
    for name, run in OTHERS.items():
        if wanted(name) and name not in done and time.monotonic() - begin < args.limit:
            rows.append({"form": name, **run()})
    harness.save(args.out, {**head, "rows": rows})
    slower = [f"{row['form']} ({row['over_pytorch']})" for row in rows if row.get("over_pytorch", 0) > TIE]
    print(f"slower than PyTorch: {', '.join(slower) or 'none'}")


if __name__ == "__main__":
    main()
