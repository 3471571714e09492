"""From a spec to the values that ``sm90_gemm.cu.j2`` renders: plain strings and numbers only.

Names of the CUTLASS 3.x epilogue visitors: ``cutlass/epilogue/fusion/sm90_visitor_*.hpp``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass_ops.base.dtypes import DType, f32, i8, i32, tf32
from cutlass_ops.base.mma import BLOCK_K, mma_of
from cutlass_ops.declare.config import MEANS, Sm90Config
from cutlass_ops.declare.form import BATCHED, DENSE, GROUPED, RAGGED_K
from cutlass_ops.declare.orientation import along_n, oriented, swapped
from cutlass_ops.declare.spec import KernelSpec, Operand, copied, loaded
from cutlass_ops.epilogue.nodes import D_SCALE, Kind, Output
from cutlass_ops.epilogue.operations import GATHERED
from cutlass_ops.kinds import serving
from cutlass_ops.kinds.lower import ACC, REDUCERS, Lowered, fields, layout_of, lower, types
from cutlass_ops.kinds.sm90 import footprint

_MAINLOOP = {
    "pingpong": "KernelTmaWarpSpecializedPingpong",
    "cooperative": "KernelTmaWarpSpecializedCooperative",
    "warp_specialized": "KernelTmaWarpSpecialized",
}
_EPILOGUE = {
    "pingpong": "TmaWarpSpecialized",
    "cooperative": "TmaWarpSpecializedCooperative",
    "warp_specialized": "TmaWarpSpecialized",
}

# Of CUTLASS's reductions: the functor that folds a value in, the one that joins partial results, and the identity.
_CUTLASS_REDUCTIONS = {
    "sum": ("cutlass_ops::Sum", "cutlass_ops::Sum", "0.0f"),
    "sum_square": ("cutlass_ops::SumSquare", "cutlass_ops::Sum", "0.0f"),
    "max": ("cutlass_ops::Max", "cutlass_ops::Max", "-cutlass::platform::numeric_limits<float>::infinity()"),
    "min": ("cutlass_ops::Min", "cutlass_ops::Min", "cutlass::platform::numeric_limits<float>::infinity()"),
}


@dataclass(frozen=True)
class Node:
    """One visitor of the epilogue: its name, its C++ type, whose values it takes, and its launch arguments."""

    name: str
    type: str
    arguments: str
    edges: tuple[int, ...] = ()
    aliases: tuple[str, ...] = ()


def context(spec: KernelSpec) -> dict[str, Any]:
    """Return the template's variables for a legal Sm90 spec."""
    config = _config(spec)
    lowered = lower(spec.epilogue)
    c_operand = serving.source_name(spec)
    plain = serving.plain_epilogue(spec)
    nodes, is_tree = _nodes(spec, lowered, c_operand, plain)
    tile = config.threadblock
    c_type = spec.inputs[_input_index(spec, c_operand)] if c_operand else None
    takes_means = bool(spec.epilogue.gathered) and config.means != "gathered"
    reductions = _reductions(spec) if plain else []
    scratch = [f"cutlass_ops::parts_bytes<{r['node']}>({r['extents'].replace('o.', '')})" for r in reductions]
    if takes_means and config.means == "ahead":
        scratch.append("cutlass_ops::means_bytes<WhichMeans>(problem)")
    copies = _copies(spec)
    scratch += [copy["bytes"] for copy in copies]
    return types(spec, lowered, "cutlass_ops/sm90_places.h") | {
        "wgmma": _wgmma(spec),
        "tf32": spec.a.dtype is tf32,
        "integers": spec.a.dtype is i8,
        # D is the sums themselves: the epilogue takes them as the bits of values that it only moves.
        "sums": spec.d.dtype is i32,
        "tile": {"m": tile.m, "n": tile.n, "k": tile.k},
        "cluster": {"m": config.cluster.m, "n": config.cluster.n},
        "mainloop_schedule": _MAINLOOP[config.schedule],
        "epilogue_schedule": _EPILOGUE[config.schedule],
        "tile_scheduler": _scheduler(spec),
        "split_k": config.split_k,
        "plain_epilogue": plain,
        "epilogue_tile": footprint.epilogue_tile(spec),
        "epilogue_stages": footprint.epilogue_stages(spec),
        "part_shape": _part_shape(spec),
        "part_n": config.part.n,
        "tile_outputs": plain and serving.stored_by_threads(spec),
        "gathers": _gathers(spec),
        "means": config.means if spec.epilogue.gathered else None,
        "takes_means": takes_means,
        "waits_late": bool(spec.epilogue.gathered)
        and config.means == "ahead"
        and plain
        and config.scheduler != "stream_k",
        "products": 1 + len(spec.epilogue.products),
        "second_weight": "".join(spec.epilogue.products),
        "output_tile": [footprint.output_tile(spec).m, footprint.output_tile(spec).n],
        "block_scales": bool(spec.epilogue.block_scales),
        "quantized": D_SCALE if spec.epilogue.quantized else "",
        "quantized_how": _quantized(spec),
        "mainloop_options": _mainloop_options(spec),
        "columns": "2 * o.problem.n" if spec.epilogue.products else "o.problem.n",
        "mainloop_arguments": _mainloop_arguments(spec),
        "warpgroups": 2 if config.schedule == "cooperative" else 1,
        "overlaps": config.scheduler != "stream_k",
        "stages": footprint.pipeline_stages(spec),
        "swap_ab": swapped(spec),
        "swapped": str(swapped(spec)).lower(),
        "element_c": f"Element_{c_operand}" if c_operand else "void",
        "layout_c": _layout(spec, c_type or spec.d),
        "alignment_c": (c_type or spec.d).alignment,
        "layout_kernel_d": _layout(spec, spec.d),
        "nodes": [
            {
                "name": n.name,
                "type": n.type,
                "arguments": n.arguments,
                "edges": list(n.edges),
                "aliases": list(n.aliases),
            }
            for n in nodes
        ],
        "is_tree": is_tree,
        "store_d_by_tma": spec.d.aligned,
        "shared_memory_limit": footprint.block_memory(spec) - footprint.means_smem(spec),
        "fields": fields(spec, _in_whole_accesses),
        "reductions": reductions,
        "copies": copies,
        "copier": _copier(spec),
        "loaded": _loaded(spec),
        "has_scalars": any(i.kind is Kind.SCALAR for i in spec.epilogue.inputs),
        "batches_inputs": plain and any(i.kind in (Kind.ROW, Kind.COL) for i in spec.epilogue.inputs),
        "alignment_of_rows": spec.a.dtype.tma_alignment if config.realign else spec.a.alignment,
        "prepares": takes_means or bool(reductions) or bool(copies) or spec.form == GROUPED,
        "scratch": " + ".join(scratch),
        "c_pointer": f"o.{c_operand}.ptr<Element_{c_operand}>()" if c_operand else "nullptr",
        "c_stride": f"cutlass_ops::stride<typename GemmKernel::StrideC>(o.{c_operand})" if c_operand else "{}",
    }


