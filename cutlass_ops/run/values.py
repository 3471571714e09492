"""Operand values: what calls take for A and B besides tensors, and groups of rows.

PyTorch's tracers must know these classes before they meet one, so the library imports this module at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree

from cutlass_ops.base.mma import BLOCK_K

if TYPE_CHECKING:
    from cutlass_ops.epilogue import Epilogue


class Scaled(NamedTuple):
    """A quantised matrix and its scales: it represents values * scale.

    Kernels apply scales to the FP32 sums, before the epilogue and before D is rounded, once. Blocks along K may have
    their own scales: products of 128 elements along K are then added up, each such sum is multiplied by both scales,
    and these are added up in FP32. Scales have no unit and may have any sign; 0, infinities and NaN behave as in FP32.
    If one of a call's operands is scaled, so is the other. A scale of 1.0 changes nothing.

    Messages, epilogues and prepared launches call the scale of a ``scale_a``, and that of b ``scale_b``.

    Attributes
    ----------
    values : Tensor or Sparse
        FP8, INT8, or any other type that :func:`cutlass_ops.gemm` takes, with the shape that it has there. b may be a
        :class:`cutlass_ops.Sparse`, without scales of blocks.
    scale : Tensor or float
        A number or a tensor of one element. Or one for each row of a, (..., M); for each column of b, (N,), or (..., N)
        with batches or groups. Types are FP32, FP16 and BF16. Or block scales of FP8 in FP32, with any strides, of both
        operands: for each 1x128 of a, (..., M, ceil(K / 128)); for b, each 128x128, (ceil(N / 128), ceil(K / 128)), or
        each 128 elements along a column, (N, ceil(K / 128)). Groups have block scales too, with a first dimension for
        b; batches have none.

    Examples
    --------
    >>> x, weight = torch.randn(4, 256), torch.randn(384, 256)
    >>> a, b = co.Scaled.quantize(x), co.Scaled.quantize(weight)
    >>> a.values.dtype, a.scale.shape, b.scale.shape
    (torch.float8_e4m3fn, torch.Size([4, 2]), torch.Size([384, 2]))
    >>> d = co.gemm(a, b.t())
    >>> bool((d - x @ weight.t()).norm() < 0.1 * d.norm())
    True
    >>> co.gemm(co.Scaled(a.values, torch.rand(4, 2)), co.Scaled(b.values, torch.rand(3, 2)).t()).shape
    torch.Size([4, 384])
    """

    values: Any
    scale: Tensor | float

    @classmethod
    def quantize(
        cls, x: Tensor, dtype: str | torch.dtype = "e4m3", block: int | None = BLOCK_K, out: Scaled | None = None
    ) -> Scaled:
        """Quantise a tensor to FP8, with a scale for each 128 values of a row, or for each row.

        Let m be the largest absolute value of a block, and at least 2⁻¹¹⁰. For e4m3, the scale is m / 448 and values
        are x · (448 / m); for e5m2 with 57344 in place of 448. Values are rounded to nearest even. A NaN makes the
        scale of its block NaN, and an infinity makes it infinite: then all values of the block are NaN once the scale
        is applied. :func:`cutlass_ops.e.quantize` does the same in an epilogue.

        The kernel is compiled at the first call, and kept in the store. It reads each value from global memory once.

        Parameters
        ----------
        x : Tensor
            (..., M, K) in FP16, BF16 or FP32: a, or a weight (..., N, K), whose result is transposed for b. The last
            dimension is contiguous, and the others can be folded into one.
        dtype : str or torch.dtype
            ``"e4m3"`` or ``"e5m2"``, or PyTorch's dtypes of these.
        block : int, optional
            Number of values in a row that share a scale: 128. None for one scale per row.
        out : Scaled, optional
            Where to write values and scales. Either may be None.

        Returns
        -------
        Scaled
            Values (..., M, K) in FP8, with lines padded to 16 bytes. Scales in FP32: (..., M, ceil(K / 128)), M-major,
            with lines padded too, or (..., M) if `block` is None.

        Raises
        ------
        TypeError, ValueError
            If an argument does not fit. The message names it and says what to do.
        UnsupportedError
            If the GPU is not Hopper (compute capability 9.0).
        MissingKernelError, CompileError, ToolchainError, StoreError, LoadError
            If the kernel cannot be compiled, stored or loaded, and PyTorch may not serve (``CUTLASS_OPS_STAND_IN=0``).

        Examples
        --------
        >>> x = torch.tensor([[-3.0, 1.5] + [0.0] * 126, [7.0] * 128])
        >>> values, scale = co.Scaled.quantize(x)
        >>> values.dtype, values[0, :2].tolist(), (scale * 448).tolist()
        (torch.float8_e4m3fn, [-448.0, 224.0], [[3.0], [7.0]])
        >>> co.Scaled.quantize(x, "e5m2", block=None).scale.shape
        torch.Size([2])
        """
        if out is not None and not isinstance(out, Scaled):
            raise TypeError(f"out must be a cutlass_ops.Scaled of values and scale, not {type(out).__name__}")
        from cutlass_ops.run import quantizing  # late: few programs quantise tensors

        return cls(*quantizing.quantize(x, dtype, block, out))

    def t(self) -> Scaled:
        """Return the transposed matrix, with the same scales: those of rows are then those of b's columns."""
        return Scaled(self.values.t(), self.scale)

    @property
    def mT(self) -> Scaled:  # noqa: N802 - as PyTorch's
        """The matrices of batches or groups transposed, with the same scales."""
        return Scaled(self.values.mT, self.scale)

    @property
    def shape(self) -> torch.Size:
        """The shape of the values."""
        found: torch.Size = self.values.shape
        return found

    @property
    def dtype(self) -> torch.dtype:
        """The type of the values."""
        found: torch.dtype = self.values.dtype
        return found

    @property
    def device(self) -> torch.device:
        """The device of the values."""
        found: torch.device = self.values.device
        return found


