"""From a spec to the values that ``gemv.cu.j2`` renders: plain strings and numbers only.

The epilogue is straight-line code for one element of D, or for a pair of which one is stored;
``templates/include/cutlass_ops/gemv.h`` calls it.
"""

from __future__ import annotations

from typing import Any

from cutlass_ops.base import arch
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.kinds.elementwise import element, reads, statements
from cutlass_ops.kinds.gemv.config import GemvConfig
from cutlass_ops.kinds.lower import Lowered, fields, flag, lower, types


def context(spec: KernelSpec) -> dict[str, Any]:
    """Return the template's variables for a legal GEMV spec."""
    config = spec.config
    assert isinstance(config, GemvConfig)
    lowered = lower(spec.epilogue)
    gathered = spec.epilogue.gathered
    sides = 2 if spec.epilogue.swaps_pairs else 1  # a thread computes both columns of a pair where it swaps them
    return types(spec, lowered, "cutlass_ops/places.h") | {
        "means": {"mean": flag("mean_of_a" in gathered), "mean_square": flag("mean_square_of_a" in gathered)},
        "takes_means": bool(gathered),
        "weights": ["b", *spec.epilogue.products],
        "sides": sides,
        "reads": reads(spec, lowered),
        "lines": _lines(spec, lowered, sides),
        "overlaps": flag(arch.target(spec.target).capability >= arch.OVERLAPS),
        "fields": fields(spec, lambda operand, is_output: False),
        "own": {
            "header": "gemv",
            "shape_is": "Rows of A, columns of B, and pieces of 16 bytes that a lane has on their way at a time.",
            "shape": f"cutlass_ops::gemv::Shape<{config.rows}, {config.warps}, {config.pieces}>",
            "weight": "",  # a packed one
            "reader": "",
            "reads_b": "call",
            "kernel": "gemv::Kernel",
            "entry": "GemvEntry",
        },
    }


def _lines(spec: KernelSpec, lowered: Lowered, sides: int) -> list[str]:
    """Write the statements that compute an element of D and store it, and those of further outputs."""
    lines = statements(spec.epilogue, lowered, sides)
    operands = {"d": spec.d} | {o.name: operand for o, operand in spec.typed_outputs}
    for store in lowered.stores:
        name = store.output.name
        of = "ElementD" if name == "d" else f"Element_{name}"
        lines.append(f"{element(name, of, operands[name])} = {of}({store.compute}[0]);")
    return lines
