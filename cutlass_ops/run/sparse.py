"""2:4 sparse weights: what calls take for B with two of each four elements, made of a dense weight or of PyTorch's.

PyTorch's tracers must know this class before they meet one, so the library imports this module at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.sparse import SparseSemiStructuredTensor
from torch.utils import _pytree

from cutlass_ops.base.dtypes import FP8, SPARSE
from cutlass_ops.epilogue import Epilogue
from cutlass_ops.epilogue.graph import Graph
from cutlass_ops.epilogue.nodes import Input, Kind, Node, Output
from cutlass_ops.operand import sparsity
from cutlass_ops.operand.tensors import require_tensor
from cutlass_ops.run.packed import _is_plain, _require_matrix
from cutlass_ops.run.values import OwnWeight, _named

_DTYPES: tuple[torch.dtype, ...] = tuple(getattr(torch, t.torch_name) for t in SPARSE)
_FP8 = tuple(getattr(torch, t.torch_name) for t in FP8)
_SPARSE = Epilogue(
    "sparse",
    "D = A @ B, where B is a 2:4 sparse weight.",
    Graph((Input("meta_b", Kind.META_B),), (Node("acc"),), (Output("d", 0),)),
)


@dataclass(frozen=True, eq=False)
class Sparse(OwnWeight):
    """A weight with two of each four elements along K, and where they are, in the order of kernels.

    Pass it to :func:`cutlass_ops.gemm` as b, with any epilogue. The other elements are 0, and kernels do not multiply
    them: an infinity or a NaN of a does not reach their sums through these. K must be a multiple of 32. Make one by
    :func:`cutlass_ops.sparsify`, which prunes a weight, or of a pruned one by :meth:`from_dense` and
    :meth:`from_semi_structured`.

    Batches and groups of rows are not supported. An FP8 or INT8 weight with a scale for each column, or one, is
    ``co.Scaled(sparse, scale)``. Types of FP8 may be mixed.

    Attributes
    ----------
    values : Tensor
        (K / 2, N), in BF16, FP16, FP8 or INT8, the type of a; contiguous along K. The stored
        elements, in their order.
    meta : Tensor
        (N / 64, 8 K), UINT8, N rounded up to 64 and K to 128. Where the stored elements are, in an order of kernels.
    version : int
        Of the order in memory: 1. Another one is refused.

    Raises
    ------
    TypeError, ValueError
        If a field does not fit. The message names it and says what to do.

    Examples
    --------
    >>> weight = torch.randn(32, 128).bfloat16()  # (N, K) of a linear layer
    >>> sparse = co.sparsify(weight.t())
    >>> sparse.shape, sparse.values.shape, sparse.meta.shape
    (torch.Size([128, 32]), torch.Size([64, 32]), torch.Size([1, 1024]))
    >>> x = torch.randn(4, 128).bfloat16()
    >>> co.gemm(x, sparse, epilogue=lambda acc: co.e.relu(acc)).shape
    torch.Size([4, 32])
    """

    values: Tensor
    meta: Tensor
    version: int = sparsity.VERSION
    takes_scale = True

    def __post_init__(self) -> None:
        if self.version != sparsity.VERSION:
            raise ValueError(
                f"version is {self.version!r}, and this library reads version {sparsity.VERSION} of the sparse form: "
                "make it of the dense weight again"
            )
        if not (_is_plain(self.values) and _is_plain(self.meta)):
            return  # the call refuses them; PyTorch makes operand values of other things
        _require_type("values", self.values)
        if self.meta.dtype != torch.uint8:
            raise TypeError(f"meta is {self.meta.dtype}: metadata are torch.uint8")
        if self.values.ndim != 2:
            raise ValueError(f"values has shape {tuple(self.values.shape)}: it must be (K / 2, N)")
        half, n = self.values.shape
        sparsity.require_extents(n, 2 * half)
        wanted = sparsity.meta_shape(n, 2 * half)
        if tuple(self.meta.shape) != wanted:
            raise ValueError(
                f"meta has shape {tuple(self.meta.shape)}: with K={2 * half} and N={n} it must have shape {wanted}"
            )
        if half > 1 and self.values.stride(0) != 1:
            raise ValueError(f"values has strides {self.values.stride()}: stored elements must be contiguous along K")

    # ---- What calls ask ----

    @property
    def parts(self) -> tuple[Tensor, Tensor | None]:  # noqa: D102
        return self.values, self.meta

    def before(self, a: Any, scale_a: Any, scale_b: Any = None) -> Epilogue:  # noqa: D102
        if scale_a is not None and scale_b is None:
            raise TypeError(
                "a has a scale, and b, which is sparse, has none: pass cutlass_ops.Scaled(b, scale_b), or "
                "cutlass_ops.Scaled(b, 1.0) if it has no scale"
            )
        if any(isinstance(x, Tensor) and x.ndim > 1 and x.shape[at] != 1 for x, at in ((scale_a, -1), (scale_b, 0))):
            raise ValueError(
                "a or b has scales of blocks, and b is sparse, whose sums are those of all of K: use a scale for each "
                "row of a and each column of b, as from cutlass_ops.Scaled.quantize(x, block=None)"
            )
        given: tuple[tuple[str, Any], ...] = (("b", self.values), ("meta_b", self.meta))
        for name, x in given:
            if x is None:
                raise TypeError(f"{name} is missing: a Sparse has values and meta")
            require_tensor(name, x)
        both = (self.values.dtype, getattr(a, "dtype", self.values.dtype))
        if both[0] is not both[1] and not all(x in _FP8 for x in both):
            raise TypeError(f"a is {both[1]}, and b is sparse in {both[0]}: convert one of them")
        return _SPARSE

    # ---- As a matrix ----

    @property
    def shape(self) -> torch.Size:
        """(K, N)."""
        half, n = self.values.shape
        return torch.Size((2 * half, n))

    @property
    def dtype(self) -> torch.dtype:
        """The type of a, and of the stored elements."""
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        """The device of both tensors."""
        return self.values.device

    def to(self, device: torch.device | str) -> Sparse:
        """Return it on another device."""
        return replace(self, values=self.values.t().to(device).t(), meta=self.meta.to(device))

    def to_dense(self) -> Tensor:
        """Return the weight (K, N), with its zeros.

        Examples
        --------
        >>> w = torch.tensor([1.0, -3.0, 2.0, 0.5] * 8)[:, None].repeat(1, 4).bfloat16()
        >>> co.sparsify(w).to_dense()[:4, 0].tolist()
        [0.0, -3.0, 2.0, 0.0]
        """
        return sparsity.dense(self.values.t(), self.meta).t()

    @torch.no_grad()
    def update_(self, w: Tensor, *, prune: bool = False) -> Sparse:
        """Take the elements of a weight in place, as after a step of an optimiser that changes a dense weight.

        It is one kernel, about as fast as a copy, and a CUDA graph may capture it. The kernel is compiled at the first
        call, and PyTorch serves until it is there. Programs of ``torch.compile`` and ``torch.export`` do not contain
        it: call it between them.

        Parameters
        ----------
        w : Tensor
            (K, N), in this weight's dtype and on its device, contiguous along K: ``weight.t()`` of a linear layer. Its
            lines begin at multiples of 16 bytes.
        prune : bool
            Whether the two of largest magnitude in each group are kept from now on, as by :func:`sparsify`. By default,
            elements at the stored places are taken, whatever the others are.

        Returns
        -------
        Sparse
            This weight.

        Raises
        ------
        TypeError, ValueError
            If w does not fit. The message says what to do.
        CompileError, ToolchainError, StoreError, LoadError
            If the kernel cannot be compiled, stored or loaded, and PyTorch may not serve (``CUTLASS_OPS_STAND_IN=0``).

        Examples
        --------
        >>> w = torch.tensor([1.0, -3.0, 2.0, 0.5] * 8).repeat(4, 1).bfloat16().t()
        >>> sparse = co.sparsify(w)
        >>> sparse.update_(1 / w).to_dense()[:4, 0].tolist()
        [0.0, -0.333984375, 0.5, 0.0]
        >>> sparse.update_(1 / w, prune=True).to_dense()[:4, 0].tolist()
        [1.0, 0.0, 0.0, 2.0]
        """
        from cutlass_ops.run import compressing  # late: few programs change a weight

        _require_matrix("w", w, (self.dtype,))
        if w.shape != self.shape or w.device != self.device:
            raise ValueError(
                f"w has shape {tuple(w.shape)} on {w.device}, and this weight {tuple(self.shape)} on {self.device}: "
                "they must be the same"
            )
        line = w.stride(1) * w.itemsize if w.shape[1] > 1 else 0
        if w.stride(0) != 1 or line % 16 or w.data_ptr() % 16:
            raise ValueError(
                f"w has strides {w.stride()}: lines must be contiguous along K, and begin at multiples of 16 bytes: "
                "pass w.t().contiguous().t()"
            )
        compressing.compress(w.t(), self.values.t(), self.meta, prune=prune)
        return self

    # ---- In files ----

    def tensors(self, prefix: str = "") -> dict[str, Tensor]:
        """Return it as contiguous tensors by name, for ``safetensors`` or a state dict; `prefix` precedes each name."""
        form = torch.tensor([self.version], dtype=torch.int64)
        found = {"values": self.values.t(), "meta": self.meta, "form": form}
        return {prefix + name: x.contiguous() for name, x in found.items()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], prefix: str = "") -> Sparse:
        """Return what :meth:`tensors` was called of.

        Raises ValueError if a tensor is missing, or of another version of the sparse form.

        Examples
        --------
        >>> sparse = co.sparsify(torch.ones(64, 16).bfloat16())
        >>> co.Sparse.from_tensors(sparse.tensors("weight."), "weight.").shape
        torch.Size([64, 16])
        """
        missing = [prefix + name for name in ("values", "meta", "form") if prefix + name not in tensors]
        if missing:
            raise ValueError(f"tensors has no {', '.join(missing)}, which Sparse.tensors returns")
        (version,) = tensors[f"{prefix}form"].tolist()
        return cls(tensors[f"{prefix}values"].t(), tensors[f"{prefix}meta"], version)

    # ---- From other weights ----

    @classmethod
    def from_dense(cls, w: Tensor) -> Sparse:
        """Take a weight that is 2:4 sparse already.

        Zeros of either sign count as zeros, and become +0.0.

        Parameters
        ----------
        w : Tensor
            (K, N), in BF16, FP16, FP8 or INT8: ``weight.t()`` of a linear layer.

        Raises
        ------
        TypeError, ValueError
            If w does not fit, or has more than two elements that are not 0 in a group of four along K. The message says
            where.

        Examples
        --------
        >>> w = torch.eye(4).repeat(8, 1).bfloat16()
        >>> bool((co.Sparse.from_dense(w).to_dense() == w).all())
        True
        """
        _require_weight(w)
        chosen = w.t().float() != 0
        _require_two("w", w.t(), chosen, "prune it first, or call cutlass_ops.sparsify")
        return _of(w, chosen)

    @classmethod
    def from_semi_structured(cls, w: SparseSemiStructuredTensor) -> Sparse:
        """Take a weight of PyTorch, as ``torch.sparse.to_sparse_semi_structured`` returns it.

        Parameters
        ----------
        w : torch.sparse.SparseSemiStructuredTensor
            (N, K), the weight of a linear layer, in BF16, FP16 or INT8.

        Raises
        ------
        TypeError, ValueError
            If w is another tensor, or does not fit.
        """
        if not isinstance(w, SparseSemiStructuredTensor):
            raise TypeError(
                f"w must be a torch.sparse.SparseSemiStructuredTensor, not {type(w).__name__}: for a tensor with "
                "zeros in it, call from_dense"
            )
        dense: Tensor = w.to_dense()  # type: ignore[no-untyped-call]
        return cls.from_dense(dense.t())


def sparsify(w: Tensor, mask: Tensor | None = None) -> Sparse:
    """Prune a weight to two of each four elements along K.

    Without a mask, the two of largest magnitude are kept, the earlier of equal ones. So a weight that is 2:4 sparse
    already keeps its values. Magnitude pruning alone costs accuracy: fine-tune the pruned weight, or take a mask of a
    method with calibration, such as SparseGPT or Wanda.

    It computes on the device of its arguments, and takes several times the weight's memory.

    Parameters
    ----------
    w : Tensor
        (K, N), in BF16, FP16, FP8 or INT8: ``weight.t()`` of a linear layer. K must be a multiple
        of 32.
    mask : Tensor, optional
        (K, N), bool: which elements are kept, at most two of each four along K.

    Returns
    -------
    Sparse
        The pruned weight.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit, or the mask keeps more than two elements of a group. The message says where.

    Examples
    --------
    >>> w = torch.tensor([1.0, -3.0, 2.0, 0.5] * 8)[:, None].repeat(1, 4).bfloat16()
    >>> co.sparsify(w).to_dense()[:4, 0].tolist()
    [0.0, -3.0, 2.0, 0.0]
    >>> co.sparsify(w, mask=w < 1).to_dense()[:4, 0].tolist()
    [0.0, -3.0, 0.0, 0.5]
    """
    _require_weight(w)
    if mask is None:
        return _of(w, sparsity.kept(w.t()))
    _require_matrix("mask", mask, (torch.bool,))
    if mask.shape != w.shape or mask.device != w.device:
        raise ValueError(
            f"mask has shape {tuple(mask.shape)} on {mask.device}, and w {tuple(w.shape)} on {w.device}: they must be "
            "the same"
        )
    _require_two("mask", w.t(), mask.t(), "keep two at most")
    return _of(w, mask.t())


def _of(w: Tensor, chosen: Tensor) -> Sparse:
    """Store what is chosen, (N, K), of a weight (K, N)."""
    values, meta = sparsity.compressed(w.detach().t().contiguous(), chosen)
    return Sparse(values.t(), meta)


def _require_type(name: str, x: Tensor) -> None:
    if x.dtype not in _DTYPES:
        raise TypeError(f"{name} is {x.dtype}: a sparse weight is in one of {', '.join(map(str, _DTYPES))}")


def _require_weight(w: object) -> None:
    if isinstance(w, Tensor):
        _require_type("w", w)
    _require_matrix("w", w, _DTYPES)
    assert isinstance(w, Tensor)
    k, n = w.shape
    sparsity.require_extents(n, k)


def _require_two(name: str, w: Tensor, chosen: Tensor, advice: str) -> None:
    """Raise ValueError if more than two are chosen in a group of a weight (N, K)."""
    found = sparsity.too_many(chosen)
    if found is None:
        return
    row, k = found
    shown = ", ".join(f"{x:g}" for x in w[row, k : k + sparsity.GROUP].float().tolist())
    count = int(chosen[row, k : k + sparsity.GROUP].sum())
    raise ValueError(
        f"{name} is not 2:4 sparse: of column {row}, elements {k} to {k + 3} along K ({shown}) have {count} to keep: "
        f"{advice}"
    )


def _sparse(version: int, values: Tensor, meta: Tensor) -> Sparse:
    return Sparse(values, meta, version)


_pytree.register_pytree_node(
    Sparse,
    lambda x: ([x.values, x.meta], x.version),
    lambda tensors, version: _sparse(version, *tensors),
    serialized_type_name="cutlass_ops.Sparse",
    flatten_with_keys_fn=lambda x: (_named(x, "values", "meta"), x.version),
)
torch.serialization.add_safe_globals([Sparse])