def _wgmma(spec: KernelSpec) -> dict[str, str]:
    """Spell the types that the kernel's instruction multiplies, in the kernel's orientation."""
    a, b = (spec.b.dtype, spec.a.dtype) if swapped(spec) else (spec.a.dtype, spec.b.dtype)
    mma = mma_of(a, b)
    assert mma is not None
    any_major = str(not mma.wgmma_k_major_only).lower()
    return {"a": a.cpp, "b": b.cpp, "types": mma.wgmma_types, "any_major": any_major}


def _reductions(spec: KernelSpec) -> list[dict[str, str]]:
    """List the visitors that reduce, with how many results each has and of how many elements of D each is one."""
    extents = {Kind.COL: "o.problem.m, o.problem.n", Kind.ROW: "o.problem.n, o.problem.m"}
    return [
        {"node": f"Reduce_{first.name}", "parts": _parts(first), "extents": extents[first.kind]}
        for first, *_ in serving.reduced_together(spec)
    ]


def _copies(spec: KernelSpec) -> list[dict[str, str]]:
    """List the operands that are copied ahead of the GEMM, as :func:`_copier` says, with the bytes each copy takes."""
    if not _config(spec).realign:
        return []
    of_a, of_b = copied(spec.a, spec.b)
    operands = ["a"] * of_a + ["b", *spec.epilogue.products] * of_b
    return [{"operand": name} | _copy(name, along_k=_loads_along_k(spec)) for name in operands]


