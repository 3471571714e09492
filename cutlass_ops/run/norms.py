"""Norms fused with the GEMM that follows: RMSNorm and LayerNorm of A's rows in the epilogue, gamma in the weight.

A norm scales A's rows by a statistic and A's columns by gamma. Gamma is folded into the weight. The statistic scales
the FP32 accumulator before rounding. docs/rmsnorm.md has the algebra and the limits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, overload

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from cutlass_ops.base import dtypes
from cutlass_ops.base.mma import ACCUMULATIONS, Math
from cutlass_ops.epilogue import Epilogue, Graph, composed
from cutlass_ops.operand import scalars, watching
from cutlass_ops.operand.results import QuantizedResidualRms, ResidualRms, RowStatistic, usual_dtype
from cutlass_ops.operand.tensors import element_type, refuse_shapeless, require_tensor
from cutlass_ops.run import casting, fp8, scaled, traced, weights
from cutlass_ops.run.ops import Op, graph_op, op_of
from cutlass_ops.run.requests import prepared_by
from cutlass_ops.run.values import PreparedWeight, Scaled, parts

# Whether a result has one scale, or one for each row.
Quantise = Literal["tensor", "rows"]

# Keyword arguments of this module's functions: no input of an epilogue may have these names.
_OWN = frozenset(("gamma", "beta", "eps", "mean", "rstd"))
_OWN_OF_RMSNORM = frozenset(("scale_a", "scale_b", "scale_out", "amax"))


# ---- RMSNorm -----------------------------------------------------------------------------------------------------


def _prepare_rms(
    a: Tensor | Scaled,
    b: Tensor | Scaled | PreparedWeight,
    gamma: Tensor | None,
    eps: float | None,
    rstd: RowStatistic | Tensor | None,
    epilogue: Epilogue | None,
    inputs: dict[str, Any],
    scale_out: Tensor | float | None,
    amax: bool,
    out: Any,
    out_dtype: torch.dtype | None,
    math: Math | None,
) -> tuple[Op, tuple[Any, ...]]:
    _check_math("rmsnorm_gemm", math)
    (x, scale_a), (matrix, scale_b) = parts(a), weights.matrix_of(b, gamma, "b")
    # Nearly all calls have no scales: asking twice takes less than calling.
    quantise = quantise_by(scale_out, amax, out, out_dtype) if scale_out is not None or amax is not False else None
    norm, values = rms_values(x, eps, rstd, scale_a)
    scales, factors = _scales(x, scale_a, b, matrix, scale_b)
    op = _composed("rmsnorm_gemm", norm, epilogue, False, scales, quantise, amax)
    for name in op.products:
        if name in inputs:
            weights.require_alike(b, name, inputs[name])
            inputs[name], _ = weights.matrix_of(inputs[name], gamma, name)
    if scale_out is not None:
        inputs["scale_out"] = scale_out
    return op, (x, matrix, *factors, *values)


def _scales(a: Any, scale_a: Any, given_b: Any, b: Any, scale_b: Any) -> tuple[Epilogue | None, tuple[Any, ...]]:
    """Return the epilogue of two operands' scales, and the scales; None and nothing if there are none."""
    if scale_a is scale_b is None:  # nearly all calls
        return None, ()
    scaled.require_both(scale_a, scale_b, a, b)
    if isinstance(given_b, PreparedWeight):
        scale_b = scaled.of_prepared(a, scale_a, b, scale_b)
    return scaled.scaling(scaled.scales_of(a, b, scale_a, scale_b)), (scale_a, scale_b)


@overload
def rmsnorm_gemm(
    a: Tensor | Scaled,
    b: Tensor | Scaled | PreparedWeight,
    gamma: Tensor | None = None,
    *,
    eps: float | None = None,
    rstd: RowStatistic | Tensor | None = None,
    epilogue: None = None,
    scale_out: Tensor | float | None = None,
    amax: Literal[False] = False,
    out: Any = None,
    out_dtype: torch.dtype | None = None,
    math: Math | None = None,
) -> Tensor: ...


