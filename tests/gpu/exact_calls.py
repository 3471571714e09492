"""Calls of several kernels whose results have one right value each: gradients, and tensors that are quantised.

Sums are so small that whatever lies between two kernels is exact in BF16. A loud A makes SiLU and GELU give their
argument or 0, and their derivatives 1, 0 or, at 0, 1/2.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import cutlass_ops as co
from cutlass_ops.epilogue import composed
from tests.gpu import oracle
from tests.gpu.fuzz.case import Exact
from tests.gpu.memory import Memory

_SMALL = 2**8  # what BF16 has every whole number up to
Call = Callable[[Memory, int, int, int], Iterator[tuple[str, Tensor, Tensor]]]


@co.epilogue
def bias_silu(acc, bias: co.Row):
    return co.e.silu(acc + bias)


def _drawn(memory: Memory, *shape: int, size: float = 1.0) -> Tensor:
    return memory.values(shape, torch.bfloat16, size).bfloat16().requires_grad_()


def _slope(z: Tensor) -> Tensor:
    return torch.where(z == 0, 0.5, (z > 0).double())


def _gradients(y: Tensor, slope: Tensor, x: Tensor, w: Tensor, g: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the gradients of A and of weights (N, K), and what they should be."""
    y.backward(g)
    dz = g.double() * slope
    yield "gradient of A", x.grad, dz @ w.double()
    yield "gradient of B", w.grad, dz.mT @ x.double()


def bias_relu(memory: Memory, m: int, n: int, k: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Linear and ReLU, forward and backward."""
    x, w, bias, g = (_drawn(memory, *shape) for shape in ((m, k), (n, k), (n,), (m, n)))
    y = co.gemm_bias_relu(x, w.t(), bias)
    z = x.double() @ w.double().t() + bias.double()
    yield "d", y.detach(), z.relu()
    yield from _gradients(y, (z > 0).double(), x, w, g.detach())
    yield "gradient of the bias", bias.grad, (g.double() * (z > 0)).sum(0)


def bias_activation(memory: Memory, m: int, n: int, k: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Linear and SiLU, whose argument the forward pass keeps."""
    x, w, bias, g = (
        _drawn(memory, *shape, size=size)
        for shape, size in (((m, k), 128.0), ((n, k), 1.0), ((n,), 128.0), ((m, n), 1.0))
    )
    y = co.gemm(x, w.t(), epilogue=bias_silu, bias=bias)
    z = x.double() @ w.double().t() + bias.double()
    yield "d", y.detach(), z.relu()
    yield from _gradients(y, _slope(z), x, w, g.detach())
    yield "gradient of the bias", bias.grad, (g.double() * _slope(z)).sum(0)


def gated(memory: Memory, m: int, n: int, k: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    """SwiGLU, with the gradients of both weights."""
    x, w, up = (_drawn(memory, *shape, size=size) for shape, size in (((m, k), 128.0), ((n, k), 1.0), ((n, k), 1.0)))
    g = torch.where(memory.values((m, n), torch.bfloat16) > 0, 1.0, 0.0).bfloat16()
    y = co.gemm(x, w.t(), epilogue=composed.swiglu, up=up.t())
    z, u = (x.double() @ each.double().t() for each in (w, up))
    yield "d", y.detach(), z.relu() * u
    y.backward(g)
    dz, du = ((g.double() * each).bfloat16().double() for each in (u * _slope(z), z.relu()))
    yield "gradient of A", x.grad, dz @ w.double() + du @ up.double()
    yield "gradient of B", w.grad, dz.t() @ x.double()
    yield "gradient of the other B", up.grad, du.t() @ x.double()


def batched(memory: Memory, m: int, n: int, k: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Batches, forward and backward."""
    x, w, g = (_drawn(memory, *shape) for shape in ((3, m, k), (3, n, k), (3, m, n)))
    y = co.gemm(x, w.mT)
    yield "d", y.detach(), x.double() @ w.double().mT
    yield from _gradients(y, torch.ones_like(y, dtype=torch.float64), x, w, g.detach())


def grouped(memory: Memory, m: int, n: int, k: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Groups of rows, one of them empty, forward and backward."""
    x, w, g = (_drawn(memory, *shape) for shape in ((m, k), (4, n, k), (m, n)))
    ends = [m // 3, m // 3, m // 2, m]
    y = co.gemm(x, w.mT, groups=co.Groups(torch.tensor(ends, device=memory.device, dtype=torch.int32)))
    y.backward(g.detach())
    for expert, (first, last) in enumerate(zip([0, *ends], ends, strict=False)):
        rows = slice(first, last)
        yield f"d of group {expert}", y.detach()[rows], x[rows].double() @ w[expert].double().t()
        yield f"gradient of A in group {expert}", x.grad[rows], g[rows].double() @ w[expert].double()
        yield f"gradient of weight {expert}", w.grad[expert], g[rows].double().t() @ x[rows].double()


def _quantised(memory: Memory, m: int, k: int, block: int | None) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield a quantised tensor, whose largest values are 448 times powers of two, and its scales."""
    per_line = -(-k // 128) if block else 1
    scales = memory.factors((m, per_line)) / 4
    lines = scales.repeat_interleave(block or k, 1)[:, :k].double()
    values = memory.values((m, k), torch.float8_e4m3fn).double()
    values[:, :: block or k] = 448.0
    found, found_scales = co.Scaled.quantize((values * lines).bfloat16(), "e4m3", block=block)
    yield "values", found, values
    yield "scales", found_scales, scales.double() if block else scales[:, 0].double()


def quantised_blocks(memory: Memory, m: int, n: int, k: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    """A tensor in FP8 with a scale for each 128 values."""
    return _quantised(memory, m, n + k, 128)


def quantised_rows(memory: Memory, m: int, n: int, k: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    """A tensor in FP8 with a scale for each row."""
    return _quantised(memory, m, n + k, None)


CALLS: dict[str, Call] = {
    call.__name__: call
    for call in (bias_relu, bias_activation, gated, batched, grouped, quantised_blocks, quantised_rows)
}


def check(name: str, seed: int, device: str = "cuda") -> None:
    """Make a call, and require its results to be right to the last bit."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    m, n, k = rng.choice((16, 128, 264, 520)), rng.choice((64, 136, 512)), rng.choice((32, 64, 128))
    memory = Exact(_SMALL).memory(device, rng, max(k, 128))
    for what, found, wanted in CALLS[name](memory, m, n, k):
        why = oracle.why_not(found, wanted, 0.0)
        assert why is None, f"{what} at {(m, n, k)}, seed {seed}: {why}"
