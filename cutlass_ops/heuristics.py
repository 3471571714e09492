"""What is known of a configuration without measuring: how long it may take, and the best order of its tiles."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from cutlass_ops import arch, model, model_gemv, model_sm80
from cutlass_ops.config import (
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
from cutlass_ops.device import Device, Problem
from cutlass_ops.dtypes import bf16
from cutlass_ops.signature import OpSignature
from cutlass_ops.spec import Major

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


# PyTorch shares larger tensors, and any exp, between threads. On a busy host these wait for each other, far longer than
# the work takes.
ONE_THREAD = 1 << 15


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

    def odd(self, problems: Sequence[Problem]) -> Tensor:
        """Return of how many operands the lines are :func:`cutlass_ops.model.odd`, of shape (problems,)."""
        extents = torch.tensor(problems, dtype=torch.float64).reshape(-1, 3)
        return model.odd(extents[:, ["mnk".index(line) for line in self._lines]]).sum(1)

    @property
    def _lines(self) -> tuple[model.Extent, model.Extent]:
        a, b = self.majors
        return ("k" if a == "row" else "m"), ("k" if b == "col" else "n")

    @cached_property
    def _sm90(self) -> model.Batch:
        return model.Batch.of(c for c in self.configs if isinstance(c, Sm90Config))

    @cached_property
    def _places(self) -> list[int]:
        """Where they are among all."""
        return [at for at, c in enumerate(self.configs) if isinstance(c, Sm90Config)]

    @cached_property
    def _others(self) -> dict[int, Sm80Config | GemvConfig]:
        """Those of other kinds, by their places. They are few, so that Python's loops may go over them."""
        return {at: c for at, c in enumerate(self.configs) if not isinstance(c, Sm90Config)}

    @cached_property
    def _by_gpc(self) -> model.Batch:
        return model.Batch.of(replace(c, by_gpc=True) for c in self._sm90.configs)

    @cached_property
    def _ordered(self) -> Tensor:
        return torch.tensor([[c.ordered for c in self._sm90.configs]])

    def besides(self, problems: Sequence[Problem], device: Device) -> Tensor:
        """Return by how many microseconds kernels are later for what they do besides a GEMM.

        That is means of A's rows, copies of operands that TMA cannot read, and stores of single elements of D; all by
        kernels of Sm90. Of shape (problems, configurations).
        """
        found = torch.zeros(len(problems), len(self.configs), dtype=torch.float64)
        whole = [self.whole(p) for p in problems]
        if self._sm90.configs:
            found[:, self._places] = self._besides(whole, torch.minimum(*self._times_by_order(whole, device)), device)
        return found

    def _besides(self, problems: Sequence[Problem], times: Tensor, device: Device) -> Tensor:
        """Return what :meth:`besides` does of kernels of Sm90, for problems that count the columns of all weights."""
        copied = realigning(self.alignments, problems) * self._copies
        stored = model.scattering([(m, n // self.weights, k) for m, n, k in problems]) * ~self._swapped
        found = copied + stored if self.scatters else copied
        return found + model.means(self._sm90, problems, times, chip_of(device)) if self.gathers else found

    @cached_property
    def _copies(self) -> Tensor:
        return torch.tensor([[c.realign for c in self._sm90.configs]])

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
        found = [self._times_and_order(part, device) for part in self.parts(problems)]
        return torch.cat([times for times, _ in found]), torch.cat([by_gpc for _, by_gpc in found])

    def parts(self, problems: Sequence[Problem]) -> list[Sequence[Problem]]:
        """Return problems in parts, for each of which one thread compares all configurations."""
        step = max(1, ONE_THREAD // max(1, len(self.configs)))
        return [problems[at : at + step] for at in range(0, max(1, len(problems)), step)]

    def _times_and_order(self, problems: Sequence[Problem], device: Device) -> tuple[Tensor, Tensor]:
        problems = [self.whole(p) for p in problems]
        times = self._one_by_one(problems, device)
        gpc = torch.zeros_like(times, dtype=torch.bool)
        if self._sm90.configs:
            usual, by_gpc = self._times_by_order(problems, device)
            better = torch.minimum(usual, by_gpc)
            times[:, self._places] = better + self._besides(problems, better, device)
            gpc[:, self._places] = by_gpc < usual
        return times, gpc

    def _one_by_one(self, problems: Sequence[Problem], device: Device) -> Tensor:
        """Return the times of all but those of Sm90, which are infinite here."""
        gemv = _GEMV_NUMBERS.get(device.name, model_gemv.H100)

        def time(config: Sm80Config | GemvConfig, problem: Problem) -> float:
            if isinstance(config, Sm80Config):
                return model_sm80.predict(config, problem, device.multiprocessors, min(self.alignments))
            return model_gemv.predict(config, problem, device.multiprocessors, of=gemv)

        return self._with_others(torch.inf, [[time(c, p) for c in self._others.values()] for p in problems])

    def _with_others(self, value: float, found: list[list[float]]) -> Tensor:
        """Return what was found of those of other kinds, and a value for those of Sm90."""
        each = torch.full((len(found), len(self.configs)), value, dtype=torch.float64)
        each[:, list(self._others)] = torch.tensor(found, dtype=torch.float64).reshape(len(found), len(self._others))
        return each

    def tiles(self, problems: Sequence[Problem], device: Device) -> Tensor:
        """Return how many tiles cover problems, whole clusters, of shape (problems, configurations)."""
        problems = [self.whole(p) for p in problems]
        sides = [c.threadblock for c in self._others.values()]
        tiles = self._with_others(0.0, [[-(-m // s.m) * -(-n // s.n) for s in sides] for m, n, _ in problems])
        if self._sm90.configs:
            tiles[:, self._places] = self._clusters(problems, device)
        return tiles

    def _clusters(self, problems: Sequence[Problem], device: Device) -> Tensor:
        cover = model.grid(self._sm90, problems, chip_of(device))
        return cover.rows * cover.columns

    def _times_by_order(self, problems: Sequence[Problem], device: Device) -> tuple[Tensor, Tensor]:
        never = torch.tensor(torch.inf, dtype=torch.float64)
        cover = model.grid(self._sm90, problems, chip_of(device))
        usual = torch.where(
            self._launchable(cover), model.times(self._sm90, problems, chip_of(device), lines=self._lines), never
        )
        worth = self._ordered & (cover.waves <= _WAVES_BY_GPC)
        return usual, torch.where(worth, model.times(self._by_gpc, problems, chip_of(device), lines=self._lines), never)

    def _launchable(self, cover: model.Grid) -> Tensor:
        """Whether the grid's second extent can be: a kernel that is not persistent has thread blocks for each tile."""
        batch = self._sm90
        second = torch.where(self._swapped, cover.rows, cover.columns)
        # Blocks that split K take the first extent, and both of the tiles' follow.
        second = torch.where(batch.split_k > 1, torch.maximum(cover.rows, cover.columns), second)
        persistent = (batch.schedule != model.SCHEDULES.index("warp_specialized")) & (batch.split_k == 1)
        return persistent | (second <= arch.MAX_GRID_Y)


def realigning(alignments: tuple[int, int], problems: Sequence[Problem]) -> Tensor:
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
    return float(Pool((config,)).times([problem], device))


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
