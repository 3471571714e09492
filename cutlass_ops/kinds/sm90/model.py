"""The time model of Sm90 kernels.

The model ranks configurations before any is compiled. The fastest is nearly always among its first eight for a shape;
``tests/unit/test_model.py`` measures how often, over the sweeps in ``benchmarks/results``. ``benchmarks/fit_model.py``
fitted the parameters to those sweeps. The model ignores two effects that the sweeps hardly cover: a tile's K extent,
and the orientation of a large tile.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import NamedTuple, get_args

import numpy as np

from cutlass_ops.base import arch
from cutlass_ops.base.arch import WGMMA
from cutlass_ops.declare.chips import peaks_of
from cutlass_ops.declare.config import Means
from cutlass_ops.declare.device import Device
from cutlass_ops.declare.problem import Problem
from cutlass_ops.kinds.arrays import Extents, Flags, Floats, Places, Problems
from cutlass_ops.kinds.sm90.config import Schedule, Sm90Config
from cutlass_ops.kinds.spreads import Groups
from cutlass_ops.kinds.traits import Extent, odd

# Sharpness of the soft maximum over limits within a K step (Tensor Cores, shared memory, L2 cache), as a power of two:
# two limits that are nearly equal cost more than either alone. Work and device memory overlap less well: see
# Costs.overlap.
_DOUBLINGS = 3
# Relative slowdown per unit of padded rows over M, up to the maximum. It only decides between memory-bound kernels,
# where the one with the least padding is to win.
_PADDING, _MOST_PADDING = 0.01, 4
# Beyond this many rows of tiles, B is not read from device memory more often (fitted with `reread`).
_MOST_REREADS = 5

# Start time in microseconds of the kernel that copies misaligned operands, and its bandwidth in GB/s (read plus write).
# The kernel that also transposes them, which was not measured, is taken to be as fast: it reads and writes whole lines.
_REALIGN_START = 2.5
_REALIGN_BANDWIDTH = 2500.0
# Extra microseconds per million elements of D that are stored one by one, with neighbouring threads in different rows.
# From differences of measured times (benchmarks/NOTES.md), not fitted.
_SCATTERED = 3.4
# Limits on an instruction's clocks: products times the bytes of an element, since narrower ones are multiplied faster;
# and reads of both operands from shared memory.
_PRODUCT_BYTES_PER_CLOCK = 4096
# FP32 sums that one SM adds up in a clock: the number of its FP32 units, not fitted.
_SUMS_PER_CLOCK = 128
# Clocks that a warp takes for an element in a usual epilogue, its stores among them, and how much longer an epilogue
# computes in parts of 16 or 8 columns instead of 32: by stall counts of the machine code (benchmarks/NOTES.md).
_USUAL_CLOCKS = 16.0
_OF_16_COLUMNS, _OF_8_COLUMNS = 1.6, 2.4
_SHARED_BYTES_PER_CLOCK = 128
# Of the clocks in which shared memory is written, those that show where it limits the products, as with 2:4 sparse
# weights: by the first two kernels that were timed (benchmarks/NOTES.md), not fitted.
_WRITES_SHOWN = 0.25

# Bytes of an element of A and of B, and of D, in what the costs were fitted to.
_16_BITS = (2, 2)

# L2 cache requests per 128 bytes that start at any multiple of 16 bytes. A multicast requests whole cache lines, other
# reads request half lines: 1.875 and 2.75 on average when counted. With a fifth more, choices lose least
# (benchmarks/NOTES.md).
_LINES_ASKED = 2.2
_HALVES_ASKED = 3.3

SCHEDULES: tuple[Schedule, ...] = ("warp_specialized", "pingpong", "cooperative")
WAYS: tuple[Means, ...] = get_args(Means)


@dataclass(frozen=True)
class PerSchedule:
    """One number per schedule."""

    warp_specialized: float
    pingpong: float
    cooperative: float

    def of(self, schedule: Schedule) -> float:
        """Return the number of a schedule."""
        return float(getattr(self, schedule))


@dataclass(frozen=True)
class Costs:
    """The model's parameters of a chip."""

    multiprocessors: int  # number of SMs
    # Number of SMs that clusters of four or more can use at a time. A cluster cannot span GPCs.
    multiprocessors_in_fours: int
    clock: float  # effective clock of the Tensor Cores under a short load, in GHz
    fill: float  # bytes per nanosecond that one SM loads into shared memory
    l2: float  # L2 cache bandwidth of all SMs, in bytes per nanosecond
    lookups: float  # L2 cache lookups per nanosecond: one per clock and slice
    dram: float  # device memory bandwidth that kernels reach, in bytes per nanosecond
    overlap: float  # how well work overlaps with device memory: the sharpness of their soft maximum
    launch: PerSchedule  # microseconds from one kernel to the next, including the first loads
    cluster: float  # microseconds that the blocks of a cluster wait for each other at the start
    throttle: float  # relative slowdown of long kernels: power and heat lower the clock
    throttle_after: float  # time constant of the throttling, in microseconds
    reread: float  # fraction of B that each further row of tiles reads from device memory again
    # Factor on the bytes read of an operand whose lines are not aligned to the L2 cache's: 128 bytes then lie in two
    # cache lines
    straddle: float
    multicast: float  # A multicast to n blocks divides L2 cache reads by n to this power; 1 would be ideal
    merge: float  # factor by which reads of an operand decrease if a GPC takes a run of tiles
    alone: float  # extra microseconds for a launch that does not overlap with the previous kernel
    split: float  # microseconds for stream-K to add up the parts of a 128 x 128 tile
    meet: float  # microseconds that blocks that split K wait for each other
    exchange: float  # microseconds for a block to send a whole 128 x 128 tile to the blocks that split K with it
    epilogue: PerSchedule  # microseconds for an exposed epilogue of a 128 x 128 tile


