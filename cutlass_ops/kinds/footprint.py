"""What a kernel takes: its shared memory to the byte, and the pipeline stages and epilogue tiles that lie there.

The formulas compute as CUTLASS's headers do and give ``sizeof(GemmKernel::SharedStorage)``;
``tests/compile/test_legality_compile.py`` compares them with the compiler's. They take any declaration whose fields
have a meaning, legal or not.

Sources: the headers of CUTLASS 4.2, named at each formula relative to ``cutlass/``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd

from cutlass_ops.base import arch
from cutlass_ops.base.dtypes import f32
from cutlass_ops.declare.config import GemvConfig, Sm80Config, Sm90Config, ThreadblockShape
from cutlass_ops.declare.orientation import along_n, halved, oriented, reduced_along_m, sides, swapped
from cutlass_ops.declare.spec import KernelSpec, Operand
from cutlass_ops.epilogue.nodes import Input, Kind

# One stage is filled while one is used; no tile is so small that it needs more than the most.
MIN_STAGES, MAX_STAGES = 2, 64


def shared_memory(spec: KernelSpec, stages: int | None = None) -> int:
    """Return the bytes of shared memory that one thread block of the kernel takes.

    Parameters
    ----------
    spec : KernelSpec
        A declaration whose fields have a meaning.
    stages : int, optional
        Stages of the main loop's pipeline, by default the configuration's; if it leaves them open, as many as fit.
    """
    if isinstance(spec.config, GemvConfig):
        return _gemv_shared_memory(spec, spec.config)
    if isinstance(spec.config, Sm90Config):
        return _sm90_shared_memory(spec, spec.config, sm90_stages(spec) if stages is None else stages)
    return _sm80_shared_memory(spec, spec.config, spec.config.stages if stages is None else stages)


def _gemv_shared_memory(spec: KernelSpec, config: GemvConfig) -> int:
    """Return the bytes that warps leave each other in ``gemv.h``.

    That is two sums of each row for its means, and products: of a whole tile, or of a column where pairs are swapped.
    """
    columns = config.threadblock.n if config.by_tile else int(spec.epilogue.swaps_pairs)
    numbers = (2 if spec.epilogue.gathered else 0) + (1 + len(spec.epilogue.products)) * columns
    return config.warps * config.rows * numbers * f32.bytes


# ---- Sm90 ----------------------------------------------------------------------------------------------------------

_MBARRIER_BYTES = 8
_STEP_COLUMNS = 32  # kStepColumns in epilogue.h
_WARP_ROWS = 16  # RowReduction in sm90_reduction.h
_MEANS_ALIGNMENT = 1024  # TileMeans::kAlignment in gather.h
_STAGED_ROWS = 3 * 8 * 32 * 16  # StagedRows in means_beside.h: pieces of 16 bytes, eight of each lane of three warps


def sm90_source(spec: KernelSpec) -> str | None:
    """Return the name of the tile input that TMA loads as the collective epilogue's C, or None if there is none.

    It is the first one aligned to 16 bytes. Further tile inputs are loaded by visitors of their own.
    """
    source = _sm90_source(spec)
    return source and source[0].name


def sm90_plain_epilogue(spec: KernelSpec) -> bool:
    """Whether ``epilogue.h`` stores D: where TMA can, and no tensor has D's size but it and CUTLASS's C."""
    read = [i.name for i in spec.epilogue.inputs if i.kind is Kind.TILE]
    written = [o for o in spec.epilogue.outputs[1:] if o.reduce is None]
    return spec.d.aligned and not written and all(name == sm90_source(spec) for name in read)


def sm90_output_tile(spec: KernelSpec) -> ThreadblockShape:
    """Return the part of D, as the kernel sees it, that one thread block finishes at a time."""
    return halved(spec, _sm90(spec).part)


def sm90_gathers(spec: KernelSpec) -> bool:
    """Whether the main loop gathers values of A's rows: where the epilogue takes any, and nothing else does."""
    return bool(spec.epilogue.gathered) and _sm90(spec).means == "gathered"


