"""Groups with room for as many rows each, of which the first are there: calls, their reference, and their kernels."""

import pickle
import re

import pytest
import torch
from fake_device import fake_device
from grouping import BF16, close, mixed, normal, numbered, saved, summed
from grouping import ends as counts_of
from hypothesis import given
from hypothesis import strategies as st
from signatures import A100, H100

import cutlass_ops as co
from cutlass_ops.base.errors import UnsupportedError
from cutlass_ops.choose import dispatch
from cutlass_ops.declare.form import FORMS, GROUPED, MASKED
from cutlass_ops.declare.problem import Problem
from cutlass_ops.epilogue import builtin, composed
from cutlass_ops.kinds import legality
from cutlass_ops.run import requests
from cutlass_ops.run.call import check_call, signature_of
from cutlass_ops.run.grouped import MaskedOp, masked_op
from cutlass_ops.run.grouped_scaled import scaled_masked_op
from cutlass_ops.run.portable import find
from cutlass_ops.tools.explaining import explain_call
from tests.strategies import PATIENT

E4M3 = torch.float8_e4m3fn
EXPERTS, ROOM, K, N = 3, 5, 16, 8


@co.epilogue
def clash(acc, counts: co.Row):
    return acc + counts


def poisoned(*shape, dtype=BF16):
    return torch.full(shape, torch.nan, dtype=dtype)


def assert_rows(found, counts, wanted):
    """Require each group's rows, of (E, M, N) in float64, and that the others are still NaN."""
    for group, count in enumerate(counts.tolist()):
        close(found[group, :count], wanted[group, :count])
        assert found[group, count:].isnan().all()


# ---- Calls -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("counts", [(3, 5, 1), (0, 0, 0), (5, 5, 5), (0, 5, 0), (0, 0, 2)], ids=str)
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_each_group_has_its_first_rows_and_the_others_are_left(counts, dtype):
    x, w, counts = normal(EXPERTS, ROOM, K, dtype=dtype), normal(EXPERTS, N, K, dtype=dtype).mT, counts_of(*counts)
    for group, count in enumerate(counts.tolist()):
        x[group, count:] = torch.nan  # no result depends on these
    d = poisoned(EXPERTS, ROOM, N, dtype=dtype)
    assert co.grouped_gemm_masked(x, w, counts, out=d) is d
    assert_rows(d, counts, x.double() @ w.double())


@PATIENT
@given(st.lists(st.integers(0, 5), min_size=1, max_size=8))
def test_any_groups(sizes):
    x, w, d = normal(len(sizes), 5, 8), normal(len(sizes), 8, 16), poisoned(len(sizes), 5, 16, dtype=torch.float32)
    co.grouped_gemm_masked(x, w, counts_of(*sizes), out=d)
    assert_rows(d, counts_of(*sizes), x.double() @ w.double())


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("flat", [False, True])
def test_inputs_are_those_of_the_group_or_of_the_row(shared, flat):
    x, w, counts = normal(2, 4, 16), normal(2, 16, 8), counts_of(3, 1)
    bias, scale, residual = normal(8) if shared else normal(2, 8), normal(2, 4), normal(2, 4, 8)
    given = {"scale": scale.flatten() if flat else scale, "residual": residual.flatten(0, 1) if flat else residual}
    found = co.grouped_gemm_masked(x, w, counts, epilogue=mixed, bias=bias, factor=2, **given)
    for group, count in enumerate(counts.tolist()):
        own = {"bias": bias if shared else bias[group], "scale": scale[group, :count], "factor": 2}
        wanted = co.gemm(x[group, :count], w[group], epilogue=mixed, residual=residual[group, :count], **own)
        torch.testing.assert_close(found[group, :count], wanted)


def test_further_outputs_have_the_same_rows():
    x, w, bias, counts = normal(2, 4, 16), normal(2, 16, 8), normal(2, 8), counts_of(4, 2)
    out = {"d": poisoned(2, 4, 8), "pre": poisoned(2, 4, 8)}
    found = co.grouped_gemm_masked(x, w, counts, epilogue=saved, bias=bias, out=out)
    exact = x.double() @ w.double()
    assert_rows(found.pre, counts, exact)
    assert_rows(found.d, counts, torch.relu(exact + bias.double()[:, None]))