H100 = Costs(
    multiprocessors=132,
    multiprocessors_in_fours=120,
    clock=1.663,
    fill=155.6,
    l2=13060.0,
    lookups=132.6,
    dram=2935.0,
    overlap=3.435,
    launch=PerSchedule(warp_specialized=2.035, pingpong=2.113, cooperative=2.262),
    cluster=0.125,
    throttle=0.2146,
    throttle_after=109.8,
    reread=0.109,
    straddle=1.66,
    multicast=0.415,
    merge=1.245,
    alone=1.004,
    split=5.53,
    meet=0.316,
    exchange=7.13,
    epilogue=PerSchedule(warp_specialized=1.546, pingpong=1.54, cooperative=1.32),
)
# The same SMs with faster memory. Kernels are assumed to reach the same fraction of its peak.
H200 = replace(H100, dram=4203.0)
_CHIPS = {"NVIDIA H200": H200}


@lru_cache(maxsize=16)
def costs_of(device: Device) -> Costs:
    """Return a device's parameters: an H100's with its number of SMs and its peaks, if nothing was measured there."""
    peaks = peaks_of(device.name)
    chip = _CHIPS.get(device.name) or replace(H100, clock=H100.clock * peaks.products, dram=H100.dram * peaks.memory)
    fours = round(chip.multiprocessors_in_fours * device.multiprocessors / chip.multiprocessors)
    return replace(chip, multiprocessors=device.multiprocessors, multiprocessors_in_fours=fours)


@dataclass(frozen=True)
class Taking:
    """The costs of means of A's rows.

    ``benchmarks/fit_means.py`` fitted them to ``benchmarks/results/sweep_means_h100.json``. Since then, idle warps of
    persistent kernels no longer keep A's rows in registers; their costs were set by eye (``benchmarks/NOTES.md``).
    """

    # Microseconds for gathering in the main loop: per tile, and per row of the tile
    gathered: float
    gathered_row: float
    # Start time in microseconds of a kernel before the GEMM, and the bytes per nanosecond at which it reads A
    ahead: float
    ahead_rate: float
    beside: PerSchedule  # microseconds if no epilogue has to wait for the idle warps
    beside_after: float  # microseconds until these warps have their first rows
    beside_rate: PerSchedule  # bytes per nanosecond at which the idle warps of all SMs read A


TAKING = Taking(
    gathered=0.065,
    gathered_row=0.0224,
    ahead=0.999,
    ahead_rate=1540.0,
    beside=PerSchedule(warp_specialized=0.508, pingpong=1.2, cooperative=1.2),
    beside_after=2.074,
    beside_rate=PerSchedule(warp_specialized=1400.0, pingpong=1400.0, cooperative=1400.0),
)


