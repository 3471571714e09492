"""How sums of FP8 products are added up: by name, by K, and in the kernels that are chosen."""

import pytest
import torch
from signatures import H100

import cutlass_ops as co
from cutlass_ops.choose import dispatch
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.signature import signature_from_json, signature_to_json
from cutlass_ops.epilogue import builtin, composed
from cutlass_ops.kinds import legality
from cutlass_ops.operand.call import accumulation, call_at, check_call, signature_of
from cutlass_ops.run import portable
from cutlass_ops.run.gemm import op_for
from cutlass_ops.run.requests import requested
from cutlass_ops.tools.explaining import explain_call

E4M3 = torch.float8_e4m3fn
X, W = (torch.randn(rows, 32).to(E4M3) for rows in (8, 16))

pytestmark = pytest.mark.usefixtures("session")


@co.epilogue
def swiglu_quantized(acc, up: co.Product):
    return co.e.quantize(co.silu(acc) * up, "e4m3", block=128)


def call(k, math=None, graph=builtin.identity.graph, **named):
    found = call_at(graph, Problem(256, 512, k), named.pop("dtype", "e4m3"), "row", "col", **named)
    return found._replace(arguments=found.arguments._replace(math=math))


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("made", "wanted"),
    [
        (call(128), "fast"),
        (call(144), "promoted"),
        (call(128, out_dtype=torch.float32), "fast"),
        (call(144, out_dtype=torch.float32), "promoted"),
        (call(144, out_dtype=torch.float16), "promoted"),
        (call(512, out_dtype=E4M3), "fast"),
        (call(528, out_dtype=E4M3), "promoted"),
        (call(4096, "fast"), "fast"),
        (call(128, "promoted"), "promoted"),
        (call(128, graph=composed.scaled_blocks.graph), "promoted"),
        (call(4096, graph=swiglu_quantized.graph), "promoted"),
        (call(4096, dtype="bf16"), None),
    ],
)
def test_the_choice_reaches_every_kernel(made, wanted):
    assert accumulation(made)[0] == wanted
    signature = signature_of(made, H100)
    decision = dispatch.decide(signature, H100, made.problem)
    assert {spec.config.accumulation for spec in decision.specs if spec.config.family.tma} == {wanted or "fast"}
    assert ("promoted: " in str(explain_call("gemm", made, H100))) == (wanted == "promoted")
    assert signature_from_json(signature_to_json(signature)) == signature
    assert str(signature.a).endswith(".promoted") == (wanted == "promoted" and signature.a.scaling is None)


NORMS = {
    "rmsnorm_gemm": ((X, W.t()), {"rstd": torch.ones(8)}),
    "gemm_residual_rms": ((X, W.t(), torch.zeros(8, 16).bfloat16()), {"eps": 1e-6}),
}


@pytest.mark.parametrize("name", NORMS)
def test_norms_take_names_too(name):
    function, (arguments, named) = getattr(co, name), NORMS[name]
    (wanted, *_) = function(*arguments, **named)
    for math in ("fast", "promoted"):
        (found, *_) = function(*arguments, **named, math=math)
        assert torch.equal(found, wanted)
        assert requested(function, *arguments, **named, math=math).op.math == math
    with pytest.raises(TypeError, match=f"^{name} takes math 'fast' or 'promoted', for FP8"):
        function(*arguments, **named, math="tf32")


def test_what_is_refused_says_what_to_do():
    with pytest.raises(TypeError, match="math='promoted' is for FP8 operands: omit math"):
        co.gemm(X.bfloat16(), W.bfloat16().t(), math="promoted")
    with pytest.raises(TypeError, match="take math='tf32'"):
        co.gemm(X.float(), W.float().t(), math="fast")
    scales = {"scale_a": torch.ones(8, 1), "scale_b": torch.ones(1, 1)}
    with pytest.raises(TypeError, match=r"math is 'fast', .* omit math"):
        co.gemm(X, W.t(), epilogue=composed.scaled_blocks, **scales, math="fast")


