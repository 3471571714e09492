"""Groups of rows, each with a weight of its own: calls, their reference, and the choice and text of their kernels."""

import copy
import pickle
import re

import pytest
import torch
from bundles import packed
from fake_toolkit import HGMMA, UTMALDG, library
from grouping import BF16, OFFSETS, clash, close, ends, mixed, normal, numbered, summed
from op_table import as_call
from signatures import A100, H100

import cutlass_ops as co
from cutlass_ops.choose import dispatch
from cutlass_ops.declare.form import GROUPED
from cutlass_ops.declare.problem import Problem
from cutlass_ops.epilogue import builtin, composed
from cutlass_ops.kinds import legality
from cutlass_ops.operand.call import call_at, check_call, signature_of
from cutlass_ops.run import requests
from cutlass_ops.run.grouped import GroupsOp
from cutlass_ops.ship.verifying import verify


def exact(x, w, offsets):
    """Return D for the rows that have an expert, in float64."""
    rows = torch.arange(int(offsets[-1]))
    expert = torch.searchsorted(offsets, rows.int(), right=True)
    return (x.double()[: len(rows), None, :] @ w.double()[expert])[:, 0]


# ---- Calls -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offsets", OFFSETS, ids=str)
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_each_expert_has_its_rows_and_the_others_are_left(offsets, dtype):
    x, w, offsets = normal(12, 16, dtype=dtype), normal(3, 8, 16, dtype=dtype).mT, ends(*offsets)
    d = torch.full((12, 8), 7.0, dtype=dtype)
    assert co.gemm(x, w, groups=co.Groups(offsets), out=d) is d
    used = int(offsets[-1])
    close(d[:used], exact(x, w, offsets))
    assert (d[used:] == 7).all()


# Rows of two groups as a call has them, the groups, and where each one's rows are.
FORMS = {
    "offsets": ((6,), co.Groups(ends(2, 6)), (slice(0, 2), slice(2, 6))),
    "counts": ((2, 4), co.Groups(counts=ends(3, 1)), ((0, slice(3)), (1, slice(1)))),
}
both = pytest.mark.parametrize(("lead", "groups", "parts"), FORMS.values(), ids=FORMS)


@both
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("flat", [False, True])
def test_inputs_are_those_of_the_expert_or_of_the_row(lead, groups, parts, shared, flat):
    x, w, bias = normal(*lead, 16), normal(2, 16, 8), normal(8) if shared else normal(2, 8)
    scale, residual = normal(*lead), normal(*lead, 8)
    given = {"scale": scale.flatten(), "residual": residual.view(-1, 8)} if flat else {}
    given = {"scale": scale, "residual": residual, **given}
    found = co.gemm(x, w, groups=groups, epilogue=mixed, bias=bias, factor=2, **given)
    for expert, rows in enumerate(parts):
        own = {"bias": bias if shared else bias[expert], "scale": scale[rows], "residual": residual[rows], "factor": 2}
        torch.testing.assert_close(found[rows], co.gemm(x[rows], w[expert], epilogue=mixed, **own))


@both
def test_each_expert_may_have_two_weights(lead, groups, parts):
    x, w, up = normal(*lead, 16), normal(2, 8, 16).mT, normal(2, 8, 16).mT
    found = co.gemm(x, w, groups=groups, epilogue=composed.swiglu, up=up)
    for expert, rows in enumerate(parts):
        torch.testing.assert_close(found[rows], co.gemm_swiglu(x[rows], w[expert], up[expert]))


@both
def test_rows_are_numbered_from_the_first_of_their_expert(lead, groups, parts):
    found = co.gemm(normal(*lead, 16), normal(2, 16, 8), groups=groups, epilogue=numbered)
    for rows in parts:
        assert found[rows][:, 0].tolist() == list(range(len(found[rows])))


@pytest.mark.parametrize(
    ("x", "groups", "n"),
    [
        ((0, 16), co.Groups(ends(0, 0)), 8),
        ((4, 16), co.Groups(ends(0, 4)), 0),
        ((2, 0, 16), co.Groups(counts=ends(0, 0)), 8),
        ((2, 4, 16), co.Groups(counts=ends(0, 4)), 0),
    ],
)
def test_there_may_be_no_rows_and_no_columns(x, groups, n):
    assert co.gemm(normal(*x), normal(2, 16, n), groups=groups).shape == (*x[:-1], n)


