"""Epilogues that ops put together with others: norms of A's rows, gates, scales, and results in FP8.

Their ops are in the modules of ``run`` for norms, gates and scales, and they come when one of these does.
"""

from __future__ import annotations

import functools

from cutlass_ops.epilogue import (
    Col,
    Epilogue,
    Product,
    Row,
    Scalar,
    Tile,
    amax,
    builtin,
    cast,
    epilogue,
    maximum,
    mean_of_a,
    mean_square_of_a,
    quantize,
    reciprocal,
    rsqrt,
    silu,
    sum_square,
)
from cutlass_ops.epilogue.graph import Graph
from cutlass_ops.epilogue.nodes import Input, Kind, Node, Output

# ---- Norms of A's rows, and what follows and precedes them ---------------------------------------------------------


@epilogue
def rms_norm(acc, eps: Scalar):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """D = rmsnorm(A) @ B."""
    return acc * rsqrt(mean_square_of_a() + eps)


@epilogue
def rms_norm_of_sums(acc, row_sum_square: Col, inverse_count: Scalar, eps: Scalar):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """D = rmsnorm(A) @ B, given the sum of squares of each row of A."""
    return acc * rsqrt(row_sum_square * inverse_count + eps)


@epilogue
def rms_norm_of_rstd(acc, rstd: Col):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """D = rmsnorm(A) @ B, given the factor of each row of A."""
    return acc * rstd


@epilogue
def layer_norm(acc, column_sum: Row, eps: Scalar):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """D = layernorm(A) @ B, given the sum of each column of B."""
    mean = mean_of_a()
    variance = maximum(mean_square_of_a() - mean * mean, 0.0)
    return (acc - mean * column_sum) * rsqrt(variance + eps)


@epilogue
def layer_norm_of_moments(acc, column_sum: Row, mean: Col, rstd: Col):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """D = layernorm(A) @ B, given the sum of each column of B, and mean and 1 / deviation of each row of A."""
    return (acc - mean * column_sum) * rstd


@epilogue
def shifted(acc, shift: Row):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """D = A @ B + shift: a layer norm's beta becomes the shift."""
    return acc + shift


@epilogue
def residual_rms_bf16(acc, residual: Tile):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """D = A @ B + residual in BF16, and the sum of squares of each of its rows as they are stored."""
    y = cast(acc + residual, "bf16")
    return {"d": y, "row_sum_square": sum_square(y, dim=1)}


@epilogue
def residual_rms_f16(acc, residual: Tile):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """D = A @ B + residual in FP16, and the sum of squares of each of its rows as they are stored."""
    y = cast(acc + residual, "f16")
    return {"d": y, "row_sum_square": sum_square(y, dim=1)}


# The same, by D's type.
RESIDUAL_RMS: dict[str, Epilogue] = {"bf16": residual_rms_bf16, "f16": residual_rms_f16}


@epilogue
def swiglu(acc, up: Product):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """D = silu(A @ B) * (A @ up)."""
    return silu(acc) * up


@epilogue
def swiglu_gate(acc):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """D = silu(A @ B): the first of the two GEMMs that compute swiglu if no single kernel does."""
    return silu(acc)


@epilogue
def swiglu_up(acc, gate: Tile):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """D = (A @ B) * gate: the second of these GEMMs."""
    return acc * gate


# ---- The part of A's gradient that comes from its rows' means -------------------------------------------------------


@epilogue
def plus_column(acc, column: Col):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """D = A @ B + column: the gradient of a mean of A's rows reaches each of their elements alike."""
    return acc + column


@epilogue
def plus_scaled(acc, rows: Tile, factor: Col):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """D = A @ B + rows * factor: the gradient of a mean square reaches them in proportion."""
    return acc + rows * factor


# ---- Scales of A and B -----------------------------------------------------------------------------------------------


@epilogue
def scaled(acc, scale_a: Scalar, scale_b: Scalar):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """D = scale_a * scale_b * (A @ B)."""
    return acc * scale_a * scale_b


