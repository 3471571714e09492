"""The operators that autograd records. What they do is imported with the first gradient: most programs have none.

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


def _register(name: str, arguments: str, module: str) -> None:
    """Register an operator whose module has `plain` (without gradients), `shapes` and `record` (with gradients)."""
    traced.declare(f"{name}({arguments}", _late(module, "plain"), _late(module, "shapes"))
    # Not by torch.library.register_autograd, which takes no None for an empty list and refuses only after the call.
    traced.override(name, _late(module, "record"), "Autograd")
    traced.override(name, traced.refuse_vmap, "FuncTorchBatched")


_register(
    "fused_gemm_grad", f"{traced.ARGUMENTS}, ScalarType? out_dtype, bool recompute=False) -> Tensor[]", "recorded"
)
_register(
    "fused_chain_grad",
    "str first, str second, Tensor a, Tensor b1, Tensor b2, Tensor[] inputs1, Tensor[] inputs2, ScalarType? out_dtype) "
    "-> Tensor",
    "chained",
)
