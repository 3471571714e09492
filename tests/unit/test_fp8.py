"""FP8 operands: what is served, what is refused, and the reference against FP64 of the same operands."""

import itertools
from fractions import Fraction

import pytest
import torch
from signatures import A100, H100

import cutlass_ops as co
from cutlass_ops.base.errors import ConfigError
from cutlass_ops.choose import dispatch, policies
from cutlass_ops.declare.chips import USUAL
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.roofline import roofline
from cutlass_ops.declare.spelling import epilogue_of
from cutlass_ops.epilogue import builtin, composed
from cutlass_ops.kinds import legality
from cutlass_ops.kinds.sm90 import model
from cutlass_ops.operand.call import call_at, signature_of
from cutlass_ops.tools.explaining import explain_call

E4M3, E5M2, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16
PAIRS = list(itertools.product((E4M3, E5M2), repeat=2))

pytestmark = pytest.mark.usefixtures("session")


@co.epilogue
def scaled(acc, scale_a: co.Col, scale_b: co.Row, bias: co.Row):
    return acc * scale_a * scale_b + bias


@co.epilogue
def centred(acc):
    return acc - co.e.mean_of_a()


def draw(rows, columns, dtype, seed=0):
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    return x.to(dtype)


@pytest.fixture
def call():
    """Operands and inputs of a call, with the exact result."""

    def make(a=E4M3, b=E4M3, m=48, n=40, k=256):
        x, w = draw(m, k, a), draw(n, k, b, seed=1)
        inputs = {"scale_a": torch.rand(m) + 0.1, "scale_b": torch.rand(n) + 0.1, "bias": torch.randn(n).to(BF16)}
        exact = x.double() @ w.double().t() * inputs["scale_a"][:, None].double() * inputs["scale_b"].double()
        return x, w.t(), inputs, exact + inputs["bias"].double()

    return make


def signature(dtype="e4m3", graph=builtin.bias.graph, device=H100, problem=(512, 4096, 128), **named):
    return signature_of(call_at(graph, Problem(*problem), dtype, "row", "col", **named), device)


# ---- Types -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("swap", "types"), [(False, "e4m3.e5m2"), (True, "e5m2.e4m3")])
def test_the_kernel_names_the_types_in_its_own_orientation(swap, types):
    config = co.Sm90Config(co.ThreadblockShape(128, 128, 128), swap_ab=swap)
    text = co.source(co.KernelSpec(a="e4m3.row", b="e5m2.col", d="bf16.row", epilogue=scaled, config=config))
    assert f'"k32.f32.{types}", false)' in text
    assert "CUTLASS_OPS_TYPE(cutlass::float_e4m3_t, 10)" in text
    assert "CUTLASS_OPS_TYPE(cutlass::float_e5m2_t, 12)" in text


# ---- Calls on the CPU ------------------------------------------------------------------------------------------------


def test_a_product_has_the_type_of_b():
    x, gate, up = draw(16, 64, E4M3), draw(32, 64, E5M2, 1).t(), draw(32, 64, E5M2, 2).t()
    found = co.gemm_swiglu(x, gate, up)
    exact = torch.nn.functional.silu(x.double() @ gate.double()) * (x.double() @ up.double())
    assert found.dtype is BF16
    assert (found.double() - exact).abs().max() <= 2 * (exact.to(BF16).double() - exact).abs().max()


ALONG_K = "Tensor Cores read this type along K only: pass "
REFUSED = {
    "a, column-major": (lambda x, w: (x.t().contiguous().t(), w), ValueError, f"^a is .*{ALONG_K}a row-major"),
    "b, row-major": (lambda x, w: (x, w.contiguous()), ValueError, f"^b is .*{ALONG_K}weight.t"),
    "K": (lambda x, w: (x[:, :250].clone(), w[:250].t().contiguous().t()), ValueError, "^a is .*250.*pad K of"),
    "address": (lambda x, w: (x[:, 1:241], w[1:241]), ValueError, "^a is .* do not begin at multiples of 16 bytes"),
    "b in BF16": (lambda x, w: (x, w.to(BF16)), TypeError, "^b is torch.bfloat16 and a is .* or both FP8"),
    "a in BF16": (lambda x, w: (x.to(BF16), w), TypeError, "^b is torch.float8_e4m3fn and a is torch.bfloat16"),
}


