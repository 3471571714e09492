"""INT8, summed in INT32: what is served and by which instruction, what is refused, and the reference."""

import contextlib
import math

import pytest
import torch
from fake_device import fake_device
from signatures import A100, H100
from typed_calls import L40S, centred, relu_bias, signature

import cutlass_ops as co
from cutlass_ops.choose import dispatch
from cutlass_ops.declare.problem import Problem
from cutlass_ops.epilogue import builtin
from cutlass_ops.kinds import legality
from cutlass_ops.operand import reference
from cutlass_ops.operand.call import call_at, check_call, signature_of
from cutlass_ops.tools.explaining import explain_call

pytestmark = pytest.mark.usefixtures("session")

A, W, BIAS = torch.randn(24, 40), torch.randn(16, 40), torch.randn(16)


def whole(rows, columns, seed=0):
    return torch.randint(-128, 128, (rows, columns), dtype=torch.int8, generator=torch.Generator().manual_seed(seed))


X, Y = whole(24, 64), whole(40, 64, 1)


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
    "INT32": (
        lambda: co.gemm(co.Scaled(X, 1.0), co.Scaled(Y.t(), 1.0), out_dtype=torch.int32),
        TypeError,
        r"^out_dtype is torch\.int32, and the epilogue computes in FP32, .* use one that returns acc and nothing else",
    ),
    "INT32 given": (
        lambda: co.gemm(X, Y.t(), epilogue=relu_bias, bias=torch.zeros(40), out=torch.empty(24, 40).int()),
        TypeError,
        r"^out is torch\.int32, and the epilogue computes in FP32",
    ),
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
    "means": (lambda: co.gemm(X, Y.t(), epilogue=centred), TypeError, "takes mean_of_a of its rows, as of 16 bits"),
}


@pytest.mark.parametrize(("call", "kind", "message"), INT8_REFUSED.values(), ids=INT8_REFUSED)
def test_what_is_refused_of_int8_says_what_to_do(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


@pytest.mark.sample(4)
@pytest.mark.parametrize("device", [A100, L40S, H100], ids=lambda d: f"sm_{d.capability[0]}{d.capability[1]}")
@pytest.mark.parametrize(
    ("out", "d", "graph"),
    [
        ("bfloat16", "bf16", builtin.bias.graph),
        ("int8", "i8", builtin.bias.graph),
        ("int32", "i32", builtin.identity.graph),
    ],
)
@pytest.mark.parametrize("problem", [(1, 4096, 4096), (4096, 4096, 4096), (77, 4099, 4112), (511, 33, 80)])
def test_each_device_serves_int8_by_its_own_instruction(device, out, d, graph, problem):
    of = signature("i8", device=device, problem=problem, graph=graph, out_dtype=getattr(torch, out))
    assert (str(of.a), str(of.b), of.d.dtype.name) == ("i8.row", "i8.col", d)
    assert {t.dtype.name for t in of.inputs} <= {"bf16"}
    for spec in dispatch.decide(of, device, Problem(*problem)).specs:
        assert spec.config.family.tma == device.has_tma
        assert legality.check(spec) == ()
        assert co.KernelSpec.from_json(spec.to_json()) == spec
    said = str(explain_call("gemm", call_at(graph, Problem(*problem), "i8", "row", "col"), device))
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
    with pytest.raises(
        co.errors.UnsupportedError, match=r"reductions of one GEMM.* and a prepared launch is one kernel"
    ):
        co.prepare_launch(co.gemm, X[None], y, epilogue=with_amax)


def test_int8_of_any_layout_is_the_same_to_the_last_bit():
    wanted = X[:, :43].long() @ Y[:, :43].t().long()
    for x in (X[:, :43], X[:, :43].clone(), X[:, :43].t().contiguous().t()):
        for y in (Y[:, :43].t(), Y[:, :43].t().contiguous()):
            assert torch.equal(co.gemm(x, y, out_dtype=torch.int32).long(), wanted)


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
        found = co.gemm(co.Scaled(X[:, :43], 1.0), co.Scaled(prepared.matrix, 1.0), out_dtype=torch.float32)
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


ROUNDED = {
    0.5: 0, 1.5: 2, 2.5: 2, -0.5: 0, -1.5: -2, 126.5: 126, 127.5: 127, -128.5: -128, 1e20: 127, -1e20: -128,
    math.inf: 127, -math.inf: -128, math.nan: 0,
}  # fmt: skip


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


# The first K at which -128 · -128 · K is beyond 31 bits.
TOO_LONG = 131_072


def long(*batch, rows=1, k=TOO_LONG):
    return torch.full((*batch, rows, k), -128, dtype=torch.int8)


OVERFLOWING = {
    "INT32": lambda: co.gemm(long(), long().t(), out_dtype=torch.int32),
    "FP32": lambda: co.gemm(long(), long().t(), out_dtype=torch.float32),
    "INT8": lambda: co.gemm(long(), long().t(), out_dtype=torch.int8),
    "FP8": lambda: co.gemm(long(), long().t(), out_dtype=torch.float8_e4m3fn),
    "an epilogue": lambda: co.gemm(long(), long().t(), epilogue=relu_bias, bias=torch.zeros(1)),
    "scales": lambda: co.gemm(co.Scaled(long(), 1e-9), co.Scaled(long().t(), 1e-9)),
    "a gate": lambda: co.gemm_swiglu(co.Scaled(long(), 1e-9), co.Scaled(long().t(), 1e-9), co.Scaled(long().t(), 1.0)),
    "batches": lambda: co.gemm(long(2), long(2).mT, out_dtype=torch.int32),
    "one batch": lambda: co.gemm(long(1), long(1).mT, epilogue=with_amax),
    "rows of several dimensions": lambda: co.gemm(long(2), long().t()),
    "without data": lambda: co.gemm(long().to("meta"), long().to("meta").t()),
    "a launch": lambda: co.prepare_launch(co.gemm, long(), long().t()),
    "a plan": lambda: call_at(builtin.identity.graph, Problem(1, 1, TOO_LONG), "i8", "row", "col"),
    "much longer": lambda: co.gemm(long(k=3 * TOO_LONG).to("meta"), long(k=3 * TOO_LONG).to("meta").t()),
}


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("run", OVERFLOWING.values(), ids=OVERFLOWING)
def test_sums_that_may_overflow_are_refused(run, on_device, monkeypatch):
    refused = pytest.raises(ValueError, match=r"^a is torch\.int8 and K is \d+, .* up to K=131071 none does")
    with fake_device(monkeypatch) if on_device else contextlib.nullcontext(), refused:
        run()
