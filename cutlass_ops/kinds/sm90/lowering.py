"""From a spec to the values that ``sm90_gemm.cu.j2`` renders: plain strings and numbers only.

Types of the main loop and of the epilogue are chosen here, by name. The template prints them.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from cutlass_ops.base.arch import WGMMA
from cutlass_ops.base.dtypes import f32, i32, tf32
from cutlass_ops.base.mma import BLOCK_K, sums_of
from cutlass_ops.declare.config import MEANS
from cutlass_ops.declare.form import BATCHED, DENSE, GROUPED, RAGGED_K
from cutlass_ops.declare.orientation import along_n, swapped
from cutlass_ops.declare.spec import KernelSpec, Operand, copied
from cutlass_ops.epilogue.nodes import D_SCALE, Kind
from cutlass_ops.kinds import serving
from cutlass_ops.kinds.lower import READERS, fields, flag, lower, types
from cutlass_ops.kinds.sm90 import footprint, packed_loop, sparse_loop  # noqa: F401 - two main loops
from cutlass_ops.kinds.sm90.loop import WRAPPED, Aliases, config_of, loads_along_k, loop_of, means_taken
from cutlass_ops.kinds.sm90.visitors import layout_in_kernel, part_shape, parts_of, tile_copy, visitors

# The ends of CUTLASS's names of schedules. A pingpong kernel's epilogue is that of one warpgroup.
_MAINLOOP = {"pingpong": "Pingpong", "cooperative": "Cooperative", "warp_specialized": ""}
_EPILOGUE = {"pingpong": "", "cooperative": "Cooperative", "warp_specialized": ""}
# What a kernel's D is computed for, in a comment.
_OF_EACH = {
    DENSE: "",
    BATCHED: ", for each batch",
    GROUPED: ", for each group of rows",
    RAGGED_K: ", for each group of K",
}
# What reads the operands of each form.
_OPERANDS = {BATCHED: "BatchedOperands", GROUPED: "GroupedOperands", RAGGED_K: "RaggedKOperands"}
_OVERLAPS = {
    "how": "The kernel may start while the one before it ends: programmatic dependent launch.",
    "macro": "CUTLASS_ENABLE_GDC_FOR_SM90",
}
_WAITS_LATE = {
    "how": "The kernel starts while means of A's rows are taken, and its epilogue waits for them.",
    "macro": "CUTLASS_OPS_WAITS_LATE",
}

# What a launch gives to what takes means of A's rows.
_ROWS = {"ahead": "RowsToRead", "beside": "RowsToShare"}

# Of the headers that few kernels need, that of values with launch arguments.
_SHARED = ("cutlass_ops/random.h",)

# What copies operands: as they lie, if TMA cannot read them, or along K, if wgmma reads no other lines.
_REALIGNED = {
    "header": "realign",
    "kernel": "cutlass_ops::Realign",
    "type": "cutlass_ops::Realigned",
    "reader": "TMA",
}
_ALONG_K = {
    "header": "along_k",
    "kernel": "cutlass_ops::AlongK<sizeof(ElementA)>",
    "type": "cutlass_ops::CopiedAlongK<sizeof(ElementA)>",
    "reader": "wgmma",
}


def context(spec: KernelSpec) -> dict[str, Any]:
    """Return the template's variables for a legal Sm90 spec."""
    config, lowered = config_of(spec), lower(spec.epilogue)
    plain, source, tile = serving.plain_epilogue(spec), serving.source(spec), config.threadblock
    nodes, is_tree = visitors(spec, lowered)
    reductions, copies = _reductions(spec), _copies(spec)
    copier, taken = _ALONG_K if loads_along_k(spec) else _REALIGNED, means_taken(spec)
    values = types(spec, lowered, "cutlass_ops/sm90_places.h")
    # An epilogue that only moves sums takes them as FP32.
    is_sums, integers = spec.d.dtype is i32, sums_of(spec.a.dtype, spec.b.dtype) is i32
    d = values["d"] | {"is_sums": is_sums, "stored": values["d"]["element"] if is_sums else "ElementD"}
    loop = loop_of(spec)
    given = loop.fields(spec, fields(spec, _in_whole_accesses))
    overlaps = config.scheduler != "stream_k"
    c_name, c_type = (source[0].name, source[1]) if source else (None, spec.d)
    return values | {
        "starts": (_WAITS_LATE if taken == "ahead" and plain else _OVERLAPS) if overlaps else None,
        # CUTLASS's reductions count in memory that is cleared before each launch.
        "overlaps": flag(overlaps and (plain or not reductions)),
        "launched": _launched(spec, reductions, copier["header"] if copies else "", taken),
        "library": _library(spec, plain, taken),
        "instruction": loop.instruction(spec),
        "of_each": _OF_EACH[spec.form],
        "d": d | {"element": "float"} if is_sums else d,
        "accumulator": "int32_t" if integers and not is_sums else "float",
        "tile": {"m": tile.m, "n": tile.n, "k": tile.k},
        "cluster": {"m": config.cluster.m, "n": config.cluster.n},
        "mainloop_schedule": f"KernelTmaWarpSpecialized{_MAINLOOP[config.schedule]}",
        "epilogue_schedule": f"TmaWarpSpecialized{_EPILOGUE[config.schedule]}",
        "tile_scheduler": _scheduler(spec),
        "stages": footprint.pipeline_stages(spec),
        "means": _means(spec),
        "second_weight": "".join(spec.epilogue.products),
        "output_tile": {"m": footprint.output_tile(spec).m, "n": footprint.output_tile(spec).n},
        "split_k": config.split_k,
        "part_n": config.part.n,
        "swap_ab": swapped(spec),
        "c": {
            "element": f"Element_{c_name}" if c_name else "void",
            "layout": layout_in_kernel(spec, c_type),
            "alignment": c_type.alignment,
        },
        "layout_kernel_d": layout_in_kernel(spec, spec.d),
        "plain_epilogue": plain,
        "epilogue_tile": footprint.epilogue_tile(spec),
        "epilogue_stages": footprint.epilogue_stages(spec),
        "part_shape": part_shape(spec),
        "nodes": [
            asdict(n) | {"aliases": list(n.aliases), "sequence": f"cute::seq<{', '.join(map(str, n.edges))}>"}
            for n in nodes
        ],
        "is_tree": is_tree,
        "callbacks": _callbacks(spec, plain, integers),
        "epilogue": _plain_collective(spec, c_name) if plain else _cutlass_collective(spec),
        "mainloop": loop.types(spec),
        "kernel": _kernel(spec),
        "shape": {
            "cluster_m": config.split_k if config.split_k > 1 else config.cluster.m,
            "cluster_n": config.cluster.n,
            "threads": 256 if config.schedule == "warp_specialized" else 384,
            "shared_memory": footprint.shared_memory(spec, config) - footprint.means_smem(spec),
        },
        "grouped": spec.form == GROUPED,
        "means_ahead": taken == "ahead",
        "headers": {
            "shared": ["cutlass_ops/places.h"] * bool(lowered.places) + [h for h in values["headers"] if h in _SHARED],
            "device": [h for h in values["headers"] if h not in _SHARED],
        },
        "shared_memory_limit": footprint.block_memory(spec) - footprint.means_smem(spec),
        "params": _params(spec, [n.params for n in nodes]),
        "kernels_before": _kernels_before(copier["kernel"] if copies else "", taken),
        "matrix": "cutlass_ops::Matrix" if spec.form == DENSE else "cutlass_ops::BatchedMatrix",
        "members": _members(spec, given, reductions, taken),
        "reader": _reader(spec, given),
        "extents": _extents(spec),
        "fill": {"mainloop": loop.fill(spec), "epilogue": _fill_epilogue(spec, plain, c_name)},
        "reductions": reductions,
        "copies": copies,
        "copier": copier,
        "prepares": _prepares(spec, reductions, copies, taken),
    }


