"""Scales of blocks of FP8 operands: what is declared, rendered, refused and chosen, and the reference against FP64."""

import pytest
import torch
from signatures import H100

import cutlass_ops as co
from cutlass_ops.base.errors import ConfigError
from cutlass_ops.choose import dispatch
from cutlass_ops.declare.form import DENSE
from cutlass_ops.declare.problem import Problem
from cutlass_ops.epilogue import builtin, composed, derivatives
from cutlass_ops.epilogue.graph import Graph
from cutlass_ops.epilogue.nodes import Input, Kind, Node, Output
from cutlass_ops.kinds import legality
from cutlass_ops.kinds.sm90 import footprint, model
from cutlass_ops.operand.call import call_at, check_call, signature_of
from cutlass_ops.run import by_pytorch
from cutlass_ops.run.gemm import op_for

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
BLOCKS = ("128x128", "128x1")

pytestmark = pytest.mark.usefixtures("session")


@co.epilogue
def relu_and_sum(acc, bias: co.Row):
    y = co.e.relu(acc + bias)
    return {"d": y, "total": co.e.sum(y, dim=1)}


@co.epilogue
def gate(acc, up: co.Product):
    return acc * up


def spec(b="128x128", tile=(128, 128, 128), cluster=(1, 1), graph=composed.scaled_blocks, a="1x128", **config):
    config = {"accumulation": "promoted", "schedule": "cooperative", **config}
    made = co.Sm90Config(co.ThreadblockShape(*tile), co.ClusterShape(*cluster), **config)
    types = {"a": f"e4m3.row.blocks{a}" if a else "e4m3.row", "b": f"e5m2.col.blocks{b}" if b else "e5m2.col"}
    return co.KernelSpec(**types, d="bf16.row", epilogue=graph, config=made)


