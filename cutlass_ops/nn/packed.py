"""A linear layer of a packed weight with what follows it, as one kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cutlass_ops.epilogue import Epilogue, composed
from cutlass_ops.nn import epilogues, parallel, quantized
from cutlass_ops.nn.linear import Activated
from cutlass_ops.nn.reading import rows
from cutlass_ops.run.gemm import flattened
from cutlass_ops.run.packed import Packed
from cutlass_ops.run.values import OwnWeight


class PackedLinear(Activated, torch.nn.Module):
    """activation(x @ weight + bias) + residual, of a weight in 4 bits, in one kernel.

    The weight is frozen. Gradients pass to x, the bias and the residual, as for a linear layer. Its tensors are
    buffers: they are moved and saved with the module. A state dict also has a tensor ``form``, which loading compares
    with the layer's own.

    Parameters
    ----------
    packed : Packed
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
    packed : Packed
        The weight.
    bias : Tensor or None
        (N,).
    activation : str or None
        Read-only.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit. Also if the module is converted to another dtype, such as by ``half()``: the packed
        form is of one dtype.

    Examples
    --------
    >>> weight = torch.randn(32, 128).bfloat16()
    >>> layer = co.nn.PackedLinear(co.Packed.from_dense(weight.t()), torch.zeros(32).bfloat16(), activation="silu")
    >>> layer(torch.ones(4, 128).bfloat16()).shape
    torch.Size([4, 32])
    """

    values: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(
        self,
        packed: Packed,
        bias: Tensor | None = None,
        *,
        activation: str | None = None,
        epilogue: Epilogue | None = None,
    ) -> None:
        if not isinstance(packed, Packed):
            raise TypeError(f"packed must be a cutlass_ops.Packed, not {type(packed).__name__}")
        if epilogue is not None and activation is not None:
            raise TypeError(f"activation is {activation!r}, and there is an epilogue: write the activation into it")
        ops = epilogues.linear_ops(activation) if epilogue is None else epilogues.ops_with(epilogue)
        super().__init__()
        self._set_activation(activation)
        self._epilogue, self._ops = epilogue, ops
        self._group, self._numbers, self._dtype = packed.group, packed.numbers, packed.dtype
        for name, tensor in packed.tensors().items():
            self.register_buffer(name, tensor)
        self.register_buffer("bias", bias)

    @classmethod
    def of(
        cls, layer: torch.nn.Module, *, activation: str | None = None, dtype: torch.dtype | None = None
    ) -> PackedLinear:
        """Return the layer of a quantised one of GPTQModel, AutoGPTQ, AutoAWQ or compressed-tensors, to replace it.

        :func:`cutlass_ops.patch` recognises the same layers, and keeps their own tensors beside the packed ones.

        Parameters
        ----------
        layer : Module
            The layer. Its weight has 4 bits; it is not changed.
        activation : str, optional
            As for the class.
        dtype : torch.dtype, optional
            The type of x, to which scales are rounded: by default theirs.

        Raises
        ------
        TypeError, ValueError
            If the layer's class is not known, or its weight cannot be packed. The message says what does not fit.

        Examples
        --------
        >>> try:
        ...     co.nn.PackedLinear.of(torch.nn.Linear(64, 16))
        ... except TypeError as error:
        ...     print(str(error)[:41])
        layer is a torch.nn.modules.linear.Linear
        """
        bias: Any = getattr(layer, "bias", None)
        return cls(quantized.pack_any(layer, dtype), bias, activation=activation)

    @property
    def packed(self) -> Packed:
        """The weight."""
        return Packed(self.values.t(), self.scale, self._group, self._numbers)

    def forward(self, x: Tensor, *, residual: Tensor | None = None, **inputs: Any) -> Tensor:
        """Compute the layer.

        Parameters
        ----------
        x : Tensor
            (..., K), in the packed weight's dtype.
        residual : Tensor, optional
            (..., N), added after the activation.
        **inputs
            The epilogue's inputs, as for :func:`cutlass_ops.gemm`.

        Returns
        -------
        Tensor
            (..., N), in x's dtype; in FP32 with an FP32 residual, as in PyTorch.

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
        return multiplied(self._ops, x, self.packed, self.bias, residual, [inputs[name] for name in names])

    def extra_repr(self) -> str:
        """Return the settings, for the layer's ``repr``."""
        k, n = self.packed.shape
        said = f"in_features={k}, out_features={n}, bias={self.bias is not None}, {self._numbers}, group={self._group}"
        epilogue = "" if self._epilogue is None else f"epilogue={self._epilogue.name}"
        return ", ".join(filter(None, (said, super().extra_repr(), epilogue)))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedLinear:
        if fn(self.scale[:0]).dtype is not self._dtype:
            raise TypeError(
                f"the layer is packed for {self._dtype}, and cannot be converted: pack the weight again with dtype=, "
                "or move the module without a dtype"
            )
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        form, own = state_dict.get(f"{prefix}form"), self.packed.tensors()["form"]
        if isinstance(form, Tensor) and not torch.equal(form.cpu(), own):
            errors: list[str] = args[-1]
            errors.append(
                f"{prefix}form is {form.tolist()}, and this layer's is {own.tolist()}: version, numbers, group"
            )
            return
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def multiplied(
    ops: epilogues.LinearOps,
    x: Tensor,
    weight: OwnWeight,
    bias: Tensor | None,
    residual: Tensor | None = None,
    inputs: Sequence[Any] = (),
) -> Tensor:
    """Compute a layer of a weight in a form of its own by its ops."""
    op, given = epilogues.chosen(ops, bias, residual, inputs)
    own, tensors = flattened(op.epilogue, op.name, rows(x), weight, None)
    found: Tensor = own(*tensors, *given, out_dtype=parallel.sum_dtype(x, residual))
    return found


def gate_and_up(activation: str | None) -> tuple[epilogues.LinearOps, epilogues.LinearOps]:
    """Return the ops of both layers of a gate, of which the second multiplies by what the first has written."""
    return epilogues.linear_ops(activation), epilogues.ops_with(composed.swiglu_up)
