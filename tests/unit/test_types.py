"""The other types of the Tensor Cores: what is served and by which instruction, what is refused, and the reference."""

import json
import math
import pickle
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from signatures import A100, H100

import cutlass_ops as co
from cutlass_ops.base import mma, resources
from cutlass_ops.base.dtypes import dtype as element_named
from cutlass_ops.base.dtypes import f32, f64, i8, tf32, tf32x3
from cutlass_ops.base.errors import ConfigError, EpilogueError
from cutlass_ops.choose import dispatch, policies, space
from cutlass_ops.choose.pool import Pool
from cutlass_ops.declare.device import Device
from cutlass_ops.declare.form import BATCHED
from cutlass_ops.declare.problem import Problem
from cutlass_ops.epilogue import builtin, doubles
from cutlass_ops.epilogue.operations import OPS, to_fp32
from cutlass_ops.kinds import legality
from cutlass_ops.kinds.cpp import DOUBLES
from cutlass_ops.kinds.sm80 import model
from cutlass_ops.run import plan, portable, reference, requests
from cutlass_ops.run.call import call_at, check_call, signature_of
from cutlass_ops.ship.shipping import Kernels, _calls
from cutlass_ops.tools.explaining import explain_call

L40S = Device((8, 9), 142, "NVIDIA L40S")
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"

pytestmark = pytest.mark.usefixtures("session")


@co.epilogue
def relu_bias(acc, bias: co.Row):
    return co.e.relu(acc + bias)


@co.epilogue
def centred(acc):
    return acc - co.e.mean_of_a()


def signature(dtype, a="row", b="col", device=H100, problem=(512, 4096, 4096), graph=builtin.bias.graph, **named):
    return signature_of(call_at(graph, Problem(*problem), dtype, a, b, **named), device)


# ---- TF32 ------------------------------------------------------------------------------------------------------------

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