@overload
def rmsnorm_gemm(
    a: Tensor | Scaled,
    b: Tensor | Scaled | PreparedWeight,
    gamma: Tensor | None = None,
    *,
    eps: float | None = None,
    rstd: RowStatistic | Tensor | None = None,
    epilogue: Epilogue | None = None,
    scale_out: Tensor | float | None = None,
    amax: bool = False,
    out: Any = None,
    out_dtype: torch.dtype | None = None,
    math: Math | None = None,
    **inputs: Any,
) -> Any: ...


@prepared_by(_prepare_rms)
def rmsnorm_gemm(
    a: Tensor | Scaled,
    b: Tensor | Scaled | PreparedWeight,
    gamma: Tensor | None = None,
    *,
    eps: float | None = None,
    rstd: RowStatistic | Tensor | None = None,
    epilogue: Epilogue | None = None,
    scale_out: Tensor | float | None = None,
    amax: bool = False,
    out: Any = None,
    out_dtype: torch.dtype | None = None,
    math: Math | None = None,
    **inputs: Any,
) -> Any:
    """Compute epilogue(rmsnorm(a; gamma, eps) @ b, inputs) in one kernel.

    rmsnorm(a) = a / √(mean(a², -1) + eps) · gamma, as in ``torch.nn.functional.rms_norm``. Rows of the product are
    scaled in FP32, before D is rounded.

    An a in FP8 is the `quantized` output of :func:`gemm_residual_rms`. Either it was multiplied by gamma there, or the
    weight contains gamma. Its statistic is that of y before quantisation: pass `rstd`.

    Parameters
    ----------
    a : Tensor or Scaled
        (..., K), FP16 or BF16; with `rstd` also INT8, FP8 on Hopper, or scaled. Leading dimensions are folded into M.
    b : Tensor, Scaled or PreparedWeight
        (K, N), the same dtype: ``weight.t()`` of a linear layer, or the result of :func:`prepare`.
    gamma : Tensor, optional
        (K,). **Every call** folds it into b, with a kernel that reads and writes all of b. Overflow is not checked: it
        makes columns of D infinite or NaN. :func:`prepare` folds once, and checks.
    eps : float, optional
        Added to the mean of squares; required without `rstd`. It is a launch argument, so any value uses one kernel.
    rstd : RowStatistic or Tensor, optional
        The statistic that :func:`gemm_residual_rms` returned with a, or an FP32 tensor (...) with the factor of each
        row. Without it, the kernel computes mean squares from a.
    epilogue : Epilogue, optional
        Applied to the normalised product. A ``Product`` is normalised in the same way; if b is prepared, its matrix
        must be too. Calls with scales take no ``Product``, except :func:`cutlass_ops.gemm_swiglu`.
    scale_out : Tensor or float, optional
        The divisor of an FP8 result: a number, a tensor of one element, or one for each row, (...). Set the FP8 type by
        `out_dtype` or `out`.
    amax : bool
        Whether to return the largest absolute value of each row, before `scale_out`: ``amax``, (...), FP32.
    out, out_dtype, **inputs
        As for :func:`cutlass_ops.gemm`.
    math : {"fast", "promoted"}, optional
        How FP8 products are added up, as for :func:`cutlass_ops.gemm`.

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
        If the call waits for its kernel, and that cannot be compiled, stored or loaded. Otherwise, PyTorch serves.

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
    op, arguments = _prepare_rms(a, b, gamma, eps, rstd, epilogue, inputs, scale_out, amax, out, out_dtype, math)
    return op(*arguments, out=out, out_dtype=out_dtype, math=math, **inputs)


_GIVEN = {None: composed.rms_norm, "sums": composed.rms_norm_of_sums, "rstd": composed.rms_norm_of_rstd}


def rmsnorm_op(epilogue: Epilogue | None = None, *, given: Literal["sums", "rstd"] | None = None) -> Op:
    """Return the op behind :func:`rmsnorm_gemm`, for ``tune`` and ``plan``.

    b has gamma folded in. The op takes (a, b, eps, *inputs) if `given` is None; (a, b, row_sum_square, inverse_count,
    eps, *inputs) for ``"sums"``, as in a :class:`RowStatistic`; and (a, b, rstd, *inputs) for ``"rstd"``, a tensor.
    Raises TypeError or ValueError if `epilogue` is not an epilogue or cannot follow a norm, or `given` is unknown.
    """
    if given not in _GIVEN:
        raise ValueError(f'given is {given!r}: use "sums", "rstd" or None')
    return _composed("rmsnorm_gemm", _GIVEN[given], epilogue)


def _prepare_residual(
    a: Tensor | Scaled,
    b: Tensor | Scaled | PreparedWeight,
    residual: Tensor,
    epilogue: Epilogue | None,
    gamma: Tensor | None,
    scale_out: Tensor | float | None,
    amax: bool,
    quantized_dtype: torch.dtype | None,
    out: Any,
    inputs: dict[str, Any],
    math: Math | None,
) -> tuple[Op, tuple[Any, ...]]:
    (x, scale_a), (matrix, scale_b) = parts(a), weights.matrix_of(b, None, "b")
    require_tensor("a", x)
    element_type("a", x)
    _check_math("gemm_residual_rms", math)
    dtype = casting.autocast_dtype(x)
    x, matrix = casting.autocast_to(dtype, x), casting.autocast_to(dtype, matrix)
    scales, factors = _scales(x, scale_a, b, matrix, scale_b)
    _check_y(out, x)
    if "out_dtype" in inputs:
        raise TypeError("gemm_residual_rms takes no out_dtype: y has a's dtype, or BF16 if that is FP8")
    _check_amax(amax)
    inputs["residual"] = residual
    if scale_out is None:
        if gamma is not None or amax:
            what = "gamma is" if gamma is not None else "amax=True asks for what is"
            raise TypeError(f"{what} of the copy in FP8: pass scale_out=, which divides it")
        return residual_rms_op(x.dtype, epilogue, scales), (x, matrix, *factors)
    quantized_dtype = _dtype_of_copy(quantized_dtype, out)
    inputs["scale_out"] = scale_out
    if gamma is not None:
        inputs["gamma"] = gamma
    copy = scaled.is_vector(scale_out), gamma is not None, amax, dtypes.dtype(quantized_dtype).name
    return _residual_op(_stream_dtype(x.dtype), epilogue, scales, copy), (x, matrix, *factors)


def _dtype_of_copy(dtype: torch.dtype | None, out: Any) -> torch.dtype:
    """Return the type to which a copy in FP8 is rounded: its stored type, so that it is rounded once."""
    if dtype is not None:
        fp8.require_dtype("quantized_dtype", dtype)
    given = out.get("quantized") if isinstance(out, Mapping) else None
    if given is None:
        return dtype or fp8.DTYPES[0]
    name = "out['quantized']"
    require_tensor(name, given)
    found: torch.dtype = given.dtype
    fp8.require_dtype(name, found)
    if dtype not in (None, found):
        raise TypeError(f"{name} is {found}, and quantized_dtype asks for {dtype}: omit quantized_dtype")
    return found


def _check_amax(amax: object) -> None:
    if type(amax) is not bool:
        raise TypeError(
            f"amax must be True or False, not a {type(amax).__name__}: an epilogue's input needs another name than amax"
        )


def _check_y(out: Any, a: Tensor) -> None:
    y = out.get("d") if isinstance(out, Mapping) else out
    if y is None:
        return
    require_tensor("out", y)
    wanted = usual_dtype(a.dtype, a.dtype)
    if y.dtype != wanted:
        whose = "a's dtype" if wanted == a.dtype else f"{wanted}"
        raise TypeError(f"out is {y.dtype} and a is {a.dtype}: pass an out of {whose}")


@overload
def gemm_residual_rms(
    a: Tensor | Scaled,
    b: Tensor | Scaled | PreparedWeight,
    residual: Tensor,
    *,
    eps: float,
    scale_out: None = None,
    **named: Any,
) -> ResidualRms: ...


@overload
def gemm_residual_rms(
    a: Tensor | Scaled,
    b: Tensor | Scaled | PreparedWeight,
    residual: Tensor,
    *,
    eps: float,
    scale_out: Tensor | float,
    **named: Any,
) -> QuantizedResidualRms: ...


@prepared_by(_prepare_residual)
def gemm_residual_rms(
    a: Tensor | Scaled,
    b: Tensor | Scaled | PreparedWeight,
    residual: Tensor,
    *,
    eps: float,
    epilogue: Epilogue | None = None,
    gamma: Tensor | None = None,
    scale_out: Tensor | float | None = None,
    amax: bool = False,
    quantized_dtype: torch.dtype | None = None,
    out: Any = None,
    math: Math | None = None,
    **inputs: Any,
) -> Any:
    """Compute y = epilogue(a @ b, inputs) + residual and the statistic of its rows in one kernel.

    The statistic is computed from y rounded to 16 bits, as stored. Pass it as `rstd` to :func:`rmsnorm_gemm`, so that
    no other kernel reads y.

    With `scale_out`, the kernel also stores y · gamma / scale_out in FP8, for the next GEMM. gamma is that of the next
    norm. It is applied here because an FP8 weight would have to be rounded again to contain it. The next GEMM's
    epilogue applies rstd.

    Parameters
    ----------
    a : Tensor or Scaled
        (..., M, K), FP16, BF16, INT8 or on Hopper FP8.
    b : Tensor, Scaled or PreparedWeight
        (K, N), as for :func:`cutlass_ops.gemm`, or the result of :func:`prepare`.
    residual : Tensor
        (..., M, N), FP16, BF16 or FP32.
    eps : float
        The next norm's eps.
    epilogue : Epilogue, optional
        Applied to a @ b before the residual is added, for example a bias. D must be its only output.
    gamma : Tensor, optional
        (N,): gamma of the next norm, by which the FP8 copy is multiplied. Without it, prepare the next weight with
        gamma.
    scale_out : Tensor or float, optional
        The divisor of the FP8 copy: a number, a tensor of one element, or one for each row, (..., M). Without it, no
        copy is stored.
    amax : bool
        Whether to return the largest absolute value of each row of y · gamma, for delayed scaling.
    quantized_dtype : torch.dtype, optional
        The dtype of the FP8 copy: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``. Default: that of
        ``out["quantized"]``, or ``torch.float8_e4m3fn``.
    out : Tensor or mapping of str to Tensor, optional
        Where to write y, in a's dtype, or BF16 if that is FP8. It may be the residual itself. Or a mapping of the
        outputs: ``d``, ``row_sum_square``, ``quantized`` and ``amax``.
    math : {"fast", "promoted"}, optional
        How FP8 products are added up, as for :func:`cutlass_ops.gemm`.
    **inputs
        The epilogue's inputs by name.

    Returns
    -------
    ResidualRms or QuantizedResidualRms
        (y, rstd): y (..., M, N) in a's dtype, or BF16, and a :class:`RowStatistic`, valid until y changes. With
        `scale_out` also `quantized` (..., M, N), and `amax` (..., M) in FP32 or None.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit. The message names it and says what to do.
    UnsupportedError
        If no kernel supports the device.
    MissingKernelError, CompileError, ToolchainError, StoreError, LoadError
        If the call waits for its kernel, and that cannot be compiled, stored or loaded. Otherwise, PyTorch serves.

    Examples
    --------
    >>> a, b = torch.ones(1, 8).bfloat16(), torch.ones(8, 4).bfloat16()
    >>> residual = torch.full((1, 4), -6.0).bfloat16()
    >>> y, rstd = co.gemm_residual_rms(a, b, residual, eps=0.0)
    >>> y.tolist()
    [[2.0, 2.0, 2.0, 2.0]]
    >>> co.rmsnorm_gemm(y, torch.eye(4).bfloat16(), rstd=rstd).tolist()
    [[1.0, 1.0, 1.0, 1.0]]

    With an FP8 copy for the next GEMM:

    >>> made = co.gemm_residual_rms(a, b, residual, eps=0.0, scale_out=0.5, amax=True)
    >>> made.quantized.float().tolist(), made.amax.tolist()
    ([[4.0, 4.0, 4.0, 4.0]], [2.0])
    """
    if not torch.compiler.is_dynamo_compiling() and not isinstance(eps, Tensor):
        scalars.number("eps", eps)  # which the next norm's call would find wrong
    op, arguments = _prepare_residual(
        a, b, residual, epilogue, gamma, scale_out, amax, quantized_dtype, out, inputs, math
    )
    y, sums, *more = op(*arguments, out=out, math=math, **inputs)
    statistic = RowStatistic(sums, y.shape[-1], eps)
    if not more:
        return ResidualRms(y, statistic)
    return QuantizedResidualRms(y, statistic, more[0], more[1] if amax else None)


def residual_rms_op(dtype: torch.dtype, epilogue: Epilogue | None = None, scales: Epilogue | None = None) -> Op:
    """Return the op behind :func:`gemm_residual_rms`, for ``tune`` and ``plan``.

    It takes (a, b, *scales, *inputs, residual) of this dtype and returns (d, row_sum_square). Raises TypeError or
    ValueError if `epilogue` is not an epilogue or has an output besides D, or if no kernel multiplies this dtype.
    """
    return _residual_op(_stream_dtype(dtype), epilogue, scales, None)


def _stream_dtype(dtype: torch.dtype) -> str:
    """Return the name of the type of the residual's sum, for an A of this dtype."""
    name: str = dtypes.dtype(usual_dtype(dtype, dtype)).name
    if name not in composed.RESIDUAL_RMS:
        raise TypeError(
            f"a is {dtype}: gemm_residual_rms takes torch.float16, torch.bfloat16 or FP8. Convert a and b, or write "
            "the residual's sum, and cutlass_ops.e.sum of its square, as an epilogue for cutlass_ops.gemm"
        )
    return name


