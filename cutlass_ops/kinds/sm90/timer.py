"""The time of Sm90 kernels for a signature: the model, plus work besides the GEMM; and orders worth measuring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from cutlass_ops.base import arch
from cutlass_ops.declare.config import Means
from cutlass_ops.declare.device import Device
from cutlass_ops.declare.order import Raster, TileOrder
from cutlass_ops.declare.problem import Problem
from cutlass_ops.kinds.arrays import Extents, Flags, Floats, Places, Problems
from cutlass_ops.kinds.sm90 import model
from cutlass_ops.kinds.sm90.config import Sm90Config
from cutlass_ops.kinds.spreads import ASSUMED
from cutlass_ops.kinds.traits import Traits

_ORDERS: dict[Raster, tuple[int, ...]] = {"along_m": (1, 2), "along_n": (1, 2, 4)}
_SWIZZLES_BY_GPC = (1, 2, 4)
WAVES_BY_GPC = 2  # the most for which an order by GPC is worth trying
# Orders of tiles of which times are computed together: the usual one, and by GPC.
_EITHER_ORDER = np.array([False, True]).reshape(2, 1, 1)


@dataclass(frozen=True, eq=False)
class Sm90Timer:
    """The time model of some configurations for given traits: see :class:`cutlass_ops.kinds.kind.Timer`."""

    traits: Traits  # traits of the signature
    batch: model.Batch  # the configurations with the usual order of tiles
    # Whether their tiles have several orders, they copy operands first, or compute the transpose: shape (1,
    # configurations)
    ordered: Flags
    copies: Flags
    swapped: Flags

    @classmethod
    def of(cls, configs: Sequence[Sm90Config], traits: Traits) -> Sm90Timer:
        """Return the model of some configurations."""
        flags = np.array([(c.ordered, c.realign, c.swap_ab) for c in configs], np.bool_).reshape(1, -1, 3)
        return cls(traits, model.Batch.of(configs), *np.moveaxis(flags, 2, 0))

    def take(self, places: Places) -> Sm90Timer:
        """Return the model of some of these configurations, each as often as it is named."""
        flags = (x[:, places] for x in (self.ordered, self.copies, self.swapped))
        return Sm90Timer(self.traits, self.batch.take(places), *flags)

    def times(self, problems: Problems, device: Device) -> tuple[Floats, Flags]:
        """Return times in microseconds with the better order of tiles, and whether that is the order by GPC."""
        extents = Extents.of(problems)
        if self.traits.grouped:
            found = self._times_of_groups(extents, device)
            return found + self._besides(extents, found, device), np.zeros_like(found, np.bool_)
        cover = model.grid(self.batch, extents, model.costs_of(device))
        better, by_gpc = self._times_and_order(extents, device, cover)
        return better + self._besides(extents, better, device, cover), by_gpc

    def besides(self, problems: Problems, device: Device) -> Floats:
        """Return microseconds for what is no part of a plain GEMM."""
        extents = Extents.of(problems)
        cover, times = None, np.zeros((1, 1))
        if self.traits.gathers:  # only means depend on how long the product takes
            cover = model.grid(self.batch, extents, model.costs_of(device))
            times, _ = self._times_and_order(extents, device, cover)
        shape = np.broadcast_shapes(extents.m.shape, self.ordered.shape)
        return np.broadcast_to(self._besides(extents, times, device, cover), shape)

    def _besides(self, extents: Extents, times: Floats, device: Device, cover: model.Grid | None = None) -> Floats:
        traits = self.traits
        found = realigning(traits, extents) * self.copies
        if traits.scatters:
            found = found + model.scattering(extents._replace(n=extents.n // traits.weights)) * ~self.swapped
        if traits.clocks:
            found = found + model.computing(
                self.batch, extents, traits.clocks, traits.weights, traits.element_bytes, model.costs_of(device)
            )
        if not traits.gathers:
            return found
        return found + model.means(
            self.batch, extents, times, model.costs_of(device), traits.element_bytes, cover=cover
        )

    def _adding(self, cover: model.Grid, chip: model.Costs) -> Floats | float:
        """Return microseconds in which threads add up products while nothing is multiplied."""
        found: Floats | float = 0.0
        if self.traits.promotes:
            found = found + model.promoting(self.batch, cover, chip)
        if self.traits.scaled:
            found = found + model.scaling(self.batch, cover, self.swapped, chip)
        if self.traits.converts:
            found = found + model.converting(self.batch, cover, chip)
        return found

    def _times_and_order(self, extents: Extents, device: Device, cover: model.Grid) -> tuple[Floats, Flags]:
        """Return the times of GEMMs alone with the better order of tiles, and whether that is the order by GPC."""
        chip, lines = model.costs_of(device), self.traits.lines
        widths = self.traits.element_bytes, self.traits.d_bytes
        worth = self.ordered & (not self.traits.ragged_k) & (cover.waves <= WAVES_BY_GPC)
        batch = replace(self.batch, by_gpc=_EITHER_ORDER) if worth.any() else self.batch
        adding, narrow, sparse = self._adding(cover, chip), self.traits.narrow, self.traits.sparse
        times = model.times(batch, extents, chip, widths, lines, cover, narrow, adding, sparse)
        usual, *others = times if times.ndim > worth.ndim else (times,)
        if max(cover.rows.max(), cover.columns.max(), extents.gemms.max()) > arch.MAX_GRID_Y:
            usual = np.where(self._launchable(cover, extents), usual, np.inf)
        if not others:
            return usual, worth
        (by_gpc,) = others
        by_gpc[~worth] = np.inf
        return np.minimum(usual, by_gpc), by_gpc < usual

    def _times_of_groups(self, extents: Extents, device: Device) -> Floats:
        """Return the geometric mean over the spreads that are assumed."""
        chip, traits = model.costs_of(device), self.traits
        widths = traits.element_bytes, traits.d_bytes
        found: Floats = np.zeros((1, 1))
        for spread in ASSUMED:
            means, cover = model.of_groups(self.batch, extents, spread.of(extents), chip)
            adding = self._adding(cover, chip)
            times = model.times(self.batch, means, chip, widths, traits.lines, cover, traits.narrow, adding)
            found = found + spread.weight * np.log(times)
        return np.exp(found)

    def _launchable(self, cover: model.Grid, extents: Extents) -> Flags:
        """Return whether the grid's y and z are in range: a kernel that is not persistent has a block per tile."""
        batch = self.batch
        second = np.where(self.swapped, cover.rows, cover.columns)
        # With split K, x is the split, and y and z are the tiles' extents.
        second = np.where(batch.split_k > 1, np.maximum(cover.rows, cover.columns), second)
        persistent = (batch.schedule != model.SCHEDULES.index("warp_specialized")) & (batch.split_k == 1)
        return np.asarray(persistent | ((second <= arch.MAX_GRID_Y) & (extents.gemms <= arch.MAX_GRID_Y)))


