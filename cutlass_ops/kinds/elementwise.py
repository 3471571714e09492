"""An epilogue as straight-line C++ for one element of D, or for a pair of which one is stored."""

from __future__ import annotations

from collections.abc import Callable

from cutlass_ops.declare.spec import KernelSpec, Operand
from cutlass_ops.epilogue.graph import Graph
from cutlass_ops.epilogue.nodes import Input, Kind
from cutlass_ops.epilogue.operations import GATHERED
from cutlass_ops.kinds.lower import ACC, Compute, Lowered


def reads(
    spec: KernelSpec, lowered: Lowered, value: Callable[[Input, Operand], str] | None = None
) -> list[dict[str, str]]:
    """List the values that an element of D needs, those of places first, and how each is read."""
    found = []
    for place in lowered.places:
        arguments = f"cutlass_ops::PlaceArguments<{place.functor}>{{{', '.join(place.arguments)}}}"
        found.append({"name": place.name, "value": f"{arguments}.functor()(row, column)"})
    for given, operand in spec.typed_inputs:
        if given.name in lowered.leaves and given.kind is not Kind.PRODUCT:
            found.append({"name": given.name, "value": (value or _read)(given, operand)})
    return found


def _read(given: Input, operand: Operand) -> str:
    name, of = given.name, f"Element_{given.name}"
    if given.kind is Kind.SCALAR:
        return f"value(o.{name})"
    if given.kind is Kind.TILE:
        return f"float({element(name, of, operand)})"
    return f"float(o.{name}[{'column' if given.kind is Kind.ROW else 'row'}])"


def element(name: str, of: str, operand: Operand) -> str:
    """Spell an element of an (M, N) tensor."""
    return f"element<{of}, cutlass_ops::Major::k{operand.major.capitalize()}>(o.{name}, row, column)"


def statements(epilogue: Graph, lowered: Lowered, count: int) -> list[str]:
    """Write the statements that compute the values of an element, and of that beside it where `count` is 2."""
    products = {name: at for at, name in enumerate((ACC, *epilogue.products))}
    means = {name: f"means[{at}]" for at, name in enumerate(epilogue.gathered)}
    computed, sides = {c.name for c in lowered.computes}, range(count)

    def spelled(name: str, side: int) -> str:
        if name in GATHERED:
            return means[name]
        if name in products:
            return f"products[{side}][{products[name]}]"
        return f"{name}[{side}]" if name in computed else f"in[{side}].{name}"

    def value(compute: Compute, side: int) -> str:
        if compute.swaps_pairs:
            return spelled(compute.args[0], 1 - side)
        return f"{compute.struct}::apply({', '.join(spelled(arg, side) for arg in compute.args)})"

    return [line for c in lowered.computes for line in _array(c.name, [value(c, side) for side in sides])]


def _array(name: str, values: list[str]) -> list[str]:
    """Spell an array of a value's sides, of which two take a line each."""
    if len(values) == 1:
        return [f"float const {name}[kSides] = {{{values[0]}}};"]
    return [f"float const {name}[kSides] = {{", *(f"    {value}," for value in values), "};"]
