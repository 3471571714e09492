"""Products of each group's rows, as a gradient of weights: calls, their reference, the choice and text of kernels."""

import itertools
import pickle
import re

import pytest
import torch
from bundles import packed
from fake_device import fake_device
from fake_toolkit import HGMMA, UTMALDG, library
from grouping import BF16, OFFSETS, clash, close, ends, mixed, normal, saved, summed
from hypothesis import given
from hypothesis import strategies as st
from signatures import A100, H100

import cutlass_ops as co
from cutlass_ops.base.errors import UnsupportedError
from cutlass_ops.choose import dispatch
from cutlass_ops.declare.form import RAGGED_K
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.signature import OpSignature, signature_from_json, signature_to_json
from cutlass_ops.epilogue import builtin, composed
from cutlass_ops.kinds import legality
from cutlass_ops.run import requests
from cutlass_ops.run.call import call_at, signature_of
from cutlass_ops.run.grouped import WgradOp, wgrad_op
from cutlass_ops.ship.verifying import verify
from cutlass_ops.tools.explaining import explain_call
from tests.strategies import PATIENT


def exact(x, y, offsets):
    """Return D in float64."""
    bounds = [0, *offsets.tolist()]
    pairs = itertools.pairwise(bounds)
    return torch.stack([x[first:end].double().mT @ y[first:end].double() for first, end in pairs])


# ---- Calls -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offsets", OFFSETS, ids=str)
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_each_expert_has_the_product_of_its_rows(offsets, dtype):
    x, y, offsets = normal(12, 16, dtype=dtype), normal(12, 8, dtype=dtype), ends(*offsets)
    x[int(offsets[-1]) :] = torch.nan  # rows of nobody
    d = torch.full((3, 16, 8), torch.nan, dtype=dtype)
    assert co.grouped_gemm_wgrad(x, y, offsets, out=d) is d
    close(d, exact(x, y, offsets))


@PATIENT
@given(st.lists(st.integers(0, 5), min_size=1, max_size=8), st.integers(0, 4))
def test_any_groups(sizes, unused):
    offsets = torch.tensor(sizes).cumsum(0).int()
    x, y = normal(sum(sizes) + unused, 8), normal(sum(sizes) + unused, 16)
    close(co.grouped_gemm_wgrad(x, y, offsets, out_dtype=torch.float32), exact(x, y, offsets))


def test_it_is_the_gradient_of_the_weights():
    x, w, offsets = normal(12, 16), normal(3, 16, 8), ends(3, 3, 12)
    leaf = w.double().requires_grad_()
    d = torch.cat([x[:3].double() @ leaf[0], x[3:].double() @ leaf[2]])
    gradient = normal(12, 8)
    (wanted,) = torch.autograd.grad(d, leaf, gradient.double())
    close(co.grouped_gemm_wgrad(x, gradient, offsets), wanted)


@pytest.mark.parametrize("shared", [False, True])
def test_inputs_are_those_of_the_expert_or_of_all(shared):
    x, y, lead = normal(6, 16), normal(6, 8), () if shared else (2,)
    bias, scale, residual = normal(*lead, 8), normal(*lead, 16), normal(*lead, 16, 8)
    found = co.grouped_gemm_wgrad(x, y, ends(2, 6), epilogue=mixed, bias=bias, scale=scale, residual=residual, factor=2)
    for expert, rows in enumerate((slice(0, 2), slice(2, 6))):
        own = {"bias": bias, "scale": scale, "residual": residual}
        own = own if shared else {name: value[expert] for name, value in own.items()}
        torch.testing.assert_close(found[expert], co.gemm(x[rows].mT, y[rows], epilogue=mixed, factor=2, **own))


def test_further_outputs_are_stacked():
    x, y, bias = normal(6, 16), normal(6, 8), normal(2, 8)
    found = co.grouped_gemm_wgrad(x, y, ends(2, 6), epilogue=saved, bias=bias)
    close(found.pre, exact(x, y, ends(2, 6)))
    close(found.d, torch.relu(exact(x, y, ends(2, 6)) + bias.double()[:, None]))


def test_it_may_be_added_in_place():
    x, y, total = normal(6, 16), normal(6, 8), torch.randn(2, 16, 8)
    wanted = exact(x, y, ends(2, 6)) + total.double()
    assert co.grouped_gemm_wgrad(x, y, ends(2, 6), epilogue=builtin.residual, residual=total, out=total) is total
    close(total, wanted)


