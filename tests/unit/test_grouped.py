"""Groups of rows, each with a weight of its own: calls, their reference, and the choice and text of their kernels."""

import pickle
import re

import pytest
import torch
from bundles import packed
from fake_device import fake_device
from fake_toolkit import HGMMA, UTMALDG, library
from grouping import BF16, OFFSETS, clash, close, ends, mixed, normal, numbered, saved, summed
from hypothesis import given
from hypothesis import strategies as st
from signatures import A100, H100

import cutlass_ops as co
from cutlass_ops.base.errors import UnsupportedError
from cutlass_ops.choose import dispatch
from cutlass_ops.declare.chips import CHIPS
from cutlass_ops.declare.form import GROUPED
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.signature import OpSignature, signature_from_json, signature_to_json
from cutlass_ops.epilogue import builtin, composed
from cutlass_ops.kinds import legality
from cutlass_ops.run import groups, named, requests
from cutlass_ops.run.call import call_at, check_call, signature_of
from cutlass_ops.run.grouped import GroupedOp, grouped_op
from cutlass_ops.ship.verifying import verify
from cutlass_ops.tools.explaining import explain_call
from tests.strategies import PATIENT


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
    assert co.grouped_gemm(x, w, offsets, out=d) is d
    used = int(offsets[-1])
    close(d[:used], exact(x, w, offsets))
    assert (d[used:] == 7).all()


@PATIENT
@given(st.lists(st.integers(0, 5), min_size=1, max_size=8), st.integers(0, 4))
def test_any_groups(sizes, unused):
    offsets = torch.tensor(sizes).cumsum(0).int()
    x, w = normal(sum(sizes) + unused, 8), normal(len(sizes), 8, 16)
    close(co.grouped_gemm(x, w, offsets, out_dtype=torch.float32)[: sum(sizes)], exact(x, w, offsets))


@pytest.mark.parametrize("shared", [False, True])
def test_inputs_are_those_of_the_expert_or_of_the_row(shared):
    x, w = normal(6, 16), normal(2, 16, 8)
    bias, scale, residual = normal(8) if shared else normal(2, 8), normal(6), normal(6, 8)
    inputs = {"scale": scale, "residual": residual, "factor": 2}
    found = co.grouped_gemm(x, w, ends(2, 6), epilogue=mixed, bias=bias, **inputs)
    for expert, rows in enumerate((slice(0, 2), slice(2, 6))):
        own = {"bias": bias if shared else bias[expert], "scale": scale[rows], "residual": residual[rows], "factor": 2}
        torch.testing.assert_close(found[rows], co.gemm(x[rows], w[expert], epilogue=mixed, **own))


def test_further_outputs_have_rows():
    x, w, bias = normal(6, 16), normal(2, 16, 8), normal(2, 8)
    found = co.grouped_gemm(x, w, ends(2, 6), epilogue=saved, bias=bias)
    close(found.pre, exact(x, w, ends(2, 6)))
    close(found.d, torch.relu(exact(x, w, ends(2, 6)) + bias.double()[[0, 0, 1, 1, 1, 1]]))


def test_each_expert_may_have_two_weights():
    x, w, up = normal(6, 16), normal(2, 8, 16).mT, normal(2, 8, 16).mT
    found = co.grouped_gemm(x, w, ends(2, 6), epilogue=composed.swiglu, up=up)
    for expert, rows in enumerate((slice(0, 2), slice(2, 6))):
        torch.testing.assert_close(found[rows], co.gemm_swiglu(x[rows], w[expert], up[expert]))


def test_rows_are_numbered_from_the_first_of_their_expert():
    found = co.grouped_gemm(normal(6, 16), normal(2, 16, 8), ends(2, 6), epilogue=numbered)
    assert found[:, 0].tolist() == [0, 1, 0, 1, 2, 3]


def test_there_may_be_no_rows_and_no_columns():
    assert co.grouped_gemm(normal(0, 16), normal(2, 16, 8), ends(0, 0)).shape == (0, 8)
    assert co.grouped_gemm(normal(4, 16), normal(2, 16, 0), ends(0, 4)).shape == (4, 0)


def test_a_residual_may_be_overwritten_in_place():
    x, w, out = normal(6, 16), normal(2, 16, 8), normal(6, 8)
    wanted = exact(x, w, ends(2, 6)) + out.double()
    assert co.grouped_gemm(x, w, ends(2, 6), epilogue=named.gemm_residual.epilogue, residual=out, out=out) is out
    close(out, wanted)


