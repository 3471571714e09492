"""A copy of parameters with a norm folded in, and whether it still is what the parameters are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cutlass_ops.run import watching


class _Seen(NamedTuple):
    """What a parameter was.

    Attributes
    ----------
    parameter : Tensor
        Another one may come to lie at its address. It is no weak reference, since ``torch.utils.swap_tensors`` refuses
        tensors that have any.
    address, version
        What changes when it does.
    """

    parameter: Tensor
    address: int
    version: int

    @classmethod
    def of(cls, p: Tensor) -> _Seen:
        return cls(p, _address(p), p._version)

    def is_still(self, p: Tensor) -> bool:
        parameter, address, version = self
        return parameter is p and p._version == version and _address(p) == address


def _address(p: Tensor) -> int:
    return 0 if watching.is_fake(p) else p.data_ptr()  # PyTorch warns of a fake tensor's address


class Folded:
    """What was folded from parameters. Copies and pickles of it are empty.

    Attributes
    ----------
    value
        It; None if nothing is folded now.
    """

    def __init__(self) -> None:
        self.value: Any = None
        self._seen: tuple[_Seen, ...] = ()

    def fold(self, make: Callable[[], Any], sources: Callable[[], Sequence[Tensor]]) -> Any:
        """Make it of the parameters that `sources` returns.

        Raises
        ------
        ValueError
            If a parameter does not count its changes, as one that was made in inference mode.
        """
        parameters = sources()
        if any(p.is_inference() for p in parameters):
            raise ValueError(
                "a parameter was created inside torch.inference_mode() and has no version counter, so changes of it "
                "would not be noticed: create or load the module outside of it"
            )
        with torch.no_grad():
            self.value = make()
        self._seen = tuple(map(_Seen.of, parameters))
        return self.value

    def current(self, make: Callable[[], Any], sources: Callable[[], Sequence[Tensor]]) -> Any:
        """Return it for a call without gradients, made again if a parameter changed; None if that cannot be known.

        PyTorch's tracer takes what there is.
        """
        if torch.compiler.is_compiling():
            return self.value
        parameters = sources()
        for p in parameters:
            if p.is_inference():
                return None
        if self.value is not None and len(parameters) == len(self._seen):
            for seen, p in zip(self._seen, parameters, strict=True):
                if not seen.is_still(p):
                    break
            else:
                return self.value
        # While a mode watches, it may be made of fake tensors, which no later call could use.
        return None if watching.is_watched() else self.fold(make, sources)

    def drop(self) -> None:
        """Forget it, ahead of a training step: fused optimizers write parameters without counting it as a change."""
        if self.value is not None:  # PyTorch's tracer would repeat an assignment in each call
            self.value = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Folded, ()
