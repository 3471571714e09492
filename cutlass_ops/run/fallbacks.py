"""Plans without a kernel: calls that PyTorch or other ops serve."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from cutlass_ops.base import arch
from cutlass_ops.compilation.background import Wanted, may_be_tried
from cutlass_ops.declare.form import GROUPED
from cutlass_ops.epilogue.nodes import Kind
from cutlass_ops.operand.call import Call, shaped
from cutlass_ops.operand.operands import shape_of
from cutlass_ops.run import supply
from cutlass_ops.run.composition import Composition
from cutlass_ops.run.gathering import note
from cutlass_ops.run.plan import AnyPlan, Given

_Layout: TypeAlias = tuple[Any, ...] | None


@dataclass(frozen=True, slots=True)
class Fallback(AnyPlan):
    """Calls of one shape that PyTorch or other ops serve."""

    # Takes a warm call's arguments in a known layout, and returns its outputs; None if they need checking.
    compute: Callable[[Tensor, Tensor, tuple[Any, ...], Given], tuple[Tensor, ...] | None]
    # Layout of a, b and each input, which decides whether a kernel takes it: other arguments in it need no check.
    layouts: tuple[_Layout, ...]
    copies: int = 0
    by_pytorch: int = 0  # other ops count for themselves

    def run(  # noqa: D102
        self, a: Tensor, b: Tensor, inputs: tuple[Any, ...], given: Given, low: bool = False
    ) -> tuple[Tensor, ...] | None:
        if tuple(map(_laid_out, (a, b, *inputs))) != self.layouts:
            return None
        return self.compute(a, b, inputs, given)

    @property
    def takes(self) -> object:  # noqa: D102
        return self.layouts


def by_pytorch(
    call: Call,
    a: Tensor,
    b: Tensor,
    inputs: Sequence[Any],
    awaited: Future[Any] | None = None,
    failed: Wanted | None = None,
) -> Fallback | None:
    """Plan that PyTorch serves calls like a checked one with these arguments (:mod:`.composition`).

    `awaited` is done when the kernel is there. `failed` is the kernel, if it cannot be had: a later call tries again.
    Returns None if each such call needs its own checks.
    """
    arguments, compute = call.arguments, Composition.of(call)
    checked = (arguments.a, arguments.b, *arguments.inputs.values())
    if arguments.copied or len(checked) != len(inputs) + 2:
        return None
    views = tuple(map(_view, (a, b, *inputs), checked))
    shapes = tuple(tuple(arguments.output_shape(o)) for o in call.graph.outputs)

    def run(a: Tensor, b: Tensor, inputs: tuple[Any, ...], given: Given) -> tuple[Tensor, ...] | None:
        if given is not None and any(x is not None for x in given):
            return None
        if not supply.serves_again() or (failed is not None and may_be_tried(failed)):
            return None
        missed = awaited or failed
        if missed is not None:
            note(missed)
        a, b, *flat = [
            x if view is None else x.as_strided(*view, x.storage_offset())
            for x, view in zip((a, b, *inputs), views, strict=True)
        ]
        return tuple(map(shaped, compute(a, b, flat), shapes))

    return Fallback(run, tuple(map(_laid_out, (a, b, *inputs))), by_pytorch=1)


class _Like(NamedTuple):
    """How an argument lies in a checked call, and which of its extents follow the rows of A."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype | None  # None for a number
    own: tuple[int, ...] | None  # extents after those of A's rows; None if nothing follows these

    def read(self, x: Any, batch: tuple[int, ...], device: torch.device) -> Any:
        """Return an argument as the checked one was computed with; None if it needs checking."""
        shape, strides, dtype, own = self
        if dtype is None or not isinstance(x, Tensor):
            return None if isinstance(x, Tensor) or dtype is not None else x
        if x.dtype is not dtype or x.device != device:
            return None
        # Some kernels need aligned matrices: a misaligned one is checked, and refused if no kernel could read it later.
        if own is None:
            if x.shape != shape or x.stride() != strides:
                return None
            return x if len(shape) < 2 or x.data_ptr() % arch.TMA_ALIGNMENT_BYTES == 0 else None
        if x.shape != batch + own:
            return None
        if len(batch) > 1:
            return x.view(-1, *own) if x.is_contiguous() else None
        if not own:
            return x if batch == (1,) or x.stride(0) == 1 else None
        if batch == (1,):
            return x if x.data_ptr() % arch.TMA_ALIGNMENT_BYTES == 0 else None
        return x if self._lies_alike(x) else None

    def _lies_alike(self, x: Tensor) -> bool:
        """Whether a kernel for the checked argument reads x, too: no value twice, and from lines as aligned."""
        line, inner = x.stride()
        extent = x.shape[1]
        if self.strides[1] != 1:
            line, inner, extent = inner, line, x.shape[0]
        return inner == 1 and line >= extent and (x.data_ptr() | line * x.itemsize) % arch.TMA_ALIGNMENT_BYTES == 0


