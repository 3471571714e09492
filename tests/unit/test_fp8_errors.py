"""What messages about FP8, its scales and prepared weights say to do."""

import numpy as np
import pytest
import torch

import cutlass_ops as co
from cutlass_ops.base.errors import EpilogueError

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
M, N, K = 8, 32, 256
X, W = torch.randn(M, K).to(BF16), torch.randn(N, K).to(BF16).t()
A, B = X.to(E4M3), W.t().to(E4M3).t()
BLOCKS = torch.rand(M, 2), torch.rand(1, 2)
QUANTISED, FOLDED = co.prepare(W, dtype=E4M3), co.prepare(W, torch.ones(K))
LAYER = co.prepare_layernorm(W, torch.ones(K))

pytestmark = pytest.mark.usefixtures("session")


@co.epilogue
def two_outputs(acc):
    return {"d": acc, "twice": acc * 2}


def meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


SAID = {
    "a layer norm's weight": (
        lambda: co.layernorm_gemm(X, FOLDED, eps=1e-5), TypeError,
        r"^w is prepared by prepare\(\), not for a layer norm: pass prepare_layernorm\(weight, gamma, beta\)",
    ),
    "a norm's weight": (
        lambda: co.rmsnorm_gemm(X, LAYER, eps=1e-5), TypeError,
        r"^w is prepared for a layer norm: pass prepare\(weight, gamma\)",
    ),
    "a plain op": (
        lambda: co.gemm(A, QUANTISED), TypeError, "^b must be .*: pass b.matrix and, as a Row of the epilogue, b.scale",
    ),
    "a plain op without scales": (lambda: co.gemm(X, FOLDED), TypeError, "^b must be .*: pass b.matrix, or call"),
    "a weight of batches": (
        lambda: co.prepare(torch.randn(2, K, N).to(BF16), dtype=E4M3), ValueError,
        r"^w has shape \(2, 256, 32\): it must be \(K, N\), so prepare weights of batches one by one",
    ),
    "a tensor in the language": (
        lambda: co.e.quantize(X, "e4m3"), EpilogueError, "co.e.quantize works .*: for tensors call co.quantize",
    ),
    "scales of rows, turned": (
        lambda: co.scaled_gemm(A, B, torch.ones(1, len(A)), torch.ones(N)), ValueError,
        r"^scale_a has shape \(1, 8\): scales of rows are \(8,\) or \(8, 1\), so pass scale_a\.t\(\)",
    ),
    "a gate's blocks": (
        lambda: co.gemm_swiglu(A, B, B, scale_a=BLOCKS[0], scale_b=1.0, scale_up=1.0), ValueError,
        r"^scale_a has shape \(8, 2\), as scales of blocks do, .* or one for each row: call scaled_gemm",
    ),
    "outputs and a scale": (
        lambda: co.rmsnorm_gemm(X, W, eps=1e-5, epilogue=two_outputs, scale_out=1.0, out_dtype=E4M3), ValueError,
        "^two_outputs has outputs besides D, twice, and scale_out= and amax= need an epilogue that returns only D",
    ),
    "PyTorch's bias": (
        lambda: co.scaled_gemm(A, B, 1.0, 1.0, bias=torch.ones(N)), TypeError, "^bias is unknown .*: pass an epilogue=",
    ),
    "PyTorch's sums": (
        lambda: co.scaled_gemm(A, B, 1.0, 1.0, use_fast_accum=True), TypeError,
        "^use_fast_accum is unknown .*: pass math='fast' or",
    ),
    "a list": (
        lambda: co.scaled_gemm(A, B, [1.0] * M, 1.0), TypeError, r"^scale_a must be .* pass torch.as_tensor\(scale_a\)",
    ),
    "an array": (
        lambda: co.scaled_gemm(A, B, 1.0, np.ones(N)), TypeError, r"^scale_b must be .* pass torch.as_tensor\(scale_b",
    ),
    "scales that require grad": (
        lambda: co.quantize(X, "e4m3", out={"d_scale": torch.empty(M, 2).requires_grad_()}), ValueError,
        r"^out\['d_scale'\] requires grad",
    ),
    "FP64 without memory": (
        lambda: co.quantize(meta(3, 64, dtype=torch.float64), "e4m3"), TypeError, "^x is torch.float64",
    ),
    "columns without memory": (lambda: co.quantize(meta(64, 3).t(), "e4m3"), ValueError, "^x has shape .* and strides"),
    "nothing without memory": (lambda: co.quantize(meta(), "e4m3"), ValueError, "^x has no dimensions"),
    "rows of a weight without memory": (
        lambda: co.scaled_gemm(A.to("meta"), meta(K, N, dtype=E4M3), 1.0, 1.0), ValueError, "^b is .* along K only",
    ),
    "K without memory": (
        lambda: co.scaled_gemm(meta(M, 200, dtype=E4M3), meta(N, 200, dtype=E4M3).t(), 1.0, 1.0), ValueError,
        "^a is .*K=200 .*: pad K of a and b",
    ),
    "a result without memory": (
        lambda: co.quantize(meta(3, 64), "e4m3", out={"d": meta(5, 5, dtype=E4M3)}), ValueError,
        r"^out\['d'\] has shape \(5, 5\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "message"), SAID.values(), ids=SAID)
def test_messages_say_what_to_do(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


def test_a_refused_result_is_not_written():
    out = {"d": torch.zeros(M, K).to(E4M3), "d_scale": torch.empty(M, 2).requires_grad_()}
    with pytest.raises(ValueError, match=r"^out\['d_scale'\] requires grad"):
        co.quantize(X, "e4m3", out=out)
    assert not out["d"].float().any()
    with torch.no_grad():
        assert co.quantize(X, "e4m3", out=out).d is out["d"]


@pytest.mark.parametrize("named", [{"dtype": E4M3}, {"gamma": torch.empty(K, device="meta")}], ids=str)
def test_a_weight_without_memory_is_prepared_without_a_look_at_its_values(named):
    found = co.prepare(W.to("meta"), **named)
    assert (found.matrix.shape, found.matrix.device.type) == ((K, N), "meta")
    assert found.scale is None or found.scale.shape == (N,)