class Converting(NamedTuple):
    """Clocks of a thread, for each number of a packed weight, in which nothing is multiplied.

    ``benchmarks/fit_packed.py`` fitted them to a sweep of an H200.
    """

    one: float = 1.42  # if a warpgroup has one instruction's rows
    several: float = 1.73  # if it has several, and converts for one while it multiplies another
    # The same with more than one tile, where power limits: converting lets the clock rise again
    long_one: float = 1.06
    long_several: float = 0.815
    # And of warpgroups that take turns
    turns_one: float = 0.503
    turns_several: float = 1.66


CONVERTING = Converting()


@dataclass(frozen=True, eq=False)
class Batch:
    """Configurations as arrays of shape (1, configurations), so that the times of thousands take milliseconds."""

    # Extents along the problem's M and N
    tile_m: Floats
    tile_n: Floats
    cluster_m: Floats
    cluster_n: Floats
    # Extents of a tile in the kernel's orientation
    wgmma_m: Floats
    wgmma_n: Floats
    tile_k: Floats
    part: Floats  # size of one block's epilogue, in tiles of 128 x 128
    split_k: Floats  # number of blocks that share a tile's K
    resident: Floats  # number of blocks that an SM has room for
    schedule: Places  # index of the schedule in :data:`SCHEDULES`
    means: Places  # index of the way to compute means of A's rows in :data:`WAYS`
    # Whether tiles are split by stream-K, and whether each GPC takes a run of tiles. The latter may have a further
    # dimension before the others, for several orders of tiles at once, as their times then have.
    stream_k: Flags
    by_gpc: Flags

    @classmethod
    def of(cls, configs: Iterable[Sm90Config], by_gpc: bool | Sequence[bool] = False) -> Batch:
        """Return configurations side by side, all of them with an order of tiles by GPC or not, or each as given."""
        configs = tuple(configs)
        numbers = np.array([_numbers(c) for c in configs], np.float64).reshape(-1, len(fields(cls)) - 1)
        *extents, schedule, way, stream_k = np.ascontiguousarray(numbers.T)[:, None]
        ordered = np.broadcast_to(np.asarray(by_gpc, np.bool_), (1, len(configs)))
        return cls(*[*extents, schedule.astype(np.int64), way.astype(np.int64), stream_k > 0, ordered])

    def take(self, places: Places) -> Batch:
        """Return some of the configurations, each as often as it is named."""
        return Batch(*(getattr(self, each.name)[:, places] for each in fields(self)))


def _numbers(config: Sm90Config) -> tuple[float, ...]:
    """Return a configuration's numbers in the order of :class:`Batch`."""
    own, part = config.threadblock, config.part
    tile, cluster = config.along_problem
    schedule = SCHEDULES.index(config.schedule)
    stream_k = config.scheduler == "stream_k"
    size = part.m * part.n / 128**2
    way = WAYS.index(config.means)
    return (*tile, *cluster, own.m, own.n, own.k, size, config.split_k, config.resident, schedule, way, stream_k)


@dataclass(frozen=True, eq=False)
class Grid:
    """How configurations cover problems. All arrays have the shape (problems, configurations), or meet it."""

    # Number of tiles along M and N of each GEMM of the problem, rounded up to whole clusters
    rows: Floats
    columns: Floats
    tiles: Floats  # number of tiles of all GEMMs
    steps: Floats  # K steps of a thread block per tile
    waves: Floats  # number of waves of tiles
    active: Floats  # number of blocks that work in a full wave
    beside: Floats  # number of blocks on the SM that has most in a full wave
    rereads: Floats  # how often a GEMM's B is read again, since it has more than one row of clusters


def grid(batch: Batch, problems: Problems, chip: Costs) -> Grid:
    """Return how configurations cover problems."""
    extents = Extents.of(problems)
    rows = _rows_of_tiles(batch, extents.m)
    return _grid(batch, extents, chip, rows, _rereads(batch, rows))


def of_groups(batch: Batch, problems: Extents, groups: Groups, chip: Costs) -> tuple[Extents, Grid]:
    """Return groups of several sizes as GEMMs of their mean size, and how configurations cover the groups."""
    count = groups.counts.sum(0)
    means = problems._replace(m=(groups.rows * groups.counts).sum(0) / count, gemms=count)
    rows, shares = _rows_of_tiles(batch, groups.rows), groups.counts / count
    return means, _grid(batch, means, chip, (shares * rows).sum(0), (shares * _rereads(batch, rows)).sum(0))


