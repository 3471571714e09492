"""Calls that autograd records and PyTorch's operators serve, forward and backward, as a user would write them.

These are small calls, of which a step takes the host longer than the GPU: a backward in Python then loses more time
than its kernels win (benchmarks/NOTES.md, "Calls"). And they are large ones until the kernels of their step are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cutlass_ops.base import env
from cutlass_ops.declare.form import DENSE
from cutlass_ops.epilogue.nodes import Kind
from cutlass_ops.operand import watching
from cutlass_ops.run import traced
from cutlass_ops.run.gathering import awaits, is_gathering
from cutlass_ops.run.portable import Portable

# Multiplications of a GEMM up to which PyTorch's own step is quicker.
LITTLE = 1 << 35
_MOST_KNOWN = 4096
_KINDS = (Kind.ROW, Kind.COL, Kind.TILE)


def on_gpu(x: Tensor) -> bool:
    """Whether a call with x runs on a GPU."""
    return x.is_cuda


def is_recorded_by_pytorch(x: Tensor, *weights: Tensor, of: object = None) -> bool:
    """Whether PyTorch's operators compute products of x (..., K) and matrices, and autograd records these.

    They do in steps that take the host longer than the GPU, and as long as kernels of a step are missed. A graph has no
    host, and a compiled program little of it. Only a kernel adds to ``main_grad``. A region that is warmed up may be
    captured later. `of` says which of several ops with such matrices it is.
    """
    if not on_gpu(x) or not torch.is_grad_enabled() or torch.compiler.is_dynamo_compiling():
        return False
    rows, largest, differentiated = x.numel() // max(x.shape[-1] if x.ndim else 1, 1), 0, x.requires_grad
    for w in weights:
        base = w._base
        if getattr(w if base is None else base, "main_grad", None) is not None:
            return False
        largest = max(largest, rows * w.numel())
        differentiated = differentiated or w.requires_grad
    if not differentiated or watching.is_watched() or traced.is_recomputing() or is_gathering():
        return False
    if torch.are_deterministic_algorithms_enabled() or not env.stand_in():
        return False
    if torch.cuda.is_current_stream_capturing():
        return False
    if largest <= LITTLE:
        return True
    # A checkpoint records twice, and must save the same each time, whatever came meanwhile.
    step = of, rows, x.dtype, x.requires_grad, *[(w.shape, w.requires_grad) for w in weights]
    return not has_saving_hooks() and awaits(step)


def has_saving_hooks() -> bool:
    """Whether what autograd saves now passes through hooks, which may keep it, or compute it again."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


class Plain:
    """A dense op by PyTorch's operators, for calls with tensors of shapes that were checked once."""

    __slots__ = ("_known", "called", "out_dtype")

    def __init__(self, called: Portable, out_dtype: torch.dtype | None) -> None:
        self.called, self.out_dtype = called, out_dtype
        # By the shapes, dtypes and devices of a call: what computes it, and the shapes that it takes.
        self._known: dict[Any, Any] = {}

    def __call__(self, a: Tensor, b: Tensor, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the results as autograd records them. Raises the errors of the op."""
        key = tuple([(x.shape, x.dtype, x.get_device()) for x in (a, b, *inputs)])
        if key not in self._known:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[key] = self._made(a, b, inputs)
        compute, shapes = self._known[key]
        self.called.served_by_pytorch += 1  # type: ignore[attr-defined]
        flat = [x if shape is None else x.reshape(shape) for x, shape in zip((a, b, *inputs), shapes, strict=True)]
        (d,) = compute(flat[0], flat[1], flat[2:])
        return (d if a.ndim == 2 else d.reshape(*a.shape[:-1], d.shape[-1]),)

    def _made(self, a: Tensor, b: Tensor, inputs: Sequence[Tensor]) -> Any:
        from cutlass_ops.run.composition import Composition  # late: few calls need it

        call = self.called.checked_call(a, b, inputs, None, self.out_dtype)  # type: ignore[attr-defined]
        read = call.arguments
        as_given = zip((read.a, read.b, *read.inputs.values()), (a, b, *inputs), strict=True)
        return Composition.of(call), [None if x.shape == y.shape else x.shape for x, y in as_given]


def plain(called: Portable, out_dtype: torch.dtype | None, a: Tensor) -> Plain | None:
    """Return an op by PyTorch's operators; None unless it is dense, returns D alone, and takes tensors alone."""
    graph = called.graph
    usual = called.form is DENSE and len(graph.outputs) == 1 and all(i.kind in _KINDS for i in graph.inputs)
    if not usual or graph.gathered or graph.knows_places or a.dtype not in (torch.float16, torch.bfloat16):
        return None
    if out_dtype is not None and out_dtype != a.dtype:  # PyTorch's product with another dtype has no derivative
        return None
    return Plain(called, out_dtype) if hasattr(called, "checked_call") else None