def test_there_may_be_no_rows_and_no_columns():
    found = co.grouped_gemm_wgrad(normal(0, 16), normal(0, 8), ends(0, 0))
    assert (found.shape, bool(found.any())) == ((2, 16, 8), False)
    assert co.grouped_gemm_wgrad(normal(4, 0), normal(4, 8), ends(0, 4)).shape == (2, 0, 8)


def wrong(**changes):
    return {"x": normal(6, 16), "gradient": normal(6, 8), "offsets": ends(2, 6), **changes}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x": normal(2, 3, 16)}, ValueError, "x (2, 3, 16) and gradient (6, 8): they must be (T, K) and (T, N)"),
        ({"x": normal(5, 16)}, ValueError, "x (5, 16) and gradient (6, 8): they must be (T, K) and (T, N)"),
        ({"gradient": normal(2, 6, 8)}, ValueError, "they must be (T, K) and (T, N)"),
        ({"x": [1]}, TypeError, "x must be a torch.Tensor, not list"),
        ({"offsets": ends(2, 6)[None]}, ValueError, "offsets has shape (1, 2): it must be (E,)"),
        ({"offsets": ends()}, ValueError, "offsets has shape (0,): it must be (E,), with at least one expert"),
        ({"gradient": normal(6, 8, dtype=torch.float16)}, TypeError, "x and gradient must have the same dtype"),
        ({"x": torch.randn(6, 16)}, TypeError, "x is torch.float32: use one of torch.float16, torch.bfloat16"),
        ({"offsets": torch.tensor([2, 6])}, TypeError, "offsets is torch.int64: pass offsets.int()"),
        ({"offsets": ends(2, 0, 6, 0)[::2]}, ValueError, "offsets has stride 2: call offsets.contiguous() first"),
        ({"offsets": ends(4, 2)}, ValueError, "offsets[1] is 2, after 4, and x has 6 rows"),
        ({"offsets": ends(4, 7)}, ValueError, "offsets[1] is 7, after 4, and x has 6 rows"),
        ({"x": normal(16, 6).t()}, ValueError, "groups are rows in memory: pass x.contiguous()"),
        ({"gradient": normal(8, 6).t()}, ValueError, "groups are rows in memory: pass gradient.contiguous()"),
        ({"x": normal(6, 12)}, ValueError, "x has shape (6, 12), strides (12, 1) and storage offset 0, and its lines"),
        ({"gradient": normal(6, 9)}, ValueError, "pad them with zeros to a multiple of 8"),
        ({"out": normal(16, 8)}, ValueError, "out has shape (16, 8): it must have shape (2, 16, 8)"),
        ({"out": normal(1, 16, 8).expand(2, 16, 8)}, ValueError, "with which elements share memory"),
        ({"epilogue": summed}, ValueError, "the epilogue reduces D, and a kernel finishes the reductions of one GEMM"),
        ({"epilogue": clash}, ValueError, "the epilogue has an input offsets, and so has grouped_gemm_wgrad"),
        ({"epilogue": builtin.bias}, TypeError, "bias is missing"),
        ({"epilogue": composed.swiglu, "up": normal(6, 8)}, ValueError, "the epilogue has a further product"),
        ({"epilogue": builtin.bias, "bias": normal(3, 8)}, ValueError, "as a Row it must have shape (8,), or (2, 8)"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_wrong_arguments_are_refused(changes, error, message):
    with pytest.raises(error, match=re.escape(message)):
        co.grouped_gemm_wgrad(**wrong(**changes))


def test_gradients_are_refused():
    with pytest.raises(NotImplementedError, match=r"b requires grad, and grouped_gemm_wgrad has no backward"):
        co.grouped_gemm_wgrad(**wrong(gradient=normal(6, 8).requires_grad_()))


# ---- PyTorch ---------------------------------------------------------------------------------------------------------


def test_a_compiled_program_calls_it_as_an_operator():
    x, y, bias, scale, residual = normal(6, 16), normal(6, 8), normal(2, 8), normal(16), normal(2, 16, 8)

    def program(x, y, offsets, bias, scale, residual):
        inputs = {"bias": bias, "scale": scale, "residual": residual, "factor": 2.0}
        return co.grouped_gemm_wgrad(x, y, offsets, epilogue=mixed, out_dtype=torch.float32, **inputs)

    compiled = torch.compile(program, fullgraph=True, backend="aot_eager")
    for offsets in (ends(2, 6), ends(0, 6), ends(6, 6)):
        arguments = (x, y, offsets, bias, scale, residual)
        torch.testing.assert_close(compiled(*arguments), program(*arguments))


def test_outputs_may_be_given_in_a_compiled_program():
    x, y, bias, out = normal(6, 16), normal(6, 8), normal(2, 8), normal(2, 16, 8)

    def program(x, y, offsets, bias, out):
        return co.grouped_gemm_wgrad(x, y, offsets, epilogue=saved, bias=bias, out=out).pre

    found = torch.compile(program, fullgraph=True, backend="aot_eager")(x, y, ends(2, 6), bias, out)
    close(found, exact(x, y, ends(2, 6)))
    close(out, torch.relu(exact(x, y, ends(2, 6)) + bias.double()[:, None]))


def test_tensors_without_data_give_shapes():
    x, y, offsets = (t.to("meta") for t in (normal(6, 16), normal(6, 8), ends(2, 6)))
    found = co.grouped_gemm_wgrad(x, y, offsets, out_dtype=torch.float32)
    assert (found.shape, found.dtype, found.device.type) == ((2, 16, 8), torch.float32, "meta")


def test_an_op_is_found_again_by_its_string():
    op = wgrad_op(mixed)
    assert pickle.loads(pickle.dumps(op)) is op
    again = WgradOp(requests.called(mixed).epilogue)
    assert (again.names, again.about) == (op.names, op.about)
    assert op.names == ("offsets", "bias", "scale", "residual", "factor")


# ---- Choices ---------------------------------------------------------------------------------------------------------


def made(epilogue=None, rows=512, experts=4, m=64, n=72, **inputs):
    x, y = (torch.empty(rows, extent, dtype=BF16, device="meta") for extent in (m, n))
    offsets = torch.empty(experts, dtype=torch.int32, device="meta")
    return wgrad_op(epilogue).checked(x.mT, y, (offsets,), inputs, None, None)


@pytest.mark.usefixtures("session")
@pytest.mark.parametrize("rows", [1, 16, 512, 8192, 100_000])
@pytest.mark.parametrize(("m", "n"), [(64, 64), (136, 4096), (8, 512)])
def test_a_legal_kernel_is_chosen(rows, m, n):
    call = made(rows=rows, experts=8, m=m, n=n)
    signature = signature_of(call, H100)
    assert (signature.form, signature.majors) == (RAGGED_K, ("col", "row"))
    found = dispatch.decide(signature, H100, call.chosen_for)
    assert found is not None
    assert found.specs
    for spec in found.specs:
        assert legality.check(spec) == ()
    assert not found.order.by_gpc


def test_a_kernel_is_chosen_for_the_mean():
    assert made(rows=8192, experts=8).chosen_for == Problem(64, 72, 1024, 8)
    assert made(rows=3, experts=8).chosen_for == Problem(64, 72, 1, 8)


def test_a_device_without_wgmma_has_an_error(monkeypatch):
    with fake_device(monkeypatch, A100), pytest.raises(UnsupportedError, match="groups of K need wgmma"):
        co.grouped_gemm_wgrad(normal(64, 64), normal(64, 64), ends(10, 64))


def test_a_call_is_explained():
    found = explain_call("grouped_gemm_wgrad", made(), H100)
    assert found.problem == (64, 72, 512)
    assert "in 4 groups" in found.verdict
    assert "chosen for 4 with a mean of 128 rows, since only the device knows" in str(found)
    on_cpu = co.explain(co.grouped_gemm_wgrad, **wrong())
    assert (on_cpu.served_by, on_cpu.problem, on_cpu.grouped) == ("PyTorch", (16, 8, 6), True)
    assert co.warm_up(co.grouped_gemm_wgrad, **wrong()) == 0


def test_warm_calls_are_served_warm(device):
    op = WgradOp(requests.called(mixed).epilogue)
    bias, scale, residual = normal(3, 32), normal(64), normal(3, 64, 32)
    for rows in (48, 48, 40):
        x, y = normal(rows, 64), normal(rows, 32)
        found = op(x.mT, y, ends(5, 5, rows), bias=bias, scale=scale, residual=residual, factor=2.0)
        wanted = exact(x, y, ends(5, 5, rows)) * scale.double()[:, None] + bias.double()[:, None]
        close(found, torch.relu(wanted) * 2 + residual)
    assert (op.served_warm, op.refused_warm) == (1, 0)
    assert {launch.spec.form for launch in device.launches} == {RAGGED_K}
    assert len(device.launches) == 3


def test_a_single_row_is_no_other_major(device):
    x, y = normal(1, 64), normal(1, 32)
    close(co.grouped_gemm_wgrad(x, y, ends(0, 1)), exact(x, y, ends(0, 1)))
    (launch,) = device.launches
    assert (launch.spec.a.major, launch.spec.b.major) == ("col", "row")


def test_a_prepared_launch(device):
    x, y, offsets = normal(48, 64), normal(48, 32), ends(5, 5, 40)
    launch = co.prepare_launch(co.grouped_gemm_wgrad, x, y, offsets)
    offsets.copy_(ends(48, 48, 48))
    close(launch(), exact(x, y, offsets))


def test_a_call_of_extents_has_groups():
    call = call_at(mixed.graph, Problem(16, 64, 32, 4), "bf16", "col", "row", form=RAGGED_K)
    assert call.problem == Problem(16, 64, 128, 4)
    assert call.outputs[0].shape == (4, 16, 64)


# ---- Kernels ---------------------------------------------------------------------------------------------------------


def spec(schedule="pingpong", types=None, **changes):
    config = co.Sm90Config(co.ThreadblockShape(128, 128, 64), co.ClusterShape(2, 1), schedule=schedule, **changes)
    given = {"a": "bf16.col", "b": "bf16.row", "d": "bf16.row", **(types or {})}
    return co.KernelSpec(epilogue=builtin.bias, config=config, form="ragged_k", **given)


@pytest.mark.parametrize("schedule", ["pingpong", "cooperative"])
@pytest.mark.parametrize("swapped", [False, True])
def test_a_kernel_finds_its_groups_on_the_device(schedule, swapped):
    declared = spec(schedule, swap_ab=swapped)
    assert co.check(declared) == ()
    source = co.source(declared)
    assert "using TileScheduler = cutlass_ops::RaggedKScheduler;" in source
    assert "using CollectiveMainloop = cutlass_ops::RaggedKMainloop<MainloopOfK>;" in source
    assert "cutlass_ops::RaggedKOperands batched(call);" in source
    assert "o.groups = batched.groups(o.problem);" in source


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        (spec(types={"a": "bf16.row"}), "use a column-major a and a row-major b"),
        (spec(types={"b": "bf16.col"}), "use a column-major a and a row-major b"),
        (spec("warp_specialized"), "whose thread blocks have equally many steps along K"),
        (spec("cooperative", scheduler="stream_k"), "blocks split the K of one GEMM"),
        (spec(types={"a": "e4m3.col", "b": "e4m3.row"}), "form is ragged_k, and a is e4m3.col: use bf16 or f16"),
    ],
    ids=["row-major a", "column-major b", "not persistent", "stream-K", "FP8"],
)
def test_other_kernels_are_refused(declared, message):
    assert message in " ".join(map(str, co.check(declared)))