def draw(m=48, n=40, k=256, of_b="128x128", a=E4M3, b=E4M3):
    """Operands with scales of blocks, and the exact product of the matrices that they stand for."""
    torch.manual_seed(4)
    x, w = torch.randn(m, k).to(a), torch.randn(n, k).to(b)
    steps = -(-k // 128)
    rows = n if of_b == "128x1" else -(-n // 128)
    scale_a, scale_b = torch.rand(m, steps) + 0.1, torch.rand(rows, steps) + 0.1
    columns = scale_b.double() if of_b == "128x1" else scale_b.double().repeat_interleave(128, 0)[:n]
    spread = (s.repeat_interleave(128, 1)[:, :k] for s in (scale_a.double(), columns))
    first, second = (t.double() * s for t, s in zip((x, w), spread, strict=True))
    return x, w.t(), scale_a, scale_b, first @ second.t()


# ---- Declarations ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("b", BLOCKS)
def test_a_declaration_survives_json(b):
    given = spec(b)
    assert co.check(given) == ()
    assert co.KernelSpec.from_json(given.to_json()) == given
    assert [str(t) for t in given.inputs] == ["f32.row.align1"] * 2
    assert f"blocks{b}" in given.slug


ACC = (Node("acc"),)
INPUTS = composed.scaled_blocks.graph.inputs
WRONG = {
    "one": (INPUTS[:1], ACC, "of A and of B, each once"),
    "twice": ((*INPUTS, Input("more", Kind.BLOCKS_B)), ACC, "of A and of B, each once"),
    "read": (INPUTS, (*ACC, Node("input", (), "scale_a"), Node("mul", (0, 1))), "which the accumulator has already"),
    "product": (
        (*INPUTS, Input("up", Kind.PRODUCT)),
        (*ACC, Node("input", (), "up"), Node("mul", (0, 1))),
        "and up would have none",
    ),
    "mean": (INPUTS, (*ACC, Node("mean_of_a"), Node("mul", (0, 1))), "and mean_of_a would have none"),
}


@pytest.mark.parametrize(("inputs", "nodes", "message"), WRONG.values(), ids=WRONG)
def test_graphs_without_sense_are_refused(inputs, nodes, message):
    with pytest.raises(ConfigError, match=message):
        Graph(inputs, nodes, (Output("d", len(nodes) - 1),))


def test_there_is_no_derivative():
    with pytest.raises(ConfigError, match=r"scale_a and scale_b are scales of blocks.* torch\.no_grad"):
        derivatives.vjp(composed.scaled_blocks.graph)


ILLEGAL = {
    "accumulation": (spec(accumulation="fast"), "accumulation is 'fast'.*use accumulation='promoted'"),
    "tile K": (spec(tile=(128, 128, 64)), "threadblock.k is 64.*use threadblock.k=128"),
    "fast, tile K": (spec(tile=(128, 128, 64), accumulation="fast"), "use accumulation='promoted', threadblock.k=128"),
    "split": (spec(split_k=2), "split_k is 2.*use split_k=1"),
    "no scales": (spec(graph=builtin.bias), "the epilogue has no scales of their blocks.*with scales of blocks"),
    "no blocks": (spec(b="", a=""), "use 'e4m3.row.blocks1x128' and 'e5m2.col.blocks128x128' or"),
    "one": (spec(b=""), "no main loop applies .*use operands with blocks of 1x128 and 128x128 or 1x128 and 128x1"),
    "other blocks": (spec(a="128x128"), "no main loop applies scales of such blocks"),
    "accumulators": (spec(tile=(256, 144, 128)), "takes 216 accumulator registers"),
}


@pytest.mark.parametrize(("declared", "message"), ILLEGAL.values(), ids=ILLEGAL)
def test_what_no_main_loop_does_is_refused(declared, message):
    with pytest.raises(ConfigError, match=message):
        legality.require_legal(declared)


def test_scales_are_fp32():
    declared = co.KernelSpec(
        a="e4m3.row.blocks1x128", b="e4m3.col.blocks128x128", d="bf16.row", epilogue=composed.scaled_blocks,
        inputs={"scale_a": "bf16"}, config=spec().config,
    )  # fmt: skip
    assert [str(v) for v in co.check(declared)] == ["epilogue_dtypes: input scale_a is bf16: use f32"]


# ---- Kernels ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tile", "b", "config", "numbers"),
    [
        ((128, 128, 128), "128x128", {}, 130),
        ((128, 128, 128), "128x1", {}, 256),
        ((64, 96, 128), "128x128", {"schedule": "pingpong"}, 68),
        ((128, 16, 128), "128x128", {"swap_ab": True}, 18),
        ((192, 128, 128), "128x128", {}, 194),
    ],
)
def test_a_stage_has_the_scales_of_a_tile(tile, b, config, numbers):
    declared = spec(b, tile, **config)
    plain = spec(b="", a="", tile=tile, graph=builtin.identity, **config)
    for stages in (2, 4):
        more = footprint.mainloop_smem(declared, stages) - footprint.mainloop_smem(plain, stages)
        assert more == -(-stages * numbers * 4 // 128) * 128
    rows, columns = footprint.scaled_rows(declared)
    assert {rows, columns} == ({1} if b == "128x1" else {1, 128})


# ---- Calls on the CPU ------------------------------------------------------------------------------------------------


def test_scales_may_have_any_strides():
    x, w, scale_a, scale_b, _ = draw()
    found = co.gemm(co.Scaled(x, scale_a), co.Scaled(w, scale_b))
    columns = scale_a.t().contiguous().t()
    padded = torch.zeros(2, 52)[:, :48].t().copy_(scale_a)
    for other in (columns, padded):
        assert torch.equal(co.gemm(co.Scaled(x, other), co.Scaled(w, scale_b.t().contiguous().t())), found)
    # A stride of 0 repeats a scale without a copy.
    rows = scale_a[:, :1].expand(48, 2)
    assert torch.equal(
        co.gemm(co.Scaled(x, rows), co.Scaled(w, scale_b)),
        co.gemm(co.Scaled(x, rows.contiguous()), co.Scaled(w, scale_b)),
    )
    assert op_for(None, "dense", (False, False, True)).copied_inputs == 0


@pytest.mark.parametrize("scale", [0.0, float("inf"), float("nan"), -1.0, 2.0**-140])
def test_scales_that_are_not_usual(scale):
    x, w, scale_a, scale_b, _ = draw()
    scale_a[7, 1] = scale
    found = co.gemm(co.Scaled(x, scale_a), co.Scaled(w, scale_b), out_dtype=torch.float32)
    parts = [x[:, at].float() @ w[at].float() for at in (slice(128), slice(128, 256))]
    wanted = parts[0] * (scale_a[:, :1] * scale_b[:, 0]) + parts[1] * (scale_a[:, 1:] * scale_b[:, 1])
    torch.testing.assert_close(found, wanted, equal_nan=True)


def test_an_epilogue_follows_the_scales():
    x, w, scale_a, scale_b, exact = draw()
    bias = torch.randn(40).to(BF16)
    d, total = co.gemm(co.Scaled(x, scale_a), co.Scaled(w, scale_b), epilogue=relu_and_sum, bias=bias)
    wanted = (exact + bias.double()).relu()
    assert (d.double() - wanted).abs().max() <= 2 * (wanted.to(BF16).double() - wanted).abs().max()
    torch.testing.assert_close(total.double(), wanted.sum(1), rtol=1e-5, atol=1e-5)


def test_shapes_that_pytorch_has_for_rows_and_columns_stay_those():
    x, w, *_ = draw(n=300)
    rows, columns = torch.rand(48), torch.rand(300)
    found = co.gemm(co.Scaled(x, rows), co.Scaled(w, columns))
    assert torch.equal(co.gemm(co.Scaled(x, rows[:, None]), co.Scaled(w, columns[None])), found)
    # With 128 of K, a scale of a row is that of its one block.
    x, w = x[:, :128], w[:128]
    blocks = torch.rand(3, 1)
    spread = blocks.repeat_interleave(128, 0)[:300, 0]
    torch.testing.assert_close(
        co.gemm(co.Scaled(x, rows[:, None]), co.Scaled(w, blocks)),
        co.gemm(co.Scaled(x, rows), co.Scaled(w, spread)),
        rtol=0.01,
        atol=1e-6,
    )


ONES = torch.ones
WRONG_CALLS = {
    "of a alone": ((ONES(48, 2), 1.0), ValueError, r"^scale_a has shape \(48, 2\).*torch.full\(\(40, 2\), scale_b,"),
    "of a, one": ((ONES(48, 2), ONES(())), ValueError, r"is scale_b.expand\(40, 2\)"),
    "of a, columns": ((ONES(48, 2), ONES(40)), ValueError, r"pass \(1, 2\) or .* scale_b\[..., None\].expand\(40, 2\)"),
    "of b alone": ((1.0, ONES(1, 2)), ValueError, r"^scale_b has shape \(1, 2\).*torch.full\(\(48, 2\), scale_a, dev"),
    "of b, rows": ((ONES(48), ONES(1, 2)), ValueError, r"scale_a\[..., None\].expand\(48, 2\)"),
    "steps": ((ONES(48, 3), ONES(1, 2)), ValueError, r"^scale_a has shape \(48, 3\): with M=48.* \(48, 2\)"),
    "rows of b": ((ONES(48, 2), ONES(2, 2)), ValueError, r"^scale_b has shape \(2, 2\): .* \(1, 2\), .* or \(40, 2\)"),
    "transposed": ((ONES(2, 48), ONES(1, 2)), ValueError, r"It looks transposed: pass scale_a.t\(\)"),
    "dtype": ((ONES(48, 2).half(), ONES(1, 2)), TypeError, r"^scale_a is torch.float16: .*pass scale_a.float\(\)"),
}  # fmt: skip


@pytest.mark.parametrize(("scales", "kind", "message"), WRONG_CALLS.values(), ids=WRONG_CALLS)
def test_errors_say_what_to_pass(scales, kind, message):
    x, w, *_ = draw()
    with pytest.raises(kind, match=message):
        co.gemm(*map(co.Scaled, (x, w), scales))


def test_other_refusals():
    x, w, scale_a, scale_b, _ = draw()
    with pytest.raises(TypeError, match=r"scales of blocks, which only FP8 operands can have"):
        co.gemm(co.Scaled(x.to(BF16), scale_a), co.Scaled(w.to(BF16), scale_b))
    with pytest.raises(ValueError, match=r"^gate has the product up"):
        co.gemm(co.Scaled(x, scale_a), co.Scaled(w, scale_b), epilogue=gate, up=w)
    with pytest.raises(ValueError, match=r"along K only"):
        co.gemm(co.Scaled(x, scale_a), co.Scaled(w.contiguous(), scale_b))
    with pytest.raises(ValueError, match=r"^scale_a requires grad and a is .* products in 8 bits have no gradients"):
        co.gemm(co.Scaled(x, scale_a.requires_grad_()), co.Scaled(w, scale_b))


# ---- The choice of a kernel ------------------------------------------------------------------------------------------


def signature(of_b="128x128", n=4096, device=H100):
    if of_b == "128x128":
        return signature_of(call_at(composed.scaled_blocks.graph, Problem(512, n, 4096), "e4m3", "row", "col"), device)
    x, w, scale_a, scale_b, _ = draw(16, n, 256, of_b)
    call = check_call(composed.scaled_blocks.graph, x, w, {"scale_a": scale_a, "scale_b": scale_b}, None, None)
    return signature_of(call, device)


def test_the_shape_of_scales_says_which_blocks():
    assert (str(signature().a), str(signature().b)) == ("e4m3.row.blocks1x128", "e4m3.col.blocks128x128")
    assert str(signature("128x1", 300).b) == "e4m3.col.blocks128x1"
    assert str(signature("128x1", 1).b) == "e4m3.col.blocks128x128"  # the same for one column


@pytest.mark.parametrize("m", [1, 16, 512, 8192])
@pytest.mark.parametrize("of_b", BLOCKS)
def test_every_problem_is_served_by_legal_kernels(m, of_b):
    of = signature(of_b, 384)
    decision = dispatch.decide(of, H100, Problem(m, 4096, 4096))
    assert decision.kept
    for config in decision.kept:
        assert config.accumulation == "promoted"
        assert legality.check(H100.spec(of, config)) == ()


def test_the_model_knows_that_sums_are_added_up():
    tile = co.ThreadblockShape(128, 128, 128)
    batch = model.Batch.of([co.Sm90Config(tile, schedule=s, accumulation="promoted") for s in model.SCHEDULES])
    single, twice = (
        model.promoting(batch, model.grid(batch, [Problem(4096, 4096, k)], model.H100))[0] for k in (4096, 8192)
    )
    assert (twice == 2 * single).all()
    assert single[2] < single[0] / 2  # cooperative warpgroups take turns


def test_sums_are_added_up_while_memory_is_read():
    """Promoted sums cost next to nothing where the weight's bytes take longer."""
    spec = co.Sm90Config(co.ThreadblockShape(64, 64, 128), schedule="pingpong")
    batch, problem = model.Batch.of([spec]), [Problem(16, 28672, 8192)]
    adding = model.promoting(batch, model.grid(batch, problem, model.H100))
    without, added = (float(model.times(batch, problem, widths=(1.0, 2.0), adding=x)[0, 0]) for x in (0.0, adding))
    assert without < added < without + float(adding[0, 0]) / 2


ROW_SCALES = {"each": torch.rand(5), "apart": torch.rand(10)[::2], "one": torch.rand(()), "number": 0.5}
COLUMN_SCALES = {"each": torch.rand(32), "row": torch.rand(1, 32), "one": torch.rand(1), "number": 2.0}


@pytest.mark.parametrize("rows", ROW_SCALES.values(), ids=ROW_SCALES)
@pytest.mark.parametrize("columns", COLUMN_SCALES.values(), ids=COLUMN_SCALES)
def test_pytorch_has_its_scales_in_lines(rows, columns, monkeypatch):
    """torch._scaled_mm takes contiguous scales of each row and column; one of each matrix is for all of them."""
    given = (Kind.COL, rows), (Kind.ROW, columns)
    kinds = tuple(kind if torch.as_tensor(x).numel() > 1 else Kind.SCALAR for kind, x in given)
    a, b = (torch.randn(n, 16).to(torch.float8_e4m3fn) for n in (5, 32))

    def scaled_mm(a, b, scale_a, scale_b, out_dtype, use_fast_accum):
        by_rows = Kind.COL in kinds or Kind.ROW in kinds
        assert (scale_a.shape, scale_b.shape) == (((5, 1), (1, 32)) if by_rows else ((), ()))
        assert scale_a.is_contiguous()
        assert scale_b.is_contiguous()
        return (a.float() @ b.float() * scale_a * scale_b).to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    monkeypatch.setattr(by_pytorch, "_takes_scales", lambda *_: True)
    manner = by_pytorch.Manner(torch.bfloat16, DENSE, "fast", None, None)
    of = by_pytorch.Operands(manner, a, b.t(), {"scale_a": rows, "scale_b": columns})
    found = by_pytorch.scaled("scale_a", "scale_b", kinds, of)
    exact = a.double() @ b.double().t()
    exact = exact * torch.as_tensor(rows).double().reshape(-1, 1) * torch.as_tensor(columns).double().reshape(1, -1)
    torch.testing.assert_close(found.double(), exact, rtol=1e-2, atol=1e-2)