def sm90_gathered_tiles(spec: KernelSpec) -> int:
    """Return of how many tiles a thread block keeps the means at the same time: a pingpong kernel has two under way."""
    return 1 if _sm90(spec).schedule == "cooperative" else 2


def sm90_gathered_rows(spec: KernelSpec) -> int:
    """Return how many rows of A a tile has."""
    return sides(spec)[1 if swapped(spec) else 0].extent


def _stages_rows(spec: KernelSpec) -> bool:
    """Whether idle warps read A's rows by way of shared memory: those of persistent kernels have too few registers."""
    config = _sm90(spec)
    beside = bool(spec.epilogue.gathered) and config.means == "beside"
    return beside and config.schedule != "warp_specialized" and (config.realign or spec.a.aligned)


def sm90_means_smem(spec: KernelSpec) -> int:
    """Return the bytes of static shared memory that means of A's rows take.

    Those gathered in the main loop lie there (``TileMeans`` in ``gather.h``), and rows on their way to idle warps
    beside it (``StagedRows`` in ``means_beside.h``).
    """
    if _stages_rows(spec):
        return _STAGED_ROWS
    if not sm90_gathers(spec):
        return 0
    count = sm90_gathered_tiles(spec) * len(spec.epilogue.gathered) * sm90_gathered_rows(spec)
    return _round_up(count * f32.bytes, _MEANS_ALIGNMENT)