@epilogue
def scaled_rows(acc, scale_a: Col, scale_b: Scalar):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """D = scale_a * scale_b * (A @ B), with a scale for each row of A."""
    return acc * scale_a * scale_b


@epilogue
def scaled_columns(acc, scale_a: Scalar, scale_b: Row):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """D = scale_a * scale_b * (A @ B), with a scale for each column of B."""
    return acc * scale_a * scale_b


@epilogue
def scaled_rows_and_columns(acc, scale_a: Col, scale_b: Row):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """D = scale_a * scale_b * (A @ B), with a scale for each row of A and each column of B."""
    return acc * scale_a * scale_b


# The accumulator has these scales already.
scaled_blocks = Epilogue(
    "scaled_blocks",
    "D = the sum over blocks along K of scale_a * scale_b * (A @ B).",
    Graph((Input("scale_a", Kind.BLOCKS_A), Input("scale_b", Kind.BLOCKS_B)), (Node("acc"),), (Output("d", 0),)),
)

# The scaled epilogues without blocks, by whether each row of A and each column of B has a scale of its own.
SCALED: dict[tuple[bool, bool], Epilogue] = {
    (False, False): scaled,
    (True, False): scaled_rows,
    (False, True): scaled_columns,
    (True, True): scaled_rows_and_columns,
}


# ---- Results in FP8 --------------------------------------------------------------------------------------------------


@epilogue
def times_gamma(acc, gamma: Row):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """D = (A @ B) * gamma: the next norm's, which runs along its K."""
    return acc * gamma


@epilogue
def quantized_swiglu(acc, up: Product, scale_x: Col, scale_gate: Row, scale_up: Row):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """D = silu(gate) * up in FP8 with a scale for each 1x128, of operands with scales of rows and columns."""
    return quantize(silu(acc * scale_x * scale_gate) * (up * scale_x * scale_up), "e4m3")


@functools.cache
def quantised(rows: bool, with_amax: bool, element: str = "") -> Epilogue:
    """Return the epilogue D = (A @ B) / scale_out, for a D in FP8.

    Each row of D has its own scale if `rows`. With `with_amax`, ``amax`` is a further output: the greatest absolute
    value of each row before the scale. `element` is D's type if D is a further output of something else; otherwise a
    call names it.
    """
    kind = Col if rows else Scalar

    def quantised(acc, scale_out: kind):  # type: ignore[no-untyped-def, valid-type]  # noqa: ANN001, ANN202
        """D = (A @ B) / scale_out."""
        d = acc * reciprocal(scale_out)
        d = cast(d, element) if element else d
        return {"d": d, "amax": amax(acc, dim=1)} if with_amax else d

    # The tracer sees the text of an annotation, and no local name in it.
    quantised.__annotations__["scale_out"] = kind
    return epilogue(quantised)


@functools.cache
def residual_rms_quantised(dtype: str, rows: bool, with_gamma: bool, with_amax: bool, element: str) -> Graph:
    """Return the graph of a residual's sum, the squares of its rows, and its copy in FP8 for the next GEMM.

    `dtype` is D's type. `rows`, `with_amax` and `element` are as for :func:`quantised`, of the copy. With `with_gamma`,
    the copy is of D times the next norm's gamma.
    """
    copy = quantised(rows, with_amax, element).graph
    copy = times_gamma.graph.then(copy) if with_gamma else copy
    summed = builtin.residual.graph.then(_rounded(dtype).graph)
    return summed.then(_with_squares.graph.beside(copy, "quantized"))


def _rounded(dtype: str) -> Epilogue:
    def rounded(acc):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        """D = A @ B, as it is stored."""
        return cast(acc, dtype)

    return epilogue(rounded)


@epilogue
def _with_squares(acc):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """D = A @ B, and the sum of squares of each row."""
    return {"d": acc, "row_sum_square": sum_square(acc, dim=1)}
