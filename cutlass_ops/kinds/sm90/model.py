"""How long an Sm90 kernel takes, from its configuration and a chip's few numbers.

The model ranks configurations before any of them is compiled: of those that it puts first, eight a shape nearly always
hold the fastest (``tests/unit/test_model.py`` says how nearly, over the sweeps in ``benchmarks/results``). Its numbers
are a fit to those sweeps by ``benchmarks/fit_model.py``; a predicted time is no promise. It is blind to two things that
the sweeps show little of: the K extent of a tile, and the orientation of a large one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import get_args

import numpy as np

from cutlass_ops.base import arch
from cutlass_ops.declare.config import Means, Schedule, Sm90Config
from cutlass_ops.declare.device import Device
from cutlass_ops.declare.problem import Problem
from cutlass_ops.kinds.arrays import Extents, Flags, Floats, Places
from cutlass_ops.kinds.traits import Extent, odd

# Soft maxima: limits that are nearly reached together cost more than either. Tensor Cores, shared memory and L2 cache
# within a K step; and a kernel's work against device memory, which overlap less well.
_SHARPNESS = 8
# Part of its time that a kernel loses for each time that its tiles have more rows than the problem, up to so many. Set
# so that among kernels that all wait for memory the one with the least padding wins, and no other choice changes.
_PADDING, _MOST_PADDING = 0.01, 4
# More rows of tiles than this read B from device memory no more often (fitted with `reread`).
_MOST_REREADS = 5

# Microseconds of a kernel before the GEMM that copies misaligned operands, and the GB/s that it reads and writes.
_REALIGN_START = 2.5
_REALIGN_BANDWIDTH = 2500.0
# Microseconds more that it takes to store a million elements of D, one by one, where a thread's neighbours have other
# rows of it and not the row's next elements. Set by differences of measured times (benchmarks/NOTES.md), not fitted.
_SCATTERED = 3.4
# What bounds an instruction's clocks: its products, or reading both operands from shared memory.
_PRODUCTS_PER_CLOCK = 2048
_SHARED_BYTES_PER_CLOCK = 128

# Requests of the L2 cache for 128 bytes that begin at any multiple of 16 between its lines: a multicast asks for the
# lines that they lie in, another read for halves of lines. That is 1.875 and 2.75 times on average, as was counted;
# with a fifth more, choices lose least (benchmarks/NOTES.md).
_LINES_ASKED = 2.2
_HALVES_ASKED = 3.3

SCHEDULES: tuple[Schedule, ...] = ("warp_specialized", "pingpong", "cooperative")
WAYS: tuple[Means, ...] = get_args(Means)


@dataclass(frozen=True)
class PerSchedule:
    """A number for each schedule."""

    warp_specialized: float
    pingpong: float
    cooperative: float

    def of(self, schedule: Schedule) -> float:
        """Return a schedule's number."""
        return float(getattr(self, schedule))


@dataclass(frozen=True)
class Costs:
    """What the model knows of a chip.

    Attributes
    ----------
    multiprocessors : int
        How many there are.
    multiprocessors_in_fours : int
        How many clusters of four and more can use at once: they do not span processing clusters.
    clock : float
        Clock in GHz at which the Tensor Cores would take as long at their peak as they do under a short load.
    fill : float
        Bytes a nanosecond that one multiprocessor takes into shared memory.
    l2 : float
        Bytes a nanosecond that all of them read from the L2 cache.
    lookups : float
        Requests a nanosecond that the L2 cache looks up: one a clock in each of its slices.
    dram : float
        Bytes a nanosecond from device memory, as kernels reach it.
    overlap : float
        How well work and device memory's transfers overlap: the sharpness of their soft maximum.
    launch : PerSchedule
        Microseconds from one kernel to the next, with its first loads.
    cluster : float
        Microseconds that blocks of a cluster wait for each other at their start.
    throttle : float
        By what part a long kernel is slower than a short one: power and heat lower the clock.
    throttle_after : float
        Microseconds in which most of that shows.
    reread : float
        Part of B that each further row of tiles reads from device memory again.
    straddle : float
        How many more bytes are read of an operand whose lines in memory begin anywhere: each 128 bytes of a tile's row
        then lie in two lines of the L2 cache.
    multicast : float
        Power of the number of blocks that a multicast serves by which it relieves the L2 cache: 1 if it were read once.
    merge : float
        How many reads of one operand become one where a GPC takes a run of tiles.
    alone : float
        Microseconds more for a launch that does not overlap with the kernel before it.
    split : float
        Microseconds for adding up the parts of a tile of 128 x 128 that stream-K has split.
    meet : float
        Microseconds that blocks that split K wait for each other.
    exchange : float
        Microseconds in which a block sends all of a tile of 128 x 128 to others that split K with it.
    epilogue : PerSchedule
        Microseconds for an epilogue of 128 x 128 that nothing hides.
    """

    multiprocessors: int
    multiprocessors_in_fours: int
    clock: float
    fill: float
    l2: float
    lookups: float
    dram: float
    overlap: float
    launch: PerSchedule
    cluster: float
    throttle: float
    throttle_after: float
    reread: float
    straddle: float
    multicast: float
    merge: float
    alone: float
    split: float
    meet: float
    exchange: float
    epilogue: PerSchedule


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
# The same multiprocessors beside faster memory, of whose peak kernels are taken to reach as much.
H200 = replace(H100, dram=4203.0)
_CHIPS = {"NVIDIA H200": H200}