def _rows_of_tiles(batch: Batch, m: Floats) -> Floats:
    return _ceil(_ceil(m, batch.tile_m), batch.cluster_m) * batch.cluster_m


def _rereads(batch: Batch, rows: Floats) -> Floats:
    return np.asarray(np.minimum(rows / batch.cluster_m - 1, _MOST_REREADS))


def _grid(batch: Batch, extents: Extents, chip: Costs, rows: Floats, rereads: Floats) -> Grid:
    _, n, k, gemms = extents
    columns = _ceil(_ceil(n, batch.tile_n), batch.cluster_n) * batch.cluster_n
    together = batch.cluster_m * batch.cluster_n * batch.split_k
    usable = np.where(together <= 2, float(chip.multiprocessors), float(chip.multiprocessors_in_fours))
    slots = usable * batch.resident
    tiles = rows * (gemms * columns)
    blocks = tiles * batch.split_k
    steps = _ceil(_ceil(k, batch.tile_k), batch.split_k)
    active = np.minimum(blocks, slots)
    return Grid(rows, columns, tiles, steps, _ceil(blocks, slots), active, _ceil(active, usable), rereads)


def times(
    batch: Batch,
    problems: Problems,
    chip: Costs = H100,
    widths: tuple[float, float] = _16_BITS,
    lines: tuple[Extent, Extent] = ("k", "k"),
    cover: Grid | None = None,
    narrow: float = 1.0,
    adding: Floats | float = 0.0,
    sparse: bool = False,
) -> Floats:
    """Return kernels' times in microseconds: FP64, with shape (problems, configurations).

    Configurations are legal, and each extent is at least 1. `widths` are the bytes of an element of A, and of D; one of
    B has `narrow` times those of A. If B is 2:4 `sparse`, an instruction has twice the products. `lines` are the
    extents that are contiguous in A and in B: K, unless A is column-major or B row-major. `cover` is the result of
    :func:`grid`, if it is known. In `adding` microseconds, multiprocessors add up products and do not multiply.
    """
    m, n, k, gemms = Extents.of(problems)
    cover = cover or grid(batch, problems, chip)
    element_bytes, d_bytes = widths
    of_both = element_bytes, element_bytes * narrow

    # One K step of one tile, in microseconds.
    row_bytes = batch.tile_k * element_bytes
    rows_a = batch.tile_m * _rows(batch.tile_m, lines[0], element_bytes)
    rows_b = batch.tile_n * narrow * _rows(batch.tile_n, lines[1], of_both[1])
    folds = 2 if sparse else 1  # lines of the dense operand are as many times as long for an instruction
    instructions = batch.wgmma_m / WGMMA.m * batch.tile_k * element_bytes / (folds * WGMMA.k_bytes)
    products = WGMMA.m * batch.wgmma_n * WGMMA.k_bytes / _PRODUCT_BYTES_PER_CLOCK
    operands = (WGMMA.m + folds * batch.wgmma_n) * WGMMA.k_bytes / _SHARED_BYTES_PER_CLOCK
    if sparse:
        # Warpgroups side by side each read the rows of the weight.
        beside = (batch.schedule == SCHEDULES.index("cooperative")) & (batch.wgmma_m % (2 * WGMMA.m) != 0)
        written = _WRITES_SHOWN * (rows_a + rows_b) * row_bytes / instructions
        operands = operands + (written + beside * WGMMA.m * WGMMA.k_bytes) / _SHARED_BYTES_PER_CLOCK
    compute = instructions * np.maximum(products, operands) / (chip.clock * 1e3)
    fill = (rows_a + rows_b) * row_bytes / (chip.fill * 1e3)
    # A tile of A is multicast to the blocks of a cluster along N, a tile of B to those along M. Without multicast, a
    # GPC that takes a run of tiles shares reads among several of them.
    merge = np.where(batch.by_gpc, chip.merge, 1.0)
    reads_a = batch.tile_m / np.where(batch.cluster_n > 1, batch.cluster_n**chip.multicast, merge)
    reads_b = batch.tile_n * narrow / np.where(batch.cluster_m > 1, batch.cluster_m**chip.multicast, merge)
    extents = {"m": m, "n": n, "k": k}
    odd_a, odd_b = (odd(extents[line], each) for line, each in zip(lines, of_both, strict=True))
    reads_a = reads_a * np.where(odd_a, chip.straddle, 1.0)
    reads_b = reads_b * np.where(odd_b, chip.straddle, 1.0)
    # Of the L2 cache, for each block that works.
    shared = (reads_a + reads_b) * row_bytes / (chip.l2 * 1e3)
    requests = rows_a * _requests(odd_a, batch.cluster_n) + rows_b * _requests(odd_b, batch.cluster_m)
    lookups = requests * row_bytes / arch.CACHE_LINE_BYTES / (chip.lookups * 1e3)
    waves, active, adding_up = _split(batch, cover, chip)
    own = _power(compute) + _power(fill)  # what blocks of an SM do in turn
    step = _root(own * _power(cover.beside) + (_power(shared) + _power(lookups)) * _power(active))

    sent = batch.part * (batch.split_k - 1)
    finish = _per_schedule(batch, chip.epilogue) * batch.part + chip.exchange * sent
    # In a pingpong kernel, one warpgroup's epilogue overlaps with the other's main loop.
    pingpong = batch.schedule == SCHEDULES.index("pingpong")
    last, each = np.where(pingpong, finish, 0.0), np.where(pingpong, 0.0, finish)
    busy = waves * (cover.steps * step) + cover.waves * each + (last + adding_up) + adding
    cool = np.exp2(busy * (-1 / (chip.throttle_after * math.log(2))))
    busy = busy * ((1 + chip.throttle) - chip.throttle * cool)

    of_b = k * n * narrow
    once, again = element_bytes * (m * k + of_b) + d_bytes * m * n, element_bytes * of_b * chip.reread
    bandwidth = chip.dram * 1e3
    memory = gemms * once / bandwidth + gemms * again / bandwidth * cover.rereads
    # Of several memory-bound kernels, prefer the one with the least padding.
    padded = np.minimum(cover.rows * (_PADDING * batch.tile_m) / m, _PADDING * _MOST_PADDING)
    start = _per_schedule(batch, chip.launch)
    start = start + np.where(batch.cluster_m * batch.cluster_n * batch.split_k > 1, chip.cluster, 0.0)
    start = start + np.where(batch.split_k > 1, chip.meet, 0.0)
    start = start + np.where(batch.by_gpc | batch.stream_k, chip.alone, 0.0)
    return (_soft_max(busy, memory, sharpness=chip.overlap) + start) * (padded + (1 - _PADDING))