def _swapped(spec: KernelSpec) -> str:
    return flag(swapped(spec))


def _in_whole_accesses(operand: Operand, is_output: bool) -> bool:
    """Whether accesses must divide the extent: not where the bulk copy engine reads and fills up with zeros."""
    return is_output or not operand.aligned


# ---- Headers and instructions ----------------------------------------------------------------------------------------


def _launched(spec: KernelSpec, reductions: Aliases, copier: str, taken: str | None) -> list[str]:
    """List the headers of the library that say how the kernel is launched."""
    scalars = {operand.dtype for i, operand in spec.typed_inputs if i.kind is Kind.SCALAR}
    headers = {
        "types_of_cutlass": bool(scalars - {f32}),
        "sm90_stream_k": config_of(spec).scheduler == "stream_k",
        "sm90_launch": True,
        "sm90_grouped_launch": spec.form in WRAPPED,
        "rows": bool(spec.epilogue.gathered),
        "rows_beside": taken == "beside",
        "sm90_results": bool(reductions),
        copier: bool(copier),
    } | dict.fromkeys(loop_of(spec).launched, True)
    return [f"cutlass_ops/{name}.h" for name, wanted in headers.items() if wanted]


def _library(spec: KernelSpec, plain: bool, taken: str | None) -> list[str]:
    """List the headers of the library and of CUTLASS that define the kernel."""
    form, kinds = spec.form, {i.kind for i in spec.epilogue.inputs}
    headers = {
        "sm90_gemm": True,
        "split_k": config_of(spec).split_k > 1,
        "tf32": spec.a.dtype is tf32,
        "int8": sums_of(spec.a.dtype, spec.b.dtype) is i32,
        "means_beside": taken == "beside",
        "row_means": taken == "ahead",
        "block_scales": bool(spec.epilogue.block_scales),
        "quantized": spec.epilogue.quantized is not None,
        "sm90_reduction": plain and bool(serving.reduced_together(spec)),
        "cutlass/epilogue/collective/collective_builder.hpp": not plain,
        "tile_output": plain and serving.stored_by_threads(spec),
        "sm90_grouped": form == GROUPED,
        "ragged": form == GROUPED and plain,
        "sm90_ragged_k": form == RAGGED_K,
        "sm90_batched": form == BATCHED,
        "batched_inputs": form != DENSE and plain and bool(kinds & {Kind.ROW, Kind.COL}),
        "sm90_pairs": spec.epilogue.swaps_pairs,
        "scalar_input": Kind.SCALAR in kinds,
    }
    names = (*(name for name, wanted in headers.items() if wanted), *loop_of(spec).headers)
    return [name if "/" in name else f"cutlass_ops/{name}.h" for name in names]


