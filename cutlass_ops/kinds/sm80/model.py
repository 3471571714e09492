"""A rough time model of Sm80 kernels.

``benchmarks/fit_sm80.py`` fitted it to measurements by ``benchmarks/sweep_sm80.py`` on an H100, with operands aligned
to one or two elements. Alignments of 8 and 16 bytes and other chips were not measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from cutlass_ops.base import arch
from cutlass_ops.declare.chips import CHIPS, USUAL, peaks_of
from cutlass_ops.declare.device import Device
from cutlass_ops.declare.problem import Problem
from cutlass_ops.kinds.arrays import Extents, Flags, Floats, Problems, columns
from cutlass_ops.kinds.sm80.config import Sm80Config
from cutlass_ops.kinds.traits import PlainTimer

_SHARPNESS = 4
# Cost of padding for memory-bound kernels, as in the Sm90 model.
_PADDING, _MOST_PADDING = 0.01, 4.0


@dataclass(frozen=True)
class Costs:
    """The model's parameters of a chip."""

    products: float = 1188.0  # multiply-adds per nanosecond of one SM
    small_warps: float = 0.549  # relative slowdown of 32 x 32 warp tiles, which load more per product
    loads: float = 9.1  # elements loaded per nanosecond by one SM at alignment 1
    wide_loads: float = 16.8  # the same at alignment 2; scaled in proportion for 4 and 8
    # Nanoseconds of a K step with exposed loads, at alignment 1 and above
    latency: float = 1203.0
    wide_latency: float = 676.0
    stages: float = 0.578  # the latency is divided by the number of stages in flight to this power
    store: float = 0.162  # nanoseconds per element of D
    adding_up: float = 13.7  # microseconds for stream-K to add up a tile of 128 x 128
    launch: float = 6.97  # microseconds from one kernel to the next
    dram: float = 2576.0  # device memory bandwidth in bytes per nanosecond
    registers: float = 126.0  # registers of a thread besides its accumulators


H100 = Costs()
# Elements of so many bytes of A and B are FP64, of which sums have twice the size. Their costs are fitted to
# `benchmarks/results/sweep_fp64_h200.json` by `benchmarks/fit_sm80.py`: the first choice takes 1.013 times the best of
# 42 kernels on average.
_FP64 = 8
# With one block a multiprocessor, CUTLASS has a tile's blocks add up in turn. Up to so many count as adding up beside
# each other.
_BESIDE = 4
H100_FP64 = Costs(
    products=208.1,
    small_warps=0.126,
    loads=10.8,
    wide_loads=15.2,
    latency=1331.0,
    wide_latency=118.0,
    stages=1.025,
    store=0.342,
    adding_up=10.3,
    launch=0.0034,
    dram=3691.0,
    registers=178.0,
)
# The chips of which these costs are; those of FP64 were measured on the second, those of 16 bits on the first.
_MEASURED = (USUAL.name, "NVIDIA H200")
# Of Hopper's peak, which is that of wgmma, mma.sync reaches half at most; of the other chips' peaks, all.
_OF_MMA_SYNC = 2.0
# Microseconds that a call spares the host, and that the GPU would wait for, if its kernel reads misaligned operands as
# they are instead of copies: memory for these and a launch (`benchmarks/bench_host.py`). Of a time, at most this part
# counts: back to back, small problems took 0.3 to 0.45 of the model's times, which are fitted to larger ones. It counts
# whole up to the first of the following times, where the GPU waits, and not at all from the second. Stream-K needs
# memory as well, and operands of batches are never copied.
_SPARED, _MOST_SPARED = 8.0, 0.6
_GPU_WAITS, _HOST_WAITS = 12.5, 25.0
# Bytes of an element of A and of B, and of D, in what the costs were fitted to.
_16_BITS = (2, 2)
# TF32, which has this rate, takes less than a model says that was fitted to misaligned operands of 16 bits: with this
# part of its work, the mean of `benchmarks/results/types_h200.json` comes out, of problems that memory does not bound.
# It was measured on Hopper, where these kernels are compared with those of wgmma that copy operands.
_RATE_OF_TF32, _SHARE_OF_TF32 = 0.5, 0.69