def wrong(**changes):
    given = {"x": normal(6, 16), "w": normal(2, 16, 8), "offsets": ends(2, 6)}
    return {**given, **changes}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x": normal(2, 3, 16)}, ValueError, "x has shape (2, 3, 16): it must be (T, K)"),
        ({"w": normal(16, 8)}, ValueError, "w has shape (16, 8): it must be (E, K, N)"),
        ({"offsets": ends(2, 6)[None]}, ValueError, "offsets has shape (1, 2): it must be (E,)"),
        ({"w": normal(2, 8, 16)}, ValueError, "w looks like weights of shape (E, N, K): pass w.mT"),
        ({"w": normal(2, 17, 8)}, ValueError, "they must be (T, K) and (E, K, N)"),
        ({"w": normal(0, 16, 8), "offsets": ends()}, ValueError, "at least one expert"),
        ({"w": normal(2, 16, 8, dtype=torch.float16)}, TypeError, "x and w must have the same dtype"),
        ({"x": torch.randn(6, 16)}, TypeError, "x is torch.float32: use one of torch.float16, torch.bfloat16"),
        ({"offsets": torch.tensor([2, 6])}, TypeError, "offsets is torch.int64: pass offsets.int()"),
        ({"offsets": ends(1, 2, 6)}, ValueError, "offsets has 3 elements and w has 2 experts"),
        ({"offsets": ends(2, 0, 6, 0)[::2]}, ValueError, "offsets has stride 2: call offsets.contiguous() first"),
        ({"offsets": ends(4, 2)}, ValueError, "offsets[1] is 2, after 4, and x has 6 rows"),
        ({"offsets": ends(4, 7)}, ValueError, "offsets[1] is 7, after 4, and x has 6 rows"),
        ({"offsets": ends(-1, 6)}, ValueError, "offsets[0] is -1, after 0"),
        ({"x": normal(16, 6).t()}, ValueError, "groups are rows in memory: pass x.contiguous()"),
        ({"x": normal(6, 32)[:, ::2]}, ValueError, "x has shape (6, 16) and strides (32, 2): one dimension must"),
        ({"x": normal(6, 12), "w": normal(2, 12, 8)}, ValueError, "pad K of x and w with zeros to a multiple of 8"),
        ({"w": normal(2, 16, 9)}, ValueError, "pass weights (E, N, K) as w.mT, or pad N with zeros to"),
        ({"out": normal(8, 6).t()}, ValueError, "groups are rows in memory: pass a row-major tensor"),
        ({"out": normal(5, 8)}, ValueError, "out has shape (5, 8): it must have shape (6, 8)"),
        ({"epilogue": summed}, ValueError, "the epilogue reduces D, and a kernel finishes the reductions of one GEMM"),
        ({"epilogue": clash}, ValueError, "the epilogue has an input offsets, and so has grouped_gemm"),
        ({"epilogue": builtin.bias}, TypeError, "bias is missing"),
        ({"epilogue": composed.swiglu, "up": normal(16, 8)}, ValueError, "must have w's shape (E, K, N), (2, 16, 8)"),
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
        co.grouped_gemm(**wrong(**changes))


# ---- PyTorch ---------------------------------------------------------------------------------------------------------


def test_a_compiled_program_calls_it_as_an_operator():
    x, w, bias, scale, residual = normal(6, 16), normal(2, 16, 8), normal(2, 8), normal(6), normal(6, 8)

    def program(x, w, offsets, bias, scale, residual):
        inputs = {"bias": bias, "scale": scale, "residual": residual, "factor": 2.0}
        return co.grouped_gemm(x, w, offsets, epilogue=mixed, out_dtype=torch.float32, **inputs)

    compiled = torch.compile(program, fullgraph=True, backend="aot_eager")
    for offsets in (ends(2, 6), ends(0, 6), ends(6, 6)):
        arguments = (x, w, offsets, bias, scale, residual)
        torch.testing.assert_close(compiled(*arguments), program(*arguments))


def test_outputs_may_be_given_in_a_compiled_program():
    x, w, bias, out = normal(6, 16), normal(2, 16, 8), normal(2, 8), normal(6, 8)

    def program(x, w, offsets, bias, out):
        return co.grouped_gemm(x, w, offsets, epilogue=saved, bias=bias, out=out).pre

    found = torch.compile(program, fullgraph=True, backend="aot_eager")(x, w, ends(2, 6), bias, out)
    close(found, exact(x, w, ends(2, 6)))
    close(out, torch.relu(exact(x, w, ends(2, 6)) + bias.double()[[0, 0, 1, 1, 1, 1]]))


def test_tensors_without_data_give_shapes():
    x, w, offsets = (t.to("meta") for t in (normal(6, 16), normal(2, 16, 8), ends(2, 6)))
    found = co.grouped_gemm(x, w, offsets, out_dtype=torch.float32)
    assert (found.shape, found.dtype, found.device.type) == ((6, 8), torch.float32, "meta")


