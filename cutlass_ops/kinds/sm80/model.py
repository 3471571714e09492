"""A rough time model of Sm80 kernels.

``benchmarks/fit_sm80.py`` fitted it to measurements by ``benchmarks/sweep_sm80.py`` on an H100, with operands aligned
to one or two elements. Alignments of 8 and 16 bytes and other chips were not measured.
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
# Cost of padding for memory-bound kernels, as in the Sm90 model.
_PADDING, _MOST_PADDING = 0.01, 4.0


@dataclass(frozen=True)
class Costs:
    """The model's parameters of a chip.

    Attributes
    ----------
    products : float
        Multiply-adds per nanosecond of one SM.
    small_warps : float
        Relative slowdown of 32 x 32 warp tiles, which load more per product.
    loads : float
        Elements loaded per nanosecond by one SM at alignment 1.
    wide_loads : float
        The same at alignment 2; scaled in proportion for 4 and 8.
    latency, wide_latency : float
        Nanoseconds of a K step with exposed loads, at alignment 1 and above.
    stages : float
        The latency is divided by the number of stages in flight to this power.
    store : float
        Nanoseconds per element of D.
    adding_up : float
        Microseconds for stream-K to add up a tile of 128 x 128.
    launch : float
        Microseconds from one kernel to the next.
    dram : float
        Device memory bandwidth in bytes per nanosecond.
    registers : float
        Registers of a thread besides its accumulators.
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
# Bytes of an element of A and of B, and of D, in what the costs were fitted to.
_16_BITS = (2, 2)


def predict(
    config: Sm80Config,
    problem: Problem,
    multiprocessors: int,
    alignment: int = 8,
    costs: Costs = H100,
    widths: tuple[int, int] = _16_BITS,
    target: str = "sm_90",
) -> float:
    """Return :func:`times` for one configuration and one problem."""
    return times([config], [problem], multiprocessors, alignment, costs, widths, target).item()


def times(
    configs: Sequence[Sm80Config],
    problems: Sequence[Problem],
    multiprocessors: int,
    alignment: int = 8,
    costs: Costs = H100,
    widths: tuple[int, int] = _16_BITS,
    target: str = "sm_90",
) -> Floats:
    """Return kernels' times in microseconds, with shape (problems, configurations).

    Parameters
    ----------
    configs : sequence of Sm80Config
        Legal configurations.
    problems : sequence of Problem
        Each extent at least 1.
    multiprocessors : int
        Number of SMs.
    alignment : int
        Alignment of A and B in elements: 1, 2, 4 or 8.
    costs : Costs
        Parameters of the chip.
    widths : tuple of int
        Bytes of an element of A and of B, and of D.
    target : str
        Target, which limits the thread blocks on one SM.
    """
    m, n, k, gemms = Extents.of(problems)
    element_bytes, d_bytes = widths
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

    memory = gemms * (element_bytes * (m * k + k * n) + d_bytes * m * n) / costs.dram
    # Of several memory-bound kernels, prefer the one with the least padding.
    padding = 1 + _PADDING * (np.minimum(_MOST_PADDING, rows * tile_m / m) - 1)
    return np.asarray((_soft_max(work, memory) / 1e3 + costs.launch) * padding)


def _numbers(config: Sm80Config) -> tuple[float, ...]:
    """Return tile M, N and K, the warp tile's size, the stages, and whether it is stream-K."""
    tile, warp = config.threadblock, config.warp
    return tile.m, tile.n, tile.k, warp.m * warp.n, config.stages, config.stream_k


def resident(config: Sm80Config, costs: Costs = H100, element_bytes: int = _16_BITS[0], target: str = "sm_90") -> int:
    """Estimate how many thread blocks are resident on one SM of a target."""
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
    """The time model of some configurations for given traits: see :class:`cutlass_ops.kinds.kind.Timer`."""

    configs: Sequence[Sm80Config]
    traits: Traits

    def times(self, problems: Sequence[Problem], device: Device) -> tuple[Floats, Flags]:
        """Return times in microseconds. These kernels cannot order tiles by GPC."""
        target = "sm_{}{}".format(*device.capability)
        alignment = min(self.traits.alignments)
        widths = self.traits.element_bytes, self.traits.d_bytes
        found = times(self.configs, problems, device.multiprocessors, alignment, H100, widths, target)
        return found, np.zeros_like(found, np.bool_)

    def besides(self, problems: Sequence[Problem], _: Device) -> Floats:
        """Return zeros: these kernels do no separate work besides the GEMM."""
        return np.zeros((len(problems), len(self.configs)))