def _copy(name: str, *, along_k: bool) -> dict[str, str]:
    """Spell how one operand is copied."""
    side = "A" if name == "a" else "B"
    if along_k:
        lines, major = ("problem.m", "kRow") if name == "a" else ("problem.n", "kCol")
        bytes_of_copy = f"cutlass_ops::along_k_bytes<sizeof(Element{side})>({lines}, problem.k)"
        return {"types": f"Major{side}, cutlass_ops::Major::{major}", "bytes": bytes_of_copy}
    extents = "problem.m, problem.k" if name == "a" else "problem.k, problem.n"
    return {
        "types": f"Element{side}, Major{side}",
        "bytes": f"cutlass_ops::realigned_bytes<Major{side}>({extents})",
    }


def _copier(spec: KernelSpec) -> dict[str, str]:
    """Name what copies operands: along K if wgmma reads no other lines, and else as they lie."""
    if _loads_along_k(spec):
        return {
            "header": "cutlass_ops/along_k.h",
            "kernel": "cutlass_ops::AlongK<sizeof(ElementA)>",
            "type": "cutlass_ops::CopiedAlongK<sizeof(ElementA)>",
            "reader": "wgmma",
        }
    return {
        "header": "cutlass_ops/realign.h",
        "kernel": "cutlass_ops::Realign",
        "type": "cutlass_ops::Realigned",
        "reader": "TMA",
    }


def _loads_along_k(spec: KernelSpec) -> bool:
    """Whether wgmma reads the operands' types along K only."""
    mma = mma_of(spec.a.dtype, spec.b.dtype)
    return mma is not None and mma.wgmma_k_major_only


def _loaded(spec: KernelSpec) -> dict[str, str]:
    """Spell the layouts in which TMA finds A and B: those of their copies, where they are copied across."""
    now = loaded(spec.a, spec.b) if _config(spec).realign else (spec.a, spec.b)
    pairs = {"a": (spec.a, now[0]), "b": (spec.b, now[1])}
    return {
        name: f"Layout{name.upper()}" if after.major == before.major else f"cutlass::layout::{layout_of(after)}"
        for name, (before, after) in pairs.items()
    }


def _parts(output: Output) -> str:
    """Name the parts of a reduction's results. No name that users give ends in an underscore."""
    return f"{output.name}_parts_"


def _part_shape(spec: KernelSpec) -> str:
    """Name the tile of one thread block's epilogue."""
    if spec.epilogue.products:
        return "OutputShape"
    return "ThreadblockShape" if _config(spec).split_k == 1 else "PartShape"


def _gathers(spec: KernelSpec) -> dict[str, Any] | None:
    """Say what the epilogue takes of A's rows, and of how many rows and tiles the main loop would keep it."""
    gathered = spec.epilogue.gathered
    if not gathered:
        return None
    return {
        "how": MEANS[_config(spec).means],
        "mean": str("mean_of_a" in gathered).lower(),
        "mean_square": str("mean_square_of_a" in gathered).lower(),
        "rows": footprint.gathered_rows(spec),
        "tiles": footprint.gathered_tiles(spec),
    }