def means(
    batch: Batch,
    problems: Problems,
    times: Floats,
    chip: Costs = H100,
    element_bytes: float = _16_BITS[0],
    taking: Taking = TAKING,
    cover: Grid | None = None,
) -> Floats:
    """Return the extra microseconds for means of A's rows, with shape (problems, configurations).

    "gathered": the main loop gathers them from its tiles. "ahead": a kernel before the GEMM reads A once. "beside":
    idle warps read A during the main loop, and an epilogue waits if they have not reached its rows. The model assumes
    the usual order of tiles for such kernels, with new rows last (:func:`cutlass_ops.declare.device.with_order`).

    `times` are those without means, of the same shape, and `element_bytes` is the size of an element of A.
    """
    m, _, k, gemms = Extents.of(problems)
    rows = gemms * m
    cover = cover or grid(batch, problems, chip)
    gathered = taking.gathered + taking.gathered_row * batch.tile_m
    ahead = taking.ahead + element_bytes * rows * k / (taking.ahead_rate * 1e3)

    # The first wave's epilogues need the rows of its tiles. The last wave's need all rows.
    first = np.minimum(_ceil(cover.active, cover.columns) * batch.tile_m, rows)
    # Microseconds for a row: what does not depend on the problem's M is multiplied first.
    each = element_bytes * chip.multiprocessors * k / (_per_schedule(batch, taking.beside_rate) * 1e3) / cover.active
    read_first, read_all = (taking.beside_after + read * each for read in (first, rows))
    multiplying = times - _per_schedule(batch, chip.launch)
    late = np.maximum(np.maximum(read_first - multiplying / cover.waves, read_all - multiplying), 0)
    beside = _per_schedule(batch, taking.beside) + late

    found = {"gathered": gathered, "beside": beside, "ahead": ahead}
    chosen = found[WAYS[0]]
    for way in WAYS[1:]:  # np.choose takes eight times as long
        chosen = np.where(batch.means == WAYS.index(way), found[way], chosen)
    return chosen


