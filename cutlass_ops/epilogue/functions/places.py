"""Where an element of D is, and the random number of its place."""

from __future__ import annotations

from cutlass_ops.epilogue.values import Value, apply


def row_index() -> Value:
    """Return the row of D, counted from 0, as a 32-bit integer.

    If leading dimensions of A are folded into its rows, the folded rows are counted. ``+``, ``-``, ``*`` and
    comparisons of indices, with each other and with Python ints, are exact. Other operations convert an index to FP32.

    Examples
    --------
    >>> @co.epilogue
    ... def causal(acc):
    ...     return co.e.where(co.e.column_index() <= co.e.row_index(), acc, 0.0)
    >>> a, b = torch.ones(2, 8).bfloat16(), torch.ones(8, 3).bfloat16()
    >>> co.gemm(a, b, epilogue=causal).tolist()
    [[8.0, 0.0, 0.0], [8.0, 8.0, 0.0]]
    """
    return apply("row_index")


def column_index() -> Value:
    """Return the column of D, counted from 0, as a 32-bit integer; see :func:`row_index`.

    Examples
    --------
    >>> @co.epilogue
    ... def sloped(acc, slope: co.Scalar):
    ...     return acc + slope * co.e.column_index()
    >>> a, b = torch.zeros(1, 8).bfloat16(), torch.zeros(8, 3).bfloat16()
    >>> co.gemm(a, b, epilogue=sloped, slope=0.5).tolist()
    [[0.0, 0.5, 1.0]]
    """
    return apply("column_index")


def uniform(seed: Value | int, offset: Value | int = 0) -> Value:
    """Return a random number in [0, 1) for each element of D: a multiple of 2⁻²⁴.

    It depends only on the seed, the offset and the position: it is a word of Philox 4x32-10. The key is the seed. The
    counter is the column and the row, each without bit 3, and the low and the high half of the offset. Bit 3 of the row
    and of the column select the word. :func:`cutlass_ops.operand.reference.uniform` gives the same bits.

    Raises
    ------
    EpilogueError
        If the seed or the offset is neither a parameter annotated :class:`cutlass_ops.Integer` nor a Python int of 64
        bits.

    Examples
    --------
    >>> @co.epilogue
    ... def noisy(acc, seed: co.Integer):
    ...     return acc + co.e.uniform(seed)
    >>> a, b = torch.zeros(1, 8).bfloat16(), torch.zeros(8, 2).bfloat16()
    >>> co.gemm(a, b, epilogue=noisy, seed=1, out_dtype=torch.float32).tolist()
    [[...]]
    """
    return apply("uniform", seed, offset)


def dropout_mask(p: Value | float, seed: Value | int, offset: Value | int = 0) -> Value:
    """Return whether dropout keeps an element: whether :func:`uniform` is p or more. The probability of this is 1 − p.

    For the same seed, torch.nn.functional.dropout has another mask: it depends on how PyTorch launches its kernel.

    Raises
    ------
    EpilogueError
        If the seed or the offset is neither a parameter annotated :class:`cutlass_ops.Integer` nor a Python int of 64
        bits.

    Examples
    --------
    >>> @co.epilogue
    ... def dropped(acc, residual: co.Tile, seed: co.Integer):
    ...     return co.e.where(co.e.dropout_mask(0.25, seed), acc / 0.75, 0.0) + residual
    >>> a, b = torch.ones(4, 8).bfloat16(), torch.ones(8, 4).bfloat16()
    >>> d = co.gemm(a, b, epilogue=dropped, residual=torch.zeros(4, 4), seed=3, out_dtype=torch.float32)
    >>> sorted(set(d.flatten().tolist()))
    [0.0, 10.666666984558105]
    """
    return apply("ge", uniform(seed, offset), p)
