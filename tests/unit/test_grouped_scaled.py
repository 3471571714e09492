"""Groups of rows in FP8, with scales of rows and of each expert's columns: calls, their reference and kernels."""

import re

import pytest
import torch
from op_table import as_call
from signatures import H100

import cutlass_ops as co
from cutlass_ops.base import mma
from cutlass_ops.choose import dispatch
from cutlass_ops.declare.form import GROUPED
from cutlass_ops.epilogue import builtin, composed
from cutlass_ops.kinds import legality
from cutlass_ops.operand.call import signature_of
from cutlass_ops.run.gemm import op_for

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
        found.append(co.gemm(co.Scaled(x[rows], of_a), co.Scaled(w[expert], of_b), **own))
    return torch.cat(found)


@pytest.mark.parametrize("types", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2), (BF16, BF16)], ids=str)
@pytest.mark.parametrize("scale_a", [0.5, torch.rand(T)], ids=["number", "rows"])
@pytest.mark.parametrize(
    "scale_b", [2.0, torch.rand(N), torch.rand(EXPERTS, N)], ids=["number", "columns", "of experts"]
)
def test_scales_are_those_of_rows_and_of_experts(types, scale_a, scale_b):
    x, w = drawn(*types)
    found = co.gemm(co.Scaled(x, scale_a), co.Scaled(w, scale_b), groups=co.Groups(ENDS))
    assert (found.dtype, found.shape) == (BF16, (T, N))
    torch.testing.assert_close(found[:10], by_expert(x, w, scale_a, scale_b))


def test_an_epilogue_follows():
    (x, w), bias, scale_a, scale_b = drawn(), torch.randn(EXPERTS, N), torch.rand(T), torch.rand(EXPERTS, N)
    inputs = {"epilogue": builtin.bias_relu, "bias": bias, "out_dtype": torch.float32}
    found = co.gemm(co.Scaled(x, scale_a), co.Scaled(w, scale_b), groups=co.Groups(ENDS), **inputs)
    torch.testing.assert_close(found[:10], by_expert(x, w, scale_a, scale_b, **inputs))
    inputs = {"scale_a": scale_a, "scale_b": scale_b}
    plain = co.gemm(x, w, groups=co.Groups(ENDS), epilogue=composed.SCALED[True, True], **inputs)
    torch.testing.assert_close(plain[:10], by_expert(x, w, scale_a, scale_b))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"b": torch.randn(EXPERTS, K, N).to(E4M3)}, ValueError, "Tensor Cores read this type along K only: pass"),
        ({"a": torch.randn(T, K).to(BF16)}, TypeError, "a and b must have the same dtype, or both FP8"),
        ({"scale_a": torch.rand(T + 1)}, ValueError, "scale_a has shape (13,)"),
        ({"scale_b": torch.rand(EXPERTS)}, ValueError, "pass scale_b[:, None].repeat(1, 8) for a scale"),
        ({"scale_b": torch.rand(EXPERTS, 1, 1)}, ValueError, "scale_b has shape (3, 1, 1)"),
        ({"epilogue": composed.swiglu}, ValueError, "write all scales into the epilogue, and pass the values alone"),
        ({"epilogue": clash}, ValueError, "clash has an input scale_b, as scaled operands have"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_wrong_arguments_are_refused(changes, error, message):
    x, w = drawn()
    given = {"a": x, "b": w, "offsets": ENDS, "scale_a": torch.rand(T), "scale_b": torch.rand(EXPERTS, N)}
    with pytest.raises(error, match=re.escape(message)):
        co.gemm(**as_call({**given, **changes}))


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
    found = co.gemm(co.Scaled(x, scale_a), co.Scaled(w, scale_b), groups=co.Groups(ENDS), out_dtype=torch.float32)
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
    given = {"epilogue": builtin.bias, "bias": bias}
    for scales in (scale_a, by_columns):
        found = co.gemm(
            co.Scaled(x, scales), co.Scaled(w, scale_b), groups=co.Groups(counts=counts, expected=3), **given
        )
        assert found.shape == (EXPERTS, room, WIDE)
        for group, count in enumerate(counts.tolist()):
            own = {"epilogue": builtin.bias, "bias": bias[group]}
            a, b = co.Scaled(x[group, :count], scale_a[group, :count]), co.Scaled(w[group], scale_b[group])
            torch.testing.assert_close(found[group, :count], co.gemm(a, b, **own))


def test_one_block_of_k_has_a_scale():
    """(T, 1) are scales of rows, unless w's are those of blocks."""
    x, w, scale_a, scale_b = in_blocks(k=128)
    found = co.gemm(co.Scaled(x, scale_a), co.Scaled(w, scale_b), groups=co.Groups(ENDS))
    wanted = co.gemm(co.Scaled(x[:5], scale_a[:5]), co.Scaled(w[0], scale_b[0]))
    torch.testing.assert_close(found[:5], wanted)
    rows = co.gemm(co.Scaled(x, scale_a), co.Scaled(w, 2.0), groups=co.Groups(ENDS))
    torch.testing.assert_close(rows[:5], co.gemm(co.Scaled(x[:5], scale_a[:5, 0]), co.Scaled(w[0], 2.0)))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"scale_a": torch.rand(ROWS)}, ValueError, "scale_a has none for blocks of a: pass (10, 4) as well"),
        ({"scale_b": torch.rand(EXPERTS, WIDE)}, ValueError, "has none for blocks of b: pass (3, 3, 4) or (3, 264, 4)"),
        ({"scale_a": torch.rand(ROWS, 3)}, ValueError, "scale_a has shape (10, 3): with M=10, N=264 and K=400 it must"),
        ({"scale_b": torch.rand(EXPERTS, 4, 3)}, ValueError, "It looks transposed: pass scale_b.mT"),
        ({"scale_b": torch.rand(2, 3, 4)}, ValueError, "must have shape (3, 3, 4), a scale for each 128x128 of b"),
        ({"scale_a": torch.rand(ROWS, 4).half()}, TypeError, "scales of blocks are torch.float32, so pass scale_a"),
        ({"epilogue": composed.swiglu}, ValueError, "write all scales into the epilogue, and pass the values alone"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_wrong_scales_of_blocks_are_refused(changes, error, message):
    names = ("a", "b", "scale_a", "scale_b")
    given = {**dict(zip(names, in_blocks(), strict=True)), "offsets": ENDS, **changes}
    with pytest.raises(error, match=re.escape(message)):
        co.gemm(**as_call(given))


def test_blocks_of_16_bits_have_no_scales():
    x, w, scale_a, scale_b = in_blocks()
    with pytest.raises(TypeError, match=r"a is .*, and scale_a has scales of blocks, which only FP8"):
        co.gemm(co.Scaled(x.to(BF16), scale_a), co.Scaled(w.to(BF16), scale_b), groups=co.Groups(ENDS))


@pytest.mark.usefixtures("session")
@pytest.mark.parametrize("of_w", BLOCKS)
@pytest.mark.parametrize("rows", [8, 512, 65536])
def test_a_legal_kernel_with_blocks_is_chosen(rows, of_w):
    tensors = [t.to("meta") for t in in_blocks(of_w, 8, 8, 512, 256)]
    x, scale_a = tensors[0][:1].repeat(rows, 1), tensors[2][:1].repeat(rows, 1)
    offsets = torch.empty(8, dtype=torch.int32, device="meta")
    call = op_for(None, "grouped", (False, False, True)).checked(
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