@lru_cache(maxsize=16)
def costs_of(device: Device) -> Costs:
    """Return what the model goes by: of a chip that it does not know, an H100, with as many multiprocessors."""
    chip = _CHIPS.get(device.name, H100)
    fours = round(chip.multiprocessors_in_fours * device.multiprocessors / chip.multiprocessors)
    return replace(chip, multiprocessors=device.multiprocessors, multiprocessors_in_fours=fours)


@dataclass(frozen=True)
class Taking:
    """What it takes to have means of A's rows.

    A fit to ``benchmarks/results/sweep_means_h100.json`` by ``benchmarks/fit_means.py``; but idle warps of persistent
    kernels had A's rows in registers then, and what they take now is set by eye (``benchmarks/NOTES.md``).

    Attributes
    ----------
    gathered, gathered_row : float
        Microseconds for the main loop, whatever the number of rows in a tile and for each of them.
    ahead, ahead_rate : float
        Microseconds of a kernel before the GEMM, and the bytes a nanosecond at which it reads A.
    beside : PerSchedule
        Microseconds where no epilogue has to wait for idle warps.
    beside_after : float
        Microseconds in which these warps have their first rows.
    beside_rate : PerSchedule
        Bytes a nanosecond at which those of all multiprocessors read A.
    """

    gathered: float
    gathered_row: float
    ahead: float
    ahead_rate: float
    beside: PerSchedule
    beside_after: float
    beside_rate: PerSchedule


TAKING = Taking(
    gathered=0.065,
    gathered_row=0.0224,
    ahead=0.999,
    ahead_rate=1540.0,
    beside=PerSchedule(warp_specialized=0.508, pingpong=1.2, cooperative=1.2),
    beside_after=2.074,
    beside_rate=PerSchedule(warp_specialized=1400.0, pingpong=1400.0, cooperative=1400.0),
)


@dataclass(frozen=True, eq=False)
class Batch:
    """Configurations side by side, so that the times of thousands take milliseconds.

    Attributes
    ----------
    configs : tuple of Sm90Config
        The configurations. All else are arrays of shape (1, configurations).
    tile_m, tile_n, cluster_m, cluster_n : array
        Extents along the problem's M and N.
    wgmma_m, wgmma_n, tile_k : array
        A tile's extents in the kernel's own orientation.
    part : array
        What one block's epilogue handles, in tiles of 128 x 128.
    split_k : array
        Blocks that share a tile's K.
    schedule : array
        Place of the schedule in :data:`SCHEDULES`.
    means : array
        Place of the way to take means of A's rows in :data:`WAYS`.
    stream_k, by_gpc : array
        Whether tiles are split where they do not fill a wave, and whether each GPC takes a run of them.
    """

    configs: tuple[Sm90Config, ...]
    tile_m: Floats
    tile_n: Floats
    cluster_m: Floats
    cluster_n: Floats
    wgmma_m: Floats
    wgmma_n: Floats
    tile_k: Floats
    part: Floats
    split_k: Floats
    schedule: Places
    means: Places
    stream_k: Flags
    by_gpc: Flags

    @classmethod
    def of(cls, configs: Iterable[Sm90Config], by_gpc: bool | Sequence[bool] = False) -> Batch:
        """Return configurations side by side, all of them with an order of tiles by GPC or not, or each as given."""
        configs = tuple(configs)
        numbers = np.array([_numbers(c) for c in configs], np.float64).reshape(-1, len(fields(cls)) - 2)
        *extents, schedule, way, stream_k = np.ascontiguousarray(numbers.T)[:, None]
        ordered = np.broadcast_to(np.asarray(by_gpc, np.bool_), (1, len(configs)))
        return cls(configs, *[*extents, schedule.astype(np.int64), way.astype(np.int64), stream_k > 0, ordered])


