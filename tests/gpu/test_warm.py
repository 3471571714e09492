"""The second call is served warm in every form: no kernel refuses what its plan hands it, and bits are the same."""

import itertools
import math

import pytest
import torch

import cutlass_ops as co
from cutlass_ops.epilogue import builtin
from cutlass_ops.run import gated, ops
from tests.gpu import kernels, tensors
from tests.gpu.warm import served_warm

pytestmark = pytest.mark.gpu

M, N, K = 72, 256, 128
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


@co.epilogue
def several(acc, bias: co.Row, alpha: co.Scalar):
    """Two tiles, and a reduction along each side."""
    pre = acc * alpha + bias
    d = co.relu(pre)
    return {"d": d, "pre": pre, "square": co.sum_square(d, dim=1), "top": co.max(pre, dim=0)}


SHAPES = {"d": (M, N), "pre": (M, N), "square": (M,), "top": (N,)}
# Which outputs are given: none, D as a tensor, and by name one, some or all.
FORMS = ["", "tensor", "d", "pre", "top", "d square", "pre square top", "d pre square top"]


def named_outputs(form, tile=BF16):
    if form in ("", "tensor"):
        return torch.full((M, N), math.nan, device="cuda", dtype=tile) if form else None
    types = {name: tile if name in ("d", "pre") else F32 for name in SHAPES}
    return {name: torch.full(SHAPES[name], math.nan, device="cuda", dtype=types[name]) for name in form.split()}


def operands(dtype="bf16", *, aligned=True):
    return tensors.matrix(M, K, dtype, aligned=aligned), tensors.matrix(K, N, dtype, "col", aligned=aligned)


def again(op, call):
    """Make a call twice; the second is warm, and has the first one's bits."""
    first = call()
    first = [x.clone() for x in ([first] if isinstance(first, torch.Tensor) else first)]
    second = served_warm(op, call)
    found = [second] if isinstance(second, torch.Tensor) else second
    assert all(torch.equal(x, y) for x, y in zip(first, found, strict=True))
    return second


@pytest.mark.parametrize("config", [None, kernels.SM90_REDUCING, kernels.SM80], ids=["op", "sm90", "sm80"])
@pytest.mark.parametrize("form", FORMS)
def test_several_outputs(form, config):
    (a, b), bias, op = operands(), tensors.vector(N, "bf16"), ops.op(several)
    run = op if config is None else co.build(kernels.spec(op, "bf16", ("row", "col"), config))
    out = named_outputs(form)
    found = again(run, lambda: run(a, b, bias, 0.5, out=out))
    for name, x in out.items() if isinstance(out, dict) else ():
        assert getattr(found, name) is x


@pytest.mark.parametrize("out_dtype", [F16, BF16, F32])
def test_every_dtype_of_d(out_dtype):
    op, (a, b), bias = co.gemm_bias_relu, operands(), tensors.vector(N, "bf16")
    again(op, lambda: op(a, b, bias, out_dtype=out_dtype))
    again(op, lambda: op(a, b, bias, out=torch.empty(M, N, device="cuda", dtype=out_dtype)))


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("majors", list(itertools.product(("row", "col"), repeat=2)))
def test_majors_and_alignments(majors, aligned):
    a, b = (
        tensors.matrix(*s, "bf16", of, aligned=aligned) for s, of in zip(((65, 129), (129, 257)), majors, strict=True)
    )
    again(kernels.OPS["gemm"], lambda: co.gemm(a, b))


@pytest.mark.parametrize("batch", [(3, 24), (2, 3, 12), (1, 72)])
def test_folded_batches(batch):
    op, (a, b), bias = ops.op(several), operands(), tensors.vector(N, "bf16")
    again(op, lambda: op(a.view(*batch, K), b, bias, 0.5))
    out = {"square": torch.empty(batch, device="cuda"), "d": torch.empty(*batch, N, device="cuda", dtype=BF16)}
    again(op, lambda: op(a.view(*batch, K), b, bias, 0.5, out=out))


@pytest.mark.parametrize("alpha", [0.5, 2, "cpu", "cuda"])
def test_scalars(alpha):
    op, (a, b) = ops.op(kernels.scaled), operands()
    value = torch.tensor(0.25, device=alpha) if isinstance(alpha, str) else alpha
    again(op, lambda: op(a, b, value))


def test_two_gemms_are_warm_and_so_is_each():
    """Weights with N along their lines: no kernel takes two of them."""
    x, w = operands()
    w, op = w.contiguous(), gated.swiglu_op(None)
    parts = [part for part, _ in op.instead_of(op.checked(x, w, (w,), {}, None, None))]
    co.gemm_swiglu(x, w, w)
    served = [part.served_warm for part in parts]
    served_warm(op, lambda: co.gemm_swiglu(x, w, w))
    assert [part.served_warm - before for part, before in zip(parts, served, strict=True)] == [1, 1]


def test_an_exact_kernel_of_columns():
    kernel = co.build(kernels.declare("bf16.row bf16.col bf16.col", builtin.bias_relu, kernels.SM90, bias="bf16"))
    (a, b), bias = operands(), tensors.vector(N, "bf16")
    for x in (a, a.view(3, 24, K)):
        first = kernel(x, b, bias)
        second = served_warm(kernel, lambda x=x: kernel(x, b, bias))
        assert first.stride() == second.stride()
        assert torch.equal(first, second)


def test_a_refusal_is_counted(monkeypatch):
    op, (a, b), bias = co.gemm_bias_relu, operands(), tensors.vector(N, "bf16")
    monkeypatch.setattr(op, "_plans", {})  # another test may have made such a call
    again(op, lambda: op(a, b, bias))
    odd = tensors.matrix(M, K + 1, "bf16", aligned=False)[:, :K]
    before = op.refused_warm
    op(odd, b, bias)
    assert op.refused_warm == before + 1
    again(op, lambda: op(odd, b, bias))
