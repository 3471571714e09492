"""Gated activations on CPU tensors: in one op, behind a norm, and as the two GEMMs that stand for it."""

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import cutlass_ops as co
from cutlass_ops.epilogue import composed
from cutlass_ops.operand.call import Call
from cutlass_ops.run import gated, ops

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
M, N, K, EPS = 19, 48, 256, 1e-5


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def tensors(dtype):
    """Return x (M, K), two weights (N, K) and gamma."""
    weights = [(torch.randn(N, K) / math.sqrt(K)).to(dtype) for _ in range(2)]
    return torch.randn(M, K).to(dtype), *weights, (1 + 0.3 * torch.randn(K)).to(dtype)


def swiglu(x, gate, up):
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def error(found, wanted):
    return ((found.double() - wanted).norm() / wanted.norm()).item()


@pytest.fixture
def refused(monkeypatch, session):
    """Refuse ops with a second product, as a device does for which no kernel has one."""
    reference = Call.is_reference.fget
    monkeypatch.setattr(Call, "is_reference", property(lambda c: not c.graph.products and reference(c)))

    def refuse(op, call):
        raise co.errors.UnsupportedError(f"no kernel serves {op.name}")

    monkeypatch.setattr(ops.Op, "_served", refuse)


@pytest.fixture(params=["one kernel", "two GEMMs"])
def kernels(request, monkeypatch):
    """Serve the gate by its op, or have that refused."""
    if request.param == "two GEMMs":
        request.getfixturevalue("refused")
    calls = []
    run = ops.Op.__call__

    def counted(op, *args, **kwargs):
        calls.append(op)
        return run(op, *args, **kwargs)

    monkeypatch.setattr(ops.Op, "__call__", counted)
    yield calls
    tried = 1 if request.param == "one kernel" else 3
    assert len(calls) % tried == 0
    assert [bool(op.graph.products) for op in calls[:tried]] == [True, False, False][:tried]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("transposed", [False, True])
def test_swiglu_is_as_accurate_as_pytorchs(dtype, transposed):
    x, gate, up, _ = tensors(dtype)
    given = [w.t() if transposed else w.t().contiguous() for w in (gate, up)]
    found = co.gemm_swiglu(x, *given)
    wanted = swiglu(x.double(), gate.double(), up.double())
    assert (found.shape, found.dtype) == ((M, N), dtype)
    assert error(found, wanted) <= 2 * error(swiglu(x, gate, up), wanted)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("how", ["eps", "gamma", "prepared", "statistic", "rstd"])
def test_behind_a_norm(how):
    x, gate, up, gamma = tensors(BF16)
    x[:, ::31] *= 1000
    used = gamma if how in ("gamma", "prepared") else None
    weights = [co.prepare(w.t(), gamma) if how == "prepared" else w.t() for w in (gate, up)]
    statistic = co.RowStatistic(x.float().square().sum(1), K, EPS)
    arguments = {"statistic": {"rstd": statistic}, "rstd": {"rstd": statistic.rstd}}.get(how, {"eps": EPS})
    if how == "gamma":
        arguments["gamma"] = gamma
    found = co.gemm_swiglu(x, *weights, **arguments)
    normed = F.rms_norm(x.double(), (K,), None if used is None else used.double(), EPS)
    wanted, eager = swiglu(normed, gate.double(), up.double()), swiglu(F.rms_norm(x, (K,), used, EPS), gate, up)
    assert error(found, wanted) <= 2 * error(eager, wanted)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("out_dtype", [None, F32])
def test_leading_dimensions_and_outputs(out_dtype):
    x, gate, up, _ = tensors(BF16)
    x = x[:18].view(3, 6, K)
    out = torch.full((3, 6, N), math.nan, dtype=out_dtype or BF16)
    found = co.gemm_swiglu(x, gate.t(), up.t(), out=out)
    assert found is out
    again = co.gemm_swiglu(x, gate.t(), up.t(), out_dtype=out_dtype)
    assert again.dtype == out.dtype
    assert torch.equal(again, out)
    assert error(out, swiglu(x.double(), gate.double(), up.double())) <= torch.finfo(BF16).eps


