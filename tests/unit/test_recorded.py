"""What programs do with results that autograd has recorded, and with their gradients, on the CPU."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import cutlass_ops as co

BF16 = torch.bfloat16


@co.epilogue
def scaled(acc, scale: co.Row):
    return acc * scale


def normal(*shape, dtype=BF16):
    return torch.randn(shape).to(dtype)


def groups():
    return normal(20, 16), normal(4, 24, 16), torch.tensor([5, 5, 12, 20], dtype=torch.int32)


@pytest.mark.parametrize("lead", [(3,), (2, 3), ()], ids=str)
@pytest.mark.parametrize("change", [lambda y: y.add_(1), lambda y: y[..., :2].mul_(2), lambda y: torch.relu_(y)])
def test_results_may_be_changed_in_place(lead, change):
    x, w = normal(*lead, 16).requires_grad_(), normal(8, 16).requires_grad_()
    found, wanted = [], []
    for product, gradients in ((co.gemm(x, w.t()), found), (x @ w.t(), wanted)):
        change(product)
        gradients += torch.autograd.grad(product.float().square().sum(), (x, w))
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2**-5, atol=2**-2)


@pytest.mark.parametrize("dtype", [torch.float16, BF16])
@pytest.mark.parametrize("size", [1.0, 2e4])
def test_gradients_of_rows_of_groups_are_as_exact_as_those_of_one(dtype, size):
    (x, w, offsets), scale = groups(), torch.ones(4, 24, requires_grad=True)
    x, w, grad = x.to(dtype), w.to(dtype), torch.randn(20, 24) * size
    co.gemm(x, w.mT, groups=co.Groups(offsets), epilogue=scaled, scale=scale, out_dtype=torch.float32).backward(grad)
    begin = 0
    for expert, end in enumerate(offsets.tolist()):
        product = x[begin:end].double() @ w[expert].double().t()
        wanted = (product * grad[begin:end].double()).sum(0)
        torch.testing.assert_close(scale.grad[expert].double(), wanted, rtol=1e-5, atol=1e-5 * size)
        begin = end


def test_what_is_infinite_in_a_gradient_stays_so():
    (x, w, offsets), scale = groups(), torch.ones(4, 24, requires_grad=True)
    grad = torch.zeros(20, 24)
    grad[0, 3], grad[7, 5] = torch.inf, torch.nan
    co.gemm(
        x.abs(), w.abs().mT, groups=co.Groups(offsets), epilogue=scaled, scale=scale, out_dtype=torch.float32
    ).backward(grad)
    assert scale.grad[0, 3].isinf()
    assert scale.grad[2, 5].isnan()
    assert scale.grad.isfinite().sum() == 94


@pytest.mark.parametrize("arguments", [(None,), (torch.zeros(8).numpy(),)], ids=["None", "an array"])
def test_what_is_no_tensor_is_named_where_autograd_records(arguments):
    x = normal(4, 16).requires_grad_()
    with pytest.raises(TypeError, match=r"^bias (must be a torch\.Tensor, not ndarray|of gemm_bias is None)"):
        co.gemm_bias(x, normal(8, 16).t(), *arguments)


def test_recompute_may_be_entered_again_and_decorates():
    choice = co.recompute()
    with choice:
        with choice:
            pass
        assert co.run.traced.is_recomputing()
    assert not co.run.traced.is_recomputing()
    assert co.recompute()(co.run.traced.is_recomputing)()


CALLS = {
    "rows": (lambda x, w: co.gemm(x, w), (4, 16), (16, 8), 4 * 16 * 8),
    "batches": (lambda x, w: co.gemm(x, w), (3, 1, 4, 16), (2, 16, 8), 6 * 4 * 16 * 8),
    "a gate": (lambda x, w: co.gemm_swiglu(x, w, w), (4, 16), (16, 8), 2 * 4 * 16 * 8),
    "groups": (
        lambda x, w: co.gemm(x, w, groups=co.Groups(torch.tensor([1, 4], dtype=torch.int32))), (4, 16), (2, 16, 8),
        4 * 16 * 8
    ),
    "of a weight": (
        lambda x, w: co.gemm(x.mT, w, groups=co.Groups(torch.tensor([1, 4], dtype=torch.int32))), (4, 16), (4, 8),
        4 * 16 * 8
    ),
}  # fmt: skip


@pytest.mark.parametrize(("run", "a", "b", "products"), CALLS.values(), ids=CALLS)
def test_pytorch_counts_operations(run, a, b, products):
    with FlopCounterMode(display=False) as counter:
        run(normal(*a), normal(*b))
    assert counter.get_total_flops() == 2 * products


def test_pytorch_counts_operations_of_a_backward():
    x, w = normal(4, 16).requires_grad_(), normal(8, 16).requires_grad_()
    with FlopCounterMode(display=False) as counter:
        co.gemm_bias_gelu(x, w.t(), normal(8)).float().sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 4 * 16 * 8
