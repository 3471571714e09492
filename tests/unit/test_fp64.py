"""FP64: what is served and by which instruction, what is refused, and the reference."""

import pickle
import re

import pytest
import torch
from signatures import A100, H100
from typed_calls import L40S, signature, sm80

import cutlass_ops as co
from cutlass_ops.choose import dispatch
from cutlass_ops.declare.problem import Problem
from cutlass_ops.epilogue import builtin, doubles
from cutlass_ops.epilogue.derivatives import vjp
from cutlass_ops.epilogue.graph import Graph
from cutlass_ops.epilogue.trace import Epilogue
from cutlass_ops.kinds import legality
from cutlass_ops.operand.call import call_at, signature_of
from cutlass_ops.run import ops
from cutlass_ops.tools.explaining import explain_call

pytestmark = pytest.mark.usefixtures("session")

A, W = torch.randn(24, 40), torch.randn(16, 40)
P, Q, ROW = torch.randn(24, 40).double(), torch.randn(16, 40).double(), torch.randn(16).double()
COL, TILE = torch.randn(24).double(), torch.randn(24, 16).double()


@co.epilogue
def scaled_gelu(acc, row: co.Row, col: co.Col, tile: co.Tile, s: co.Scalar):
    return co.e.gelu(acc * s + row) * col + tile / 3


def close64(found, wanted):
    assert found.dtype is torch.float64
    return ((found - wanted).norm() / wanted.norm()).item() < 5e-15


def test_an_epilogue_of_fp64_operands_is_in_fp64():
    acc, s = P @ Q.t(), torch.pi
    assert close64(co.gemm(P, Q.t()), acc)
    found = co.gemm(P, Q.t(), epilogue=scaled_gelu, row=ROW, col=COL, tile=TILE, s=s)
    wanted = torch.nn.functional.gelu(acc * s + ROW) * COL[:, None] + TILE / 3
    assert close64(found, wanted)
    assert close64(co.gemm_bias_silu(P[None], Q.t()[None], ROW)[0], torch.nn.functional.silu(acc + ROW))


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
    "a norm": (lambda: co.rmsnorm_gemm(P, Q.t(), eps=1e-6), "takes mean_square_of_a of its rows, as of 16 bits"),
    "groups": (
        lambda: co.gemm(P, Q.t()[None], groups=co.Groups(torch.tensor([24]))),
        r"^a is torch\.float64: use one of",
    ),
}


@pytest.mark.parametrize(("call", "message"), FP64_REFUSED.values(), ids=FP64_REFUSED)
def test_what_is_refused_of_fp64_says_what_to_do(call, message):
    with pytest.raises(TypeError, match=message):
        call()


# Functions whose derivatives have numbers that FP32 rounds.
WITH_CONSTANTS = {
    "gelu": (co.e.gelu, torch.nn.functional.gelu),
    "gelu by tanh": (lambda x: co.e.gelu(x, "tanh"), lambda x: torch.nn.functional.gelu(x, approximate="tanh")),
    "erf": (co.e.erf, torch.erf),
    "ndtr": (co.e.ndtr, torch.special.ndtr),
    "exp2": (co.e.exp2, torch.exp2),
    "log2": (lambda x: co.e.log2(co.e.square(x) + 1), lambda x: torch.log2(x * x + 1)),
    "pow": (lambda x: co.e.pow(abs(x) + 1, 2.0**-30), lambda x: (x.abs() + 1).pow(2.0**-30)),
}


@pytest.mark.parametrize(("ours", "theirs"), WITH_CONSTANTS.values(), ids=WITH_CONSTANTS)
def test_numbers_of_derivatives_are_those_of_fp64(ours, theirs):
    @co.epilogue
    def by_us(acc, row: co.Row):
        return ours(acc * 0.25 + row)

    def gradients(function):
        leaves = [x.clone().requires_grad_() for x in (P, Q, ROW)]
        first = torch.autograd.grad(function(*leaves).square().sum(), leaves, create_graph=True)
        return [*first, *torch.autograd.grad(sum(x.square().sum() for x in first), leaves)]

    found = gradients(lambda a, w, row: co.gemm(a, w.t(), epilogue=by_us, row=row))
    wanted = gradients(lambda a, w, row: theirs((a @ w.t()) * 0.25 + row))
    for x, y in zip(found, wanted, strict=True):
        # The second derivative by tanh cancels.
        assert ((x - y).norm() / y.norm()).item() < 1e-12  # constants of FP32 would be 1e-8 off
    # A kernel computes them, and that of other types is as it was.
    exact, rounded = (vjp(by_us.graph, in_fp64=in_fp64).expression for in_fp64 in (True, False))
    assert exact != rounded
    assert doubles.why_not(Graph(exact.inputs, exact.nodes, exact.outputs[:1])) is None
    assert len(exact.nodes) < 64