def test_a_declaration_keeps_its_form():
    declared = spec()
    assert co.KernelSpec.from_json(declared.to_json()) == declared
    of = OpSignature.of(declared)
    assert signature_from_json(signature_to_json(of)) == of
    assert declared.slug.startswith("gemm_ragged_k_bias_")


@pytest.mark.usefixtures("session")
def test_a_bundle_serves_groups(tmp_path):
    packed(tmp_path, [spec()], library(HGMMA, UTMALDG, sm=90)).write(tmp_path / "bundle")
    bundle = co.load_bundle(tmp_path / "bundle")
    assert [record.spec.form for record in bundle.manifest.kernels] == [RAGGED_K]
    assert verify(tmp_path / "bundle").problems == ()
    call = made(builtin.bias, bias=torch.empty(4, 72, dtype=BF16, device="meta"))
    found = dispatch.decide(signature_of(call, H100), H100, call.chosen_for)
    assert found is not None
    assert found.spec == spec()


def test_an_exact_kernel_takes_offsets(device):
    x, y, bias = normal(48, 64), normal(48, 32), normal(3, 32)
    kernel = co.build(spec())
    assert kernel.names == ("offsets", "bias")
    found = kernel(x.mT, y, ends(5, 5, 48), bias=bias)
    close(found, exact(x, y, ends(5, 5, 48)) + bias.double()[:, None])
