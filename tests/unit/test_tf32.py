"""TF32 and 3xTF32: what is served and by which instruction, what is refused, and the reference."""

import json
import math
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from signatures import A100, H100
from typed_calls import L40S, MAJORS, centred, relu_bias, signature, sm80

import cutlass_ops as co
from cutlass_ops.base import mma
from cutlass_ops.base.dtypes import dtype as element_named
from cutlass_ops.base.dtypes import f32, tf32, tf32x3
from cutlass_ops.base.errors import EpilogueError
from cutlass_ops.choose import dispatch, policies, space
from cutlass_ops.choose.pool import Pool
from cutlass_ops.declare.device import Device
from cutlass_ops.declare.form import BATCHED
from cutlass_ops.declare.problem import Problem
from cutlass_ops.epilogue import builtin
from cutlass_ops.kinds import legality
from cutlass_ops.kinds.sm80 import model
from cutlass_ops.run import portable, reference, requests
from cutlass_ops.run.call import call_at, signature_of
from cutlass_ops.tools.explaining import explain_call

pytestmark = pytest.mark.usefixtures("session")

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
A, W, BIAS = torch.randn(24, 40), torch.randn(16, 40), torch.randn(16)


def test_tf32_is_a_row_of_the_table_and_a_type_of_operands_only():
    found = mma.mma_of(tf32, tf32)
    assert (found.wgmma_types, found.wgmma_opcode, found.opcode) == ("k8.f32.tf32.tf32", "HGMMA", "HMMA")
    assert found.shapes == ((16, 8, 8),)
    assert element_named("float32") is element_named("f32") is f32
    with pytest.raises(ValueError, match="'tf32' is not supported here"):
        element_named("tf32")
    config = co.Sm90Config(co.ThreadblockShape(128, 128, 32))
    spec = co.KernelSpec(a="tf32.row", b="tf32.col", d="tf32.row", epilogue=relu_bias, config=config)
    assert "epilogue_dtypes: d is tf32: use f16" in "\n".join(map(str, co.check(spec)))


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
    assert reference.as_multiplied(torch.tensor([x]), tf32).item() == wanted