def test_a_kernel_of_fast_sums_does_not_serve_promoted_operands():
    config = co.Sm90Config(co.ThreadblockShape(128, 128, 128))
    spec = co.KernelSpec(
        a="e4m3.row.promoted", b="e4m3.col.promoted", d="bf16.row", epilogue=builtin.identity, config=config
    )
    assert [broken.rule for broken in co.check(spec)] == ["accumulation"]


PROMOTED = {
    "beside all sums": ((128, 208), "cooperative", None),
    "half at a time": ((128, 256), "cooperative", None),
    "one of two instructions at a time": ((256, 128), "cooperative", None),
    "one of three at a time": ((192, 176), "cooperative", None),
    "two of too many": ((256, 144), "cooperative", "takes 216 accumulator registers"),
    "three of too many": ((192, 224), "cooperative", "takes 224 accumulator registers"),
    "a pingpong kernel's": ((64, 208), "pingpong", None),
    "no other warpgroup multiplies meanwhile": ((64, 216), "pingpong", "takes 216 accumulator registers"),
}


@pytest.mark.parametrize(("tile", "schedule", "message"), PROMOTED.values(), ids=PROMOTED)
def test_the_products_of_a_large_tile_take_turns(tile, schedule, message):
    config = co.Sm90Config(co.ThreadblockShape(*tile, 128), schedule=schedule, accumulation="promoted")
    spec = co.KernelSpec(
        a="e4m3.row.promoted", b="e4m3.col.promoted", d="bf16.row", epilogue=builtin.identity, config=config
    )
    broken = [each.message for each in co.check(spec) if each.rule == "accumulators"]
    assert len(broken) == (message is not None)
    assert all(message in each for each in broken)


def test_groups_take_names_too():
    w, offsets = W[None].expand(2, -1, -1).contiguous(), torch.tensor([3, 8], dtype=torch.int32)
    wanted = co.gemm(X, w.mT, groups=co.Groups(offsets))
    for math in ("fast", "promoted"):
        assert torch.equal(co.gemm(X, w.mT, groups=co.Groups(offsets), math=math), wanted)
        for a, b in ((X, w.mT), (co.Scaled(X, 1.0), co.Scaled(w.mT, 1.0))):
            op = requested(co.gemm, a, b, groups=co.Groups(offsets), math=math).op
            assert (op.math, portable.find(op.about.split(";", 4)[4]).math) == (math, math)
    x, groups = X.view(2, 4, -1), co.Groups(counts=torch.tensor([4, 4], dtype=torch.int32), expected=3)
    op = requested(co.gemm, x, w.mT, groups=groups, math="fast").op
    assert (op.math, op.expected) == ("fast", 3)


def test_groups_refuse_names_of_other_operands():
    w, offsets = W[None], torch.tensor([8], dtype=torch.int32)
    with pytest.raises(TypeError, match="math='fast' is for FP8 operands: omit math"):
        co.gemm(X.bfloat16(), w.bfloat16().mT, groups=co.Groups(offsets), math="fast")
    with pytest.raises(TypeError, match="groups take 'fast' or 'promoted', for FP8"):
        co.gemm(X, w.mT, groups=co.Groups(offsets), math="tf32")
    with pytest.raises(TypeError, match="math is 'fast', and a sum over each group's rows takes none"):
        op_for(None, "ragged_k").in_math("fast")


def test_groups_of_a_large_k_are_added_up_in_fp32():
    x, w, offsets = (torch.empty(s, dtype=E4M3, device="meta") for s in ((512, 4096), (2, 256, 4096), (2,)))
    for math, wanted in ((None, "promoted"), ("fast", "fast")):
        made = check_call(builtin.identity.graph, x, w.mT, {}, None, None, offsets=offsets.int(), math=math)
        assert accumulation(made)[0] == wanted
        decision = dispatch.decide(signature_of(made, H100), H100, made.problem)
        assert {spec.config.accumulation for spec in decision.specs} == {wanted}
        assert all(legality.check(spec) == () for spec in decision.specs)
