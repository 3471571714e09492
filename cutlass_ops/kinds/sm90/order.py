"""Orders of an Sm90 kernel's tiles that are worth measuring."""

from __future__ import annotations

from cutlass_ops.declare.config import Sm90Config
from cutlass_ops.declare.device import Device
from cutlass_ops.declare.order import Raster, TileOrder
from cutlass_ops.declare.problem import Problem
from cutlass_ops.kinds.sm90 import model

_ORDERS: dict[Raster, tuple[int, ...]] = {"along_m": (1, 2), "along_n": (1, 2, 4)}
_SWIZZLES_BY_GPC = (1, 2, 4)
WAVES_BY_GPC = 2  # the most for which an order by GPC is worth trying


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
