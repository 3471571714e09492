"""The second call of every op and form is served warm: no kernel refuses what its plan hands it; bits are the same."""

import itertools
import math

import pytest
import torch

import cutlass_ops as co
from cutlass_ops.epilogue import builtin
from cutlass_ops.run import gated, ops
from cutlass_ops.run.registry import Registry
from cutlass_ops.run.requests import requested
from tests.gpu import kernels, tensors
from tests.gpu.warm import served_warm

pytestmark = pytest.mark.gpu

M, N, K, EPS = 72, 256, 128, 1e-5
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
    tiles = ("d", "pre")
    return {
        name: torch.full(SHAPES[name], math.nan, device="cuda", dtype=tile if name in tiles else F32)
        for name in form.split()
    }


def operands(dtype="bf16", *, aligned=True, k=K, n=N):
    return tensors.matrix(M, k, dtype, aligned=aligned), tensors.matrix(k, n, dtype, "col", aligned=aligned)


def equal(first, second):
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    return all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


def again(op, call):
    """Make a call twice; the second is warm, and has the first one's bits."""
    first = call()
    first = first.clone() if isinstance(first, torch.Tensor) else [x.clone() for x in first]
    second = served_warm(op, call)
    assert equal(first, second)
    return second


def requests():
    """Return calls of every function that is no op, as a user makes them."""
    x, w = operands()
    gamma, residual = torch.ones(K, device="cuda"), tensors.matrix(M, N, "bf16")
    bias, rows = tensors.vector(N, "bf16"), torch.rand(M, device="cuda")
    sums, silu = co.RowStatistic(rows, K, EPS), {"epilogue": builtin.bias_silu, "bias": bias}
    prepared, layer = co.prepare(w, gamma), co.prepare_layernorm(w, gamma, gamma)
    eps, moments = {"eps": EPS}, {"mean": rows, "rstd": rows}
    return {
        "rmsnorm": (co.rmsnorm_gemm, (x, w), eps),
        "rmsnorm, prepared": (co.rmsnorm_gemm, (x, prepared), eps),
        "rmsnorm, folded": (co.rmsnorm_gemm, (x, w, gamma), eps),
        "rmsnorm, eps on the device": (co.rmsnorm_gemm, (x, w), {"eps": rows[0]}),
        "rmsnorm of sums": (co.rmsnorm_gemm, (x, w), {"rstd": sums}),
        "rmsnorm of rstd": (co.rmsnorm_gemm, (x, w), {"rstd": rows}),
        "rmsnorm, then SiLU": (co.rmsnorm_gemm, (x, w), eps | silu),
        "residual": (co.gemm_residual_rms, (x, w, residual), eps),
        "residual, out given": (co.gemm_residual_rms, (x, w, residual), eps | {"out": torch.empty_like(residual)}),
        "layernorm": (co.layernorm_gemm, (x, w), eps),
        "layernorm, shifted": (co.layernorm_gemm, (x, layer), eps),
        "layernorm of moments": (co.layernorm_gemm, (x, layer), moments),
        "swiglu": (co.gemm_swiglu, (x, w, w), {}),
        "rmsnorm and swiglu": (co.gemm_swiglu, (x, w, w), eps),
    }


REQUESTS = [
    "rmsnorm", "rmsnorm, prepared", "rmsnorm, folded", "rmsnorm, eps on the device", "rmsnorm of sums",
    "rmsnorm of rstd", "rmsnorm, then SiLU", "residual", "residual, out given", "layernorm", "layernorm, shifted",
    "layernorm of moments", "swiglu", "rmsnorm and swiglu",
]  # fmt: skip


ODD = [(majors, aligned) for majors in itertools.product(("row", "col"), repeat=2) for aligned in (True, False)]


def odd_operands(majors, aligned):
    a = tensors.matrix(65, 129, "bf16", majors[0], aligned=aligned)
    return a, tensors.matrix(129, 257, "bf16", majors[1], aligned=aligned)


def inputs_of(op, dtype="bf16"):
    return [tensors.vector(N, dtype) if name == "bias" else tensors.matrix(M, N, dtype) for name in op.names]