# ---- Work before the GEMM --------------------------------------------------------------------------------------------


def _reductions(spec: KernelSpec) -> Aliases:
    """List the visitors that reduce, each with what its parts take of memory.

    With our epilogue these are standing counters and a number of bytes, with CUTLASS's a workspace.
    """
    plain, tile, (part_m, _) = serving.plain_epilogue(spec), footprint.output_tile(spec), footprint.epilogue_tile(spec)
    sides, found = 2 if config_of(spec).side_by_side else 1, []
    for at, group in enumerate(serving.reduced_together(spec)):
        first, by_columns = group[0], along_n(spec, group[0].kind)
        m, n = ("problem.m", "problem.n")[:: -1 if swapped(spec) else 1]
        if plain:
            kept, down = footprint.kept(group).size, part_m // WGMMA.m * 4
            numbers = (tile.n, tile.m, 1, down * sides) if by_columns else (tile.m, tile.n, sides, down)
            count, extent = ("problem.n", "problem.m") if first.kind is Kind.ROW else ("problem.m", "problem.n")
            how = f"cutlass_ops::Reducing{{{', '.join(map(str, numbers))}, {kept}}}"
            bytes_of = f"{how}.parts_bytes({count}, {extent})"
            take = f"{how}.share<{at}>(o.{parts_of(first)}, o.{count}, o.{extent}, preparing)"
            check = f"sizeof(Reduce_{first.name}::State) == {kept}"
        else:
            how = f"cutlass_ops::InWorkspace({flag(by_columns)}, {{0}}problem, {{0}}{m}, {{0}}{n}, kShape)"
            bytes_of = f"{how.format('')}.parts_bytes() + {how.format('')}.arrived_bytes()"
            take, check = f"{how.format('o.')}.take(o.{parts_of(first)}, preparing)", ""
        type_ = "cutlass_ops::Parts" if plain else "cutlass_ops::WorkspaceReduction"
        found.append({"type": type_, "parts": parts_of(first), "bytes": bytes_of, "take": take, "check": check})
    return found


