"""How long an Sm90 kernel takes, from its configuration and a chip's few numbers.

The model ranks configurations before any of them is compiled: of those that it puts first, eight a shape nearly always
hold the fastest (``tests/unit/test_model.py`` says how nearly, over the sweeps in ``benchmarks/results``). Its numbers
are a fit to those sweeps by ``benchmarks/fit_model.py``; a predicted time is no promise. It is blind to two things that
the sweeps show little of: the K extent of a tile, and the orientation of a large one.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp

from cutlass_ops import arch
from cutlass_ops.config import Schedule, Sm90Config

# A soft maximum: limits that are nearly reached together cost more than either.
_SHARPNESS = 8

# What bounds an instruction's clocks: its products, or reading both operands from shared memory.
_PRODUCTS_PER_CLOCK = 2048
_SHARED_BYTES_PER_CLOCK = 128


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
class Chip:
    """What the model knows of a chip.

    Attributes
    ----------
    multiprocessors : int
        How many there are.
    multiprocessors_in_fours : int
        How many clusters of four and more can use at once: they do not span processing clusters.
    clock : float
        Tensor Cores' clock under a short load, in GHz.
    fill : float
        Bytes a nanosecond that one multiprocessor takes into shared memory.
    l2 : float
        Bytes a nanosecond that all of them read from the L2 cache.
    dram : float
        Bytes a nanosecond from device memory, as kernels reach it.
    dram_peak : float
        The same by the memory's clock and width: no kernel reaches it.
    launch : float
        Microseconds from one kernel to the next, with its first loads.
    cluster : float
        Microseconds that blocks of a cluster wait for each other at their start.
    throttle : float
        By what part a long kernel is slower than a short one: power and heat lower the clock.
    throttle_after : float
        Microseconds in which most of that shows.
    reread : float
        Part of B that each further row of tiles reads from device memory again.
    merge : float
        How many reads of one operand become one where a GPC takes a run of tiles.
    alone : float
        Microseconds more for a launch that does not overlap with the kernel before it.
    split : float
        Microseconds for adding up the parts of a tile of 128 x 128 that stream-K has split.
    exchange : float
        Microseconds in which the blocks of a cluster that split K add up their parts: reckoned, not fitted yet.
    serial : float
        By what part each further wave of a kernel that is not persistent is slower: its tiles have no order.
    efficiency : PerSchedule
        Factor on the Tensor Cores' time.
    epilogue : PerSchedule
        Microseconds for an epilogue of 128 x 128 that nothing hides.
    """

    multiprocessors: int
    multiprocessors_in_fours: int
    clock: float
    fill: float
    l2: float
    dram: float
    dram_peak: float
    launch: float
    cluster: float
    throttle: float
    throttle_after: float
    reread: float
    merge: float
    alone: float
    split: float
    exchange: float
    serial: float
    efficiency: PerSchedule
    epilogue: PerSchedule


H100 = Chip(
    multiprocessors=132,
    multiprocessors_in_fours=120,
    clock=1.66,
    fill=121.0,
    l2=11280.0,
    dram=2733.0,
    dram_peak=3352.0,
    launch=1.82,
    cluster=0.38,
    throttle=0.207,
    throttle_after=150.0,
    reread=0.126,
    merge=2.0,
    alone=1.0,
    split=9.0,
    exchange=1.5,
    serial=0.0177,
    efficiency=PerSchedule(warp_specialized=0.879, pingpong=1.031, cooperative=1.061),
    epilogue=PerSchedule(warp_specialized=1.68, pingpong=1.11, cooperative=0.80),
)


# Dense FP16 or BF16 products of one multiprocessor, and an H100's highest clock in GHz: 989 TFLOP/s with 132 of them.
_FLOP_PER_CLOCK = 4096
_BOOST = 1.83


@dataclass(frozen=True)
class Roofline:
    """What a problem takes at least, whatever the kernel, in microseconds.

    Attributes
    ----------
    compute : float
        Its products at the Tensor Cores' peak.
    memory : float
        Its operands and D once through device memory, at the memory's peak.
    launch : float
        From one kernel to the next.
    """

    compute: float
    memory: float
    launch: float

    @property
    def bound(self) -> str:
        """What weighs most: ``"compute"``, ``"memory"`` or ``"launch"``."""
        return max(("compute", "memory", "launch"), key=lambda name: float(getattr(self, name)))


def roofline(problem: tuple[int, int, int], chip: Chip, operand_bytes: int, moved_bytes: int) -> Roofline:
    """Return what a problem takes at least.

    Parameters
    ----------
    problem : tuple of int
        M, N and K.
    chip : Chip
        Where it runs.
    operand_bytes : int
        Width of an operand's element: 2.
    moved_bytes : int
        Bytes of all operands, inputs and outputs.
    """
    m, n, k = problem
    peak = chip.multiprocessors * _FLOP_PER_CLOCK * _BOOST * 1e3 * 2 / operand_bytes
    return Roofline(2 * m * n * k / peak, moved_bytes / (chip.dram_peak * 1e3), chip.launch)


@dataclass(frozen=True)
class Grid:
    """How a configuration covers a problem.

    Attributes
    ----------
    rows, columns : int
        Tiles along the problem's M and N, whole clusters.
    steps : int
        K steps of a thread block at a tile.
    waves : int
        How often the multiprocessors take a tile.
    active : int
        How many of them take one in a full wave.
    """

    rows: int
    columns: int
    steps: int
    waves: int
    active: int


def grid(config: Sm90Config, problem: tuple[int, int, int], chip: Chip) -> Grid:
    """Return how a configuration covers a problem of M, N and K."""
    (tile_m, tile_n), (cluster_m, cluster_n) = along_problem(config)
    m, n, k = problem
    rows = _ceil(_ceil(m, tile_m), cluster_m) * cluster_m
    columns = _ceil(_ceil(n, tile_n), cluster_n) * cluster_n
    slots = chip.multiprocessors if cluster_m * cluster_n * config.split_k <= 2 else chip.multiprocessors_in_fours
    blocks = rows * columns * config.split_k
    steps = _ceil(_ceil(k, config.threadblock.k), config.split_k)
    return Grid(rows, columns, steps, _ceil(blocks, slots), min(blocks, slots))


def predict(config: Sm90Config, problem: tuple[int, int, int], chip: Chip = H100, element_bytes: int = 2) -> float:
    """Return a kernel's time in microseconds.

    Parameters
    ----------
    config : Sm90Config
        A legal configuration.
    problem : tuple of int
        M, N and K, each at least 1.
    chip : Chip
        Where it runs.
    element_bytes : int
        Width of an operand's element.
    """
    m, n, k = problem
    (tile_m, tile_n), (cluster_m, cluster_n) = along_problem(config)
    shape, schedule, cover = config.threadblock, config.schedule, grid(config, problem, chip)

    # One K step of one tile, in microseconds.
    instructions = shape.m / arch.WGMMA_M * shape.k * element_bytes / arch.WGMMA_K_BYTES
    products = 64 * shape.n * 16 / _PRODUCTS_PER_CLOCK
    operands = (64 + shape.n) * arch.WGMMA_K_BYTES / _SHARED_BYTES_PER_CLOCK
    compute = instructions * max(products, operands) * chip.efficiency.of(schedule) / (chip.clock * 1e3)
    row_bytes = shape.k * element_bytes
    fill = (tile_m + tile_n) * row_bytes / (chip.fill * 1e3)
    # A tile of A is read once for the blocks of a cluster along N, one of B for those along M. Without such a
    # multicast, a GPC that takes a run of tiles reads it once for several.
    merge = chip.merge if config.by_gpc else 1.0
    reads_a = tile_m / (cluster_n if cluster_n > 1 else merge)
    reads_b = tile_n / (cluster_m if cluster_m > 1 else merge)
    active = chip.multiprocessors if config.scheduler == "stream_k" else cover.active
    shared = (reads_a + reads_b) * row_bytes * active / (chip.l2 * 1e3)
    step = _soft_max(compute, fill, shared)
    if schedule == "warp_specialized":
        step *= 1 + chip.serial * min(cover.waves - 1, 6)

    exposed = 1 if schedule == "pingpong" else cover.waves
    waves, split = (float(cover.waves), 0.0) if config.scheduler == "persistent" else _split(config, cover, chip)
    part = config.part
    busy = waves * cover.steps * step + exposed * chip.epilogue.of(schedule) * part.m * part.n / 128**2 + split
    busy *= 1 + chip.throttle * (1 - exp(-busy / chip.throttle_after))

    rereads = 1 + chip.reread * min(cover.rows / cluster_m - 1, 5)
    memory = element_bytes * (m * k + k * n * rereads + m * n) / (chip.dram * 1e3)
    # Among kernels that all wait for memory, the one with the least padding wins.
    padding = 1 + 0.01 * (min(cover.rows * tile_m / m, 4) - 1)
    start = chip.launch + (chip.cluster if cluster_m * cluster_n * config.split_k > 1 else 0.0)
    if config.split_k > 1:
        start += chip.exchange
    if config.by_gpc or config.scheduler == "stream_k":
        start += chip.alone
    return (_soft_max(busy, memory) + start) * padding


def _split(config: Sm90Config, cover: Grid, chip: Chip) -> tuple[float, float]:
    """Return how many tiles' K steps each multiprocessor takes with stream-K, and the microseconds for adding up.

    CUTLASS splits no tile where there are fewer than a wave and more than half of one.
    """
    waves = cover.rows * cover.columns / chip.multiprocessors
    if 0.5 < waves <= 1:
        return 1.0, 0.0
    return waves, chip.split * config.threadblock.m * config.threadblock.n / 128**2


def along_problem(config: Sm90Config) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return extents of tile and cluster along the problem's M and N."""
    tile, cluster = config.threadblock, config.cluster
    if config.swap_ab:
        return (tile.n, tile.m), (cluster.n, cluster.m)
    return (tile.m, tile.n), (cluster.m, cluster.n)


def _soft_max(*values: float) -> float:
    return float(sum(v**_SHARPNESS for v in values) ** (1 / _SHARPNESS))


def _ceil(x: int, y: int) -> int:
    return -(-x // y)
