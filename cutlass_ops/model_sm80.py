"""How long an Sm80 kernel takes, roughly, from its configuration.

A fit by ``benchmarks/fit_sm80.py`` to what ``benchmarks/sweep_sm80.py`` measured on an H100, at problems whose lines
are aligned to one or two elements. Lines aligned to 8 and 16 bytes were not measured, nor were other chips.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from cutlass_ops import arch
from cutlass_ops.config import Sm80Config

_SHARPNESS = 4
_MAX_THREADS_PER_SM = 2048


@dataclass(frozen=True)
class Costs:
    """What the model knows of a chip.

    Attributes
    ----------
    products : float
        Of one multiprocessor in a nanosecond.
    small_warps : float
        Part by which warps' tiles of 32 x 32 are slower: they load more for each product.
    loads : float
        Elements aligned to one that a multiprocessor loads in a nanosecond.
    wide_loads : float
        The same for elements aligned to two; four and eight are reckoned in proportion.
    latency, wide_latency : float
        Nanoseconds of a K step whose loads nothing hides, for elements aligned to one and to more.
    stages : float
        Power of the number of stages in flight by which they hide it.
    store : float
        Nanoseconds for an element of D.
    adding_up : float
        Microseconds in which stream-K adds up tiles of 128 x 128.
    launch : float
        Microseconds from one kernel to the next.
    dram : float
        Bytes from device memory in a nanosecond.
    registers : float
        Of a thread, besides its accumulators.
    """

    products: float = 1188.0
    small_warps: float = 0.549
    loads: float = 9.1
    wide_loads: float = 16.8
    latency: float = 1203.0
    wide_latency: float = 676.0
    stages: float = 0.578
    store: float = 0.162
    adding_up: float = 13.7
    launch: float = 6.97
    dram: float = 2576.0
    registers: float = 126.0


H100 = Costs()


def predict(
    config: Sm80Config,
    problem: tuple[int, int, int],
    multiprocessors: int,
    alignment: int = 8,
    costs: Costs = H100,
    element_bytes: int = 2,
) -> float:
    """Return a kernel's time in microseconds.

    Parameters
    ----------
    config : Sm80Config
        A legal configuration.
    problem : tuple of int
        M, N and K, each at least 1.
    multiprocessors : int
        How many there are.
    alignment : int
        Elements to which the lines of A and B are aligned: 1, 2, 4 or 8.
    costs : Costs
        Where it runs.
    element_bytes : int
        Width of an operand's element.
    """
    m, n, k = problem
    tile, warp = config.threadblock, config.warp
    blocks = resident(config, costs, element_bytes)
    tiles, steps = math.ceil(m / tile.m) * math.ceil(n / tile.n), math.ceil(k / tile.k)
    compute = tile.m * tile.n * tile.k / costs.products * (1 + costs.small_warps * 32 * 32 / (warp.m * warp.n))
    loads = costs.loads if alignment == 1 else costs.wide_loads * alignment / 2
    step = _soft_max(compute, (tile.m + tile.n) * tile.k / loads)
    latency = (costs.latency if alignment == 1 else costs.wide_latency) / max(1, config.stages - 1) ** costs.stages
    slots = multiprocessors * blocks
    if config.stream_k:
        work = tiles * steps / slots * max(blocks * step, latency) + costs.adding_up * 1e3 * tile.m * tile.n / 128**2
    else:
        full, rest = divmod(tiles, slots)
        work = full * steps * max(blocks * step, latency)
        if rest:
            work += steps * max(math.ceil(rest / multiprocessors) * step, latency)
        work += (full + (rest > 0)) * tile.m * tile.n * costs.store
    memory = element_bytes * (m * k + k * n + m * n) / costs.dram
    # Among kernels that all wait for memory, the one with the least padding wins.
    padding = 1 + 0.01 * (min(4.0, math.ceil(m / tile.m) * tile.m / m) - 1)
    return (_soft_max(work, memory) / 1e3 + costs.launch) * padding


def resident(config: Sm80Config, costs: Costs = H100, element_bytes: int = 2) -> int:
    """Return about how many thread blocks a multiprocessor of an H100 holds."""
    tile, threads = config.threadblock, config.warps * arch.WARP
    shared = config.stages * (tile.m + tile.n) * tile.k * element_bytes
    accumulators = config.warp.m * config.warp.n // arch.WARP
    registers = min(arch.MAX_REGISTERS_PER_THREAD, accumulators + int(costs.registers))
    limits = (
        arch.target("sm_90").shared_memory // shared,
        arch.REGISTERS_PER_SM // (threads * registers),
        _MAX_THREADS_PER_SM // threads,
    )
    return max(1, min(limits))


def _soft_max(x: float, y: float) -> float:
    return float((x**_SHARPNESS + y**_SHARPNESS) ** (1 / _SHARPNESS))
