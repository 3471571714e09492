"""From a quantisation's spec to the values that ``quantize.cu.j2`` renders."""

from __future__ import annotations

from typing import Any

from cutlass_ops.base.dtypes import f32
from cutlass_ops.declare.quantizing import QuantizeSpec

TEMPLATE = "quantize.cu.j2"


def context(spec: QuantizeSpec) -> dict[str, Any]:
    """Return the template's variables."""
    types = dict.fromkeys((spec.x, spec.d, f32))
    return {
        "element_types": [{"cpp": t.cpp, "dl_code": t.dl_code} for t in types],
        "x": spec.x.cpp,
        "d": spec.d.cpp,
        "by_rows": spec.block is None,
    }