def _mainloop_options(spec: KernelSpec) -> str:
    """Spell the main loop's further template arguments, none for the usual one."""
    beside = bool(spec.epilogue.gathered) and _config(spec).means == "beside"
    means = ["Means"] if footprint.gathers(spec) else ["void", "Rows"] if beside else []
    if _config(spec).accumulation == "promoted":
        means = ["void", "cutlass_ops::NoRows", "true"]
    if spec.epilogue.block_scales:
        blocks = [*map(str, footprint.scaled_rows(spec)), *(["cutlass_ops::GroupedScales"] * (spec.form == GROUPED))]
        means.append(f"cutlass_ops::BlockScales<{', '.join(blocks)}>")
    if not means and not spec.epilogue.products:
        return ""
    options = [str(swapped(spec)).lower(), str(1 + len(spec.epilogue.products)), *means]
    return "".join(f", {option}" for option in options)


def _mainloop_arguments(spec: KernelSpec) -> str:
    """Spell the main loop's arguments for the second weight, and for what is taken of A's rows beside it."""
    side = "A" if swapped(spec) else "B"
    spelled = [
        f"o.{name}.ptr<ElementB>(), cutlass_ops::stride<typename GemmKernel::Stride{side}>(o.{name})"
        for name in spec.epilogue.products
    ]
    if spec.epilogue.gathered and _config(spec).means == "beside":
        spelled += ["o.rows"] if spelled else ["nullptr, {}, o.rows"]
    if spec.epilogue.block_scales:
        rows, columns = spec.epilogue.block_scales[::-1] if swapped(spec) else spec.epilogue.block_scales
        spelled += [f"nullptr, {{}}, {{}}, {{o.{rows}, o.{columns}}}"]
    return "".join(f",\n         {arguments}" for arguments in spelled)


def _scheduler(spec: KernelSpec) -> str:
    config = _config(spec)
    if config.scheduler == "stream_k":
        return "cutlass::gemm::StreamKScheduler"
    # CUTLASS's third kernel is not persistent: each thread block takes the tile of its own index.
    if not config.ordered:
        return "cutlass::gemm::PersistentScheduler"
    if spec.form == GROUPED:
        return f"cutlass_ops::GroupedScheduler<{str(swapped(spec)).lower()}>"
    if spec.form == RAGGED_K:
        return "cutlass_ops::RaggedKScheduler"
    return "cutlass_ops::BatchedScheduler" if spec.form == BATCHED else "cutlass_ops::OrderedScheduler"


def _config(spec: KernelSpec) -> Sm90Config:
    assert isinstance(spec.config, Sm90Config)
    return spec.config


def _input_index(spec: KernelSpec, name: str) -> int:
    return next(index for index, i in enumerate(spec.epilogue.inputs) if i.name == name)


def _layout(spec: KernelSpec, operand: Operand) -> str:
    """Spell the layout of an (M, N) tensor in the kernel's orientation, or its stride where there are batches."""
    layout = f"cutlass::layout::{layout_of(oriented(spec, operand))}"
    return layout if spec.form == DENSE else f"cutlass_ops::BatchedC<{layout}>"


def _in_whole_accesses(operand: Operand, is_output: bool) -> bool:
    """Whether accesses must divide the extent: not where the bulk copy engine reads and fills up with zeros."""
    return is_output or not operand.aligned


def _quantized(spec: KernelSpec) -> str:
    """Name the way in which D is quantised (``quantized.h``)."""
    if footprint.shared_by_two(spec):
        return "QuantizedByTwo"
    return f"QuantizedByWarps<{BLOCK_K}>" if footprint.quantized_by_warps(spec) else "Quantized"


