"""What is known of a configuration without measuring: how long it may take, and the best order of its tiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from cutlass_ops import arch, model
from cutlass_ops.config import Config, Raster, Sm80Config, Sm90Config, ThreadblockShape, WarpShape
from cutlass_ops.registry import OpSignature
from cutlass_ops.spec import KernelSpec, Major

Problem = tuple[int, int, int]


@dataclass(frozen=True)
class Device:
    """What the choice of a kernel needs to know of a device.

    Attributes
    ----------
    capability : tuple of int
        Compute capability.
    multiprocessors : int
        How many there are.
    name : str
        The driver's name for it, under which measurements are kept.
    """

    capability: tuple[int, int]
    multiprocessors: int
    name: str = ""

    @cached_property
    def chip(self) -> model.Chip:
        """What the cost model goes by: an H100 with as many multiprocessors."""
        fours = round(model.H100.multiprocessors_in_fours * self.multiprocessors / model.H100.multiprocessors)
        return replace(model.H100, multiprocessors=self.multiprocessors, multiprocessors_in_fours=fours)


def spec(signature: OpSignature, config: Config, device: Device) -> KernelSpec:
    """Return the kernel that serves a signature on a device with a configuration."""
    major, minor = device.capability
    target = None if isinstance(config, Sm90Config) else f"sm_{major}{minor}"
    return signature.spec(config, target)


# ---- Time --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sm80Costs:
    """Constants of an Sm80 configuration: microseconds for a K step of a wave of tiles, and for a tile besides.

    Once both A and B exceed the L2 cache, small tiles read them more often: a factor on the time.
    """

    step: float
    tile: float
    beyond_l2: float = 1.0


def _sm80(m: int, n: int, warp_m: int, warp_n: int, stages: int) -> Sm80Config:
    return Sm80Config(
        threadblock=ThreadblockShape(m, n, 32), warp=WarpShape(warp_m, warp_n, 32), stages=stages, swizzle=1
    )


_SMALL, _LARGE = _sm80(64, 64, 32, 32, 5), _sm80(128, 128, 64, 64, 4)
SM80 = (_SMALL, _LARGE)
# Operands aligned to less than 4 bytes cannot use cp.async: two stages, through registers.
SM80_UNALIGNED = tuple(replace(c, stages=2) for c in SM80)

_SM80_COSTS = {_SMALL.threadblock: _Sm80Costs(0.13, 2.0, 1.3), _LARGE.threadblock: _Sm80Costs(0.36, 3.0)}
_L2_BYTES = 50e6
_KEPT_BYTES = 40e6  # an operand up to this size stays in the L2 cache while another streams by
_BANDWIDTH = 2.9e6  # bytes a microsecond
_LAUNCH = 3.0  # microseconds from one kernel to the next, with the first loads


@dataclass(frozen=True, eq=False)
class Pool:
    """Configurations of one kind that are compared with each other.

    Attributes
    ----------
    configs : tuple of Config
        All Sm90 or all Sm80.
    majors : tuple of {"row", "col"}
        Those of A and B.
    """

    configs: tuple[Config, ...]
    majors: tuple[Major, Major] = ("row", "col")

    @property
    def _lines(self) -> tuple[model.Extent, model.Extent]:
        a, b = self.majors
        return ("k" if a == "row" else "m"), ("k" if b == "col" else "n")

    @cached_property
    def _sm90(self) -> model.Batch:
        return model.Batch.of(c for c in self.configs if isinstance(c, Sm90Config))

    @cached_property
    def _by_gpc(self) -> model.Batch:
        return model.Batch.of(replace(c, by_gpc=True) for c in self._sm90.configs)

    @cached_property
    def _ordered(self) -> Tensor:
        return torch.tensor([[c.ordered for c in self._sm90.configs]])

    @cached_property
    def _swapped(self) -> Tensor:
        return torch.tensor([[c.swap_ab for c in self._sm90.configs]])

    def times(self, problems: Sequence[Problem], device: Device) -> Tensor:
        """Return times in microseconds, good for comparing, of shape (problems, configurations).

        Sm90 kernels are taken in the better of two orders of tiles, the usual one and one by GPC. Infinite where a
        kernel cannot be launched.
        """
        return self.times_and_order(problems, device)[0]

    def times_and_order(self, problems: Sequence[Problem], device: Device) -> tuple[Tensor, Tensor]:
        """Return the times, and where it is an order by GPC that takes so long."""
        if self._sm90.configs:
            usual, by_gpc = self._times_by_order(problems, device)
            return torch.minimum(usual, by_gpc), by_gpc < usual
        sm80 = [c for c in self.configs if isinstance(c, Sm80Config)]
        found = [[_predict_sm80(c, p, device.multiprocessors) for c in sm80] for p in problems]
        times = torch.tensor(found, dtype=torch.float64).reshape(len(problems), len(sm80))
        return times, torch.zeros_like(times, dtype=torch.bool)

    def tiles(self, problems: Sequence[Problem], device: Device) -> Tensor:
        """Return how many tiles cover problems, whole clusters, of shape (problems, configurations)."""
        if self._sm90.configs:
            cover = model.grid(self._sm90, problems, device.chip)
            return cover.rows * cover.columns
        sides = [c.threadblock for c in self.configs]
        found = [[_ceil(m, s.m) * _ceil(n, s.n) for s in sides] for m, n, _ in problems]
        return torch.tensor(found, dtype=torch.float64).reshape(len(problems), len(sides))

    def _times_by_order(self, problems: Sequence[Problem], device: Device) -> tuple[Tensor, Tensor]:
        never = torch.tensor(torch.inf, dtype=torch.float64)
        cover = model.grid(self._sm90, problems, device.chip)
        usual = torch.where(
            self._launchable(cover), model.times(self._sm90, problems, device.chip, lines=self._lines), never
        )
        worth = self._ordered & (cover.waves <= _WAVES_BY_GPC)
        return usual, torch.where(worth, model.times(self._by_gpc, problems, device.chip, lines=self._lines), never)

    def _launchable(self, cover: model.Grid) -> Tensor:
        """Whether the grid's second extent can be: a kernel that is not persistent has thread blocks for each tile."""
        batch = self._sm90
        second = torch.where(self._swapped, cover.rows, cover.columns)
        # Blocks that split K take the first extent, and both of the tiles' follow.
        second = torch.where(batch.split_k > 1, torch.maximum(cover.rows, cover.columns), second)
        persistent = (batch.schedule != model.SCHEDULES.index("warp_specialized")) & (batch.split_k == 1)
        return persistent | (second <= arch.MAX_GRID_Y)