@dataclass(frozen=True, eq=False)
class Groups:
    """Groups of rows, each multiplied by its own matrix, as experts in a mixture: pass it as `groups`.

    Only the kernel reads offsets and counts: a call does not wait for the device, and in a CUDA graph they may change
    from one replay to the next. Wrong ones give wrong rows on a GPU, but no access outside the tensors. On the CPU they
    are an error.

    Attributes
    ----------
    offsets : Tensor, optional
        (E,), INT32, on the device of a: the row at which each group ends, as given by ``torch.cumsum(rows_of_each, 0,
        dtype=torch.int32)``. Group e begins where group e - 1 ends, and may have no rows. Rows from ``offsets[-1]`` on
        belong to no group.
    counts : Tensor, optional
        (E,), INT32, in place of `offsets`: the number of used rows of each group, if each has room for M rows.
    expected : int, optional
        With `counts`: the mean number of used rows that you expect. It decides which kernel runs, and changes no
        result. By default, groups are assumed to be full, so tiles are too large if groups have few rows.

    Examples
    --------
    >>> x, weights = torch.ones(5, 8).bfloat16(), torch.ones(2, 3, 8).bfloat16()  # (T, K), and (E, N, K)
    >>> groups = co.Groups(torch.tensor([2, 5], dtype=torch.int32))  # rows 0 and 1 are the first group's
    >>> co.gemm(x, weights.mT, groups=groups).shape
    torch.Size([5, 3])

    The gradient of the weights, a sum over each group's rows:

    >>> gradient = torch.ones(5, 8).bfloat16()
    >>> co.gemm(x.mT, gradient, groups=groups)[:, 0, 0].tolist()
    [2.0, 3.0]
    """

    offsets: Tensor | None = None
    counts: Tensor | None = None
    expected: int | None = None


class OwnWeight:
    """A weight in a form of its own: a matrix, and perhaps a further tensor.

    `numbers` says what the matrix stores if its type does not, and `takes_scale` whether it may be the values of a
    :class:`Scaled`. Then it has a further tensor.
    """

    numbers: str = ""
    takes_scale: ClassVar[bool] = False

    @property
    def parts(self) -> tuple[Tensor, Tensor | None]:
        """Return what is multiplied, and the tensor that the call's epilogue takes for it, if any."""
        raise NotImplementedError

    def before(self, a: Any, scale_a: Any, scale_b: Any = None) -> Epilogue | None:
        """Return the epilogue that takes its further tensor, before the call's own; None for that of two scales.

        Raises TypeError or ValueError if A, A's scale, or that which a :class:`Scaled` gives it, does not fit.
        """
        return None