@pytest.mark.parametrize(("change", "kind", "message"), REFUSED.values(), ids=REFUSED)
def test_what_no_kernel_reads_does_not_run_on_the_cpu_either(call, change, kind, message):
    x, w, *_ = call()
    with pytest.raises(kind, match=message):
        co.gemm(*change(x, w))


def test_lines_may_be_longer_than_k(call):
    x, w, inputs, _ = call()
    padded = torch.zeros(48, 256, dtype=E4M3)
    padded[:, :250] = x[:, :250]
    wide = torch.zeros(40, 256, dtype=E4M3)
    wide[:, :250] = w.t()[:, :250]
    cut = co.gemm(padded[:, :250], wide[:, :250].t(), epilogue=scaled, **inputs)
    assert torch.equal(cut, co.gemm(padded, wide.t(), epilogue=scaled, **inputs))


def test_other_refusals(call):
    x, w, inputs, _ = call()
    with pytest.raises(TypeError, match=r"^a is .*, and the epilogue takes mean_of_a .* pass it as a Col"):
        co.gemm(x, w, epilogue=centred)
    with pytest.raises(TypeError, match=r"^bias is torch.float8_e4m3fn: use one of"):
        co.gemm(x, w, epilogue=scaled, **inputs | {"bias": inputs["bias"].to(E4M3)})
    with pytest.raises(ConfigError, match="rmsnorm_gemm does not take e4m3: use bf16 or f16"):
        epilogue_of("rmsnorm_gemm", "e4m3")


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (1, 40, 16), (48, 1, 16), (0, 40, 16), (48, 40, 0), (48, 0, 16)])
def test_extents_of_one_and_of_zero(m, n, k):
    x, w = (
        torch.zeros(m, 16 if k == 1 else k, dtype=E4M3)[:, :k],
        torch.zeros(n, 16 if k == 1 else k, dtype=E4M3)[:, :k],
    )
    assert co.gemm(x, w.t()).tolist() == torch.zeros(m, n).tolist()


# ---- The choice of a kernel ------------------------------------------------------------------------------------------


def test_a_call_of_one_row_and_one_column_is_read_along_k():
    of = signature(problem=(1, 1, 1))
    assert (of.a.major, of.b.major) == ("row", "col")


@pytest.mark.parametrize("epilogue", [builtin.identity, builtin.bias, composed.swiglu])
@pytest.mark.parametrize("m", [1, 16, 512, 8192])
def test_every_problem_is_served_by_a_legal_kernel(epilogue, m):
    of = signature(graph=epilogue.graph)
    inputs = {builtin.bias: ["bf16"], composed.swiglu: ["e4m3"]}.get(epilogue, [])  # a product has the type of B
    assert (str(of.a), str(of.b), str(of.d)) == ("e4m3.row", "e4m3.col", "bf16.row")
    assert [x.dtype.name for x in of.inputs] == inputs
    for config in dispatch.decide(of, H100, Problem(m, 4096, 4096)).kept:
        assert config.family.tma
        assert legality.check(H100.spec(of, config)) == ()


def test_choices_learn_from_measurements_of_fp8_alone():
    """The model's errors at BF16 are others: choices at weights left out lost 1 to 3% more."""
    (of_fp8,) = policies.policy(signature(), H100).tables
    assert of_fp8.signature.a.dtype.name == "e4m3"
    assert {p.problem.extents for p in of_fp8.points} >= {(16, 4096, 4096), (8192, 8192, 8192)}


def test_measurements_of_16_bits_count_at_twice_their_k():
    """Where 8 bits have no table of their own, as INT8 has none."""
    of, usual = signature(), signature("bf16")
    theirs = policies.policy(usual, H100).tables
    ours = [policies._as_if_about(table, of, H100) for table in theirs]
    assert len(policies.policy(signature("i8"), H100).tables) == len(theirs)
    for before, after in zip(theirs, ours, strict=True):
        at = {Problem(p.problem.m, p.problem.n, 2 * p.problem.k): p for p in before.points}
        assert len(after.points) > 10
        for point in after.points:
            (fastest, *_), same = at[point.problem].measured, point.measured[0]
            assert {c.config.threadblock.k for c in point.measured} <= {64, 128, 256}
            if fastest.config.family.tma and fastest.config.threadblock.k <= 128:
                assert same.microseconds == pytest.approx(fastest.microseconds)
                assert same.config.threadblock.k == 2 * fastest.config.threadblock.k


