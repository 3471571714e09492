"""The exact shared memory of an Sm90 kernel, its pipeline stages and its epilogue tiles.

The formulas follow CUTLASS's headers and give ``sizeof(GemmKernel::SharedStorage)``.
``tests/compile/test_legality_compile.py`` compares them with the compiler. They accept any declaration with valid field
values, legal or not.

Sources: the headers of CUTLASS 4.2, named at each formula relative to ``cutlass/``.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from cutlass_ops.base import arch
from cutlass_ops.base.arch import WGMMA
from cutlass_ops.base.dtypes import f32
from cutlass_ops.base.mma import BLOCK_K
from cutlass_ops.declare.config import ThreadblockShape
from cutlass_ops.declare.orientation import along_n, halved, oriented, sides, swapped
from cutlass_ops.declare.spec import KernelSpec, Operand
from cutlass_ops.epilogue.nodes import Kind, Output
from cutlass_ops.epilogue.operations import REDUCTIONS
from cutlass_ops.kinds.layout import ARRAY_ALIGNMENT, MAX_STAGES, Block, round_up, struct, union
from cutlass_ops.kinds.serving import plain_epilogue, quantizes_apart, reduced_together, source, source_name
from cutlass_ops.kinds.sm90.config import Sm90Config
from cutlass_ops.kinds.sm90.own import own_loop

_MBARRIER_BYTES = 8
_STEP_COLUMNS = 32  # kStepColumns in epilogue.h
_WARP_ROWS = 16  # RowReduction in sm90_reduction.h
_MEANS_ALIGNMENT = 1024  # TileMeans::kAlignment in gather.h
_STAGED_ROWS = 3 * 8 * 32 * 16  # StagedRows in means_beside.h: three warps, eight pieces of 16 bytes per lane


def output_tile(spec: KernelSpec) -> ThreadblockShape:
    """Return the part of D (or D^T) that one thread block finishes at a time."""
    return halved(spec, _sm90(spec).part)


def warpgroup_columns(spec: KernelSpec) -> int:
    """Return how many of D's columns a warpgroup finishes at a time."""
    return output_tile(spec).n // (2 if _sm90(spec).side_by_side else 1)


def gathers(spec: KernelSpec) -> bool:
    """Return whether the main loop gathers values of A's rows for the epilogue."""
    return bool(spec.epilogue.gathered) and _sm90(spec).means == "gathered"


def gathered_tiles(spec: KernelSpec) -> int:
    """Return for how many tiles a thread block keeps means at a time. A pingpong kernel works on two tiles."""
    return 1 if _sm90(spec).schedule == "cooperative" else 2


def gathered_rows(spec: KernelSpec) -> int:
    """Return how many rows of A a tile has."""
    return sides(spec)[1 if swapped(spec) else 0].extent


def _stages_rows(spec: KernelSpec) -> bool:
    """Return whether idle warps read A's rows through shared memory: in persistent kernels they have few registers."""
    config = _sm90(spec)
    beside = bool(spec.epilogue.gathered) and config.means == "beside"
    return beside and config.schedule != "warp_specialized" and (config.realign or spec.a.aligned)


def means_smem(spec: KernelSpec) -> int:
    """Return the static shared memory for means of A's rows in bytes."""
    if _stages_rows(spec):
        return _STAGED_ROWS
    if not gathers(spec):
        return 0
    count = gathered_tiles(spec) * len(spec.epilogue.gathered) * gathered_rows(spec)
    return round_up(f32.bytes_of(count), _MEANS_ALIGNMENT)


