"""Legality rules for Sm80: ``mma.sync``, ``cp.async``, and how CUTLASS 2.x's warps share loads and stores.

Sources: the headers of CUTLASS 4.2, named relative to ``cutlass/``; PTX ISA, ``mma.sync`` and ``cp.async``.
"""

from __future__ import annotations

from collections.abc import Iterator

from cutlass_ops.base import arch
from cutlass_ops.base.arch import MMA_SYNC
from cutlass_ops.base.dtypes import f32, f64, i32
from cutlass_ops.base.mma import mma_of, sums_of, unit_of
from cutlass_ops.declare.config import InstructionShape
from cutlass_ops.declare.form import BATCHED
from cutlass_ops.declare.orientation import sides, swapped
from cutlass_ops.declare.spec import KernelSpec, Operand
from cutlass_ops.epilogue import doubles
from cutlass_ops.kinds.kind import Broken, Rule
from cutlass_ops.kinds.serving import by_several_fours, takes_means, whole_lines
from cutlass_ops.kinds.sm80.config import Sm80Config
from cutlass_ops.kinds.sm80.types import multiplied

# Of a thread's registers, accumulators may use this part where instructions of more than four products take FP64.
_SHARE_OF_SEVERAL_FOURS = 4
_MAX_PREDICATES = 64  # transform/threadblock/predicated_tile_access_iterator.h: 4 words of 16
_EPILOGUE_ROWS = 8
# gemm/warp/mma_tensor_op_tile_iterator.h: lines of 16, 32 and 64 elements of 16 bits, and of 32 elements of 32 bits;
# mma_tensor_op_tile_iterator_sm80.h: parts of 16 elements of 64 bits.
_SHORTEST_LINE = {16: 16, 32: 32, 64: 16}
_LANES_BY_ELEMENT = 16  # along a line, where a warp copies one element a lane


def _shapes(spec: KernelSpec) -> tuple[tuple[int, int, int], ...]:
    unit = unit_of(spec.a.dtype, spec.b.dtype, MMA_SYNC)
    return () if unit is None else unit.shapes_on(arch.target(spec.target).capability)


def _instruction(spec: KernelSpec, config: Sm80Config) -> Iterator[Broken]:
    # Other dtypes have no shapes; the rule operand_dtypes reports them.
    shapes = [InstructionShape(*shape) for shape in _shapes(spec)]
    if shapes and config.instruction not in shapes:
        yield Broken(
            f"instruction is {config.instruction}, and mma.sync for {spec.a.dtype} operands on {spec.target} has "
            f"{', '.join(map(str, shapes))}",
            tuple({"instruction": shape} for shape in shapes),
        )


def _batched(spec: KernelSpec, config: Sm80Config) -> Iterator[Broken]:
    if spec.form == BATCHED and config.stream_k:
        yield Broken("form is batched and stream_k is True, and blocks split the K of one GEMM", ({"stream_k": False},))


def _warp_tile(spec: KernelSpec, config: Sm80Config) -> Iterator[str]:
    part = multiplied(spec.a.dtype).part
    for side in ("m", "n", "k"):
        block, warp, instruction = (getattr(s, side) for s in (config.threadblock, config.warp, config.instruction))
        if block % warp:
            yield f"warp.{side} is {warp}, which does not divide threadblock.{side} {block}: use a divisor"
        if warp % instruction:
            yield f"warp.{side} is {warp}: use a multiple of instruction.{side} {instruction}"
        elif side != "k" and warp % part:
            yield f"warp.{side} is {warp}, and warps read {spec.a.dtype} in parts of {part}: use a multiple of that"


def _sliced_k(_: KernelSpec, config: Sm80Config) -> Iterator[Broken]:
    if config.warp.k != config.threadblock.k:
        yield Broken(
            f"warp.k is {config.warp.k} and threadblock.k is {config.threadblock.k}, and dividing K between warps is "
            f"not supported",
            ({"warp.k": config.threadblock.k}, {"threadblock.k": config.warp.k}),
        )