@dataclass(frozen=True, eq=False)
class PreparedWeight(OwnWeight):
    """A weight in the form that kernels read, made by :func:`cutlass_ops.prepare`.

    It is neither a tensor nor a module: as an attribute of a module, it is not moved or saved with the module. Prepare
    it after the module has been moved and its weights have been loaded.

    Attributes
    ----------
    matrix : Tensor
        (K, N): diag(gamma) @ w, or w. The leading dimension is a multiple of 16 bytes. FP8, INT8 and FP32 are
        contiguous along K. For a LayerNorm without gamma it is w itself.
    scale : Tensor or None
        (N,), FP32: the factor of each column, if :func:`cutlass_ops.prepare` quantised the weight.
    folded : bool
        Whether `matrix` contains gamma.
    column_sum : Tensor or None
        For a LayerNorm: the sum of each column of `matrix`, (N,), FP32.
    shift : Tensor or None
        For a LayerNorm with beta: beta @ w, (N,), FP32.

    Examples
    --------
    >>> w, gamma = torch.ones(8, 4).bfloat16(), torch.full((8,), 0.5)
    >>> co.prepare(w, gamma).matrix.shape
    torch.Size([8, 4])
    >>> prepared = co.prepare(w, beta=torch.ones(8).bfloat16(), norm="layer")
    >>> prepared.column_sum.tolist(), prepared.shift.tolist()
    ([8.0, 8.0, 8.0, 8.0], [8.0, 8.0, 8.0, 8.0])
    """

    matrix: Tensor
    scale: Tensor | None = None
    folded: bool = False
    column_sum: Tensor | None = None
    shift: Tensor | None = None

    @property
    def parts(self) -> tuple[Tensor, Tensor | None]:  # noqa: D102
        return self.matrix, self.scale

    def before(self, a: Any, scale_a: Any, scale_b: Any = None) -> Epilogue | None:  # noqa: D102
        if self.column_sum is not None:
            raise TypeError("b is prepared for a LayerNorm: call layernorm_gemm, or pass prepare(w, dtype=...)")
        return None


# What calls take for A and B that is no tensor.
VALUES = (Scaled, OwnWeight)
OperandA: TypeAlias = Tensor | Scaled
OperandB: TypeAlias = Tensor | Scaled | OwnWeight


def parts(a: Any) -> tuple[Any, Any]:
    """Return what is multiplied of A, and its scale: None if it has none."""
    return a if isinstance(a, Scaled) else (a, None)


def _groups(expected: int | None, offsets: Tensor | None, counts: Tensor | None) -> Groups:
    return Groups(offsets, counts, expected)


def _prepared(
    folded: bool, matrix: Tensor, scale: Tensor | None, column_sum: Tensor | None, shift: Tensor | None
) -> PreparedWeight:
    return PreparedWeight(matrix, scale, folded, column_sum, shift)


def _named(value: Any, *names: str) -> list[tuple[Any, Any]]:
    """Return the tensors of an operand value with their places, as torch.export names them."""
    return [(_pytree.GetAttrKey(name), getattr(value, name)) for name in names]


_pytree._register_namedtuple(Scaled, serialized_type_name="cutlass_ops.Scaled")
_pytree.register_pytree_node(
    Groups,
    lambda x: ([x.offsets, x.counts], x.expected),
    lambda tensors, expected: _groups(expected, *tensors),
    serialized_type_name="cutlass_ops.Groups",
    flatten_with_keys_fn=lambda x: (_named(x, "offsets", "counts"), x.expected),
)
_pytree.register_pytree_node(
    PreparedWeight,
    lambda x: ([x.matrix, x.scale, x.column_sum, x.shift], x.folded),
    lambda tensors, folded: _prepared(folded, *tensors),
    serialized_type_name="cutlass_ops.types.PreparedWeight",
    flatten_with_keys_fn=lambda x: (_named(x, "matrix", "scale", "column_sum", "shift"), x.folded),
)
# Programs of torch.export are saved with the arguments that they were traced with, and loaded with weights_only.
torch.serialization.add_safe_globals([Scaled, Groups, PreparedWeight])
