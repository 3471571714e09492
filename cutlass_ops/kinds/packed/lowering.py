"""From a spec to the values that ``gemv.cu.j2`` renders for a packed weight: a GEMV with a main loop of its own."""

from __future__ import annotations

from typing import Any

from cutlass_ops.base.dtypes import u4
from cutlass_ops.base.mma import WHOLE_K
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.kinds.gemv import lowering
from cutlass_ops.kinds.packed.config import PackedRowsConfig


def context(spec: KernelSpec) -> dict[str, Any]:
    """Return the template's variables for a legal spec of a few rows and a packed weight."""
    config = spec.config
    assert isinstance(config, PackedRowsConfig)
    found = lowering.context(spec)
    (name,), group = spec.epilogue.parts, (spec.b.scaling or (WHOLE_K, 1))[0]
    parts = 2 if spec.b.dtype is u4 else 1
    field = {
        "name": name,
        "type": "cutlass_ops::PackedWeight",
        "read": f"packed.weight<Element_{name}>(o.b, o.problem, {group}, {parts})",
    }
    return found | {
        "fields": [field if each["name"] == name else each for each in found["fields"]],
        "own": {
            "header": "packed_rows",
            "shape_is": "Numbers and their groups; rows of A, warps, lines of B, and pieces on their way at a time.",
            "shape": f"cutlass_ops::packed_rows::Shape<::ElementB, {group}, {config.rows}, {config.warps}, "
            f"{config.lines}, {config.pieces}>",
            "weight": f"o.{name}",
            "weight_type": "cutlass_ops::PackedWeight const&",
            "reader": "cutlass_ops::PackedOperands packed(call);",
            "reads_b": "packed",
            "kernel": "packed_rows::Kernel",
            "entry": "PackedRowsEntry",
        },
    }