def test_each_group_may_have_two_weights():
    x, w, up, counts = normal(2, 4, 16), normal(2, 8, 16).mT, normal(2, 8, 16).mT, counts_of(1, 4)
    found = co.grouped_gemm_masked(x, w, counts, epilogue=composed.swiglu, up=up)
    for group, count in enumerate(counts.tolist()):
        wanted = co.gemm_swiglu(x[group, :count], w[group], up[group])
        torch.testing.assert_close(found[group, :count], wanted)


def test_rows_are_numbered_from_the_first_of_their_group():
    found = co.grouped_gemm_masked(normal(2, 4, 16), normal(2, 16, 8), counts_of(4, 2), epilogue=numbered)
    assert (found[0, :, 0].tolist(), found[1, :2, 0].tolist()) == ([0, 1, 2, 3], [0, 1])


def test_rows_may_be_longer_than_k_and_n():
    x, d = normal(EXPERTS, ROOM, 2 * K)[..., :K], poisoned(EXPERTS, ROOM, 2 * N)[..., :N]
    w, counts = normal(EXPERTS, K, N), counts_of(1, 5, 2)
    co.grouped_gemm_masked(x, w, counts, out=d)
    assert_rows(d, counts, x.double() @ w.double())


def test_there_may_be_no_rows_and_no_columns():
    assert co.grouped_gemm_masked(normal(2, 0, 16), normal(2, 16, 8), counts_of(0, 0)).shape == (2, 0, 8)
    assert co.grouped_gemm_masked(normal(2, 4, 16), normal(2, 16, 0), counts_of(0, 4)).shape == (2, 4, 0)


def test_the_rows_that_are_expected_change_no_result():
    x, w, counts = normal(2, 4, 16), normal(2, 16, 8), counts_of(4, 4)
    found = co.grouped_gemm_masked(x, w, counts, expected_rows=100)
    assert torch.equal(found, co.grouped_gemm_masked(x, w, counts))


@pytest.mark.parametrize("scale_a", [0.5, torch.rand(EXPERTS, ROOM)], ids=["number", "rows"])
@pytest.mark.parametrize(
    "scale_b", [2.0, torch.rand(N), torch.rand(EXPERTS, N)], ids=["number", "columns", "of experts"]
)
def test_scales_are_those_of_rows_and_of_groups(scale_a, scale_b):
    x, w = torch.randn(EXPERTS, ROOM, K).to(E4M3), torch.randn(EXPERTS, N, K).to(E4M3).mT
    counts, bias = counts_of(2, 0, 5), normal(EXPERTS, N)
    given = {"epilogue": builtin.bias, "expected_rows": 2, "bias": bias}
    found = co.scaled_grouped_gemm_masked(x, w, counts, scale_a, scale_b, **given)
    assert (found.dtype, found.shape) == (BF16, (EXPERTS, ROOM, N))
    for group, count in enumerate(counts.tolist()):
        of_a = scale_a[group, :count] if isinstance(scale_a, torch.Tensor) else scale_a
        of_b = scale_b[group] if isinstance(scale_b, torch.Tensor) and scale_b.ndim > 1 else scale_b
        own = {"epilogue": builtin.bias, "bias": bias[group]}
        torch.testing.assert_close(found[group, :count], co.scaled_gemm(x[group, :count], w[group], of_a, of_b, **own))


