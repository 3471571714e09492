"""The visitors of an Sm90 kernel's epilogue, as C++ types.

Names of CUTLASS 3.x: ``cutlass/epilogue/fusion/sm90_visitor_*.hpp``.
"""

from __future__ import annotations

from cutlass_ops.base.dtypes import DType, f32
from cutlass_ops.declare.form import DENSE
from cutlass_ops.declare.orientation import along_n, oriented, swapped
from cutlass_ops.declare.spec import KernelSpec, Operand
from cutlass_ops.epilogue.nodes import Kind, Output
from cutlass_ops.epilogue.operations import GATHERED
from cutlass_ops.kinds import serving
from cutlass_ops.kinds.lower import ACC, REDUCERS, Lowered, Visitor, flag, layout_of
from cutlass_ops.kinds.sm90 import footprint
from cutlass_ops.kinds.sm90.config import Sm90Config

# Of CUTLASS's reductions: the functor that folds a value in, the one that joins partial results, and the identity.
_CUTLASS_REDUCTIONS = {
    "sum": ("cutlass_ops::Sum", "cutlass_ops::Sum", "0.0f"),
    "sum_square": ("cutlass_ops::SumSquare", "cutlass_ops::Sum", "0.0f"),
    "max": ("cutlass_ops::Max", "cutlass_ops::Max", "-std::numeric_limits<float>::infinity()"),
    "min": ("cutlass_ops::Min", "cutlass_ops::Min", "std::numeric_limits<float>::infinity()"),
}
_NOTHING = "cutlass_ops::Nothing"


def layout_in_kernel(spec: KernelSpec, operand: Operand) -> str:
    """Spell the layout of an (M, N) tensor in the kernel's orientation, or its stride where there are batches."""
    layout = f"cutlass::layout::{layout_of(oriented(spec, operand))}"
    return layout if spec.form == DENSE else f"cutlass_ops::BatchedC<{layout}>"


def tile_copy(spec: KernelSpec, name: str, element: str, operand: Operand, *, ragged: bool = False) -> str:
    """Spell how TMA copies parts of an (M, N) tensor's tile, which lie as the tensor does."""
    rows, columns = footprint.epilogue_tile(spec)
    length, lines = (columns, rows) if oriented(spec, operand).major == "row" else (rows, columns)
    types = f"<{element}, cutlass_ops::Major::k{operand.major.capitalize()}>"
    if ragged:
        return f"cutlass_ops::ragged_copy{types}(o.{name}, {length}, {lines})"
    return f"cutlass_ops::tile_copy{types}(o.{name}, cutlass_ops::batching(o.problem, o.{name}), {length}, {lines})"


def _lines(spec: KernelSpec, name: str) -> tuple[str, str]:
    """Spell the type and the value of the distances in a tensor that threads read or write element by element."""
    if spec.form == DENSE:
        return "cutlass_ops::Lines<int64_t>", f"{{o.{name}.ld, 0}}"
    return "cutlass_ops::Lines<cutlass_ops::Batches>", f"{{o.{name}.ld, o.{name}.batches}}"


def part_shape(spec: KernelSpec) -> str:
    """Name the tile of one thread block's epilogue."""
    if spec.epilogue.products:
        return "OutputShape"
    return "ThreadblockShape" if _config(spec).split_k == 1 else "PartShape"


def parts_of(output: Output) -> str:
    """Name the parts of a reduction's results. No name that users give ends in an underscore."""
    return f"{output.name}_parts_"


def _config(spec: KernelSpec) -> Sm90Config:
    assert isinstance(spec.config, Sm90Config)
    return spec.config


