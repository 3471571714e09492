"""FP64: what is served and by which instruction, what is refused, and the reference."""

import pickle
import re
from dataclasses import replace

import pytest
import torch
from signatures import A100, H100
from typed_calls import L40S, centred, relu_bias, signature, sm80

import cutlass_ops as co
from cutlass_ops.base import mma, resources
from cutlass_ops.base.dtypes import dtype as element_named
from cutlass_ops.base.dtypes import f64
from cutlass_ops.choose import dispatch, space
from cutlass_ops.declare.form import BATCHED
from cutlass_ops.declare.problem import Problem
from cutlass_ops.epilogue import builtin, doubles
from cutlass_ops.epilogue.graph import Graph
from cutlass_ops.epilogue.operations import OPS, to_fp32
from cutlass_ops.epilogue.trace import Epilogue
from cutlass_ops.kinds import legality
from cutlass_ops.kinds.cpp import DOUBLES
from cutlass_ops.kinds.sm80 import model
from cutlass_ops.run import ops, requests
from cutlass_ops.run.call import call_at, signature_of
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
    "math": (lambda: co.gemm(P, Q.t(), math="tf32"), "math='tf32' is for torch.float32 operands: omit math"),
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


@pytest.mark.parametrize(("exponent", "is_refused"), [(2.0**-30, True), (0.5, False), (3.0, False)])
def test_gradients_of_powers_whose_exponents_fp32_rounds_are_refused_of_fp64(exponent, is_refused):
    @co.epilogue
    def power(acc):
        return co.e.pow(acc, exponent)

    @co.epilogue
    def power_of(acc, y: co.Scalar):
        return co.e.pow(acc, y)

    a, b = (x.abs() + 0.5 for x in (P, Q.t()))
    wanted = torch.autograd.grad(((x := a.clone().requires_grad_()) @ b).pow(exponent).sum(), x)[0]
    found = torch.autograd.grad(co.gemm((x := a.clone().requires_grad_()), b, epilogue=power_of, y=exponent).sum(), x)
    torch.testing.assert_close(found[0], wanted, rtol=1e-14, atol=0)
    if is_refused:
        with pytest.raises(ValueError, match=r"the derivative of pow has an exponent less 1, .*: use a Scalar"):
            co.gemm(a.requires_grad_(), b, epilogue=power)
    else:
        (d,) = torch.autograd.grad(co.gemm(x := a.requires_grad_(), b, epilogue=power).sum(), x)
        torch.testing.assert_close(d, wanted, rtol=1e-14, atol=0)


@pytest.mark.parametrize("value", [0.0, 1.0, -3.5, 0.75, 2.0**-40, 123456.0, float("inf"), 1.5 * 2.0**60])
def test_constants_that_fp32_has_are_constants_of_fp64(value):
    assert doubles._looks_kept(value)


@pytest.mark.parametrize("value", [0.1, 1 / 3, torch.pi, 1e-5, 0.044715])
def test_constants_that_fp32_rounds_are_not(value):
    assert not doubles._looks_kept(to_fp32(value))
    assert close64(co.gemm(P, Q.t(), epilogue=halved), P @ Q.t() * 0.5 + (3 - 2.0**-20))


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
    plain = Epilogue.of("plain", "", graph)
    assert written == rounded != plain
    assert co.gemm(P, Q.t(), epilogue=plain, bias=ROW).isfinite().all()
    found = pickle.loads(pickle.dumps([written, written.graph.then(halved.graph), ops.op_of(written)]))
    again, then, op = found[0], Epilogue.of("then", "", found[1]), found[2]
    kept = Epilogue.of("kept", "", written.graph)

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
