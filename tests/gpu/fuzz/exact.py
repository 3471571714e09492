"""Drawn calls whose results have one right value each: see :class:`tests.gpu.fuzz.case.Exact`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from cutlass_ops.epilogue import builtin, composed
from tests.gpu import multiplied
from tests.gpu.fuzz import dense, grouped
from tests.gpu.fuzz.case import Exact
from tests.gpu.fuzz.dense import Family
from tests.gpu.fuzz.grouped import Rows, Weights

# Of sums of FP8 that are not promoted; that are multiplied by each other, or added up; and that are multiplied as well.
_FAST, _FURTHER, _SCALED = 2**13, 2**11, 2**9
PLAIN, FAST, F16 = Exact(), Exact(_FAST), Exact(2**15)  # FP16 ends at 2^16
GELU, SILU = Exact(_SCALED, loud=16.0), Exact(_FURTHER, loud=128.0)
NORM, BLOCKS = Exact(_FURTHER, eps=12.0), Exact(2**24)
# Numbers of 13 bits and more, whose lower part the second of the three products of TF32 has.
TWO_PARTS = Exact(_SCALED, loud=4097.0)


def _exactly(families: tuple[Family, ...], how: Mapping[str, Exact]) -> tuple[Family, ...]:
    """Return some families, with exact results. Longer sums would be beyond what is exact."""
    by_name = {family.name: family for family in families}
    found = (replace(by_name[name], exact=exact) for name, exact in how.items())
    return tuple(replace(f, most_k=min(f.most_k, 4096)) if f.exact and f.exact.limit <= _FAST else f for f in found)


SIXTEEN_BITS = (
    *_exactly(
        dense.DENSE,
        {
            "BF16": PLAIN,
            "BF16, to FP32, odd columns": PLAIN,
            "BF16, B across K": PLAIN,
            "FP16, both across K": GELU,
            "BF16, odd": PLAIN,
            "FP16, odd, across K": F16,
            "BF16, reductions": GELU,
            "FP16, reductions, odd columns": GELU,
            "BF16, batches": PLAIN,
            "FP16, batches, across K": F16,
        },
    ),
    *(
        Family(f"BF16, few rows{name}", "bf16", "bf16", "bf16", whole=True, few_rows=True, exact=exact, **more)
        for name, exact, more in (
            ("", PLAIN, {}),
            (", gated", SILU, {"epilogue": composed.swiglu}),
            (", RMSNorm", NORM, {"epilogue": composed.rms_norm, "most_k": 1024}),
        )
    ),
    Family("BF16, gated", "bf16", "bf16", "bf16", epilogue=composed.swiglu, exact=SILU),
    Family("BF16, RMSNorm", "bf16", "bf16", "bf16", epilogue=composed.rms_norm, most_k=1024, exact=NORM),
    Family("FP16, LayerNorm", "f16", "f16", "f16", epilogue=composed.layer_norm, most_k=1024, exact=NORM),
)

FP8 = _exactly(
    dense.FP8,
    {
        "tensor scales": FAST,
        "row scales, promoted": PLAIN,
        "row scales, to FP32": FAST,
        "odd columns": PLAIN,
        "an epilogue": GELU,
        "blocks": BLOCKS,
        "blocks of columns": BLOCKS,
        "a result in FP8": FAST,
    },
)

TYPES = _exactly(
    dense.TYPES,
    {
        "TF32": PLAIN,
        "TF32, fused": GELU,
        "TF32, across K": GELU,
        "TF32, odd": GELU,
        "3xTF32": TWO_PARTS,
        "FP64": PLAIN,
        "FP64, odd": GELU,
    },
)

INT8 = (
    *_exactly(dense.TYPES, {"INT8": PLAIN, "INT8, scales": Exact(2**14), "INT8, odd columns": GELU}),
    Family("INT8, to INT32", "i8", "i8", "i32", exact=PLAIN),
    Family("INT8, elementwise", "i8", "i8", "f32", epilogue=multiplied.elementwise, exact=GELU),
    Family("INT8, batches", "i8", "i8", "f32", batched=True, exact=PLAIN),
)


def _of_groups(family: Rows) -> Exact:
    if family.d == "f16":
        return Exact(2**6, loud=128.0)
    if family.epilogue in (grouped.routed, composed.swiglu):
        return SILU
    return FAST if family.math == "fast" else PLAIN


GROUPS = (
    *(replace(family, exact=_of_groups(family)) for family in grouped.FAMILIES if isinstance(family, Rows)),
    Rows("BF16, room", "bf16", "bf16", "bf16", exact=PLAIN, room=True),
    Rows("FP8, room", "e4m3", "e4m3", "bf16", scales="rows", math="promoted", exact=PLAIN, room=True),
    Rows("FP8, one scale", "e5m2", "e4m3", "bf16", scales="tensor", math="fast", exact=FAST),
    Rows("FP8, blocks", "e4m3", "e4m3", "bf16", scales="blocks", exact=BLOCKS),
    Rows("FP8, blocks, room", "e4m3", "e4m3", "bf16", scales="blocks", exact=BLOCKS, room=True),
)

# The GEMMs of gradients: of A, of B, and with what is added to them.
BACKWARD = (
    Family("of A", "bf16", "bf16", "bf16", ("row", "row"), exact=PLAIN),
    Family("of A, FP16", "f16", "f16", "f16", ("row", "row"), exact=F16),
    Family("of A, added up", "bf16", "bf16", "bf16", ("row", "row"), epilogue=builtin.residual, exact=PLAIN),
    Family("of A, of a norm", "bf16", "bf16", "bf16", ("row", "row"), epilogue=composed.plus_scaled, exact=PLAIN),
    Family("of B", "bf16", "bf16", "bf16", ("col", "row"), exact=PLAIN),
    Family("of B, to FP32", "bf16", "bf16", "f32", ("col", "row"), exact=PLAIN),
    Family("of B, batches", "bf16", "bf16", "bf16", ("col", "row"), batched=True, exact=PLAIN),
    *(replace(family, exact=PLAIN) for family in grouped.FAMILIES if isinstance(family, Weights)),
)
