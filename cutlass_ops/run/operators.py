"""Operators whose code is imported with their first call: most programs need none of them.

They are registered at once, since compiled and saved programs name them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from cutlass_ops.run import traced, watching


def _late(module: str, name: str) -> Callable[..., Any]:
    def function(*arguments: Any) -> Any:
        return getattr(importlib.import_module(f"cutlass_ops.run.{module}"), name)(*arguments)

    return function


def _recorded(name: str, record: Callable[..., Any], plain: Callable[..., Any]) -> None:
    """Have `record` run where autograd records a call of an operator, and `plain` where only values are wanted.

    Not by torch.library.register_autograd, which takes no None for an empty list and refuses only after the call.
    """

    def autograd(*arguments: Any) -> Any:
        is_recorded = torch.is_grad_enabled() and any(x.requires_grad for x in _tensors(arguments))
        return (record if is_recorded else plain)(*arguments)

    traced.override(name, autograd, "Autograd")


def _tensors(arguments: Sequence[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for given in arguments:
        if isinstance(given, Tensor):
            found.append(given)
        elif isinstance(given, list):
            found += [x for x in given if isinstance(x, Tensor)]
    return found


def _run_or_dispatch(op: str, a: Tensor, b: Tensor, tensors: list[Tensor] | None, *rest: Any) -> Any:
    """Run fused_gemm. Only where something else listens does PyTorch dispatch again, which takes long."""
    given = (a, b, *tensors) if tensors else (a, b)
    if watching.is_watched() or not all(map(_is_memory, given)):
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.cutlass_ops.fused_gemm.default(op, a, b, tensors, *rest)
    return traced.run(op, a, b, tensors, *rest)  # type: ignore[no-untyped-call]


def _is_memory(x: Tensor) -> bool:
    return type(x) in (Tensor, Parameter) and not x.is_meta and not torch._is_functional_tensor(x)


def _late_and_recorded(schema: str, module: str) -> None:
    """Register an operator that autograd records: `plain` is without gradients, `record` with them."""
    name = schema.partition("(")[0]
    plain = _late(module, "plain")
    traced.declare(schema, plain, _late(module, "shapes"))
    _recorded(name, _late(module, "record"), plain)
    traced.override(name, traced.refuse_vmap, "FuncTorchBatched")


_recorded("fused_gemm", _late("recorded", "record"), _run_or_dispatch)
_late_and_recorded(
    f"fused_gemm_grad({traced.ARGUMENTS}, ScalarType? out_dtype, bool recompute=False) -> Tensor[]", "recorded"
)
_late_and_recorded(
    "fused_chain_grad(str first, str second, Tensor a, Tensor b1, Tensor b2, Tensor[] inputs1, Tensor[] inputs2, "
    "ScalarType? out_dtype) -> Tensor",
    "chained",
)

_QUANTIZED = "Tensor x, str dtype, int? block"
traced.declare(f"quantize({_QUANTIZED}) -> (Tensor, Tensor)", _late("quantizing", "run"), _late("quantizing", "shapes"))
traced.declare(
    f"quantize_out({_QUANTIZED}, Tensor(a!) d, Tensor(b!) scale) -> ()",
    _late("quantizing", "run_out"),
    lambda *_: None,
)
for _name in ("quantize", "quantize_out"):
    traced.override(_name, traced.refuse_vmap, "FuncTorchBatched")

traced.declare(
    "fold(Tensor w, Tensor gamma, str name) -> Tensor",
    _late("folding", "fold_checked"),
    _late("folding", "folded_shape"),
)
traced.declare(
    "column_sums(Tensor matrix) -> Tensor",
    _late("folding", "column_sums_checked"),
    _late("folding", "a_value_a_column"),
)
traced.declare(
    "row_times(str name, Tensor row, Tensor w) -> Tensor",
    _late("folding", "row_times_checked"),
    _late("folding", "row_times_shape"),
)
