"""Groups of rows in FP8, with scales of rows and of each expert's columns: calls, their reference and kernels."""

import re

import pytest
import torch
from fake_device import fake_device
from signatures import H100

import cutlass_ops as co
from cutlass_ops.choose import dispatch
from cutlass_ops.declare.form import GROUPED
from cutlass_ops.epilogue import builtin, composed
from cutlass_ops.kinds import legality
from cutlass_ops.run.call import signature_of
from cutlass_ops.run.grouped_scaled import scaled_grouped_op

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
        ({"scale_b": torch.rand(EXPERTS)}, ValueError, "scale_b has shape (3,)"),
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
    with pytest.raises(ValueError, match="there are no gradients of a product in FP8"):
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