def _numbers(config: Sm90Config) -> tuple[float, ...]:
    """Return a configuration's numbers in the order of :class:`Batch`."""
    own, part = config.threadblock, config.part
    tile, cluster = config.along_problem
    schedule = SCHEDULES.index(config.schedule)
    stream_k = config.scheduler == "stream_k"
    size = part.m * part.n / 128**2
    way = WAYS.index(config.means)
    return (*tile, *cluster, own.m, own.n, own.k, size, config.split_k, schedule, way, stream_k)


@dataclass(frozen=True, eq=False)
class Grid:
    """How configurations cover problems. All arrays have the shape (problems, configurations).

    Attributes
    ----------
    rows, columns : array
        Tiles along M and N of each of a problem's GEMMs, whole clusters.
    tiles : array
        Tiles of all of them.
    steps : array
        K steps of a thread block at a tile.
    waves : array
        How often the multiprocessors take a tile.
    active : array
        How many of them take one in a full wave.
    """

    rows: Floats
    columns: Floats
    tiles: Floats
    steps: Floats
    waves: Floats
    active: Floats


def grid(batch: Batch, problems: Sequence[Problem], chip: Costs) -> Grid:
    """Return how configurations cover problems."""
    m, n, k, gemms = Extents.of(problems)
    rows = _ceil(_ceil(m, batch.tile_m), batch.cluster_m) * batch.cluster_m
    columns = _ceil(_ceil(n, batch.tile_n), batch.cluster_n) * batch.cluster_n
    together = batch.cluster_m * batch.cluster_n * batch.split_k
    slots = np.where(together <= 2, float(chip.multiprocessors), float(chip.multiprocessors_in_fours))
    tiles = gemms * rows * columns
    blocks = tiles * batch.split_k
    steps = _ceil(_ceil(k, batch.tile_k), batch.split_k)
    return Grid(rows, columns, tiles, steps, _ceil(blocks, slots), np.minimum(blocks, slots))


