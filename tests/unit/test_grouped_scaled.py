"""Groups of rows in FP8, with scales of rows and of each expert's columns: calls, their reference and kernels."""

import re

import pytest
import torch
from fake_device import fake_device
from signatures import H100

import cutlass_ops as co
from cutlass_ops.base import mma
from cutlass_ops.choose import dispatch
from cutlass_ops.declare.form import GROUPED
from cutlass_ops.epilogue import builtin, composed
from cutlass_ops.kinds import legality
from cutlass_ops.run.call import signature_of
from cutlass_ops.run.grouped import GroupedOp
from cutlass_ops.run.grouped_scaled import scaled_grouped_op, scaled_masked_op

E4M3, E5M2, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16
T, EXPERTS, N, K = 12, 3, 8, 32
ENDS = torch.tensor([5, 5, 10], dtype=torch.int32)


@co.epilogue
def clash(acc, scale_b: co.Row):
    return acc * scale_b


def drawn(x=E4M3, w=E4M3):
    return torch.randn(T, K).to(x), torch.randn(EXPERTS, N, K).to(w).mT


def by_expert(x, w, scale_a, scale_b, **named):
    """Return the rows that have an expert, by dense calls."""
    found = []
    for expert, rows in ((0, slice(0, 5)), (2, slice(5, 10))):
        of_a = scale_a[rows] if isinstance(scale_a, torch.Tensor) and scale_a.ndim else scale_a
        of_b = scale_b[expert] if isinstance(scale_b, torch.Tensor) and scale_b.ndim > 1 else scale_b
        own = {name: value[expert] if name == "bias" else value for name, value in named.items()}
        found.append(co.scaled_gemm(x[rows], w[expert], of_a, of_b, **own))
    return torch.cat(found)


@pytest.mark.parametrize("types", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2), (BF16, BF16)], ids=str)
@pytest.mark.parametrize("scale_a", [0.5, torch.rand(T)], ids=["number", "rows"])
@pytest.mark.parametrize(
    "scale_b", [2.0, torch.rand(N), torch.rand(EXPERTS, N)], ids=["number", "columns", "of experts"]
)
def test_scales_are_those_of_rows_and_of_experts(types, scale_a, scale_b):
    x, w = drawn(*types)
    found = co.scaled_grouped_gemm(x, w, ENDS, scale_a, scale_b)
    assert (found.dtype, found.shape) == (BF16, (T, N))
    torch.testing.assert_close(found[:10], by_expert(x, w, scale_a, scale_b))


def test_an_epilogue_follows():
    (x, w), bias, scale_a, scale_b = drawn(), torch.randn(EXPERTS, N), torch.rand(T), torch.rand(EXPERTS, N)
    inputs = {"epilogue": builtin.bias_relu, "bias": bias, "out_dtype": torch.float32}
    found = co.scaled_grouped_gemm(x, w, ENDS, scale_a, scale_b, **inputs)
    torch.testing.assert_close(found[:10], by_expert(x, w, scale_a, scale_b, **inputs))
    inputs = {"scale_a": scale_a, "scale_b": scale_b}
    plain = co.grouped_gemm(x, w, ENDS, epilogue=composed.SCALED[True, True], **inputs)
    torch.testing.assert_close(plain[:10], by_expert(x, w, scale_a, scale_b))