def wrong(**changes):
    given = {"x": normal(2, 4, 16), "w": normal(2, 16, 8), "counts": counts_of(2, 4)}
    return {**given, **changes}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x": normal(8, 16)}, ValueError, "x has shape (8, 16): it must be (E, M, K)"),
        ({"x": normal(3, 4, 16)}, ValueError, "they must be (E, M, K) and (E, K, N)"),
        ({"w": normal(2, 8, 16)}, ValueError, "w looks like weights of shape (E, N, K): pass w.mT"),
        ({"w": normal(2, 16, 8, dtype=torch.float16)}, TypeError, "x and w must have the same dtype"),
        ({"counts": torch.tensor([2, 4])}, TypeError, "counts is torch.int64: pass counts.int()"),
        ({"counts": counts_of(1, 2, 3)}, ValueError, "counts has 3 elements and w has 2 experts: it must say how many"),
        ({"counts": counts_of(2, 0, 4, 0)[::2]}, ValueError, "counts has stride 2: call counts.contiguous() first"),
        ({"counts": counts_of(2, 5)}, ValueError, "counts[1] is 5, and x has room for 4 rows of each group"),
        ({"counts": counts_of(-1, 4)}, ValueError, "counts[0] is -1, and x has room for 4 rows of each group"),
        ({"x": normal(2, 8, 16)[:, :4]}, ValueError, "call x.contiguous() first"),
        ({"x": normal(2, 16, 4).mT}, ValueError, "x.contiguous()"),
        ({"x": normal(2, 4, 12), "w": normal(2, 12, 8)}, ValueError, "pad K of x and w with zeros to a multiple of 8"),
        ({"out": normal(8, 8)}, ValueError, "out has shape (8, 8): it must have shape (2, 4, 8)"),
        ({"out": normal(2, 8, 8)[:, :4]}, ValueError, "pass a tensor from torch.empty, and copy it"),
        ({"out": normal(2, 8, 4).mT}, ValueError, "groups are rows in memory: pass a row-major tensor"),
        ({"epilogue": summed}, ValueError, "the epilogue reduces D, and a kernel finishes the reductions of one GEMM"),
        ({"epilogue": clash}, ValueError, "the epilogue has an input counts, and so has grouped_gemm_masked"),
        ({"epilogue": builtin.bias, "bias": normal(3, 8)}, ValueError, "as a Row it must have shape (2, 8)"),
        ({"epilogue": builtin.residual, "residual": normal(4, 8)}, ValueError, "it must have shape (2, 4, 8)"),
        ({"epilogue": builtin.residual, "residual": normal(2, 8, 8)[:, :4]}, ValueError, "call residual.contiguous()"),
        ({"expected_rows": -1}, ValueError, "expected_rows is -1: pass the rows"),
        ({"expected_rows": 2.0}, TypeError, "expected_rows is 2.0: pass an int, or omit it"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_wrong_arguments_are_refused(changes, error, message):
    masked_op(None, 2)  # equal to 2.0, and no reason to take that
    with pytest.raises(error, match=re.escape(message)):
        co.grouped_gemm_masked(**wrong(**changes))


def test_scales_are_written_into_an_epilogue_with_two_products():
    x, w = torch.randn(2, 4, 16).to(E4M3), torch.randn(2, 8, 16).to(E4M3).mT
    with pytest.raises(ValueError, match="write all scales into the epilogue, and call grouped_gemm_masked"):
        co.scaled_grouped_gemm_masked(x, w, counts_of(1, 2), 1.0, 1.0, epilogue=composed.swiglu, up=w)


@pytest.mark.parametrize("name", ["x", "w"])
def test_there_is_no_gradient(name):
    given = wrong()
    given[name].requires_grad_()
    with pytest.raises(NotImplementedError, match="grouped_gemm_masked has no gradient: call it under"):
        co.grouped_gemm_masked(**given)
    with torch.no_grad():
        assert co.grouped_gemm_masked(**given).shape == (2, 4, 8)


# ---- PyTorch ---------------------------------------------------------------------------------------------------------


def test_a_compiled_program_calls_it_as_an_operator():
    x, w, bias, scale, residual = normal(2, 4, 16), normal(2, 16, 8), normal(2, 8), normal(2, 4), normal(2, 4, 8)

    def program(x, w, counts, bias, scale, residual):
        inputs = {"bias": bias, "scale": scale, "residual": residual, "factor": 2.0}
        return co.grouped_gemm_masked(x, w, counts, epilogue=mixed, expected_rows=3, out_dtype=torch.float32, **inputs)

    compiled = torch.compile(program, fullgraph=True, backend="aot_eager")
    for counts in (counts_of(4, 4), counts_of(0, 4), counts_of(2, 3)):
        arguments = (x, w, counts, bias, scale, residual)
        for group, count in enumerate(counts.tolist()):
            found, wanted = compiled(*arguments)[group, :count], program(*arguments)[group, :count]
            torch.testing.assert_close(found, wanted)


def test_outputs_may_be_given_in_a_compiled_program():
    x, w, bias, out, counts = normal(2, 4, 16), normal(2, 16, 8), normal(2, 8), poisoned(2, 4, 8), counts_of(1, 3)

    def program(x, w, counts, bias, out):
        return co.grouped_gemm_masked(x, w, counts, epilogue=saved, bias=bias, out=out).pre

    found = torch.compile(program, fullgraph=True, backend="aot_eager")(x, w, counts, bias, out)
    exact = x.double() @ w.double()
    assert found.shape == (2, 4, 8)
    close(found[1, :3], exact[1, :3])
    assert_rows(out, counts, torch.relu(exact + bias.double()[:, None]))


def test_tensors_without_data_give_shapes():
    x, w, counts = (t.to("meta") for t in (normal(2, 4, 16), normal(2, 16, 8), counts_of(2, 4)))
    found = co.grouped_gemm_masked(x, w, counts, out_dtype=torch.float32)
    assert (found.shape, found.dtype, found.device.type) == ((2, 4, 8), torch.float32, "meta")


def test_an_op_is_found_again_by_its_string():
    op = masked_op(mixed, 32)
    assert pickle.loads(pickle.dumps(op)) is op
    assert op.names == ("counts", "bias", "scale", "residual", "factor")
    again = MaskedOp(requests.called(mixed).epilogue, op.expected)
    assert (again.names, again.about) == (op.names, op.about)
    assert masked_op(mixed).about != op.about
    assert masked_op(mixed, 299) is masked_op(mixed, 296)  # nearby numbers are one
    plain = again.about.split(";", 4)[4].partition(" ")[2]
    assert find(f"another {plain}").expected == 32


# ---- Choices ---------------------------------------------------------------------------------------------------------


def made(graph, room=128, experts=4, n=64, k=64, expected=0, **inputs):
    x, w = (
        torch.empty(experts, room, k, dtype=BF16, device="meta"),
        torch.empty(experts, n, k, dtype=BF16, device="meta"),
    )
    counts = torch.empty(experts, dtype=torch.int32, device="meta")
    drawn = {name: torch.empty(*shape, dtype=BF16, device="meta") for name, shape in inputs.items()}
    call = check_call(graph, x, w.mT, drawn, None, None, offsets=counts, form=MASKED)
    return call._replace(arguments=call.arguments._replace(expected=expected))


@pytest.mark.parametrize(("expected", "m"), [(0, 128), (8, 8), (128, 128), (500, 128)])
def test_a_kernel_is_chosen_for_the_rows_that_are_expected(expected, m):
    assert made(builtin.identity.graph, expected=expected).chosen_for == Problem(m, 64, 64, 4)
    x, w, counts = normal(2, 128, 16), normal(2, 16, 8), counts_of(1, 1)
    given = masked_op(None, expected or None).checked(x, w, (counts,), {}, None, None)
    assert given.chosen_for.m == m


@pytest.mark.usefixtures("session")
@pytest.mark.parametrize("room", [1, 16, 512, 8192])
def test_a_legal_kernel_of_groups_is_chosen(room):
    call = made(builtin.bias_residual.graph, room, 8, 136, 512, bias=(8, 136), residual=(8, room, 136))
    signature = signature_of(call, H100)
    assert signature.form == GROUPED
    same = made(builtin.bias_residual.graph, room, 8, 136, 512, bias=(136,), residual=(8, room, 136))
    assert signature_of(same, H100) == signature
    found = dispatch.decide(signature, H100, call.chosen_for)
    assert found is not None
    assert all(legality.check(spec) == () for spec in found.specs)


def test_no_kernel_is_declared_with_it():
    assert MASKED.name not in FORMS
    assert MASKED.of_kernels is GROUPED


def test_a_device_without_wgmma_has_an_error(monkeypatch):
    with fake_device(monkeypatch, A100), pytest.raises(UnsupportedError, match="groups of rows need wgmma"):
        co.grouped_gemm_masked(normal(2, 64, 64), normal(2, 64, 64), counts_of(10, 64))


def test_a_call_is_explained():
    found = explain_call("grouped_gemm_masked", made(builtin.identity.graph, expected=16), H100)
    assert found.problem == (128, 64, 64)
    assert "in 4 groups" in found.verdict
    assert "chosen for 4 with a mean of 16 rows, spread in several ways" in str(found)
    on_cpu = co.explain(co.grouped_gemm_masked, **wrong())
    assert (on_cpu.served_by, on_cpu.problem, on_cpu.grouped) == ("PyTorch", (4, 8, 16), True)
    assert co.warm_up(co.grouped_gemm_masked, **wrong()) == 0
    scaled = torch.randn(2, 4, 16).to(E4M3), torch.randn(2, 8, 16).to(E4M3).mT, counts_of(1, 2), 1.0, 1.0
    assert co.explain(co.scaled_grouped_gemm_masked, *scaled, expected_rows=2).served_by == "PyTorch"


def test_warm_calls_are_served_warm(device):
    op = MaskedOp(requests.called(mixed).epilogue)
    w, bias = normal(3, 64, 32).mT.contiguous().mT, normal(3, 32)
    for counts in (counts_of(1, 16, 3), counts_of(0, 2, 16)):
        x, scale, residual, out = normal(3, 16, 64), normal(3, 16), normal(3, 16, 32), poisoned(3, 16, 32)
        op(x, w, counts, bias=bias, scale=scale, residual=residual, factor=2.0, out=out)
        wanted = (x.double() @ w.double()) * scale.double()[..., None] + bias.double()[:, None]
        assert_rows(out, counts, torch.relu(wanted) * 2 + residual)
    assert (op.served_warm, op.refused_warm) == (1, 0)
    assert {launch.spec.form for launch in device.launches} == {GROUPED}
    assert len(device.launches) == 2


def test_warm_calls_in_fp8_are_served_warm(device):
    op = scaled_masked_op(True, True, None, False, 4)
    x, w = torch.randn(2, 16, 64).to(E4M3), torch.randn(2, 32, 64).to(E4M3).mT
    before = op.served_warm
    for _ in range(2):
        found = op(x, w, counts_of(16, 16), torch.ones(2, 16), torch.ones(2, 32))
    assert op.served_warm == before + 1
    assert found.shape == (2, 16, 32)
    assert {launch.spec.a.dtype.name for launch in device.launches} == {"e4m3"}


def test_a_prepared_launch(device):
    x, w, counts, out = normal(3, 16, 64), normal(3, 32, 64).mT, counts_of(1, 2, 3), poisoned(3, 16, 32)
    launch = co.prepare_launch(co.grouped_gemm_masked, x, w, counts, out=out)
    counts.copy_(counts_of(16, 0, 7))
    assert_rows(launch(), counts, x.double() @ w.double())
    assert len(device.launches) == 1


def test_an_exact_kernel_takes_counts(device):
    config = co.Sm90Config(co.ThreadblockShape(64, 64, 64), schedule="pingpong")
    types = {"a": "bf16.row", "b": "bf16.col", "d": "bf16.row"}
    kernel = co.build(co.KernelSpec(epilogue=builtin.bias_relu, config=config, form="grouped", **types))
    x, w, bias, out = normal(3, 16, 64), normal(3, 32, 64).mT, normal(3, 32), poisoned(3, 16, 32)
    for _ in range(2):
        kernel(x, w, counts_of(5, 0, 16), bias=bias, out=out)
        assert_rows(out, counts_of(5, 0, 16), torch.relu(x.double() @ w.double() + bias.double()[:, None]))
    assert kernel.served_warm == 1
    assert kernel(x.flatten(0, 1), w, counts_of(5, 5, 48), bias=bias).shape == (48, 32)