def test_an_op_is_found_again_by_its_string():
    op = grouped_op(mixed)
    assert pickle.loads(pickle.dumps(op)) is op
    again = GroupedOp(requests.called(mixed).epilogue)
    assert (again.names, again.about) == (op.names, op.about)
    assert op.names == ("offsets", "bias", "scale", "residual", "factor")


def test_autocast_reaches_x_and_w():
    with torch.autocast("cpu", BF16):
        assert co.grouped_gemm(torch.randn(6, 16), torch.randn(2, 16, 8), ends(2, 6)).dtype == BF16


# ---- Choices ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "experts", "m"), [(1, 256, 1), (64, 64, 1), (1024, 16, 64), (299, 1, 296), (8192, 8, 1024), (2, 1, 2)]
)
def test_a_kernel_is_chosen_for_a_mean(rows, experts, m):
    assert groups.typical(rows, 64, 32, experts) == Problem(m, 64, 32, experts)


@pytest.mark.parametrize("epilogue", [composed.swiglu, mixed])
def test_one_kernel_computes_all_groups(epilogue):
    given = {"up": torch.empty(4, 64, 64, dtype=BF16, device="meta").mT}
    given |= {
        "bias": torch.empty(64, dtype=BF16, device="meta"),
        "residual": torch.empty(512, 64, dtype=BF16, device="meta"),
    }
    given |= {"scale": torch.empty(512, device="meta"), "factor": 2.0}
    inputs = {i.name: given[i.name] for i in epilogue.graph.inputs}
    assert made(epilogue.graph, **inputs).why_apart is None


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
    x, w = (torch.empty(s, dtype=BF16, device="meta") for s in ((rows, 64), (4, n, 64)))
    residual, offsets = (
        torch.empty(rows, n, dtype=BF16, device="meta"),
        torch.empty(4, dtype=torch.int32, device="meta"),
    )
    call = check_call(
        builtin.residual.graph, x, w.mT, {"residual": residual}, None, None, offsets=offsets, form=GROUPED
    )
    signature = signature_of(call, H100)
    assert {signature.a.major, signature.d.major, signature.inputs[0].major} == {"row"}
    assert dispatch.decide(signature, H100, call.chosen_for) is not None


def test_tiles_beside_others_go_through_registers():
    plain = signature_of(made(builtin.residual.graph, residual=(512, 64)), H100)
    assert plain.d.aligned
    assert plain.inputs[0].aligned
    beside = signature_of(made(saved.graph, bias=(64,)), H100)
    assert (beside.d.alignment, beside.outputs[0].alignment) == (4, 4)
    odd = signature_of(made(builtin.residual.graph, n=65, residual=(512, 65)), H100)
    assert (odd.d.alignment, odd.inputs[0].alignment) == (1, 1)


@pytest.mark.usefixtures("session")
def test_other_devices_are_refused():
    call = made(builtin.identity.graph)
    assert dispatch.decide(signature_of(call, A100), A100, call.chosen_for) is None
    message = dispatch.unserved("x", signature_of(call, A100), A100)
    assert "groups of rows need wgmma, which sm_90 alone has: call gemm for each expert's rows" in message


def test_a_device_without_wgmma_has_an_error(monkeypatch):
    with fake_device(monkeypatch, A100), pytest.raises(UnsupportedError, match="groups of rows need wgmma"):
        co.grouped_gemm(normal(64, 64), normal(2, 64, 64), ends(10, 64))


def test_a_call_is_explained():
    call = made(builtin.identity.graph)
    found = explain_call("grouped_gemm", call, H100)
    assert found.problem == (512, 64, 64)
    assert "in 4 groups" in found.verdict
    assert found.to_json()["groups"] == 4
    assert "chosen for 4 with a mean of 128 rows" in str(found)
    on_cpu = co.explain(co.grouped_gemm, **wrong())
    assert (on_cpu.served_by, on_cpu.problem, on_cpu.grouped) == ("PyTorch", (6, 8, 16), True)
    assert co.warm_up(co.grouped_gemm, **wrong()) == 0


@pytest.mark.parametrize("rows", [64, 256, 8192])
@pytest.mark.parametrize("gated", [False, True])
def test_no_kernel_of_groups_is_faster_than_its_roofline(rows, gated):
    second = {"up": torch.empty(64, 4096, 4096, dtype=BF16, device="meta").mT} if gated else {}
    found = explain_call(
        "grouped_gemm",
        made((composed.swiglu if gated else builtin.identity).graph, rows, 64, 4096, 4096, **second),
        H100,
    )
    assert 0.3 < found.achieved < 1


