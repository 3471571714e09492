"""How long an Sm80 kernel takes, roughly, from its configuration.

A fit to 1180 times on an H100 (88 kernels at 16 shapes with lines of 4097 elements and 12 with lines of 4098, the raw
data in ``benchmarks/results/sweep_sm80_h100.json``): the first choice is within 8% of the fastest kernel on average,
the best of the first eight within 1%. Lines aligned to 8 and 16 bytes were not measured, nor were other chips.
"""

from __future__ import annotations

import math

from cutlass_ops import arch
from cutlass_ops.config import Sm80Config

# Products of one multiprocessor in a nanosecond, and what warp tiles smaller than 64 x 64 add, which load more often.
_PRODUCTS = 1065.0
_SMALL_WARPS = 0.28
# Elements that one multiprocessor loads in a nanosecond, by the alignment of the operands in elements.
_LOADS = {1: 9.5, 2: 16.3, 4: 32.0, 8: 64.0}
# Nanoseconds of a K step whose loads nothing hides, by alignment, and how stages help.
_LATENCY = {1: 1120.0, 2: 660.0, 4: 660.0, 8: 660.0}
_STAGES = 0.37
# Nanoseconds for an element of D, microseconds for stream-K's adding up, from one kernel to the next.
_STORE = 0.245
_ADDING_UP = 26.0
_LAUNCH = 3.05
_BYTES = 2618.0  # from device memory in a nanosecond
_SHARPNESS = 4
_REGISTERS_BESIDES = 115  # of a thread, besides its accumulators


def predict(
    config: Sm80Config, problem: tuple[int, int, int], multiprocessors: int, alignment: int = 8, element_bytes: int = 2
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
    element_bytes : int
        Width of an operand's element.
    """
    m, n, k = problem
    tile, warp = config.threadblock, config.warp
    blocks = resident(config, element_bytes)
    tiles, steps = math.ceil(m / tile.m) * math.ceil(n / tile.n), math.ceil(k / tile.k)
    compute = tile.m * tile.n * tile.k / _PRODUCTS * (1 + _SMALL_WARPS * 32 * 32 / (warp.m * warp.n))
    step = _soft_max(compute, (tile.m + tile.n) * tile.k / _LOADS[alignment])
    latency = _LATENCY[alignment] / max(1, config.stages - 1) ** _STAGES
    slots = multiprocessors * blocks
    if config.stream_k:
        work = tiles * steps / slots * max(blocks * step, latency) + _ADDING_UP * 1e3
    else:
        full, rest = divmod(tiles, slots)
        work = full * steps * max(blocks * step, latency)
        if rest:
            work += steps * max(math.ceil(rest / multiprocessors) * step, latency)
        work += (full + (rest > 0)) * tile.m * tile.n * _STORE
    memory = element_bytes * (m * k + k * n + m * n) / _BYTES
    # Among kernels that all wait for memory, the one with the least padding wins.
    padding = 1 + 0.01 * (min(4.0, math.ceil(m / tile.m) * tile.m / m) - 1)
    return (_soft_max(work, memory) / 1e3 + _LAUNCH) * padding


def resident(config: Sm80Config, element_bytes: int = 2) -> int:
    """Return how many thread blocks a multiprocessor of an H100 holds."""
    tile, threads = config.threadblock, config.warps * arch.WARP
    shared = config.stages * (tile.m + tile.n) * tile.k * element_bytes
    accumulators = config.warp.m * config.warp.n // arch.WARP
    registers = min(arch.MAX_REGISTERS_PER_THREAD, accumulators + _REGISTERS_BESIDES)
    memory = arch.target("sm_90").shared_memory
    return max(1, min(memory // shared, arch.REGISTERS_PER_SM // (threads * registers), 2048 // threads))


def _soft_max(x: float, y: float) -> float:
    return float((x**_SHARPNESS + y**_SHARPNESS) ** (1 / _SHARPNESS))