def sm90_epilogue_tile(spec: KernelSpec) -> tuple[int, int]:
    """Return the (M, N) part of the CTA tile that one step of the epilogue handles, in elements.

    ``sm90_compute_tile_shape_or_override`` in ``epilogue/collective/builders/sm90_builder.inl``, for 16 and 32 bits.
    """
    config = _sm90(spec)
    tile = sm90_output_tile(spec)
    if config.side_by_side:
        return 64, gcd(_STEP_COLUMNS, tile.n // 2)
    rows = 128 if config.schedule == "cooperative" else 64
    return min(rows, tile.m), gcd(min(32, tile.n), tile.n)


def sm90_epilogue_stages(spec: KernelSpec) -> tuple[int, int]:
    """Return how many epilogue tiles of C and of D shared memory holds.

    ``sm90_get_tma_dispatch_policy`` in ``epilogue/collective/builders/sm90_builder.inl``, except D's where
    ``epilogue.h`` stores it.
    """
    tile, (epi_m, epi_n) = sm90_output_tile(spec), sm90_epilogue_tile(spec)
    steps = -(-tile.m // epi_m) * -(-tile.n // epi_n)
    stages_d = min(steps, 2)
    if sm90_plain_epilogue(spec) and sm90_source(spec) is None:
        # epilogue.h: two steps of 32 columns, or of all where a tile has fewer.
        across = 2 if _sm90(spec).side_by_side else 1
        stages_d = 2 * across * min(_STEP_COLUMNS // epi_n, tile.n // across // epi_n)
    stages_c = max(min(steps, 4), stages_d + 1) if _sm90_same_width(spec) else min(steps, 4)
    return stages_c, stages_d


def sm90_epilogue_smem(spec: KernelSpec) -> int:
    """Return the bytes of shared memory that the epilogue takes: tiles of C and D, and what its visitors keep."""
    return _sm90_epilogue(spec).size


def sm90_stages(spec: KernelSpec) -> int:
    """Return the stages of the main loop's pipeline that the kernel really has.

    The configuration's own number, or else the largest with which the kernel fits into the target's shared memory. It
    is less than two if not even that fits.
    """
    config = _sm90(spec)
    if config.stages is not None:
        return config.stages
    limit = arch.target(spec.target).shared_memory
    stage = (config.threadblock.m + config.threadblock.n) * config.threadblock.k * spec.a.dtype.bytes
    most = min(MAX_STAGES, limit // stage)
    return next((s for s in range(most, 0, -1) if _sm90_shared_memory(spec, config, s) <= limit), 0)


def sm90_mainloop_smem(spec: KernelSpec, stages: int) -> int:
    """Return the bytes of shared memory that the operands' tiles of some stages take."""
    return _sm90_mainloop(spec, _sm90(spec), stages).size


def split_exchange(config: Sm90Config) -> int:
    """Return the bytes that a block sends to those that split K with it and gets from them: FP32 accumulators."""
    part = config.part
    return 2 * (config.split_k - 1) * part.m * part.n * f32.bytes


def _sm90(spec: KernelSpec) -> Sm90Config:
    if not isinstance(spec.config, Sm90Config):
        raise TypeError("an Sm90Config is needed")
    return spec.config


def _sm90_source(spec: KernelSpec) -> tuple[Input, Operand] | None:
    return next(((i, operand) for i, operand in spec.typed_inputs if i.kind is Kind.TILE and operand.aligned), None)


def _sm90_same_width(spec: KernelSpec) -> bool:
    """Whether C has D's width, so that D may take C's place in shared memory."""
    source = _sm90_source(spec)
    return source is not None and source[1].dtype.bits == spec.d.dtype.bits


def _sm90_shared_memory(spec: KernelSpec, config: Sm90Config, stages: int) -> int:
    return sm90_means_smem(spec) + _sm90_shared_storage(spec, config, stages)


def _sm90_shared_storage(spec: KernelSpec, config: Sm90Config, stages: int) -> int:
    """``GemmKernel::SharedStorage`` in ``gemm/kernel/sm90_gemm_tma_warpspecialized*.hpp``."""
    mainloop = _sm90_mainloop(spec, config, stages)
    epilogue = _sm90_epilogue(spec)
    full_and_empty = 2 * _MBARRIER_BYTES
    barriers = [_Block(stages * full_and_empty), _Block(sm90_epilogue_stages(spec)[0] * full_and_empty)]
    if config.split_k > 1:  # templates/include/cutlass_ops/split_k.h
        each = _Block(stages * _MBARRIER_BYTES)
        split = _struct(each, each, barriers[1], _Block(_MBARRIER_BYTES), alignment=16)
        return _struct(split, _struct(epilogue, mainloop, alignment=128)).size
    if config.schedule == "warp_specialized":  # not persistent: the epilogue begins when the main loop has ended
        return _struct(_union(mainloop, epilogue), _struct(*barriers, alignment=16)).size
    if config.schedule == "pingpong":
        barriers.append(_Block(2 * full_and_empty))  # which warpgroup's turn it is, in main loop and epilogue
    barriers.append(_Block(full_and_empty))  # which producer's turn it is
    tensors = _struct(epilogue, mainloop, alignment=128)
    return _struct(_struct(*barriers, alignment=16), _Block(1), tensors).size


def _sm90_mainloop(spec: KernelSpec, config: Sm90Config, stages: int) -> _Block:
    tile = config.threadblock
    row_bytes = tile.k * stages * spec.a.dtype.bytes
    return _struct(_Block(tile.m * row_bytes), _Block(tile.n * row_bytes), alignment=128)


def _sm90_epilogue(spec: KernelSpec) -> _Block:
    """``TensorStorage`` in ``epilogue/collective/sm90_epilogue_tma_warpspecialized.hpp``."""
    stages_c, stages_d = sm90_epilogue_stages(spec)
    source = _sm90_source(spec)
    # Room for D is there even if visitors store D past shared memory, but then it cannot take C's place.
    d = _sm90_tiles(spec, spec.d, stages_d)
    if source is None:
        collective = d
    elif _sm90_same_width(spec) and spec.d.aligned:
        collective = _union(_sm90_tiles(spec, source[1], stages_c), _sm90_tiles(spec, spec.d, stages_c))
    else:
        collective = _struct(_sm90_tiles(spec, source[1], stages_c), d)
    visitors = list(_sm90_visitors(spec))
    return _struct(collective, _struct(*visitors) if visitors else _Block(1, 1))


def _sm90_visitors(spec: KernelSpec) -> Iterator[_Block]:
    """``SharedStorage`` of the visitors that have any.

    Those of ``epilogue/fusion/sm90_visitor_{load,store}_*.hpp``, ``epilogue.h`` and ``sm90_reduction.h``.
    """
    stages_c, stages_d = sm90_epilogue_stages(spec)
    source = sm90_source(spec)
    if _sm90(spec).means != "gathered" and along_n(spec, Kind.COL):
        for _ in spec.epilogue.gathered:
            yield _Block(_round_up(sm90_output_tile(spec).n * f32.bytes, _ARRAY_ALIGNMENT))
    for given, operand in spec.typed_inputs:
        if given.kind is Kind.TILE and operand.aligned and given.name != source:
            yield _sm90_tiles(spec, operand, stages_c)
        elif along_n(spec, given.kind):
            yield _Block(_round_up(sm90_output_tile(spec).n * operand.dtype.bytes, _ARRAY_ALIGNMENT))
    for output, operand in spec.typed_outputs:
        if output.reduce is None and operand.aligned:
            yield _sm90_tiles(spec, operand, stages_d)
        elif output.reduce is not None and along_n(spec, output.kind) and sm90_plain_epilogue(spec):
            yield _Block(sm90_epilogue_tile(spec)[0] // _WARP_ROWS * sm90_output_tile(spec).n * f32.bytes)


def _sm90_tiles(spec: KernelSpec, operand: Operand, stages: int) -> _Block:
    """Epilogue tiles of one tensor, aligned to the period of their swizzle (``cutlass/detail/layout.hpp``)."""
    epi_m, epi_n = sm90_epilogue_tile(spec)
    contiguous = epi_n if oriented(spec, operand).major == "row" else epi_m
    swizzle = _sm90_swizzle(contiguous * operand.dtype.bytes)
    size = epi_m * epi_n * stages * operand.dtype.bytes
    alignment = max(128, 8 * swizzle)
    return _Block(_round_up(size, alignment), alignment)


def _sm90_swizzle(contiguous_bytes: int) -> int:
    """Width in bytes of the swizzle that CUTLASS picks, 0 for none (``gemm/collective/builders/sm90_common.inl``)."""
    return next((width for width in arch.SWIZZLE_BYTES if contiguous_bytes % width == 0), 0)


# ---- Sm80 ----------------------------------------------------------------------------------------------------------


def _sm80_shared_memory(spec: KernelSpec, config: Sm80Config, stages: int) -> int:
    """``SharedStorage`` in ``gemm/kernel/gemm_universal.h``: main loop and epilogue use the same memory in turn."""
    tile = config.threadblock
    row_bytes = tile.k * stages * spec.a.dtype.bytes
    mainloop = _struct(_Block(tile.m * row_bytes), _Block(tile.n * row_bytes))
    return _union(mainloop, _sm80_epilogue(spec, config)).size


def _sm80_epilogue(spec: KernelSpec, config: Sm80Config) -> _Block:
    """``EpilogueWithVisitorCallbacks::SharedStorage``: eight rows of accumulators a warp, and the visitors' own."""
    tile, warp = config.threadblock, config.warp
    # CUTLASS exchanges twice as many rows at once where D's accesses are 16 bytes (default_epilogue_tensor_op.h).
    fragments = 2 if spec.d.aligned else 1
    padding = 8
    rows = tile.m // warp.m * 8 * fragments
    accumulators = _Block(rows * (tile.n + padding) * f32.bytes)
    reductions = [_Block(config.warps * tile.n * f32.bytes, f32.bytes) for _ in reduced_along_m(spec)]
    return _struct(accumulators, _struct(*reductions) if reductions else _Block(1, 1))


# ---- How C++ lays objects out --------------------------------------------------------------------------------------

# CUTLASS's default alignment of an array in shared memory (cutlass/array.h, cute/container/array_aligned.hpp).
_ARRAY_ALIGNMENT = 16


@dataclass(frozen=True)
class _Block:
    """Size and alignment of a C++ object in bytes."""

    size: int
    alignment: int = _ARRAY_ALIGNMENT


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _struct(*members: _Block, alignment: int = 1) -> _Block:
    """Lay members out one after the other as C++ does; ``alignment`` is the least that the struct itself has."""
    offset = 0
    for member in members:
        offset = _round_up(offset, member.alignment) + member.size
        alignment = max(alignment, member.alignment)
    return _Block(_round_up(offset, alignment), alignment)


def _union(*members: _Block) -> _Block:
    alignment = max(m.alignment for m in members)
    return _Block(_round_up(max(m.size for m in members), alignment), alignment)