_FOLLOW_ROWS = (Kind.TILE, Kind.COL, Kind.BLOCKS_A)


@dataclass(frozen=True, slots=True)
class AtAnyRows(AnyPlan):
    """Calls that PyTorch serves and that differ from a checked one in their number of rows alone.

    One plan for all of them: a plan for each number of rows would take as long to make as many calls take, and give
    Python's garbage collector more to look through.
    """

    compute: Composition
    device: torch.device
    likes: tuple[_Like, ...]  # of a, b and each input
    kinds: tuple[Kind, ...]  # of the outputs
    n: int
    copies: int = 0
    by_pytorch: int = 1

    @classmethod
    def of(cls, call: Call) -> AtAnyRows | None:
        """Return the plan of calls like a checked one; None if each of them needs its own checks."""
        arguments, graph = call.arguments, call.graph
        if arguments.spread or arguments.copied or arguments.form.stacked:
            return None
        follow = {i.name for i in graph.inputs if i.kind in _FOLLOW_ROWS}
        operands = _like(arguments.a, (arguments.problem.k,)), _like(arguments.b)
        likes = list(operands)
        for name, x in arguments.inputs.items():
            likes.append(_like(x, tuple(x.shape[1:]) if isinstance(x, Tensor) and name in follow else None))
        kinds, n = tuple(o.kind for o in graph.outputs), arguments.problem.n
        return cls(Composition.of(call), arguments.a.device, tuple(likes), kinds, n)

    def run(  # noqa: D102
        self, a: Tensor, b: Tensor, inputs: tuple[Any, ...], given: Given, low: bool = False
    ) -> tuple[Tensor, ...] | None:
        batch, device, flat = a.shape[:-1], self.device, []
        for like, x in zip(self.likes, (a, b, *inputs), strict=True):
            read = like.read(x, batch, device)
            if read is None:
                return None
            flat.append(read)
        shapes = [shape_of(kind, batch, self.n) for kind in self.kinds]
        # In the caller's tensors, rows of no group stay as they are.
        if given is not None and (
            self.compute.form == GROUPED or not _can_be_written(given, shapes, (a, b, *inputs), device)
        ):
            return None
        results = [
            x if x.shape == shape else shaped(x, shape)
            for x, shape in zip(self.compute(flat[0], flat[1], flat[2:]), shapes, strict=True)
        ]
        if given is None:
            return tuple(results)
        return tuple(x if to is None else to.copy_(x) for x, to in zip(results, given, strict=True))

    @property
    def takes(self) -> object:  # noqa: D102
        return self.likes


def _like(x: Any, own: tuple[int, ...] | None = None) -> _Like:
    if not isinstance(x, Tensor):
        return _Like((), (), None, None)
    return _Like(tuple(x.shape), tuple(x.stride()), x.dtype, own)


def _can_be_written(
    given: Sequence[Tensor | None], shapes: Sequence[tuple[int, ...]], read: Sequence[Any], device: torch.device
) -> bool:
    """Whether outputs surely need no further check: these lie as new ones would, in storages of their own."""
    read_from = [x.untyped_storage().data_ptr() for x in read if isinstance(x, Tensor)]
    for x, shape in zip(given, shapes, strict=True):
        if x is not None:
            if x.shape != shape or x.device != device or not x.is_contiguous():
                return False
            read_from.append(x.untyped_storage().data_ptr())
    written = read_from[len(read_from) - sum(x is not None for x in given) :]
    return all(read_from.count(at) == 1 for at in written)


def by_ops(
    compute: Callable[..., Any], operands: Sequence[Any], out_dtype: torch.dtype, names: tuple[str, ...]
) -> Fallback:
    """Plan that other ops serve calls like one that no kernel serves, whose a, b and inputs are `operands`.

    `compute` takes a call's arguments, with `out` and `out_dtype`. `names` are those of the outputs.
    """

    def run(a: Tensor, b: Tensor, inputs: tuple[Any, ...], given: Given) -> tuple[Tensor, ...]:
        found = compute(a, b, *inputs, out=None if given is None else as_out(names, given), out_dtype=out_dtype)
        return (found,) if len(names) == 1 else tuple(found)

    return Fallback(run, tuple(map(_laid_out, operands)))


def as_out(names: Sequence[str], given: Sequence[Tensor | None]) -> Any:
    """Return the outputs that a caller gave as an op's `out`: None, D, or a mapping."""
    if len(names) == 1:
        return given[0]
    return {name: x for name, x in zip(names, given, strict=True) if x is not None} or None


def _view(given: Any, checked: Any) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the shape and strides in which an argument is computed with; None if it is not changed."""
    if not isinstance(given, Tensor) or given is checked:
        return None
    return tuple(checked.shape), tuple(checked.stride())


def _laid_out(value: Any) -> _Layout:
    if not isinstance(value, Tensor):
        return None
    return value.shape, value.stride(), value.dtype, value.device, value.data_ptr() % arch.TMA_ALIGNMENT_BYTES
