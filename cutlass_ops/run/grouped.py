"""Grouped GEMMs: groups of rows, each multiplied by a weight of its own, as in mixtures of experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from cutlass_ops.base.mma import Math
from cutlass_ops.declare.form import GROUPED
from cutlass_ops.epilogue import Epilogue
from cutlass_ops.epilogue.graph import Graph
from cutlass_ops.run import groups, traced
from cutlass_ops.run.call import Call, check_call
from cutlass_ops.run.ops import Op, op_of
from cutlass_ops.run.requests import prepared_by


class GroupedOp(Op):
    """An epilogue of a grouped GEMM: called as ``op(x, w, offsets, *inputs)``."""

    form = GROUPED

    def __init__(self, epilogue: Epilogue) -> None:
        groups.require(epilogue.graph)
        super().__init__("grouped_gemm", epilogue, made_by=("grouped", epilogue.graph.to_json()))

    def checked_call(  # noqa: D102
        self, a: Any, b: Any, inputs: Sequence[Any], out: Any, out_dtype: torch.dtype | None = None
    ) -> Call:
        offsets, *others = inputs
        named = dict(zip(self.names[1:], others, strict=True))
        return check_call(self.graph, a, b, named, out, out_dtype, offsets=offsets)

    def in_math(self, math: Math) -> NoReturn:
        """Refuse FP32 operands.

        Raises
        ------
        TypeError
            Always.
        """
        raise TypeError(f"{self.name} takes no math: groups of rows are multiplied in 16 bits")

    def of(self, graph: Graph) -> NoReturn:
        """Refuse gradients.

        Raises
        ------
        NotImplementedError
            Always.
        """
        raise NotImplementedError(traced.NO_GROUPED_GRADIENT.format("an argument"))


@traced.remembered
def grouped_op(epilogue: Epilogue | None = None) -> GroupedOp:
    """Return the op behind :func:`grouped_gemm`. It takes (x, w, offsets, *inputs).

    Raises
    ------
    TypeError, ValueError
        If `epilogue` is not an epilogue, or has no meaning for groups.
    """
    return GroupedOp(op_of(epilogue).epilogue)


def op_again(name: str, plain: Any) -> GroupedOp:
    """Make an op again from what :class:`GroupedOp` registers: see ``traced.MAKERS``."""
    return GroupedOp(Epilogue.of(name, "", Graph.from_json(plain)))


def _prepare(x: Tensor, w: Tensor, offsets: Tensor, epilogue: Epilogue | None) -> tuple[Op, tuple[Any, ...]]:
    return grouped_op(epilogue), (x, w, offsets)


@prepared_by(_prepare)
def grouped_gemm(
    x: Tensor,
    w: Tensor,
    offsets: Tensor,
    *,
    epilogue: Epilogue | None = None,
    out: Any = None,
    out_dtype: torch.dtype | None = None,
    **inputs: Any,
) -> Any:
    """Multiply groups of rows by a weight each, in one kernel: D[rows of e] = epilogue(x[rows of e] @ w[e], inputs).

    Expert e has the rows from ``offsets[e - 1]``, or 0 for the first, up to ``offsets[e]``. Only the kernel reads
    offsets: the call does not wait for the device, and in a CUDA graph they may change from one replay to the next. An
    expert may have no rows. Rows from ``offsets[-1]`` on belong to no expert, and are not written.

    On the device, offsets that fall, are negative or above T give wrong rows, but no access outside of the tensors. On
    the CPU they are an error.

    Parameters
    ----------
    x : Tensor
        (T, K), FP16 or BF16, row-major. Rows begin at multiples of 16 bytes: K is a multiple of 8, or rows are padded.
    w : Tensor
        (E, K, N), the same dtype, either major, any stride between experts, lines at multiples of 16 bytes. Pass
        weights of shape (E, N, K) as ``weights.mT``.
    offsets : Tensor
        (E,), INT32, on the device of x: the row at which each expert's rows end, as
        ``torch.cumsum(rows_of_each, 0, dtype=torch.int32)`` has it.
    epilogue : Epilogue, optional
        A function decorated with :func:`cutlass_ops.epilogue`; by default D = x @ w. It does not reduce D.
        ``row_index()`` counts from the first row of the expert.
    out : Tensor or mapping of str to Tensor, optional
        Where to write D, or the outputs by name: (T, N), row-major.
    out_dtype : torch.dtype, optional
        D's dtype, FP16, BF16 or FP32, or FP8, which saturates; by default that of ``x``.
    **inputs
        The epilogue's inputs by name: Row (E, N), a row for each expert, or (N,) for all; Col (T,); Tile (T, N);
        Product (E, K, N), a further weight for each expert; Scalar a number or 0-d tensor; Integer an int or a 0-d
        tensor.

    Returns
    -------
    Tensor or named tuple
        D (T, N), or all outputs with D first. Rows of no expert are what a new tensor has: anything.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit. The message names it and says what to do.
    UnsupportedError
        If the device is not of compute capability 9.0 (Hopper).
    NotImplementedError
        If an argument requires grad.
    MissingKernelError, CompileError, ToolchainError, StoreError, LoadError
        If the kernel cannot be compiled, stored or loaded.

    Examples
    --------
    >>> x, weights = torch.ones(5, 8).bfloat16(), torch.ones(2, 3, 8).bfloat16()  # (T, K), and (E, N, K)
    >>> offsets = torch.tensor([2, 5], dtype=torch.int32)  # rows 0 and 1 are the first expert's
    >>> @co.epilogue
    ... def biased(acc, bias: co.Row, weight: co.Col):
    ...     return (acc + bias) * weight
    >>> bias = torch.tensor([[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]]).bfloat16()  # a row for each expert
    >>> weight = torch.tensor([1.0, 0.5, 1.0, 1.0, 2.0])  # of each row, as a router gives it
    >>> co.grouped_gemm(x, weights.mT, offsets, epilogue=biased, bias=bias, weight=weight)[:, 0].tolist()
    [8.0, 4.0, 9.0, 9.0, 18.0]
    """
    return grouped_op(epilogue)(x, w, offsets, out=out, out_dtype=out_dtype, **inputs)
