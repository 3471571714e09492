"""Kernels for what the matrix of named ops leaves out: mixed types and alignments, every function, stream-K sums."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

import cutlass_ops as co
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.epilogue import functions
from cutlass_ops.epilogue.trace import Epilogue
from cutlass_ops.run import ops
from tests.gpu import kernels

_shape = co.ThreadblockShape

SM90_SWAPPED = co.Sm90Config(_shape(64, 32, 64), co.ClusterShape(2, 1), schedule="pingpong", swap_ab=True)
SM90_COOPERATIVE = co.Sm90Config(_shape(128, 64, 64), schedule="cooperative")
SM90_STREAM_K = co.Sm90Config(_shape(128, 64, 64), schedule="cooperative", scheduler="stream_k")
SM80_STREAM_K = co.Sm80Config(_shape(64, 64, 32), co.WarpShape(32, 32, 32), stages=3, stream_k=True)

# Every function of the language, in the language and in PyTorch.
FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[..., torch.Tensor]]] = {
    "exp": (functions.exp, torch.exp),
    "sqrt": (functions.sqrt, torch.sqrt),
    "rsqrt": (functions.rsqrt, torch.rsqrt),
    "square": (functions.square, torch.square),
    "magnitude": (functions.abs, torch.abs),
    "negated": (functions.neg, torch.neg),
    "inverse": (lambda x: 1.0 / x, torch.reciprocal),
    "tanh": (functions.tanh, torch.tanh),
    "sigmoid": (functions.sigmoid, torch.sigmoid),
    "silu": (functions.silu, F.silu),
    "relu": (functions.relu, torch.relu),
    "leaky": (lambda x: functions.leaky_relu(x, 0.125), lambda x: F.leaky_relu(x, 0.125)),
    "hardswish": (functions.hardswish, F.hardswish),
    "clamped": (lambda x: functions.clamp(x, -1.5, 2.0), lambda x: x.clamp(-1.5, 2.0)),
    "greater": (lambda x: functions.maximum(x, -x), lambda x: torch.maximum(x, -x)),
    "lesser": (lambda x: functions.minimum(x, 0.5), lambda x: torch.minimum(x, torch.full_like(x, 0.5))),
    "gelu": (functions.gelu, F.gelu),
    "gelu_tanh": (lambda x: functions.gelu(x, approximate="tanh"), lambda x: F.gelu(x, approximate="tanh")),
    "to_bf16": (lambda x: functions.cast(x, "bf16"), lambda x: x.to(torch.bfloat16).to(x.dtype)),
    "to_f16": (lambda x: functions.cast(x, "f16"), lambda x: x.to(torch.float16).to(x.dtype)),
    "shifted": (lambda x: 2.0 - x, lambda x: 2.0 - x),
    "erf": (functions.erf, torch.erf),
    "ndtr": (functions.ndtr, lambda x: 0.5 * torch.erfc(x * -math.sqrt(0.5))),
    "log": (functions.log, torch.log),
    "log2": (functions.log2, torch.log2),
    "log1p": (functions.log1p, torch.log1p),
    "exp2": (functions.exp2, torch.exp2),
    "expm1": (functions.expm1, torch.expm1),
    "reciprocal": (functions.reciprocal, torch.reciprocal),
    "cubed": (lambda x: x**3, lambda x: x**3),
    "raised": (lambda x: functions.pow(functions.abs(x), 0.3), lambda x: x.abs() ** _like(x, 0.3)),
    "power_of_two": (lambda x: functions.pow(2.0, x), lambda x: torch.pow(_like(x, 2.0), x)),
    "by_itself": (lambda x: functions.pow(x, x), lambda x: torch.pow(x, x)),
    "to_floor": (functions.floor, torch.floor),
    "to_ceil": (functions.ceil, torch.ceil),
    "to_round": (functions.round, torch.round),
    "to_trunc": (functions.trunc, torch.trunc),
    "to_sign": (functions.sign, torch.sign),
    "softplus": (functions.softplus, F.softplus),
    "softplus_beta": (lambda x: functions.softplus(x, 2.0), lambda x: F.softplus(x, 2.0)),
    "elu": (lambda x: functions.elu(x, 0.5), lambda x: F.elu(x, 0.5)),
    "mish": (functions.mish, F.mish),
    "to_nan": (functions.isnan, lambda x: torch.isnan(x).to(x.dtype)),
    "to_lt": (lambda x: x < 0.5, lambda x: (x < 0.5).to(x.dtype)),
    "to_le": (lambda x: x <= -0.0, lambda x: (x <= -0.0).to(x.dtype)),
    "to_gt": (lambda x: x > 0.0, lambda x: (x > 0.0).to(x.dtype)),
    "to_ge": (lambda x: x >= 0.5, lambda x: (x >= 0.5).to(x.dtype)),
    "to_eq": (lambda x: x == 0.0, lambda x: (x == 0.0).to(x.dtype)),
    "to_ne": (lambda x: x != x, lambda x: (x != x).to(x.dtype)),
    "to_where": (
        lambda x: functions.where((x > -1) & (x < 1) | ~(x < 3), x, -x),
        lambda x: torch.where((x > -1) & (x < 1) | ~(x < 3), x, -x),
    ),
}


def _like(x: torch.Tensor, value: float) -> torch.Tensor:
    """Return a constant as an epilogue has it: rounded to FP32, whatever the arithmetic after it."""
    return torch.full((), value, dtype=torch.float32, device=x.device).to(x.dtype)


# Those of which PyTorch gives zeros of either sign, as its version has it.
EITHER_ZERO = ("relu", "clamped", "greater", "lesser", "hardswish", "gelu", "gelu_tanh", "silu", "sigmoid", "exp")
_OUTPUTS = 7  # besides D


def function_groups() -> dict[str, tuple[str, ...]]:
    """Split the functions into as many as one kernel can store."""
    names = list(FUNCTIONS)
    parts = (names[at : at + _OUTPUTS] for at in range(0, len(names), _OUTPUTS))
    return {f"functions-{part[0]}-to-{part[-1]}": tuple(part) for part in parts}


def _functions(names: tuple[str, ...]) -> Epilogue:
    @co.epilogue
    def table(acc, value: co.Tile):
        # Not of the sum, which has no negative zero.
        return {"d": acc + value} | {name: FUNCTIONS[name][0](value) for name in names}

    return table


def functions_specs() -> dict[str, KernelSpec]:
    types = "bf16.row bf16.col f32.row"
    return {name: kernels.declare(types, _functions(each), kernels.SM80) for name, each in function_groups().items()}


def mixed() -> dict[str, KernelSpec]:
    """Inputs and D of different dtypes and alignments; D that TMA cannot store beside operands that it loads."""
    epilogue = kernels.OPS["gemm_bias_relu_residual"].graph
    rows: tuple[tuple[str, Any, str, str, str], ...] = (
        ("d-and-residual-odd", kernels.SM90, "f16.row f16.col f16.row.align1", "f32", "f16.row.align1"),
        ("d-f32-odd", SM90_SWAPPED, "bf16.row bf16.col f32.row.align1", "f16", "bf16.row"),
        ("residual-f32-odd", SM90_COOPERATIVE, "bf16.row bf16.col bf16.row", "bf16", "f32.row.align1"),
        ("d-f32-residual-odd", kernels.SM80, "f16.row.align2 f16.col.align2 f32.row.align2", "bf16", "bf16.row.align1"),
    )
    return {
        f"{name}-{config.slug}": kernels.declare(types, epilogue, config, bias=bias, residual=residual)
        for name, config, types, bias, residual in rows
    }


def stream_k_sums() -> dict[str, KernelSpec]:
    """Reductions of tiles that several thread blocks share."""
    op = ops.op(kernels.everything)
    return {c.slug: kernels.spec(op, "bf16", ("row", "col"), c) for c in (SM90_STREAM_K, SM80_STREAM_K)}


def specs() -> dict[str, KernelSpec]:
    """Every kernel of this module."""
    return functions_specs() | mixed() | stream_k_sums()