def _nodes(spec: KernelSpec, lowered: Lowered, c_operand: str | None, plain: bool) -> tuple[list[Node], bool]:
    """List the visitors in topological order; the last one yields D. Also says whether they form a plain tree.

    With ``plain``, rows and columns are read by the visitors of ``epilogue.h``.
    """
    nodes: list[Node] = []
    at: dict[str, int] = {}

    def add(key: str, node: Node) -> None:
        at[key] = len(nodes)
        nodes.append(node)

    for leaf in lowered.leaves:
        add(leaf, _load(spec, lowered, leaf, c_operand, plain))
    d_store, *others = [s for s in lowered.stores if s.output.kind is not Kind.BLOCKS_D]
    # The collective itself quantises, once it knows a block's scale.
    result = "ElementD" if spec.epilogue.quantized is None else "ElementCompute"
    for compute in lowered.computes:
        if compute.swaps_pairs:
            visitor = f"cutlass_ops::SwapPairs<{str(swapped(spec)).lower()}>"
            add(compute.name, Node(f"Swap_{compute.label}", visitor, "{}", tuple(at[a] for a in compute.args)))
            continue
        is_result = compute.name == d_store.compute and spec.d.aligned and not _reused(lowered)
        final = result if is_result else "ElementCompute"
        add(
            compute.name,
            Node(
                f"Compute_{compute.label}",
                f"fusion::Sm90Compute<cutlass_ops::Elementwise<{compute.struct}>::Fn, {final}, ElementCompute, Round>",
                "{}",
                tuple(at[a] for a in compute.args),
            ),
        )
    groups = {group[0].name: group for group in serving.reduced_together(spec)}
    for store in others:
        value, group = at[store.compute], groups.get(store.output.name)
        if store.output.reduce is None:
            nodes.append(_store(spec, store.output, value, plain))
        elif group is not None:  # the others of a group are with their first one
            nodes.append(_reduction(spec, group, value, plain))
    if not spec.d.aligned:
        nodes.append(_direct_store("d", "ElementD", "LayoutKernelD", "AlignmentD", at[d_store.compute]))
    elif others or lowered.computes[-1].name != d_store.compute or lowered.computes[-1].swaps_pairs:
        nodes.append(
            Node(
                "Result",
                f"fusion::Sm90Compute<cutlass::epilogue::thread::Identity, {result}, ElementCompute, Round>",
                "{}",
                (at[d_store.compute],),
            )
        )
    is_tree = len(lowered.computes) == 1 and not others and spec.d.aligned and not spec.epilogue.swaps_pairs
    # A tree has no names: the function's parameters are the leaves by position.
    assert not is_tree or nodes[-1].edges == tuple(range(len(nodes) - 1))
    return nodes, is_tree


def _reused(lowered: Lowered) -> bool:
    """Whether D's value goes anywhere but to D; it must then stay in FP32 until the end."""
    d = lowered.stores[0].compute
    return len(lowered.stores) > 1 or lowered.computes[-1].name != d


def _load(spec: KernelSpec, lowered: Lowered, leaf: str, c_operand: str | None, plain: bool) -> Node:
    if leaf == ACC:
        return Node("Accumulator", "fusion::Sm90AccFetch", "{}")
    place = lowered.place(leaf)
    if place is not None:
        visitor = f"cutlass_ops::PlaceInput<{place.functor}, {str(swapped(spec)).lower()}>"
        return Node(f"Load_{leaf}", visitor, f"{{{', '.join(place.arguments)}}}")
    if leaf in GATHERED:
        return _gathered_load(spec, leaf, plain)
    if leaf in spec.epilogue.products:
        return Node(f"Load_{leaf}", "cutlass_ops::ProductInput", "{}")
    index = _input_index(spec, leaf)
    kind, operand = spec.epilogue.inputs[index].kind, spec.inputs[index]
    element = f"Element_{leaf}"
    name = f"Load_{leaf}"
    if kind is Kind.SCALAR:
        return Node(name, f"cutlass_ops::ScalarInput<{element}>", f"o.{leaf}")
    if kind is Kind.TILE:
        return _tile_load(spec, leaf, operand, c_operand)
    return _vector_load(spec, kind, name, element, f"o.{leaf}", operand.dtype, plain)