def test_of_one_group_all_weights_are_read():
    found = explain_call("grouped_gemm", made(builtin.identity.graph, 8, 1, 4096, 4096), H100)
    moved = 2 * (8 * 4096 + 4096 * 4096 + 8 * 4096)
    assert found.roofline.memory == pytest.approx(moved / (CHIPS[H100.name].gb_per_s * 1e3), rel=1e-6)


def test_warm_calls_are_served_warm(device):
    op = GroupedOp(requests.called(mixed).epilogue)
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
        co.grouped_gemm(x, w, offsets, epilogue=builtin.bias, bias=row)
    assert {launch.spec.form for launch in device.launches} == {GROUPED}
    assert len(device.launches) == 5


def test_a_prepared_launch(device):
    x, w, offsets = normal(48, 64), normal(3, 32, 64).mT, ends(5, 5, 40)
    launch = co.prepare_launch(co.grouped_gemm, x, w, offsets)
    offsets.copy_(ends(48, 48, 48))
    close(launch(), x.double() @ w[0].double())


def test_a_call_without_measurements_says_how_to_tune():
    why = explain_call("grouped_gemm", made(builtin.identity.graph, n=72, k=8), H100).why
    assert "(run cutlass_ops.tune(groups=...) to measure)" in why


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


@pytest.mark.parametrize("schedule", ["pingpong", "cooperative"])
@pytest.mark.parametrize("swapped", [False, True])
def test_a_kernel_finds_its_groups_on_the_device(schedule, swapped):
    declared = spec(schedule=schedule, swap_ab=swapped)
    assert co.check(declared) == ()
    source, side = co.source(declared), str(swapped).lower()
    assert f"using TileScheduler = cutlass_ops::GroupedScheduler<{side}>;" in source
    assert f"using CollectiveMainloop = cutlass_ops::GroupedMainloop<MainloopOfRows, {side}>;" in source
    assert "arguments.scheduler.groups = o.groups;" in source
    assert "o.groups = groups.groups(o.problem);" in source
    assert '#include "cutlass_ops/ragged.h"' in source


def test_a_declaration_keeps_its_form():
    declared = spec()
    assert co.KernelSpec.from_json(declared.to_json()) == declared
    of = OpSignature.of(declared)
    assert signature_from_json(signature_to_json(of)) == of
    assert declared.slug.startswith("gemm_grouped_bias_relu_")


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


def test_what_is_not_aligned_is_stored_from_registers():
    declared = spec(types={"d": "bf16.row.align1"})
    assert co.check(declared) == ()
    source = co.source(declared)
    assert "using CollectiveEpilogue = cutlass_ops::GroupedEpilogue<CollectiveOfRows, false>;" in source
    assert "ragged.h" not in source


def test_an_exact_kernel_takes_offsets(device):
    x, w, bias = normal(48, 64), normal(3, 32, 64).mT, normal(3, 32)
    kernel = co.build(spec())
    assert kernel.names == ("offsets", "bias")
    found = kernel(x, w, ends(5, 5, 48), bias=bias)
    close(found, torch.relu(exact(x, w, ends(5, 5, 48)) + bias.double()[[0] * 5 + [2] * 43]))


@pytest.mark.parametrize("shape", [(1, 1), (0, 1), (1, 32)])
def test_a_tile_of_no_rows_may_be_broadcast(shape):
    @co.epilogue
    def added(acc, tile: co.Tile):
        return acc + tile

    x, w, tile = torch.zeros(0, 16).bfloat16(), torch.zeros(2, 16, 32).bfloat16(), torch.zeros(shape).bfloat16()
    ends = torch.zeros(2, dtype=torch.int32)
    assert co.grouped_gemm(x, w, ends, epilogue=added, tile=tile).shape == (0, 32)


@pytest.mark.parametrize("experts", [1, 2, 3])
def test_a_row_with_a_leading_1_is_one_for_all(experts):
    @co.epilogue
    def added(acc, bias: co.Row):
        return acc + bias

    x, w, bias = normal(12, 16), normal(experts, 16, 32), normal(32)
    offsets = torch.tensor([4] * (experts - 1) + [12], dtype=torch.int32)
    wanted = co.grouped_gemm(x, w, offsets, epilogue=added, bias=bias)
    for shape in ((1, 32), (1, 1, 32)):
        given = bias.clone().view(shape).requires_grad_()
        found = co.grouped_gemm(x, w, offsets, epilogue=added, bias=given)
        found.float().sum().backward()
        assert torch.equal(found, wanted)
        assert given.grad.shape == shape
        assert (given.grad == 12).all()
