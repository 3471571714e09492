"""Plans without a kernel: calls of one shape that PyTorch or other ops serve."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cutlass_ops.base import arch
from cutlass_ops.declare.form import DENSE
from cutlass_ops.run.call import Call
from cutlass_ops.run.peers import Peer, peers
from cutlass_ops.run.plan import AnyPlan, Given

_ANY = 1 << 20  # an alignment above every kernel's


@dataclass(frozen=True, slots=True)
class PeerPlan:
    """Calls of one shape served by PyTorch, which was faster there and which the user allowed.

    Attributes
    ----------
    name : str
        The peer's name in :func:`cutlass_ops.run.peers.peers`.
    peer : callable
        The peer.
    inputs : tuple
        Shape, dtype and device of each tensor among the epilogue's inputs; None for a number.
    shape : tuple of int
        D's shape for the caller.
    """

    name: str
    peer: Peer
    inputs: tuple[tuple[tuple[int, ...], torch.dtype, torch.device] | None, ...]
    shape: tuple[int, ...]

    def run(
        self, a: Tensor, b: Tensor, inputs: tuple[Any, ...], given: Given, low: bool = False
    ) -> tuple[Tensor, ...] | None:
        """Compute a warm call; None if its inputs differ from the plan's.

        They are compared because PyTorch would broadcast shapes that a kernel refuses.
        """
        if tuple(map(_described, inputs)) != self.inputs or b.device != a.device:
            return None
        out = None if given is None else given[0]
        if out is not None and (out.shape != self.shape or out.device != a.device):
            return None
        d = self._compute(a, b, inputs)
        return (d,) if out is None else (out.copy_(d),)

    @property
    def alignment(self) -> int:
        """What a kernel would ask of matrices: it comes first, since PyTorch was faster."""
        return _ANY

    @property
    def copies(self) -> int:
        """How many matrices a kernel copies: there is no kernel."""
        return 0

    def same_as(self, other: AnyPlan) -> bool:
        """Whether another plan for the same shape would serve the same calls."""
        return isinstance(other, PeerPlan) and other.inputs == self.inputs

    def launch_call(self, call: Call) -> None:
        """Compute a checked call."""
        inputs = list(call.arguments.inputs.values())
        call.outputs[0].copy_(self._compute(call.arguments.a, call.arguments.b, inputs))

    def _compute(self, a: Tensor, b: Tensor, inputs: Sequence[Any]) -> Any:
        # Autocast would change the operands' dtypes, unlike for a kernel.
        with torch.autocast(a.device.type, enabled=False):
            return self.peer(a, b, inputs)


@dataclass(frozen=True, slots=True)
class OpsPlan:
    """Calls of one shape served by other ops, since no single kernel takes such operands.

    Attributes
    ----------
    compute : callable
        Computes the outputs from a call's arguments, with `out` and `out_dtype`.
    operands : tuple
        Layout of a, b and each input of the epilogue, which decides whether a kernel takes it.
    out_dtype : torch.dtype
        D's dtype.
    names : tuple of str
        The outputs' names.
    """

    compute: Callable[..., Any]
    operands: tuple[tuple[Any, ...] | None, ...]
    out_dtype: torch.dtype
    names: tuple[str, ...]

    def run(
        self, a: Tensor, b: Tensor, inputs: tuple[Any, ...], given: Given, low: bool = False
    ) -> tuple[Tensor, ...] | None:
        """Compute a warm call; None if its operands differ from the plan's, since a kernel may take them."""
        if tuple(map(_laid_out, (a, b, *inputs))) != self.operands:
            return None
        out = None if given is None else as_out(self.names, given)
        found = self.compute(a, b, *inputs, out=out, out_dtype=self.out_dtype)
        return (found,) if len(self.names) == 1 else tuple(found)

    @property
    def alignment(self) -> int:
        """What a kernel would ask of matrices: it comes first, since its operands are compared as a whole."""
        return _ANY

    @property
    def copies(self) -> int:
        """How many matrices a kernel copies: there is no kernel."""
        return 0

    def same_as(self, other: AnyPlan) -> bool:
        """Whether another plan for the same shape would serve the same calls."""
        return isinstance(other, OpsPlan) and other.operands == self.operands


def as_out(names: Sequence[str], given: Sequence[Tensor | None]) -> Any:
    """Return the outputs that a caller gave as an op's `out`: None, D, or a mapping."""
    if len(names) == 1:
        return given[0]
    return {name: x for name, x in zip(names, given, strict=True) if x is not None} or None


def make_ops_plan(
    compute: Callable[..., Any], operands: Sequence[Tensor | float], out_dtype: torch.dtype, names: tuple[str, ...]
) -> OpsPlan:
    """Plan calls like one that no kernel serves.

    Parameters
    ----------
    compute : callable
        Computes the outputs from a call's arguments, with `out` and `out_dtype`.
    operands : sequence
        The checked call's a, b and inputs.
    out_dtype : torch.dtype
        D's dtype.
    names : tuple of str
        The outputs' names.
    """
    return OpsPlan(compute, tuple(map(_laid_out, operands)), out_dtype, names)


def can_fall_back(call: Call, peer: str = "eager") -> bool:
    """Whether :class:`PeerPlan` can serve a call with a peer: two dimensions, and D in A's dtype as the only output.

    Peers of FP8 operands give BF16, and PyTorch would convert that to FP8 by another rule.
    """
    arguments = call.arguments
    return (
        arguments.form == DENSE
        and peer in peers(call.graph)
        and len(arguments.leading) == 1
        and len(call.outputs) == 1
        and call.outputs[0].dtype == arguments.a.dtype
        and call.outputs[0].dtype.itemsize > 1
    )


def make_peer_plan(name: str, call: Call) -> PeerPlan:
    """Plan calls like this one with PyTorch.

    Parameters
    ----------
    name : str
        The peer's name in :func:`cutlass_ops.run.peers.peers`.
    call : Call
        The call. Its A has two dimensions, and D, of A's dtype, is its only output.
    """
    inputs = tuple(map(_described, call.arguments.inputs.values()))
    return PeerPlan(name, peers(call.graph)[name], inputs, (call.problem.m, call.problem.n))


def _described(value: Tensor | float) -> tuple[tuple[int, ...], torch.dtype, torch.device] | None:
    return (tuple(value.shape), value.dtype, value.device) if isinstance(value, Tensor) else None


def _laid_out(value: Tensor | float) -> tuple[Any, ...] | None:
    if not isinstance(value, Tensor):
        return None
    return value.shape, value.stride(), value.dtype, value.device, value.data_ptr() % arch.TMA_ALIGNMENT_BYTES
