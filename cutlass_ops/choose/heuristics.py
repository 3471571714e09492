"""What is known of a configuration without measuring: how long it may take, and the best order of its tiles."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from cutlass_ops.base import arch
from cutlass_ops.base.dtypes import bf16
from cutlass_ops.declare.config import (
    SWIZZLES,
    Config,
    GemvConfig,
    Means,
    Raster,
    Sm80Config,
    Sm90Config,
    ThreadblockShape,
    WarpShape,
)
from cutlass_ops.declare.device import Device, Problem
from cutlass_ops.declare.signature import OpSignature
from cutlass_ops.declare.spec import Major
from cutlass_ops.kinds.gemv import model as model_gemv
from cutlass_ops.kinds.sm80 import model as model_sm80
from cutlass_ops.kinds.sm90 import model
from cutlass_ops.kinds.sm90.model import Flags, Floats, Places

_ALIGNED = bf16.tma_alignment  # and that of f16: operands have two bytes an element

# By the driver's names: chips that the cost models know besides an H100.
_CHIPS = {"NVIDIA H200": model.H200}
_GEMV_NUMBERS = {"NVIDIA H200": model_gemv.H200}


@lru_cache(maxsize=16)
def chip_of(device: Device) -> model.Chip:
    """Return what the cost model goes by: of a chip that it does not know, an H100, with as many multiprocessors."""
    chip = _CHIPS.get(device.name, model.H100)
    fours = round(chip.multiprocessors_in_fours * device.multiprocessors / chip.multiprocessors)
    return replace(chip, multiprocessors=device.multiprocessors, multiprocessors_in_fours=fours)


def scatters(signature: OpSignature) -> bool:
    """Whether lines of D are aligned to no more than one element, so that each is stored by itself."""
    return signature.d.alignment == 1


def weights_of(signature: OpSignature) -> int:
    """Return how many matrices a signature multiplies by A."""
    return 1 + len(signature.epilogue.products)


# Problems times configurations that are compared at once: what is computed on the way then stays in a core's cache, and
# memory is bounded, however many are asked for.
AT_ONCE = 1 << 14


# ---- Time --------------------------------------------------------------------------------------------------------


def _sm80(m: int, n: int, k: int, warp_m: int, warp_n: int, stages: int, stream_k: bool = False) -> Sm80Config:
    warp = WarpShape(warp_m, warp_n, k)
    return Sm80Config(ThreadblockShape(m, n, k), warp, stages=stages, stream_k=stream_k)


# What is chosen from where nothing was tuned: those that lose least in benchmarks/results/sweep_sm80_h100.json, where
# lines are aligned to two elements, and two deeper pipelines for wider alignments.
SM80 = (
    *(_sm80(128, 256, 32, 64, 64, 3, True), _sm80(32, 128, 64, 32, 32, 3, True), _sm80(256, 128, 64, 64, 64, 3)),
    *(_sm80(64, 256, 64, 32, 64, 3, True), _sm80(256, 128, 32, 64, 64, 3, True), _sm80(64, 64, 64, 32, 32, 3)),
    *(_sm80(64, 64, 32, 32, 32, 5), _sm80(128, 128, 32, 64, 64, 4)),
)
# For few rows, where lines are aligned to 16 bytes and K lies along them.
GEMV = (GemvConfig(1), GemvConfig(2), GemvConfig(8, 8, 4), GemvConfig(16, 8, 4))
# Operands aligned to less than 4 bytes cannot use cp.async: two stages, through registers.
SM80_UNALIGNED = (
    *(_sm80(64, 256, 64, 32, 64, 2, True), _sm80(128, 256, 32, 64, 64, 2, True), _sm80(32, 256, 32, 32, 64, 2, True)),
    *(_sm80(128, 128, 64, 64, 32, 2), _sm80(256, 128, 32, 64, 64, 2, True), _sm80(128, 128, 32, 64, 64, 2, True)),
    _sm80(64, 64, 64, 32, 32, 2),
)


@dataclass(frozen=True, eq=False)
class Pool:
    """Configurations of one kind that are compared with each other.

    Attributes
    ----------
    configs : tuple of Config
        Of any kind.
    majors : tuple of {"row", "col"}
        Those of A and B.
    alignments : tuple of int
        Elements to which the lines of A and B are aligned.
    weights : int
        How many matrices are multiplied by A. Problems count the columns of one of them.
    scatters : bool
        Whether lines of D are aligned to no more than one element.
    gathers : bool
        Whether the epilogue takes means of A's rows.
    """

    configs: tuple[Config, ...]
    majors: tuple[Major, Major] = ("row", "col")
    alignments: tuple[int, int] = (8, 8)
    weights: int = 1
    scatters: bool = False
    gathers: bool = False

    @classmethod
    def of(cls, configs: Iterable[Config], signature: OpSignature) -> Pool:
        """Return configurations that serve a signature."""
        return cls(
            tuple(configs), signature.majors, signature.alignments, weights_of(signature), scatters(signature),
            gathers=bool(signature.epilogue.gathered),
        )  # fmt: skip

    def is_like(self, signature: OpSignature) -> bool:
        """Whether a signature's operands lie in memory as those of these do."""
        theirs = signature.majors, signature.alignments, scatters(signature)
        return theirs == (self.majors, self.alignments, self.scatters)

    def whole(self, problem: Problem) -> Problem:
        """Return a problem with the columns of all weights."""
        m, n, k = problem
        return m, n * self.weights, k

    def odd(self, problems: Sequence[Problem]) -> Places:
        """Return of how many operands the lines are :func:`cutlass_ops.kinds.sm90.model.odd`, of shape (problems,)."""
        extents = np.array(problems, np.float64).reshape(-1, 3)
        return np.asarray(model.odd(extents[:, ["mnk".index(line) for line in self._lines]]).sum(1))

    @property
    def _lines(self) -> tuple[model.Extent, model.Extent]:
        a, b = self.majors
        return ("k" if a == "row" else "m"), ("k" if b == "col" else "n")

    @cached_property
    def _sm90(self) -> model.Batch:
        return model.Batch.of(c for c in self.configs if isinstance(c, Sm90Config))

    @cached_property
    def _sm80(self) -> list[Sm80Config]:
        return [c for c in self.configs if isinstance(c, Sm80Config)]

    @cached_property
    def _gemv(self) -> list[GemvConfig]:
        return [c for c in self.configs if isinstance(c, GemvConfig)]

    @cached_property
    def _places(self) -> dict[type[Config], list[int]]:
        """Where those of each kind are among all."""
        kinds: tuple[type[Config], ...] = (Sm80Config, Sm90Config, GemvConfig)
        return {kind: [at for at, c in enumerate(self.configs) if isinstance(c, kind)] for kind in kinds}

    @cached_property
    def _by_gpc(self) -> model.Batch:
        return model.Batch.of(replace(c, by_gpc=True) for c in self._sm90.configs)

    @cached_property
    def _ordered(self) -> Flags:
        return np.array([[c.ordered for c in self._sm90.configs]])

    def besides(self, problems: Sequence[Problem], device: Device) -> Floats:
        """Return by how many microseconds kernels are later for what they do besides a GEMM.

        That is means of A's rows, copies of operands that TMA cannot read, and stores of single elements of D; all by
        kernels of Sm90. Of shape (problems, configurations).
        """
        with np.errstate(all="ignore"):  # an underflow is 0, whatever the process has NumPy do about one
            return np.concatenate([self._all_besides(part, device) for part in self.parts(problems)])

    def _all_besides(self, problems: Sequence[Problem], device: Device) -> Floats:
        found = np.zeros((len(problems), len(self.configs)))
        whole = [self.whole(p) for p in problems]
        if self._sm90.configs:
            times = np.minimum(*self._times_by_order(whole, device))
            found[:, self._places[Sm90Config]] = self._besides(whole, times, device)
        return found

    def _besides(self, problems: Sequence[Problem], times: Floats, device: Device) -> Floats:
        """Return what :meth:`besides` does of kernels of Sm90, for problems that count the columns of all weights."""
        copied = realigning(self.alignments, problems) * self._copies
        stored = model.scattering([(m, n // self.weights, k) for m, n, k in problems]) * ~self._swapped
        found = copied + stored if self.scatters else copied
        return found + model.means(self._sm90, problems, times, chip_of(device)) if self.gathers else found

    @cached_property
    def _copies(self) -> Flags:
        return np.array([[c.realign for c in self._sm90.configs]])

    @cached_property
    def _swapped(self) -> Flags:
        return np.array([[c.swap_ab for c in self._sm90.configs]])

    def times(self, problems: Sequence[Problem], device: Device) -> Floats:
        """Return times in microseconds, good for comparing, of shape (problems, configurations).

        Sm90 kernels are taken in the better of two orders of tiles, the usual one and one by GPC. Infinite where a
        kernel cannot be launched.
        """
        return self.times_and_order(problems, device)[0]

    def times_and_order(self, problems: Sequence[Problem], device: Device) -> tuple[Floats, Flags]:
        """Return the times, and where it is an order by GPC that takes so long."""
        with np.errstate(all="ignore"):
            times, by_gpc = zip(*(self._times_and_order(part, device) for part in self.parts(problems)), strict=True)
        return np.concatenate(times), np.concatenate(by_gpc)

    def parts(self, problems: Sequence[Problem]) -> list[Sequence[Problem]]:
        """Return problems in parts, each so small that it may be compared with all configurations at once."""
        step = max(1, AT_ONCE // max(1, len(self.configs)))
        return [problems[at : at + step] for at in range(0, max(1, len(problems)), step)]

    def _times_and_order(self, problems: Sequence[Problem], device: Device) -> tuple[Floats, Flags]:
        problems = [self.whole(p) for p in problems]
        times = np.empty((len(problems), len(self.configs)))
        gpc = np.zeros_like(times, np.bool_)
        if self._sm80:
            alignment = min(self.alignments)
            target = "sm_{}{}".format(*device.capability)
            sm80 = model_sm80.times(self._sm80, problems, device.multiprocessors, alignment, target=target)
            times[:, self._places[Sm80Config]] = sm80
        if self._gemv:
            numbers = _GEMV_NUMBERS.get(device.name, model_gemv.H100)
            gemv = model_gemv.times(self._gemv, problems, device.multiprocessors, of=numbers)
            times[:, self._places[GemvConfig]] = gemv
        if self._sm90.configs:
            usual, by_gpc = self._times_by_order(problems, device)
            better = np.minimum(usual, by_gpc)
            times[:, self._places[Sm90Config]] = better + self._besides(problems, better, device)
            gpc[:, self._places[Sm90Config]] = by_gpc < usual
        return times, gpc

    def tiles(self, problems: Sequence[Problem]) -> Floats:
        """Return how many tiles cover problems, whole clusters, of shape (problems, configurations)."""
        m, n, _ = np.array([self.whole(p) for p in problems], np.float64).reshape(-1, 3).T[:, :, None]
        tile_m, tile_n, cluster_m, cluster_n = self._extents
        rows, columns = np.ceil(np.ceil(m / tile_m) / cluster_m), np.ceil(np.ceil(n / tile_n) / cluster_n)
        return np.asarray(rows * cluster_m * columns * cluster_n)

    @cached_property
    def _extents(self) -> Floats:
        """Extents of each kernel's tile along M and N, and of its cluster in tiles: shape (4, configurations)."""
        sides = [
            model.along_problem(c) if isinstance(c, Sm90Config) else ((c.threadblock.m, c.threadblock.n), (1, 1))
            for c in self.configs
        ]
        extents = np.array([(*tile, *cluster) for tile, cluster in sides], np.float64).reshape(-1, 4)
        return np.ascontiguousarray(extents.T)

    def _times_by_order(self, problems: Sequence[Problem], device: Device) -> tuple[Floats, Floats]:
        chip = chip_of(device)
        cover = model.grid(self._sm90, problems, chip)
        usual, by_gpc = (model.times(b, problems, chip, lines=self._lines) for b in (self._sm90, self._by_gpc))
        worth = self._ordered & (cover.waves <= _WAVES_BY_GPC)
        return np.where(self._launchable(cover), usual, np.inf), np.where(worth, by_gpc, np.inf)

    def _launchable(self, cover: model.Grid) -> Flags:
        """Whether the grid's second extent can be: a kernel that is not persistent has thread blocks for each tile."""
        batch = self._sm90
        second = np.where(self._swapped, cover.rows, cover.columns)
        # Blocks that split K take the first extent, and both of the tiles' follow.
        second = np.where(batch.split_k > 1, np.maximum(cover.rows, cover.columns), second)
        persistent = (batch.schedule != model.SCHEDULES.index("warp_specialized")) & (batch.split_k == 1)
        return np.asarray(persistent | (second <= arch.MAX_GRID_Y))


def realigning(alignments: tuple[int, int], problems: Sequence[Problem]) -> Floats:
    """Return how many microseconds it takes to copy operands of these alignments to lines that TMA can read."""
    a, b = (alignment < _ALIGNED for alignment in alignments)
    return model.realigning(a, b, problems)


def usual_means(config: Sm90Config) -> Means:
    """Return the way to take means of A's rows that costs least in such tiles: gathered where they have few rows."""
    (rows, _), _ = model.along_problem(config)
    gathered = model.TAKING.gathered + model.TAKING.gathered_row * rows
    return "gathered" if gathered <= model.TAKING.beside.of(config.schedule) else "beside"


def predict(config: Config, problem: Problem, device: Device) -> float:
    """Return one configuration's time in microseconds, as :meth:`Pool.times` does."""
    return Pool((config,)).times([problem], device).item()


# ---- Order of tiles ----------------------------------------------------------------------------------------------


_ORDERS: dict[Raster, tuple[int, ...]] = {"along_m": (1, 2), "along_n": (1, 2, 4)}
_SWIZZLES_BY_GPC = (1, 2, 4)
_WAVES_BY_GPC = 2


def orders(config: Config, problem: Problem, device: Device) -> list[Config]:
    """Return a configuration with every order of its tiles that is worth measuring at a problem."""
    if isinstance(config, Sm80Config) and not config.stream_k:
        return [replace(config, swizzle=swizzle) for swizzle in SWIZZLES]
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
    if model.grid(model.Batch.of([config]), [problem], chip_of(device)).waves.item() > _WAVES_BY_GPC:
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
