"""Legality rules for Sm90: TMA, ``wgmma``, clusters, and CUTLASS 3.x's kernels and epilogue.

Sources: the headers of CUTLASS 4.2, named relative to ``cutlass/``; PTX ISA, ``wgmma.mma_async`` and
``cp.async.bulk.tensor``.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from cutlass_ops.base import arch
from cutlass_ops.base.arch import WGMMA
from cutlass_ops.base.dtypes import f32, i32
from cutlass_ops.base.mma import BLOCK_K, mma_of, sums_of, unit_of
from cutlass_ops.declare.config import ClusterShape
from cutlass_ops.declare.form import BATCHED, GROUPED, RAGGED_K
from cutlass_ops.declare.orientation import oriented, reduced_along_m, sides, swapped
from cutlass_ops.declare.spec import KernelSpec, copied, loaded
from cutlass_ops.epilogue.nodes import Kind
from cutlass_ops.kinds.kind import Broken, Rule
from cutlass_ops.kinds.serving import (
    beside_each_other,
    d_alone,
    paired,
    plain_epilogue,
    source_name,
    takes_means,
    whole_lines,
)
from cutlass_ops.kinds.sm90.config import Sm90Config
from cutlass_ops.kinds.sm90.footprint import (
    block_memory,
    epilogue_tile,
    gathered_rows,
    gathers,
    mainloop_smem,
    output_tile,
    pieces_in_turn,
    pipeline_stages,
    shared_by_two,
    shared_memory,
    split_exchange,
    warpgroup_columns,
)
from cutlass_ops.kinds.sm90.own import OWN

# Maximum accumulator registers of a thread. With pingpong and cooperative, consumer threads get 240 registers
# (MmaRegisterRequirement in gemm/kernel/sm90_gemm_tma_warpspecialized_{pingpong,cooperative}.hpp). With
# warp_specialized, they get up to 255. Sixteen more accumulators spill: 700 bytes per thread at 224 for the first two
# (nvcc 13.0, bf16, bias + ReLU).
_MAX_ACCUMULATORS = {"pingpong": 208, "cooperative": 208, "warp_specialized": 224}
# Of two blocks on a multiprocessor, each of 256 threads, a thread has 128 registers.
_MAX_ACCUMULATORS_OF_TWO = 64
_MAX_SIDE = 256  # elements along a side of a TMA box (cuTensorMapEncodeTiled)
_GATHERED_COLUMNS = 64  # columns of A that eight lanes read at a time (gather.h)
_GATHERED_ROWS = 64  # more rows take longer to read than to multiply (docs/rmsnorm.md)
_TMA_SMEM_ALIGNMENT = 128  # PTX ISA, cp.async.bulk.tensor: alignment of the address in shared memory


# Changes to a persistent schedule, whose thread blocks run several tiles each.
_PERSISTENT = ({"schedule": "pingpong"}, {"schedule": "cooperative"})
_WHOLE_K = {"split_k": 1, "scheduler": "persistent"}
# Further changes with which promoted sums may be legal.
_WHOLE_STEPS: tuple[dict[str, object], ...] = (
    {"threadblock.k": BLOCK_K},
    {"threadblock.k": BLOCK_K, "split_k": 1},
    {"threadblock.k": BLOCK_K, "schedule": "cooperative"},
)


def _tma_alignment(spec: KernelSpec, config: Sm90Config) -> Iterator[Broken]:
    for name, operand in (("a", spec.a), ("b", spec.b)):
        if not operand.aligned and not config.realign:
            yield Broken(
                f"{name} is {operand}, and the bulk tensor copy engine needs {arch.TMA_ALIGNMENT_BYTES} bytes, "
                f"{operand.dtype.tma_alignment} elements",
                ({"realign": True},),
                lambda others, name=name: ", use ".join([f"pad {name}'s leading dimension", *others]),  # type: ignore[misc]
            )


def _realign(spec: KernelSpec, config: Sm90Config) -> Iterator[Broken]:
    unit = unit_of(spec.a.dtype, spec.b.dtype, WGMMA)
    if config.realign and unit is not None and not unit.copyable:
        yield Broken(
            f"realign is True, and a is {spec.a} and b is {spec.b}: operands of these types are not copied",
            ({"realign": False},),
            "pad K to a multiple of 16 bytes, and use lines along K",
        )
    if config.realign and not any(copied(spec.a, spec.b)):
        yield Broken(
            f"realign is True, but neither a, {spec.a}, nor b, {spec.b}, has to be copied",
            ({"realign": False},),
        )


def _tile_m(_: KernelSpec, config: Sm90Config) -> Iterator[Broken]:
    m, step = config.threadblock.m, WGMMA.m
    if m % step or (config.schedule == "cooperative" and m == step):
        least = f", from {2 * step}" if config.schedule == "cooperative" else ""
        yield Broken(
            f"threadblock.m is {m}, and with schedule {config.schedule!r} a tile's warpgroups cover rows in steps of "
            f"{step}{least}",
            ({"schedule": "pingpong"}, {"schedule": "warp_specialized"}),
            "use a multiple of that",
        )


def _side_by_side(spec: KernelSpec, config: Sm90Config) -> Iterator[str | Broken]:
    if not config.side_by_side:
        return
    where = f"threadblock.m is {config.threadblock.m} with schedule 'cooperative', whose warpgroups then share columns"
    step = 2 * WGMMA.n_step
    if config.threadblock.n % step:
        yield f"{where}: use a multiple of {step} for threadblock.n"
    operand, half = sides(spec)[1], config.threadblock.n // 2
    # An N-major tile is stored in column blocks as wide as the widest swizzle that divides it. Half of the tile must be
    # whole blocks or part of a single one.
    width = gcd(config.threadblock.n, operand.dtype.count_in(arch.SWIZZLE_BYTES[0]))
    if not operand.k_major and half % width and width % half:
        yield (
            f"{where}, and half of {config.threadblock.n} columns ends inside one of the blocks of {width} columns in "
            f"which {operand.name} is stored: use 64 or a multiple of 128 for threadblock.n"
        )
    if not config.whole_k:
        yield Broken(f"{where}, and one thread block must then sum a tile's whole K", (_WHOLE_K, *_OTHER_ROWS))
    if not plain_epilogue(spec) or source_name(spec) is not None:
        yield Broken(
            f"{where}, and the epilogue may then read no tile, and store no tile besides an aligned D",
            _OTHER_ROWS,
        )


# Changes after which warpgroups do not share a tile's columns.
_OTHER_ROWS = ({"schedule": "pingpong"}, {"threadblock.m": 128}, {"threadblock.m": 256})


def _tile_n(spec: KernelSpec, config: Sm90Config) -> Iterator[str]:
    n = config.threadblock.n
    mma, each = mma_of(spec.a.dtype, spec.b.dtype), n // 2 if config.side_by_side else n
    if mma is not None and not mma.takes_n(each):
        yield (
            f"threadblock.n is {n}, of which a warpgroup has {each}, and wgmma of {spec.a.dtype} has N of 8, 24 and "
            "multiples of 16; use one of these"
        )
    if n % WGMMA.n_step or n > WGMMA.n_max:
        yield (
            f"threadblock.n is {n}: wgmma has N from {WGMMA.n_step} to {WGMMA.n_max} in steps of "
            f"{WGMMA.n_step}; use one of these"
        )


def _tile_k(spec: KernelSpec, config: Sm90Config) -> Iterator[str]:
    step = spec.a.dtype.count_in(WGMMA.k_bytes)
    if config.threadblock.k % step:
        yield f"threadblock.k is {config.threadblock.k}: wgmma takes {step} elements along K; use a multiple of that"


def _tile_size(_: KernelSpec, config: Sm90Config) -> Iterator[str]:
    for side in ("m", "k"):
        extent = getattr(config.threadblock, side)
        if extent > _MAX_SIDE:
            yield (
                f"threadblock.{side} is {extent}: a box of the bulk tensor copy engine has at most {_MAX_SIDE} "
                f"elements a side, and tiles of several boxes are not tested; use {_MAX_SIDE} or less"
            )


def _epilogue_step(spec: KernelSpec, config: Sm90Config) -> Iterator[Broken]:
    epi_n, columns = epilogue_tile(spec)[1], output_tile(spec).n
    if epi_n % WGMMA.n_step == 0 and epi_n & (epi_n - 1):
        each = max(1, config.threadblock.n // columns)
        yield Broken(
            f"threadblock is {config.threadblock}, and a block's part of D has {columns} columns: CUTLASS's epilogue "
            f"would advance by {epi_n} of them at a time, which is not tested",
            tuple({"threadblock.n": each * n} for n in (16, 32)),
        )


def _stored_lines(spec: KernelSpec, config: Sm90Config) -> Iterator[Broken]:
    columns = epilogue_tile(spec)[1]
    tiles = [("d", spec.d)]
    if not plain_epilogue(spec):  # else threads store the others
        tiles += [(f"output {o.name}", t) for o, t in spec.typed_outputs if o.reduce is None]
    for name, operand in tiles:
        least = operand.dtype.count_in(arch.UNSWIZZLED_BYTES)
        if least <= WGMMA.n_step:
            continue  # a multiple of that is enough
        by_lines = oriented(spec, operand).major == "row" and (
            operand.aligned or name == "d"
        )  # d's memory is always there
        if by_lines and columns % least:
            each = max(1, config.threadblock.n // output_tile(spec).n)
            yield Broken(
                f"threadblock is {config.threadblock}, and the epilogue stores {columns} columns of it at a time: "
                f"lines of {name}, {operand}, take {arch.UNSWIZZLED_BYTES} bytes or more in shared memory",
                tuple({"threadblock.n": each * least * more} for more in (1, 2)),
                f"use a multiple of {each * least} for threadblock.n",
            )


def _accumulators(_: KernelSpec, config: Sm90Config) -> Iterator[Broken]:
    tile, limit = config.threadblock, _MAX_ACCUMULATORS[config.schedule]
    threads = arch.WARPGROUP * (2 if config.schedule == "cooperative" else 1)
    registers = tile.m * tile.n // threads
    if config.accumulation == "promoted":
        in_turn = config.schedule == "cooperative" and 2 * registers > limit
        registers += registers // pieces_in_turn(config) if in_turn else registers
    if registers > limit:
        yield Broken(
            f"threadblock {tile} with schedule {config.schedule!r} and accumulation {config.accumulation!r} takes "
            f"{registers} accumulator registers a thread, and more than {limit} spill",
            ({"schedule": "cooperative"}, {"schedule": "warp_specialized"}),
            "use a smaller tile",
        )


def _accumulation(spec: KernelSpec, config: Sm90Config) -> Iterator[Broken]:
    if config.accumulation == "fast":
        if spec.a.promoted:
            yield Broken(
                f"accumulation is 'fast', and a is {spec.a}, which needs promoted sums",
                tuple({"accumulation": "promoted", **more} for more in ({}, *_WHOLE_STEPS)),
                "use a smaller threadblock",
            )
        if spec.epilogue.block_scales:
            yield Broken(
                f"accumulation is 'fast', and {' and '.join(spec.epilogue.block_scales)} are scales of blocks, which "
                "need promoted sums",
                tuple({"accumulation": "promoted", **more} for more in ({}, *_WHOLE_STEPS)),
                "use a smaller threadblock",
            )
        return
    what, fast = f"accumulation is {config.accumulation!r}", ({"accumulation": "fast"},)
    unit = unit_of(spec.a.dtype, spec.b.dtype, WGMMA)
    if unit is None or not unit.promotes:
        kept = "exactly" if _sums_are_whole(spec) else "in FP32"
        yield Broken(f"{what}, and a is {spec.a}, whose products the Tensor Cores add up {kept}", fast)
    if config.threadblock.k != BLOCK_K:
        yield Broken(
            f"{what}, and threadblock.k is {config.threadblock.k}: sums of {BLOCK_K} products, those "
            "of one stage, are added up",
            ({"threadblock.k": BLOCK_K},),
        )
    if config.split_k != 1:
        yield Broken(
            f"{what}, and split_k is {config.split_k}, and kernels that split K support only fast sums",
            ({"split_k": 1},),
        )


def _scheduler(_: KernelSpec, config: Sm90Config) -> Iterator[Broken]:
    if config.scheduler == "stream_k" and config.schedule != "cooperative":
        yield Broken(
            f"scheduler is 'stream_k' with schedule {config.schedule!r}, and CUTLASS has it for 'cooperative' only",
            ({"schedule": "cooperative"}, {"scheduler": "persistent"}),
        )


def _resident(spec: KernelSpec, config: Sm90Config) -> Iterator[Broken]:
    if config.resident == 1:
        return
    what, alone = f"resident is {config.resident}", {"resident": 1}
    if config.schedule != "warp_specialized":
        yield Broken(
            f"{what} with schedule {config.schedule!r}, which has one thread block on each multiprocessor",
            ({"schedule": "warp_specialized"}, alone),
        )
    registers = config.threadblock.m * config.threadblock.n // arch.WARPGROUP
    registers *= 1 if config.accumulation == "fast" else 2
    if registers > _MAX_ACCUMULATORS_OF_TWO:
        yield Broken(
            f"{what} and threadblock {config.threadblock} takes {registers} accumulator registers a thread, of which "
            f"as many blocks have room for {_MAX_ACCUMULATORS_OF_TWO}",
            (alone,),
            "use a smaller threadblock",
        )
    stages = pipeline_stages(spec)
    needed, there = shared_memory(spec, config, max(2, stages)), block_memory(spec)
    if needed > there:
        yield Broken(
            f"{what}: a thread block takes {needed} bytes of shared memory, and has {there} as its part of a "
            "multiprocessor's",
            ({"stages": None}, alone),
            "use a smaller threadblock",
        )


def _split_k(spec: KernelSpec, config: Sm90Config) -> Iterator[Broken]:
    if config.split_k == 1:
        return
    what, whole = f"split_k is {config.split_k}", {"split_k": 1}
    if config.schedule == "pingpong" or config.scheduler != "persistent":
        schedules = ("cooperative", "warp_specialized")
        yield Broken(
            f"{what} with schedule {config.schedule!r} and scheduler {config.scheduler!r}, and blocks that split K "
            "work on one tile",
            (*({"schedule": s, "scheduler": "persistent"} for s in schedules), whole, _WHOLE_K),
        )
    if config.cluster.m * config.cluster.n != 1:
        yield Broken(
            f"{what} with cluster {config.cluster}, and the blocks that split K are the cluster",
            ({"cluster": ClusterShape(1, 1)}, whole),
        )
    step = WGMMA.n_step * config.split_k
    if config.threadblock.n % step:
        yield Broken(
            f"{what}, and each block finishes a part of the tile's columns",
            (whole,),
            f"use a multiple of {step} for threadblock.n",
        )
    needed, there = split_exchange(config), mainloop_smem(spec, max(2, pipeline_stages(spec)))
    if needed > there:
        yield Broken(
            f"{what}: the partial sums that blocks exchange take {needed} bytes, and the operands' buffer, which holds "
            f"them, has {there}",
            ({"stages": None}, *({"split_k": split} for split in (4, 2, 1) if split < config.split_k)),
            "use a smaller threadblock",
        )
    for output in spec.epilogue.outputs:
        if output.reduction is not None:
            yield Broken(f"{what} and output {output.name} is a reduction, which these kernels do not have", (whole,))


def _batched(spec: KernelSpec, config: Sm90Config) -> Iterator[Broken]:
    if spec.form not in (BATCHED, GROUPED, RAGGED_K):
        return
    if not config.whole_k:
        yield Broken(
            f"form is {spec.form} with split_k {config.split_k} and scheduler {config.scheduler!r}, and blocks split "
            "the K of one GEMM",
            ({"split_k": 1}, {"scheduler": "persistent"}, _WHOLE_K),
        )
    if config.realign:
        a, b = loaded(spec.a, spec.b)
        pad = "" if whole_lines(spec) else "pad the leading dimensions of a and b: "
        yield Broken(
            f"form is {spec.form} and realign is True, and operands are copied to aligned lines for one GEMM",
            advice=lambda others: ", or use ".join([f"{pad}use {a} and {b}", *others]),
        )


def _grouped(spec: KernelSpec, config: Sm90Config) -> Iterator[str | Broken]:
    if spec.form != GROUPED:
        return
    if config.schedule == "warp_specialized":
        yield Broken(
            "form is grouped with schedule 'warp_specialized', which needs the number of tiles on "
            "the host, and only the device knows it",
            _PERSISTENT,
        )
    if spec.d.dtype is i32:
        yield f"form is grouped, and d is {spec.d}: sums of groups as they are were not tested; use bf16 or f32"
    if spec.a.major != "row" or spec.d.major != "row":
        yield f"form is grouped, of rows in memory, and a is {spec.a} and d is {spec.d}: use row-major ones"
    tiles = [(f"input {i.name}", t) for i, t in spec.typed_inputs if i.kind is Kind.TILE]
    tiles += [(f"output {o.name}", t) for o, t in spec.typed_outputs if o.kind is Kind.TILE]
    for name, operand in tiles:
        if operand.major != "row":
            yield f"form is grouped, of rows in memory, and {name} is {operand}: use a row-major one"
        if operand.aligned and not plain_epilogue(spec):
            yield (
                f"form is grouped, and {name} is {operand}: beside another (M, N) tensor, or where d is not aligned to "
                f"16 bytes, it goes through registers; use a lower alignment, such as "
                f"'{operand.dtype}.row.align{operand.alignment // 2}'"
            )
    if spec.d.aligned and not plain_epilogue(spec):
        yield (
            f"form is grouped, and d is {spec.d}: beside other (M, N) tensors it goes through registers; use a "
            f"lower alignment, such as '{spec.d.dtype}.row.align{spec.d.alignment // 2}'"
        )


def _sums_are_whole(spec: KernelSpec) -> bool:
    return sums_of(spec.a.dtype, spec.b.dtype) is i32


def _integer_sums(spec: KernelSpec, config: Sm90Config) -> Iterator[Broken]:
    if _sums_are_whole(spec) and not config.whole_k:
        yield Broken(
            f"a is {spec.a} with split_k {config.split_k} and scheduler {config.scheduler!r}, and blocks that split K "
            "exchange sums in FP32",
            ({"split_k": 1}, {"scheduler": "persistent"}, _WHOLE_K),
        )


def _ragged_k(spec: KernelSpec, config: Sm90Config) -> Iterator[str | Broken]:
    if spec.form != RAGGED_K:
        return
    if config.schedule == "warp_specialized":
        yield Broken(
            "form is ragged_k with schedule 'warp_specialized', whose thread blocks have equally many steps along K",
            _PERSISTENT,
        )
    if spec.a.dtype.bits != 16:
        yield f"form is ragged_k, and a is {spec.a}: use bf16 or f16"
    if (spec.a.major, spec.b.major) != ("col", "row"):
        yield (
            f"form is ragged_k, whose groups are lines in memory, and a is {spec.a} and b is {spec.b}: use a "
            "column-major a and a row-major b"
        )


def _cluster_size(_: KernelSpec, config: Sm90Config) -> Iterator[str]:
    cluster = config.cluster
    if cluster.m * cluster.n > arch.MAX_CLUSTER:
        yield (
            f"cluster is {cluster}: {cluster.m * cluster.n} thread blocks, and more than {arch.MAX_CLUSTER} are not "
            f"portable; use a smaller one"
        )


def _cluster_shape(_: KernelSpec, config: Sm90Config) -> Iterator[str]:
    cluster = config.cluster
    if any(side & (side - 1) for side in (cluster.m, cluster.n)):
        yield f"cluster is {cluster}: CUTLASS's tile schedulers divide by its sides with shifts; use powers of two"


def _multicast(spec: KernelSpec, config: Sm90Config) -> Iterator[str]:
    # Thread blocks of a cluster along N each load a part of A's tile for all of them. The same holds for B along M.
    peers = {"m": config.cluster.n, "n": config.cluster.m}
    for operand in sides(spec):
        sharing = peers[operand.side]
        matrices = 1 + len(spec.epilogue.products) if operand.name == "b" else 1
        tile_bytes = operand.dtype.bytes_of(operand.extent // matrices * config.threadblock.k)
        if tile_bytes % (sharing * _TMA_SMEM_ALIGNMENT):
            yield (
                f"cluster is {config.cluster}: {sharing} thread blocks share {operand.name}'s tile of {tile_bytes} "
                f"bytes, and the part that each loads must be a multiple of {_TMA_SMEM_ALIGNMENT} bytes; use a smaller "
                f"cluster or a larger threadblock.{operand.side}"
            )


def _means(spec: KernelSpec, config: Sm90Config) -> Iterator[Broken]:
    if not spec.epilogue.gathered:
        if config.means != "gathered":
            yield Broken(
                f"means is {config.means!r}, and the epilogue uses no means of A's rows", ({"means": "gathered"},)
            )
        return
    mma = mma_of(spec.a.dtype, spec.b.dtype)
    if mma is not None and not takes_means(mma):
        yield Broken(
            f"a is {spec.a}, and {', '.join(spec.epilogue.gathered)} of A's rows need 16-bit elements",
            advice="use a Col that a kernel of its own computes",
        )
    if config.means == "ahead":
        return
    where, ahead = f"means is {config.means!r}: {', '.join(spec.epilogue.gathered)} of rows", {"means": "ahead"}
    if spec.a.major != "row":
        yield Broken(f"{where} need rows that are contiguous, and a is {spec.a}", (ahead,), "use a row-major A")
    if not config.whole_k:
        yield Broken(f"{where} need a block that sees all of K", (ahead, _WHOLE_K))
    if not plain_epilogue(spec):
        yield Broken(
            f"{where} need an epilogue that stores an aligned D alone and reads at most one aligned tile",
            (ahead,),
        )


_NOT_GATHERED = ({"means": "beside"}, {"means": "ahead"})


def _gathered(spec: KernelSpec, config: Sm90Config) -> Iterator[Broken]:
    if not gathers(spec):
        return
    if config.threadblock.k % _GATHERED_COLUMNS:
        yield Broken(
            f"threadblock.k is {config.threadblock.k}, and the main loop gathers in lines of {_GATHERED_COLUMNS} "
            f"elements",
            _NOT_GATHERED,
            "use a multiple of that",
        )
    rows = gathered_rows(spec)
    if rows > _GATHERED_ROWS:
        yield Broken(
            f"a tile has {rows} rows of A, and gathering from more than {_GATHERED_ROWS} takes the main loop longer "
            f"than multiplying them",
            _NOT_GATHERED,
        )


def _second_weight(spec: KernelSpec, config: Sm90Config) -> Iterator[str | Broken]:
    if not spec.epilogue.products:
        return
    where = f"the epilogue has the Product {spec.epilogue.products[0]}"
    if not config.whole_k or config.side_by_side:
        whole = ({**_WHOLE_K, **rows} for rows in (_OTHER_ROWS if config.side_by_side else ({},)))
        yield Broken(
            f"{where}: one thread block must sum a tile's whole K, and warpgroups must not share its columns",
            tuple(whole),
        )
    if not beside_each_other(spec):
        yield (
            f"{where}, so b must be column-major and aligned for TMA, and b is {spec.b}: use {spec.b.dtype}.col, a "
            "transposed weight (N, K)"
        )
    if not plain_epilogue(spec) or not d_alone(spec) or source_name(spec) is not None:
        yield (
            f"{where}: it may then read no tile, and return only D, with lines at multiples of 16 bytes; use two GEMMs"
        )
    tile = config.threadblock
    if swapped(spec):
        step = 2 * WGMMA.m * (2 if config.schedule == "cooperative" else 1)
        if tile.m % step:
            yield f"{where}, and threadblock.m is {tile.m}: use a multiple of {step}, for whole rows of each"
    elif tile.n % (2 * WGMMA.n_step):
        yield f"{where}, and threadblock.n is {tile.n}: use a multiple of {2 * WGMMA.n_step}"


def _paired_reduction(spec: KernelSpec, _: Sm90Config) -> Iterator[Broken]:
    if not plain_epilogue(spec):
        for name in paired(spec):
            yield Broken(
                f"output {name} is a reduction that keeps two numbers, and CUTLASS's own epilogue keeps one",
                advice=_for_a_plain_epilogue,
            )


def _for_a_plain_epilogue(others: list[str]) -> str:
    what = "give d 16 bytes of alignment, read at most one tile, and store none besides d"
    return "; or use ".join([what, *others])


def _reduction_schedule(spec: KernelSpec, config: Sm90Config) -> Iterator[Broken]:
    for output in spec.epilogue.outputs:
        if output.reduction is None or plain_epilogue(spec):
            continue
        if config.schedule == "warp_specialized":
            yield Broken(
                f"output {output.name} is a reduction, and CUTLASS's 'warp_specialized' kernel gives an epilogue no "
                f"workspace for partial results",
                _PERSISTENT,
            )


def _reduction_tile(spec: KernelSpec, config: Sm90Config) -> Iterator[Broken]:
    # Sm90RowReduction shuffles between the 8 lanes of a column, and each time halves the n / 8 column pairs per thread.
    # From 8 pairs on, it assumes that every lane is left with the same number of pairs.
    n = config.threadblock.n
    if n > 64 and n % 64 and not plain_epilogue(spec):
        for name in reduced_along_m(spec):
            yield Broken(
                f"threadblock.n is {n} and output {name} is reduced along the kernel's M: CUTLASS's shuffles then drop "
                f"values",
                ({"threadblock.n": max(64, n // 64 * 64)},),
                "use at most 64 or a multiple of 64",
            )


def _reduction_buffer(spec: KernelSpec, config: Sm90Config) -> Iterator[Broken]:
    epi_m, epi_n = epilogue_tile(spec)
    warps = 8 if config.schedule == "cooperative" else 4
    needed, there = f32.bytes_of(warps * config.threadblock.n), spec.d.dtype.bytes_of(epi_m * epi_n)
    if needed > there and not plain_epilogue(spec):
        for name in reduced_along_m(spec):
            yield Broken(
                f"threadblock.n is {config.threadblock.n} and output {name} is reduced along the kernel's M: that "
                f"needs {needed} bytes, and the epilogue's buffer of {epi_m}x{epi_n} elements of d has {there}",
                ({"threadblock.n": max(64, config.threadblock.n // 64 * 64)},),
                "use at most 64 or a multiple of 64",
            )


def _swap_pairs(spec: KernelSpec, _: Sm90Config) -> Iterator[Broken]:
    if spec.epilogue.swaps_pairs and not plain_epilogue(spec):
        yield Broken(
            "the epilogue swaps pairs of columns, and CUTLASS's own epilogue does not support that",
            advice=_for_a_plain_epilogue,
        )


def _quantized(spec: KernelSpec, config: Sm90Config) -> Iterator[str | Broken]:
    if spec.epilogue.quantized is None:
        return
    where = f"the epilogue quantises d in blocks of 1x{BLOCK_K}"
    if not plain_epilogue(spec) or spec.d.major != "row":
        yield (
            f"{where}, and d is {spec.d}: use a row-major d with lines at multiples of 16 bytes, read at most one "
            "(M, N) tile, with such lines too, and store none besides d"
        )
    if swapped(spec):
        yield Broken(f"{where}, which a kernel that computes D^T has across its warps", ({"swap_ab": False},))
    if config.split_k != 1:
        yield Broken(
            f"{where}, and split_k is {config.split_k}, whose blocks finish parts of a tile", ({"split_k": 1},)
        )
    columns = warpgroup_columns(spec)
    if shared_by_two(spec):
        half = f"{where}, of which a thread block has {columns} columns, and two share the scales"
        if config.cluster.n % 2:
            yield Broken(f"{half}: they need a cluster with an even n", ({"cluster.n": 2},))
        if config.schedule == "warp_specialized" or config.scheduler != "persistent":
            yield Broken(
                f"{half}: they need memory that no operand uses, of a persistent kernel",
                ({"schedule": "pingpong", "scheduler": "persistent"},),
            )
    elif columns % BLOCK_K:
        each = config.threadblock.n // columns if columns and config.threadblock.n % columns == 0 else 1
        yield Broken(
            f"{where}, and a warpgroup has {columns} columns of d",
            ({"threadblock.n": each * BLOCK_K},),
            f"use a multiple of {each * BLOCK_K} for threadblock.n",
        )


SM90: tuple[Rule[Sm90Config], ...] = (
    Rule("tma_alignment", "hardware", _tma_alignment),
    Rule("realign", "policy", _realign),
    Rule("tile_m", "compiler", _tile_m),
    Rule("side_by_side", "compiler", _side_by_side),
    Rule("tile_n", "hardware", _tile_n),
    Rule("tile_k", "hardware", _tile_k),
    Rule("tile_size", "policy", _tile_size),
    Rule("epilogue_step", "policy", _epilogue_step),
    Rule("stored_lines", "compiler", _stored_lines),
    Rule("accumulators", "policy", _accumulators),
    Rule("accumulation", "policy", _accumulation),
    Rule("scheduler", "compiler", _scheduler),
    Rule("resident", "policy", _resident),
    Rule("batched", "policy", _batched),
    Rule("grouped", "policy", _grouped),
    Rule("ragged_k", "policy", _ragged_k),
    Rule("split_k", "policy", _split_k),
    Rule("integer_sums", "policy", _integer_sums),
    Rule("cluster_size", "policy", _cluster_size),
    Rule("cluster_shape", "policy", _cluster_shape),
    Rule("multicast", "hardware", _multicast),
    Rule("means", "policy", _means),
    Rule("gathered", "policy", _gathered),
    Rule("second_weight", "policy", _second_weight),
    Rule("swap_pairs", "policy", _swap_pairs),
    *(Rule(own.name, "policy", own.rule) for own in OWN),
    Rule("quantized", "policy", _quantized),
    Rule("paired_reduction", "policy", _paired_reduction),
    Rule("reduction_schedule", "policy", _reduction_schedule),
    Rule("reduction_tile", "policy", _reduction_tile),
    Rule("reduction_buffer", "compiler", _reduction_buffer),
)
