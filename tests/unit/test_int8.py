"""INT8, summed in INT32: what is served and by which instruction, what is refused, and the reference."""

import contextlib
import math
from dataclasses import replace

import pytest
import torch
from fake_device import fake_device
from signatures import A100, H100
from typed_calls import L40S, MAJORS, centred, relu_bias, signature, sm80

import cutlass_ops as co
from cutlass_ops.base import mma
from cutlass_ops.base.dtypes import dtype as element_named
from cutlass_ops.base.dtypes import i8
from cutlass_ops.base.errors import ConfigError
from cutlass_ops.choose import dispatch
from cutlass_ops.declare.problem import Problem
from cutlass_ops.epilogue import builtin
from cutlass_ops.kinds import legality
from cutlass_ops.run import plan, reference
from cutlass_ops.run.call import call_at, check_call, signature_of
from cutlass_ops.ship.shipping import Kernels, _calls
from cutlass_ops.tools.explaining import explain_call

pytestmark = pytest.mark.usefixtures("session")

A, W, BIAS = torch.randn(24, 40), torch.randn(16, 40), torch.randn(16)


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
    "math": (lambda: co.gemm(X, Y.t(), math="tf32"), TypeError, "math='tf32' is for torch.float32 operands"),
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
        r"^w is torch\.int8, and gamma is of weights of 16 bits: pass the weight in FP16 or BF16$",
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


@co.epilogue
def with_amax(acc):
    return {"d": acc, "of_rows": co.e.amax(acc, dim=1)}


@pytest.mark.parametrize("on_device", [False, True])
def test_batches_of_int8_that_take_a_launch_each_lie_in_any_way(on_device, monkeypatch):
    # One kernel of batches copies no operands, which is refused. Kernels of one GEMM copy them.
    y = Y.t().contiguous()[None]
    assert y.stride(-1) == 1
    wanted = co.gemm(X, Y.t(), epilogue=with_amax)
    with fake_device(monkeypatch) if on_device else contextlib.nullcontext():
        for a in (X[None], X.t().contiguous().t()[None], torch.nn.functional.pad(X, (0, 1))[None, :, :64]):
            found = co.gemm(a, y, epilogue=with_amax)
            assert torch.equal(found.d[0], wanted.d)
            assert torch.equal(found.of_rows[0], wanted.of_rows)
    with pytest.raises(co.UnsupportedError, match=r"reductions of one GEMM.* and a prepared launch is one kernel"):
        co.prepare_launch(co.gemm, X[None], y, epilogue=with_amax)


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