def _copies(spec: KernelSpec) -> Aliases:
    """List the operands that are copied ahead of the GEMM, with the bytes each copy takes."""
    if not config_of(spec).realign:
        return []
    of_a, of_b = copied(spec.a, spec.b)
    operands = ["a"] * of_a + ["b", *spec.epilogue.products] * of_b
    return [{"operand": name} | _copy(name, along_k=loads_along_k(spec)) for name in operands]


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


def _means(spec: KernelSpec) -> dict[str, str] | None:
    """Say what the epilogue takes of A's rows, and name the type that has it."""
    gathered, config = spec.epilogue.gathered, config_of(spec)
    if not gathered:
        return None
    alignment = str(spec.a.dtype.tma_alignment) if config.realign else "AlignmentA"
    rows = f"cutlass_ops::RowReader<WhichMeans, ElementA, MajorA, {alignment}>"
    tiles = f"cutlass_ops::TileMeans<WhichMeans, {footprint.gathered_rows(spec)}, {footprint.gathered_tiles(spec)}>"
    name, type_ = {
        "gathered": ("Means", tiles),
        "beside": ("Rows", f"cutlass_ops::SharedRows<{rows}>"),
        "ahead": ("Rows", rows),
    }[config.means]
    return {
        "how": MEANS[config.means],
        "mean": flag("mean_of_a" in gathered),
        "mean_square": flag("mean_square_of_a" in gathered),
        "name": name,
        "type": type_,
    }


def _kernels_before(copier: str, taken: str | None) -> Aliases:
    means = [{"name": "means", "type": "MeansAhead"}] if taken == "ahead" else []
    copies = [{"name": "copies", "type": copier}] if copier else []
    return means + copies


def _prepares(spec: KernelSpec, reductions: Aliases, copies: Aliases, taken: str | None) -> dict[str, Any] | None:
    """Say what a launch does before the GEMM, and the bytes that this takes; None if there is nothing."""
    if not (taken or reductions or copies):
        return None
    scratch = [r["bytes"] for r in reductions]
    scratch += ["cutlass_ops::means_bytes<WhichMeans>(problem)"] * (taken == "ahead")
    scratch += [copy["bytes"] for copy in copies]
    statements = ["return cudaSuccess;"]
    if taken == "ahead":
        statements = ["o.rows = cutlass_ops::rows_of<ElementA>(o.a, o.problem);"]
    if taken == "beside":
        statements = [
            "o.rows = {cutlass_ops::rows_of<ElementA>(o.a, o.problem), {}};",
            "return cutlass_ops::share_rows<WhichMeans>(",
            f"    o.rows, extents(o.problem), kShape, {_swapped(spec)}, preparing);",
        ]
    return {
        "scratch": " + ".join(scratch) or "0",
        "scratch_of": "cutlass_ops::Problem" + (" problem" if scratch else ""),
        "statements": statements,
        "means_ahead": taken == "ahead",
    }


# ---- Types -----------------------------------------------------------------------------------------------------------


def _scheduler(spec: KernelSpec) -> str:
    config = config_of(spec)
    if config.scheduler == "stream_k":
        return "cutlass::gemm::StreamKScheduler"
    # CUTLASS's third kernel is not persistent: each thread block takes the tile of its own index.
    if not config.ordered:
        return "cutlass::gemm::PersistentScheduler"
    return {
        DENSE: "cutlass_ops::OrderedScheduler",
        BATCHED: "cutlass_ops::BatchedScheduler",
        GROUPED: f"cutlass_ops::GroupedScheduler<{_swapped(spec)}>",
        RAGGED_K: "cutlass_ops::RaggedKScheduler",
    }[spec.form]


def _callbacks(spec: KernelSpec, plain: bool, integers: bool) -> str | None:
    """Name the visitors as a collective takes them; None if it needs a class of its own."""
    if integers and not plain:
        return "cutlass_ops::IntegerCallbacks<EpilogueVisitor, ElementD>"
    return "EpilogueVisitor" if spec.d.aligned else None


