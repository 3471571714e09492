"""The order in which a launch visits the tiles of a kernel."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from cutlass_ops.base import checked_json
from cutlass_ops.base.errors import ConfigError
from cutlass_ops.base.frozen import plain_field

Raster = Literal["heuristic", "along_m", "along_n"]
SWIZZLES = (1, 2, 4, 8)

# As templates/include/cutlass_ops/sm90_gemm.h and cpp/src/manifest.cpp number orders.
_RASTERS: dict[Raster, int] = {"heuristic": 0, "along_m": 1, "along_n": 2}
_BY_GPC = 4


@dataclass(frozen=True)
class TileOrder:
    """The order in which a launch visits the tiles of a kernel.

    It is a launch argument: it changes neither the compiled code nor a bit of the result.

    Attributes
    ----------
    raster : {"heuristic", "along_m", "along_n"}
        Along which side of the kernel's problem strips of tiles run. ``"heuristic"`` lets CUTLASS choose.
    swizzle : {1, 2, 4, 8}
        Width of a strip of tiles, in clusters (Sm90) or tiles (Sm80).
    by_gpc : bool
        Whether each GPC (graphics processing cluster) takes consecutive tiles. Reads of one line by its multiprocessors
        are then merged on their way to the L2 cache. This helps problems of few waves. Such a launch does not overlap
        with the kernel before it.

    Raises
    ------
    ConfigError
        If a field has another value.

    Examples
    --------
    >>> order = co.TileOrder("along_n", swizzle=2)
    >>> str(order), order.numbers
    ('along_n 2', (2, 2))
    """

    raster: Raster = "heuristic"
    swizzle: int = 1
    by_gpc: bool = False

    def __post_init__(self) -> None:
        if self.raster not in get_args(Raster):
            raise ConfigError(f"raster must be one of {', '.join(get_args(Raster))}, not {self.raster!r}")
        if type(self.swizzle) is not int:
            plain_field(self, "swizzle")
        # Not only `in`: True is 1.
        if type(self.swizzle) is not int or self.swizzle not in SWIZZLES:
            raise ConfigError(f"swizzle must be one of {', '.join(map(str, SWIZZLES))}, not {self.swizzle!r}")
        if type(self.by_gpc) is not bool:
            raise ConfigError(f"by_gpc must be True or False, not {self.by_gpc!r}")

    @property
    def numbers(self) -> tuple[int, int]:
        """The launch arguments: raster order, plus 4 if by GPC; and swizzle."""
        return _RASTERS[self.raster] + (_BY_GPC if self.by_gpc else 0), self.swizzle

    def __str__(self) -> str:
        return f"{self.raster} {self.swizzle}" + (" by gpc" if self.by_gpc else "")

    def to_json(self) -> dict[str, Any]:
        """Return the fields that differ from their default."""
        return {name: value for name in _FIELDS if (value := getattr(self, name)) != getattr(USUAL_ORDER, name)}

    @classmethod
    def from_json(cls, data: object) -> TileOrder:
        """Rebuild an order from :meth:`to_json`'s value.

        Raises
        ------
        ConfigError
            If a field is unknown or has another value.
        """
        given = checked_json.mapping(data, "an order of tiles", None)
        unknown = given.keys() - {*_FIELDS}
        if unknown:
            raise ConfigError(f"an order of tiles has no {checked_json.shown(min(unknown))}")
        return cls(**given)


USUAL_ORDER = TileOrder()
_FIELDS = tuple(f.name for f in fields(TileOrder))
