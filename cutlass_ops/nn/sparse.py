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
from cutlass_ops.run.sparse import Sparse


class SparseLinear(Activated, torch.nn.Module):
    """activation(x @ weight + bias) + residual, of a weight with two of each four elements along K, in one kernel.

    The weight is frozen, and no gradient passes through the layer. Its tensors are buffers: they are moved and saved
    with the module. A state dict also has a tensor ``form``, which loading compares with the layer's own.

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
    ) -> None:
        if not isinstance(sparse, Sparse):
            raise TypeError(f"sparse must be a cutlass_ops.Sparse, not {type(sparse).__name__}")
        if epilogue is not None and activation is not None:
            raise TypeError(f"activation is {activation!r}, and there is an epilogue: write the activation into it")
        ops = epilogues.linear_ops(activation) if epilogue is None else epilogues.ops_with(epilogue)
        super().__init__()
        self._set_activation(activation)
        self._epilogue, self._ops, self._dtype = epilogue, ops, sparse.dtype
        for name, tensor in sparse.tensors().items():
            self.register_buffer(name, tensor)
        self.register_buffer("bias", bias)

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