@pytest.fixture(autouse=True, scope="module")
def _built():
    """Compile most of what the tests' calls are served by, side by side."""
    asked = []
    for dtype in ("bf16", "f16"):
        a, b = operands(dtype)
        asked += [op.plan(a, b, *inputs_of(op, dtype)) for op in kernels.OPS.values()]
    a, b = operands()
    asked.append(ops.op(several).plan(a, b, tensors.vector(N, "bf16"), 0.5))
    asked += [kernels.OPS["gemm"].plan(*odd_operands(*case)) for case in ODD]
    for function, arguments, named in requests().values():
        request = requested(function, *arguments, **named)
        asked.append(request.op.plan(*request.arguments, **request.named))
    Registry.current().kernels(choice.spec for choice in asked)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("form", ["", "tensor", "d"])
@pytest.mark.parametrize("name", list(kernels.OPS))
def test_named_ops(name, form, dtype):
    op = kernels.OPS[name]
    (a, b), inputs = operands(dtype), inputs_of(op, dtype)
    out = named_outputs(form, tensors.DTYPES[dtype])
    found = again(op, lambda: op(a, b, *inputs, out=out))
    assert not form or found is (out if form == "tensor" else out["d"])


@pytest.mark.parametrize("form", FORMS)
def test_several_outputs(form):
    op, (a, b), bias = ops.op(several), operands(), tensors.vector(N, "bf16")
    out = named_outputs(form)
    found = again(op, lambda: op(a, b, bias, 0.5, out=out))
    for name, x in out.items() if isinstance(out, dict) else ():
        assert getattr(found, name) is x


@pytest.mark.parametrize("out_dtype", [F16, BF16, F32])
def test_every_dtype_of_d(out_dtype):
    op, (a, b), bias = co.gemm_bias_relu, operands(), tensors.vector(N, "bf16")
    again(op, lambda: op(a, b, bias, out_dtype=out_dtype))
    again(op, lambda: op(a, b, bias, out=torch.empty(M, N, device="cuda", dtype=out_dtype)))


@pytest.mark.parametrize(("majors", "aligned"), ODD)
def test_majors_and_alignments(majors, aligned):
    a, b = odd_operands(majors, aligned)
    again(kernels.OPS["gemm"], lambda: co.gemm(a, b))


@pytest.mark.parametrize("batch", [(3, 24), (2, 3, 12), (1, 72)])
def test_batches(batch):
    op, (a, b), bias = ops.op(several), operands(), tensors.vector(N, "bf16")
    again(op, lambda: op(a.view(*batch, K), b, bias, 0.5))
    out = {"square": torch.empty(batch, device="cuda"), "d": torch.empty(*batch, N, device="cuda", dtype=BF16)}
    again(op, lambda: op(a.view(*batch, K), b, bias, 0.5, out=out))


@pytest.mark.parametrize("alpha", [0.5, 2, "cpu", "cuda"])
def test_scalars(alpha):
    op, (a, b) = ops.op(kernels.scaled), operands()
    value = torch.tensor(0.25, device=alpha) if isinstance(alpha, str) else alpha
    again(op, lambda: op(a, b, value))


@pytest.mark.parametrize("name", REQUESTS)
def test_functions(name):
    function, arguments, named = requests()[name]

    def run():
        found = function(*arguments, **named)
        return (found.y, found.rstd.sum_square) if isinstance(found, co.ResidualRms) else found

    again(requested(function, *arguments, **named).op, run)


def test_every_function_is_among_them():
    assert list(requests()) == REQUESTS


def test_two_gemms_are_warm_and_so_is_each():
    """Weights with N along their lines: no kernel takes two of them."""
    x, w = operands()
    w, op = w.contiguous(), gated.swiglu_op(None)
    parts = [part for part, _ in op.instead_of(op.checked(x, w, (w,), {}, None, None))]
    co.gemm_swiglu(x, w, w)
    served = [part.served_warm for part in parts]
    served_warm(op, lambda: co.gemm_swiglu(x, w, w))
    assert [part.served_warm - before for part, before in zip(parts, served, strict=True)] == [1, 1]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("config", [kernels.SM90_REDUCING, kernels.SM80], ids=lambda c: c.slug)
def test_exact_kernels(config, form):
    kernel = co.build(kernels.spec(ops.op(several), "bf16", ("row", "col"), config))
    (a, b), bias = operands(), tensors.vector(N, "bf16")
    out = named_outputs(form)
    again(kernel, lambda: kernel(a, b, bias, 0.5, out=out))


def test_an_exact_kernel_of_columns():
    types = {"a": "bf16.row", "b": "bf16.col", "d": "bf16.col", "inputs": {"bias": "bf16"}}
    kernel = co.build(co.KernelSpec(**types, epilogue=builtin.bias_relu, config=kernels.SM90))
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