def costs_of(device: Device, element_bytes: float = _16_BITS[0]) -> Costs:
    """Return a device's parameters for elements of so many bytes: those measured, scaled by the peaks of its chip."""
    double = element_bytes == _FP64
    costs = H100_FP64 if double else H100
    if device.name in _MEASURED or device.name not in CHIPS:
        return costs
    peaks, measured = peaks_of(device.name), peaks_of(_MEASURED[double])
    products = peaks.products if double or device.has_tma else _OF_MMA_SYNC * peaks.products
    return replace(costs, products=costs.products * products, dram=costs.dram * peaks.memory / measured.memory)


def predict(
    config: Sm80Config,
    problem: Problem,
    multiprocessors: int,
    alignment: int = 8,
    costs: Costs | None = None,
    widths: tuple[float, float] = _16_BITS,
    target: str = "sm_90",
    rate: float = 1.0,
) -> float:
    """Return :func:`times` for one configuration and one problem."""
    return times(Blocks.of([config]), [problem], multiprocessors, alignment, costs, widths, target, rate).item()


class Blocks(NamedTuple):
    """The thread blocks of some configurations, as arrays of shape (1, configurations)."""

    # Extents of a tile
    tile_m: Floats
    tile_n: Floats
    tile_k: Floats
    # Elements of a warp's tile, and the number of warps
    warp: Floats
    warps: Floats
    # Stages of the main loop, and 1 for stream-K
    stages: Floats
    stream_k: Floats

    @classmethod
    def of(cls, configs: Sequence[Sm80Config]) -> Blocks:
        """Return those of some configurations."""
        return cls(*columns([_numbers(c) for c in configs], len(cls._fields)))


