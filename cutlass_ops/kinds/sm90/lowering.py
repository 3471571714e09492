"""From a spec to the values that ``sm90_gemm.cu.j2`` renders: plain strings and numbers only.

Types of the main loop and of the epilogue are chosen here, by name. The template prints them.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from cutlass_ops.base.dtypes import i32, tf32
from cutlass_ops.base.mma import BLOCK_K, sums_of
from cutlass_ops.declare.config import MEANS
from cutlass_ops.declare.form import BATCHED, DENSE, GROUPED, RAGGED_K
from cutlass_ops.declare.orientation import swapped
from cutlass_ops.declare.spec import KernelSpec, Operand, copied
from cutlass_ops.epilogue.nodes import D_SCALE, Kind
from cutlass_ops.kinds import serving
from cutlass_ops.kinds.lower import READERS, fields, flag, lower, types
from cutlass_ops.kinds.sm90 import footprint, packed_loop, sparse_loop  # noqa: F401 - two main loops
from cutlass_ops.kinds.sm90.loop import WRAPPED, Aliases, config_of, loads_along_k, loop_of, means_taken
from cutlass_ops.kinds.sm90.visitors import layout_in_kernel, part_shape, parts_of, visitors

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
    reductions, copies = _reductions(spec) if plain else [], _copies(spec)
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
        "overlaps": flag(overlaps),
        "library": _library(spec, plain, reductions, copier["header"] if copies else "", taken),
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
        "shared_memory_limit": footprint.block_memory(spec) - footprint.means_smem(spec),
        "kernels_before": _kernels_before(copier["kernel"] if copies else "", taken),
        "matrix": "cutlass_ops::Matrix" if spec.form == DENSE else "cutlass_ops::BatchedMatrix",
        "members": _members(spec, given, reductions, taken),
        "reader": _reader(spec, given),
        "arguments": {
            "problem": _problem(spec),
            "mainloop": loop.arguments(spec),
            "epilogue": _epilogue_arguments(spec, c_name),
        },
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


def _library(spec: KernelSpec, plain: bool, reductions: Aliases, copier: str, taken: str | None) -> list[str]:
    """List the headers of the library and of CUTLASS that define the kernel."""
    form, kinds = spec.form, {i.kind for i in spec.epilogue.inputs}
    headers = {
        "sm90_gemm": True,
        "split_k": config_of(spec).split_k > 1,
        "tf32": spec.a.dtype is tf32,
        "int8": sums_of(spec.a.dtype, spec.b.dtype) is i32,
        "means_beside": taken == "beside",
        "row_means": taken == "ahead",
        copier: bool(copier),
        "block_scales": bool(spec.epilogue.block_scales),
        "quantized": spec.epilogue.quantized is not None,
        "sm90_reduction": plain and bool(reductions),
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
    """List the visitors that reduce, with how many results each has and of how many elements of D each is one."""
    extents = {Kind.COL: "o.problem.m, o.problem.n", Kind.ROW: "o.problem.n, o.problem.m"}
    return [
        {"node": f"Reduce_{first.name}", "parts": parts_of(first), "extents": extents[first.kind]}
        for first, *_ in serving.reduced_together(spec)
    ]


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
    alias = "using MeansAhead = cutlass_ops::MeansAhead<Rows>;\n"
    means = [{"alias": alias, "name": "means", "type": "MeansAhead"}] if taken == "ahead" else []
    copies = [{"alias": "", "name": "copies", "type": copier}] if copier else []
    return means + copies


def _prepares(spec: KernelSpec, reductions: Aliases, copies: Aliases, taken: str | None) -> dict[str, Any] | None:
    """Say what a launch does before the GEMM, and the bytes that this takes; None if there is nothing."""
    if not (taken or reductions or copies or spec.form == GROUPED):
        return None
    scratch = [f"cutlass_ops::parts_bytes<{r['node']}>({r['extents'].replace('o.', '')})" for r in reductions]
    scratch += ["cutlass_ops::means_bytes<WhichMeans>(problem)"] * (taken == "ahead")
    scratch += [copy["bytes"] for copy in copies]
    arguments = "GemmKernel::Arguments const&" + (" arguments" if taken == "beside" else "")
    parameters = f"Operands& o, {arguments},\n                             cutlass_ops::Preparing& preparing"
    statements = ["return cudaSuccess;"]
    if spec.form == GROUPED:
        parameters = "Operands& o, GemmKernel::Arguments& arguments, cutlass_ops::Preparing&"
        statements = ["arguments.scheduler.groups = o.groups;", *statements]
    if taken == "ahead":
        statements = ["o.rows = cutlass_ops::rows_of<Rows>(o.a, o.problem);"]
    if taken == "beside":
        statements = [
            "o.rows = {cutlass_ops::rows_of<Rows::Reader>(o.a, o.problem), {}};",
            "return cutlass_ops::share_rows<GemmKernel, Rows>(o.rows, arguments, preparing);",
        ]
    return {
        "scratch": " + ".join(scratch) or "0",
        "scratch_of": "cutlass_ops::Problem" + (" problem" if scratch else ""),
        "parameters": parameters,
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
    members += [{"type": "cutlass_ops::Parts", "name": r["parts"]} for r in reductions]
    if taken:
        members.append({"type": "Rows::Params", "name": "rows"})
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


def _problem(spec: KernelSpec) -> str:
    """Spell the extents in the kernel's orientation. Two weights lie beside each other along N."""
    columns = "2 * o.problem.n" if spec.epilogue.products else "o.problem.n"
    first, second = (columns, "o.problem.m") if swapped(spec) else ("o.problem.m", columns)
    batch = "1" if spec.form == DENSE else "cutlass_ops::batch_shape(o.problem)"
    return f"{{{first}, {second}, o.problem.k, {batch}}}"


def _epilogue_arguments(spec: KernelSpec, c_name: str | None) -> str:
    """Spell the epilogue's arguments: the visitors', C and D, and what is around these."""
    c = f"o.{c_name}.ptr<Element_{c_name}>()" if c_name else "nullptr"
    c_stride = f"cutlass_ops::stride<typename GemmKernel::StrideC>(o.{c_name})" if c_name else "{}"
    d = "o.d.ptr<ElementD>()" if spec.d.aligned else "nullptr"
    found = f"{{epilogue, {c}, {c_stride},\n         {d}, cutlass_ops::stride<typename GemmKernel::StrideD>(o.d)}}"
    if spec.epilogue.quantized is not None:
        found = f"{{{found}, o.{D_SCALE}}}"
    return f"{{{found}, o.groups}}" if spec.form == GROUPED else found