def times(
    batch: Batch,
    problems: Sequence[Problem],
    chip: Costs = H100,
    element_bytes: int = 2,
    lines: tuple[Extent, Extent] = ("k", "k"),
) -> Floats:
    """Return kernels' times in microseconds.

    Parameters
    ----------
    batch : Batch
        Legal configurations.
    problems : sequence of Problem
        Each extent at least 1.
    chip : Costs
        Where they run.
    element_bytes : int
        Width of an operand's element.
    lines : tuple of {"m", "n", "k"}
        Which extent lines of A and of B in memory have: K, unless A is column-major or B row-major.

    Returns
    -------
    array
        Of shape (problems, configurations), FP64.
    """
    m, n, k, gemms = Extents.of(problems)
    cover = grid(batch, problems, chip)

    # One K step of one tile, in microseconds.
    instructions = batch.wgmma_m / arch.WGMMA_M * batch.tile_k * element_bytes / arch.WGMMA_K_BYTES
    products = arch.WGMMA_M * batch.wgmma_n * arch.WGMMA_K_BYTES / element_bytes / _PRODUCTS_PER_CLOCK
    operands = (arch.WGMMA_M + batch.wgmma_n) * arch.WGMMA_K_BYTES / _SHARED_BYTES_PER_CLOCK
    compute = instructions * np.maximum(products, operands) / (chip.clock * 1e3)
    row_bytes = batch.tile_k * element_bytes
    rows_a = batch.tile_m * _rows(batch.tile_m, lines[0], element_bytes)
    rows_b = batch.tile_n * _rows(batch.tile_n, lines[1], element_bytes)
    fill = (rows_a + rows_b) * row_bytes / (chip.fill * 1e3)
    # A tile of A is multicast to the blocks of a cluster along N, one of B to those along M. Without a multicast, a GPC
    # that takes a run of tiles reads it once for several.
    merge = np.where(batch.by_gpc, chip.merge, 1.0)
    reads_a = batch.tile_m / np.where(batch.cluster_n > 1, batch.cluster_n**chip.multicast, merge)
    reads_b = batch.tile_n / np.where(batch.cluster_m > 1, batch.cluster_m**chip.multicast, merge)
    extents = {"m": m, "n": n, "k": k}
    odd_a, odd_b = (odd(extents[line], element_bytes) for line in lines)
    reads_a = reads_a * np.where(odd_a, chip.straddle, 1.0)
    reads_b = reads_b * np.where(odd_b, chip.straddle, 1.0)
    active = np.where(batch.stream_k, float(chip.multiprocessors), cover.active)
    shared = (reads_a + reads_b) * row_bytes * active / (chip.l2 * 1e3)
    requests = rows_a * _requests(odd_a, batch.cluster_n) + rows_b * _requests(odd_b, batch.cluster_m)
    lookups = requests * row_bytes / arch.CACHE_LINE_BYTES * active / (chip.lookups * 1e3)
    step = _soft_max(compute, fill, shared, lookups)

    # Of a pingpong kernel, one warp group's epilogue hides behind the other's products.
    exposed = np.where(batch.schedule == SCHEDULES.index("pingpong"), 1.0, cover.waves)
    waves, adding_up = _split(batch, cover, chip)
    sent = batch.part * (batch.split_k - 1)
    finish = _per_schedule(batch, chip.epilogue) * batch.part + chip.exchange * sent
    busy = waves * cover.steps * step + exposed * finish + adding_up
    busy = busy * (1 + chip.throttle * (1 - np.exp2(-busy / (chip.throttle_after * math.log(2)))))

    rereads = 1 + chip.reread * np.minimum(cover.rows / batch.cluster_m - 1, _MOST_REREADS)
    memory = element_bytes * gemms * (m * k + k * n * rereads + m * n) / (chip.dram * 1e3)
    # Among kernels that all wait for memory, the one with the least padding wins.
    padding = 1 + _PADDING * (np.minimum(cover.rows * batch.tile_m / m, _MOST_PADDING) - 1)
    start = _per_schedule(batch, chip.launch)
    start = start + np.where(batch.cluster_m * batch.cluster_n * batch.split_k > 1, chip.cluster, 0.0)
    start = start + np.where(batch.split_k > 1, chip.meet, 0.0)
    start = start + np.where(batch.by_gpc | batch.stream_k, chip.alone, 0.0)
    return (_soft_max(busy, memory, sharpness=chip.overlap) + start) * padding


def means(
    batch: Batch,
    problems: Sequence[Problem],
    times: Floats,
    chip: Costs = H100,
    element_bytes: int = 2,
    taking: Taking = TAKING,
) -> Floats:
    """Return by how many microseconds kernels are later for means of A's rows, of shape (problems, configurations).

    The main loop gathers them from the rows of its tiles; a kernel before it reads A once; idle warps beside it do so
    while the others multiply, and an epilogue waits where they have not come to its rows. Tiles are taken to be visited
    in the order in which such a kernel visits them, with new rows last (:func:`cutlass_ops.declare.device.with_order`).

    Parameters
    ----------
    batch : Batch
        Legal configurations.
    problems : sequence of Problem
        Each extent at least 1.
    times : array
        What kernels take without, shape (problems, configurations).
    chip, element_bytes
        As for :func:`times`.
    taking : Taking
        What each way costs.
    """
    m, _, k, gemms = Extents.of(problems)
    rows = gemms * m
    cover = grid(batch, problems, chip)
    gathered = taking.gathered + taking.gathered_row * batch.tile_m
    ahead = taking.ahead + element_bytes * rows * k / (taking.ahead_rate * 1e3)

    # Epilogues of the first wave need the rows of its tiles, those of the last need all.
    first = np.minimum(_ceil(cover.active, cover.columns) * batch.tile_m, rows)
    rate = _per_schedule(batch, taking.beside_rate) * cover.active / chip.multiprocessors
    read_first, read_all = (taking.beside_after + element_bytes * read * k / (rate * 1e3) for read in (first, rows))
    multiplying = times - _per_schedule(batch, chip.launch)
    late = np.maximum(np.maximum(read_first - multiplying / cover.waves, read_all - multiplying), 0)
    beside = _per_schedule(batch, taking.beside) + late

    found = {"gathered": gathered, "beside": beside, "ahead": ahead}
    return np.choose(batch.means, [found[way] for way in WAYS])