def test_a_compiled_program_calls_it_as_an_operator():
    (x, w), scale_a, scale_b = drawn(), torch.rand(T), torch.rand(EXPERTS, N)
    compiled = torch.compile(co.scaled_grouped_gemm, fullgraph=True, backend="aot_eager")
    found = compiled(x, w, ENDS, scale_a, scale_b)
    torch.testing.assert_close(found[:10], by_expert(x, w, scale_a, scale_b))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"w": torch.randn(EXPERTS, K, N).to(E4M3)}, ValueError, "Tensor Cores read this type along K only: pass"),
        ({"x": torch.randn(T, K).to(BF16)}, TypeError, "x and w must have the same dtype, or both FP8"),
        ({"scale_a": torch.rand(T + 1)}, ValueError, "scale_a has shape (13,)"),
        ({"scale_b": torch.rand(EXPERTS)}, ValueError, "pass scale_b[:, None].repeat(1, 8) for a scale"),
        ({"scale_b": torch.rand(EXPERTS, 1, 1)}, ValueError, "scale_b has shape (3, 1, 1)"),
        ({"epilogue": composed.swiglu}, ValueError, "write all scales into the epilogue, and call grouped_gemm"),
        ({"epilogue": clash}, ValueError, "clash has an input scale_b, and so has scaled_grouped_gemm"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_wrong_arguments_are_refused(changes, error, message):
    x, w = drawn()
    given = {"x": x, "w": w, "offsets": ENDS, "scale_a": torch.rand(T), "scale_b": torch.rand(EXPERTS, N)}
    with pytest.raises(error, match=re.escape(message)):
        co.scaled_grouped_gemm(**{**given, **changes})


def test_rows_must_be_aligned():
    x, w = torch.randn(T, 24).to(E4M3), torch.randn(EXPERTS, N, 24).to(E4M3).mT
    with pytest.raises(ValueError, match="pad K of x and w with zeros to a multiple of 16"):
        co.scaled_grouped_gemm(x, w, ENDS, 1.0, 1.0)


def test_there_is_no_gradient():
    (x, w), scale = drawn(), torch.rand(T, requires_grad=True)
    with pytest.raises(ValueError, match="products in 8 bits have no gradients"):
        co.scaled_grouped_gemm(x, w, ENDS, scale, 1.0)


@pytest.mark.usefixtures("session")
@pytest.mark.parametrize("rows", [1, 64, 8192])
def test_a_legal_kernel_is_chosen(rows):
    x, w = (torch.empty(*shape, dtype=E4M3, device="meta") for shape in ((rows, 256), (8, 512, 256)))
    scales = torch.empty(rows, device="meta"), torch.empty(8, 512, device="meta")
    offsets = torch.empty(8, dtype=torch.int32, device="meta")
    call = scaled_grouped_op(True, True).checked(x, w.mT, (offsets, *scales), {}, None, None)
    found = dispatch.decide(signature_of(call, H100), H100, call.chosen_for)
    assert found is not None
    assert found.signature.form == GROUPED
    assert all(legality.check(spec) == () for spec in found.specs)


def test_warm_calls_are_served_warm(monkeypatch):
    with fake_device(monkeypatch) as device:
        op, (x, w) = scaled_grouped_op(True, True, builtin.bias), drawn()
        bias, scale_a, scale_b = torch.randn(EXPERTS, N), torch.rand(T), torch.rand(EXPERTS, N)
        before = op.served_warm
        for _ in range(2):
            found = op(x, w, ENDS, scale_a, scale_b, bias)
        wanted = by_expert(x, w, scale_a, scale_b, epilogue=builtin.bias, bias=bias)
        torch.testing.assert_close(found[:10], wanted, rtol=2**-7, atol=2**-7)
        assert op.served_warm == before + 1
        assert {launch.spec.a.dtype.name for launch in device.launches} >= {"e4m3"}


# ---- Scales of blocks ------------------------------------------------------------------------------------------------

BLOCKS = ("128x128", "128x1")
ROWS, WIDE, LONG = 10, 264, 400  # with a part of a block of columns, and of K


def in_blocks(of_w="128x128", rows=ROWS, experts=EXPERTS, n=WIDE, k=LONG):
    """Return x, w and scales of their blocks."""
    steps = mma.blocks(k)
    x, w = torch.randn(rows, k).to(E4M3), torch.randn(experts, n, k).to(E5M2).mT
    of_blocks = (experts, mma.blocks(n) if of_w == "128x128" else n, steps)
    return x, w, torch.rand(rows, steps) + 0.1, torch.rand(of_blocks) + 0.1


@pytest.mark.parametrize("of_w", BLOCKS)
def test_blocks_of_rows_and_of_experts_have_scales(of_w):
    x, w, scale_a, scale_b = in_blocks(of_w)
    found = co.scaled_grouped_gemm(x, w, ENDS, scale_a, scale_b, out_dtype=torch.float32)
    for expert, rows in ((0, slice(0, 5)), (2, slice(5, 10))):
        spread = scale_a[rows].double().repeat_interleave(128, 1)[:, :LONG]
        columns = scale_b[expert].double()
        columns = columns if of_w == "128x1" else columns.repeat_interleave(128, 0)[:WIDE]
        weight = w[expert].double() * columns.repeat_interleave(128, 1)[:, :LONG].t()
        torch.testing.assert_close(found[rows].double(), (x[rows].double() * spread) @ weight, rtol=2e-5, atol=2e-3)


@pytest.mark.parametrize("of_w", BLOCKS)
def test_groups_with_room_have_blocks_too(of_w):
    room, counts, bias = 6, torch.tensor([2, 0, 6], dtype=torch.int32), torch.randn(EXPERTS, WIDE)
    x, w, scale_a, scale_b = in_blocks(of_w, EXPERTS * room)
    x, scale_a = x.view(EXPERTS, room, LONG), scale_a.view(EXPERTS, room, -1)
    by_columns = scale_a.mT.contiguous().mT  # no distance leads through the rows of all groups
    given = {"epilogue": builtin.bias, "bias": bias, "expected_rows": 3}
    for scales in (scale_a, by_columns):
        found = co.scaled_grouped_gemm_masked(x, w, counts, scales, scale_b, **given)
        assert found.shape == (EXPERTS, room, WIDE)
        for group, count in enumerate(counts.tolist()):
            own = {"epilogue": builtin.bias, "bias": bias[group]}
            rows = x[group, :count], w[group], scale_a[group, :count], scale_b[group]
            torch.testing.assert_close(found[group, :count], co.scaled_gemm(*rows, **own))


def test_one_block_of_k_has_a_scale():
    """(T, 1) are scales of rows, unless w's are those of blocks."""
    x, w, scale_a, scale_b = in_blocks(k=128)
    found = co.scaled_grouped_gemm(x, w, ENDS, scale_a, scale_b)
    wanted = co.scaled_gemm(x[:5], w[0], scale_a[:5], scale_b[0])
    torch.testing.assert_close(found[:5], wanted)
    rows = co.scaled_grouped_gemm(x, w, ENDS, scale_a, 2.0)
    torch.testing.assert_close(rows[:5], co.scaled_gemm(x[:5], w[0], scale_a[:5, 0], 2.0))


def test_a_compiled_program_has_blocks():
    arguments = in_blocks()
    given = (*arguments[:2], ENDS, *arguments[2:])
    compiled = torch.compile(co.scaled_grouped_gemm, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*given)[:10], co.scaled_grouped_gemm(*given)[:10])
    shapes = co.scaled_grouped_gemm(*(t.to("meta") for t in given))
    assert (shapes.shape, shapes.dtype) == ((ROWS, WIDE), BF16)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"scale_a": torch.rand(ROWS)}, ValueError, "scale_a has none for blocks of x: pass (10, 4) as well"),
        (
            {"scale_b": torch.rand(EXPERTS, WIDE)},
            ValueError,
            "has none for blocks of w: pass (3, 3, 4) or (3, 264, 4)",
        ),
        ({"scale_a": torch.rand(ROWS, 3)}, ValueError, "scale_a has shape (10, 3): with M=10, N=264 and K=400 it must"),
        ({"scale_b": torch.rand(EXPERTS, 4, 3)}, ValueError, "It looks transposed: pass scale_b.mT"),
        (
            {"scale_b": torch.rand(2, 3, 4)},
            ValueError,
            "must have shape (3, 3, 4), a scale for each 128x128 of w",
        ),
        (
            {"scale_a": torch.rand(ROWS, 4).half()},
            TypeError,
            "scales of blocks are torch.float32, so pass scale_a",
        ),
        ({"epilogue": composed.swiglu}, ValueError, "write all scales into the epilogue, and call grouped_gemm"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_wrong_scales_of_blocks_are_refused(changes, error, message):
    names = ("x", "w", "scale_a", "scale_b")
    given = {**dict(zip(names, in_blocks(), strict=True)), "offsets": ENDS, **changes}
    with pytest.raises(error, match=re.escape(message)):
        co.scaled_grouped_gemm(**given)


def test_blocks_of_16_bits_have_no_scales():
    x, w, scale_a, scale_b = in_blocks()
    with pytest.raises(TypeError, match=r"x is .* and w is .*, and scale_a and scale_b are scales of blocks, which"):
        co.scaled_grouped_gemm(x.to(BF16), w.to(BF16), ENDS, scale_a, scale_b)


@pytest.mark.usefixtures("session")
@pytest.mark.parametrize("of_w", BLOCKS)
@pytest.mark.parametrize("rows", [8, 512, 65536])
def test_a_legal_kernel_with_blocks_is_chosen(rows, of_w):
    tensors = [t.to("meta") for t in in_blocks(of_w, 8, 8, 512, 256)]
    x, scale_a = tensors[0][:1].repeat(rows, 1), tensors[2][:1].repeat(rows, 1)
    offsets = torch.empty(8, dtype=torch.int32, device="meta")
    call = scaled_grouped_op(False, False, None, True).checked(
        x, tensors[1], (offsets, scale_a, tensors[3]), {}, None, None
    )
    signature = signature_of(call, H100)
    assert (signature.form, signature.promoted) == (GROUPED, True)
    assert str(signature.b) == f"e5m2.col.blocks{of_w}"
    found = dispatch.decide(signature, H100, call.chosen_for)
    assert found is not None
    assert all(legality.check(spec) == () for spec in found.specs)
    # Small groups take small tiles.
    (rows_of_tile, _), _ = found.spec.config.along_problem
    assert rows_of_tile <= 64 or rows == 65536


@pytest.mark.parametrize(("swap", "sides"), [(False, "1, 128"), (True, "128, 1")])
def test_a_kernel_finds_the_scales_of_its_group(swap, sides):
    config = co.Sm90Config(co.ThreadblockShape(64, 64, 128), schedule="pingpong", swap_ab=swap, accumulation="promoted")
    types = {"a": "e4m3.row.blocks1x128", "b": "e4m3.col.blocks128x128", "d": "bf16.row"}
    declared = co.KernelSpec(epilogue=composed.scaled_blocks, config=config, form="grouped", **types)
    assert co.check(declared) == ()
    assert co.KernelSpec.from_json(declared.to_json()) == declared
    source = co.source(declared)
    assert f"cutlass_ops::BlockScales<{sides}, cutlass_ops::GroupedScales>>" in source
    assert "o.scale_a = groups.row_scales<Element_scale_a>(o.problem, 128);" in source
    assert "o.scale_b = groups.weight_scales<Element_scale_b>(o.problem, 128, 128);" in source


def test_calls_with_blocks_are_served_warm(monkeypatch):
    x, w, scale_a, scale_b = in_blocks()
    with fake_device(monkeypatch) as device:
        op = GroupedOp(composed.scaled_blocks)
        wanted = co.scaled_grouped_gemm(x, w, ENDS, scale_a, scale_b)[:10]
        for scales in (scale_a, scale_a, scale_a.t().contiguous().t()):
            torch.testing.assert_close(op(x, w, ENDS, scales, scale_b)[:10], wanted)
        assert (op.served_warm, op.refused_warm) == (2, 0)
        masked = scaled_masked_op(False, False, None, True, 3)
        biased = [scaled_masked_op(True, True, builtin.bias, False, rows) for rows in (298, 299)]
        assert biased[0] is biased[1]
        counts = torch.tensor([2], dtype=torch.int32)
        found = masked(x[None], w[:1], counts, scale_a[None], scale_b[:1])
        torch.testing.assert_close(found[0, :2], wanted[:2])
        assert {str(launch.spec.a) for launch in device.launches} == {"e4m3.row.blocks1x128"}