def _vector_load(
    spec: KernelSpec, kind: Kind, name: str, element: str, pointer: str, dtype: DType, plain: bool
) -> Node:
    shape = _part_shape(spec)
    if plain:
        row, groups = along_n(spec, kind), footprint.row_copies(spec)
        given = f"{shape}, EpilogueTile, {element}" + (f", {groups}" if row and groups > 1 else "")
        visitor = f"cutlass_ops::{'RowInput' if row else 'ColInput'}<{given}>"
        if spec.form != DENSE:
            return Node(name, f"cutlass_ops::BatchedInput<{visitor}, {element}>", pointer)
        return Node(name, visitor, f"{{{pointer}}}")
    visitor, stride = ("Sm90RowBroadcast", "_0, _1, _0") if along_n(spec, kind) else ("Sm90ColBroadcast", "_1, _0, _0")
    distances = "{}"
    if spec.form != DENSE:
        own = stride.removesuffix(", _0")
        distances = f"{{{own.replace(',', '{},')}{{}}, cutlass_ops::batch_strides({pointer}.batches)}}"
        stride, pointer = f"{own}, cute::Stride<int64_t, int64_t>", f"{pointer}.values"
    return Node(
        name,
        f"fusion::{visitor}<0, {shape}, {element}, ElementCompute, cute::Stride<{stride}>, "
        f"{dtype.tma_alignment}, false>",
        f"{{{pointer}, {element}(0), {distances}}}",
    )


def _gathered_load(spec: KernelSpec, leaf: str, plain: bool) -> Node:
    """Load means of A's rows: where the main loop left them, the kernel before wrote them, or idle warps will have."""
    name = f"Load_{leaf}"
    means, index = _config(spec).means, spec.epilogue.gathered.index(leaf)
    if means == "ahead":
        pointer = f"o.rows.means + {index} * int64_t(o.problem.m)" if index else "o.rows.means"
        return _vector_load(spec, Kind.COL, name, "float", pointer, f32, plain)
    if means == "beside":
        awaited = f"cutlass_ops::awaited(o.rows, {index})"
        return _vector_load(spec, Kind.COL, name, "cutlass_ops::Awaited", awaited, f32, plain)
    visitor = "RowGathered" if along_n(spec, Kind.COL) else "ColGathered"
    values = {"mean_of_a": "MeanOfRows", "mean_square_of_a": "MeanSquareOfRows"}[leaf]
    return Node(name, f"cutlass_ops::{visitor}<{_part_shape(spec)}, EpilogueTile, cutlass_ops::{values}<Means>>", "{}")


def _tile_load(spec: KernelSpec, leaf: str, operand: Operand, c_operand: str | None) -> Node:
    element = f"Element_{leaf}"
    name = f"Load_{leaf}"
    if leaf == c_operand:
        return Node(name, f"fusion::Sm90SrcFetch<{element}>", "{}")
    layout = _layout(spec, operand)
    arguments = f"{{o.{leaf}.ptr<{element}>(), {element}(0), cutlass_ops::stride<Stride_{leaf}>(o.{leaf})}}"
    stride = f"using Stride_{leaf} = cutlass::detail::TagToStrideC_t<{layout}>;"
    if operand.aligned:
        descriptor = (
            f"using Descriptor_{leaf} = cutlass::epilogue::collective::detail::AuxLoadDescriptor<"
            f"EpilogueDescriptor, {layout}, {element}>;"
        )
        visitor = (
            f"fusion::Sm90AuxLoad<Descriptor_{leaf}::Stages, typename Descriptor_{leaf}::EpilogueTile, {element}, "
            f"Stride_{leaf}, typename Descriptor_{leaf}::SmemLayoutAtom, typename Descriptor_{leaf}::CopyOpS2R>"
        )
        return Node(name, visitor, arguments, aliases=(stride, descriptor))
    visitor = f"fusion::Sm90AuxLoad<0, void, {element}, {layout}, void, void, {operand.alignment}, false>"
    return Node(name, visitor, arguments, aliases=(stride,))