def pieces_in_turn(config: Sm90Config) -> int:
    """Return into how many pieces a warpgroup of a cooperative kernel divides a step whose products do not fit.

    They are its instructions, one below the other, or half of the only one: ``kInTurn`` in ``mainloop.h``.
    """
    return max(2, config.threadblock.m // WGMMA.m // (1 if config.side_by_side else 2))


def quantized_by_warps(spec: KernelSpec) -> bool:
    """Return whether D is quantised and each warp stores its own rows, of which it then has all columns."""
    return quantizes_apart(spec.epilogue, spec.form) and not _sm90(spec).side_by_side


def shared_by_two(spec: KernelSpec) -> bool:
    """Return whether two thread blocks of a cluster have half of the columns of each of D's scales."""
    return quantized_by_warps(spec) and 2 * warpgroup_columns(spec) == BLOCK_K


def row_copies(spec: KernelSpec) -> int:
    """Return how many copies of a value for each column are in shared memory: one for each warpgroup on its own."""
    return 2 if quantized_by_warps(spec) and _sm90(spec).schedule == "cooperative" else 1


def epilogue_tile(spec: KernelSpec) -> tuple[int, int]:
    """Return the (M, N) extents of one epilogue step's part of the CTA tile, in elements.

    ``sm90_compute_tile_shape_or_override`` in ``epilogue/collective/builders/sm90_builder.inl``. ``epilogue.h`` takes
    as many columns whatever D's type.
    """
    config = _sm90(spec)
    tile = output_tile(spec)
    if config.side_by_side:
        return 64, gcd(_STEP_COLUMNS, tile.n // 2)
    cooperative = config.schedule == "cooperative"
    narrow = spec.d.dtype.bits == 8 and not cooperative and not plain_epilogue(spec)
    columns = 64 if narrow and tile.n % 64 == 0 else 32
    return min(128 if cooperative else 64, tile.m), gcd(min(columns, tile.n), tile.n)


def epilogue_stages(spec: KernelSpec) -> tuple[int, int]:
    """Return the numbers of epilogue tiles of C and of D in shared memory.

    ``sm90_get_tma_dispatch_policy`` in ``epilogue/collective/builders/sm90_builder.inl``, except for D if
    ``epilogue.h`` stores it.
    """
    tile, (epi_m, epi_n) = output_tile(spec), epilogue_tile(spec)
    steps = -(-tile.m // epi_m) * -(-tile.n // epi_n)
    stages_d = min(steps, 2)
    if plain_epilogue(spec) and source_name(spec) is None:
        # epilogue.h: two steps of 32 columns, or of the whole tile if it has fewer.
        across = 2 if _sm90(spec).side_by_side else 1
        stages_d = 2 * across * min(_STEP_COLUMNS // epi_n, tile.n // across // epi_n)
    if spec.epilogue.quantized is not None:
        # epilogue.h: the columns that share a scale, of each of the warpgroups side by side.
        columns = BLOCK_K // 2 if shared_by_two(spec) else BLOCK_K
        stages_d = (2 if _sm90(spec).side_by_side else 1) * max(1, columns // epi_n)
    stages_c = max(min(steps, 4), stages_d + 1) if _same_width(spec) else min(steps, 4)
    return stages_c, stages_d


def epilogue_smem(spec: KernelSpec) -> int:
    """Return the epilogue's shared memory in bytes: tiles of C and D, and the visitors' storage."""
    return _epilogue(spec).size


def pipeline_stages(spec: KernelSpec) -> int:
    """Return the actual number of stages of the main loop."""
    config = _sm90(spec)
    if config.stages is not None:
        return config.stages
    limit = block_memory(spec)
    most = min(MAX_STAGES, limit // sum(_operands(spec, config)))
    means, epilogue = means_smem(spec), _epilogue(spec)
    sizes = ((s, means + _shared_storage(spec, config, s, epilogue)) for s in range(most, 0, -1))
    return next((s for s, size in sizes if size <= limit), 0)


def block_memory(spec: KernelSpec) -> int:
    """Return the shared memory that a thread block may have, in bytes: its part of a multiprocessor's."""
    target, resident = arch.target(spec.target), _sm90(spec).resident
    return min(target.shared_memory, target.shared_memory_per_sm // resident - arch.RESERVED_SHARED_MEMORY)


def mainloop_smem(spec: KernelSpec, stages: int) -> int:
    """Return the shared memory of the operands' tiles in bytes, for a number of stages."""
    return _mainloop(spec, _sm90(spec), stages).size


def split_exchange(config: Sm90Config) -> int:
    """Return the bytes of FP32 accumulators that a block sends to and receives from the blocks that split K with it."""
    part = config.part
    return f32.bytes_of(2 * (config.split_k - 1) * part.m * part.n)


def scaled_rows(spec: KernelSpec) -> tuple[int, int]:
    """Return how many of the kernel's rows, and of its columns, share a scale of blocks; 0 if blocks have none."""
    a, b = (0 if o.scaling is None else o.scaling[0] for o in (spec.a, spec.b.transposed))
    return (b, a) if swapped(spec) else (a, b)


def _stage_scales(spec: KernelSpec, config: Sm90Config) -> int:
    """Return the bytes of the scales of blocks that a stage holds (``BlockScales::For`` in ``block_scales.h``)."""
    rows, columns = scaled_rows(spec)
    if not rows or not columns:
        return 0
    tile = config.threadblock
    part = tile.n // 2 if config.side_by_side else tile.n
    count = tile.m // gcd(tile.m, WGMMA.m, rows) + tile.n // gcd(tile.n, part, columns)
    return f32.bytes_of(round_up(count, 4))


def _sm90(spec: KernelSpec) -> Sm90Config:
    if not isinstance(spec.config, Sm90Config):
        raise TypeError("an Sm90Config is needed")
    return spec.config


def _same_width(spec: KernelSpec) -> bool:
    """Return whether C has D's width, so that D can reuse C's shared memory."""
    c = source(spec)
    return c is not None and c[1].dtype.bits == spec.d.dtype.bits


def shared_memory(spec: KernelSpec, config: Sm90Config, stages: int | None = None) -> int:
    """Return one thread block's shared memory in bytes, for given stages or the configuration's own."""
    stages = pipeline_stages(spec) if stages is None else stages
    return means_smem(spec) + _shared_storage(spec, config, stages, _epilogue(spec))


def _shared_storage(spec: KernelSpec, config: Sm90Config, stages: int, epilogue: Block) -> int:
    """``GemmKernel::SharedStorage`` in ``gemm/kernel/sm90_gemm_tma_warpspecialized*.hpp``."""
    mainloop = _mainloop(spec, config, stages)
    full_and_empty = 2 * _MBARRIER_BYTES
    of_c = Block(epilogue_stages(spec)[0] * full_and_empty)
    if shared_by_two(spec):  # QuantizedByTwo in quantized.h: barriers of two warpgroups, for two turns
        of_c = struct(of_c, Block(2 * 2 * _MBARRIER_BYTES), alignment=16)
    barriers = [Block(stages * full_and_empty), of_c]
    if config.split_k > 1:  # templates/include/cutlass_ops/split_k.h
        each = Block(stages * _MBARRIER_BYTES)
        split = struct(each, each, barriers[1], Block(_MBARRIER_BYTES), alignment=16)
        return struct(split, struct(epilogue, mainloop, alignment=128)).size
    if config.schedule == "warp_specialized":  # not persistent: the epilogue starts after the main loop
        return struct(union(mainloop, epilogue), struct(*barriers, alignment=16)).size
    if config.schedule == "pingpong":
        barriers.append(Block(2 * full_and_empty))  # order of the warpgroups, in main loop and epilogue
    barriers.append(Block(full_and_empty))  # order of the producers
    tensors = struct(epilogue, mainloop, alignment=128)
    return struct(struct(*barriers, alignment=16), Block(1), tensors).size


def _operands(spec: KernelSpec, config: Sm90Config) -> tuple[int, int]:
    """Return the bytes of the operands' tiles in a stage, along the kernel's M and along its N."""
    tile = config.threadblock
    first, second = (spec.b, spec.a) if swapped(spec) else (spec.a, spec.b)
    return first.dtype.bytes_of(tile.m * tile.k), second.dtype.bytes_of(tile.n * tile.k)


def _mainloop(spec: KernelSpec, config: Sm90Config, stages: int) -> Block:
    own = own_loop(spec.b.dtype)
    if own is not None:
        return struct(*own.memory(spec, config, *_operands(spec, config), stages), alignment=128)
    tiles = [Block(stages * each) for each in _operands(spec, config)]
    scales = [Block(stages * each, 16)] if (each := _stage_scales(spec, config)) else []
    return struct(*tiles, *scales, alignment=128)


def _epilogue(spec: KernelSpec) -> Block:
    """``TensorStorage`` in ``epilogue/collective/sm90_epilogue_tma_warpspecialized.hpp``."""
    stages_c, stages_d = epilogue_stages(spec)
    c = source(spec)
    # CUTLASS allocates D even if visitors store D without shared memory, but then D does not reuse C's memory.
    d = _tiles(spec, spec.d, stages_d)
    if c is None:
        collective = d
    elif _same_width(spec) and spec.d.aligned:
        collective = union(_tiles(spec, c[1], stages_c), _tiles(spec, spec.d, stages_c))
    else:
        collective = struct(_tiles(spec, c[1], stages_c), d)
    visitors = list(_visitors(spec))
    whole = struct(collective, struct(*visitors) if visitors else Block(1, 1))
    if not shared_by_two(spec):
        return whole
    # QuantizedByTwo in quantized.h: the other block's values for each row, of two warpgroups and two turns.
    return struct(whole, Block(f32.bytes_of(2 * 2 * output_tile(spec).m), 128))


def _visitors(spec: KernelSpec) -> Iterator[Block]:
    """``SharedStorage`` of the visitors that have any.

    They are in ``epilogue/fusion/sm90_visitor_{load,store}_*.hpp``, ``epilogue.h`` and ``sm90_reduction.h``.
    """
    stages_c, stages_d = epilogue_stages(spec)
    c = source_name(spec)
    if _sm90(spec).means != "gathered" and along_n(spec, Kind.COL):
        for _ in spec.epilogue.gathered:
            yield Block(round_up(f32.bytes_of(output_tile(spec).n), ARRAY_ALIGNMENT))
    for given, operand in spec.typed_inputs:
        if given.kind is Kind.TILE and operand.aligned and given.name != c:
            yield _tiles(spec, operand, stages_c)
        elif along_n(spec, given.kind):
            columns = output_tile(spec).n * row_copies(spec)
            yield Block(round_up(operand.dtype.bytes_of(columns), ARRAY_ALIGNMENT))
    plain = plain_epilogue(spec)
    together = {group[0].name: group for group in reduced_together(spec)} if plain else {}
    for output, operand in spec.typed_outputs:
        if output.reduce is None and operand.aligned and not plain:
            yield _tiles(spec, operand, stages_d)
        elif output.name in together and along_n(spec, output.kind):
            size = kept(together[output.name]).size
            yield Block(epilogue_tile(spec)[0] // _WARP_ROWS * output_tile(spec).n * size)


def kept(group: tuple[Output, ...]) -> Block:
    """Return what reductions keep of each result: ``States`` in ``reduce.h`` where there are several."""
    each = [Block(size, size) for size in (REDUCTIONS[str(output.reduce)].kept_bytes for output in group)]
    whole = each.pop()
    while each:
        whole = struct(each.pop(), whole)
    return whole


def _tiles(spec: KernelSpec, operand: Operand, stages: int) -> Block:
    """Return epilogue tiles of one tensor, aligned to the period of their swizzle (``cutlass/detail/layout.hpp``)."""
    epi_m, epi_n = epilogue_tile(spec)
    contiguous = epi_n if oriented(spec, operand).major == "row" else epi_m
    swizzle = _swizzle(operand.dtype.bytes_of(contiguous))
    size = operand.dtype.bytes_of(epi_m * epi_n * stages)
    alignment = max(128, 8 * swizzle)
    return Block(round_up(size, alignment), alignment)


def _swizzle(contiguous_bytes: int) -> int:
    """Return CUTLASS's swizzle width in bytes, 0 for none (``gemm/collective/builders/sm90_common.inl``)."""
    return next((width for width in arch.SWIZZLE_BYTES if contiguous_bytes % width == 0), 0)
