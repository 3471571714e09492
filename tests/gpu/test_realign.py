"""Kernels that copy operands which TMA cannot read: every element is copied, none from outside, and none too soon."""

import pytest
import torch

import cutlass_ops as co
from tests.gpu import kernels, placement, tensors
from tests.gpu.test_exactness import MANY_TILES, SHAPES, check_exact
from tests.gpu.test_matrix import run_and_check
from tests.gpu.test_overlap import same, square

pytestmark = pytest.mark.gpu

NORMS_AND_GATES = [name for name in kernels.realigned() if name.startswith("norm") or "gate" in name]
WHOLE = [name for name in kernels.realigned() if name not in (*NORMS_AND_GATES, "summed")]
# Lines of less than a piece of eight elements, of a few, and of more than a warp copies at a time.
LINES = [(3, 7, 8), (9, 15, 16), (5, 23, 25), (70, 1031, 2053)]


@pytest.mark.parametrize("name", WHOLE)
def test_realigned_to_the_last_bit(name):
    for shape in [*SHAPES, *LINES, MANY_TILES]:
        check_exact(kernels.realigned()[name], shape)


@pytest.mark.parametrize("name", [*NORMS_AND_GATES, "summed"])
def test_realigned_agrees_with_float64(name):
    for shape in [(1, 8, 8), (63, 72, 129), (200, 264, 1001), (1500, 2056, 521)]:
        run_and_check(kernels.realigned()[name], shape)


@pytest.mark.parametrize("start", range(8))
def test_operands_that_begin_anywhere(start):
    """Whole numbers between NaN, `start` elements after an aligned address, in lines that begin everywhere."""
    kernel = co.build(kernels.realigned()[WHOLE[0]])
    m, n, k = 77, 72, 333

    def placed(rows, cols):
        buffer = torch.full((start + rows * (cols + 4),), float("nan"), device="cuda", dtype=torch.bfloat16)
        return buffer[start:].view(rows, cols + 4)[:, :cols].copy_(placement.whole(rows, cols))

    a, w, bias = placed(m, k), placed(n, k), placement.whole(n).bfloat16()
    d = torch.full((m, n), float("nan"), device="cuda", dtype=torch.bfloat16)
    kernel(a, w.t(), bias=bias, out=d)
    assert torch.equal(d, torch.relu(a.double() @ w.t().double() + bias.double()).to(d.dtype))


@pytest.mark.parametrize("size", [127, 1023, 2047])
def test_realigned_layers_that_feed_each_other(size):
    kernel = co.build(kernels.realigned()[WHOLE[0]])

    def step(s, number, after):
        kernel(s["x"], s["w"].t(), bias=s["bias"], out=s["y"])
        after()
        kernel(s["y"], s["w"].t(), bias=s["bias"], out=s["x"])
        after()

    state = {name: value.contiguous() for name, value in square(size).items()}
    assert state["x"].stride(0) == size
    same(step, state)


@pytest.mark.parametrize("way", ["gathered", "beside", "ahead"])
def test_means_of_copied_rows_follow_what_was_written_just_before(way):
    kernel = co.build(kernels.realigned()[f"norm-{way}"])
    source = tensors.matrix(300, 515, "bf16", aligned=False)
    weight = tensors.matrix(512, 515, "bf16").t()
    x, found = torch.empty_like(source), []
    for step in range(20):
        torch.mul(source, 1 + step % 3, out=x)
        found.append(kernel(x, weight, eps=0.5))
    for step, d in enumerate(found):
        torch.mul(source, 1 + step % 3, out=x)
        torch.cuda.synchronize()
        assert torch.equal(d, kernel(x, weight, eps=0.5)), f"launch {step} differs"


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
