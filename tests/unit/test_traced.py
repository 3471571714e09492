"""Ops in functions that torch.compile compiles, on the CPU: graphs do not end at them, and results are the same."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import cutlass_ops as co
from cutlass_ops.epilogue import builtin
from cutlass_ops.run import folding, ops

BF16 = torch.bfloat16
M, N, K = 8, 32, 64


@co.epilogue
def several(acc, bias: co.Row, scale: co.Scalar):
    z = acc * scale + bias
    return {"d": co.relu(z), "pre": z, "square": co.sum_square(z, dim=1)}


def draw(*shape):
    return torch.randn(shape).to(BF16)


X, W, BIAS, GAMMA = draw(M, K), draw(N, K), draw(N), draw(K).abs() + 0.5
PREPARED, CENTRED = co.prepare(W.t(), GAMMA), co.prepare(W.t(), GAMMA, draw(K), norm="layer")
RESIDUAL, NEXT = draw(M, N), draw(16, N)


def with_out(x):
    out = torch.empty(x.shape[0], N, dtype=BF16)
    assert co.gemm_bias_relu(x, W.t(), BIAS, out=out) is out
    return out + 1


def layer(x):
    y, rstd = co.gemm_residual_rms(x, W.t(), RESIDUAL[: x.shape[0]], eps=1e-5)
    return y, co.rmsnorm_gemm(y, NEXT.t(), rstd=rstd)


FUNCTIONS = {
    "own": lambda x: co.gemm(x, W.t(), epilogue=several, bias=BIAS, scale=0.5),
    "norm_and_epilogue": lambda x: co.rmsnorm_gemm(x, PREPARED, eps=1e-5, epilogue=builtin.bias_relu, bias=BIAS),
    "layer_norm": lambda x: co.layernorm_gemm(x, CENTRED, eps=1e-5),
    "normed_gate": lambda x: co.gemm_swiglu(x, PREPARED, PREPARED, eps=1e-5),
    "layer": layer,
    "out": with_out,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


# Prepared weights, and an output. test_op_contract.py and test_unknown_sizes.py have other calls.
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_compiled_function_has_one_graph_and_the_same_results(name):
    function = FUNCTIONS[name]
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
    for x in (X, X[:3].clone()):
        found, wanted = compiled(x), function(x)
        assert all(map(torch.equal, tree_leaves(found), tree_leaves(wanted)))
        assert getattr(found, "_fields", None) == getattr(wanted, "_fields", None)


@pytest.mark.sample(4)
@pytest.mark.parametrize("extents", [(K, N), (K, 20), (K, 1), (1, N), (1, 1)], ids=str)
@pytest.mark.parametrize("major", ["row", "col"])
def test_a_folded_weight_is_what_its_compiler_was_told(extents, major):
    w = draw(*extents) if major == "row" else draw(*extents[::-1]).t()
    gamma = draw(extents[0])
    torch.library.opcheck(torch.ops.cutlass_ops.fold, (w, gamma, "w"))
    torch.library.opcheck(torch.ops.cutlass_ops.column_sums, (w,))
    torch.library.opcheck(torch.ops.cutlass_ops.row_times, ("beta", gamma, w))
    with FakeTensorMode() as mode:
        told = torch.ops.cutlass_ops.fold(mode.from_tensor(w), mode.from_tensor(gamma), "w")
    found = folding.fold(w, gamma)
    assert (told.shape, told.stride(), told.dtype) == (found.shape, found.stride(), found.dtype)
    assert torch.equal(found, w * gamma[:, None])


def test_what_folding_refuses_it_refuses_when_the_graph_runs():
    compiled = torch.compile(lambda x, gamma: co.rmsnorm_gemm(x, W.t(), gamma, eps=1e-5), backend="aot_eager")
    with pytest.raises(ValueError, match=r"b \(64, 32\) and gamma \(32,\): they must be"):
        compiled(X, GAMMA[:32])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # its own
def test_inductor_takes_the_operators_as_they_are():
    def function(x):
        return torch.relu(FUNCTIONS["own"](x * 2).pre) + FUNCTIONS["out"](x)

    torch.testing.assert_close(torch.compile(function, fullgraph=True)(X), function(X))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: co.gemm_bias_relu(x, W.t(), BIAS[:5]), "bias"),
        (lambda x: co.gemm_bias_relu(x, W.t().float(), BIAS), "same dtype"),
        (lambda x: co.gemm_bias_relu(x, W.t()), "bias is missing"),
        (lambda x: co.gemm_bias_relu(x, W.t(), BIAS, vias=BIAS), "vias is unknown"),
        (lambda x: co.gemm(x, W.t(), epilogue=several, bias=BIAS, scale=1.0, out={"e": RESIDUAL}), "out names e"),
    ],
)
def test_what_is_refused_is_refused_when_it_is_traced(function, message):
    with pytest.raises(Exception, match=message):
        torch.compile(function, backend="aot_eager", fullgraph=True)(X)


def test_a_residual_may_be_overwritten():
    def function(x, y):
        co.gemm_residual(x, W.t(), y, out=y)
        return y * 2

    mine, wanted = RESIDUAL.clone(), RESIDUAL.clone()
    found = torch.compile(function, backend="aot_eager", fullgraph=True)(X, mine)
    assert torch.equal(found, function(X, wanted))
    assert torch.equal(mine, wanted)


OPERATORS = {
    "fused_gemm": (co.gemm_bias_relu.program_name, W.t(), [BIAS], [], [], None),
    "fused_gemm_grad": (co.gemm_bias_relu.program_name, W.t(), [BIAS], [], [], None),
    "quantize": ("e4m3", None),
}


@pytest.mark.parametrize("operator", OPERATORS)
def test_operators_of_programs_refuse_vmap(operator):
    """A program was traced outside of it, so that the ops themselves cannot refuse."""
    call, (first, *rest) = getattr(torch.ops.cutlass_ops, operator), OPERATORS[operator]
    with pytest.raises(NotImplementedError, match=r"does not support torch\.func\.grad, jvp or vmap"):
        torch.vmap(lambda x: call(x, first, *rest) if operator == "quantize" else call(first, x, *rest))(X[None])


def test_every_operator_passes_pytorchs_own_checks():
    key = ops.op(several).about.split(";", 4)[4]
    arguments = (key, X, W.t(), [BIAS], [0.5], [1])
    torch.library.opcheck(torch.ops.cutlass_ops.fused_gemm.default, (*arguments, None))
    key = co.gemm_bias_relu.about.split(";", 4)[4]
    out = torch.empty(M, N, dtype=BF16)
    torch.library.opcheck(torch.ops.cutlass_ops.fused_gemm_out.default, (key, X, W.t(), [BIAS], [], [], [out]))


# ---- Whole numbers and indices -------------------------------------------------------------------------------------


@co.epilogue
def dropped(acc, c: co.Row, lambda_: co.Scalar, seed: co.Integer) -> ("d", "at"):  # noqa: F821
    kept = co.where(co.dropout_mask(0.5, seed), acc * lambda_, 0.0) + c
    return kept, co.argmax(kept, dim=1)


def with_seed(seed, scale=2.0):
    return co.gemm(X, W.t(), epilogue=dropped, c=BIAS, lambda_=scale, seed=seed)


@pytest.mark.slow
def test_seeds_of_64_bits_pass_through_programs_whole():
    compiled = torch.compile(with_seed, backend="aot_eager", fullgraph=True)
    # Beyond what the numbers of an operator, which are doubles, tell apart.
    for seed in (2**62 + 1, 2**62, 5, 7, -(2**63), 9):
        found, wanted = compiled(seed), with_seed(seed)
        assert torch.equal(found.d, wanted.d)
        assert torch.equal(found.at, wanted.at)
        assert found.at.dtype == torch.int32
    tensor = torch.tensor(2**62 + 1)
    assert torch.equal(compiled(tensor).d, with_seed(2**62 + 1).d)
    assert torch.equal(with_seed(tensor).d, with_seed(2**62 + 1).d)
    torch._dynamo.reset()


def test_indices_given_and_made_are_int32():
    with FakeTensorMode() as mode:
        x, w, bias = (mode.from_tensor(t) for t in (X, W, BIAS))
        found = co.gemm(x, w.t(), epilogue=dropped, c=bias, lambda_=1.0, seed=3)
        assert (found.d.dtype, found.at.dtype) == (BF16, torch.int32)
    at = torch.empty(M, dtype=torch.int32)

    def into(x):
        co.gemm(x, W.t(), epilogue=dropped, c=BIAS, lambda_=2.0, seed=4, out={"at": at})
        return at + 1

    assert torch.equal(torch.compile(into, backend="aot_eager", fullgraph=True)(X), with_seed(4).at + 1)
    with pytest.raises(TypeError, match=r"out\['at'\] is torch\.int64: indices are torch\.int32"):
        co.gemm(X, W.t(), epilogue=dropped, c=BIAS, lambda_=2.0, seed=4, out={"at": at.long()})
    torch._dynamo.reset()


OFFSETS = torch.tensor([1, 2], dtype=torch.int32)
WRITING = {
    "dense": lambda x, out: co.gemm(x, W.t(), out=out),
    "groups": lambda x, out: co.gemm(x, torch.stack([W, W]).mT, groups=co.Groups(OFFSETS), out=out),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITING)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_view_whose_place_changes_is_written_where_it_is(backend, name):
    """Inductor would write the same place each time, by an operator that writes."""

    def step(cache, x, at):
        WRITING[name](x, cache[at])
        return cache.sum()

    cache, compiled = (
        torch.zeros(4, len(X), len(W), dtype=X.dtype),
        torch.compile(step, fullgraph=True, backend=backend),
    )
    wanted = torch.zeros_like(cache[0])
    WRITING[name](X, wanted)
    for at in range(4):
        compiled(cache, X, at)
    assert all(torch.equal(each, wanted) for each in cache)


@pytest.mark.parametrize("name", WRITING)
def test_a_compiled_call_that_writes_what_a_backward_reads_is_refused(name):
    def step(z, out):
        y = z * out
        WRITING[name](X, out)
        return y

    z, out = torch.ones(len(X), len(W), dtype=X.dtype, requires_grad=True), torch.ones(len(X), len(W), dtype=X.dtype)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.compile(step, fullgraph=True, backend="aot_eager")(z, out).sum().backward()


@pytest.mark.parametrize("name", WRITING)
def test_autograd_notices_what_a_watched_call_writes(name):
    factor, out = (
        torch.ones(len(X), len(W), dtype=X.dtype, requires_grad=True),
        torch.ones(len(X), len(W), dtype=X.dtype),
    )
    product = (factor * out).sum()
    with FlopCounterMode(display=False):
        WRITING[name](X, out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_rows_of_no_group_stay_as_they_are_in_a_compiled_program():
    x, w = torch.ones(6, 8).bfloat16(), torch.ones(2, 8, 16).bfloat16()
    offsets, out = torch.tensor([1, 3], dtype=torch.int32), torch.full((6, 16), 7.0).bfloat16()
    torch.compile(lambda x: co.gemm(x, w, groups=co.Groups(offsets), out=out), fullgraph=True, backend="aot_eager")(x)
    assert out[:, 0].tolist() == [8.0, 8.0, 8.0, 7.0, 7.0, 7.0]
