"""Kernels that copy operands which TMA cannot read: every element is copied, none from outside, and none too soon."""

import pytest
import torch

import cutlass_ops as co
from tests.gpu import kernels, tensors
from tests.gpu.memory import whole
from tests.gpu.test_overlap import same, square

pytestmark = pytest.mark.gpu

COPYING = next(iter(kernels.realigned().values()))


@pytest.mark.parametrize("start", range(8))
def test_operands_that_begin_anywhere(start):
    """Whole numbers between NaN, `start` elements after an aligned address, in lines that begin everywhere."""
    kernel = co.build(COPYING)
    m, n, k = 77, 72, 333

    def placed(rows, cols):
        buffer = torch.full((start + rows * (cols + 4),), float("nan"), device="cuda", dtype=torch.bfloat16)
        return buffer[start:].view(rows, cols + 4)[:, :cols].copy_(whole(rows, cols))

    a, w, bias = placed(m, k), placed(n, k), whole(n).bfloat16()
    d = torch.full((m, n), float("nan"), device="cuda", dtype=torch.bfloat16)
    kernel(a, w.t(), bias=bias, out=d)
    assert torch.equal(d, torch.relu(a.double() @ w.t().double() + bias.double()).to(d.dtype))


@pytest.mark.parametrize("size", [127, 1023, 2047])
def test_realigned_layers_that_feed_each_other(size):
    kernel = co.build(COPYING)

    def step(s, number, after):
        kernel(s["x"], s["w"].t(), bias=s["bias"], out=s["y"])
        after()
        kernel(s["y"], s["w"].t(), bias=s["bias"], out=s["x"])
        after()

    state = {name: value.contiguous() for name, value in square(size).items()}
    assert state["x"].stride(0) == size
    same(step, state)


def test_a_call_of_misaligned_operands_is_served_by_copies():
    """Dispatch takes such a kernel by itself where copying is little beside multiplying."""
    x, w = tensors.matrix(2048, 1023, "bf16", aligned=False), tensors.matrix(2048, 1023, "bf16", aligned=False)
    bias = tensors.vector(2048, "bf16")
    found = co.explain(co.gemm_bias_relu, x, w.t(), bias)
    assert found.candidates[0].config.slug.endswith("_realign")
    assert "copied to aligned workspace" in str(found)
    exact = torch.relu(x.double() @ w.t().double() + bias.double())
    d = co.gemm_bias_relu(x, w.t(), bias)
    assert (d.double() - exact).norm() / exact.norm() < 2**-8