def realigning(traits: Traits, problems: Problems) -> Floats:
    """Return microseconds to copy operands so that they can be read."""
    return model.realigning(*traits.copied, problems, traits.element_bytes)


def gathering(config: Sm90Config) -> Sm90Config:
    """Return a configuration with the cheapest way to compute means of A's rows."""
    means = usual_means(config)
    return config if config.means == means else replace(config, means=means)


def usual_means(config: Sm90Config) -> Means:
    """Return the cheapest way to compute means of A's rows for a tile: gathered if the tile has few rows."""
    (rows, _), _ = config.along_problem
    gathered = model.TAKING.gathered + model.TAKING.gathered_row * rows
    return "gathered" if gathered <= model.TAKING.beside.of(config.schedule) else "beside"


def orders(config: Sm90Config, problem: Problem, device: Device) -> list[TileOrder]:
    """Return every order of a configuration's tiles that is worth measuring at a problem."""
    if not config.ordered:
        return []
    usual = [TileOrder(raster, swizzle) for raster, swizzles in _ORDERS.items() for swizzle in swizzles]
    return [*usual, *orders_by_gpc(config, problem, device)]


def orders_by_gpc(config: Sm90Config, problem: Problem, device: Device) -> list[TileOrder]:
    """Return the orders by GPC that are worth measuring at a problem, the likeliest first.

    Within a GPC only reads that are not multicast merge, so runs of tiles share the operand that the cluster does not.
    More than a few waves drift apart in time, and their reads with them.
    """
    if not config.ordered:
        return []
    if model.grid(model.Batch.of([config]), [problem], model.costs_of(device)).waves.item() > WAVES_BY_GPC:
        return []
    cluster = config.cluster
    rasters: tuple[Raster, ...] = ("along_m", "along_n")
    if cluster.m != cluster.n:
        rasters = ("along_n",) if cluster.m > cluster.n else ("along_m",)
    return [TileOrder(raster, swizzle, by_gpc=True) for raster in rasters for swizzle in _SWIZZLES_BY_GPC]