def predict(config: Config, problem: Problem, device: Device) -> float:
    """Return one configuration's time in microseconds, as :meth:`Pool.times` does."""
    return float(Pool((config,)).times([problem], device))


def _predict_sm80(config: Sm80Config, problem: Problem, multiprocessors: int) -> float:
    m, n, k = problem
    tile = config.threadblock
    costs = _SM80_COSTS[tile]
    rows, columns = _ceil(m, tile.m), _ceil(n, tile.n)
    waves = _ceil(rows * columns, multiprocessors)
    time = _LAUNCH + waves * (_ceil(k, tile.k) * costs.step + costs.tile)
    if 2 * min(m * k, k * n) > _L2_BYTES:
        time *= costs.beyond_l2
    # Each row of tiles reads B again, most of it from the L2 cache.
    rereads = 1 + 0.05 * (min(rows, 5) - 1)
    floor = 2 * (m * k + k * n * rereads + m * n) / _BANDWIDTH + _LAUNCH
    # Among kernels that all wait for memory, the one with the least padding wins.
    return max(time, floor) * (1 + 0.02 * (rows * tile.m / m - 1))


# ---- Order of tiles ----------------------------------------------------------------------------------------------


_ORDERS: dict[Raster, tuple[int, ...]] = {"along_m": (1, 2), "along_n": (1, 2, 4)}
_SWIZZLES_BY_GPC = (1, 2, 4)
_WAVES_BY_GPC = 2


def with_order(config: Config, problem: Problem) -> Config:
    """Set the order in which tiles are visited.

    An operand that does not stay in the L2 cache is read from device memory once for each strip of tiles that crosses
    it: the order with the fewest such reads comes first, then the one in which neighbours share the operand that the
    cluster's multicast does not (benchmarks/NOTES.md).
    """
    if not isinstance(config, Sm90Config) or not config.ordered:
        return config
    m, n, k = (problem[1], problem[0], problem[2]) if config.swap_ab else problem
    tile, cluster = config.threadblock, config.cluster
    rows, columns = _ceil(m, tile.m * cluster.m), _ceil(n, tile.n * cluster.n)
    by_m, by_n = _reads_again(m * k, columns), _reads_again(n * k, rows)
    along_n = by_n <= by_m if cluster.m >= cluster.n else by_n < by_m
    strips = rows if along_n else columns
    return replace(config, raster="along_n" if along_n else "along_m", swizzle=2 if strips >= 8 else 1)


def _reads_again(elements: int, strips: int) -> float:
    """Return the bytes that an operand is read again from device memory, walked along once for each strip."""
    size = 2.0 * elements
    return size * (strips - 1) if size > _KEPT_BYTES else 0.0


def orders(config: Config, problem: Problem, device: Device) -> list[Config]:
    """Return a configuration with every order of its tiles that is worth measuring at a problem."""
    if not isinstance(config, Sm90Config) or not config.ordered:
        return []
    usual = [
        replace(config, raster=raster, swizzle=swizzle, by_gpc=False)
        for raster, swizzles in _ORDERS.items()
        for swizzle in swizzles
    ]
    return [*usual, *orders_by_gpc(config, problem, device)]


def orders_by_gpc(config: Config, problem: Problem, device: Device) -> list[Config]:
    """Return a configuration with the orders by GPC that are worth measuring at a problem, the likeliest first.

    Within a GPC only reads that are not multicast merge, so runs of tiles share the operand that the cluster does not.
    More than a few waves drift apart in time, and their reads with them.
    """
    if not isinstance(config, Sm90Config) or not config.ordered:
        return []
    if model.grid(model.Batch.of([config]), [problem], device.chip).waves.item() > _WAVES_BY_GPC:
        return []
    cluster = config.cluster
    rasters: tuple[Raster, ...] = ("along_m", "along_n")
    if cluster.m != cluster.n:
        rasters = ("along_n",) if cluster.m > cluster.n else ("along_m",)
    return [
        replace(config, raster=raster, swizzle=swizzle, by_gpc=True)
        for raster in rasters
        for swizzle in _SWIZZLES_BY_GPC
    ]


def _ceil(x: int, y: int) -> int:
    return -(-x // y)
