"""Operators whose code is imported with their first call: most programs need none of them.

They are registered at once, since compiled and saved programs name them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from cutlass_ops.run import traced


def _late(module: str, name: str) -> Callable[..., Any]:
    def function(*arguments: Any) -> Any:
        return getattr(importlib.import_module(f"cutlass_ops.run.{module}"), name)(*arguments)

    return function


def _recorded(schema: str, module: str) -> None:
    """Register an operator that autograd records: `plain` is without gradients, `record` with them."""
    name = schema.partition("(")[0]
    traced.declare(schema, _late(module, "plain"), _late(module, "shapes"))
    # Not by torch.library.register_autograd, which takes no None for an empty list and refuses only after the call.
    traced.override(name, _late(module, "record"), "Autograd")
    traced.override(name, traced.refuse_vmap, "FuncTorchBatched")


_recorded(f"fused_gemm_grad({traced.ARGUMENTS}, ScalarType? out_dtype, bool recompute=False) -> Tensor[]", "recorded")
_recorded(
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
