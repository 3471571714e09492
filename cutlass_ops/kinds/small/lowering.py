"""From a spec to the values that ``small.cu.j2`` renders: plain strings and numbers only.

The epilogue is straight-line code for one element of D; ``templates/include/cutlass_ops/small.h`` calls it.
"""

from __future__ import annotations

from typing import Any

from cutlass_ops.base import arch
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.epilogue.nodes import Kind
from cutlass_ops.kinds.elementwise import element, reads, statements
from cutlass_ops.kinds.lower import fields, flag, lower, types
from cutlass_ops.kinds.small.config import SmallConfig
from cutlass_ops.kinds.small.kind import shared_memory


def context(spec: KernelSpec) -> dict[str, Any]:
    """Return the template's variables for a legal spec of a small kernel."""
    config = spec.config
    assert isinstance(config, SmallConfig)
    lowered = lower(spec.epilogue)
    tile, target = config.threadblock, arch.target(spec.target)
    first, *others = lowered.stores
    operands = {o.name: operand for o, operand in spec.typed_outputs}
    stored = [
        f"{element(s.output.name, f'Element_{s.output.name}', operands[s.output.name])} = "
        f"Element_{s.output.name}({s.compute}[0]);"
        for s in others
    ]
    return types(spec, lowered, "cutlass_ops/places.h") | {
        "tile": f"{tile.m}, {tile.n}, {tile.k}",
        "stages": config.stages,
        "shared_memory": shared_memory(spec, config),
        "warps": config.warps,
        "reads": reads(spec, lowered),
        "lines": [*statements(spec.epilogue, lowered, 1), *stored, f"return {first.compute}[0];"],
        "overlaps": flag(target.capability >= arch.OVERLAPS),
        "fields": [
            {**field, "own": _own(kind, field["name"])}
            for field, kind in zip(fields(spec, lambda operand, is_output: True), _kinds(spec), strict=True)
        ],
    }


def _kinds(spec: KernelSpec) -> list[Kind]:
    return [*(i.kind for i in spec.epilogue.inputs), *(o.kind for o in spec.epilogue.outputs[1:])]


def _own(kind: Kind, name: str) -> str:
    """Spell the type of an argument of one batch."""
    if kind is Kind.TILE:
        return "cutlass_ops::Matrix"
    return f"Element_{name} const*" if kind in (Kind.ROW, Kind.COL) else f"cutlass_ops::Scalar<Element_{name}>"