def times(
    blocks_of: Blocks,
    problems: Problems,
    multiprocessors: int,
    alignment: int = 8,
    costs: Costs | None = None,
    widths: tuple[float, float] = _16_BITS,
    target: str = "sm_90",
    rate: float = 1.0,
    work_share: float = 1.0,
) -> Floats:
    """Return kernels' times in microseconds, with shape (problems, configurations).

    Configurations are legal, and each extent is at least 1. `alignment` is that of A and B in elements, `widths` are
    the bytes of an element of A and B, and of D. `rate` is the throughput of products relative to 16 bits; FP64 has
    costs of its own. `work_share` is the part that the SMs' work really takes of what the costs say.
    """
    m, n, k, gemms = Extents.of(problems)
    tile_m, tile_n, tile_k, warp, _, stages, split = blocks_of
    element_bytes, d_bytes = widths
    double = element_bytes == _FP64
    costs = costs or (H100_FP64 if double else H100)
    blocks = _resident(blocks_of, costs, element_bytes, target)
    rows = np.ceil(m / tile_m)
    tiles, steps = gemms * rows * np.ceil(n / tile_n), np.ceil(k / tile_k)
    # Costs are those of 16 bits. Elements of twice the size count as two, and alignment counts in bytes. Of FP64, one
    # element is copied at a time.
    width = element_bytes / _16_BITS[0]
    of_16_bits = max(1.0, (1 if double else alignment) * width // 1)
    slower = 1.0 if double else 1 / rate
    compute = slower * tile_m * tile_n * tile_k / costs.products * (1 + costs.small_warps * 32 * 32 / warp)
    loads = costs.loads if of_16_bits == 1 else costs.wide_loads * of_16_bits / 2
    step = _soft_max(compute, width * (tile_m + tile_n) * tile_k / loads)
    hidden = np.maximum(1, stages - 1) ** costs.stages
    latency = (costs.latency if of_16_bits == 1 else costs.wide_latency) / hidden
    slots = multiprocessors * blocks
    full_step = np.maximum(blocks * step, latency)

    adding_up = costs.adding_up * 1e3 * tile_m * tile_n / 128**2
    if double:  # else the costs were fitted without it
        adding_up = adding_up * np.where(blocks == 1, np.maximum(1, slots / tiles / _BESIDE), 1)
    by_stream_k = tiles * steps / slots * full_step + adding_up
    full = tiles // slots
    rest = tiles - full * slots
    last_step = np.maximum(np.ceil(rest / multiprocessors) * step, latency)
    by_tile = full * steps * full_step + np.where(rest > 0, steps * last_step, 0.0)
    by_tile = by_tile + (full + (rest > 0)) * tile_m * tile_n * costs.store
    work = work_share * np.where(split > 0, by_stream_k, by_tile)

    memory = gemms * (element_bytes * (m * k + k * n) + d_bytes * m * n) / costs.dram
    # Of several memory-bound kernels, prefer the one with the least padding.
    padding = 1 + _PADDING * (np.minimum(_MOST_PADDING, rows * tile_m / m) - 1)
    return np.asarray((_soft_max(work, memory) / 1e3 + costs.launch) * padding)


def _numbers(config: Sm80Config) -> tuple[float, ...]:
    """Return a configuration's numbers in the order of :class:`Blocks`."""
    tile, warp = config.threadblock, config.warp
    return tile.m, tile.n, tile.k, warp.m * warp.n, config.warps, config.stages, config.stream_k


def resident(config: Sm80Config, costs: Costs = H100, element_bytes: float = _16_BITS[0], target: str = "sm_90") -> int:
    """Estimate how many thread blocks are resident on one SM of a target."""
    return int(_resident(Blocks.of([config]), costs, element_bytes, target).item())


def _resident(blocks: Blocks, costs: Costs, element_bytes: float, target: str) -> Floats:
    machine = arch.target(target)
    threads = blocks.warps * arch.WARP
    shared = blocks.stages * (blocks.tile_m + blocks.tile_n) * blocks.tile_k * element_bytes
    accumulators = blocks.warp // arch.WARP * (2 if element_bytes == _FP64 else 1)
    registers = np.minimum(arch.MAX_REGISTERS_PER_THREAD, accumulators + int(costs.registers))
    by_memory = machine.shared_memory_per_sm // (shared + arch.KIB)
    by_registers = arch.REGISTERS_PER_SM // (threads * registers)
    fewest = np.minimum(np.minimum(by_memory, by_registers), machine.threads_per_sm // threads)
    return np.asarray(np.maximum(1, np.minimum(fewest, machine.blocks_per_sm)))


def _soft_max(x: Floats, y: Floats) -> Floats:
    return np.asarray((x**_SHARPNESS + y**_SHARPNESS) ** (1 / _SHARPNESS))


class Sm80Timer(PlainTimer):
    """The time model of some configurations for given traits: see :class:`cutlass_ops.kinds.kind.Timer`."""

    made_by = Blocks

    def times(self, problems: Problems, device: Device) -> tuple[Floats, Flags]:
        """Return times in microseconds. These kernels cannot order tiles by GPC."""
        target = "sm_{}{}".format(*device.capability)
        alignment = min(self.traits.alignments)
        widths = self.traits.element_bytes, self.traits.d_bytes
        rate, sms = self.traits.rate, device.multiprocessors
        share = _SHARE_OF_TF32 if device.has_tma and rate == _RATE_OF_TF32 else 1.0
        costs = costs_of(device, widths[0])
        found = times(self.blocks, problems, sms, alignment, costs, widths, target, rate, share)
        if device.has_tma and any(self.traits.copied):
            waits = np.clip((_HOST_WAITS - found) / (_HOST_WAITS - _GPU_WAITS), 0, 1)
            spares = (self.blocks.stream_k == 0) & (Extents.of(problems).gemms == 1)
            found = found - waits * np.minimum(_SPARED, _MOST_SPARED * found) * spares
        return found, np.zeros_like(found, np.bool_)
