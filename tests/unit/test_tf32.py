"""TF32 and 3xTF32: what is served and by which instruction, what is refused, and the reference."""

import pytest
import torch
from signatures import A100, H100
from typed_calls import L40S, MAJORS, centred, relu_bias, signature

import cutlass_ops as co
from cutlass_ops.base.dtypes import f32, tf32, tf32x3
from cutlass_ops.choose import dispatch, space
from cutlass_ops.declare.problem import Problem
from cutlass_ops.kinds import legality
from cutlass_ops.kinds.sm80.kind import SM80
from cutlass_ops.operand import matrices
from cutlass_ops.operand.call import call_at, signature_of
from cutlass_ops.run import requests

pytestmark = pytest.mark.usefixtures("session")

A, W, BIAS = torch.randn(24, 40), torch.randn(16, 40), torch.randn(16)


@pytest.mark.parametrize(
    ("x", "wanted"),
    [
        (1.0, 1.0),
        (1 + 2**-10, 1 + 2**-10),
        (1 + 2**-11, 1 + 2**-10),  # a tie, away from zero
        (-1 - 2**-11, -1 - 2**-10),
        (1 + 2**-11 - 2**-23, 1.0),
        (2 - 2**-23, 2.0),
        (3.4028234e38, float("inf")),
        (-float("inf"), -float("inf")),
        (2.0**-149, 0.0),
    ],
)
def test_the_reference_rounds_to_tf32(x, wanted):
    assert matrices.as_multiplied(torch.tensor([x]), tf32).item() == wanted


