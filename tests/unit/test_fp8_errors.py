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
LAYER = co.prepare(W, torch.ones(K), norm="layer")

pytestmark = pytest.mark.usefixtures("session")


@co.epilogue
def two_outputs(acc):
    return {"d": acc, "twice": acc * 2}


def meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


SAID = {
    "a layer norm's weight": (
        lambda: co.layernorm_gemm(X, FOLDED, eps=1e-5), TypeError,
        r"^b is not prepared for a LayerNorm: pass prepare\(w, gamma, beta, norm='layer'\)",
    ),
    "a norm's weight": (
        lambda: co.rmsnorm_gemm(X, LAYER, eps=1e-5), TypeError,
        r"^b is prepared for a LayerNorm: pass prepare\(w, gamma\)",
    ),
    "an operand without a scale": (
        lambda: co.gemm(A, QUANTISED), TypeError, r"^scale_a is missing: b has a scale.*pass cutlass_ops.Scaled\(a, sc",
    ),
    "a plain op, after a call that it serves": (
        lambda: (co.gemm(X, FOLDED), co.gemm(X, LAYER)), TypeError,
        "^b is prepared for a LayerNorm: call layernorm_gemm",
    ),
    "a scaled operand, scaled": (
        lambda: co.gemm(co.Scaled(co.Scaled(A, 1.0), 1.0), QUANTISED), TypeError,
        "^the values of a are a Scaled, which has scales of its own: pass it as a itself",
    ),
    "a prepared weight, scaled": (
        lambda: co.gemm(co.Scaled(A, 1.0), co.Scaled(QUANTISED, 1.0)), TypeError, "^the values of b are a Prepared",
    ),
    "a prepared weight as a": (
        lambda: co.gemm(QUANTISED, QUANTISED), TypeError, "^a must be a tensor or a cutlass_ops.Scaled, not Prepared",
    ),
    "a tuple": (
        lambda: co.gemm((A, 1.0), co.Scaled(B, 1.0)), TypeError, "^a must be a tensor or .*, not tuple",
    ),
    "an operand that is prepared": (
        lambda: co.prepare(co.Scaled(B, 1.0)), TypeError,
        r"^w is a Scaled: pass w.values, and cutlass_ops.Scaled\(prepared.matrix, w.scale\) to the call",
    ),
    "a scale without a shape": (
        lambda: torch.fx.symbolic_trace(lambda s: co.gemm(co.Scaled(A, s), QUANTISED)), TypeError,
        "^a's scale is a value of torch.fx.symbolic_trace, which knows no shapes",
    ),
    "a launch's operand": (
        lambda: co.prepare_launch(co.gemm, co.Scaled(A, 1.0), QUANTISED)(co.Scaled(A, 1.0)), TypeError,
        "^a must be a tensor: pass the values as a, and their scale as scale_a",
    ),
    "a weight of batches": (
        lambda: co.prepare(torch.randn(2, K, N).to(BF16), dtype=E4M3), ValueError,
        r"^w has shape \(2, 256, 32\): it must be \(K, N\), so prepare weights of batches one by one",
    ),
    "a tensor in the language": (
        lambda: co.e.quantize(X, "e4m3"), EpilogueError, "co.e.quantize works .*: for tensors call co.Scaled.quantize",
    ),
    "scales of rows, turned": (
        lambda: co.gemm(co.Scaled(A, torch.ones(1, len(A))), co.Scaled(B, torch.ones(N))), ValueError,
        r"^scale_a has shape \(1, 8\): scales of rows are \(8,\) or \(8, 1\), so pass scale_a\.t\(\)",
    ),
    "a gate's blocks": (
        lambda: co.gemm_swiglu(co.Scaled(A, BLOCKS[0]), co.Scaled(B, 1.0), co.Scaled(B, 1.0)), ValueError,
        r"^scale_a has shape \(8, 2\), as scales of blocks do, .* or one for each row: call gemm",
    ),
    "outputs and a scale": (
        lambda: co.rmsnorm_gemm(X, W, eps=1e-5, epilogue=two_outputs, scale_out=1.0, out_dtype=E4M3), ValueError,
        "^two_outputs has outputs besides D, twice, and scale_out= and amax= need an epilogue that returns only D",
    ),
    "PyTorch's bias": (
        lambda: co.gemm(co.Scaled(A, 1.0), co.Scaled(B, 1.0), bias=torch.ones(N)), TypeError,
        "bias is unknown \\(pass an epilogue=",
    ),
    "PyTorch's sums": (
        lambda: co.gemm(co.Scaled(A, 1.0), co.Scaled(B, 1.0), use_fast_accum=True), TypeError,
        "use_fast_accum is unknown \\(pass math='fast' or",
    ),
    "a list": (
        lambda: co.gemm(co.Scaled(A, [1.0] * M), co.Scaled(B, 1.0)), TypeError,
        r"^scale_a must be .* pass torch.as_tensor\(scale_a\)",
    ),
    "an array": (
        lambda: co.gemm(co.Scaled(A, 1.0), co.Scaled(B, np.ones(N))), TypeError,
        r"^scale_b must be .* pass torch.as_tensor\(scale_b",
    ),
    "scales that require grad": (
        lambda: co.Scaled.quantize(X, "e4m3", out=co.Scaled(None, torch.empty(M, 2).requires_grad_())), ValueError,
        r"^out\.scale requires grad",
    ),
    "FP64 without memory": (
        lambda: co.Scaled.quantize(meta(3, 64, dtype=torch.float64), "e4m3"), TypeError, "^x is torch.float64",
    ),
    "columns without memory": (
        lambda: co.Scaled.quantize(meta(64, 3).t(), "e4m3"), ValueError, "^x has shape .* and strides",
    ),
    "nothing without memory": (lambda: co.Scaled.quantize(meta(), "e4m3"), ValueError, "^x has no dimensions"),
    "rows of a weight without memory": (
        lambda: co.gemm(co.Scaled(A.to("meta"), 1.0), co.Scaled(meta(K, N, dtype=E4M3), 1.0)), ValueError,
        "^b is .* along K only",
    ),
    "K without memory": (
        lambda: co.gemm(co.Scaled(meta(M, 200, dtype=E4M3), 1.0), co.Scaled(meta(N, 200, dtype=E4M3).t(), 1.0)),
        ValueError,
        "^a is .*200.*: pad K of a and b",
    ),
    "a result without memory": (
        lambda: co.Scaled.quantize(meta(3, 64), "e4m3", out=co.Scaled(meta(5, 5, dtype=E4M3), None)), ValueError,
        r"^out\.values has shape \(5, 5\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "message"), SAID.values(), ids=SAID)
def test_messages_say_what_to_do(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


def test_a_refused_result_is_not_written():
    out = co.Scaled(torch.zeros(M, K).to(E4M3), torch.empty(M, 2).requires_grad_())
    with pytest.raises(ValueError, match=r"^out\.scale requires grad"):
        co.Scaled.quantize(X, "e4m3", out=out)
    assert not out.values.float().any()
    with torch.no_grad():
        assert co.Scaled.quantize(X, "e4m3", out=out).values is out.values


@pytest.mark.parametrize("named", [{"dtype": E4M3}, {"gamma": torch.empty(K, device="meta")}], ids=str)
def test_a_weight_without_memory_is_prepared_without_a_look_at_its_values(named):
    found = co.prepare(W.to("meta"), **named)
    assert (found.matrix.shape, found.matrix.device.type) == ((K, N), "meta")
    assert found.scale is None or found.scale.shape == (N,)
