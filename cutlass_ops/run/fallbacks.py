"""Plans without a kernel: calls of one shape that PyTorch or other ops serve."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from cutlass_ops.base import arch
from cutlass_ops.compilation.background import Wanted
from cutlass_ops.operand.call import Call
from cutlass_ops.run import supply
from cutlass_ops.run.composition import Composition
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
    call: Call, a: Tensor, b: Tensor, inputs: Sequence[Any], failed: Wanted | None = None
) -> Fallback | None:
    """Plan that PyTorch serves calls like a checked one with these arguments (:mod:`.composition`).

    `failed` is the kernel, if it cannot be had: a later call tries again. Returns None if each such call needs its own
    checks.
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
        if not supply.serves_again() or (failed is not None and supply.may_be_tried(failed)):
            return None
        a, b, *flat = [
            x if view is None else x.as_strided(*view, x.storage_offset())
            for x, view in zip((a, b, *inputs), views, strict=True)
        ]
        return tuple(x.view(shape) for x, shape in zip(compute(a, b, flat), shapes, strict=True))

    return Fallback(run, tuple(map(_laid_out, (a, b, *inputs))), by_pytorch=1)


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
