"""The operations that PyTorch's counter FlopCounterMode counts for the operators."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from cutlass_ops.declare.form import RAGGED_K
from cutlass_ops.run import portable

_COUNTER = "torch.utils.flop_counter"


def count() -> None:
    """Register the counts once the counter is imported. To import it here would import Triton as well."""
    counter: Any = sys.modules.get(_COUNTER)
    if counter is None:
        return
    operators = [torch.ops.cutlass_ops.fused_gemm, torch.ops.cutlass_ops.fused_gemm_out]
    if operators[0] not in counter.flop_registry:
        counter.register_flop_formula(operators)(of_call)
    # An active counter has already copied the registered counts.
    for mode in _get_current_dispatch_mode_stack():
        its = getattr(getattr(mode, "counter", None), "flop_registry", {})
        if operators[0] not in its:
            its.update({each: counter.flop_registry[each] for each in operators})


def of_call(op: str, a: Sequence[int], b: Sequence[int], *_: Any, **__: Any) -> int:
    """Return the operations of a call's products, from A's and B's shapes: two for each multiplication.

    The epilogue does not count, as with PyTorch's own operators. If groups have room for more rows than they have, all
    rows count.
    """
    called = portable.find(op)
    k, n = b[-2:]
    lead = math.prod(a[:-1])
    if not called.form.operands and len(b) > 2:
        lead = math.prod(torch.broadcast_shapes(tuple(a[:-2]), tuple(b[:-2]))) * a[-2]  # type: ignore[no-untyped-call]
    if called.form == RAGGED_K:
        lead = a[-2]
    return 2 * lead * k * n * (1 + len(called.graph.products))