# ---- LayerNorm ---------------------------------------------------------------------------------------------------


def _prepare_layer(
    a: Tensor,
    b: Tensor | PreparedWeight,
    gamma: Tensor | None,
    beta: Tensor | None,
    eps: float | None,
    mean: Tensor | None,
    rstd: Tensor | None,
    epilogue: Epilogue | None,
    inputs: Mapping[str, Any],
) -> tuple[Op, tuple[Any, ...]]:
    _check_math("layernorm_gemm", inputs.get("math"), ())
    for name, value in (("a", a), ("b", b)):
        if isinstance(value, Scaled):
            raise TypeError(f"{name} is scaled, and layernorm_gemm takes no scales: pass {name}.values, or 16 bits")
    if isinstance(b, PreparedWeight):
        if b.column_sum is None:
            raise TypeError("b is not prepared for a LayerNorm: pass prepare(w, gamma, beta, norm='layer')")
        if gamma is not None or beta is not None:
            raise TypeError("b is prepared and already contains gamma and beta: leave them out")
    norm, values = _layer_values(eps, mean, rstd)
    if not isinstance(b, PreparedWeight) and norm is composed.layer_norm:
        x = _normalised(a, b, gamma, beta, eps)
        if x is not None:
            return _after_norm("layernorm_gemm", epilogue), (x, b)
    prepared = b if isinstance(b, PreparedWeight) else weights.fold_layernorm(b, gamma, beta, "b")
    shift = () if prepared.shift is None else (prepared.shift,)
    op = _composed("layernorm_gemm", norm, epilogue, prepared.shift is not None)
    return op, (a, prepared.matrix, prepared.column_sum, *values, *shift)