def realigning(a: bool, b: bool, problems: Sequence[Problem], element_bytes: int = 2) -> Floats:
    """Return by how many microseconds a GEMM is later that has A, B or both copied first, of shape (problems, 1)."""
    m, n, k, gemms = Extents.of(problems)
    if not a and not b:
        return np.zeros_like(m)
    return _REALIGN_START + 2 * element_bytes * gemms * (m * k * a + k * n * b) / (_REALIGN_BANDWIDTH * 1e3)


def scattering(problems: Sequence[Problem]) -> Floats:
    """Return by how many microseconds a GEMM is later that scatters single elements of D, of shape (problems, 1).

    That is where lines of D are aligned to one element, and the kernel computes D and not its transpose.
    """
    m, n, _, gemms = Extents.of(problems)
    return _SCATTERED * m * n * gemms * 1e-6


def _rows(extent: Floats, line: Extent, element_bytes: int) -> Floats:
    """Return how many times more rows an operand's tile is copied in than in rows of 128 bytes.

    Where its lines in memory have its own extent and not K, a row is as wide as a swizzled layout that divides it: a
    tile of 176 columns goes in rows of 16.
    """
    if line == "k":
        return np.ones_like(extent)
    widest = arch.SWIZZLE_BYTES[0]
    rows = np.full_like(extent, widest / arch.UNSWIZZLED_BYTES)
    for width in reversed(arch.SWIZZLE_BYTES):
        rows = np.where(extent * element_bytes % width == 0, widest / width, rows)
    return rows


def _requests(lines_are_odd: Flags, sharing: Floats) -> Floats:
    """Return how many requests a block makes of the L2 cache for each 128 bytes of an operand.

    Parameters
    ----------
    lines_are_odd : array
        Whether its lines in memory are :func:`cutlass_ops.kinds.traits.odd`.
    sharing : array
        The blocks that a multicast serves, which ask in turn.
    """
    return np.where(lines_are_odd, np.where(sharing > 1, _LINES_ASKED, _HALVES_ASKED), 1.0) / sharing


def predict(config: Sm90Config, problem: Problem, chip: Costs = H100, element_bytes: int = 2) -> float:
    """Return one kernel's time in microseconds; :func:`times` for one configuration and problem."""
    return times(Batch.of([config]), [problem], chip, element_bytes).item()


def _split(batch: Batch, cover: Grid, chip: Costs) -> tuple[Floats, Floats]:
    """Return how many tiles' K steps each multiprocessor takes, and stream-K's microseconds for adding up.

    CUTLASS splits no tile where there are fewer than a wave and more than half of one.
    """
    filled = cover.tiles / chip.multiprocessors
    splits = batch.stream_k & ((filled <= 0.5) | (filled > 1))
    whole = np.where(batch.stream_k, 1.0, cover.waves)
    # Many parts of a tile wait for each other.
    adding_up = chip.split * batch.wgmma_m * batch.wgmma_n / 128**2 * np.maximum(1 / filled, 1)
    return np.where(splits, filled, whole), np.where(splits, adding_up, 0.0)


def _per_schedule(batch: Batch, each: PerSchedule) -> Floats:
    return np.array([each.of(s) for s in SCHEDULES], np.float64)[batch.schedule]


def _soft_max(*values: Floats, sharpness: float = _SHARPNESS) -> Floats:
    total = np.zeros(())
    for value in values:
        total = total + value**sharpness
    return np.asarray(total ** (1 / sharpness))


def _ceil(x: Floats, y: Floats) -> Floats:
    return np.ceil(x / y)
