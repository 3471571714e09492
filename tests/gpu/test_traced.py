"""Ops in functions that torch.compile compiles: one graph, and the bits that a call by itself gives."""

import pytest
import torch

import cutlass_ops as co
from tests.gpu import kernels, tensors

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


def test_one_kernel_and_its_out():
    name, spec = next(iter(kernels.overlapping().items()))
    kernel, x = co.build(spec), tensors.matrix(300, 512, "bf16")
    weight, bias = tensors.matrix(264, 512, "bf16").t(), tensors.vector(264, "bf16")

    def function(x):
        d = torch.empty(300, 264, device=x.device, dtype=x.dtype)
        kernel(x, weight, bias, out=d)
        return d, kernel(x, weight, bias)

    first, second = torch.compile(function, backend="aot_eager", fullgraph=True)(x)
    assert torch.equal(first, kernel(x, weight, bias)), name
    assert torch.equal(second, first)


# PyTorch itself captures an empty graph first, which reserves its pool of memory.
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_compiled_and_captured():
    weight, bias = tensors.matrix(256, 512, "bf16").t(), tensors.vector(256, "bf16")
    residual, x = tensors.matrix(200, 256, "bf16"), tensors.matrix(200, 512, "bf16")
    compiled = torch.compile(
        lambda x: co.gemm_bias_relu_residual(x + x, weight, bias, residual), fullgraph=True, mode="reduce-overhead"
    )
    wanted = co.gemm_bias_relu_residual(x + x, weight, bias, residual)
    for _ in range(4):
        torch.testing.assert_close(compiled(x).clone(), wanted)