def _plain_collective(spec: KernelSpec, c_name: str | None) -> dict[str, Any]:
    """Spell the epilogue of ``epilogue.h``."""
    count, grouped = 1 + len(spec.epilogue.products), spec.form == GROUPED
    found = (
        f"cutlass_ops::Collective<\n    {part_shape(spec)}, EpilogueTile, ElementC, LayoutC, ElementD, LayoutKernelD, "
        "StagesC, StagesD, EpilogueCallbacks>"
    )
    if grouped:
        found = f"cutlass_ops::RaggedCollective<{found},\n    {_swapped(spec)}>"
    options = [found]
    if count > 1 or spec.epilogue.quantized is not None:
        options += [str(count), _swapped(spec)]
    if spec.epilogue.quantized is not None:
        options.append(f"cutlass_ops::{_quantized(spec)}")
    found = f"cutlass_ops::Epilogue<{', '.join(options)}>"
    if spec.d.dtype is i32:
        found = f"cutlass_ops::BitsOfSums<{found}>"
    if grouped:
        found = f"cutlass_ops::GroupedEpilogue<{found}, {_swapped(spec)}>"
    comment = [f"One group's rows: tiles of D{' and of C' if c_name else ''} end with them."] if grouped else []
    return {"comment": comment, "aliases": [{"name": "CollectiveEpilogue", "type": found}]}


def _cutlass_collective(spec: KernelSpec) -> dict[str, Any]:
    """Spell CUTLASS's own epilogue."""
    found = (
        f"typename cutlass::epilogue::collective::CollectiveBuilder<\n"
        f"    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, {part_shape(spec)}, ClusterShape,\n"
        f"    cutlass::epilogue::collective::EpilogueTileAuto, ElementAccumulator, ElementCompute,\n"
        f"    ElementC, LayoutC, AlignmentC, {'ElementD' if spec.d.aligned else 'void'}, LayoutKernelD, AlignmentD,\n"
        f"    EpilogueSchedule, EpilogueCallbacks>::CollectiveOp"
    )
    if spec.d.dtype is i32:
        found = f"cutlass_ops::BitsOfSums<{found}>"
    aliases = [{"name": "CollectiveEpilogue", "type": found}]
    if spec.form == GROUPED:
        wrapped = f"cutlass_ops::GroupedEpilogue<CollectiveOfRows, {_swapped(spec)}>"
        aliases = [{"name": "CollectiveOfRows", "type": found}, {"name": "CollectiveEpilogue", "type": wrapped}]
    return {"comment": [], "aliases": aliases}


def _quantized(spec: KernelSpec) -> str:
    """Name the way in which D is quantised (``quantized.h``)."""
    if footprint.shared_by_two(spec):
        return "QuantizedByTwo"
    return f"QuantizedByWarps<{BLOCK_K}>" if footprint.quantized_by_warps(spec) else "Quantized"


def _kernel(spec: KernelSpec) -> str:
    config = config_of(spec)
    if config.split_k > 1:
        warpgroups = 2 if config.schedule == "cooperative" else 1
        return f"cutlass_ops::SplitKernel<\n    CollectiveMainloop, CollectiveEpilogue, {warpgroups}, SplitK>"
    batch = "int" if spec.form == DENSE else "cute::Shape<int, int>"
    return (
        f"cutlass::gemm::kernel::GemmUniversal<\n    cute::Shape<int, int, int, {batch}>, CollectiveMainloop, "
        "CollectiveEpilogue, TileScheduler>"
    )


# ---- Launch arguments ------------------------------------------------------------------------------------------------


def _members(spec: KernelSpec, given: Aliases, reductions: Aliases, taken: str | None) -> Aliases:
    """List what a launch keeps besides the problem, A, B and D."""
    members = [{"type": field["type"], "name": field["name"]} for field in given]
    members += [{"type": r["type"], "name": r["parts"]} for r in reductions]
    if taken:
        members.append({"type": f"cutlass_ops::{_ROWS[taken]}<ElementA>", "name": "rows"})
    if spec.form in WRAPPED:
        members.append({"type": "cutlass_ops::RowGroups", "name": "groups"})
    return members


def _reader(spec: KernelSpec, given: Aliases) -> dict[str, Any]:
    """Say how a call's arguments are read."""
    cls, name = loop_of(spec).reader or (_OPERANDS.get(spec.form), READERS[spec.form])
    a, b = ("rows", "weights") if spec.form == GROUPED else ("input", "input")
    after = [f"o.{field['name']} = {field['read']};" for field in given]
    if spec.form in WRAPPED:
        after.insert(0, f"o.groups = {name}.groups(o.problem);")
    if cls:
        after.append(f"{name}.check();")
    return {
        "before": [f"cutlass_ops::{cls} {name}(call);"] if cls else [],
        "name": name,
        "a": a,
        "b": b,
        "after": after,
    }