def _k_steps(spec: KernelSpec, config: Sm80Config) -> Iterator[Broken]:
    steps = config.warp.k // config.instruction.k
    if config.warp.k % config.instruction.k == 0 and steps % 2:
        shapes = _shapes(spec)
        yield Broken(
            f"warp.k is {config.warp.k}, {steps} steps of instruction.k {config.instruction.k}, and CUTLASS's main "
            f"loop takes two at a time",
            tuple({"instruction": InstructionShape(*shape)} for shape in shapes),
            f"use a multiple of {2 * config.instruction.k}",
        )


def _warps(spec: KernelSpec, config: Sm80Config) -> Iterator[str]:
    least, most = multiplied(spec.a.dtype).warps
    if not least <= config.warps <= most:
        yield (
            f"threadblock {config.threadblock} in warp tiles {config.warp} is {config.warps} warps: use {least} to "
            f"{most}"
        )


def _warp_accumulators(spec: KernelSpec, config: Sm80Config) -> Iterator[str]:
    warp, threads = config.warp, max(config.warps, 1) * arch.WARP
    registers = min(arch.MAX_REGISTERS_PER_THREAD + 1, arch.REGISTERS_PER_SM // threads)
    mma = mma_of(spec.a.dtype, spec.b.dtype)
    each = 1 if mma is None else mma.accumulator.bits // f32.bits
    share = multiplied(spec.a.dtype).register_share
    if mma is not None and by_several_fours(mma, config.instruction.k):
        share = _SHARE_OF_SEVERAL_FOURS
    used, limit = warp.m * warp.n * each // arch.WARP, registers // share
    if used > limit:
        # If the thread block needs all registers of an SM, smaller warp tiles do not help: more warps share them.
        tile = config.threadblock
        too_large = tile.m * tile.n * each > arch.REGISTERS_PER_SM // share
        yield (
            f"warp {warp} takes {used} accumulator registers a thread, and more than {limit} of the {registers} that "
            f"{threads} threads can each have spill: use a smaller {'threadblock' if too_large else 'warp tile'}"
        )


def _load_map(spec: KernelSpec, config: Sm80Config) -> Iterator[str]:
    k, by_element = config.threadblock.k, multiplied(spec.a.dtype).by_element
    for operand in sides(spec):
        contiguous, strided = (k, operand.extent) if operand.k_major else (operand.extent, k)
        # Other elements are always written to shared memory 16 bytes at a time.
        access = 1 if by_element else spec.a.dtype.tma_alignment
        lanes = contiguous // access if operand.k_major else min(contiguous // access, 8)
        if by_element:
            lanes = _LANES_BY_ELEMENT
        if not _covers(contiguous, strided, config.warps, lanes, access):
            yield (
                f"{config.warps} warps cannot share the loads of {operand.name}'s tile, {strided} lines of "
                f"{contiguous} adjacent elements, evenly: use powers of two for threadblock.{operand.side} and "
                f"threadblock.k, or fewer warps"
            )


def _covers(contiguous: int, strided: int, warps: int, lanes: int, access: int) -> bool:
    """Return whether the warps' accesses, of so many lanes along a line and elements each, cover a tile exactly.

    ``DefaultMmaCore`` in ``gemm/threadblock/default_mma_core_sm80.h`` arranges a warp's lanes.
    ``PitchLinearWarpRakedThreadMap`` in ``transform/pitch_linear_thread_map.h`` arranges the warps, and silently rounds
    down.
    """
    accesses = contiguous // access
    if contiguous % access or warps < 1 or lanes < 1 or arch.WARP % lanes or accesses % lanes:
        return False
    lines = arch.WARP // lanes
    if strided % lines:
        return False
    across, along = accesses // lanes, strided // lines
    warps_along = min(along, warps)
    warps_across = warps // warps_along
    return (
        warps_along * warps_across == warps
        and along % warps_along == 0
        and across >= warps_across
        and across % warps_across == 0
    )


def _load_predicates(spec: KernelSpec, config: Sm80Config) -> Iterator[str]:
    threads, by_element = max(config.warps, 1) * arch.WARP, multiplied(spec.a.dtype).by_element
    for operand in sides(spec):
        alignment = 1 if by_element else (spec.a if operand.name == "a" else spec.b).alignment
        accesses = operand.extent * config.threadblock.k // alignment // threads
        if accesses > _MAX_PREDICATES:
            yield (
                f"each of {threads} threads makes {accesses} accesses to {operand.name}'s tile, and CUTLASS has "
                f"predicates for {_MAX_PREDICATES}: use a smaller tile, more warps, or a wider alignment"
            )


def _k_extent(spec: KernelSpec, config: Sm80Config) -> Iterator[str]:
    only = multiplied(spec.a.dtype).tiles_k
    if only:
        if config.threadblock.k not in only:
            yield f"threadblock.k is {config.threadblock.k}, and a is {spec.a}: use {' or '.join(map(str, only))}"
        return
    limit = spec.a.dtype.count_in(128)
    for operand in sides(spec):
        if operand.k_major and config.threadblock.k > limit:
            yield (
                f"threadblock.k is {config.threadblock.k} and {operand.name} has K adjacent in memory: CUTLASS's "
                f"layout of shared memory has lines of at most 128 bytes, {limit} elements; use that or less"
            )


def _short_lines(spec: KernelSpec, config: Sm80Config) -> Iterator[str]:
    shortest = _SHORTEST_LINE.get(spec.a.dtype.bits, 0)
    for operand in sides(spec):
        if not operand.k_major and operand.extent < shortest:
            yield (
                f"threadblock.{operand.side} is {operand.extent}, along which {operand.name}'s lines lie in memory: "
                f"CUTLASS's layouts of shared memory have lines of {shortest} elements or more; use that, or "
                f"lines along K"
            )


def _cp_async(spec: KernelSpec, config: Sm80Config) -> Iterator[Broken]:
    for name, operand in (("a", spec.a), ("b", spec.b)):
        if config.stages > 2 and operand.dtype.bytes_of(operand.alignment) < min(arch.CP_ASYNC_BYTES):
            yield Broken(
                f"{name} is {operand} and stages is {config.stages}, and cp.async copies at least "
                f"{min(arch.CP_ASYNC_BYTES)} bytes, while two stages are loaded through registers",
                ({"stages": 2},),
                f"pad {name}",
            )


def _two_stages(spec: KernelSpec, config: Sm80Config) -> Iterator[Broken]:
    why = multiplied(spec.a.dtype).no_two_stages
    if why and config.stages == 2:
        yield Broken(f"stages is 2 and a is {spec.a}, {why}", ({"stages": 3},))


def _whole_sums(spec: KernelSpec, config: Sm80Config) -> Iterator[Broken]:
    if sums_of(spec.a.dtype, spec.b.dtype) is i32 and config.stream_k:
        yield Broken(
            f"a is {spec.a} and stream_k is True, and stream-K is not tested for integer sums",
            ({"stream_k": False},),
        )


def _stream_k_registers(spec: KernelSpec, config: Sm80Config) -> Iterator[Broken]:
    spills = multiplied(spec.a.dtype).spills_with_stream_k
    if spills is not None and config.stream_k and config.instruction.k >= spills:
        yield Broken(
            f"a is {spec.a}, instruction is {config.instruction} and stream_k is True: its operands and what stream-K "
            f"keeps of a block's share take more registers than a thread has",
            ({"stream_k": False},),
        )


def _whole_lines(spec: KernelSpec, _: Sm80Config) -> Iterator[Broken]:
    if multiplied(spec.a.dtype).whole_lines and not whole_lines(spec):
        yield Broken(
            f"a is {spec.a} and b is {spec.b}, and loads of {spec.a.dtype} narrower than 16 bytes are not tested",
            advice=lambda others: ", or use ".join(["pad K with zeros to a multiple of 16", *others]),
        )


def _doubles(spec: KernelSpec, _: Sm80Config) -> Iterator[str]:
    why = doubles.why_not(spec.epilogue) if spec.a.dtype is f64 else None
    if why is not None:
        yield f"a is {spec.a}, so the epilogue computes in FP64, and {why}"


def _means(spec: KernelSpec, _: Sm80Config) -> Iterator[str]:
    mma = mma_of(spec.a.dtype, spec.b.dtype)
    if spec.epilogue.gathered and mma is not None and not takes_means(mma):
        yield (
            f"the epilogue takes {', '.join(spec.epilogue.gathered)}, and a is {spec.a}: means of A's rows need "
            "16-bit operands; use a Col for them"
        )


def _store_map(spec: KernelSpec, config: Sm80Config) -> Iterator[str]:
    warps_n = config.threadblock.n // config.warp.n
    if not _stores_exactly(config.threadblock.n, warps_n, spec.d):
        yield (
            f"{warps_n} warps side by side cannot share the stores of rows of {config.threadblock.n} elements of d, "
            f"{spec.d}, evenly: use a power of two for threadblock.n, or fewer warps along N"
        )


def _stores_exactly(n: int, warps_n: int, d: Operand) -> bool:
    """Return whether the warps' accesses cover the eight rows that the epilogue writes in one step.

    ``RowArrangement`` in ``epilogue/threadblock/output_tile_thread_map.h``; ``templates/include/cutlass_ops/
    sm80_visitors.h`` asserts what this returns.
    """
    if not 1 <= warps_n < _EPILOGUE_ROWS or n % d.alignment:
        return False
    vectors, rows = n // d.alignment, _EPILOGUE_ROWS // warps_n
    lanes = 256 // d.dtype.bytes_of(d.alignment)  # what covers 256 bytes, CUTLASS's preferred width
    if arch.WARP // lanes > rows:
        width, height = arch.WARP // rows, rows
    else:
        width = min(vectors, lanes, arch.WARP)
        height = min(_EPILOGUE_ROWS, arch.WARP // width)
    return (
        width * height == arch.WARP and vectors % width == 0 and height * (rows // height) * warps_n == _EPILOGUE_ROWS
    )


def _second_weight(spec: KernelSpec, _: Sm80Config) -> Iterator[Broken]:
    for name in spec.epilogue.products:
        yield Broken(
            f"input {name} is a second weight, and kernels of Sm80 have one",
            advice=lambda others: f"use {', or '.join([*others, 'two GEMMs'])}",
        )


def _swap_pairs(spec: KernelSpec, _: Sm80Config) -> Iterator[str | Broken]:
    if not spec.epilogue.swaps_pairs:
        return
    if swapped(spec):
        yield Broken(
            f"the epilogue swaps pairs of columns, and d is {spec.d}, so that a thread of CUTLASS's epilogue has "
            "columns that are not neighbours",
            advice=lambda others: f"use {', or '.join([f'{spec.d.dtype}.row', *others])}",
        )
    elif spec.d.alignment < 2:
        yield (
            f"the epilogue swaps pairs of columns, and d is {spec.d}: a thread then has one column at a time; use an "
            f"even N and an even leading dimension"
        )


SM80: tuple[Rule[Sm80Config], ...] = (
    Rule("instruction", "hardware", _instruction),
    Rule("batched_stream_k", "policy", _batched),
    Rule("warp_tile", "compiler", _warp_tile),
    Rule("sliced_k", "policy", _sliced_k),
    Rule("k_steps", "compiler", _k_steps),
    Rule("warps", "hardware", _warps),
    Rule("warp_accumulators", "policy", _warp_accumulators),
    Rule("k_extent", "compiler", _k_extent),
    Rule("short_lines", "compiler", _short_lines),
    Rule("load_map", "policy", _load_map),
    Rule("load_predicates", "compiler", _load_predicates),
    Rule("store_map", "compiler", _store_map),
    Rule("cp_async", "hardware", _cp_async),
    Rule("two_stages", "compiler", _two_stages),
    Rule("whole_sums", "policy", _whole_sums),
    Rule("stream_k_registers", "policy", _stream_k_registers),
    Rule("whole_lines", "policy", _whole_lines),
    Rule("fp64_epilogue", "policy", _doubles),
    Rule("means_of_rows", "policy", _means),
    Rule("second_weight", "policy", _second_weight),
    Rule("swap_pairs", "policy", _swap_pairs),
)