def realigning(a: bool, b: bool, problems: Problems, element_bytes: float) -> Floats:
    """Return the extra microseconds for copying A, B or both before the GEMM, with shape (problems, 1)."""
    m, n, k, gemms = Extents.of(problems)
    if not a and not b:
        return np.zeros((1, 1))
    return _REALIGN_START + 2 * element_bytes * gemms * (m * k * a + k * n * b) / (_REALIGN_BANDWIDTH * 1e3)


def promoting(batch: Batch, cover: Grid, chip: Costs = H100) -> Floats:
    """Return the microseconds for adding up each step's sums in FP32, with shape (problems, configurations).

    The warpgroups of a cooperative kernel take turns: most of it overlaps with the other's products. Those of a
    pingpong kernel do not, since their main loops follow each other. Fitted to the H200's table
    (``benchmarks/NOTES.md``).
    """
    columns, cooperative = batch.wgmma_n, batch.schedule == SCHEDULES.index("cooperative")
    instructions = batch.wgmma_m / WGMMA.m
    # Two pieces of unequal width in turn, and three instructions of a warpgroup, one below the other.
    uneven = cooperative & (columns > 208) & (columns % 16 != 0)
    three = cooperative & (instructions == 3) & (columns != 128)
    shown = np.where(cooperative, 0.4, 0.75 * instructions * cover.beside) / _SUMS_PER_CLOCK
    shown = shown + 0.008 * uneven + 0.004 * three
    return np.asarray(cover.waves * cover.steps * batch.wgmma_m * columns * shown / (chip.clock * 1e3))


def scaling(batch: Batch, cover: Grid, swapped: Flags, chip: Costs = H100) -> Floats:
    """Return the microseconds for sums of each step and their scales of blocks, with shape (problems, configurations).

    In a transposed kernel each column of a tile has a scale of its own, which every thread reads. Otherwise each row
    has one. The other warpgroup of a cooperative kernel multiplies meanwhile: what is left are scales, tiles whose
    columns belong to two blocks of B, and narrow ones, whose products are too short to hide the sums. A warpgroup that
    is alone adds up its sums while nothing is multiplied. Fitted to the H200's table (``benchmarks/NOTES.md``).
    """
    columns, cooperative = batch.wgmma_n, batch.schedule == SCHEDULES.index("cooperative")
    rows = batch.wgmma_m / WGMMA.m / np.where(cooperative, 2, 1)  # instructions of a warpgroup, one below the other
    narrow = np.where(rows > 1, 2.0 * np.maximum(0, 192 - columns), 1.5 * np.maximum(0, 128 - columns))
    narrow = np.where(rows > 1.5, 300.0 * (columns < 128), narrow)
    split = 0.25 * columns * ((columns > 96) & (columns % 64 != 0))
    together = np.where(swapped, 1.4 * columns * (1 + rows), 30.0 + split + narrow)
    alone = (batch.wgmma_m * columns / _SUMS_PER_CLOCK + columns * rows * swapped) * cover.beside
    return np.asarray(cover.waves * cover.steps * np.where(cooperative, together, alone) / (chip.clock * 1e3))


def converting(batch: Batch, cover: Grid, chip: Costs = H100, of: Converting = CONVERTING) -> Floats:
    """Return the microseconds in which threads convert a packed weight and nothing is multiplied.

    Its shape is (problems, configurations).
    """
    pingpong, cooperative = (batch.schedule == SCHEDULES.index(s) for s in ("pingpong", "cooperative"))
    below = batch.wgmma_m / WGMMA.m / np.where(cooperative, 2, 1)  # instructions of a warpgroup, one below the other
    long = np.where(pingpong, _per(below, of.turns_one, of.turns_several), _per(below, of.long_one, of.long_several))
    clocks = np.where(cover.waves > 1, long, _per(below, of.one, of.several))
    each = below * WGMMA.m * batch.tile_k / arch.WARPGROUP * clocks * cover.beside
    return np.asarray(cover.waves * cover.steps * each / (chip.clock * 1e3))


def _per(below: Floats, one: float, several: float) -> Floats:
    return np.where(below > 1, several, one)


