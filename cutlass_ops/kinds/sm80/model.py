"""How long an Sm80 kernel takes, roughly, from its configuration.

A fit by ``benchmarks/fit_sm80.py`` to what ``benchmarks/sweep_sm80.py`` measured on an H100, at problems whose lines
are aligned to one or two elements. Lines aligned to 8 and 16 bytes were not measured, nor were other chips.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cutlass_ops.base import arch
from cutlass_ops.declare.config import Sm80Config
from cutlass_ops.declare.device import Device
from cutlass_ops.declare.problem import Problem
from cutlass_ops.kinds.arrays import Extents, Flags, Floats
from cutlass_ops.kinds.traits import Traits

_SHARPNESS = 4
# As in the model of Sm90: what padding costs where memory is all that kernels wait for.
_PADDING, _MOST_PADDING = 0.01, 4.0


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
    problem: Problem,
    multiprocessors: int,
    alignment: int = 8,
    costs: Costs = H100,
    element_bytes: int = 2,
    target: str = "sm_90",
) -> float:
    """Return one kernel's time in microseconds; :func:`times` for one configuration and problem."""
    return times([config], [problem], multiprocessors, alignment, costs, element_bytes, target).item()


def times(
    configs: Sequence[Sm80Config],
    problems: Sequence[Problem],
    multiprocessors: int,
    alignment: int = 8,
    costs: Costs = H100,
    element_bytes: int = 2,
    target: str = "sm_90",
) -> Floats:
    """Return kernels' times in microseconds, of shape (problems, configurations).

    Parameters
    ----------
    configs : sequence of Sm80Config
        Legal configurations.
    problems : sequence of Problem
        Each extent at least 1.
    multiprocessors : int
        How many there are.
    alignment : int
        Elements to which the lines of A and B are aligned: 1, 2, 4 or 8.
    costs : Costs
        Where they run.
    element_bytes : int
        Width of an operand's element.
    target : str
        For which machine: how many thread blocks its multiprocessors hold.
    """
    m, n, k, gemms = Extents.of(problems)
    each = [(*_numbers(c), resident(c, costs, element_bytes, target)) for c in configs]
    tile_m, tile_n, tile_k, warps, stages, split, blocks = np.array(each, np.float64).reshape(-1, 7).T
    rows = np.ceil(m / tile_m)
    tiles, steps = gemms * rows * np.ceil(n / tile_n), np.ceil(k / tile_k)
    compute = tile_m * tile_n * tile_k / costs.products * (1 + costs.small_warps * 32 * 32 / warps)
    loads = costs.loads if alignment == 1 else costs.wide_loads * alignment / 2
    step = _soft_max(compute, (tile_m + tile_n) * tile_k / loads)
    hidden = np.maximum(1, stages - 1) ** costs.stages
    latency = (costs.latency if alignment == 1 else costs.wide_latency) / hidden
    slots = multiprocessors * blocks
    full_step = np.maximum(blocks * step, latency)

    by_stream_k = tiles * steps / slots * full_step + costs.adding_up * 1e3 * tile_m * tile_n / 128**2
    full = tiles // slots
    rest = tiles - full * slots
    last_step = np.maximum(np.ceil(rest / multiprocessors) * step, latency)
    by_tile = full * steps * full_step + np.where(rest > 0, steps * last_step, 0.0)
    by_tile = by_tile + (full + (rest > 0)) * tile_m * tile_n * costs.store
    work = np.where(split > 0, by_stream_k, by_tile)

    memory = element_bytes * gemms * (m * k + k * n + m * n) / costs.dram
    # Among kernels that all wait for memory, the one with the least padding wins.
    padding = 1 + _PADDING * (np.minimum(_MOST_PADDING, rows * tile_m / m) - 1)
    return np.asarray((_soft_max(work, memory) / 1e3 + costs.launch) * padding)


def _numbers(config: Sm80Config) -> tuple[float, ...]:
    """Return the sides of a thread block's tile, the size of a warp's, the stages, and whether tiles are split."""
    tile, warp = config.threadblock, config.warp
    return tile.m, tile.n, tile.k, warp.m * warp.n, config.stages, config.stream_k


def resident(config: Sm80Config, costs: Costs = H100, element_bytes: int = 2, target: str = "sm_90") -> int:
    """Return about how many thread blocks a multiprocessor of a target holds."""
    machine = arch.target(target)
    tile, threads = config.threadblock, config.warps * arch.WARP
    shared = config.stages * (tile.m + tile.n) * tile.k * element_bytes
    accumulators = config.warp.m * config.warp.n // arch.WARP
    registers = min(arch.MAX_REGISTERS_PER_THREAD, accumulators + int(costs.registers))
    limits = (
        machine.shared_memory_per_sm // (shared + arch.KIB),
        arch.REGISTERS_PER_SM // (threads * registers),
        machine.threads_per_sm // threads,
        machine.blocks_per_sm,
    )
    return max(1, min(limits))


def _soft_max(x: Floats, y: Floats) -> Floats:
    return np.asarray((x**_SHARPNESS + y**_SHARPNESS) ** (1 / _SHARPNESS))


@dataclass(frozen=True, eq=False)
class Sm80Timer:
    """The model of some configurations for operands with some traits; see :class:`cutlass_ops.kinds.kind.Timer`."""

    configs: Sequence[Sm80Config]
    traits: Traits

    def times(self, problems: Sequence[Problem], device: Device) -> tuple[Floats, Flags]:
        """Return microseconds; their tiles have no order by GPC."""
        target = "sm_{}{}".format(*device.capability)
        alignment = min(self.traits.alignments)
        found = times(self.configs, problems, device.multiprocessors, alignment, target=target)
        return found, np.zeros_like(found, np.bool_)

    def besides(self, problems: Sequence[Problem], _: Device) -> Floats:
        """Return zeros: what these kernels do besides a GEMM is part of their times."""
        return np.zeros((len(problems), len(self.configs)))