def visitors(spec: KernelSpec, lowered: Lowered) -> tuple[list[Visitor], bool]:
    """List the visitors in topological order; the last one yields D. Also says whether they form a plain tree."""
    # With a plain epilogue, rows and columns are read by the visitors of ``epilogue.h``.
    c_operand, plain = serving.source_name(spec), serving.plain_epilogue(spec)
    nodes: list[Visitor] = []
    at: dict[str, int] = {}

    def add(key: str, node: Visitor) -> None:
        at[key] = len(nodes)
        nodes.append(node)

    for leaf in lowered.leaves:
        add(leaf, _load(spec, lowered, leaf, c_operand, plain))
    d_store, *others = [s for s in lowered.stores if s.output.kind is not Kind.BLOCKS_D]
    # The collective itself quantises, once it knows a block's scale.
    result = "ElementD" if spec.epilogue.quantized is None else "ElementCompute"
    for compute in lowered.computes:
        if compute.swaps_pairs:
            visitor = f"cutlass_ops::SwapPairs<{flag(swapped(spec))}>"
            edges = tuple(at[a] for a in compute.args)
            add(compute.name, Visitor(f"Swap_{compute.label}", visitor, "{}", edges, params=_NOTHING))
            continue
        is_result = compute.name == d_store.compute and spec.d.aligned and not _reused(lowered)
        final = result if is_result else "ElementCompute"
        add(
            compute.name,
            Visitor(
                f"Compute_{compute.label}",
                f"fusion::Sm90Compute<cutlass_ops::Elementwise<{compute.struct}>::Fn, {final}, ElementCompute, Round>",
                "{}",
                tuple(at[a] for a in compute.args),
                params=_NOTHING,
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
        nodes.append(_direct_store(spec, "d", "ElementD", "LayoutKernelD", "AlignmentD", at[d_store.compute]))
    elif others or lowered.computes[-1].name != d_store.compute or lowered.computes[-1].swaps_pairs:
        nodes.append(
            Visitor(
                "Result",
                f"fusion::Sm90Compute<cutlass::epilogue::thread::Identity, {result}, ElementCompute, Round>",
                "{}",
                (at[d_store.compute],),
                params=_NOTHING,
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


def _load(spec: KernelSpec, lowered: Lowered, leaf: str, c_operand: str | None, plain: bool) -> Visitor:
    if leaf == ACC:
        return Visitor("Accumulator", "fusion::Sm90AccFetch", "{}", params=_NOTHING)
    place = lowered.place(leaf)
    if place is not None:
        visitor = f"cutlass_ops::PlaceInput<{place.functor}, {flag(swapped(spec))}>"
        params = f"cutlass_ops::PlaceArguments<{place.functor}>"
        return Visitor(f"Load_{leaf}", visitor, f"{{{', '.join(place.arguments)}}}", params=params)
    if leaf in GATHERED:
        return _gathered_load(spec, leaf, plain)
    if leaf in spec.epilogue.products:
        return Visitor(f"Load_{leaf}", "cutlass_ops::ProductInput", "{}", params=_NOTHING)
    kind, operand = next((i.kind, operand) for i, operand in spec.typed_inputs if i.name == leaf)
    element = f"Element_{leaf}"
    name = f"Load_{leaf}"
    if kind is Kind.SCALAR:
        params = f"cutlass_ops::Scalar<{element}>"
        return Visitor(name, f"cutlass_ops::ScalarInput<{element}>", f"o.{leaf}", params=params)
    if kind is Kind.TILE:
        return _tile_load(spec, leaf, operand, c_operand)
    return _vector_load(spec, kind, name, element, f"o.{leaf}", operand.dtype, plain)


def _vector_load(
    spec: KernelSpec, kind: Kind, name: str, element: str, pointer: str, dtype: DType, plain: bool
) -> Visitor:
    shape = part_shape(spec)
    if plain:
        row, groups = along_n(spec, kind), footprint.row_copies(spec)
        given = f"{shape}, EpilogueTile, {element}" + (f", {groups}" if row and groups > 1 else "")
        visitor = f"cutlass_ops::{'RowInput' if row else 'ColInput'}<{given}>"
        if spec.form != DENSE:
            params = f"cutlass_ops::BatchedVector<{element}>"
            return Visitor(name, f"cutlass_ops::BatchedInput<{visitor}, {element}>", pointer, params=params)
        return Visitor(name, visitor, f"{{{pointer}}}", params=f"cutlass_ops::Vector<{element}>")
    visitor, stride = ("Sm90RowBroadcast", "_0, _1, _0") if along_n(spec, kind) else ("Sm90ColBroadcast", "_1, _0, _0")
    params, distances = _NOTHING, "{}"
    if spec.form != DENSE:
        params, distances = "cutlass_ops::Batches", f"{pointer}.batches"
        stride, pointer = f"{stride.removesuffix(', _0')}, cute::Stride<int64_t, int64_t>", f"{pointer}.values"
    return Visitor(
        name,
        f"fusion::{visitor}<0, {shape}, {element}, ElementCompute, cute::Stride<{stride}>, "
        f"{dtype.tma_alignment}, false>",
        f"{{{pointer}, {{}}, {distances}}}",
        params=f"cutlass_ops::Broadcast<{element}, {params}>",
    )


def _gathered_load(spec: KernelSpec, leaf: str, plain: bool) -> Visitor:
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
    return Visitor(
        name,
        f"cutlass_ops::{visitor}<{part_shape(spec)}, EpilogueTile, cutlass_ops::{values}<Means>>",
        "{}",
        params=_NOTHING,
    )


def _tile_load(spec: KernelSpec, leaf: str, operand: Operand, c_operand: str | None) -> Visitor:
    element = f"Element_{leaf}"
    name = f"Load_{leaf}"
    if leaf == c_operand:
        return Visitor(name, f"fusion::Sm90SrcFetch<{element}>", "{}", params=_NOTHING)
    layout = layout_in_kernel(spec, operand)
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
        copy = tile_copy(spec, leaf, element, operand)
        params = f"cutlass_ops::LoadedTile<{element}>"
        return Visitor(name, visitor, f"{{{copy}}}", aliases=(stride, descriptor), params=params)
    visitor = f"fusion::Sm90AuxLoad<0, void, {element}, {layout}, void, void, {operand.alignment}, false>"
    lines, distances = _lines(spec, leaf)
    arguments = f"{{o.{leaf}.ptr<{element}>(), {{}}, {distances}}}"
    return Visitor(name, visitor, arguments, params=f"cutlass_ops::ReadTile<{element}, {lines}>")


def _reduction(spec: KernelSpec, group: tuple[Output, ...], value: int, plain: bool) -> Visitor:
    """Reduce a value, in several ways at once where there are several outputs."""
    name, kind = group[0].name, group[0].kind
    by_columns = along_n(spec, kind)
    if not plain:
        (output,) = group
        operand = next(operand for o, operand in spec.typed_outputs if o.name == name)
        fold, join, identity = _CUTLASS_REDUCTIONS[str(output.reduce)]
        visitor, stride = ("Sm90RowReduction", "_0, _1, _0") if by_columns else ("Sm90ColReduction", "_1, _0, _0")
        return Visitor(
            f"Reduce_{name}",
            f"fusion::{visitor}<{fold}, {join}, {join}, 0, ThreadblockShape, Element_{name}, ElementCompute, Round, "
            f"cute::Stride<{stride}>, {operand.dtype.tma_alignment}, false>",
            f"{{o.{name}, {identity}, {{}}, o.{parts_of(output)}.parts, o.{parts_of(output)}.arrived}}",
            (value,),
            params="cutlass_ops::WorkspaceReduction",
        )
    visitor, sides = "RowReduction" if by_columns else "ColReduction", 2 if _config(spec).side_by_side else 1
    ways = [f"cutlass_ops::reduce::{REDUCERS[str(o.reduce)]}" for o in group]
    way, element, pointers = ways[0], f"Element_{name}", f"o.{name}"
    if len(group) > 1:
        way = f"cutlass_ops::reduce::Together<{', '.join(ways)}>"
        element = f"cutlass_ops::Elements<{', '.join(f'Element_{o.name}' for o in group)}>"
        pointers = "".join(f"{{o.{o.name}, " for o in group[:-1]) + f"{{o.{group[-1].name}}}" + "}" * (len(group) - 1)
    return Visitor(
        f"Reduce_{name}",
        f"cutlass_ops::{visitor}<{way}, {part_shape(spec)}, EpilogueTile, {element}, {sides}>",
        f"{{{pointers}, o.{parts_of(group[0])}}}",
        (value,),
        params=f"cutlass_ops::Reduced<{element}>",
    )


def _store(spec: KernelSpec, output: Output, value: int, plain: bool) -> Visitor:
    operand = next(operand for o, operand in spec.typed_outputs if o.name == output.name)
    name, element = output.name, f"Element_{output.name}"
    layout = layout_in_kernel(spec, operand)
    if not operand.aligned:
        return _direct_store(spec, name, element, layout, str(operand.alignment), value)
    if plain:
        by_columns, sides = oriented(spec, operand).major == "col", 2 if _config(spec).side_by_side else 1
        given = f"{part_shape(spec)}, EpilogueTile, {element}, {flag(by_columns)}, {sides}"
        visitor = f"cutlass_ops::TileOutput<{given}>"
        return Visitor(f"Store_{name}", visitor, f"o.{name}", (value,), params="cutlass_ops::Matrix")
    descriptor = (
        f"using Descriptor_{name} = cutlass::epilogue::collective::detail::AuxStoreDescriptor<"
        f"EpilogueDescriptor, {layout}, {element}>;"
    )
    return Visitor(
        f"Store_{name}",
        f"fusion::Sm90AuxStore<Descriptor_{name}::Stages, typename Descriptor_{name}::EpilogueTile, {element}, Round, "
        f"typename Descriptor_{name}::Stride, typename Descriptor_{name}::SmemLayoutAtom, "
        f"typename Descriptor_{name}::CopyOpR2S>",
        f"{{{tile_copy(spec, name, element, operand)}}}",
        (value,),
        (descriptor,),
        "cutlass_ops::StoredTile",
    )


def _direct_store(spec: KernelSpec, name: str, element: str, layout: str, alignment: str, value: int) -> Visitor:
    """Store from registers, for tensors that the bulk copy engine cannot address."""
    lines, distances = _lines(spec, name)
    return Visitor(
        f"Store_{name}",
        f"fusion::Sm90AuxStore<0, void, {element}, Round, {layout}, void, void, {alignment}, false>",
        f"{{o.{name}.ptr<{element}>(), {distances}}}",
        (value,),
        params=f"cutlass_ops::WrittenTile<{element}, {lines}>",
    )