def _extents(spec: KernelSpec) -> str:
    """Spell the extents in the kernel's orientation. Two weights lie beside each other along N."""
    columns = "2 * p.n" if spec.epilogue.products else "p.n"
    first, second = (columns, "p.m") if swapped(spec) else ("p.m", columns)
    return f"{{{first}, {second}, p.k, {'1' if spec.form == DENSE else 'p.inner, p.count / p.inner'}}}"


def _params(spec: KernelSpec, nodes: list[str]) -> dict[str, Any]:
    """Spell the types of the kernel's parameters, and what a launch knows of the order of tiles."""
    config, plain, grouped = config_of(spec), serving.plain_epilogue(spec), spec.form == GROUPED
    by_warps = footprint.quantized_by_warps(spec)
    epilogue = f"cutlass_ops::EpilogueParams<cutlass_ops::Nodes<\n    {', '.join(nodes)}>>"
    for around, wanted in (
        ("Ragged", grouped and plain),
        ("QuantizedByWarpsParams" if by_warps else "QuantizedParams", spec.epilogue.quantized is not None),
        ("WithGroups", grouped),
    ):
        epilogue = f"cutlass_ops::{around}<{epilogue}>" if wanted else epilogue
    problem = f"cutlass_ops::Extents<{1 if spec.form == DENSE else 2}>"
    parts = [problem, "MainloopParams", "EpilogueParams"]
    ordered = config.split_k == 1 and (config.ordered or config.scheduler == "stream_k")
    kind = "Tile"
    if ordered:
        kind = "Cooperative" if config.schedule == "cooperative" else "Pingpong"
        parts.append("Scheduler")
    return {
        "problem": problem,
        "mainloop": loop_of(spec).params(spec),
        "epilogue": epilogue,
        "scheduler": _order(spec),
        "ordered": ordered,
        "type": f"cutlass_ops::{kind}Params<{', '.join(parts)}>",
    }


def _order(spec: KernelSpec) -> str:
    """Name what finds the order of tiles for a launch."""
    config = config_of(spec)
    if config.scheduler == "stream_k":
        tile, (part_m, part_n) = footprint.output_tile(spec), footprint.epilogue_tile(spec)
        return f"cutlass_ops::StreamKOrder<{tile.m // part_m * (tile.n // part_n)}>"
    if config.split_k > 1:
        return "cutlass_ops::SplitTile"
    if not config.ordered:
        return "cutlass_ops::EachTile"
    return {
        DENSE: "cutlass_ops::OrderedParams<false>",
        BATCHED: "cutlass_ops::OrderedParams<true>",
        GROUPED: f"cutlass_ops::GroupedOrder<{_swapped(spec)}>",
        RAGGED_K: "cutlass_ops::RaggedKOrder",
    }[spec.form]


def _fill_epilogue(spec: KernelSpec, plain: bool, c_name: str | None) -> list[str]:
    """Spell how a launch gives the epilogue what its visitors do not have: C and D, and what is around these."""
    ragged, (rows, columns) = spec.form == GROUPED and plain, footprint.epilogue_tile(spec)
    lines = []
    if c_name:
        c = next(operand for given, operand in spec.typed_inputs if given.name == c_name)
        copy = tile_copy(spec, c_name, f"Element_{c_name}", c, ragged=ragged)
        lines.append(f"epilogue.tma_load_c = {copy};")
    if spec.d.aligned:
        lines.append(f"epilogue.tma_store_d = {tile_copy(spec, 'd', 'ElementD', spec.d, ragged=ragged)};")
    of_part = f"Element_{c_name}" if c_name else "ElementD"
    lines.append(f"epilogue.tma_transaction_bytes = {rows * columns} * sizeof({of_part});")
    if spec.epilogue.quantized is not None:
        lines.append(f"epilogue.scales = o.{D_SCALE};")
        if footprint.quantized_by_warps(spec):
            lines += ["epilogue.d = o.d.data;", "epilogue.lines = o.d.ld * int64_t(sizeof(ElementD));"]
    if spec.form == GROUPED:
        lines.append("epilogue.groups = o.groups;")
    return lines
