"""Mistakes of newcomers: what an error says to write instead."""

import contextlib

import pytest
import torch
from torch.nn.functional import relu

import cutlass_ops as co
from cutlass_ops.run import norms, ops

A, B = torch.ones(2, 8).bfloat16(), torch.ones(8, 3).bfloat16()
BIAS, TILE = torch.zeros(3), torch.zeros(2, 3).bfloat16()


@co.epilogue
def own(acc, bias: co.Row, gate: co.Tile):
    return (acc + bias) * gate


def test_other_packages_ops_say_what_is_close():
    pytest.importorskip("jax")
    with pytest.raises(
        AttributeError, match=r"module 'cutlass_ops.jax' has no attribute 'gemm_bais': did you mean gemm_bias"
    ):
        co.jax.gemm_bais  # noqa: B018


# ---- An input that is None -------------------------------------------------------------------------------------------

WITHOUT = {
    "gemm_bias": ((None,), "bias of gemm_bias is None: call cutlass_ops.gemm(a, b)"),
    "gemm_bias_relu": ((None,), "call cutlass_ops.gemm(a, b, epilogue=lambda acc: cutlass_ops.e.relu(acc))"),
    "gemm_bias_gelu": ((None,), "call cutlass_ops.gemm(a, b, epilogue=lambda acc: cutlass_ops.e.gelu(acc))"),
    "gemm_bias_silu": ((None,), "call cutlass_ops.gemm(a, b, epilogue=lambda acc: cutlass_ops.e.silu(acc))"),
    "gemm_residual": ((None,), "call cutlass_ops.gemm(a, b)"),
    "gemm_bias_residual": ((None, TILE), "call cutlass_ops.gemm_residual(a, b, residual)"),
    "gemm_bias_relu_residual": ((BIAS, None), "call cutlass_ops.gemm_bias_relu(a, b, bias)"),
}


@pytest.mark.parametrize(("name", "inputs", "said"), [(name, *rest) for name, rest in WITHOUT.items()])
def test_a_named_op_says_what_to_call_without_an_input(name, inputs, said):
    op = getattr(co, name)
    for call in (
        lambda: op(A, B, *inputs),
        lambda: op(A, B, **dict(zip(op.names, inputs, strict=True))),
        lambda: op(A.clone().requires_grad_(), B, *inputs),
        lambda: co.explain(op, A, B, *inputs),
        lambda: co.warm_up(op, A, B, *inputs),
        lambda: torch.export.export(Calls(op, inputs), (A,)),
    ):
        with pytest.raises(Exception, match="is None: call") as error:
            call()
        assert said in str(error.value)
    expression = said.partition("call ")[2]
    there = {"a": A, "b": B, "bias": BIAS, "residual": TILE, "cutlass_ops": co}
    assert eval(expression, there).shape == (2, 3)


class Calls(torch.nn.Module):
    def __init__(self, op, inputs):
        super().__init__()
        self.op, self.inputs = op, inputs

    def forward(self, a):
        return self.op(a, B, *self.inputs)


def test_an_epilogue_says_so_too():
    with pytest.raises(
        TypeError, match=r"^bias and gate of own is None: pass an epilogue that has no bias and no gate$"
    ):
        co.gemm(A, B, epilogue=own, bias=None, gate=None)
    with pytest.raises(TypeError, match=r"own takes \(a, b, bias, gate\): gate is missing"):
        co.gemm(A, B, epilogue=own, bias=None)


# ---- Arrays of other libraries ---------------------------------------------------------------------------------------


def test_arrays_of_jax_are_sent_to_its_functions():
    jnp = pytest.importorskip("jax.numpy")
    import cutlass_ops.jax as cj

    a, weight = jnp.ones((2, 8), jnp.bfloat16), jnp.ones((3, 8), jnp.bfloat16)
    assert cj.gemm(a, weight.T).shape == (2, 3)
    for call in (lambda: co.gemm(a, weight.T), lambda: co.gemm_bias(A, B, jnp.ones(3))):
        with pytest.raises(
            TypeError, match=r"must be a torch.Tensor, .* call the function of this name in cutlass_ops.jax, or"
        ):
            call()
    for call in (lambda: cj.gemm(A, B), lambda: cj.gemm(a, B), lambda: cj.gemm_bias(a, weight.T, BIAS)):
        with pytest.raises(
            TypeError, match=r"must be a jax.Array, not Tensor: call the function of this name in cutlass_ops$"
        ):
            call()
    with pytest.raises(ValueError, match=r"b looks like a weight of shape \(N, K\): pass b\.T"):
        cj.gemm(a, weight)
    with pytest.raises(TypeError, match=r"bias of gemm_bias is None: call cutlass_ops.gemm"):
        cj.gemm_bias(a, weight.T, None)


# ---- What takes an op ------------------------------------------------------------------------------------------------

TAKE_OPS = {
    "explain": lambda op: co.explain(op, A, B, BIAS),
    "warm_up": lambda op: co.warm_up(op, A, B, BIAS),
    "prepare_launch": lambda op: co.prepare_launch(op, A, B, BIAS),
    "bench": lambda op: co.bench(op, "16x16x16"),
    "tune": lambda op: co.tune(op, [(16, 16, 16)]),
}


@pytest.mark.usefixtures("session")
@pytest.mark.parametrize("take", TAKE_OPS.values(), ids=TAKE_OPS)
def test_they_take_the_same_and_refuse_the_same(take):
    for op in (
        "gemm_bias_relu",
        "co.gemm_bias_relu",
        "cutlass_ops.gemm_bias_relu",
        co.gemm_bias_relu,
        f"{__name__}:biased",
    ):
        with contextlib.suppress(co.errors.NoDeviceError):  # as bench and tune say without a GPU
            take(op)
    for op in ("gemm_bias_relo", "banana", f"{__name__}:nothing"):
        with pytest.raises(co.errors.ConfigError, match=r"is not the name of an op|cannot be imported"):
            take(op)
    # A function of the user's own is a region that warm_up runs.
    for op in (None, 3) if take is TAKE_OPS["warm_up"] else (None, 3, relu, torch.relu):
        with pytest.raises(
            TypeError, match=r"^op is .*: pass cutlass_ops.gemm, a named op such as .* or its name, a function"
        ):
            take(op)


@co.epilogue
def biased(acc, bias: co.Row):
    return acc + bias


def test_names_of_functions_stand_for_them():
    gamma = torch.ones(8)
    for name, function in (("rmsnorm_gemm", co.rmsnorm_gemm), ("gemm", co.gemm)):
        named = {"gamma": gamma, "eps": 1e-6} if name == "rmsnorm_gemm" else {"epilogue": biased, "bias": BIAS}
        assert str(co.explain(name, A, B, **named)) == str(co.explain(function, A, B, **named))
    assert co.explain("gemm_bias_relu", A, B, BIAS).op == "gemm_bias_relu"
    assert ops.op_of(biased).name == "biased"
    assert norms.rmsnorm_op() is norms.rmsnorm_op()
