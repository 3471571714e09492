"""From a spec to the values that ``sm80_gemm.cu.j2`` renders: plain strings and numbers only.

The epilogue is CUTLASS's 2.x visitor tree; nodes in ``cutlass/epilogue/threadblock/fusion`` and, for loads, stores and
reductions, in ``templates/include/cutlass_ops/sm80_visitors.h``.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from cutlass_ops.base import arch
from cutlass_ops.base.dtypes import f64, i32
from cutlass_ops.base.mma import mma_of
from cutlass_ops.declare.form import BATCHED
from cutlass_ops.declare.orientation import along_n, oriented, reduced_along_m, swapped
from cutlass_ops.declare.spec import KernelSpec, Operand
from cutlass_ops.epilogue.nodes import Kind, Output
from cutlass_ops.epilogue.operations import GATHERED, REDUCTIONS
from cutlass_ops.kinds.lower import ACC, REDUCERS, Lowered, Visitor, fields, flag, layout_of, lower, types
from cutlass_ops.kinds.serving import by_several_fours
from cutlass_ops.kinds.sm80.config import Sm80Config
from cutlass_ops.kinds.sm80.types import multiplied


def context(spec: KernelSpec) -> dict[str, Any]:
    """Return the template's variables for a legal Sm80 spec."""
    config = spec.config
    assert isinstance(config, Sm80Config)
    mma = mma_of(spec.a.dtype, spec.b.dtype)
    assert mma is not None
    # Where D is the sums themselves, nothing is computed.
    compute = i32 if spec.d.dtype is i32 else mma.compute
    lowered = lower(spec.epilogue, mma.compute)
    t, w, i = config.threadblock, config.warp, config.instruction
    return types(spec, lowered, "cutlass_ops/sm80_places.h", _loaded) | {
        "operator": multiplied(spec.a.dtype).operator,
        "accumulator": mma.accumulator.cpp,
        "compute": compute.cpp,
        "threadblock": f"{t.m}, {t.n}, {t.k}",
        "warp": f"{w.m}, {w.n}, {w.k}",
        "instruction": f"{i.m}, {i.n}, {i.k}",
        "several_fours": by_several_fours(mma, i.k),
        # Kernels of other types clear their flags before each launch.
        "standing_flags": config.stream_k and mma.accumulator is f64,
        "stages": config.stages,
        "swizzle": _swizzle(spec, config),
        "swap_ab": swapped(spec),
        "nodes": [asdict(n) for n in _nodes(spec, lowered)],
        # No access of the epilogue is wider than D's, and D's extent is a multiple of that.
        "fields": fields(spec, lambda operand, is_output: False),
        "reductions": [
            {"output": o.name, "node": f"Reduce_{o.name}", "partial": _partial(o), "kept": _kept(o)}
            for o, _ in spec.typed_outputs
            if o.reduction is not None
        ],
        "gathers": {
            "mean": flag("mean_of_a" in spec.epilogue.gathered),
            "mean_square": flag("mean_square_of_a" in spec.epilogue.gathered),
        }
        if spec.epilogue.gathered
        else None,
        "shared_memory_limit": arch.target(spec.target).shared_memory,
    }


def _loaded(operand: Operand) -> Operand:
    """Return as what CUTLASS knows an operand."""
    how = multiplied(operand.dtype)
    return replace(operand, dtype=how.known_as or operand.dtype, alignment=1 if how.by_element else operand.alignment)


def _swizzle(spec: KernelSpec, config: Sm80Config) -> str:
    if not config.stream_k:
        return "sm80::ThreadblockSwizzle"
    whole_tiles = any(reduced_along_m(spec))
    return f"sm80::StreamKSwizzle<{'false' if whole_tiles else 'true'}>"


def _partial(output: Output) -> str:
    return f"partial_{output.name}_"  # the underscore keeps it apart from names that users give


def _kept(output: Output) -> str:
    """Return the type of what a tile keeps of a result."""
    return f"Reduce_{output.name}::State" if REDUCTIONS[output.reduce or ""].paired else "float"


