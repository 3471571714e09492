"""Operators whose code is imported with their first call: most programs need none of them.

They are registered at once, since compiled and saved programs name them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cutlass_ops.operand import watching
from cutlass_ops.run import traced


def _recorded(
    name: str, record: Callable[..., Any], plain: Callable[..., Any], warm: Callable[..., Any] | None = None
) -> None:
    """Choose what runs a call of an operator: `record` if autograd records it, else `plain`.

    `warm` is tried first. It returns None if it cannot run the call. torch.library.register_autograd would not take
    None for an empty list, and would refuse a call only after it ran.
    """

    def autograd(*arguments: Any) -> Any:
        # The code below takes as long as such a call.
        if warm is not None and (results := warm(*arguments)) is not None:
            return results
        is_recorded = torch.is_grad_enabled() and any(x.requires_grad for x in _tensors(arguments))
        return (record if is_recorded else plain)(*arguments)

    traced.override(name, autograd, "Autograd")


def _values_of(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """Return what runs an operator that is not recorded. If something else listens, PyTorch has to dispatch again."""
    operator = getattr(torch.ops.cutlass_ops, name).default

    def plain(*arguments: Any) -> Any:
        others = any(watching.needs_operator(x) or x.is_meta for x in _tensors(arguments))
        if others or watching.is_watched():
            for x in _tensors(arguments):
                watching.refuse_tangent("tensor", x)  # which is lost below autograd
            with torch._C._AutoDispatchBelowAutograd():
                return operator(*arguments)
        return run(*arguments)

    return plain


def _tensors(arguments: Sequence[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for given in arguments:
        if isinstance(given, Tensor):
            found.append(given)
        elif isinstance(given, list):
            found += [x for x in given if isinstance(x, Tensor)]
    return found


def _late_and_recorded(schema: str, module: str) -> None:
    """Register an operator that autograd records: `plain` is without gradients, `record` with them."""
    name = schema.partition("(")[0]
    plain = traced.late(module, "plain")
    traced.declare(schema, plain, traced.late(module, "shapes"))
    _recorded(name, traced.late(module, "record"), plain)
    traced.override(name, traced.refuse_vmap, "FuncTorchBatched")


def _of_folding(schema: str, run: str, shape: str, record: str) -> None:
    """Register an operator of folding: `record` computes the same by operations that autograd knows."""
    name = schema.partition("(")[0]
    traced.declare(schema, traced.late("folding", run), traced.late("folding", shape))
    _recorded(name, traced.late("folding", record), _values_of(name, traced.late("folding", run)))


_recorded("fused_gemm", traced.late("recorded", "record"), _values_of("fused_gemm", traced.run_new), traced.run_warm)
_late_and_recorded(
    f"fused_gemm_grad({traced.ARGUMENTS}, ScalarType? out_dtype, bool recompute=False) -> Tensor[]", "recorded"
)
_late_and_recorded(
    "fused_chain_grad(str first, str second, Tensor a, Tensor b1, Tensor b2, Tensor[] inputs1, Tensor[] inputs2, "
    "ScalarType? out_dtype) -> Tensor",
    "chained",
)

_QUANTIZED = "Tensor x, str dtype, int? block"
traced.declare(
    f"quantize({_QUANTIZED}) -> (Tensor, Tensor)", traced.late("quantizing", "run"), traced.late("quantizing", "shapes")
)
traced.declare(
    f"quantize_out({_QUANTIZED}, Tensor(a!) d, Tensor(b!) scale) -> ()",
    traced.late("quantizing", "run_out"),
    lambda *_: None,
)
traced.count_changes("quantize_out", lambda *arguments: arguments[-2:])
for _name in ("quantize", "quantize_out"):
    traced.override(_name, traced.refuse_vmap, "FuncTorchBatched")

_of_folding("fold(Tensor w, Tensor gamma, str name) -> Tensor", "fold_checked", "folded_shape", "fold_recorded")
_of_folding("column_sums(Tensor matrix) -> Tensor", "column_sums_checked", "a_value_a_column", "column_sums_checked")
_of_folding(
    "row_times(str name, Tensor row, Tensor w) -> Tensor", "row_times_checked", "row_times_shape", "row_times_checked"
)