def test_nan_stays_nan_and_other_types_stay_as_they_are():
    every = torch.tensor([0x7F800001, 0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
    assert matrices.as_multiplied(every, tf32).isnan().all()
    assert matrices.as_multiplied(A, f32) is A


def test_a_call_says_that_it_multiplies_in_tf32():
    exact = (A.double() @ W.double().t() + BIAS).relu()
    found = co.gemm(A, W.t(), epilogue=relu_bias, bias=BIAS, math="tf32")
    error = (found - exact).norm() / exact.norm()
    assert found.dtype is torch.float32
    assert 2**-14 < error < 2**-10  # of the operands' rounding
    rounded = [matrices.as_multiplied(x, tf32).double() for x in (A, W)]
    assert torch.allclose(found.double(), (rounded[0] @ rounded[1].t() + BIAS).relu(), rtol=1e-5, atol=1e-5)
    assert co.gemm(A, W.t(), math="tf32", out_dtype=torch.bfloat16).dtype is torch.bfloat16


@pytest.mark.parametrize("math", ["tf32", "3xtf32"])
def test_autocast_leaves_a_call_that_names_its_arithmetic(math):
    wanted = co.gemm_bias_relu(A, W.t(), BIAS, math=math)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(co.gemm_bias_relu(A, W.t(), BIAS, math=math), wanted)


def test_gradients_are_multiplied_in_tf32_as_well():
    a, w = A.clone().requires_grad_(), W.clone().requires_grad_()
    co.gemm_bias_relu(a, w.t(), BIAS, math="tf32").sum().backward()
    mask = (matrices.as_multiplied(A, tf32) @ matrices.as_multiplied(W, tf32).t() + BIAS > 0).float()
    assert torch.allclose(a.grad, mask @ matrices.as_multiplied(W, tf32), rtol=1e-5, atol=1e-5)
    assert torch.allclose(w.grad, mask.t() @ matrices.as_multiplied(A, tf32), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("math", ["tf32", "3xtf32"])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_gradient_may_repeat_values(dim, math):
    @co.epilogue
    def summed(acc, bias: co.Row):
        return {"d": acc, "sums": co.e.sum(acc + bias, dim=dim)}

    a, w = A.clone().requires_grad_(), W.clone().requires_grad_()
    sums = co.gemm(a, w.t(), epilogue=summed, bias=BIAS, math=math).sums
    weights = torch.arange(1.0, 1 + len(sums))
    found = torch.autograd.grad(sums, [a, w], weights)
    element = tf32 if math == "tf32" else tf32x3
    of_d = (weights[:, None] if dim else weights).expand(len(A), len(W))
    wanted = of_d @ matrices.as_multiplied(W, element), of_d.t() @ matrices.as_multiplied(A, element)
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-3)


REFUSED = {
    "no math": (lambda: co.gemm(A, W.t()), r"^a is torch\.float32, .* torch\.matmul\. .* take math='tf32'"),
    "b alone": (lambda: co.gemm(A.bfloat16(), W.t()), r"^b is torch\.float32, .* take math='tf32'"),
    "BF16": (lambda: co.gemm(A.bfloat16(), W.bfloat16().t(), math="tf32"), "^a is .*, and math='tf32' is for torch.fl"),
    "another math": (
        lambda: co.gemm(A, W.t(), math="fp32"),
        "^math is 'fp32': use 'tf32' or '3xtf32' for torch.float32 operands, 'fast' ",
    ),
    "twice": (lambda: co.gemm_bias.in_math("tf32")(A, W.t(), BIAS, math="tf32"), "and gemm_bias has math 'tf32'"),
    "means": (lambda: co.gemm(A, W.t(), epilogue=centred, math="tf32"), "takes mean_of_a of its rows, as of 16 bits"),
    "groups": (
        lambda: co.gemm(A, W.t()[None], groups=co.Groups(torch.tensor([24])), math="tf32"),
        "math is 'tf32', and groups take 'fast' or 'promoted', for FP8",
    ),
    "RMSNorm": (
        lambda: co.rmsnorm_gemm(A, W.t(), eps=1e-6, math="tf32"),
        "^rmsnorm_gemm takes math 'fast' or .* Convert",
    ),
    "LayerNorm": (lambda: co.layernorm_gemm(A, W.t(), eps=1e-6, math="tf32"), "^layernorm_gemm takes no math: "),
    "residual": (
        lambda: co.gemm_residual_rms(A, W.t(), torch.randn(24, 16), eps=1e-6, math="tf32"),
        "^gemm_residual_rms takes math 'fast' or 'promoted', for FP8: ",
    ),
    "residual without math": (
        lambda: co.gemm_residual_rms(A, W.t(), torch.randn(24, 16), eps=1e-6),
        r"^a is torch\.float32: gemm_residual_rms takes .* Convert a and b, or write",
    ),
    "gated with a norm": (lambda: co.gemm_swiglu(A, W.t(), W.t(), eps=1e-6, math="tf32"), "pass it as .* rstd="),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused_says_what_to_do(call, message):
    with pytest.raises(TypeError, match=message):
        call()


def test_a_gate_in_tf32_is_one_kernel_or_two():
    gate, up = W.t(), torch.randn(16, 40).t()
    a, b, c = (matrices.as_multiplied(x, tf32).double() for x in (A, gate, up))
    found = co.gemm_swiglu(A, gate, up, math="tf32")
    assert torch.allclose(found.double(), torch.nn.functional.silu(a @ b) * (a @ c), rtol=1e-5, atol=1e-5)
    op = requests.requested(co.gemm_swiglu, A, gate, up, math="tf32").op
    call = call_at(op.graph, Problem(512, 4096, 4096), "tf32", "row", "col")
    assert [spec.a.dtype for spec in dispatch.decide(signature_of(call, H100), H100, call.problem).specs[:1]] == [tf32]
    # Before Hopper a GEMM for each weight, in TF32 as well.
    parts = op.instead_of(call)
    assert [part.math for part, _ in parts] == ["tf32", "tf32"]
    for _, part in parts:
        assert dispatch.decide(signature_of(part, A100), A100, part.problem).specs[0].a.dtype is tf32


@pytest.mark.parametrize("m", [1, 16, 512, 8192])
def test_wgmma_serves_tf32_along_k(m):
    of = signature("tf32")
    assert (str(of.a), str(of.b), str(of.d)) == ("tf32.row", "tf32.col", "f32.row")
    for config in dispatch.decide(of, H100, Problem(m, 4096, 4096)).kept:
        assert config.family.tma
        assert legality.check(H100.spec(of, config)) == ()


@pytest.mark.sample(8)
@pytest.mark.parametrize("device", [A100, L40S, H100], ids=lambda d: f"sm_{d.capability[0]}{d.capability[1]}")
@pytest.mark.parametrize(("a", "b"), MAJORS)
@pytest.mark.parametrize("problem", [(512, 4096, 4096), (3, 4098, 4098), (77, 4099, 4097), (4096, 4096, 4097)])
def test_wgmma_serves_copies_and_mma_sync_operands_as_they_lie(device, a, b, problem):
    of = signature("tf32", a, b, device, problem)
    decision = dispatch.decide(of, device, Problem(*problem))
    along_k = (a, b) == ("row", "col") and problem == (512, 4096, 4096)
    assert of.realigns == (not along_k)
    # Where A alone is copied, few numbers of rows are better off without.
    wanted = {True} if along_k or (a, b, problem[2]) == ("col", "col", 4096) else {False, True}
    assert {c.family.tma for c in decision.kept} == (wanted if device is H100 else {False})
    for spec in decision.specs:
        assert legality.check(spec) == ()
        if spec.config.family.tma:
            assert spec.config.realign == (not along_k)
        else:
            assert (spec.config.arch, str(spec.config.instruction)) == ("sm80", "16x8x8")
            assert spec.config.stages > 2


@pytest.mark.parametrize(("a", "b"), [("row", "row"), ("col", "row"), ("col", "col")])
def test_a_copy_is_worth_it_for_many_rows(a, b):
    """Multiplying takes longer than reading and writing the weight once more, but not for few rows."""
    of = signature("tf32", a, b)
    served = {m: dispatch.decide(of, H100, Problem(m, 4096, 4096)).config for m in (16, 32, 2048, 8192)}
    assert {m: config.family.tma for m, config in served.items()} == {
        16: b == "col",
        32: b == "col",
        2048: True,
        8192: True,
    }
    # A by itself has as few elements as it has rows.
    assert all(config.realign for config in served.values() if config.family.tma)


# ---- 3xTF32 ----------------------------------------------------------------------------------------------------------


@pytest.mark.sample(5)
@pytest.mark.parametrize("device", [A100, L40S, H100], ids=lambda d: f"sm_{d.capability[0]}{d.capability[1]}")
@pytest.mark.parametrize(("a", "b"), [("row", "row"), ("col", "row"), ("row", "col")])
@pytest.mark.parametrize("problem", [(16, 4096, 4096), (4096, 4096, 4096), (77, 33, 1037)])
def test_mma_sync_serves_3xtf32(device, a, b, problem):
    of = signature("tf32x3", a, b, device, problem)
    assert (str(of.d), of.a.dtype) == ("f32.row" if problem[1] > 33 else "f32.row.align1", tf32x3)
    for spec in dispatch.decide(of, device, Problem(*problem)).specs:
        assert legality.check(spec) == ()
        assert (spec.config.arch, spec.config.warp.m * spec.config.warp.n <= 2048) == ("sm80", True)
        assert "OpMultiplyAddFastF32>" in co.source(spec)
    assert len(space.legal(SM80, of, device)) > 20