def test_nan_stays_nan_and_other_types_stay_as_they_are():
    every = torch.tensor([0x7F800001, 0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
    assert reference.as_multiplied(every, tf32).isnan().all()
    assert reference.as_multiplied(A, f32) is A


def test_a_call_says_that_it_multiplies_in_tf32():
    exact = (A.double() @ W.double().t() + BIAS).relu()
    found = co.gemm(A, W.t(), epilogue=relu_bias, bias=BIAS, math="tf32")
    error = (found - exact).norm() / exact.norm()
    assert found.dtype is torch.float32
    assert 2**-14 < error < 2**-10  # of the operands' rounding
    rounded = [reference.as_multiplied(x, tf32).double() for x in (A, W)]
    assert torch.allclose(found.double(), (rounded[0] @ rounded[1].t() + BIAS).relu(), rtol=1e-5, atol=1e-5)
    assert co.gemm(A, W.t(), math="tf32", out_dtype=torch.bfloat16).dtype is torch.bfloat16


CALLS = {
    "an op": lambda a, w: co.gemm_bias_relu(a, w.t(), BIAS, math="tf32"),
    "an epilogue": lambda a, w: co.gemm(a, w.t(), epilogue=relu_bias, bias=BIAS, math="tf32"),
    "scales": lambda a, w: co.scaled_gemm(a, w.t(), 1.0, 1.0, epilogue=relu_bias, bias=BIAS, math="tf32"),
    "batches": lambda a, w: co.gemm(a[None], w.t()[None], epilogue=relu_bias, bias=BIAS, math="tf32")[0],
    "out": lambda a, w: co.gemm_bias_relu(a, w.t(), BIAS, math="tf32", out=torch.empty(24, 16)),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_every_way_to_call_takes_math(call):
    wanted = co.gemm_bias_relu(A, W.t(), BIAS, math="tf32")
    assert torch.allclose(call(A, W), wanted, rtol=1e-6, atol=1e-6)
    compiled = torch.compile(call, backend="eager", fullgraph=True)
    assert torch.equal(compiled(A, W), call(A, W))


@pytest.mark.parametrize("math", ["tf32", "3xtf32"])
def test_autocast_leaves_a_call_that_names_its_arithmetic(math):
    wanted = co.gemm_bias_relu(A, W.t(), BIAS, math=math)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(co.gemm_bias_relu(A, W.t(), BIAS, math=math), wanted)
        compiled = torch.compile(lambda a, b: co.gemm_bias_relu(a, b, BIAS, math=math), backend="eager", fullgraph=True)
        assert torch.equal(compiled(A, W.t()), wanted)


def test_an_op_in_tf32_is_one_and_travels():
    op = co.gemm_bias_relu.in_math("tf32")
    assert op is co.gemm_bias_relu.in_math("tf32")
    assert pickle.loads(pickle.dumps(op)) is op
    assert requests.requested(co.gemm, A, W.t(), epilogue=relu_bias, bias=BIAS, math="tf32").op.math == "tf32"
    assert requests.requested(co.gemm_bias_relu, A, W.t(), BIAS, math="tf32").op is op
    # In a process that has never seen it.

    text = op.about.split(";", 4)[4]
    again = portable._made(text)
    assert (again.math, again.graph, again.about) == ("tf32", op.graph, op.about)


def test_gradients_are_multiplied_in_tf32_as_well():
    a, w = A.clone().requires_grad_(), W.clone().requires_grad_()
    co.gemm_bias_relu(a, w.t(), BIAS, math="tf32").sum().backward()
    mask = (reference.as_multiplied(A, tf32) @ reference.as_multiplied(W, tf32).t() + BIAS > 0).float()
    assert torch.allclose(a.grad, mask @ reference.as_multiplied(W, tf32), rtol=1e-5, atol=1e-5)
    assert torch.allclose(w.grad, mask.t() @ reference.as_multiplied(A, tf32), rtol=1e-5, atol=1e-5)


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
    wanted = of_d @ reference.as_multiplied(W, element), of_d.t() @ reference.as_multiplied(A, element)
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
        lambda: co.grouped_gemm(A, W.t()[None], torch.tensor([24]), math="tf32"),
        "math is 'tf32', and grouped_gemm takes 'fast' or 'promoted', for FP8",
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
    a, b, c = (reference.as_multiplied(x, tf32).double() for x in (A, gate, up))
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


def test_math_is_no_name_of_an_input():
    with pytest.raises(EpilogueError, match="'math' is an argument of every call"):

        @co.epilogue
        def clashing(acc, math: co.Row):
            return acc + math


@pytest.mark.parametrize("m", [1, 16, 512, 8192])
def test_wgmma_serves_tf32_along_k(m):
    of = signature("tf32")
    assert (str(of.a), str(of.b), str(of.d)) == ("tf32.row", "tf32.col", "f32.row")
    for config in dispatch.decide(of, H100, Problem(m, 4096, 4096)).kept:
        assert config.wgmma
        assert legality.check(H100.spec(of, config)) == ()


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
    assert {c.wgmma for c in decision.kept} == (wanted if device is H100 else {False})
    for spec in decision.specs:
        assert legality.check(spec) == ()
        if spec.config.wgmma:
            assert spec.config.realign == (not along_k)
        else:
            assert (spec.config.arch, str(spec.config.instruction)) == ("sm80", "16x8x8")
            assert spec.config.stages > 2


@pytest.mark.parametrize(("a", "b"), [("row", "row"), ("col", "row"), ("col", "col")])
def test_a_copy_is_worth_it_for_many_rows(a, b):
    """Multiplying takes longer than reading and writing the weight once more, but not for few rows."""
    of = signature("tf32", a, b)
    served = {m: dispatch.decide(of, H100, Problem(m, 4096, 4096)).config for m in (16, 32, 2048, 8192)}
    assert {m: config.wgmma for m, config in served.items()} == {16: b == "col", 32: b == "col", 2048: True, 8192: True}
    # A by itself has as few elements as it has rows.
    assert all(config.realign for config in served.values() if config.wgmma)


def test_batches_are_not_copied():
    call = call_at(builtin.bias.graph, Problem(512, 512, 512, 8), "tf32", "row", "row", form=BATCHED)
    of = signature_of(call, H100)
    assert {spec.config.arch for spec in dispatch.decide(of, H100, call.problem).specs} == {"sm80"}


def test_the_model_of_mma_sync_agrees_with_its_measurements_in_tf32():
    """It decides whether a copy is worth it."""
    rows = json.loads((RESULTS / "types_h200.json").read_text())["rows"]
    h200, ratios = Device((9, 0), 132, "NVIDIA H200"), []
    for case in ("row,row", "col,row"):
        # With fewer rows, reading the weight takes longest, for which the model has an H100's memory.
        for row in (r for r in rows if r["case"] == f"tf32 plain {case}" and r["m"] >= 256):
            problem = Problem(row["m"], row["n"], row["k"])
            of = signature("tf32", *case.split(","), h200, problem.extents, builtin.identity.graph)
            every = policies.policy(of, h200).every(problem)
            ratios.append(next(c for c in every if not c.config.wgmma).microseconds / (1e3 * row["ours_ms"]))
    assert len(ratios) == 16
    assert 0.97 < math.exp(sum(map(math.log, ratios)) / len(ratios)) < 1.03
    assert all(0.85 < ratio < 1.2 for ratio in ratios)


def test_times_count_what_is_copied():
    problem, k_major = Problem(1024, 4096, 4096), signature("tf32", graph=builtin.identity.graph)
    config = dispatch.decide(k_major, H100, problem).config
    found = {}
    for a, b in MAJORS:
        of = signature("tf32", a, b, graph=builtin.identity.graph)
        pool = Pool.of([replace(config, realign=of.realigns)], of)
        found[a, b] = pool.times([problem], H100).item()
    bandwidth = 2 * 4 / 2500e3  # bytes of an element, read and written, by those of a microsecond
    wanted = {"col": 0.0, "row": bandwidth * 4096 * 4096}
    for (a, b), us in found.items():
        copies = wanted[b] + (bandwidth * 1024 * 4096 if a == "col" else 0.0)
        assert us == pytest.approx(found["row", "col"] + copies + (2.5 if copies else 0.0))


EXPLAINED = {
    "copied": (
        (2048, 4096, 4096),
        "wgmma, operands loaded by TMA: wgmma reads tf32 along K only, and a is tf32.row and b is tf32.row, so b is "
        "copied to aligned workspace first; pass prepare(b).matrix, which is copied once",
        "b, 67.1 MB read and written before each GEMM, 56.2 us of the expected time",
    ),
    "as it lies": (
        (16, 4096, 4096),
        "mma.sync, operands loaded by cp.async or registers: wgmma reads tf32 along K only, and a is tf32.row and b is "
        "tf32.row; pass prepare(b).matrix, which is copied once",
        None,
    ),
}


@pytest.mark.parametrize(("problem", "unit", "copied"), EXPLAINED.values(), ids=EXPLAINED)
def test_explain_says_what_is_copied_and_why(problem, unit, copied):
    found = explain_call("gemm", call_at(builtin.bias.graph, Problem(*problem), "tf32", "row", "row"), H100)
    said = found.to_json()["contract"]
    assert (said["unit"], said.get("copied")) == (unit, copied)
    along_k = explain_call("gemm", call_at(builtin.bias.graph, Problem(*problem), "tf32", "row", "col"), H100)
    assert along_k.to_json()["contract"]["unit"] == "wgmma, operands loaded by TMA"


RULES = {
    "two stages": ("row", "col", sm80(stages=2), "two_stages"),
    "lines along K": ("row", "col", sm80(k=64), "k_extent"),
    "lines along M": ("col", "row", sm80(tile=(16, 128), warp=(16, 64)), "short_lines"),
    "the instruction of BF16": ("row", "col", sm80(instruction=(16, 8, 16)), "instruction"),
    "wgmma along M": ("col", "col", co.Sm90Config(co.ThreadblockShape(128, 128, 32)), "operand_majors"),
    "nothing to copy": ("row", "col", co.Sm90Config(co.ThreadblockShape(128, 128, 32), realign=True), "realign"),
    "GEMV": ("row", "col", co.GemvConfig(), "operand_dtypes"),
}


@pytest.mark.parametrize(("a", "b", "config", "rule"), RULES.values(), ids=RULES)
def test_legality(a, b, config, rule):
    spec = co.KernelSpec(a=f"tf32.{a}", b=f"tf32.{b}", d="f32.row", epilogue=relu_bias, config=config)
    assert rule in [violation.rule for violation in co.check(spec)]


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize(("a", "b"), MAJORS[:3])
def test_sources_of_copies(a, b, swap):
    config = co.Sm90Config(co.ThreadblockShape(128, 128, 32), swap_ab=swap, realign=True)
    spec = co.KernelSpec(a=f"tf32.{a}", b=f"tf32.{b}.align1", d="f32.row", epilogue=relu_bias, config=config)
    text = co.source(spec)
    assert '#include "cutlass_ops/along_k.h"' in text
    assert "realign.h" not in text
    assert text.count("copies.add<") == (a == "col") + 1
    read = {
        "LayoutA": "RowMajor" if a == "row" else "ColumnMajor",
        "LayoutB": "RowMajor" if b == "row" else "ColumnMajor",
    }
    for name, layout in read.items():
        assert f"using {name} = cutlass::layout::{layout};" in text
    # The main loop's layouts are those of the copies.
    loop = text.partition("using CollectiveMainloop")[2].partition(";")[0]
    assert ("LayoutA" in loop, "LayoutB" in loop) == (a == "row", b == "col")
    assert co.KernelSpec.from_json(spec.to_json()) == spec


@pytest.mark.parametrize("m", [16, 4096])
def test_a_gate_of_row_major_weights_is_two_gemms_that_choose_for_themselves(m):
    op = requests.requested(co.gemm_swiglu, A, W.t(), W.t(), math="tf32").op
    call = call_at(op.graph, Problem(m, 4096, 4096), "tf32", "row", "row")
    assert dispatch.decide(signature_of(call, H100), H100, call.problem) is None
    served = [dispatch.decide(signature_of(part, H100), H100, part.problem).config for _, part in op.instead_of(call)]
    assert [config.copies for config in served] == [m == 4096] * 2


def test_means_of_rows_are_of_16_bits():
    for config in (sm80(), co.Sm90Config(co.ThreadblockShape(128, 128, 32))):
        spec = co.KernelSpec(a="tf32.row", b="tf32.col", d="f32.row", epilogue=centred, config=config)
        assert any("mean_of_a" in str(v) for v in co.check(spec))


def test_kernels_name_the_type():
    config = co.Sm90Config(co.ThreadblockShape(128, 128, 32))
    spec = co.KernelSpec(a="tf32.row", b="tf32.col", d="f32.row", epilogue=relu_bias, config=config)
    text = co.source(spec)
    assert '"k8.f32.tf32.tf32", false)' in text
    assert '#include "cutlass_ops/tf32.h"' in text
    assert co.KernelSpec.from_json(spec.to_json()) == spec
    by_sm80 = co.KernelSpec(a="tf32.row", b="tf32.col", d="f32.row", epilogue=relu_bias, config=sm80())
    text = co.source(by_sm80)
    assert "tfloat32_t" not in text  # CUTLASS rounds what it knows as FP32
    assert text.count("CUTLASS_OPS_TYPE(float, 2)") == 1
    assert "GemmShape<16, 8, 8>" in text


def test_the_model_of_sm80_knows_the_width_and_the_rate():
    large = Problem(8192, 8192, 8192)
    wide, narrow = sm80(k=16), co.Sm80Config(co.ThreadblockShape(128, 128, 32), co.WarpShape(64, 64, 32), stages=3)
    ratio = model.predict(wide, large, 132, 4, widths=(4, 4), rate=0.5) / model.predict(narrow, large, 132, 8)
    assert 1.8 < ratio < 2.2


def test_the_spaces_have_tf32():
    of = signature("tf32", "row", "row", A100)
    every = space.sm80_configurations(of, A100)
    assert len(every) > 100
    assert {c.threadblock.k for c in every} == {16, 32}
    assert {str(c.instruction) for c in every} == {"16x8x8"}
    assert policies.policy(of, A100).kernels


# ---- 3xTF32 ----------------------------------------------------------------------------------------------------------


def test_3xtf32_is_nearly_fp32():
    exact = A.double() @ W.double().t()
    found = co.gemm(A, W.t(), math="3xtf32")
    assert found.dtype is torch.float32
    assert ((found - exact).norm() / exact.norm()).item() < 2.0**-21
    assert co.gemm_bias_relu.in_math("3xtf32").math == "3xtf32"
    compiled = torch.compile(
        lambda a: co.gemm_bias_relu(a, W.t(), BIAS, math="3xtf32"), backend="eager", fullgraph=True
    )
    assert torch.equal(compiled(A), co.gemm_bias_relu(A, W.t(), BIAS, math="3xtf32"))
    a = A.clone().requires_grad_()
    co.gemm(a, W.t(), math="3xtf32").sum().backward()
    assert torch.allclose(a.grad, torch.ones(24, 16) @ W, rtol=1e-6, atol=1e-6)


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
    assert len(space.sm80_configurations(of, device)) > 20