@pytest.mark.parametrize("exponent", [2.0**-30, 0.5, 3.0])
def test_gradients_of_powers_are_in_fp64(exponent):
    @co.epilogue
    def power(acc):
        return co.e.pow(acc, exponent)

    @co.epilogue
    def power_of(acc, y: co.Scalar):
        return co.e.pow(acc, y)

    a, b = (x.abs() + 0.5 for x in (P, Q.t()))
    wanted = torch.autograd.grad(((x := a.clone().requires_grad_()) @ b).pow(exponent).sum(), x)[0]
    for epilogue, inputs in ((power, {}), (power_of, {"y": exponent})):
        d = co.gemm(x := a.clone().requires_grad_(), b, epilogue=epilogue, **inputs)
        torch.testing.assert_close(torch.autograd.grad(d.sum(), x)[0], wanted, rtol=1e-14, atol=0)


ROUNDED = {
    "1.000000001": lambda x: x * (1 + 1e-9),
    "16777217.0": lambda x: x + 16777217,
    "1000000.001": lambda x: x + 1000000.001,
    "2.0000000001": lambda x: co.e.where(x < 2.0000000001, x, 0.0),
    "0.5000000009313226": lambda x: x + co.e.add(0.5, 2.0**-30),
    "0.0": lambda x: x + co.e.sub(co.e.add(1, 2.0**-30), 1),
}


@pytest.mark.parametrize(("number", "use"), ROUNDED.items(), ids=ROUNDED)
def test_constants_that_do_not_show_that_fp32_rounded_them_are_refused(number, use):
    """Of the graph's value alone, none of these differs from what FP32 has exactly."""

    @co.epilogue
    def written(acc, bias: co.Row):
        return use(acc) + bias

    @co.epilogue
    def rounded(acc, bias: co.Row):
        return use(acc) + bias

    graph = Graph.from_json(written.graph.to_json())
    plain = Epilogue("plain", "", graph)
    assert written == rounded != plain
    assert co.gemm(P, Q.t(), epilogue=plain, bias=ROW).isfinite().all()
    found = pickle.loads(pickle.dumps([written, written.graph.then(halved.graph), ops.op_of(written)]))
    again, then, op = found[0], Epilogue("then", "", found[1]), found[2]
    kept = Epilogue("kept", "", written.graph)

    @co.epilogue
    def inlines(acc, bias: co.Row):
        return kept(acc, bias)

    for call in (
        lambda: co.gemm(P, Q.t(), epilogue=written, bias=ROW),
        lambda: co.gemm(P.clone().requires_grad_(), Q.t(), epilogue=again, bias=ROW),
        lambda: co.gemm(P, Q.t(), epilogue=then, bias=ROW),
        lambda: co.gemm(P, Q.t(), epilogue=inlines, bias=ROW),
        lambda: op(P, Q.t(), ROW),
    ):
        with pytest.raises(TypeError, match=rf"its constant {re.escape(number)} is rounded to FP32, .* use a Scalar"):
            call()
    types = {"a": "f64.row", "b": "f64.col", "d": "f64.row"}
    config = sm80(16, instruction=(16, 8, 4), tile=(64, 64), warp=(32, 32))
    spec = co.KernelSpec(**types, epilogue=written, config=config, target="sm_90")
    assert any(number in problem.message for problem in legality.check(spec))
    # Elsewhere it is the kernel of what FP32 has.
    specs = [co.KernelSpec(**INT8_TYPES, epilogue=e, config=INT8_CONFIG) for e in (written, plain)]
    assert specs[0] == specs[1] == co.KernelSpec.from_json(specs[0].to_json())
    signatures = [
        signature_of(call_at(e.graph, Problem(64, 64, 64), "bf16", "row", "col"), H100) for e in (written, plain)
    ]
    assert signatures[0] == signatures[1]


@pytest.mark.sample(3)
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


INT8_TYPES = {"a": "i8.row", "b": "i8.col", "d": "bf16.row"}
INT8_CONFIG = sm80(64, instruction=(16, 8, 32))
