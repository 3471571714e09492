"""Grouped GEMMs, as in mixtures of experts: groups of rows, each multiplied by a weight of its own or by a gradient."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cutlass_ops.base.mma import ACCUMULATIONS, Math
from cutlass_ops.declare.form import GROUPED, MASKED, RAGGED_K
from cutlass_ops.epilogue import Epilogue
from cutlass_ops.epilogue.graph import Graph
from cutlass_ops.run import groups, traced
from cutlass_ops.run.call import Call, check_call
from cutlass_ops.run.ops import Op, op_of
from cutlass_ops.run.requests import prepared_by


class _OfGroups(Op):
    """The base of ops with groups, whose ends they take before the epilogue's inputs.

    Attributes
    ----------
    how : str
        What makes the op again: a key of ``portable.MAKERS``.
    no_gradient : str
        Why there is no op of a gradient, and what to do.
    """

    how: str
    no_gradient: str

    def __init__(self, epilogue: Epilogue, math: Math | None = None) -> None:
        groups.require(epilogue.graph, self.form)
        made_by = (self.how, self._plain(epilogue.graph))
        super().__init__(groups.FUNCTIONS[self.form.name], epilogue, made_by=made_by, math=math)

    def _plain(self, graph: Graph) -> Any:
        return graph.to_json()

    @classmethod
    def again(cls, name: str, plain: Any) -> _OfGroups:
        """Make an op again from what it registers: see ``portable.MAKERS``."""
        return cls(Epilogue.of(name, "", Graph.from_json(plain)))

    def checked_call(
        self, a: Any, b: Any, inputs: Sequence[Any], out: Any, out_dtype: torch.dtype | None = None
    ) -> Call:
        offsets, *others = inputs
        named = dict(zip(self.names[1:], others, strict=True))
        return check_call(self.graph, a, b, named, out, out_dtype, offsets=offsets, math=self.math, form=self.form)

    def made_in_math(self, math: Math, made_by: tuple[str, Any]) -> _OfGroups:
        """Return a new op like this one, that adds up FP8 products in a way.

        Raises
        ------
        TypeError
            If `math` is no such way, or nothing here is in FP8.
        """
        if self.form == RAGGED_K:
            raise TypeError(f"{self.name} takes no math: its operands have 16 bits")
        if math not in ACCUMULATIONS:
            raise TypeError(f"math is {math!r}, and {self.name} takes {' or '.join(map(repr, ACCUMULATIONS))}, for FP8")
        return self._in_math(math)

    def _in_math(self, math: Math) -> _OfGroups:
        return type(self)(self.epilogue, math)

    def of(self, graph: Graph) -> _OfGroups:
        """Return the op of a gradient.

        Raises
        ------
        NotImplementedError
            If there is none.
        """
        raise NotImplementedError(self.no_gradient)


class GroupedOp(_OfGroups):
    """An epilogue of a grouped GEMM: called as ``op(x, w, offsets, *inputs)``."""

    form, how = GROUPED, "grouped"

    def of(self, graph: Graph) -> _OfGroups:  # noqa: D102
        return _op_of(GroupedOp, graph)

    def of_weights(self, graph: Graph) -> _OfGroups:  # noqa: D102
        return _op_of(WgradOp, graph)


class MaskedOp(_OfGroups):
    """An epilogue of groups with room for as many rows each: called as ``op(x, w, counts, *inputs)``.

    Parameters
    ----------
    epilogue : Epilogue
        The epilogue.
    expected : int
        The rows that a group is expected to have, for which kernels are chosen; 0 if nobody says.
    """

    form, how = MASKED, "masked"
    no_gradient = (
        "grouped_gemm_masked has no gradient: call it under torch.no_grad(), or sort rows by expert and call "
        "grouped_gemm, which has one"
    )

    def __init__(self, epilogue: Epilogue, expected: int = 0, math: Math | None = None) -> None:
        self.expected = expected
        super().__init__(epilogue, math)

    def _in_math(self, math: Math) -> MaskedOp:
        return MaskedOp(self.epilogue, self.expected, math)

    def _plain(self, graph: Graph) -> Any:
        return [self.expected, graph.to_json()]

    @classmethod
    def again(cls, name: str, plain: Any) -> MaskedOp:  # noqa: D102
        expected, graph = plain
        return cls(Epilogue.of(name, "", Graph.from_json(graph)), expected)

    def checked_call(  # noqa: D102
        self, a: Any, b: Any, inputs: Sequence[Any], out: Any, out_dtype: torch.dtype | None = None
    ) -> Call:
        call = super().checked_call(a, b, inputs, out, out_dtype)
        return call._replace(arguments=call.arguments._replace(expected=self.expected))


class WgradOp(_OfGroups):
    """An epilogue of the products of each group's rows: called as ``op(x.mT, gradient, offsets, *inputs)``."""

    form, how = RAGGED_K, "wgrad"
    no_gradient = traced.NO_SECOND_GRADIENT.format("an argument")


