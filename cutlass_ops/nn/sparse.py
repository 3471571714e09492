"""A linear layer of a 2:4 sparse weight with what follows it, as one kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cutlass_ops.epilogue import Epilogue
from cutlass_ops.nn import epilogues, parallel
from cutlass_ops.nn.linear import Activated
from cutlass_ops.nn.reading import rows
from cutlass_ops.run.gemm import flattened
from cutlass_ops.run.sparse import Sparse, sparsify


class SparseLinear(Activated, torch.nn.Module):
    """activation(x @ weight + bias) + residual, of a weight with two of each four elements along K, in one kernel.

    Gradients pass through the layer. By default its own tensors are buffers, and so frozen: they are moved and saved
    with the module. With `trained`, stored elements and bias are parameters, which keep their places: the layer is
    trained with a fixed mask. A state dict also has a tensor ``form``, which loading compares with the layer's own.

    Parameters
    ----------
    sparse : Sparse
        The weight (K, N).
    bias : Tensor, optional
        (N,), in FP16, BF16 or FP32.
    activation : str, optional
        As for :class:`cutlass_ops.nn.Linear`.
    epilogue : Epilogue, optional
        In place of an activation: D = epilogue(x @ weight + bias) + residual. Its inputs are passed to the call by
        name. It has D as its only output.
    trained : bool
        Whether the stored elements and the bias are parameters. The weight is then in BF16 or FP16.

    Attributes
    ----------
    sparse : Sparse
        The weight.
    bias : Tensor or None
        (N,).
    activation : str or None
        Read-only.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit. Also if the module is converted to another dtype, such as by ``half()``.

    Examples
    --------
    >>> weight = torch.randn(32, 128).bfloat16()
    >>> layer = co.nn.SparseLinear(co.sparsify(weight.t()), torch.zeros(32).bfloat16(), activation="silu")
    >>> layer(torch.ones(4, 128).bfloat16()).shape
    torch.Size([4, 32])
    """

    values: Tensor
    meta: Tensor
    bias: Tensor | None

    def __init__(
        self,
        sparse: Sparse,
        bias: Tensor | None = None,
        *,
        activation: str | None = None,
        epilogue: Epilogue | None = None,
        trained: bool = False,
    ) -> None:
        if not isinstance(sparse, Sparse):
            raise TypeError(f"sparse must be a cutlass_ops.Sparse, not {type(sparse).__name__}")
        if epilogue is not None and activation is not None:
            raise TypeError(f"activation is {activation!r}, and there is an epilogue: write the activation into it")
        ops = epilogues.linear_ops(activation) if epilogue is None else epilogues.ops_with(epilogue)
        super().__init__()
        self._set_activation(activation)
        self._epilogue, self._ops, self._dtype = epilogue, ops, sparse.dtype
        if trained and sparse.dtype.itemsize == 1:
            raise TypeError(
                f"trained is True, and sparse is in {sparse.dtype}, which has no gradients: use BF16 or FP16"
            )
        for name, tensor in {**sparse.tensors(), "bias": bias}.items():
            if trained and tensor is not None and name in ("values", "bias"):
                self.register_parameter(name, torch.nn.Parameter(tensor))
            else:
                self.register_buffer(name, tensor)

    @classmethod
    def of(
        cls,
        layer: torch.nn.Linear,
        *,
        prune: bool = False,
        activation: str | None = None,
        epilogue: Epilogue | None = None,
        trained: bool = False,
    ) -> SparseLinear:
        """Return the layer of a linear one, to replace it. :func:`cutlass_ops.patch` keeps the weight instead.

        Parameters
        ----------
        layer : torch.nn.Linear
            The layer, whose weight is 2:4 sparse, in BF16 or FP16. It is not changed.
        prune : bool
            Whether to prune its weight by magnitude, as :func:`cutlass_ops.sparsify` does. Otherwise a weight that is
            not 2:4 sparse is an error.
        activation, epilogue, trained
            As for the class.

        Raises
        ------
        TypeError, ValueError
            If `layer` is no linear layer, or its weight does not fit. The message says where.

        Examples
        --------
        >>> layer = torch.nn.Linear(64, 16, dtype=torch.bfloat16)
        >>> co.nn.SparseLinear.of(layer, prune=True).sparse.shape
        torch.Size([64, 16])
        """
        if not isinstance(layer, torch.nn.Linear):
            raise TypeError(f"layer is a {type(layer).__name__}: pass a torch.nn.Linear")
        make = sparsify if prune else Sparse.from_dense
        bias: Any = layer.bias
        sparse, bias = make(layer.weight.t()), None if bias is None else bias.detach().clone()
        return cls(sparse, bias, activation=activation, epilogue=epilogue, trained=trained)

    @property
    def sparse(self) -> Sparse:
        """The weight."""
        return Sparse(self.values.t(), self.meta)

    def forward(self, x: Tensor, *, residual: Tensor | None = None, **inputs: Any) -> Tensor:
        """Compute the layer.

        Parameters
        ----------
        x : Tensor
            (..., K), in the weight's dtype.
        residual : Tensor, optional
            (..., N), added after the activation.
        **inputs
            The epilogue's inputs, as for :func:`cutlass_ops.gemm`.

        Returns
        -------
        Tensor
            (..., N), in x's dtype, or BF16 for 8 bits; in FP32 with an FP32 residual, as in PyTorch.

        Raises
        ------
        TypeError, ValueError
            If an argument does not fit. The message calls x ``a`` and the weight ``b``.
        """
        names = () if self._epilogue is None else tuple(i.name for i in self._epilogue.graph.inputs)
        wrong = sorted(set(names) ^ set(inputs))
        if wrong:
            what = "is missing" if wrong[0] in names else "is no input"
            raise TypeError(f"{wrong[0]} {what}: this layer takes {', '.join(names) or 'nothing'} by name")
        op, given = epilogues.chosen(self._ops, self.bias, residual, [inputs[name] for name in names])
        own, tensors = flattened(op.epilogue, op.name, rows(x), self.sparse, None)
        out_dtype = parallel.sum_dtype(x, residual) if x.is_floating_point() and x.itemsize > 1 else None
        found: Tensor = own(*tensors, *given, out_dtype=out_dtype)
        return found

    def extra_repr(self) -> str:
        """Return the settings, for the layer's ``repr``."""
        k, n = self.sparse.shape
        said = f"in_features={k}, out_features={n}, bias={self.bias is not None}, {self._dtype}"
        epilogue = "" if self._epilogue is None else f"epilogue={self._epilogue.name}"
        return ", ".join(filter(None, (said, super().extra_repr(), epilogue)))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SparseLinear:
        if fn(self.values[:0]).dtype is not self._dtype:
            raise TypeError(
                f"the layer's weight is sparse in {self._dtype}, and cannot be converted: make it of a weight in the "
                "other dtype, or move the module without a dtype"
            )
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        form, own = state_dict.get(f"{prefix}form"), self.sparse.tensors()["form"]
        if isinstance(form, Tensor) and not torch.equal(form.cpu(), own):
            errors: list[str] = args[-1]
            errors.append(f"{prefix}form is {form.tolist()}, and this layer's is {own.tolist()}: version")
            return
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
