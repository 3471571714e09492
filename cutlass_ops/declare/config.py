"""Kernel configurations: tile shapes, pipeline and schedule, as frozen values.

A configuration says how a kernel is built, a :class:`~cutlass_ops.declare.spec.KernelSpec` what it computes. Values of
another type are refused here, at once. Whether numbers make sense, and whether everything fits together, is decided in
:mod:`cutlass_ops.kinds.legality`.
"""

from __future__ import annotations

import functools
import typing
import warnings
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, replace
from types import NoneType
from typing import Any, ClassVar, Literal, TypeVar, get_args

from cutlass_ops.base import checked_json
from cutlass_ops.base.errors import ConfigError
from cutlass_ops.base.hashed import hashed_once
from cutlass_ops.base.whole import plain_field
from cutlass_ops.declare.order import USUAL_ORDER, TileOrder
from cutlass_ops.declare.problem import Problem

_Class = TypeVar("_Class", bound=type)


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


class KernelConfig:
    """What configurations have in common: fields of the declared types, refused otherwise, and a short ``repr``.

    Attributes
    ----------
    arch : str
        Name in JSON.
    default_target : str
        What it is compiled for where nobody says.
    wgmma : bool
        Whether it needs a target with TMA and warpgroup-wide matrix instructions.
    few_rows : bool
        Whether it is for few rows of A alone, and far too slow for many.

    Raises
    ------
    ConfigError
        If a field has a value of the wrong type, or an unknown name.
    """

    arch: ClassVar[str]
    default_target: ClassVar[str]
    wgmma: ClassVar[bool] = False
    few_rows: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name, (types, choices) in _types(typing.cast(type, type(self))).items():
            value = getattr(self, name)
            if type(value) not in types:
                value = plain_field(self, name)
            # Not isinstance: True is an integer, and no number of stages.
            if type(value) not in types or (choices and value not in choices):
                raise ConfigError(f"{name} must be {_wanted(types, choices)}, not {value!r}")

    # The order of tiles that was given here, as it could be before TileOrder. It is no part of the value.
    given_order: ClassVar[TileOrder] = USUAL_ORDER

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
        tile: ThreadblockShape = typing.cast(Any, self).threadblock
        return (tile.m, tile.n), (1, 1)

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


Schedule = Literal["pingpong", "cooperative", "warp_specialized"]
TileScheduler = Literal["persistent", "stream_k"]
Means = Literal["gathered", "beside", "ahead"]
Accumulation = Literal["fast", "promoted"]
# What they say of an epilogue's means of A's rows.
MEANS: dict[Means, str] = {
    "gathered": "gathered by the main loop from the tiles that it multiplies",
    "beside": "taken by idle warps beside the main loop, each row once",
    "ahead": "taken by a small kernel ahead of the GEMM",
}


def _taking_order(*names: str) -> Callable[[_Class], _Class]:
    """Let a configuration go on taking the order of its tiles, which is an argument of :class:`KernelSpec` now."""

    def taking(cls: _Class) -> _Class:
        plain = cls.__init__  # type: ignore[misc]

        @functools.wraps(plain)
        def init(self: Any, *args: Any, **given: Any) -> None:
            order = {name: given.pop(name) for name in names if name in given}
            plain(self, *args, **given)
            if order:
                told = ", ".join(f"{name}={value!r}" for name, value in order.items())
                warnings.warn(
                    f"{cls.__name__}({told}) is deprecated: write KernelSpec(..., order=TileOrder({told}))",
                    DeprecationWarning,
                    stacklevel=2,
                )
                object.__setattr__(self, "given_order", TileOrder(**order))

        cls.__init__ = init  # type: ignore[misc]
        return cls

    return taking