def wrong(**changes):
    given = {"a": normal(6, 16), "b": normal(2, 16, 8), "offsets": ends(2, 6)}
    return {**given, **changes}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"a": normal(2, 3, 16)}, ValueError, "a (2, 3, 16) and b (2, 16, 8): a must be (T, K)"),
        ({"offsets": ends(2, 6)[None]}, ValueError, "offsets has shape (1, 2): it must be (E,)"),
        ({"b": normal(2, 8, 16)}, ValueError, "b looks like weights of shape (E, N, K): pass b.mT"),
        ({"b": normal(2, 17, 8)}, ValueError, "b (2, 17, 8): a must be (T, K) and b (E, K, N) with the same K"),
        ({"b": normal(0, 16, 8), "offsets": ends()}, ValueError, "at least one expert"),
        ({"b": normal(2, 16, 8, dtype=torch.float16)}, TypeError, "a and b must have the same dtype"),
        ({"a": torch.randn(6, 16)}, TypeError, "a is torch.float32: use one of torch.float16, torch.bfloat16"),
        ({"offsets": torch.tensor([2, 6])}, TypeError, "offsets is torch.int64: pass offsets.int()"),
        ({"offsets": ends(1, 2, 6)}, ValueError, "offsets has 3 elements and b has 2 experts"),
        ({"offsets": ends(2, 0, 6, 0)[::2]}, ValueError, "offsets has stride 2: call offsets.contiguous() first"),
        ({"offsets": ends(4, 2)}, ValueError, "offsets[1] is 2, after 4, and there are 6 rows"),
        ({"offsets": ends(4, 7)}, ValueError, "offsets[1] is 7, after 4, and there are 6 rows"),
        ({"offsets": ends(-1, 6)}, ValueError, "offsets[0] is -1, after 0"),
        ({"a": normal(16, 6).t()}, ValueError, "groups are rows in memory: pass a.contiguous()"),
        ({"a": normal(6, 32)[:, ::2]}, ValueError, "a has shape (6, 16) and strides (32, 2): one dimension must"),
        ({"a": normal(6, 12), "b": normal(2, 12, 8)}, ValueError, "pad K of a and b with zeros to a multiple of 8"),
        ({"b": normal(2, 16, 9)}, ValueError, "pass weights (E, N, K) as b.mT, or pad N with zeros to"),
        ({"out": normal(8, 6).t()}, ValueError, "groups are rows in memory: pass a row-major tensor"),
        ({"b": normal(16, 8)}, ValueError, "pass a.mT.contiguous().mT. b has two dimensions, so groups are summed"),
        ({"out": normal(5, 8)}, ValueError, "out has shape (5, 8): it must have shape (6, 8)"),
        ({"epilogue": summed}, ValueError, "the epilogue reduces D, and a kernel finishes the reductions of one GEMM"),
        ({"epilogue": clash}, ValueError, "the epilogue has an input offsets, as groups have"),
        ({"epilogue": builtin.bias}, TypeError, "bias is missing"),
        ({"epilogue": composed.swiglu, "up": normal(16, 8)}, ValueError, "must have b's shape (E, K, N), (2, 16, 8)"),
        ({"epilogue": composed.swiglu, "up": normal(2, 8, 16).mT}, ValueError, "both weights need the same major"),
        ({"epilogue": builtin.bias, "bias": normal(3, 8)}, ValueError, "as a Row it must have shape (2, 8)"),
        ({"epilogue": builtin.bias, "bias": normal(7)}, ValueError, "bias has shape (7,)"),
        (
            {"epilogue": builtin.residual, "residual": normal(8, 6).t()},
            ValueError,
            "residual has strides (1, 6), and groups are rows in memory: pass residual.contiguous()",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_wrong_arguments_are_refused(changes, error, message):
    with pytest.raises(error, match=re.escape(message)):
        co.gemm(**as_call(wrong(**changes)))


# ---- Choices ---------------------------------------------------------------------------------------------------------


def made(graph, rows=512, experts=4, n=64, k=64, **inputs):
    x, w = torch.empty(rows, k, dtype=BF16, device="meta"), torch.empty(experts, n, k, dtype=BF16, device="meta").mT
    offsets = torch.empty(experts, dtype=torch.int32, device="meta")
    drawn = {name: torch.empty(*x, dtype=BF16, device="meta") for name, x in inputs.items() if isinstance(x, tuple)}
    inputs |= drawn
    return check_call(graph, x, w, inputs, None, None, offsets=offsets, form=GROUPED)


@pytest.mark.usefixtures("session")
@pytest.mark.parametrize("rows", [1, 16, 512, 8192, 100_000])
@pytest.mark.parametrize(("n", "k"), [(64, 64), (136, 4096), (65, 512)])
def test_a_legal_kernel_is_chosen(rows, n, k):
    call = made(builtin.bias_residual.graph, rows, 8, n, k, bias=(8, n), residual=(rows, n))
    signature = signature_of(call, H100)
    assert signature.form == GROUPED
    found = dispatch.decide(signature, H100, call.chosen_for)
    assert found is not None
    for spec in found.specs:
        assert legality.check(spec) == ()
    assert not found.order.by_gpc


@pytest.mark.usefixtures("session")
@pytest.mark.parametrize(("n", "served"), [(64, True), (65, False)])
def test_kernels_of_two_weights_need_an_aligned_result(n, served):
    call = made(composed.swiglu.graph, n=n, up=torch.empty(4, n, 64, dtype=BF16, device="meta").mT)
    signature = signature_of(call, H100)
    found = dispatch.decide(signature, H100, call.chosen_for)
    assert (found is not None) == served
    if found is not None:
        assert all(legality.check(spec) == () for spec in found.specs)
    else:
        said = dispatch.unserved("x", signature, H100)
        assert "return only D, with lines at multiples of 16 bytes; use two GEMMs" in said


@pytest.mark.usefixtures("session")
@pytest.mark.parametrize(("rows", "n"), [(512, 1), (1, 1), (1, 64)])
def test_one_column_or_one_row_lies_in_rows(rows, n):
    """A matrix with an extent of 1 may be read by columns as well, which no kernel of groups does."""
    call = made(builtin.residual.graph, rows, n=n, residual=(rows, n))
    signature = signature_of(call, H100)
    assert {signature.a.major, signature.d.major, signature.inputs[0].major} == {"row"}
    assert dispatch.decide(signature, H100, call.chosen_for) is not None


@pytest.mark.usefixtures("session")
def test_other_devices_are_refused():
    call = made(builtin.identity.graph)
    assert dispatch.decide(signature_of(call, A100), A100, call.chosen_for) is None
    message = dispatch.unserved("x", signature_of(call, A100), A100)
    assert "groups of rows need wgmma, which sm_90 alone has: call gemm for each expert's rows" in message


def test_warm_calls_are_served_warm(device):
    op = GroupsOp(requests.called(mixed).epilogue, GROUPED)
    w, bias = normal(3, 64, 32).mT.contiguous().mT, normal(3, 32)
    for rows in (48, 48, 40):
        x, scale, residual = normal(rows, 64), normal(rows), normal(rows, 32)
        found = op(x, w, ends(5, 5, rows), bias=bias, scale=scale, residual=residual, factor=2.0)
        wanted = exact(x, w, ends(5, 5, rows)) * scale.double()[:, None]
        wanted += bias.double()[[0] * 5 + [2] * (rows - 5)]
        close(found, torch.relu(wanted) * 2 + residual)
    assert (op.served_warm, op.refused_warm) == (1, 0)
    assert {launch.spec.form for launch in device.launches} == {GROUPED}
    assert len(device.launches) == 3


def test_one_row_for_all_may_be_broadcast(device):
    x, w, offsets, bias = normal(12, 64), normal(3, 64, 64).mT, ends(4, 4, 12), normal(64)
    for row in (bias, bias[None], bias[None], bias[None, None], bias[None].expand(3, 64)):
        co.gemm(x, w, groups=co.Groups(offsets), epilogue=builtin.bias, bias=row)
    assert {launch.spec.form for launch in device.launches} == {GROUPED}
    assert len(device.launches) == 5


def test_a_call_of_extents_has_groups():
    call = call_at(mixed.graph, Problem(16, 64, 32, 4), "bf16", "row", "col", form=GROUPED)
    assert call.problem == Problem(64, 64, 32, 4)
    assert call.arguments.inputs["residual"].shape == (64, 64)
    call = call_at(composed.swiglu.graph, Problem(16, 64, 32, 4), "bf16", "row", "col", form=GROUPED)
    assert call.arguments.inputs["up"].shape == (4, 32, 64)
    call = call_at(composed.scaled_blocks.graph, Problem(16, 264, 400, 4), "e4m3", "row", "col", form=GROUPED)
    assert [call.arguments.inputs[name].shape for name in ("scale_a", "scale_b")] == [(64, 4), (4, 3, 4)]


# ---- Kernels ---------------------------------------------------------------------------------------------------------


def spec(epilogue=builtin.bias_relu, schedule="pingpong", types=None, **changes):
    config = co.Sm90Config(co.ThreadblockShape(128, 128, 64), co.ClusterShape(2, 1), schedule=schedule, **changes)
    given = {"a": "bf16.row", "b": "bf16.col", "d": "bf16.row", **(types or {})}
    return co.KernelSpec(epilogue=epilogue, config=config, form="grouped", **given)


@pytest.mark.usefixtures("session")
def test_a_bundle_serves_groups(tmp_path):
    """With a bundle, its kernels alone are chosen among, and those of one GEMM serve no groups."""
    types = {"a": "bf16.row", "b": "bf16.col", "d": "bf16.row"}
    one = co.KernelSpec(epilogue=builtin.bias_relu, config=spec().config, **types)
    packed(tmp_path, [one, spec()], library(HGMMA, UTMALDG, sm=90)).write(tmp_path / "bundle")
    bundle = co.load_bundle(tmp_path / "bundle")
    assert {record.spec.form.name for record in bundle.manifest.kernels} == {"dense", "grouped"}
    assert verify(tmp_path / "bundle").problems == ()
    call = made(builtin.bias_relu.graph, bias=(4, 64))
    found = dispatch.decide(signature_of(call, H100), H100, call.chosen_for)
    assert found is not None
    assert found.spec == spec()


@pytest.mark.parametrize("shape", [(1, 1), (0, 1), (1, 32)])
def test_a_tile_of_no_rows_may_be_broadcast(shape):
    x, w, tile = normal(0, 16), normal(2, 16, 32), torch.zeros(shape).bfloat16()
    found = co.gemm(x, w, groups=co.Groups(ends(0, 0)), epilogue=builtin.residual, residual=tile)
    assert found.shape == (0, 32)


@pytest.mark.parametrize("experts", [1, 3])
@pytest.mark.parametrize("shape", [(1, 32), (1, 1, 32)])
def test_a_row_with_a_leading_1_is_one_for_all(experts, shape):
    x, w, bias = normal(12, 16), normal(experts, 16, 32), normal(32)
    groups = co.Groups(ends(*[4] * (experts - 1), 12))
    given = bias.clone().view(shape).requires_grad_()
    found = co.gemm(x, w, groups=groups, epilogue=builtin.bias, bias=given)
    assert torch.equal(found, co.gemm(x, w, groups=groups, epilogue=builtin.bias, bias=bias))
    found.float().sum().backward()
    assert (given.grad.shape, bool((given.grad == 12).all())) == (shape, True)


class Experts(torch.nn.Module):
    def forward(self, a, b, groups):
        return co.gemm(a, b.mT, groups=groups)


def test_operand_values_are_arguments_of_saved_programs(tmp_path, caplog):
    a, b = (co.Scaled(normal(*shape), torch.rand(shape[:-1])) for shape in ((6, 16), (2, 8, 16)))
    given = (a, b, co.Groups(ends(2, 6)))
    torch.export.save(torch.export.export(Experts(), given), tmp_path / "experts.pt2")
    found = torch.export.load(tmp_path / "experts.pt2").module()(*given)
    assert torch.equal(found, Experts()(*given))
    assert [record for record in caplog.records if "weights_only" in record.msg] == []


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_operand_values_can_be_copied_and_pickled(copied):
    a, b, groups = co.Scaled(normal(6, 16), 0.5), co.Scaled(normal(2, 8, 16).mT, 2.0), co.Groups(ends(2, 6))
    found = co.gemm(copied(a), copied(b), groups=copied(groups))
    assert torch.equal(found, co.gemm(a, b, groups=groups))