_NORMALISED = frozenset((torch.float16, torch.bfloat16))


def _normalised(a: Any, b: Any, gamma: Tensor | None, beta: Tensor | None, eps: Any) -> Tensor | None:
    """Return layernorm(a) by PyTorch, which reads a once: folding reads b several times.

    None if it cannot: then folding, or the call, says what does not fit.
    """
    vectors = [x for x in (gamma, beta) if x is not None]
    if type(eps) is not float or not all(isinstance(x, Tensor) for x in (a, b, *vectors)):
        return None
    if a.layout is not torch.strided or watching.is_left_over(a):
        return None
    dtype = casting.autocast_dtype(a)
    a, b = casting.autocast_to(dtype, a), casting.autocast_to(dtype, b)
    try:
        lines = b.shape[:1]
        if a.shape[-1:] != lines or b.ndim != 2 or a.dtype not in _NORMALISED or b.dtype != a.dtype:
            return None
        if any(x.shape != lines or x.dtype != a.dtype or x.device != a.device for x in vectors):
            return None
    except RuntimeError:  # nested tensors have no shape
        return None
    with casting.without_autocast(a.device):  # in which PyTorch's norm has other types
        return F.layer_norm(a, a.shape[-1:], gamma, beta, eps)


@overload
def layernorm_gemm(
    a: Tensor,
    b: Tensor | PreparedWeight,
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    eps: float | None = None,
    mean: Tensor | None = None,
    rstd: Tensor | None = None,
    epilogue: None = None,
    out: Any = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor: ...


@overload
def layernorm_gemm(
    a: Tensor,
    b: Tensor | PreparedWeight,
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
) -> Any: ...


@prepared_by(_prepare_layer)
def layernorm_gemm(
    a: Tensor,
    b: Tensor | PreparedWeight,
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
    """Compute epilogue(layernorm(a; gamma, beta, eps) @ b, inputs), in one kernel if b is prepared.

    layernorm(a) = (a - mean(a)) / √(variance(a) + eps) · gamma + beta, as in ``torch.nn.functional.layer_norm``. The
    kernel computes mean and mean square in one pass and subtracts. So it loses digits if a row's mean is large compared
    with its standard deviation. Up to a ratio of 50 in FP16 and 200 in BF16, the error is at most twice PyTorch's.
    Larger ratios are not detected: in BF16, pass `mean` and `rstd`; in FP16, do not fuse (docs/rmsnorm.md).

    Parameters
    ----------
    a : Tensor
        (..., K), FP16 or BF16; with `mean` and `rstd` also INT8, or FP8 on Hopper. Its values are normalised as they
        are: there are no scales.
    b : Tensor or PreparedWeight
        (K, N), the same dtype, or either FP8 type for a in FP8; or the result of :func:`prepare` with ``norm="layer"``.
        If b is a plain tensor, PyTorch normalises a in a kernel of its own, unless the dtypes of a, b, gamma and beta
        differ: then **every call** reads b several times, for column sums, gamma and beta, and does not check gamma · b
        for overflow.
    gamma, beta : Tensor, optional
        (K,). Only for b in FP16 or BF16.
    eps : float, optional
        Added to the variance; required without `mean` and `rstd`.
    mean, rstd : Tensor, optional
        Both or neither: mean and 1 / √(variance + eps) of each row of a as it is, FP32, (...).
    epilogue : Epilogue, optional
        Applied to the normalised product. It cannot have a ``Product``.
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
        If the call waits for its kernel, and that cannot be compiled, stored or loaded. Otherwise, PyTorch serves.

    Examples
    --------
    >>> x = torch.tensor([[3.0, 1.0, 3.0, 1.0]]).bfloat16()
    >>> w, gamma, beta = torch.eye(4).bfloat16(), torch.full((4,), 0.5).bfloat16(), torch.ones(4).bfloat16()
    >>> co.layernorm_gemm(x, co.prepare(w, gamma, beta, norm="layer"), eps=0.0).tolist()
    [[1.5, 0.5, 1.5, 0.5]]
    """
    op, arguments = _prepare_layer(a, b, gamma, beta, eps, mean, rstd, epilogue, inputs)
    return op(*arguments, out=out, out_dtype=out_dtype, **inputs)


def layernorm_op(
    epilogue: Epilogue | None = None, *, shifted: bool = False, given: Literal["moments"] | None = None
) -> Op:
    """Return the op behind :func:`layernorm_gemm`, for ``tune`` and ``plan``.

    A prepared weight has b, column_sum and shift (of beta). The op takes (a, b, column_sum, eps,
    *inputs) if `given` is None, and (a, b, column_sum, mean, rstd, *inputs) for ``"moments"``. With `shifted`, shift
    comes before the inputs. Raises TypeError or ValueError if `epilogue` is not an epilogue or cannot follow a norm, or
    `given` is unknown.
    """
    if given not in (None, "moments"):
        raise ValueError(f'given is {given!r}: use "moments" or None')
    norm = composed.layer_norm if given is None else composed.layer_norm_of_moments
    return _composed("layernorm_gemm", norm, epilogue, shifted)


# ---- Ops ---------------------------------------------------------------------------------------------------------


@traced.remembered
def _composed(
    name: str,
    norm: Epilogue,
    epilogue: Epilogue | None,
    shifted: bool = False,
    scales: Epilogue | None = None,
    quantise: Quantise | None = None,
    amax: bool = False,
) -> Op:
    graph = norm.graph if scales is None else scales.graph.then(norm.graph)
    graph = graph.then(composed.shifted.graph) if shifted else graph
    doc = norm.doc
    if epilogue is not None:
        after = op_of(epilogue).graph
        _check_follower(name, epilogue.name, after, scales is not None)
        graph, doc = graph.then(after, products=True), f"{norm.doc} Then {epilogue.name}: {epilogue.doc}"
    if quantise is not None:
        if len(graph.outputs) > 1:
            assert epilogue is not None
            raise ValueError(
                f"{epilogue.name} has outputs besides D, {', '.join(o.name for o in graph.outputs[1:])}, and "
                "scale_out= and amax= need an epilogue that returns only D: write the scale and amax into the epilogue"
            )
        graph = graph.then(composed.quantised(quantise == "rows", amax).graph)
    return graph_op(name, graph, doc)


@traced.remembered
def _after_norm(name: str, epilogue: Epilogue | None) -> Op:
    """Return the op of what follows a norm that was computed before."""
    op = op_of(epilogue)
    if epilogue is not None:
        _check_follower(name, epilogue.name, op.graph, False)
    return graph_op(name, op.graph, op.epilogue.doc)


def _check_math(name: str, math: Any, known: Sequence[str] = ACCUMULATIONS) -> None:
    if math is None or math in known:
        return
    takes = f"takes math {' or '.join(map(repr, known))}, for FP8" if known else "takes no math"
    raise TypeError(
        f"{name} {takes}: norms are fused with products of 16 bits and of FP8. Convert the operands, or pass what is "
        "normalised to cutlass_ops.gemm"
    )


def _check_follower(name: str, epilogue: str, graph: Graph, has_scales: bool) -> None:
    if graph.gathered:
        raise ValueError(
            f"{epilogue} takes {', '.join(graph.gathered)}, which {name} would compute from a before the norm: write "
            "norm and epilogue as one epilogue for gemm"
        )
    if graph.products and name == "layernorm_gemm":
        raise ValueError(
            f"{epilogue} has the product {graph.products[0]}, but {name} has column sums only for b: run two GEMMs and "
            "pass the first one's result to the second as a Tile"
        )
    if graph.products and has_scales:
        raise ValueError(
            f"{epilogue} has the product {graph.products[0]}, which has scales of its own: write norm and scales into "
            "the epilogue, and call gemm, or gemm_swiglu if it is that"
        )
    own = _OWN | _OWN_OF_RMSNORM if name == "rmsnorm_gemm" else _OWN
    taken = sorted(own & {i.name for i in graph.inputs})
    if taken:
        raise ValueError(f"{epilogue} has an input {', '.join(taken)}, and so has {name} itself: rename the input")


# How a residual's sum is stored in FP8: what residual_rms_quantised takes after D's type. PyTorch's tracer keeps a
# plain tuple as it is.
_Copy: TypeAlias = tuple[bool, bool, bool, str]


@traced.remembered
def _residual_op(dtype: str, epilogue: Epilogue | None, scales: Epilogue | None, copy: _Copy | None) -> Op:
    plain = composed.RESIDUAL_RMS[dtype]
    graph = plain.graph if copy is None else composed.residual_rms_quantised(dtype, *copy)
    if epilogue is not None:
        before = op_of(epilogue).graph
        if before.products and scales is not None:
            raise ValueError(
                f"{epilogue.name} has the product {before.products[0]}, which has scales of its own: write all of it "
                "as an epilogue for gemm"
            )
        graph = before.then(graph)
    graph = graph if scales is None else scales.graph.then(graph)
    return graph_op("gemm_residual_rms", graph, plain.doc)


def quantise_by(
    scale_out: Tensor | float | None, amax: bool, out: Any, out_dtype: torch.dtype | None
) -> Quantise | None:
    """Return what has a scale of the result in FP8; None if the result is not divided.

    Raises TypeError if the result would not be in FP8, or if its greatest absolute values are asked for without a
    scale.
    """
    _check_amax(amax)
    if scale_out is None:
        if amax:
            raise TypeError("amax=True is given, and the result is not in FP8: pass scale_out=, its divisor, as well")
        return None
    d = out.get("d") if isinstance(out, Mapping) else out
    given = d.dtype if isinstance(d, Tensor) else out_dtype
    if given not in fp8.DTYPES:
        instead = "" if given is None else f", not {given}"
        raise TypeError(f"scale_out needs a result in FP8: pass out_dtype={fp8.DTYPES[0]}{instead}")
    return "rows" if scaled.is_vector(scale_out) else "tensor"


def rms_values(
    a: Tensor, eps: float | None, rstd: RowStatistic | Tensor | None, scale_a: Tensor | float | None = None
) -> tuple[Epilogue, tuple[Tensor | float, ...]]:
    """Return an RMSNorm's epilogue and the arguments for it.

    Raises TypeError or ValueError if both or neither of `eps` and `rstd` are given, if `rstd` does not fit a, or if a
    is quantised and has no `rstd`.
    """
    quantised = scale_a is not None or (isinstance(a, Tensor) and a.dtype in fp8.DTYPES)
    if rstd is None and quantised:
        raise TypeError(
            "rstd is missing, and a is quantised: the norm needs the statistic of a before it was quantised. Pass "
            "rstd=, as gemm_residual_rms returns it, or a cutlass_ops.RowStatistic"
        )
    if rstd is None:
        if eps is None:
            raise TypeError("eps and rstd are missing: pass the norm's eps=, or rstd=, which includes it")
        return composed.rms_norm, (eps,)
    if eps is not None:
        raise TypeError("eps and rstd are both given, and rstd already includes eps: pass one of them")
    if not isinstance(rstd, RowStatistic):
        return composed.rms_norm_of_rstd, (_statistic("rstd", rstd),)
    refuse_shapeless(a=a)
    if isinstance(a, Tensor) and a.ndim and rstd.count != a.shape[-1]:
        raise ValueError(
            f"rstd is the statistic of rows of {rstd.count} elements, and rows of a have {a.shape[-1]}: pass the "
            "statistic that was returned with a"
        )
    # Reshaping a's leading dimensions keeps the order of rows.
    sums = _statistic("rstd.sum_square", rstd.sum_square)
    return composed.rms_norm_of_sums, (sums.flatten(), 1.0 / max(rstd.count, 1), rstd.eps)


def _layer_values(
    eps: float | None, mean: Tensor | None, rstd: Tensor | None
) -> tuple[Epilogue, tuple[Tensor | float, ...]]:
    if mean is None and rstd is None:
        if eps is None:
            raise TypeError("eps, mean and rstd are missing: pass the norm's eps=, or mean= and rstd=")
        return composed.layer_norm, (eps,)
    if mean is None or rstd is None:
        raise TypeError(f"{'rstd' if mean is None else 'mean'} is given alone: pass both mean and rstd, or neither")
    if eps is not None:
        raise TypeError("eps and rstd are both given, and rstd already includes eps: pass one of them")
    return composed.layer_norm_of_moments, (_statistic("mean", mean), _statistic("rstd", rstd))


def _statistic(name: str, value: Any) -> Tensor:
    require_tensor(name, value)
    found: Tensor = value
    if found.dtype != torch.float32:
        raise TypeError(
            f"{name} is {found.dtype}: pass FP32, since rounding it to 16 bits would affect every element of a row"
        )
    return found