@_taking_order("swizzle")
@hashed_once
@dataclass(frozen=True, repr=False)
class Sm80Config(KernelConfig):
    """A multistage ``mma.sync`` kernel (CUTLASS 2.x), for sm_80 and every later target.

    Attributes
    ----------
    threadblock, warp, instruction
        Tile shapes in elements.
    stages : int
        Pipeline stages in shared memory. With 2, loads go through registers; with 3 or more, by ``cp.async``.
    stream_k : bool
        Whether the last wave's work is split along K over all multiprocessors.

    Raises
    ------
    ConfigError
        If a field has a value of the wrong type.

    Examples
    --------
    >>> co.Sm80Config(co.ThreadblockShape(128, 128, 32), co.WarpShape(64, 64, 32), stages=4)
    Sm80Config(ThreadblockShape(128, 128, 32), WarpShape(64, 64, 32), stages=4)
    """

    threadblock: ThreadblockShape
    warp: WarpShape
    instruction: InstructionShape = InstructionShape(16, 8, 16)
    stages: int = 3
    stream_k: bool = False

    arch: ClassVar[str] = "sm80"
    default_target: ClassVar[str] = "sm_80"

    @property
    def warps(self) -> int:
        """Warps in one thread block."""
        t, w = self.threadblock, self.warp
        return (t.m // w.m) * (t.n // w.n) * (t.k // w.k)

    @property
    def slug(self) -> str:
        """Short readable name, unique among legal configurations."""
        tail = "_streamk" if self.stream_k else ""
        return f"sm80_{self.threadblock}_{self.warp}_{self.instruction}_s{self.stages}{tail}"

    @property
    def whole_k(self) -> bool:
        """Whether one thread block adds up all of a tile's K in order. All such kernels give the same bits."""
        return not self.stream_k

    def refuses(self, order: TileOrder) -> str | None:
        """Return why a launch cannot visit the tiles in an order; None if it can."""
        alike = order.raster == USUAL_ORDER.raster and not order.by_gpc
        return None if alike else "strips run along M; only swizzle can be chosen"


@_taking_order("raster", "swizzle", "by_gpc")
@hashed_once
@dataclass(frozen=True, repr=False)
class Sm90Config(KernelConfig):
    """A warp-specialised TMA + ``wgmma`` kernel (CUTLASS 3.x), for sm_90a.

    Attributes
    ----------
    threadblock : ThreadblockShape
        The CTA tile in elements, in the kernel's own orientation: with ``swap_ab`` its M side runs along the
        problem's N.
    cluster : ClusterShape
        Thread blocks that share operand tiles by TMA multicast.
    schedule : str
        ``"pingpong"`` (two consumer warpgroups, each with its own tile), ``"cooperative"`` (two that share a tile) or
        ``"warp_specialized"`` (one; not persistent).
    scheduler : str
        ``"persistent"`` or ``"stream_k"``.
    stages : int or None
        Pipeline stages in shared memory; None means as many as fit.
    resident : int
        Thread blocks that fit on a multiprocessor at the same time. With 2, each has half of the shared memory, and so
        half of the stages. This helps if there are more tiles than multiprocessors and each operand is read once: a
        second block then need not wait for the first to end. Only for ``"warp_specialized"``.
    swap_ab : bool
        Whether the kernel computes D^T = B^T A^T: N then runs along the instruction's fixed side of 64 rows. For few
        rows.
    split_k : int
        Thread blocks of a cluster that share one tile, each with a part of K. They add up the parts through distributed
        shared memory, always in the same order. For few tiles with a long K. Such a kernel is not persistent, and these
        blocks are the whole cluster.
    means : str
        How means of A's rows are computed, if the epilogue uses any. ``"gathered"``: the main loop reads each tile of A
        once more, which costs little for few rows. ``"beside"``: idle warps of the kernel read each row once while the
        others multiply, and an epilogue waits for the rows of its tile. ``"ahead"``: a small kernel computes them
        before the GEMM, and the epilogue waits until it has ended.
    realign : bool
        Whether a small kernel first copies A or B, or both, to aligned lines in a workspace. Needed if an address or
        leading dimension is not a multiple of 16 bytes, as TMA requires, or if TF32 or INT8 operands are not contiguous
        along K.
    accumulation : str
        How FP8 products are added up along K. ``"fast"``: by the Tensor Cores alone, which keep fewer bits than FP32.
        ``"promoted"``: the Tensor Cores add up 128 products at a time, and the threads add up these sums in FP32.

    Raises
    ------
    ConfigError
        If a field has a value of the wrong type, or an unknown name.

    Examples
    --------
    >>> co.Sm90Config(co.ThreadblockShape(128, 128, 64), co.ClusterShape(2, 1), schedule="cooperative")
    Sm90Config(ThreadblockShape(128, 128, 64), cluster=ClusterShape(2, 1), schedule='cooperative')
    """

    threadblock: ThreadblockShape
    cluster: ClusterShape = ClusterShape(1, 1)
    schedule: Schedule = "pingpong"
    scheduler: TileScheduler = "persistent"
    stages: int | None = None
    swap_ab: bool = False
    split_k: int = 1
    means: Means = "gathered"
    realign: bool = False
    accumulation: Accumulation = "fast"
    resident: int = 1

    arch: ClassVar[str] = "sm90"
    default_target: ClassVar[str] = "sm_90a"
    wgmma: ClassVar[bool] = True

    @property
    def ordered(self) -> bool:
        """Whether a launch may choose the order of tiles: only of a persistent kernel that does not split K."""
        return self.schedule != "warp_specialized" and self.whole_k

    @property
    def copies(self) -> bool:
        """Whether the launch copies A or B to aligned lines first."""
        return self.realign

    @property
    def whole_k(self) -> bool:
        """Whether one thread block adds up all of a tile's K in order. All such kernels give the same bits."""
        return self.scheduler == "persistent" and self.split_k == 1

    @property
    def side_by_side(self) -> bool:
        """Whether the two warpgroups of a cooperative tile share its columns: if M is an odd multiple of 64."""
        return self.schedule == "cooperative" and self.threadblock.m % 128 != 0

    @property
    def part(self) -> ThreadblockShape:
        """The part of a tile that one thread block finishes: all of it, unless blocks split K and then its columns."""
        tile = self.threadblock
        return tile if self.split_k == 1 else replace(tile, n=max(1, tile.n // self.split_k))

    def refuses(self, order: TileOrder) -> str | None:
        """Return why a launch cannot visit the tiles in an order; None if it can."""
        if self.ordered or not order.by_gpc:
            return None
        return "by_gpc needs a persistent kernel that does not split K"

    def usual_order(self, problem: Problem) -> TileOrder:
        """Return the order of tiles for a problem for which none was measured. All GEMMs of the problem have the same.

        An operand that does not stay in the L2 cache is read from device memory once for each strip of tiles that
        crosses it. The order with the fewest such reads comes first. Otherwise neighbours share the operand that the
        cluster's multicast does not; and where idle warps read A's rows beside the main loop, new rows come last, as
        epilogues wait for them (benchmarks/NOTES.md).
        """
        if not self.ordered:
            return USUAL_ORDER
        m, n, k = problem.extents
        m, n = (n, m) if self.swap_ab else (m, n)
        tile, cluster = self.threadblock, self.cluster
        rows, columns = _ceil(m, tile.m * cluster.m), _ceil(n, tile.n * cluster.n)
        by_m, by_n = _reads_again(m * k, columns), _reads_again(n * k, rows)
        otherwise = not self.swap_ab if self.means == "beside" else cluster.m >= cluster.n
        along_n = otherwise if by_n == by_m else by_n < by_m
        strips = rows if along_n else columns
        return TileOrder("along_n" if along_n else "along_m", swizzle=2 if strips >= 8 else 1)

    @property
    def along_problem(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Extents of tile and cluster along the problem's M and N."""
        tile, cluster = self.threadblock, self.cluster
        if self.swap_ab:
            return (tile.n, tile.m), (cluster.n, cluster.m)
        return (tile.m, tile.n), (cluster.m, cluster.n)

    def transposes(self, d_col_major: bool) -> bool:
        """Whether the kernel computes D^T."""
        return self.swap_ab

    def target_on(self, capability: tuple[int, int]) -> str:
        """Return the target of such a kernel: the one that there is."""
        return self.default_target

    @property
    def slug(self) -> str:
        """Short readable name, unique among legal configurations that differ in compiled code."""
        schedule = {"pingpong": "pp", "cooperative": "coop", "warp_specialized": "ws"}[self.schedule]
        split = "_streamk" if self.scheduler == "stream_k" else ""
        split += f"_split{self.split_k}" if self.split_k != 1 else ""
        tail = split + ("_swap" if self.swap_ab else "") + ("" if self.means == "gathered" else f"_{self.means}")
        tail += ("_realign" if self.realign else "") + ("_promoted" if self.accumulation == "promoted" else "")
        stages = "" if self.stages is None else f"_s{self.stages}"
        stages += "" if self.resident == 1 else f"_x{self.resident}"
        return f"sm90_{self.threadblock}_{self.cluster}_{schedule}{stages}{tail}"


# An operand up to this size stays in the L2 cache of 50 MB that chips with wgmma have, while another streams by.
_KEPT_BYTES = 40e6


def _reads_again(elements: int, strips: int) -> float:
    """Return the bytes that an operand is read again from device memory, walked along once for each strip."""
    size = 2.0 * elements
    return size * (strips - 1) if size > _KEPT_BYTES else 0.0


def _ceil(x: int, y: int) -> int:
    return -(-x // y)


@hashed_once
@dataclass(frozen=True, repr=False)
class GemvConfig(KernelConfig):
    """A kernel for few rows of A, which loads without TMA, for sm_80 and every later target.

    With up to four rows, each warp multiplies them by one column of B along all of K, in FP32 arithmetic. With eight or
    sixteen rows, a thread block has sixteen columns, its warps share K, and ``mma.sync`` multiplies. The kernel serves
    any number of rows, but reads B again for every ``rows`` of them.

    Attributes
    ----------
    rows : int
        Rows of A that are multiplied at a time.
    warps : int
        Warps of a thread block.
    pieces : int
        Loads of 16 bytes from a column of B that a thread has in flight at a time; with eight rows or more, from each
        of two columns.

    Raises
    ------
    ConfigError
        If a field has a value of the wrong type.

    Examples
    --------
    >>> co.GemvConfig(rows=4)
    GemvConfig(rows=4)
    """

    rows: int = 1
    warps: int = 8
    pieces: int = 8

    arch: ClassVar[str] = "gemv"
    default_target: ClassVar[str] = "sm_80"
    few_rows: ClassVar[bool] = True

    @property
    def by_tile(self) -> bool:
        """Whether the warps of a thread block share its columns, and Tensor Cores multiply."""
        return self.rows >= 8

    @property
    def threadblock(self) -> ThreadblockShape:
        """What one thread block computes at a time, in elements of 16 bits."""
        if self.by_tile:
            return ThreadblockShape(self.rows, 16, 32 * self.warps * self.pieces)
        return ThreadblockShape(self.rows, self.warps, 256 * self.pieces)

    @property
    def whole_k(self) -> bool:
        """Whether one thread block adds up all of a tile's K in order. False: lanes share K."""
        return False

    @property
    def slug(self) -> str:
        """Short readable name, unique among legal configurations."""
        return f"gemv_{self.rows}x{self.warps}_p{self.pieces}"


@hashed_once
@dataclass(frozen=True, repr=False)
class SmallConfig(KernelConfig):
    """An ``mma.sync`` kernel for batches of small GEMMs, for sm_80 and every later target.

    Each warp computes its own tiles, and meanwhile loads the operands of its next ones. Operands may have any
    alignment. The kernel serves larger GEMMs too, but reads A and B again for each tile.

    Attributes
    ----------
    threadblock : ThreadblockShape
        Rows and columns of a warp's tile, and how much of K it loads at a time.
    stages : int
        Pipeline stages of each warp in shared memory, loads in flight included.
    warps : int
        Warps of a thread block. They share no data.

    Raises
    ------
    ConfigError
        If a field has a value of the wrong type.

    Examples
    --------
    >>> co.SmallConfig(co.ThreadblockShape(32, 32, 32))
    SmallConfig(ThreadblockShape(32, 32, 32))
    """

    threadblock: ThreadblockShape
    stages: int = 3
    warps: int = 2

    arch: ClassVar[str] = "small"
    default_target: ClassVar[str] = "sm_80"

    @property
    def whole_k(self) -> bool:
        """Whether one warp adds up all of a tile's K in order. All such kernels give the same bits."""
        return True

    @property
    def slug(self) -> str:
        """Short readable name, unique among legal configurations."""
        return f"small_{self.threadblock}_s{self.stages}_w{self.warps}"


@hashed_once
@dataclass(frozen=True, repr=False)
class PointwiseConfig(KernelConfig):
    """A kernel for an epilogue that does not read the accumulator, for sm_80 and every later target.

    Each warp has rows of 256 columns, of which a thread reads and writes eight at a time. The kernel is limited by
    memory bandwidth if each element takes few operations.

    Attributes
    ----------
    rows : int
        Rows of each of a thread block's eight warps. In a reduction over columns, each thread block gives one partial
        result.

    Raises
    ------
    ConfigError
        If a field has a value of the wrong type.

    Examples
    --------
    >>> co.PointwiseConfig(rows=4)
    PointwiseConfig(rows=4)
    """

    rows: int = 16

    arch: ClassVar[str] = "pointwise"
    default_target: ClassVar[str] = "sm_80"

    warps: ClassVar[int] = 8

    @property
    def threadblock(self) -> ThreadblockShape:
        """What one thread block computes. K is not read."""
        return ThreadblockShape(self.rows * self.warps, 256, 16)

    @property
    def whole_k(self) -> bool:
        """Whether one thread block adds up all of a tile's K in order. This kernel adds up nothing."""
        return False

    @property
    def slug(self) -> str:
        """Short readable name, unique among legal configurations."""
        return f"pointwise_{self.rows}"


Config = Sm80Config | Sm90Config | GemvConfig | SmallConfig | PointwiseConfig


@dataclass(frozen=True)
class Ordered:
    """A configuration with the order of its tiles: what enters a race, and what serves a problem.

    Attributes
    ----------
    config : Config
        The kernel's configuration.
    order : TileOrder
        The order of its tiles.
    """

    config: Config
    order: TileOrder = USUAL_ORDER

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
    """Rebuild a configuration from :func:`config_to_json`'s value.

    Raises
    ------
    ConfigError
        If the architecture or a field is unknown, or a value has the wrong type.
    """
    kinds: dict[str, type[Config]] = {c.arch: c for c in typing.get_args(Config)}
    if not isinstance(data, dict):
        raise ConfigError(f"a configuration is a JSON object, not {type(data).__name__}")
    arch = data.get("arch")
    if not isinstance(arch, str) or arch not in kinds:
        raise ConfigError(f"unknown configuration arch {checked_json.shown(arch)}: use one of {', '.join(kinds)}")
    cls = kinds[arch]
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