@functools.lru_cache(maxsize=1024)
def _op_of(kind: type[_OfGroups], graph: Graph) -> _OfGroups:
    """Return the op of a graph. Equal graphs give the same op."""
    return kind(Epilogue.of(graph.title or "identity", "", graph))


@traced.remembered
def grouped_op(epilogue: Epilogue | None = None) -> GroupedOp:
    """Return the op behind :func:`grouped_gemm`. It takes (x, w, offsets, *inputs).

    Raises
    ------
    TypeError, ValueError
        If `epilogue` is not an epilogue, or has no meaning for groups.
    """
    return GroupedOp(op_of(epilogue).epilogue)


@traced.remembered
def masked_op(epilogue: Epilogue | None = None, expected_rows: int | None = None) -> MaskedOp:
    """Return the op behind :func:`grouped_gemm_masked`. It takes (x, w, counts, *inputs).

    Raises
    ------
    TypeError, ValueError
        If `epilogue` is not an epilogue, or has no meaning for groups, or `expected_rows` is no positive int.
    """
    return masked_op_of(op_of(epilogue).epilogue, groups.expected(expected_rows))


@functools.lru_cache(maxsize=1024)
def masked_op_of(epilogue: Epilogue, expected: int) -> MaskedOp:
    """Return the op of an epilogue: one for numbers of rows that are expected near each other."""
    return MaskedOp(epilogue, expected)


@traced.remembered
def wgrad_op(epilogue: Epilogue | None = None) -> WgradOp:
    """Return the op behind :func:`grouped_gemm_wgrad`. It takes (x.mT, gradient, offsets, *inputs).

    Raises
    ------
    TypeError, ValueError
        If `epilogue` is not an epilogue, or has no meaning for groups.
    """
    return WgradOp(op_of(epilogue).epilogue)