def computing(
    batch: Batch, problems: Problems, clocks: float, weights: int = 1, element_bytes: float = 2, chip: Costs = H100
) -> Floats:
    """Return the extra microseconds of a long epilogue, with shape (problems, configurations)."""
    cover = grid(batch, problems, chip)
    pingpong = batch.schedule == SCHEDULES.index("pingpong")
    groups = np.where(batch.schedule == SCHEDULES.index("cooperative"), 2.0, 1.0)
    # An epilogue takes a tile in parts of at most 32 columns. Narrower ones interleave fewer elements.
    narrow = np.where(batch.wgmma_n % 32 == 0, 1.0, np.where(batch.wgmma_n % 16 == 0, _OF_16_COLUMNS, _OF_8_COLUMNS))
    elements = batch.wgmma_m * batch.wgmma_n / (arch.WARPGROUP * groups * weights)
    longer = elements * clocks * narrow
    # While one warpgroup of a pingpong kernel computes, the other multiplies.
    products = batch.wgmma_m * batch.wgmma_n * batch.tile_k * element_bytes / _PRODUCT_BYTES_PER_CLOCK * cover.steps
    usual = elements * _USUAL_CLOCKS * narrow
    shown = np.maximum(0.0, usual + longer - np.maximum(products, usual)) / 2
    exposed = np.where(pingpong, cover.waves * shown + longer, cover.waves * longer)
    return np.asarray(exposed / (chip.clock * 1e3))


def scattering(problems: Problems) -> Floats:
    """Return the extra microseconds for storing single elements of D, with shape (problems, 1)."""
    m, n, _, gemms = Extents.of(problems)
    return _SCATTERED * m * n * gemms * 1e-6


def _rows(extent: Floats, line: Extent, element_bytes: float) -> Floats:
    """Return the number of rows in which an operand's tile is copied, relative to rows of 128 bytes.

    If the operand is not K-major, a row is as wide as the widest swizzle that divides the tile: a tile of 176 columns
    is copied in rows of 16 elements.
    """
    if line == "k":
        return np.ones_like(extent)
    widest = arch.SWIZZLE_BYTES[0]
    rows = np.full_like(extent, widest / arch.UNSWIZZLED_BYTES)
    for width in reversed(arch.SWIZZLE_BYTES):
        rows = np.where(extent * element_bytes % width == 0, widest / width, rows)
    return rows


def _requests(lines_are_odd: Flags, sharing: Floats) -> Floats:
    """Return a block's L2 cache requests per 128 bytes of an operand."""
    return np.where(lines_are_odd, np.where(sharing > 1, _LINES_ASKED, _HALVES_ASKED), 1.0) / sharing


def predict(config: Sm90Config, problem: Problem, chip: Costs = H100, widths: tuple[float, float] = _16_BITS) -> float:
    """Return :func:`times` for one configuration and one problem."""
    return times(Batch.of([config]), [problem], chip, widths).item()


def _split(batch: Batch, cover: Grid, chip: Costs) -> tuple[Floats, Floats, Floats]:
    """Return the number of tiles per SM, the SMs that work, and the microseconds for adding up split tiles.

    CUTLASS's stream-K splits no tiles if they fill more than half a wave but no more than one.
    """
    ours = np.flatnonzero(batch.stream_k)
    if not len(ours):
        return cover.waves, cover.active, np.zeros((1, 1))
    waves, active, adding_up = cover.waves.copy(), cover.active.copy(), np.zeros_like(cover.waves)
    filled = cover.tiles[..., ours] / chip.multiprocessors
    splits = (filled <= 0.5) | (filled > 1)
    # The more parts a tile has, the longer they wait for each other.
    size = (batch.wgmma_m * batch.wgmma_n)[..., ours] / 128**2
    waves[..., ours], active[..., ours] = np.where(splits, filled, 1.0), chip.multiprocessors
    adding_up[..., ours] = np.where(splits, chip.split * size * np.maximum(1 / filled, 1), 0.0)
    return waves, active, adding_up


def _per_schedule(batch: Batch, each: PerSchedule) -> Floats:
    return np.array([each.of(s) for s in SCHEDULES], np.float64)[batch.schedule]


def _soft_max(x: Floats, y: Floats, sharpness: float) -> Floats:
    return np.asarray((x**sharpness + y**sharpness) ** (1 / sharpness))


def _power(x: Floats) -> Floats:
    """Return the power of the soft maximum within a K step."""
    for _ in range(_DOUBLINGS):
        x = x * x
    return x


def _root(x: Floats) -> Floats:
    for _ in range(_DOUBLINGS):
        x = np.sqrt(x)
    return x


def _ceil(x: Floats, y: Floats) -> Floats:
    return np.ceil(x / y)
