"""What an epilogue asks of a kernel's stores, and which kinds of kernels can be legal for it."""

from __future__ import annotations

from collections.abc import Iterator

from cutlass_ops.declare.spec import KernelSpec, Operand
from cutlass_ops.epilogue.nodes import Input, Kind
from cutlass_ops.epilogue.operations import REDUCTIONS


def source(spec: KernelSpec) -> tuple[Input, Operand] | None:
    """Return the tile input that TMA loads as the collective epilogue's C, as :func:`source_name` says."""
    return next(((i, operand) for i, operand in spec.typed_inputs if i.kind is Kind.TILE and operand.aligned), None)


def source_name(spec: KernelSpec) -> str | None:
    """Return the name of the tile input that TMA loads as the collective epilogue's C, or None if there is none.

    It is the first one aligned to 16 bytes. Further tile inputs are loaded by visitors of their own.
    """
    found = source(spec)
    return found and found[0].name


def plain_epilogue(spec: KernelSpec) -> bool:
    """Whether ``epilogue.h`` stores D: where TMA can, and no tensor has D's size but it and CUTLASS's C."""
    read = [i.name for i in spec.epilogue.inputs if i.kind is Kind.TILE]
    written = [o for o in spec.epilogue.outputs[1:] if o.reduce is None]
    return spec.d.aligned and not written and all(name == source_name(spec) for name in read)


def sm80_serves(spec: KernelSpec) -> bool:
    """Whether an :class:`Sm80Config` can be legal for what a spec computes; its rules say the same."""
    pairs = not spec.epilogue.swaps_pairs or (spec.d.major == "row" and spec.d.alignment > 1)
    return pairs and not spec.epilogue.products


def sm90_serves(spec: KernelSpec) -> bool:
    """Whether an :class:`Sm90Config` can be legal for what a spec computes; its rules say the same."""
    plain = plain_epilogue(spec)
    alone = plain and not spec.outputs and source_name(spec) is None and spec.b.major == "col"
    own = spec.epilogue.swaps_pairs or any(paired(spec))
    return (plain or not own) and (alone or not spec.epilogue.products)


def paired(spec: KernelSpec) -> Iterator[str]:
    """Yield the names of the outputs that are reductions that keep two numbers, which CUTLASS's own do not."""
    return (o.name for o in spec.epilogue.outputs if o.reduce is not None and REDUCTIONS[o.reduce].paired)