def _nodes(spec: KernelSpec, lowered: Lowered) -> list[Visitor]:
    """List the visitors in topological order, D's store last."""
    nodes: list[Visitor] = []
    at: dict[str, int] = {}
    for leaf in lowered.leaves:
        at[leaf] = len(nodes)
        nodes.append(_load(spec, lowered, leaf))
    for compute in lowered.computes:
        at[compute.name] = len(nodes)
        if compute.swaps_pairs:
            nodes.append(Visitor(f"Swap_{compute.label}", "sm80::SwapPairs", "{}", tuple(at[a] for a in compute.args)))
            continue
        function = f"cutlass_ops::Elementwise<{compute.struct}>::Fn"
        visitor = f"threadblock::VisitorCompute<{function}, ElementCompute, ElementCompute, Round>"
        nodes.append(Visitor(f"Compute_{compute.label}", visitor, "{}", tuple(at[a] for a in compute.args)))
    d, *others = lowered.stores
    operands = {o.name: operand for o, operand in spec.typed_outputs}
    nodes += [_store(spec, s.output, operands[s.output.name], at[s.compute]) for s in others]
    nodes.append(Visitor("Store_d", _tile("AuxStore", "ElementD", spec.d, spec), "o.d", (at[d.compute],)))
    return nodes


def _load(spec: KernelSpec, lowered: Lowered, leaf: str) -> Visitor:
    if leaf == ACC:
        return Visitor("Accumulator", "threadblock::VisitorAccFetch", "{}")
    place = lowered.place(leaf)
    if place is not None:
        visitor = f"sm80::PlaceInput<ThreadMap, {place.functor}, {flag(swapped(spec))}>"
        return Visitor(f"Load_{leaf}", visitor, f"{{{', '.join(place.arguments)}}}")
    if leaf in GATHERED:
        side = "Row" if along_n(spec, Kind.COL) else "Col"
        first = spec.epilogue.gathered.index(leaf)
        pointer = f"o.rows.means + {first} * int64_t(o.problem.m)" if first else "o.rows.means"
        return Visitor(f"Load_{leaf}", f"sm80::{side}Broadcast<ThreadMap, float>", pointer)
    kind, operand = next((i.kind, operand) for i, operand in spec.typed_inputs if i.name == leaf)
    element = f"Element_{leaf}"
    if kind is Kind.SCALAR:
        visitor = f"sm80::ScalarBroadcast<{element}>"
    elif kind is Kind.TILE:
        visitor = _tile("AuxLoad", element, operand, spec)
    else:
        visitor = f"sm80::{'Row' if along_n(spec, kind) else 'Col'}Broadcast<ThreadMap, {element}>"
        if spec.form == BATCHED:
            visitor = f"sm80::Batched<{visitor}, {element}, cutlass_ops::BatchedVector<{element}>>"
    return Visitor(f"Load_{leaf}", visitor, f"o.{leaf}")


def _store(spec: KernelSpec, output: Output, operand: Operand, value: int) -> Visitor:
    if output.reduce is None:
        visitor = _tile("AuxStore", f"Element_{output.name}", operand, spec)
        return Visitor(f"Store_{output.name}", visitor, f"o.{output.name}", (value,))
    side = "Row" if along_n(spec, output.kind) else "Col"
    visitor = f"sm80::{side}Reduction<cutlass_ops::reduce::{REDUCERS[output.reduce]}, ThreadMap>"
    return Visitor(f"Reduce_{output.name}", visitor, f"o.{_partial(output)}", (value,))


def _tile(visitor: str, element: str, operand: Operand, spec: KernelSpec) -> str:
    layout = layout_of(oriented(spec, operand))
    node = f"sm80::{visitor}<ThreadMap, {element}, {layout}, {operand.alignment}>"
    return f"sm80::Batched<{node}, {element}, cutlass_ops::BatchedMatrix>" if spec.form == BATCHED else node
