"""A copy of parameters with a norm folded in, and whether it still is what the parameters are."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cutlass_ops.operand import watching


class _Seen(NamedTuple):
    """A parameter as it was: its address or its version changes if the parameter does."""

    # Compared by identity, since another may come to its address. It is no weak reference, since
    # ``torch.utils.swap_tensors`` refuses tensors that have any.
    parameter: Tensor
    address: int
    version: int


def _address(p: Tensor) -> int:
    return 0 if watching.is_fake(p) else p.data_ptr()  # PyTorch warns of a fake tensor's address


class _Once(threading.local):
    made: dict[Any, Any] | None = None


_ONCE = _Once()


@contextlib.contextmanager
def once() -> Iterator[None]:
    """Context in which each module folds once, for a launch that is being prepared."""
    _ONCE.made = {}
    try:
        yield
    finally:
        _ONCE.made = None


def of_launch(module: Any, make: Callable[[], Any]) -> Any:
    """Return what a module folded for the launch that is being prepared; None if there is no such launch."""
    if torch.compiler.is_dynamo_compiling() or _ONCE.made is None:
        return None
    if module not in _ONCE.made:
        _ONCE.made[module] = make()
    return _ONCE.made[module]


class Folded:
    """What was folded from parameters. Copies and pickles of it are empty."""

    def __init__(self) -> None:
        # The value, and what it was folded from: one tuple, since several threads may fold.
        self._kept: tuple[Any, tuple[_Seen, ...]] | None = None

    @property
    def value(self) -> Any:
        """What is folded now, or None."""
        return None if self._kept is None else self._kept[0]

    def fold(self, make: Callable[[], Any], sources: Callable[[], Sequence[Tensor]]) -> Any:
        """Make the value. Raises ValueError if a source does not count its changes, as one made in inference mode."""
        parameters = sources()
        if any(p.is_inference() for p in parameters):
            raise ValueError(
                "a parameter was created inside torch.inference_mode() and has no version counter, so changes of it "
                "would not be noticed: create or load the module outside of it"
            )
        with torch.no_grad():
            value = make()
        self._kept = value, tuple(_Seen(p, _address(p), p._version) for p in parameters)
        return value

    def current(self, make: Callable[[], Any], sources: Callable[[], Sequence[Tensor]]) -> Any:
        """Return it for a call without gradients, made again if a parameter changed; None if that cannot be known.

        PyTorch's tracer takes what there is.
        """
        kept = self._kept
        if torch.compiler.is_compiling():
            return None if kept is None else kept[0]
        parameters = sources()
        for p in parameters:
            if p.is_inference():
                return None
        if kept is not None and len(parameters) == len(kept[1]):
            for (before, address, version), p in zip(kept[1], parameters, strict=True):
                if before is not p or p._version != version or _address(p) != address:
                    break
            else:
                return kept[0]
        # While a mode watches, it may be made of fake tensors, which no later call could use.
        return None if watching.is_watched() else self.fold(make, sources)

    def drop(self) -> None:
        """Forget the value before a training step: fused optimizers write parameters without counting a change."""
        if self._kept is not None:  # PyTorch's tracer would repeat an assignment in each call
            self._kept = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Folded, ()
