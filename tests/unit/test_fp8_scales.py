"""Scales in the shapes that PyTorch and other libraries give them, and messages about those that no op takes."""

import re

import pytest
import torch

import cutlass_ops as co
from cutlass_ops.run import gemm

E4M3, E5M2, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16
M, N, K = 32, 48, 256
EXPERTS, ENDS = 3, torch.tensor([5, 5, 32], dtype=torch.int32)
ONE = torch.tensor(0.5)

pytestmark = pytest.mark.usefixtures("session")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def drawn(m=M, n=N, k=K):
    return torch.randn(m, k).to(E4M3), torch.randn(n, k).to(E4M3).t()


def of_experts(n=N, k=K, experts=EXPERTS):
    return torch.randn(M, k).to(E4M3), torch.randn(experts, n, k).to(E4M3).mT


def scaled(a, b, scale_a, scale_b, **named):
    return co.gemm(co.Scaled(a, scale_a), co.Scaled(b, scale_b), **named)


# ---- One element -----------------------------------------------------------------------------------------------------


@pytest.mark.sample(3)
@pytest.mark.parametrize("shape", [(1,), (1, 1)])
@pytest.mark.parametrize("k", [64, K])
def test_a_scale_of_one_element_is_a_number(shape, k):
    (a, b), one = drawn(k=k), ONE.expand(shape)
    rows, columns = torch.rand(M), torch.rand(N)
    assert torch.equal(co.gemm(co.Scaled(a, one), co.Scaled(b, one)), co.gemm(co.Scaled(a, 0.5), co.Scaled(b, 0.5)))
    for scale_a, scale_b in ((one, columns), (rows, one), (rows[:, None], one), (one, columns[None])):
        wanted = scaled(a, b, *(0.5 if x is one else x.flatten() for x in (scale_a, scale_b)))
        assert torch.equal(co.gemm(co.Scaled(a, scale_a), co.Scaled(b, scale_b)), wanted)
    x, w = of_experts(k=k)
    assert torch.equal(
        co.gemm(co.Scaled(x, one), co.Scaled(w, one), groups=co.Groups(ENDS)),
        co.gemm(co.Scaled(x, 0.5), co.Scaled(w, 0.5), groups=co.Groups(ENDS)),
    )
    compiled = torch.compile(scaled, fullgraph=True, backend="eager")
    assert torch.equal(compiled(a, b, one, columns), co.gemm(co.Scaled(a, 0.5), co.Scaled(b, columns)))


@pytest.mark.parametrize("dtype", [BF16, torch.int8])
def test_only_fp8_of_one_block_has_scales_of_blocks(dtype):
    a, b = ((4 * torch.randn(rows, 64)).to(dtype) for rows in (M, N))
    rows = torch.rand(M)
    wanted = co.gemm(co.Scaled(a, rows), co.Scaled(b.t(), 0.5))
    assert torch.equal(co.gemm(co.Scaled(a, rows[:, None]), co.Scaled(b.t(), ONE[None, None])), wanted)


def test_a_scale_of_the_result_may_have_one_element():
    x, w, residual = torch.randn(M, 64).to(BF16), torch.randn(64, N).to(BF16), torch.randn(M, N).to(BF16)
    for scale in (ONE[None], ONE[None, None]):
        made = co.gemm_residual_rms(x, w, residual, eps=1e-5, scale_out=scale)
        wanted = co.gemm_residual_rms(x, w, residual, eps=1e-5, scale_out=0.5)
        assert torch.equal(made.quantized.float(), wanted.quantized.float())
        found, wanted = (co.gemm_swiglu(x, w, w, scale_out=s, out_dtype=E4M3) for s in (scale, 0.5))
        assert torch.equal(found.float(), wanted.float())


