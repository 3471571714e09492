"""From a spec to the values that ``gemv.cu.j2`` renders: plain strings and numbers only.

The epilogue is straight-line code for one element of D, or for a pair of which one is stored;
``templates/include/cutlass_ops/gemv.h`` calls it.
"""

from __future__ import annotations

from typing import Any

from cutlass_ops.base import arch
from cutlass_ops.declare.config import GemvConfig
from cutlass_ops.declare.spec import KernelSpec, Operand
from cutlass_ops.epilogue.nodes import Input, Kind
from cutlass_ops.epilogue.operations import GATHERED
from cutlass_ops.kinds.lower import ACC, Compute, Lowered, Place, fields, lower, types


def context(spec: KernelSpec) -> dict[str, Any]:
    """Return the template's variables for a legal GEMV spec."""
    config = spec.config
    assert isinstance(config, GemvConfig)
    lowered = lower(spec.epilogue)
    gathered = spec.epilogue.gathered
    return types(spec, lowered, "cutlass_ops/places.h") | {
        "rows": config.rows,
        "warps": config.warps,
        "pieces": config.pieces,
        "means": {"mean": _flag("mean_of_a" in gathered), "mean_square": _flag("mean_square_of_a" in gathered)},
        "takes_means": bool(gathered),
        "weights": ["b", *spec.epilogue.products],
        "sides": _sides(spec),
        "reads": [
            *({"name": place.name, "value": _placed(place)} for place in lowered.places),
            *(
                {"name": i.name, "value": _read(i, operand)}
                for i, operand in spec.typed_inputs
                if i.kind is not Kind.PRODUCT and i.name in lowered.leaves
            ),
        ],
        "lines": _lines(spec, lowered),
        "overlaps": _flag(arch.target(spec.target).capability >= arch.OVERLAPS),
        "fields": fields(spec, lambda operand, is_output: False),
    }


def _flag(value: bool) -> str:
    return str(value).lower()


def _placed(place: Place) -> str:
    arguments = f"cutlass_ops::PlaceArguments<{place.functor}>{{{', '.join(place.arguments)}}}"
    return f"{arguments}.functor()(row, column)"


def _read(given: Input, operand: Operand) -> str:
    name, element = given.name, f"Element_{given.name}"
    if given.kind is Kind.SCALAR:
        return f"value(o.{name})"
    if given.kind is Kind.TILE:
        return f"float({_element(name, element, operand)})"
    return f"float(o.{name}[{'column' if given.kind is Kind.ROW else 'row'}])"


def _element(name: str, element: str, operand: Operand) -> str:
    return f"element<{element}, cutlass_ops::Major::k{operand.major.capitalize()}>(o.{name}, row, column)"


def _sides(spec: KernelSpec) -> int:
    """Return of how many columns a thread computes the epilogue: both of a pair where it swaps them."""
    return 2 if spec.epilogue.swaps_pairs else 1


def _lines(spec: KernelSpec, lowered: Lowered) -> list[str]:
    """Write the statements that compute an element of D and store it, and those of further outputs."""
    products = {name: at for at, name in enumerate((ACC, *spec.epilogue.products))}
    means = {name: f"means[{at}]" for at, name in enumerate(spec.epilogue.gathered)}
    computed, sides = {c.name for c in lowered.computes}, range(_sides(spec))

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

    lines = [line for c in lowered.computes for line in _array(c.name, [value(c, side) for side in sides])]
    operands = {"d": spec.d} | {o.name: operand for o, operand in spec.typed_outputs}
    for store in lowered.stores:
        name = store.output.name
        element = "ElementD" if name == "d" else f"Element_{name}"
        lines.append(f"{_element(name, element, operands[name])} = {element}({store.compute}[0]);")
    return lines


def _array(name: str, values: list[str]) -> list[str]:
    """Spell an array of a value's sides, of which two take a line each."""
    if len(values) == 1:
        return [f"float const {name}[kSides] = {{{values[0]}}};"]
    return [f"float const {name}[kSides] = {{", *(f"    {value}," for value in values), "};"]