def test_no_device_without_wgmma_serves_them():
    of = signature(device=A100)
    assert dispatch.decide(of, A100, Problem(512, 4096, 4096)) is None
    found = explain_call("gemm", call_at(builtin.bias.graph, Problem(512, 4096, 4096), "e4m3", "row", "col"), A100)
    assert not found.is_served
    assert "convert a and b to BF16" in found.why


def test_the_model_knows_widths():
    config = co.Sm90Config(co.ThreadblockShape(128, 128, 128))
    narrow = co.Sm90Config(co.ThreadblockShape(128, 128, 64))
    large = Problem(8192, 8192, 8192)
    eight, sixteen = model.predict(config, large, widths=(1, 2)), model.predict(narrow, large)
    assert Fraction(2, 5) < Fraction(eight / sixteen) < Fraction(3, 5)
    assert model.predict(config, large, widths=(1, 1)) <= eight


def test_the_roofline_is_twice_as_high():
    problem = Problem(8192, 8192, 8192)
    assert roofline(problem, 1, USUAL, rate=2.0).compute == roofline(problem, 1, USUAL).compute / 2


# ---- Scaled GEMM -----------------------------------------------------------------------------------------------------


@co.epilogue
def gate(acc, up: co.Product):
    return acc * up


def scales(rows, columns, m=48, n=40):
    torch.manual_seed(3)
    return (torch.rand(m) if rows else torch.rand(()), torch.rand(n) if columns else torch.rand(()))


@pytest.mark.parametrize(("a", "b"), PAIRS)
@pytest.mark.parametrize(("rows", "columns"), list(itertools.product((False, True), repeat=2)))
def test_scales_are_applied_before_the_one_rounding(call, a, b, rows, columns):
    x, w, *_ = call(a, b)
    scale_a, scale_b = scales(rows, columns)
    exact = x.double() @ w.double() * scale_a.double().reshape(-1, 1) * scale_b.double()
    found = co.gemm(co.Scaled(x, scale_a), co.Scaled(w, scale_b))
    assert found.dtype is BF16
    assert (found.double() - exact).abs().max() <= 2 * (exact.to(BF16).double() - exact).abs().max()


@pytest.mark.parametrize("scale", [0.0, float("inf"), float("nan"), -1.0, 2.0**-140])
def test_scales_that_are_not_usual(call, scale):
    x, w, *_ = call()
    exact = (x.float() @ w.float()) * torch.tensor(scale) * torch.ones(40)
    found = co.gemm(co.Scaled(x, scale), co.Scaled(w, torch.ones(40)), out_dtype=torch.float32)
    torch.testing.assert_close(found, exact, equal_nan=True)


OTHERS = {
    "rows": ((torch.ones(40), 1.0), {}, ValueError, r"^scale_a has shape \(40,\): as a Col .*\(48,\)"),
    "columns": ((1.0, torch.ones(48)), {}, ValueError, r"^scale_b has shape \(48,\): as a Row"),
    "blocks": ((torch.ones(48, 2), 1.0), {}, ValueError, r"^scale_a has shape \(48, 2\)"),
    "dtype": ((torch.ones(48).double(), 1.0), {}, TypeError, r"^scale_a is torch.float64: use"),
    "name": ((1.0, 1.0), {"epilogue": scaled}, ValueError, r"^scaled has an input scale_a, scale_b"),
    "means": ((1.0, 1.0), {"epilogue": centred}, ValueError, r"^centred takes mean_of_a"),
}


@pytest.mark.parametrize(("given", "named", "kind", "message"), OTHERS.values(), ids=OTHERS)
def test_errors_of_scaled_calls_say_what_is_wrong(call, given, named, kind, message):
    x, w, *_ = call()
    with pytest.raises(kind, match=message):
        co.gemm(*map(co.Scaled, (x, w), given), **named)
    with pytest.raises(ValueError, match=r"^b is .* along K only"):
        co.gemm(co.Scaled(x, 1.0), co.Scaled(w.contiguous(), 1.0))