def _reduction(spec: KernelSpec, group: tuple[Output, ...], value: int, plain: bool) -> Node:
    """Reduce a value, in several ways at once where there are several outputs."""
    name, kind = group[0].name, group[0].kind
    by_columns = along_n(spec, kind)
    if not plain:
        (output,) = group
        operand = next(operand for o, operand in spec.typed_outputs if o.name == name)
        fold, join, identity = _CUTLASS_REDUCTIONS[str(output.reduce)]
        visitor, stride = ("Sm90RowReduction", "_0, _1, _0") if by_columns else ("Sm90ColReduction", "_1, _0, _0")
        return Node(
            f"Reduce_{name}",
            f"fusion::{visitor}<{fold}, {join}, {join}, 0, ThreadblockShape, Element_{name}, ElementCompute, Round, "
            f"cute::Stride<{stride}>, {operand.dtype.tma_alignment}, false>",
            f"{{o.{name}, {identity}, {{}}}}",
            (value,),
        )
    visitor, sides = "RowReduction" if by_columns else "ColReduction", 2 if _config(spec).side_by_side else 1
    ways = [f"cutlass_ops::reduce::{REDUCERS[str(o.reduce)]}" for o in group]
    way, element, pointers = ways[0], f"Element_{name}", f"o.{name}"
    if len(group) > 1:
        way = f"cutlass_ops::reduce::Together<{', '.join(ways)}>"
        element = f"cutlass_ops::Elements<{', '.join(f'Element_{o.name}' for o in group)}>"
        pointers = "".join(f"{{o.{o.name}, " for o in group[:-1]) + f"{{o.{group[-1].name}}}" + "}" * (len(group) - 1)
    return Node(
        f"Reduce_{name}",
        f"cutlass_ops::{visitor}<{way}, {_part_shape(spec)}, EpilogueTile, {element}, {sides}>",
        f"{{{pointers}, o.{_parts(group[0])}}}",
        (value,),
    )


def _store(spec: KernelSpec, output: Output, value: int, plain: bool) -> Node:
    index = next(i for i, o in enumerate(spec.epilogue.outputs[1:]) if o.name == output.name)
    operand = spec.outputs[index]
    name, element = output.name, f"Element_{output.name}"
    layout = _layout(spec, operand)
    if not operand.aligned:
        return _direct_store(name, element, layout, str(operand.alignment), value)
    if plain:
        by_columns, sides = oriented(spec, operand).major == "col", 2 if _config(spec).side_by_side else 1
        given = f"{_part_shape(spec)}, EpilogueTile, {element}, {str(by_columns).lower()}, {sides}"
        return Node(f"Store_{name}", f"cutlass_ops::TileOutput<{given}>", f"o.{name}", (value,))
    descriptor = (
        f"using Descriptor_{name} = cutlass::epilogue::collective::detail::AuxStoreDescriptor<"
        f"EpilogueDescriptor, {layout}, {element}>;"
    )
    return Node(
        f"Store_{name}",
        f"fusion::Sm90AuxStore<Descriptor_{name}::Stages, typename Descriptor_{name}::EpilogueTile, {element}, Round, "
        f"typename Descriptor_{name}::Stride, typename Descriptor_{name}::SmemLayoutAtom, "
        f"typename Descriptor_{name}::CopyOpR2S>",
        f"{{o.{name}.ptr<{element}>(), cutlass_ops::stride<typename Descriptor_{name}::Stride>(o.{name})}}",
        (value,),
        (descriptor,),
    )


def _direct_store(name: str, element: str, layout: str, alignment: str, value: int) -> Node:
    """Store from registers, for tensors that the bulk copy engine cannot address."""
    return Node(
        f"Store_{name}",
        f"fusion::Sm90AuxStore<0, void, {element}, Round, {layout}, void, void, {alignment}, false>",
        f"{{o.{name}.ptr<{element}>(), cutlass_ops::stride<cutlass::detail::TagToStrideC_t<{layout}>>(o.{name})}}",
        (value,),
    )