@pytest.mark.usefixtures("refused")
def test_another_error_is_not_taken_for_a_missing_kernel(monkeypatch):
    x, gate, up, _ = tensors(BF16)

    def broken(*_, **__):
        raise co.errors.CompileError("nvcc refused it")

    monkeypatch.setattr(ops.Op, "_served", broken)
    with pytest.raises(co.errors.CompileError, match="nvcc refused it"):
        co.gemm_swiglu(x, gate.t(), up.t())


@pytest.mark.usefixtures("refused")
def test_other_ops_with_a_product_are_refused():
    x, gate, up, _ = tensors(BF16)
    with pytest.raises(co.errors.UnsupportedError):
        co.gemm(x, gate.t(), epilogue=composed.swiglu, up=up.t())


@pytest.fixture
def looked_at(refused, monkeypatch):
    """Return the calls for which a kernel with two weights was looked for."""
    op, found = gated.swiglu_op(None), []
    refuse = ops.Op._served
    monkeypatch.setattr(op, "_served", lambda call: (found.append(call), refuse(op, call)))
    return found


def test_that_no_kernel_serves_a_call_is_remembered(looked_at):
    x, gate, up, _ = tensors(BF16)
    first = co.gemm_swiglu(x, gate.t(), up.t(), out_dtype=F32)
    out = torch.full_like(first, math.nan)
    for how in ({"out": out}, {"out_dtype": F32}):
        found = co.gemm_swiglu(x, gate.t(), up.t(), **how)
        assert found.dtype == F32
        assert torch.equal(found, first)
    assert torch.equal(out, first)
    assert len(looked_at) == 1


@pytest.mark.parametrize("changed", ["x", "gate", "up"])
@pytest.mark.parametrize("how", ["aligned", "major"])
def test_operands_that_a_kernel_may_take_are_looked_at_again(looked_at, changed, how):
    x, gate, up, _ = tensors(BF16)
    given = {"x": x, "gate": gate.t(), "up": up.t()}

    def moved(tensor):
        # The same values at an odd address.
        flat = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:]
        return torch.as_strided(flat, tensor.shape, tensor.stride()).copy_(tensor)

    first = co.gemm_swiglu(*(moved(t) for t in given.values()))
    if how == "major" and changed != "x":
        given = {n: t if n == "x" else t.contiguous() for n, t in given.items()}
    elif how == "major":
        given["x"] = x.t().contiguous().t()
    else:
        given = {n: t if n == changed else moved(t) for n, t in given.items()}
    assert error(co.gemm_swiglu(*given.values()), first.double()) <= torch.finfo(BF16).eps
    assert len(looked_at) == 2


@pytest.mark.usefixtures("refused")
def test_a_later_call_is_still_checked():
    x, gate, up, _ = tensors(BF16)
    co.gemm_swiglu(x, gate.t(), up.t())
    with pytest.raises(TypeError, match=r"^up is torch\.float16 and b is"):
        co.gemm_swiglu(x, gate.t(), up.t().half())
    with pytest.raises(ValueError, match=r"^up has shape"):
        co.gemm_swiglu(x, gate.t(), up.t()[:, :5])


X, W, GAMMA = torch.ones(4, 8, dtype=BF16), torch.ones(8, 6, dtype=BF16), torch.ones(8, dtype=BF16)
ERRORS = {
    "gamma without a norm": (lambda: co.gemm_swiglu(X, W, W, GAMMA), TypeError, "^gamma or .* without a norm"),
    "a prepared weight without a norm": (
        lambda: co.gemm_swiglu(X, W, co.prepare(W, GAMMA)), TypeError, "without a norm: pass eps= or rstd=$",
    ),
    "one weight prepared": (
        lambda: co.gemm_swiglu(X, W, co.prepare(W, GAMMA), eps=EPS), TypeError, "^b_up is prepared and b_gate is not",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "message"), ERRORS.values(), ids=ERRORS)
def test_errors_name_the_argument_and_say_what_to_do(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


@pytest.mark.usefixtures("refused")
@pytest.mark.parametrize("norm", [{}, {"eps": EPS}], ids=["plain", "normed"])
def test_two_gemms_stand_for_it_in_a_compiled_function_as_well(norm):
    x, gate, up, gamma = tensors(BF16)
    weights = [co.prepare(w.t(), gamma) for w in (gate, up)] if norm else [gate.t(), up.t()]
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: co.gemm_swiglu(x * 2, *weights, **norm), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), co.gemm_swiglu(x * 2, *weights, **norm))