# ---- Extents that a program leaves open ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("grouped", [False, True])
def test_layers_of_several_extents_are_one_program(grouped):
    compiled = torch.compile(scaled, fullgraph=True, backend="eager")
    for k, n in ((256, 384), (512, 384), (640, 512)):
        lead = (EXPERTS,) if grouped else ()
        w = torch.randn(*lead, n, k).to(E4M3).mT
        scales = torch.rand(M, k // 128), torch.rand(*lead, n // 128, k // 128)
        given, named = (torch.randn(M, k).to(E4M3), w, *scales), {"groups": co.Groups(ENDS)} if grouped else {}
        assert torch.equal(compiled(*given, **named), scaled(*given, **named))


# ---- Dimensions of 1 ------------------------------------------------------------------------------------------------


def test_columns_of_b_have_their_scales_in_a_row():
    a, b = drawn()
    for scale_a in (torch.rand(M, 1), torch.rand(M), 1.0):
        with pytest.raises(ValueError, match=r"^scale_b has shape \(48, 1\): .* or \(1, 48\), so pass scale_b.t\(\)$"):
            co.gemm(co.Scaled(a, scale_a), co.Scaled(b, torch.rand(N, 1)))


@pytest.mark.parametrize("k", [64, K])
def test_experts_may_have_dimensions_of_1(k):
    (x, w), rows, columns = of_experts(k=k), torch.rand(M), torch.rand(EXPERTS, N)
    wanted = co.gemm(co.Scaled(x, rows), co.Scaled(w, columns), groups=co.Groups(ENDS))
    for scale_a in (rows, rows[:, None]):
        assert torch.equal(
            co.gemm(co.Scaled(x, scale_a), co.Scaled(w, columns[:, None]), groups=co.Groups(ENDS)), wanted
        )
    counts = torch.full((EXPERTS,), M, dtype=torch.int32)
    a = co.Scaled(x.expand(EXPERTS, M, k).contiguous(), rows.expand(EXPERTS, M)[..., None])
    masked = co.gemm(a, co.Scaled(w, columns[:, None]), groups=co.Groups(counts=counts))
    assert torch.equal(masked, co.gemm(a, co.Scaled(w, columns), groups=co.Groups(counts=counts)))
    if k > 128:
        with pytest.raises(ValueError, match=r"^scale_b has shape \(3, 48, 1\): .* so pass scale_b.mT$"):
            co.gemm(co.Scaled(x, rows[:, None]), co.Scaled(w, columns[..., None]), groups=co.Groups(ENDS))


@pytest.mark.parametrize("n", [N, EXPERTS])
def test_a_scale_for_each_expert_is_not_one_for_each_column(n):
    (x, w), scale = of_experts(n=n), torch.rand(EXPERTS)
    with pytest.raises(ValueError, match=rf"^scale_b has shape \(3,\).*scale_b\[:, None\].repeat\(1, {n}\)") as caught:
        co.gemm(co.Scaled(x, 1.0), co.Scaled(w, scale), groups=co.Groups(ENDS))
    assert ("or scale_b[None] for one for each of 3 columns" in str(caught.value)) is (n == EXPERTS)
    each = co.gemm(co.Scaled(x, 1.0), co.Scaled(w, scale[:, None].repeat(1, n)), groups=co.Groups(ENDS))
    assert torch.equal(each[5:], co.gemm(co.Scaled(x[5:], 1.0), co.Scaled(w[2], scale[2].item())))
    with pytest.raises(ValueError, match=r"^scale_b has stride 0: call scale_b.contiguous\(\) first"):
        co.gemm(
            co.Scaled(x, 1.0), co.Scaled(w, scale[:, None].expand(3, n)), groups=co.Groups(ENDS)
        )  # which kernels do not read
    columns = torch.rand(1, n)
    alike = co.gemm(co.Scaled(x, 1.0), co.Scaled(w, columns), groups=co.Groups(ENDS))
    assert torch.equal(alike[5:], co.gemm(co.Scaled(x[5:], 1.0), co.Scaled(w[2], columns[0])))


# ---- Blocks ----------------------------------------------------------------------------------------------------------


def test_a_prepared_weight_has_scales_for_blocks_of_a():
    x, weight = torch.randn(M, K).to(BF16), torch.randn(N, K).to(BF16)
    prepared, (q, scale) = co.prepare(weight.t(), dtype=E4M3), co.Scaled.quantize(x, "e4m3")
    wanted = scaled(q, prepared.matrix, scale, prepared.scale[:, None].expand(N, 2))
    assert torch.equal(co.gemm(co.Scaled(q, scale), prepared), wanted)
    residual = torch.zeros(M, N).to(BF16)
    made = co.gemm_residual_rms(co.Scaled(q, scale), prepared, residual, eps=1e-5)
    assert torch.equal(made.y, wanted)
    rstd = torch.ones(M)
    assert torch.equal(co.rmsnorm_gemm(co.Scaled(q, scale), prepared, rstd=rstd), wanted)


@pytest.mark.parametrize("batch", [(2, 16), (1, 32), (32, 1), (2, 4, 4)])
@pytest.mark.parametrize("k", [128, K])
def test_blocks_of_a_flat_matrix_are_those_of_its_batch(batch, k):
    x, w = co.Scaled.quantize(torch.randn(M, k), "e4m3"), co.Scaled.quantize(torch.randn(N, k), "e4m3", block=None)
    b, values = co.Scaled(w.values.t(), w.scale[:, None].expand(N, k // 128)), x.values.view(*batch, k)
    assert torch.equal(co.gemm(co.Scaled(values, x.scale), b), co.gemm(x, b).view(*batch, N))
    rows = torch.rand(batch)
    found = co.gemm(co.Scaled(values, rows), co.Scaled(w.values.t(), 1.0))
    assert torch.equal(found.view(M, N), scaled(x.values, w.values.t(), rows.flatten(), 1.0))


# ---- A copy in FP8 ---------------------------------------------------------------------------------------------------


def test_a_copy_is_rounded_to_the_type_in_which_it_is_stored():
    x, w, residual = torch.randn(M, 64).to(BF16), torch.randn(64, N).to(BF16), torch.randn(M, N).to(BF16)
    named = {"eps": 1e-5, "scale_out": 0.001}
    wanted = co.gemm_residual_rms(x, w, residual, **named, quantized_dtype=E5M2).quantized
    out = {"quantized": torch.empty(M, N, dtype=E5M2)}
    assert co.gemm_residual_rms(x, w, residual, **named, out=out).quantized is out["quantized"]
    assert torch.equal(out["quantized"].float(), wanted.float())
    message = "out['quantized'] is torch.float8_e5m2, and quantized_dtype asks for torch.float8_e4m3fn: omit"
    with pytest.raises(TypeError, match=re.escape(message)):
        co.gemm_residual_rms(x, w, residual, **named, out=out, quantized_dtype=E4M3)
    with pytest.raises(TypeError, match=r"^out\['quantized'\] is torch.bfloat16: use torch.float8_e4m3fn or"):
        co.gemm_residual_rms(x, w, residual, **named, out={"quantized": residual.clone()})


# ---- What quantises --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [200, 300, 256, 7])
@pytest.mark.parametrize("batch", [(M,), (2, 16)])
def test_what_was_quantised_is_multiplied(k, batch):
    x, w = torch.randn(*batch, k), torch.randn(N, k)
    exact = x @ w.t()
    for block in (None, 128):
        (a, scale_a), (b, scale_b) = (co.Scaled.quantize(t, "e4m3", block) for t in (x, w))
        assert (a.stride(-2) % 16, b.stride(-2) % 16) == (0, 0)
        found = co.gemm(co.Scaled(a, scale_a), co.Scaled(b.t(), scale_b))
        assert (found - exact).norm() < 0.1 * exact.norm()
    for recipe in ("TensorWise", "RowWise"):
        state = co.nn.Fp8State(recipe, scaling="current")
        (a, scale_a), (b, scale_b) = state.quantize(x), state.quantize(w)
        assert (co.gemm(co.Scaled(a, scale_a), co.Scaled(b.t(), scale_b)) - exact).norm() < 0.1 * exact.norm()


def test_a_transposed_operand_keeps_its_scale():
    values, scale = torch.randn(2, 8, 16), torch.rand(2, 8)
    for found in (co.Scaled(values, scale).mT, co.Scaled(values[0], scale).t()):
        assert (found.shape[-2:], found.scale is scale) == ((16, 8), True)
    assert torch.equal(co.Scaled(values[0], scale).t().t().values, values[0])


@pytest.mark.parametrize("shape", [(1,), (1, 1)], ids=str)
def test_a_single_row_with_a_scale_is_served_by_the_kernels_of_many(shape):
    """An op of its own would compile as many kernels again for this number of rows alone."""
    (x, _), (w, of_w) = drawn(1), (drawn()[1], torch.rand(N))

    def op_of(x, scale):
        return gemm.flattened(None, "", co.Scaled(x, scale), co.Scaled(w, of_w), None)

    op, (_, _, scale, _) = op_of(x, torch.rand(shape))
    assert scale.shape == shape
    assert op is op_of(torch.cat([x, x]), torch.rand(2))[0]
    assert op is not op_of(x, torch.rand(()))[0]
    found = co.gemm(co.Scaled(x, torch.full(shape, 0.5)), co.Scaled(w, of_w))
    exact = x.double() @ w.double() * 0.5 * of_w
    torch.testing.assert_close(found.double(), exact, rtol=1e-2, atol=1e-2)