@prepared_by(lambda x, w, offsets, epilogue: (grouped_op(epilogue), (x, w, offsets)))
def grouped_gemm(
    x: Tensor,
    w: Tensor,
    offsets: Tensor,
    *,
    epilogue: Epilogue | None = None,
    out: Any = None,
    out_dtype: torch.dtype | None = None,
    math: Math | None = None,
    **inputs: Any,
) -> Any:
    """Compute D[rows of e] = epilogue(x[rows of e] @ w[e], inputs) for each expert e, in one kernel.

    Expert e has the rows from ``offsets[e - 1]`` (0 for the first expert) up to ``offsets[e]``, and may have none. Only
    the kernel reads the offsets: the call does not wait for the device, and in a CUDA graph they may change from one
    replay to the next. Rows from ``offsets[-1]`` on belong to no expert, and are not written.

    Offsets that decrease, are negative or exceed T give wrong rows on a GPU, but no access outside the tensors. On the
    CPU they are an error.

    Parameters
    ----------
    x : Tensor
        (T, K), FP16, BF16 or FP8, row-major. Rows begin at multiples of 16 bytes: K is a multiple of 8 (16 for FP8), or
        rows are padded. :func:`scaled_grouped_gemm` applies FP8 scales.
    w : Tensor
        (E, K, N), the same dtype, either major (FP8: contiguous along K), with any stride between experts. Lines begin
        at multiples of 16 bytes. Pass weights (E, N, K) as ``weights.mT``.
    offsets : Tensor
        (E,), INT32, on the device of x: the row at which each expert's rows end, as given by
        ``torch.cumsum(rows_of_each, 0, dtype=torch.int32)``.
    epilogue : Epilogue, optional
        A function decorated with :func:`cutlass_ops.epilogue`, without reductions. Default: D = x @ w. ``row_index()``
        counts from the first row of the expert.
    out : Tensor or mapping of str to Tensor, optional
        Where to write D, or the outputs by name: (T, N), row-major.
    out_dtype : torch.dtype, optional
        D's dtype: FP16, BF16, FP32, or FP8, which saturates. Default: that of ``x``, or BF16 for FP8.
    math : {"fast", "promoted"}, optional
        How FP8 products are added up, as for :func:`gemm`.
    **inputs
        The epilogue's inputs by name: Row (E, N), one for each expert, or (N,) for all; Col (T,); Tile (T, N); Product
        (E, K, N), a second weight for each expert; Scalar a number or a tensor of one element.

    Returns
    -------
    Tensor or named tuple
        D (T, N), or all outputs with D first. Rows that belong to no expert are uninitialised.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit. The message names it and says what to do.
    UnsupportedError
        If the device is not of compute capability 9.0 (Hopper).
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
    return grouped_op(epilogue)(x, w, offsets, out=out, out_dtype=out_dtype, math=math, **inputs)


@prepared_by(lambda x, w, counts, epilogue, expected_rows: (masked_op(epilogue, expected_rows), (x, w, counts)))
def grouped_gemm_masked(
    x: Tensor,
    w: Tensor,
    counts: Tensor,
    *,
    epilogue: Epilogue | None = None,
    expected_rows: int | None = None,
    out: Any = None,
    out_dtype: torch.dtype | None = None,
    math: Math | None = None,
    **inputs: Any,
) -> Any:
    """Compute D[e, rows] = epilogue(x[e, rows] @ w[e], inputs) for the used rows of each group e, in one kernel.

    Each group has room for M rows, like an expert with a fixed capacity. The first ``counts[e]`` rows are used; the
    others are neither computed nor written. Only the kernel reads the counts: the call does not wait for the device,
    and in a CUDA graph they may change from one replay to the next. The kernels are those of :func:`grouped_gemm`.

    On a GPU, counts below 0 count as 0 and counts above M as M: nothing outside the tensors is accessed. On the CPU
    they are an error.

    Parameters
    ----------
    x : Tensor
        (E, M, K), FP16, BF16 or FP8. Rows are contiguous and begin at multiples of 16 bytes. One stride leads through
        the rows of all groups. :func:`scaled_grouped_gemm_masked` applies FP8 scales.
    w : Tensor
        (E, K, N), the same dtype, as for :func:`grouped_gemm`.
    counts : Tensor
        (E,), INT32, on the device of x: the number of used rows of each group, from 0 to M.
    epilogue : Epilogue, optional
        A function decorated with :func:`cutlass_ops.epilogue`, without reductions. Default: D = x @ w. ``row_index()``
        counts from the first row of the group.
    expected_rows : int, optional
        The mean number of used rows that you expect. It decides which kernel runs, and changes no result. By default,
        groups are assumed to be full, so tiles are too large if groups have few rows.
    out : Tensor or mapping of str to Tensor, optional
        Where to write D, or the outputs by name: (E, M, N), row-major, with one stride through the rows of all groups.
    out_dtype : torch.dtype, optional
        D's dtype: FP16, BF16, FP32, or FP8, which saturates. Default: that of ``x``, or BF16 for FP8.
    math : {"fast", "promoted"}, optional
        How FP8 products are added up, as for :func:`gemm`.
    **inputs
        The epilogue's inputs by name: Row (E, N), one for each group, or (N,) for all; Col (E, M); Tile (E, M, N);
        Product (E, K, N), a second weight for each group; Scalar a number or a tensor of one element.

    Returns
    -------
    Tensor or named tuple
        D (E, M, N), or all outputs with D first. Rows from a group's count on are uninitialised.

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
    >>> x, weights = torch.ones(2, 3, 8).bfloat16(), torch.ones(2, 5, 8).bfloat16()  # (E, M, K), and (E, N, K)
    >>> counts = torch.tensor([1, 3], dtype=torch.int32)  # the first group has one row of three
    >>> d = co.grouped_gemm_masked(x, weights.mT, counts, expected_rows=2, out=torch.zeros(2, 3, 5).bfloat16())
    >>> d[..., 0].tolist()
    [[8.0, 0.0, 0.0], [8.0, 8.0, 8.0]]
    """
    op = masked_op(epilogue, groups.settled(expected_rows))
    return op(x, w, counts, out=out, out_dtype=out_dtype, math=math, **inputs)


def _transposed(x: Any) -> Any:
    """Return A for x. What is no matrix, the call refuses."""
    return x.mT if isinstance(x, Tensor) and x.ndim == 2 else x


@prepared_by(lambda x, gradient, offsets, epilogue: (wgrad_op(epilogue), (_transposed(x), gradient, offsets)))
def grouped_gemm_wgrad(
    x: Tensor,
    gradient: Tensor,
    offsets: Tensor,
    *,
    epilogue: Epilogue | None = None,
    out: Any = None,
    out_dtype: torch.dtype | None = None,
    **inputs: Any,
) -> Any:
    """Compute D[e] = epilogue(x[rows of e].mT @ gradient[rows of e], inputs) for each expert, in one kernel.

    This is the gradient of the weights of :func:`grouped_gemm`, with groups as described there. For an expert without
    rows, the epilogue gets zeros. Rows from ``offsets[-1]`` on belong to no group, and no result depends on them.
    Offsets that decrease, are negative or exceed T give wrong matrices on a GPU, but no access outside the tensors.

    Parameters
    ----------
    x : Tensor
        (T, K), FP16 or BF16, row-major. Rows begin at multiples of 16 bytes: K is a multiple of 8, or rows are padded.
    gradient : Tensor
        (T, N), the same dtype and row-major, with the same alignment of rows.
    offsets : Tensor
        (E,), INT32, on the device of x: the row at which each expert's rows end.
    epilogue : Epilogue, optional
        A function decorated with :func:`cutlass_ops.epilogue`. Default: D[e] is the product itself.
    out : Tensor or mapping of str to Tensor, optional
        Where to write D, or the outputs by name: (E, K, N), any stride between experts.
    out_dtype : torch.dtype, optional
        D's dtype: FP16, BF16, FP32, or FP8, which saturates. Default: that of ``x``.
    **inputs
        The epilogue's inputs by name: Row (N,), Col (K,) or Tile (K, N) for all experts, or each with a first dimension
        of E; Scalar a number or a tensor of one element.

    Returns
    -------
    Tensor or named tuple
        D (E, K, N), or all outputs with D first.

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
    >>> x, gradient = torch.ones(5, 8).bfloat16(), torch.ones(5, 8).bfloat16()  # (T, K), (T, N)
    >>> offsets = torch.tensor([2, 2, 5], dtype=torch.int32)  # the second expert has no rows
    >>> co.grouped_gemm_wgrad(x, gradient, offsets)[:, 0, 0].tolist()
    [2.0, 0.0, 3.0]

    Add to an existing gradient, in place:

    >>> @co.epilogue
    ... def accumulate(acc, before: co.Tile):
    ...     return acc + before
    >>> total = torch.ones(3, 8, 8)
    >>> found = co.grouped_gemm_wgrad(x, gradient, offsets, epilogue=accumulate, before=total, out=total)
    >>> total[:, 0, 0].tolist()
    [3.0, 1.0, 4.0]
    """
    return wgrad_op(epilogue)(_transposed(x), gradient, offsets, out=out, out_dtype=out_dtype, **inputs)
