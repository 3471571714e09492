"""Kernel configurations: tile shapes, pipeline and schedule, as frozen values.

A configuration says how a kernel is built, a :class:`~cutlass_ops.declare.spec.KernelSpec` what it computes. Values of
another type are refused here, at once. Whether numbers make sense, and whether everything fits together, is decided in
:mod:`cutlass_ops.kinds.legality`.
"""

from __future__ import annotations

import functools
import typing
from dataclasses import MISSING, dataclass, fields
from types import NoneType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from cutlass_ops.base import checked_json
from cutlass_ops.base.arch import MMA_SYNC, Family
from cutlass_ops.base.errors import ConfigError
from cutlass_ops.base.frozen import plain_field
from cutlass_ops.declare.order import USUAL_ORDER, TileOrder
from cutlass_ops.declare.problem import Problem


class _Shape:
    """Extents of a tile or a cluster: positive integers, refused otherwise.

    Raises
    ------
    ConfigError
        If an extent is anything else.
    """

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if type(value) is not int:
                value = plain_field(self, name)
            if type(value) is not int or value < 1:
                sides = ", ".join(vars(self))
                raise ConfigError(f"{type(self).__name__} takes positive integers for {sides}: {name} is {value!r}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(str, vars(self).values()))})"

    def __str__(self) -> str:
        return "x".join(map(str, vars(self).values()))


# The classes of configurations by their name in JSON.
CONFIGS: dict[str, type[Config]] = {}


class Config:
    """What configurations have in common: fields of the declared types, refused otherwise, and a short ``repr``.

    Each kind of kernels has a class of its own in ``kinds/``, which is found by its name in JSON.

    Attributes
    ----------
    arch : str
        Name in JSON.
    default_target : str
        What it is compiled for where nobody says.
    family : Family
        The matrix instructions that it uses, and its target has.
    few_rows : bool
        Whether it is for few rows of A alone, and far too slow for many.

    Raises
    ------
    ConfigError
        If a field has a value of the wrong type, or an unknown name.
    """

    arch: ClassVar[str]
    default_target: ClassVar[str]
    family: ClassVar[Family] = MMA_SYNC
    few_rows: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        CONFIGS[cls.arch] = cls

    def __post_init__(self) -> None:
        for name, (types, choices) in _types(typing.cast(type, type(self))).items():
            value = getattr(self, name)
            if type(value) not in types:
                value = plain_field(self, name)
            # Not isinstance: True is an integer, and no number of stages.
            if type(value) not in types or (choices and value not in choices):
                raise ConfigError(f"{name} must be {_wanted(types, choices)}, not {value!r}")

    if TYPE_CHECKING:  # fields or properties of each class

        @property
        def threadblock(self) -> ThreadblockShape:
            """What one thread block computes, in elements."""

        @property
        def slug(self) -> str:
            """Short readable name, unique among legal configurations."""

        @property
        def whole_k(self) -> bool:
            """Whether one thread block adds up all of a tile's K in order. All such kernels give the same bits."""

    @property
    def ordered(self) -> bool:
        """Whether a launch may choose a raster order of the tiles."""
        return False

    def refuses(self, order: TileOrder) -> str | None:
        """Return why a launch cannot visit the tiles in an order; None if it can."""
        return None if order == USUAL_ORDER else "its tiles have one order"

    def usual_order(self, problem: Problem) -> TileOrder:
        """Return the order of tiles for a problem, where none was measured."""
        return USUAL_ORDER

    @property
    def copies(self) -> bool:
        """Whether the launch copies A or B to aligned lines first."""
        return False

    def transposes(self, d_col_major: bool) -> bool:
        """Whether the kernel computes D^T. By default so that the epilogue writes rows."""
        return d_col_major

    @property
    def along_problem(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Extents of tile and cluster along the problem's M and N."""
        return (self.threadblock.m, self.threadblock.n), (1, 1)

    def target_on(self, capability: tuple[int, int]) -> str:
        """Return the target of such a kernel on devices of a compute capability."""
        major, minor = capability
        return f"sm_{major}{minor}"

    def __repr__(self) -> str:
        """Return Python that makes an equal value, without what is the default."""
        given = [(f, getattr(self, f.name)) for f in fields(typing.cast(Any, self))]
        shown = [
            repr(value) if f.default is MISSING else f"{f.name}={value!r}" for f, value in given if value != f.default
        ]
        return f"{type(self).__name__}({', '.join(shown)})"


@functools.cache
def _types(cls: type) -> dict[str, tuple[tuple[type, ...], tuple[str, ...]]]:
    """Return the types that each field may have, and for a name those there are."""
    found: dict[str, tuple[tuple[type, ...], tuple[str, ...]]] = {}
    hints = typing.get_type_hints(cls)
    for f in fields(cls):
        hint = hints[f.name]
        if typing.get_origin(hint) is Literal:
            found[f.name] = ((str,), get_args(hint))
        else:
            found[f.name] = (get_args(hint) or (hint,), ())
    return found


def _wanted(types: tuple[type, ...], choices: tuple[str, ...]) -> str:
    if choices:
        return f"one of {', '.join(choices)}"
    words: dict[type, str] = {
        int: "an integer",
        bool: "True or False",
        NoneType: "None",
        InstructionShape: "an InstructionShape",
    }
    return " or ".join(words.get(t, f"a {t.__name__}") for t in types)


@dataclass(frozen=True, repr=False)
class _Extents(_Shape):
    """Extents along M, N and K, in elements."""

    m: int
    n: int
    k: int


@dataclass(frozen=True, repr=False, eq=False)  # its base's comparison tells classes apart
class ThreadblockShape(_Extents):
    """Tile of the (M, N, K) problem that one thread block (CTA) computes, in elements.

    Raises
    ------
    ConfigError
        If an extent is not a positive integer.

    Examples
    --------
    >>> co.ThreadblockShape(128, 256, 64)
    ThreadblockShape(128, 256, 64)
    """


@dataclass(frozen=True, repr=False, eq=False)  # its base's comparison tells classes apart
class WarpShape(_Extents):
    """Part of the threadblock tile that one warp computes (Sm80), in elements.

    Raises
    ------
    ConfigError
        If an extent is not a positive integer.

    Examples
    --------
    >>> co.Sm80Config(co.ThreadblockShape(128, 128, 32), co.WarpShape(64, 64, 32)).warps
    4
    """


@dataclass(frozen=True, repr=False, eq=False)  # its base's comparison tells classes apart
class InstructionShape(_Extents):
    """Shape of one ``mma.sync`` Tensor Core instruction (Sm80), in elements.

    Raises
    ------
    ConfigError
        If an extent is not a positive integer.

    Examples
    --------
    >>> str(co.InstructionShape(16, 8, 16))
    '16x8x16'
    """


@dataclass(frozen=True, repr=False)
class ClusterShape(_Shape):
    """Thread blocks in a cluster along M and N (Sm90).

    Raises
    ------
    ConfigError
        If an extent is not a positive integer.

    Examples
    --------
    >>> co.ClusterShape(2, 1)
    ClusterShape(2, 1)
    """

    m: int = 1
    n: int = 1


Means = Literal["gathered", "beside", "ahead"]
# What they say of an epilogue's means of A's rows.
MEANS: dict[Means, str] = {
    "gathered": "gathered by the main loop from the tiles that it multiplies",
    "beside": "taken by idle warps beside the main loop, each row once",
    "ahead": "taken by a small kernel ahead of the GEMM",
}


@dataclass(frozen=True)
class Ordered:
    """A configuration with the order of its tiles: what enters a race, and what serves a problem."""

    config: Config  # the kernel's configuration
    order: TileOrder = USUAL_ORDER  # the order of its tiles

    def __str__(self) -> str:
        return f"{self.config.slug} {self.order}" if self.config.ordered else self.config.slug


def config_to_json(config: Config) -> dict[str, Any]:
    """Return the canonical JSON form of a configuration. Defaults are left out, so that a new field renames nothing."""
    found: dict[str, Any] = {"arch": config.arch}
    for name, default in _defaults(typing.cast(type, type(config))):
        value = getattr(config, name)
        if value != default:
            found[name] = dict(vars(value)) if isinstance(value, _Shape) else value
    return found


@functools.cache
def _defaults(cls: type) -> tuple[tuple[str, Any], ...]:
    """Return the names and defaults of a dataclass's fields. dataclasses.asdict takes ten times as long as these."""
    return tuple((f.name, f.default) for f in fields(cls))


def config_from_json(data: object) -> Config:
    """Rebuild a configuration from :func:`config_to_json`'s value."""
    if not isinstance(data, dict):
        raise ConfigError(f"a configuration is a JSON object, not {type(data).__name__}")
    arch = data.get("arch")
    if not isinstance(arch, str) or arch not in CONFIGS:
        raise ConfigError(
            f"unknown configuration arch {checked_json.shown(arch)}: use one of {', '.join(sorted(CONFIGS))}"
        )
    cls = CONFIGS[arch]
    names = _types(typing.cast(type, cls))
    values: dict[str, Any] = {}
    for name, value in data.items():
        if name == "arch":
            continue
        if name not in names:
            shown = checked_json.shown(name)
            raise ConfigError(f"unknown field {shown} in an {arch} configuration: it has {', '.join(sorted(names))}")
        types, _ = names[name]
        if issubclass(types[0], _Shape):
            if not isinstance(value, dict):
                raise ConfigError(f"{name} must be an object of integers, not {checked_json.shown(value)}")
            try:
                value = types[0](**value)
            except TypeError as exc:
                raise ConfigError(f"{name}: {exc}") from None
        values[name] = value
    try:
        return cls(**values)
    except TypeError as exc:
        raise ConfigError(f"{arch} configuration: {exc}") from None
