"""From a spec to the values that ``pointwise.cu.j2`` renders: plain strings and numbers only.

The epilogue is straight-line code for one element of D; ``templates/include/cutlass_ops/pointwise.h`` calls it.
"""

from __future__ import annotations

from typing import Any

from cutlass_ops.base import arch
from cutlass_ops.declare.spec import KernelSpec, Operand
from cutlass_ops.epilogue.nodes import Input, Kind, Output
from cutlass_ops.kinds.elementwise import reads, statements
from cutlass_ops.kinds.lower import REDUCERS, fields, flag, lower, types
from cutlass_ops.kinds.pointwise.config import PointwiseConfig
from cutlass_ops.kinds.pointwise.kind import state_bytes


def context(spec: KernelSpec) -> dict[str, Any]:
    """Return the template's variables for a legal spec of a pointwise kernel."""
    config = spec.config
    assert isinstance(config, PointwiseConfig)
    lowered = lower(spec.epilogue)
    sides = 2 if spec.epilogue.swaps_pairs else 1
    used = [(i, operand) for i, operand in spec.typed_inputs if i.name in lowered.leaves]
    operands = {"d": spec.d} | {o.name: operand for o, operand in spec.typed_outputs}
    stores = {store.output.name: store.compute for store in lowered.stores}
    tiles = [o for o in spec.epilogue.outputs if o.reduction is None]
    reductions = [o for o in spec.epilogue.outputs if o.reduction is not None]
    return types(spec, lowered, "cutlass_ops/places.h") | {
        "rows": config.rows,
        "state_bytes": state_bytes(spec),
        "tiles": [_piece(i.name, f"Element_{i.name}", operand) for i, operand in used if i.kind is Kind.TILE],
        "rows_of_n": [i.name for i, _ in used if i.kind is Kind.ROW],
        "columns_of_m": [i.name for i, _ in used if i.kind is Kind.COL],
        "scalars": [i.name for i, _ in used if i.kind is Kind.SCALAR],
        "reads": reads(spec, lowered, _value),
        "sides": sides,
        "lines": statements(spec.epilogue, lowered, sides),
        "stores": [
            _piece(o.name, "ElementD" if o.name == "d" else f"Element_{o.name}", operands[o.name])
            | {"value": f"{stores[o.name]}[0]"}
            for o in tiles
        ],
        "reductions": [_reduction(o) | {"value": f"{stores[o.name]}[0]"} for o in reductions],
        "overlaps": flag(arch.target(spec.target).capability >= arch.OVERLAPS),
        "fields": fields(spec, lambda operand, is_output: False),
    }


def _piece(name: str, element: str, operand: Operand) -> dict[str, str]:
    """Spell the type of eight neighbours of an (M, N) tensor."""
    arguments = f"{element}, cutlass_ops::Major::k{operand.major.capitalize()}, {operand.alignment}"
    return {"name": name, "piece": f"cutlass_ops::pointwise::Piece<{arguments}>"}


def _value(given: Input, _: Operand) -> str:
    """Spell the value of an input for one of the eight elements."""
    if given.kind is Kind.TILE:
        return f"float(pieces.{given.name}.values[i])"
    if given.kind is Kind.ROW:
        return f"fixed.{given.name}[i]"
    return f"{'line' if given.kind is Kind.COL else 'fixed'}.{given.name}"


def _reduction(output: Output) -> dict[str, Any]:
    return {
        "name": output.name,
        "reduce": f"cutlass_ops::reduce::{REDUCERS[output.reduction or '']}",
        "by_columns": output.kind is Kind.ROW,
        "partial": f"partial_{output.name}_",  # the underscore keeps it apart from names that users give
    }
