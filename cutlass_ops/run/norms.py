"""Norms fused with the GEMM that follows: RMSNorm and LayerNorm of A's rows in the epilogue, gamma in the weight.

A norm scales A's rows by a statistic and A's columns by gamma. Gamma is folded into the weight. The statistic scales
the FP32 accumulator before rounding. docs/rmsnorm.md has the algebra and the limits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree

from cutlass_ops.base import dtypes
from cutlass_ops.epilogue import Epilogue, Graph, builtin
from cutlass_ops.run import folding, operands, traced
from cutlass_ops.run.ops import Op, graph_op, op_of, prepared_by

# Keyword arguments of this module's functions: no input of an epilogue may have these names.
_OWN = frozenset(("x", "w", "gamma", "beta", "eps", "mean", "rstd", "epilogue"))


# ---- RMSNorm -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class RowStatistic:
    """The RMSNorm statistic of a tensor's rows, computed by a GEMM's epilogue.

    Attributes
    ----------
    sum_square : Tensor
        Sum of squares of each row, FP32, (...): the tensor's shape without the last dimension.
    count : int
        Elements in a row.
    eps : float
        Added to the mean of squares, inside the square root.

    Examples
    --------
    >>> a, b = torch.ones(1, 8).bfloat16(), torch.ones(8, 4).bfloat16()
    >>> residual = torch.full((1, 4), -6.0).bfloat16()
    >>> y, rstd = co.gemm_residual_rms(a, b, residual, eps=0.0)
    >>> y.tolist()
    [[2.0, 2.0, 2.0, 2.0]]
    >>> rstd.sum_square.tolist(), rstd.count, rstd.rstd.tolist()
    ([16.0], 4, [0.5])
    """

    sum_square: Tensor
    count: int
    eps: float

    @property
    def rstd(self) -> Tensor:
        """1 / √(mean of squares + eps) of each row, FP32. Reading it launches kernels; `rmsnorm_gemm` does without."""
        return (self.sum_square / max(self.count, 1) + self.eps).rsqrt()


class ResidualRms(NamedTuple):
    """Result of :func:`gemm_residual_rms`: y (..., M, N) and the statistic of its rows.

    Examples
    --------
    >>> a, b = torch.ones(2, 8).bfloat16(), torch.ones(8, 4).bfloat16()
    >>> made = co.gemm_residual_rms(a, b, torch.zeros(2, 4).bfloat16(), eps=1e-6)
    >>> made.y.shape, made.rstd.sum_square.shape
    (torch.Size([2, 4]), torch.Size([2]))
    """

    y: Tensor
    rstd: RowStatistic


@dataclass(frozen=True, eq=False)
class PreparedWeight:
    """A weight with an RMSNorm's gamma folded in, made by :func:`prepare` for :func:`rmsnorm_gemm`.

    Attributes
    ----------
    matrix : Tensor
        diag(gamma) @ w, (K, N), in w's dtype and major. The leading dimension is a multiple of 16 bytes.

    Examples
    --------
    >>> w, gamma = torch.ones(8, 4).bfloat16(), torch.full((8,), 0.5)
    >>> co.prepare(w, gamma).matrix.shape
    torch.Size([8, 4])
    """

    matrix: Tensor


def prepare(w: Tensor, gamma: Tensor) -> PreparedWeight:
    """Fold an RMSNorm's gamma into the weight that follows it, once.

    The result takes 2·K·N bytes; w itself is no longer needed. The call reads w three times, writes it once, uses some
    tens of MiB of temporary memory and waits for the device. Each value of gamma · w is rounded once to w's dtype.

    Parameters
    ----------
    w : Tensor
        (K, N), FP16 or BF16, either major: ``weight.t()`` of a linear layer.
    gamma : Tensor
        (K,), FP16, BF16 or FP32.

    Returns
    -------
    PreparedWeight
        Pass it to :func:`rmsnorm_gemm` instead of w and gamma.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit, or w's dtype cannot hold gamma · w: it overflows, or a column loses more than one
        rounding because its values are denormal (in FP16, below 6e-5).

    Examples
    --------
    >>> x = torch.tensor([[2.0, -2.0, 2.0, -2.0]]).bfloat16()
    >>> w, gamma = torch.eye(4).bfloat16(), torch.full((4,), 0.5).bfloat16()
    >>> prepared = co.prepare(w, gamma)  # once
    >>> co.rmsnorm_gemm(x, prepared, eps=0.0).tolist()
    [[0.5, -0.5, 0.5, -0.5]]
    """
    for name, value in (("w", w), ("gamma", gamma)):
        operands.refuse_differentiated(name, value)
    folded = folding.fold(w, gamma)
    folding.check_folded(w, gamma, folded)
    return PreparedWeight(folded)


def _prepare_rms(
    x: Tensor,
    w: Tensor | PreparedWeight,
    gamma: Tensor | None,
    eps: float | None,
    rstd: RowStatistic | Tensor | None,
    epilogue: Epilogue | None,
    inputs: dict[str, Any],
) -> tuple[Op, tuple[Any, ...]]:
    norm, values = rms_values(x, eps, rstd)
    op = _composed("rmsnorm_gemm", norm, epilogue)
    for name in op.products:
        if name in inputs:
            require_alike(w, name, inputs[name])
            inputs[name] = matrix_of(inputs[name], gamma, name)
    return op, (x, matrix_of(w, gamma, "w"), *values)


@prepared_by(_prepare_rms)
def rmsnorm_gemm(
    x: Tensor,
    w: Tensor | PreparedWeight,
    gamma: Tensor | None = None,
    *,
    eps: float | None = None,
    rstd: RowStatistic | Tensor | None = None,
    epilogue: Epilogue | None = None,
    out: Any = None,
    out_dtype: torch.dtype | None = None,
    **inputs: Any,
) -> Any:
    """Compute epilogue(rmsnorm(x; gamma, eps) @ w, inputs) in one kernel.

    rmsnorm(x) = x / √(mean(x², -1) + eps) · gamma, as in ``torch.nn.functional.rms_norm``. Rows are scaled in FP32
    before rounding.

    Parameters
    ----------
    x : Tensor
        (..., K), FP16 or BF16; leading dimensions are folded into M. Messages call it ``a``, and w ``b``.
    w : Tensor or PreparedWeight
        (K, N), the same dtype: ``weight.t()`` of a linear layer, or the result of :func:`prepare`.
    gamma : Tensor, optional
        (K,). **Every call** folds it into w with a kernel that reads and writes all of w. Overflow is not checked: it
        makes columns of D infinite or NaN. :func:`prepare` folds once and checks.
    eps : float, optional
        Added to the mean of squares; required without `rstd`. It is a launch argument, so any value uses one kernel.
    rstd : RowStatistic or Tensor, optional
        The statistic that :func:`gemm_residual_rms` returned with x, or an FP32 tensor (...) of factors for the rows.
        Without it the kernel computes mean squares from x.
    epilogue : Epilogue, optional
        Applied to the normalised product. A ``Product`` is scaled in the same way; its matrix must be prepared if w is.
    out, out_dtype, **inputs
        As for :func:`cutlass_ops.gemm`.

    Returns
    -------
    Tensor or named tuple
        D (..., N), or all outputs with D first.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit. The message names it and says what to do.
    UnsupportedError
        If no kernel supports the device.
    MissingKernelError, CompileError, ToolchainError, StoreError, LoadError
        If the kernel cannot be compiled, stored or loaded.

    Examples
    --------
    >>> x = torch.tensor([[2.0, -2.0, 2.0, -2.0]]).bfloat16()
    >>> w, gamma = torch.eye(4).bfloat16(), torch.full((4,), 0.5).bfloat16()
    >>> co.rmsnorm_gemm(x, co.prepare(w, gamma), eps=0.0).tolist()
    [[0.5, -0.5, 0.5, -0.5]]
    >>> @co.epilogue
    ... def biased(acc, bias: co.Row):
    ...     return acc + bias
    >>> co.rmsnorm_gemm(x, w, gamma, eps=0.0, epilogue=biased, bias=torch.ones(4).bfloat16()).tolist()
    [[1.5, 0.5, 1.5, 0.5]]
    """
    op, arguments = _prepare_rms(x, w, gamma, eps, rstd, epilogue, inputs)
    return op(*arguments, out=out, out_dtype=out_dtype, **inputs)


_GIVEN = {None: builtin.rms_norm, "sums": builtin.rms_norm_of_sums, "rstd": builtin.rms_norm_of_rstd}


def rmsnorm_op(epilogue: Epilogue | None = None, *, given: Literal["sums", "rstd"] | None = None) -> Op:
    """Return the op behind :func:`rmsnorm_gemm`, for ``tune`` and ``plan``.

    b has gamma folded in. The op's arguments depend on `given`:

    - None, statistics from a: (a, b, eps, *inputs)
    - ``"sums"``, as in a :class:`RowStatistic`: (a, b, row_sum_square, inverse_count, eps, *inputs)
    - ``"rstd"``, a tensor: (a, b, rstd, *inputs)

    Raises
    ------
    TypeError, ValueError
        If `epilogue` is not an epilogue or cannot follow a norm, or `given` is unknown.
    """
    if given not in _GIVEN:
        raise ValueError(f'given is {given!r}: use "sums", "rstd" or None')
    return _composed("rmsnorm_gemm", _GIVEN[given], epilogue)


def _prepare_residual(
    a: Tensor, b: Tensor, residual: Tensor, epilogue: Epilogue | None, out: Tensor | None, inputs: dict[str, Any]
) -> tuple[Op, tuple[Any, ...]]:
    operands.require_tensor("a", a)
    dtype = traced.autocast_dtype(a)
    a, b = traced.autocast_to(dtype, a), traced.autocast_to(dtype, b)
    if out is not None:
        operands.require_tensor("out", out)
        if out.dtype != a.dtype:
            raise TypeError(f"out is {out.dtype} and a is {a.dtype}: pass an out of a's dtype")
    inputs["residual"] = residual
    return residual_rms_op(a.dtype, epilogue), (a, b)


@prepared_by(_prepare_residual)
def gemm_residual_rms(
    a: Tensor,
    b: Tensor,
    residual: Tensor,
    *,
    eps: float,
    epilogue: Epilogue | None = None,
    out: Tensor | None = None,
    **inputs: Any,
) -> ResidualRms:
    """Compute y = epilogue(a @ b, inputs) + residual and the statistic of its rows in one kernel.

    The statistic is computed from y rounded to 16 bits, as stored. Pass it as `rstd` to :func:`rmsnorm_gemm`, so that
    no other kernel reads y.

    Parameters
    ----------
    a, b : Tensor
        (..., M, K) and (K, N), as for :func:`cutlass_ops.gemm`.
    residual : Tensor
        (..., M, N), FP16, BF16 or FP32.
    eps : float
        The next norm's eps.
    epilogue : Epilogue, optional
        Applied to a @ b before the residual is added, such as a bias. It has no output but D.
    out : Tensor, optional
        Where to write y, of a's dtype. It may be the residual.
    **inputs
        The epilogue's inputs by name.

    Returns
    -------
    ResidualRms
        (y, rstd): y of a's dtype, and a :class:`RowStatistic`, valid until y changes.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit. The message names it and says what to do.
    UnsupportedError
        If no kernel supports the device.
    MissingKernelError, CompileError, ToolchainError, StoreError, LoadError
        If the kernel cannot be compiled, stored or loaded.

    Examples
    --------
    >>> a, b = torch.ones(1, 8).bfloat16(), torch.ones(8, 4).bfloat16()
    >>> residual = torch.full((1, 4), -6.0).bfloat16()
    >>> y, rstd = co.gemm_residual_rms(a, b, residual, eps=0.0)
    >>> y.tolist()
    [[2.0, 2.0, 2.0, 2.0]]
    >>> co.rmsnorm_gemm(y, torch.eye(4).bfloat16(), rstd=rstd).tolist()
    [[1.0, 1.0, 1.0, 1.0]]
    """
    op, arguments = _prepare_residual(a, b, residual, epilogue, out, inputs)
    y, sums = op(*arguments, out=out, **inputs)
    return ResidualRms(y, RowStatistic(sums, y.shape[-1], eps))


def residual_rms_op(dtype: torch.dtype, epilogue: Epilogue | None = None) -> Op:
    """Return the op behind :func:`gemm_residual_rms`, for ``tune`` and ``plan``.

    It takes (a, b, *inputs, residual) of this dtype and returns (d, row_sum_square).

    Raises
    ------
    TypeError, ValueError
        If `epilogue` is not an epilogue, or has an output besides D, or the dtype has not 16 bits.
    """
    following = builtin.RESIDUAL_RMS.get(dtypes.dtype(dtype).name)
    if following is None:
        raise TypeError(f"a is {dtype}: gemm_residual_rms takes torch.float16 or torch.bfloat16")
    return _residual_op(following, epilogue)


# ---- LayerNorm ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class PreparedLayerNormWeight:
    """A weight with a LayerNorm's gamma and beta folded in, made by :func:`prepare_layernorm`.

    Attributes
    ----------
    matrix : Tensor
        diag(gamma) @ w, (K, N), in w's dtype and major; w itself without gamma.
    column_sum : Tensor
        Sum of each column of `matrix`, (N,), FP32.
    shift : Tensor or None
        beta @ w, (N,), FP32.

    Examples
    --------
    >>> prepared = co.prepare_layernorm(torch.ones(8, 4).bfloat16(), beta=torch.ones(8).bfloat16())
    >>> prepared.column_sum.tolist(), prepared.shift.tolist()
    ([8.0, 8.0, 8.0, 8.0], [8.0, 8.0, 8.0, 8.0])
    """

    matrix: Tensor
    column_sum: Tensor
    shift: Tensor | None


def prepare_layernorm(w: Tensor, gamma: Tensor | None = None, beta: Tensor | None = None) -> PreparedLayerNormWeight:
    """Fold a LayerNorm's gamma and beta into the weight that follows it, once.

    The cost is that of :func:`prepare` if gamma is given, plus one read of w for the column sums and one for beta.
    Column sums use the stored (rounded) weight. They are added in FP64 and rounded to FP32.

    Parameters
    ----------
    w : Tensor
        (K, N), FP16 or BF16, either major.
    gamma, beta : Tensor, optional
        (K,), FP16, BF16 or FP32.

    Returns
    -------
    PreparedLayerNormWeight
        Pass it to :func:`layernorm_gemm` instead of w, gamma and beta.

    Raises
    ------
    TypeError, ValueError
        As for :func:`prepare`.

    Examples
    --------
    >>> x = torch.tensor([[3.0, 1.0, 3.0, 1.0]]).bfloat16()
    >>> w, gamma, beta = torch.eye(4).bfloat16(), torch.full((4,), 0.5).bfloat16(), torch.ones(4).bfloat16()
    >>> prepared = co.prepare_layernorm(w, gamma, beta)  # once
    >>> co.layernorm_gemm(x, prepared, eps=0.0).tolist()
    [[1.5, 0.5, 1.5, 0.5]]
    """
    for name, value in (("w", w), ("gamma", gamma), ("beta", beta)):
        operands.refuse_differentiated(name, value)
    prepared = _fold_layernorm(w, gamma, beta)
    if gamma is not None:
        folding.check_folded(w, gamma, prepared.matrix)
    return prepared


def _prepare_layer(
    x: Tensor,
    w: Tensor | PreparedLayerNormWeight,
    gamma: Tensor | None,
    beta: Tensor | None,
    eps: float | None,
    mean: Tensor | None,
    rstd: Tensor | None,
    epilogue: Epilogue | None,
) -> tuple[Op, tuple[Any, ...]]:
    if isinstance(w, PreparedLayerNormWeight):
        if gamma is not None or beta is not None:
            raise TypeError("w is prepared and already contains gamma and beta: leave them out")
        prepared = w
    else:
        prepared = _fold_layernorm(w, gamma, beta)
    norm, values = _layer_values(eps, mean, rstd)
    shift = () if prepared.shift is None else (prepared.shift,)
    op = _composed("layernorm_gemm", norm, epilogue, prepared.shift is not None)
    return op, (x, prepared.matrix, prepared.column_sum, *values, *shift)


@prepared_by(_prepare_layer)
def layernorm_gemm(
    x: Tensor,
    w: Tensor | PreparedLayerNormWeight,
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    eps: float | None = None,
    mean: Tensor | None = None,
    rstd: Tensor | None = None,
    epilogue: Epilogue | None = None,
    out: Any = None,
    out_dtype: torch.dtype | None = None,
    **inputs: Any,
) -> Any:
    """Compute epilogue(layernorm(x; gamma, beta, eps) @ w, inputs) in one kernel.

    layernorm(x) = (x - mean(x)) / √(variance(x) + eps) · gamma + beta, as in ``torch.nn.functional.layer_norm``. The
    kernel computes mean and mean square in one pass and subtracts, so it loses digits if a row's mean is large against
    its deviation. The error stays within twice PyTorch's up to a ratio of 50 in FP16 and 200 in BF16. A larger ratio is
    not detected: pass `mean` and `rstd` in BF16, and do not fuse in FP16 (docs/rmsnorm.md).

    Parameters
    ----------
    x : Tensor
        (..., K), FP16 or BF16. Messages call it ``a``, and w ``b``.
    w : Tensor or PreparedLayerNormWeight
        (K, N), the same dtype, or the result of :func:`prepare_layernorm`. **Every call** reads a plain tensor several
        times, for column sums, gamma and beta. Overflow of gamma · w is not checked.
    gamma, beta : Tensor, optional
        (K,).
    eps : float, optional
        Added to the variance; required without `mean` and `rstd`.
    mean, rstd : Tensor, optional
        Both or neither: mean and 1 / √(variance + eps) of each row of x, FP32, (...).
    epilogue : Epilogue, optional
        Applied to the normalised product. It may not have a ``Product``.
    out, out_dtype, **inputs
        As for :func:`cutlass_ops.gemm`.

    Returns
    -------
    Tensor or named tuple
        D (..., N), or all outputs with D first.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit. The message names it and says what to do.
    UnsupportedError
        If no kernel supports the device.
    MissingKernelError, CompileError, ToolchainError, StoreError, LoadError
        If the kernel cannot be compiled, stored or loaded.

    Examples
    --------
    >>> x = torch.tensor([[3.0, 1.0, 3.0, 1.0]]).bfloat16()
    >>> w, gamma, beta = torch.eye(4).bfloat16(), torch.full((4,), 0.5).bfloat16(), torch.ones(4).bfloat16()
    >>> co.layernorm_gemm(x, co.prepare_layernorm(w, gamma, beta), eps=0.0).tolist()
    [[1.5, 0.5, 1.5, 0.5]]
    """
    op, arguments = _prepare_layer(x, w, gamma, beta, eps, mean, rstd, epilogue)
    return op(*arguments, out=out, out_dtype=out_dtype, **inputs)


def layernorm_op(
    epilogue: Epilogue | None = None, *, shifted: bool = False, given: Literal["moments"] | None = None
) -> Op:
    """Return the op behind :func:`layernorm_gemm`, for ``tune`` and ``plan``.

    :class:`PreparedLayerNormWeight` has b, column_sum and shift (of beta). The op's arguments depend on `given`:

    - None, statistics from a: (a, b, column_sum, eps, *inputs)
    - ``"moments"``: (a, b, column_sum, mean, rstd, *inputs)

    With `shifted`, shift comes before the inputs.

    Raises
    ------
    TypeError, ValueError
        If `epilogue` is not an epilogue or cannot follow a norm, or `given` is unknown.
    """
    if given not in (None, "moments"):
        raise ValueError(f'given is {given!r}: use "moments" or None')
    norm = builtin.layer_norm if given is None else builtin.layer_norm_of_moments
    return _composed("layernorm_gemm", norm, epilogue, shifted)


# Lets traced and saved programs take and return these.
_pytree.register_pytree_node(
    RowStatistic,
    lambda x: ([x.sum_square], [x.count, x.eps]),
    lambda tensors, numbers: RowStatistic(*tensors, *numbers),
    serialized_type_name="cutlass_ops.RowStatistic",
)
_pytree.register_pytree_node(
    PreparedWeight,
    lambda x: ([x.matrix], None),
    lambda tensors, _: PreparedWeight(*tensors),
    serialized_type_name="cutlass_ops.PreparedWeight",
)
_pytree.register_pytree_node(
    PreparedLayerNormWeight,
    lambda x: ([x.matrix, x.column_sum, x.shift], None),
    lambda tensors, _: PreparedLayerNormWeight(*tensors),
    serialized_type_name="cutlass_ops.PreparedLayerNormWeight",
)
_pytree._register_namedtuple(ResidualRms, serialized_type_name="cutlass_ops.ResidualRms")


# ---- Ops ---------------------------------------------------------------------------------------------------------


@traced.remembered
def _composed(name: str, norm: Epilogue, epilogue: Epilogue | None, shifted: bool = False) -> Op:
    graph = norm.graph.then(builtin.shifted.graph) if shifted else norm.graph
    if epilogue is None:
        return graph_op(name, graph, norm.doc)
    after = op_of(epilogue).graph
    _check_follower(name, epilogue.name, after)
    return graph_op(name, graph.then(after, products=True), f"{norm.doc} Then {epilogue.name}: {epilogue.doc}")


def _check_follower(name: str, epilogue: str, graph: Graph) -> None:
    if graph.gathered:
        raise ValueError(
            f"{epilogue} takes {', '.join(graph.gathered)}, which {name} would compute from x before the norm: write "
            "norm and epilogue as one epilogue for gemm"
        )
    if graph.products and name == "layernorm_gemm":
        raise ValueError(
            f"{epilogue} has the product {graph.products[0]}, but {name} has column sums only for w: run two GEMMs and "
            "pass the first one's result to the second as a Tile"
        )
    taken = sorted(_OWN & {i.name for i in graph.inputs})
    if taken:
        raise ValueError(f"{epilogue} has an input {', '.join(taken)}, and so has {name} itself: rename the input")


@traced.remembered
def _residual_op(residual: Epilogue, epilogue: Epilogue | None) -> Op:
    graph = residual.graph if epilogue is None else op_of(epilogue).graph.then(residual.graph)
    return graph_op("gemm_residual_rms", graph, residual.doc)


def rms_values(
    x: Tensor, eps: float | None, rstd: RowStatistic | Tensor | None
) -> tuple[Epilogue, tuple[Tensor | float, ...]]:
    """Return an RMSNorm's epilogue and the arguments for it.

    Raises
    ------
    TypeError, ValueError
        If both or neither of `eps` and `rstd` are given, or `rstd` does not fit x.
    """
    if rstd is None:
        if eps is None:
            raise TypeError("eps and rstd are missing: pass the norm's eps=, or rstd=, which includes it")
        return builtin.rms_norm, (eps,)
    if eps is not None:
        raise TypeError("eps and rstd are both given, and rstd already includes eps: pass one of them")
    if not isinstance(rstd, RowStatistic):
        return builtin.rms_norm_of_rstd, (_statistic("rstd", rstd),)
    if isinstance(x, Tensor) and x.ndim and rstd.count != x.shape[-1]:
        raise ValueError(
            f"rstd is the statistic of rows of {rstd.count} elements, and x has {x.shape[-1]}: pass the one that came "
            "with x"
        )
    # Reshaping x's leading dimensions keeps the order of rows.
    return builtin.rms_norm_of_sums, (rstd.sum_square.flatten(), 1.0 / max(rstd.count, 1), rstd.eps)


def _layer_values(
    eps: float | None, mean: Tensor | None, rstd: Tensor | None
) -> tuple[Epilogue, tuple[Tensor | float, ...]]:
    if mean is None and rstd is None:
        if eps is None:
            raise TypeError("eps, mean and rstd are missing: pass the norm's eps=, or mean= and rstd=")
        return builtin.layer_norm, (eps,)
    if mean is None or rstd is None:
        raise TypeError(f"{'rstd' if mean is None else 'mean'} is given alone: pass both mean and rstd, or neither")
    if eps is not None:
        raise TypeError("eps and rstd are both given, and rstd already includes eps: pass one of them")
    return builtin.layer_norm_of_moments, (_statistic("mean", mean), _statistic("rstd", rstd))


def _statistic(name: str, value: Any) -> Tensor:
    operands.require_tensor(name, value)
    found: Tensor = value
    if found.dtype != torch.float32:
        raise TypeError(
            f"{name} is {found.dtype}: pass FP32, since rounding it to 16 bits would affect every element of a row"
        )
    return found


# ---- Weights -----------------------------------------------------------------------------------------------------


def matrix_of(w: Tensor | PreparedWeight, gamma: Tensor | None, name: str) -> Tensor:
    """Return w with gamma folded in, folding it now if w is not prepared.

    Raises
    ------
    TypeError, ValueError
        If gamma is given twice, or does not fit.
    """
    if isinstance(w, PreparedWeight):
        if gamma is not None:
            raise TypeError(f"{name} is prepared and already contains gamma: leave gamma out")
        return w.matrix
    return w if gamma is None else folding.fold(traced.autocast_to(traced.autocast_dtype(w), w), gamma, name)


def require_alike(w: Tensor | PreparedWeight, name: str, other: Any) -> None:
    """Require that both weights are prepared, or neither.

    Raises
    ------
    TypeError
        If only one is.
    """
    prepared = isinstance(w, PreparedWeight)
    if prepared != isinstance(other, PreparedWeight):
        which, left = ("w", name) if prepared else (name, "w")
        raise TypeError(f"{which} is prepared and {left} is not: pass prepare({left}, gamma), or two plain weights")


def _fold_layernorm(w: Tensor, gamma: Tensor | None, beta: Tensor | None) -> PreparedLayerNormWeight:
    w = traced.autocast_to(traced.autocast_dtype(w), w)
    matrix = w if gamma is None else folding.fold(w, gamma)
    shift = None if beta is None else folding.row_times("beta", beta, w)
    # Sum the rounded weight, so that its rounding errors are multiplied by x - mean(x) and not by x.
    return PreparedLayerNormWeight(matrix, folding.column_sums(matrix), shift)