REFUSED = {
    "no math": (lambda: co.gemm(A, W.t()), r"^a is torch\.float32, .* pass math='tf32' .* or .* by torch\.matmul"),
    "b alone": (lambda: co.gemm(A.bfloat16(), W.t()), r"^b is torch\.float32, .* pass math='tf32'"),
    "BF16": (lambda: co.gemm(A.bfloat16(), W.bfloat16().t(), math="tf32"), "^a is .*, and math='tf32' is of torch.fl"),
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


MAJORS = [("row", "row"), ("col", "row"), ("col", "col"), ("row", "col")]


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


def sm80(k=32, stages=3, instruction=(16, 8, 8), tile=(128, 128), warp=(64, 64)):
    shapes = co.ThreadblockShape(*tile, k), co.WarpShape(*warp, k), co.InstructionShape(*instruction)
    return co.Sm80Config(*shapes, stages=stages)


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


# ---- INT8 ------------------------------------------------------------------------------------------------------------


def whole(rows, columns, seed=0):
    return torch.randint(-128, 128, (rows, columns), dtype=torch.int8, generator=torch.Generator().manual_seed(seed))


X, Y = whole(24, 64), whole(40, 64, 1)


def test_int8_is_a_row_of_the_table():
    found = mma.mma_of(i8, i8)
    assert (found.wgmma_types, found.wgmma_opcode, found.opcode) == ("k32.s32.s8.s8", "IGMMA", "IMMA")
    assert found.shapes == ((16, 8, 32),)
    assert [n for n in range(8, 257, 8) if not found.takes_n(n)] == list(range(40, 257, 16))
    assert element_named("int8", (i8,)) is i8


def test_sums_of_int8_are_exact_and_rounded_to_fp32_once():
    exact = X.long() @ Y.t().long()
    found = co.gemm(X, Y.t(), out_dtype=torch.float32)
    assert torch.equal(found.double(), exact.double())
    assert co.gemm(X, Y.t()).dtype is torch.bfloat16
    # Beyond 2**24, FP32 does not have every number: 2**24 + 1 is a tie, and rounds to even.
    long = torch.full((1, 1041), -128, dtype=torch.int8)
    long[0, 1024:] = torch.tensor([1] + [0] * 16, dtype=torch.int8)
    ones = torch.full((1, 1041), -128, dtype=torch.int8)
    ones[0, 1024:] = 1
    padded = [torch.nn.functional.pad(x, (0, 15)) for x in (long, ones)]
    assert co.gemm(padded[0], padded[1].t(), out_dtype=torch.float32).item() == 2**24


@co.epilogue
def dequantised(acc, column_sums: co.Row, zero_point: co.Scalar, scale_x: co.Scalar, scale_weight: co.Row):
    return (acc - zero_point * column_sums) * (scale_x * scale_weight)


def test_sums_of_columns_subtract_a_zero_point():
    weight, scale_weight = torch.randint(-128, 128, (16, 48), dtype=torch.int8), torch.rand(16) + 0.5
    x, zero_point, scale_x = torch.randint(-128, 128, (24, 48), dtype=torch.int8), -37.0, 0.25
    given = {"zero_point": zero_point, "scale_x": scale_x, "scale_weight": scale_weight}
    sums = weight.sum(1, dtype=torch.int32).float()
    found = co.gemm(x, weight.t(), epilogue=dequantised, column_sums=sums, out_dtype=torch.float32, **given)
    values = (x.double() - zero_point) * scale_x
    torch.testing.assert_close(found.double(), values @ (weight.double() * scale_weight[:, None].double()).t())


def test_scales_dequantise_int8():
    scale_x, scale_y, bias = torch.rand(24), torch.rand(40), torch.randn(40)
    wanted = (X.double() @ Y.t().double()) * scale_x[:, None] * scale_y + bias
    found = co.scaled_gemm(X, Y.t(), scale_x, scale_y, epilogue=relu_bias, bias=bias, out_dtype=torch.float32)
    assert torch.allclose(found.double(), wanted.relu(), rtol=1e-6, atol=1e-3)


INT8_REFUSED = {
    "batches along N": (
        lambda: co.gemm(X[None], Y.t().contiguous()[None]),
        ValueError,
        r"read this type along K only: pass weights\.mT of contiguous weights \(\.\.\., N, K\)",
    ),
    "K of batches": (
        lambda: co.gemm(X[None, :, :40].clone(), Y[None, :, :40].clone().mT),
        ValueError,
        "pad K of a and b with zeros",
    ),
    "math": (lambda: co.gemm(X, Y.t(), math="tf32"), TypeError, "math='tf32' is of torch.float32 operands"),
    "BF16": (lambda: co.gemm(X, Y.t().bfloat16()), TypeError, "A and B must have the same dtype"),
    "INT32": (
        lambda: co.scaled_gemm(X, Y.t(), 1.0, 1.0, out_dtype=torch.int32),
        TypeError,
        r"^out_dtype is torch\.int32, and the epilogue computes in FP32, .* use one that returns acc and nothing else",
    ),
    "INT32 given": (
        lambda: co.gemm(X, Y.t(), epilogue=relu_bias, bias=torch.zeros(40), out=torch.empty(24, 40).int()),
        TypeError,
        r"^out is torch\.int32, and the epilogue computes in FP32",
    ),
    "INT64": (lambda: co.gemm(X, Y.t(), out_dtype=torch.int64), TypeError, "^out_dtype is torch.int64: use .* or"),
    "INT8 of BF16": (
        lambda: co.gemm(X.bfloat16(), Y.bfloat16().t(), out_dtype=torch.int8),
        TypeError,
        r"^out_dtype is torch\.int8: use",
    ),
    "a prepared weight's gamma": (
        lambda: co.prepare(Y.t(), torch.ones(64)),
        TypeError,
        r"^w is torch\.int8, and gamma is of weights of 16 bits",
    ),
    "an input": (lambda: co.gemm_bias(X, Y.t(), Y[:, 0].clone()), TypeError, r"^bias is torch\.int8: use one of"),
    "gradients": (
        lambda: co.gemm_bias(X, Y.t(), torch.zeros(40).requires_grad_()),
        ValueError,
        "products in 8 bits have no gradients",
    ),
    "means": (lambda: co.gemm(X, Y.t(), epilogue=centred), TypeError, "takes mean_of_a of its rows, as of 16 bits"),
}


@pytest.mark.parametrize(("call", "kind", "message"), INT8_REFUSED.values(), ids=INT8_REFUSED)
def test_what_is_refused_of_int8_says_what_to_do(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


@pytest.mark.parametrize("device", [A100, L40S, H100], ids=lambda d: f"sm_{d.capability[0]}{d.capability[1]}")
@pytest.mark.parametrize("problem", [(1, 4096, 4096), (4096, 4096, 4096), (77, 4099, 4112), (511, 33, 80)])
def test_each_device_serves_int8_by_its_own_instruction(device, problem):
    of = signature("i8", device=device, problem=problem)
    assert (str(of.a), str(of.b), of.d.dtype.name) == ("i8.row", "i8.col", "bf16")
    decision = dispatch.decide(of, device, Problem(*problem))
    for spec in decision.specs:
        assert spec.config.wgmma == device.has_wgmma
        assert legality.check(spec) == ()
    said = str(explain_call("gemm", call_at(builtin.bias.graph, Problem(*problem), "i8", "row", "col"), device))
    assert "accumulated in INT32, and brought to FP32 for the epilogue" in said


def test_int8_of_any_layout_is_the_same_to_the_last_bit():
    wanted = X[:, :43].long() @ Y[:, :43].t().long()
    for x in (X[:, :43], X[:, :43].clone(), X[:, :43].t().contiguous().t()):
        for y in (Y[:, :43].t(), Y[:, :43].t().contiguous()):
            assert torch.equal(co.gemm(x, y, out_dtype=torch.int32).long(), wanted)


@pytest.mark.parametrize(("a", "b"), MAJORS)
@pytest.mark.parametrize("problem", [(1, 4096, 4096), (4096, 4096, 4096), (77, 4099, 4097), (511, 33, 77)])
def test_hopper_copies_int8_that_does_not_lie_along_k(a, b, problem):
    of = signature("i8", a, b, problem=problem)
    decision = dispatch.decide(of, H100, Problem(*problem))
    for spec in decision.specs:
        assert spec.config.wgmma
        assert spec.config.realign == of.realigns
        assert legality.check(spec) == ()
    if of.realigns:
        ampere = signature("i8", a, b, A100, problem)
        assert dispatch.decide(ampere, A100, Problem(*problem)) is None
        said = dispatch.unserved("gemm", ampere, A100)
        assert "copied to such lines on sm_90 alone: pass a row-major a and prepare(b).matrix" in said


@pytest.mark.parametrize("element", [torch.int8, torch.float32])
def test_a_weight_is_laid_along_k_once(element):
    w = Y[:, :43].t().contiguous().to(element)
    prepared = co.prepare(w)
    size = element.itemsize
    assert (prepared.scale, prepared.folded, prepared.matrix.dtype) == (None, False, element)
    assert torch.equal(prepared.matrix, w)
    assert prepared.matrix.stride(0) == 1
    assert prepared.matrix.stride(1) * size % 16 == 0
    if element is torch.int8:
        found = co.scaled_gemm(X[:, :43], prepared, 1.0, 1.0, out_dtype=torch.float32)
        assert torch.equal(found, co.gemm(X[:, :43], w, out_dtype=torch.float32))
    else:
        a, b = signature_of_tensors(torch.empty(8, 44), prepared.matrix[:, :40])
        assert (str(a), str(b)) == ("tf32.row", "tf32.col")


def signature_of_tensors(x, w):
    call = check_call(builtin.identity.graph, x[:, : w.shape[0]], w, {}, None, None, math="tf32")
    found = signature_of(call, H100)
    return found.a, found.b


@co.epilogue
def requantised(acc, scale: co.Scalar, bias: co.Row):
    return acc * scale + bias


def to_int8(x):
    return x.round().clamp(-128, 127).nan_to_num(nan=0.0).to(torch.int8)


def test_results_in_int8_saturate():
    bias = torch.randn(40)
    wanted = to_int8((X.double() @ Y.t().double()).float() * 0.01 + bias)
    found = co.gemm(X, Y.t(), epilogue=requantised, scale=0.01, bias=bias, out_dtype=torch.int8)
    assert found.dtype is torch.int8
    assert {-128, 127} < set(found.flatten().tolist())
    assert (found == wanted).float().mean() > 0.999
    out = torch.empty(24, 40, dtype=torch.int8)
    assert co.gemm(X, Y.t(), epilogue=requantised, scale=0.01, bias=bias, out=out) is out
    assert torch.equal(out, found)
    compiled = torch.compile(
        lambda x, y: co.gemm(x, y, epilogue=requantised, scale=0.01, bias=bias, out_dtype=torch.int8),
        backend="aot_eager",
        fullgraph=True,
    )
    assert torch.equal(compiled(X, Y.t()), found)


ROUNDED = {
    0.5: 0,
    1.5: 2,
    2.5: 2,
    -0.5: 0,
    -1.5: -2,
    126.5: 126,
    127.5: 127,
    -128.5: -128,
    1e20: 127,
    -1e20: -128,
    math.inf: 127,
    -math.inf: -128,
    math.nan: 0,
}


def test_int8_rounds_to_nearest_even_and_nan_is_0():
    given = torch.tensor(list(ROUNDED))
    zeros = torch.zeros(1, 16, dtype=torch.int8), torch.zeros(len(given), 16, dtype=torch.int8).t()
    found = co.gemm(*zeros, epilogue=requantised, scale=1.0, bias=given, out_dtype=torch.int8)
    assert found[0].tolist() == list(ROUNDED.values())
    assert reference.rounded(given.double(), torch.int8).tolist() == list(ROUNDED.values())


def test_results_in_int32_are_the_sums():
    long = torch.full((2, 131_056), -128, dtype=torch.int8)
    long[1, 0] = -127
    found = co.gemm(long, long.t(), out_dtype=torch.int32)
    assert found.dtype is torch.int32
    assert found.tolist() == (long.long() @ long.t().long()).tolist()  # of which FP32 has one of four
    assert torch.equal(co.gemm(X, Y.t(), out_dtype=torch.int32), torch._int_mm(X, Y.t()))
    out = torch.empty(24, 40, dtype=torch.int32)
    assert co.gemm(X, Y.t(), out=out) is out
    assert torch.equal(out, torch._int_mm(X, Y.t()))
    batches = co.gemm(torch.stack([X, Y[:24]]), Y.t()[None], out_dtype=torch.int32)
    assert torch.equal(batches, torch.stack([out, torch._int_mm(Y[:24], Y.t())]))
    compiled = torch.compile(lambda x, y: co.gemm(x, y, out_dtype=torch.int32), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(X, Y.t()), out)


def test_explain_names_the_sums():
    call = call_at(builtin.identity.graph, Problem(512, 512, 512), "i8", "row", "col", torch.int32)
    said = explain_call("gemm", call, H100).to_json()["contract"]
    assert said["a, b"] == "i8.row and i8.col, accumulated in INT32, which D is"
    assert said["d"] == "i32.row, stored by TMA or whole vectors"


@pytest.mark.parametrize("device", [A100, L40S, H100], ids=lambda d: f"sm_{d.capability[0]}{d.capability[1]}")
@pytest.mark.parametrize(
    ("out", "d", "graph"), [("int8", "i8", builtin.bias.graph), ("int32", "i32", builtin.identity.graph)]
)
@pytest.mark.parametrize("problem", [(1, 4096, 4096), (4096, 4096, 4096), (77, 4099, 4112), (511, 33, 80)])
def test_each_device_stores_integers(device, out, d, graph, problem):
    of = signature("i8", device=device, problem=problem, graph=graph, out_dtype=getattr(torch, out))
    assert of.d.dtype.name == d
    assert {t.dtype.name for t in of.inputs} <= {"bf16"}
    decision = dispatch.decide(of, device, Problem(*problem))
    assert decision.specs
    for spec in decision.specs:
        assert legality.check(spec) == ()
        assert co.KernelSpec.from_json(spec.to_json()) == spec
    # Of a declaration, inputs beside such a D have D's usual type.
    spec = decision.spec
    again = co.KernelSpec(a=spec.a, b=spec.b, d=spec.d, epilogue=graph, config=spec.config, target=spec.target)
    assert {t.dtype.name for t in again.inputs} <= {"bf16"}


def test_a_catalogue_names_them():
    kernels = Kernels(
        ops=("gemm",), archs=("sm_90a",), dtypes=("i8",), out_dtypes=("int8", "i32"), shapes=("64x4096x4096",)
    )
    assert [str(of.d) for of, *_ in _calls(kernels, "gemm")] == ["i8.row", "i32.row"]
    with pytest.raises(ConfigError, match=r"out_dtypes has 'i64': use f16, .* i8, i32"):
        Kernels(ops=("gemm",), archs=("sm_90a",), out_dtypes=("i64",), shapes=("64x4096x4096",))


def test_sources_of_integer_results():
    config = co.Sm90Config(co.ThreadblockShape(128, 128, 128))
    by_sm80 = sm80(64, instruction=(16, 8, 32))
    types = {"a": "i8.row", "b": "i8.col"}
    text = co.source(co.KernelSpec(**types, d="i32.row", epilogue=builtin.identity, config=config))
    assert "using ElementD = float;" in text
    assert "cutlass_ops::BitsOfSums<cutlass_ops::Epilogue<" in text
    assert "call.result<int32_t, MajorD, AlignmentD, true>()" in text
    text = co.source(co.KernelSpec(**types, d="i8.row", epilogue=relu_bias, config=config))
    assert ("BitsOfSums" in text, "using ElementD = int8_t;" in text) == (False, True)
    text = co.source(co.KernelSpec(**types, d="i32.row", epilogue=builtin.identity, config=by_sm80))
    assert "using ElementCompute = int32_t;" in text
    with pytest.raises(ValueError, match=r"^a is i32: use one of"):
        co.KernelSpec(a="i32.row", b="i8.col", d="i32.row", epilogue=builtin.identity, config=config)


def test_copied_operands_are_counted():
    """Warm and cold, by plans that say how many they copy."""
    op = co.gemm_bias_relu.in_math("tf32")
    before = op.copied_operands
    op(A, W.t().contiguous(), BIAS)  # on the CPU, nothing is copied
    assert op.copied_operands == before
    config = co.Sm90Config(co.ThreadblockShape(128, 128, 32), realign=True)
    for a, b, count in (("row", "row", 1), ("col", "row", 2), ("col", "col", 1)):
        spec = co.KernelSpec(a=f"tf32.{a}", b=f"tf32.{b}", d="f32.row", epilogue=relu_bias, config=config)
        assert plan.copies_of(spec) == count
    assert plan.copies_of(replace_config(spec, realign=False)) == 0


def replace_config(spec, **fields):
    return co.KernelSpec(a=spec.a, b=spec.b, d=spec.d, epilogue=spec.epilogue, config=replace(spec.config, **fields))


def test_sources_of_int8():
    types = {"a": "i8.row", "b": "i8.col", "d": "bf16.row"}
    config = co.Sm90Config(co.ThreadblockShape(128, 128, 128))
    text = co.source(co.KernelSpec(**types, epilogue=relu_bias, config=config))
    assert 'CUTLASS_OPS_INTEGER_WGMMA(int8_t, int8_t, "k32.s32.s8.s8", false)' in text
    assert "CUTLASS_OPS_TYPE(int8_t, 0)" in text
    text = co.source(co.KernelSpec(**types, epilogue=relu_bias, config=sm80(64, instruction=(16, 8, 32))))
    assert "using ElementAccumulator = int32_t;" in text
    assert "OpMultiplyAddSaturate" in text


# ---- FP64 ------------------------------------------------------------------------------------------------------------

P, Q, ROW = torch.randn(24, 40).double(), torch.randn(16, 40).double(), torch.randn(16).double()
COL, TILE = torch.randn(24).double(), torch.randn(24, 16).double()


@co.epilogue
def scaled_gelu(acc, row: co.Row, col: co.Col, tile: co.Tile, s: co.Scalar):
    return co.e.gelu(acc * s + row) * col + tile / 3


def close64(found, wanted):
    assert found.dtype is torch.float64
    return ((found - wanted).norm() / wanted.norm()).item() < 5e-15


def test_fp64_is_a_row_of_the_table():
    found = mma.mma_of(f64, f64)
    assert (found.opcode, found.wgmma_opcode, found.compute, found.read, found.stored) == (
        "DMMA",
        "",
        f64,
        (f64,),
        (f64,),
    )
    assert found.shapes_on((8, 0)) == found.shapes_on((8, 9)) == ((8, 8, 4),)
    assert found.shapes_on((9, 0)) == ((16, 8, 4), (16, 8, 8), (16, 8, 16), (8, 8, 4))
    assert element_named("float64", (f64,)) is element_named("double", (f64,)) is f64
    with pytest.raises(ValueError, match="'f64' is not supported here"):
        element_named("f64")


def test_an_epilogue_of_fp64_operands_is_in_fp64():
    acc, s = P @ Q.t(), torch.pi
    assert close64(co.gemm(P, Q.t()), acc)
    found = co.gemm(P, Q.t(), epilogue=scaled_gelu, row=ROW, col=COL, tile=TILE, s=s)
    wanted = torch.nn.functional.gelu(acc * s + ROW) * COL[:, None] + TILE / 3
    assert close64(found, wanted)
    compiled = torch.compile(
        lambda a: co.gemm(a, Q.t(), epilogue=scaled_gelu, row=ROW, col=COL, tile=TILE, s=s), backend="aot_eager"
    )
    assert close64(compiled(P), wanted)
    assert close64(co.gemm_bias_silu(P[None], Q.t()[None], ROW)[0], torch.nn.functional.silu(acc + ROW))


def test_gradients_in_fp64():
    @co.epilogue
    def gated(acc, row: co.Row, col: co.Col):
        return co.e.silu(acc + row) * col

    leaves = [x[:5, :7].clone().requires_grad_() for x in (P, Q)] + [ROW[:5].clone(), COL[:5].clone()]
    leaves = [x.requires_grad_() for x in leaves]
    assert torch.autograd.gradcheck(lambda a, w, row, col: co.gemm(a, w.t(), epilogue=gated, row=row, col=col), leaves)


def test_gradients_in_fp64_take_numbers_as_they_are():
    @co.epilogue
    def scaled(acc, row: co.Row, col: co.Col, tile: co.Tile, s: co.Scalar):
        return co.e.silu(acc * s + row) * col + co.e.tanh(tile)

    def by_torch(a, w, row, col, tile):
        return torch.nn.functional.silu((a @ w.t()) * 0.3 + row) * col[:, None] + torch.tanh(tile)

    def by_us(a, w, row, col, tile):
        return co.gemm(a, w.t(), epilogue=scaled, row=row, col=col, tile=tile, s=0.3)

    given = [x.clone().requires_grad_() for x in (P, Q, ROW, COL, TILE)]
    ours, theirs = (torch.autograd.grad(f(*given).square().sum(), given, create_graph=True) for f in (by_us, by_torch))
    assert all(map(close64, ours, theirs))
    # Computed again, where sums over rows and columns have no kernel.
    ours, theirs = (torch.autograd.grad(sum(g.square().sum() for g in each), given) for each in (ours, theirs))
    assert all(map(close64, ours, theirs))


def test_layers_in_fp64():
    torch.manual_seed(0)
    layer, x = co.nn.MLP(16, 32, activation="relu").double(), torch.randn(4, 16).double().requires_grad_()
    layer(x).square().sum().backward()
    y = x.detach().clone().requires_grad_()
    fc1, fc2 = layer.fc1, layer.fc2
    hidden = torch.relu(y @ fc1.weight.t() + fc1.bias)
    wanted = torch.autograd.grad((hidden @ fc2.weight.t() + fc2.bias).square().sum(), [y, *layer.parameters()])
    assert all(map(close64, [x.grad, *(p.grad for p in layer.parameters())], wanted))


def test_nothing_is_rounded_to_fp32():
    """Values that FP32 does not have, on each of their ways into the epilogue."""
    tiny = 1 + 2.0**-40
    one, none = torch.ones(1, 1).double(), torch.zeros(1, 1).double()

    @co.epilogue
    def total(acc, row: co.Row, col: co.Col, tile: co.Tile, s: co.Scalar):
        return acc + row + col + tile + s

    for at in range(5):
        x, row, col, tile, s = (one * tiny if at == i else none for i in range(5))
        found = co.gemm(x, one, epilogue=total, row=row[0], col=col[0], tile=tile, s=float(s))
        assert found.item() == tiny


@co.epilogue
def tenth(acc):
    return acc * 0.1


@co.epilogue
def halved(acc):
    return acc * 0.5 + 3 - 2.0**-20


@co.epilogue
def summed(acc):
    return {"d": acc, "total": co.e.sum(acc, dim=1)}


@co.epilogue
def placed(acc):
    return acc + co.e.row_index()


@co.epilogue
def narrowed(acc):
    return co.e.cast(acc, "bf16")


@co.epilogue
def turned(acc):
    return co.e.swap_pairs(acc)


FP64_REFUSED = {
    "a constant": (lambda: co.gemm(P, Q.t(), epilogue=tenth), "its constant 0.1 is rounded to FP32, .* use a Scalar"),
    "a reduction": (lambda: co.gemm(P, Q.t(), epilogue=summed), "its output total is reduced, .* use the tile"),
    "a place": (lambda: co.gemm(P, Q.t(), epilogue=placed), "it takes row_index, .* use a Row or a Col"),
    "a cast": (lambda: co.gemm(P, Q.t(), epilogue=narrowed), "cast has no form in FP64: .* use it on the result"),
    "pairs": (lambda: co.gemm(P, Q.t(), epilogue=turned), "swap_pairs has no form in FP64"),
    "means": (lambda: co.gemm(P, Q.t(), epilogue=centred), "takes mean_of_a of its rows, as of 16 bits"),
    "an input": (lambda: co.gemm_bias(P, Q.t(), ROW.float()), r"^bias is torch\.float32: use one of torch\.float64$"),
    "a result": (
        lambda: co.gemm(P, Q.t(), out_dtype=torch.float32),
        r"^out_dtype is torch\.float32: use torch\.float64$",
    ),
    "FP64 of FP32": (
        lambda: co.gemm(A, W.t(), math="tf32", out_dtype=torch.float64),
        r"^out_dtype is torch\.float64: use",
    ),
    "an input of BF16": (
        lambda: co.gemm_bias(A.bfloat16(), W.bfloat16().t(), ROW),
        r"^bias is torch\.float64: use one of",
    ),
    "math": (lambda: co.gemm(P, Q.t(), math="tf32"), "math='tf32' is of torch.float32 operands: omit math"),
    "mixed": (lambda: co.gemm(P, Q.bfloat16().t()), "A and B must have the same dtype"),
    "a norm": (lambda: co.rmsnorm_gemm(P, Q.t(), eps=1e-6), "takes mean_square_of_a of its rows, as of 16 bits"),
    "groups": (lambda: co.grouped_gemm(P, Q.t()[None], torch.tensor([24])), r"^x is torch\.float64: use one of"),
}


@pytest.mark.parametrize(("call", "message"), FP64_REFUSED.values(), ids=FP64_REFUSED)
def test_what_is_refused_of_fp64_says_what_to_do(call, message):
    with pytest.raises(TypeError, match=message):
        call()


def test_gradients_with_constants_are_refused_of_fp64():
    with pytest.raises(ValueError, match=r"the derivative of gelu has a constant, .*; or call under torch\.no_grad"):
        co.gemm_bias_gelu(P.clone().requires_grad_(), Q.t(), ROW)


@pytest.mark.parametrize("value", [0.0, 1.0, -3.5, 0.75, 2.0**-40, 123456.0, float("inf"), 1.5 * 2.0**60])
def test_constants_that_fp32_has_are_constants_of_fp64(value):
    assert doubles._is_kept(value)


@pytest.mark.parametrize("value", [0.1, 1 / 3, torch.pi, 1e-5, 0.044715])
def test_constants_that_fp32_rounds_are_not(value):
    assert not doubles._is_kept(to_fp32(value))
    assert close64(co.gemm(P, Q.t(), epilogue=halved), P @ Q.t() * 0.5 + (3 - 2.0**-20))


def test_every_function_in_fp64_is_in_the_header():
    refused = {info.cpp for info in OPS.values() if not info.in_fp64}
    for info in OPS.values():
        if info.cpp.startswith("cutlass_ops::") and info.cpp not in refused:
            headers = (DOUBLES, info.header) if "normal::" in info.cpp else (DOUBLES,)
            text = "".join((resources.include() / header).read_text() for header in headers)
            name = info.cpp.rpartition("::")[2]
            assert re.search(rf"CUTLASS_DEVICE (double|bool) {name}\((bool condition, )?double x", text), name


@pytest.mark.parametrize("device", [A100, L40S, H100], ids=lambda d: f"sm_{d.capability[0]}{d.capability[1]}")
@pytest.mark.parametrize(("a", "b"), [("row", "row"), ("col", "row"), ("col", "col"), ("row", "col")])
@pytest.mark.parametrize("problem", [(1, 4096, 4096), (4096, 4096, 4096), (77, 33, 1037)])
def test_each_device_serves_fp64_by_its_own_instruction(device, a, b, problem):
    of = signature("f64", a, b, device, problem)
    decision = dispatch.decide(of, device, Problem(*problem))
    assert decision.specs
    for spec in decision.specs:
        assert legality.check(spec) == ()
        assert str(spec.config.instruction) == ("16x8x4" if device is H100 else "8x8x4")
    said = str(explain_call("gemm", call_at(builtin.bias.graph, Problem(*problem), "f64", a, b), device))
    assert "accumulated in FP64, as the epilogue is computed" in said


def test_batches_of_fp64_and_their_space():
    call = call_at(builtin.bias.graph, Problem(65, 72, 136, 3), "f64", "row", "col", form=BATCHED)
    of = signature_of(call, H100)
    assert dispatch.decide(of, H100, call.problem).specs[0].a.dtype is f64
    every = space.sm80_configurations(signature("f64"), H100)
    assert {str(c.instruction) for c in every} == {"16x8x4", "16x8x8", "16x8x16", "8x8x4"}
    assert {(c.threadblock.k, c.instruction.k) for c in every} == {(16, 4), (16, 8), (32, 4), (32, 8), (32, 16)}
    assert {(c.warp.m, c.warp.n) for c in every if c.instruction.k > 4} == {(32, 32)}
    assert {str(c.instruction) for c in every if c.stream_k} == {"16x8x4", "16x8x8", "8x8x4"}
    assert not any(spec.config.stream_k for spec in dispatch.decide(of, H100, call.problem).specs)
    assert {str(c.instruction) for c in space.sm80_configurations(signature("f64", device=A100), A100)} == {"8x8x4"}


@pytest.mark.parametrize("device", [A100, H100], ids=["sm_80", "sm_90"])
@pytest.mark.parametrize("problem", [(32, 4096, 4096), (4096, 32, 4096), (1, 4096, 4096), (256, 256, 100_000)])
def test_blocks_share_tiles_of_fp64_where_these_are_few(device, problem):
    decision = dispatch.decide(signature("f64", device=device, problem=problem), device, Problem(*problem))
    assert decision.config.stream_k


@pytest.mark.parametrize("device", [A100, H100], ids=["sm_80", "sm_90"])
def test_a_gate_in_fp64_is_two_gemms(device):
    op = requests.requested(co.gemm_swiglu, P, Q.t(), Q.t()).op
    call = call_at(op.graph, Problem(512, 4096, 4096), "f64", "row", "col")
    parts = op.instead_of(call)
    assert len(parts) == 2
    for _, part in parts:
        assert dispatch.decide(signature_of(part, device), device, part.problem).specs[0].a.dtype is f64


def test_sources_of_fp64():
    config = sm80(16, instruction=(16, 8, 4), tile=(64, 64), warp=(32, 32))
    types = {"a": "f64.row", "b": "f64.col", "d": "f64.row"}
    spec = co.KernelSpec(**types, epilogue=scaled_gelu, config=config, target="sm_90")
    assert [str(operand) for operand in spec.inputs] == [
        "f64.row.align1",
        "f64.row.align1",
        "f64.row",
        "f64.row.align1",
    ]
    text = co.source(spec)
    assert "using ElementAccumulator = double;\nusing ElementCompute = double;" in text
    assert '#include "cutlass_ops/doubles.h"' in text
    assert "float" not in text.partition("---- Epilogue ----")[2].partition("---- Main loop")[0].replace(
        "FloatRound", ""
    )
    assert co.KernelSpec.from_json(spec.to_json()) == spec
    assert "doubles.h" not in co.source(co.KernelSpec(**INT8_TYPES, epilogue=relu_bias, config=INT8_CONFIG))


def test_flags_of_blocks_that_share_k_are_in_standing_memory_in_fp64():
    """Kernels of other types, whose flags are cleared before each launch, keep their sources and keys."""

    def text(types, config, target):
        spec = co.KernelSpec(**types, epilogue=relu_bias, config=config, target=target)
        assert legality.check(spec) == ()
        return co.source(spec)

    doubles = {"a": "f64.row", "b": "f64.col", "d": "f64.row"}
    config = sm80(16, instruction=(16, 8, 4), tile=(64, 64), warp=(32, 32))
    divided = text(doubles, replace(config, stream_k=True), "sm_90")
    assert '#include "cutlass_ops/sm80_standing.h"' in divided
    assert "sm80::StandingFlags<typename cutlass::gemm::kernel::DefaultGemmWithVisitor<" in divided
    tf32x3 = sm80(16, instruction=(16, 8, 8), tile=(64, 64), warp=(32, 32))
    for each in (
        text(doubles, config, "sm_90"),
        text({"a": "tf32x3.row", "b": "tf32x3.col", "d": "f32.row"}, replace(tf32x3, stream_k=True), "sm_90"),
    ):
        assert "tanding" not in each


INT8_TYPES = {"a": "i8.row", "b": "i8.col", "d": "bf16.row"}
INT8_CONFIG = sm80(64, instruction=(16, 8, 32))


def test_the_model_of_sm80_knows_fp64():
    large, config = Problem(8192, 8192, 8192), sm80(16, instruction=(16, 8, 4), tile=(128, 128), warp=(32, 64))
    us = model.predict(config, large, 132, 2, widths=(8, 8))
    assert 20 < 2 * 8192**3 / us / 1e6 < 67
