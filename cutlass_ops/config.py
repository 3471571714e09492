"""Kernel configurations: tile shapes, pipeline and schedule, as frozen values.

A configuration says how a kernel is built, a :class:`~cutlass_ops.spec.KernelSpec` what it computes. Whether the two
fit together is decided in :mod:`cutlass_ops.legality`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar, Literal, get_args

from cutlass_ops import plain
from cutlass_ops.errors import ConfigError

SWIZZLES = (1, 2, 4, 8)  # how many tiles wide the strips may be in which tiles are visited


@dataclass(frozen=True)
class ThreadblockShape:
    """Tile of the (M, N, K) problem that one thread block (CTA) computes, in elements."""

    m: int
    n: int
    k: int

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k}"


@dataclass(frozen=True)
class WarpShape:
    """Part of the threadblock tile that one warp computes (Sm80), in elements."""

    m: int
    n: int
    k: int

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k}"


@dataclass(frozen=True)
class InstructionShape:
    """Shape of one ``mma.sync`` Tensor Core instruction (Sm80), in elements."""

    m: int
    n: int
    k: int

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k}"


@dataclass(frozen=True)
class ClusterShape:
    """Thread blocks in a cluster along M and N (Sm90)."""

    m: int = 1
    n: int = 1

    def __str__(self) -> str:
        return f"{self.m}x{self.n}"


Schedule = Literal["pingpong", "cooperative", "warp_specialized"]
TileScheduler = Literal["persistent", "stream_k"]
Raster = Literal["heuristic", "along_m", "along_n"]
Means = Literal["gathered", "beside", "ahead"]
# What they say of an epilogue's means of A's rows.
MEANS: dict[Means, str] = {
    "gathered": "gathered by the main loop from the tiles that it multiplies",
    "beside": "taken by idle warps beside the main loop, each row once",
    "ahead": "taken by a small kernel ahead of the GEMM",
}


@dataclass(frozen=True)
class Sm80Config:
    """A multistage ``mma.sync`` kernel (CUTLASS 2.x), for Sm80 and every later target.

    Attributes
    ----------
    threadblock, warp, instruction
        Tile shapes in elements.
    stages : int
        Shared-memory pipeline stages; 2 means loads through registers, 3 and more ``cp.async``.
    swizzle : int
        Tiles that neighbouring thread blocks cover along N before moving on along M: 1, 2, 4 or 8. A launch argument:
        it does not change the compiled code.
    stream_k : bool
        Split the work of the last wave along K over all multiprocessors.
    """

    threadblock: ThreadblockShape
    warp: WarpShape
    instruction: InstructionShape = InstructionShape(16, 8, 16)
    stages: int = 3
    swizzle: int = 1
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
        """Whether one thread block adds up all of a tile's K, first to last. All such kernels round alike."""
        return not self.stream_k

    def binary(self) -> Sm80Config:
        """Return the configuration as far as it changes the compiled code: without the launch argument."""
        return replace(self, swizzle=1)


@dataclass(frozen=True)
class Sm90Config:
    """A warp-specialised TMA + ``wgmma`` kernel (CUTLASS 3.x), for sm_90a.

    Attributes
    ----------
    threadblock : ThreadblockShape
        The CTA tile in elements, in the kernel's own orientation: with ``swap_ab`` its M side runs along the
        problem's N.
    cluster : ClusterShape
        Thread blocks that share operand tiles by multicast.
    schedule : str
        ``"pingpong"`` (two consumer warpgroups on two tiles), ``"cooperative"`` (two on one tile) or
        ``"warp_specialized"`` (one, not persistent).
    scheduler : str
        ``"persistent"`` or ``"stream_k"``.
    stages : int or None
        Shared-memory pipeline stages; None means as many as fit.
    swap_ab : bool
        Compute D^T = B^T A^T, which puts N on the instruction's fixed 64-row side: for few rows.
    split_k : int
        Thread blocks of a cluster that share one tile, each with a part of K; they add the parts up through distributed
        shared memory, always in the same order. For few tiles with a long K. Such a kernel is not persistent, and its
        cluster has no other blocks.
    means : str
        Where means of A's rows are from, if an epilogue takes any. ``"gathered"``: the main loop reads each tile of A
        once more for them, which is free for few rows. ``"beside"``: idle warps of the kernel read each row once while
        the others multiply, and an epilogue waits for the rows of its tile. ``"ahead"``: a small kernel takes them
        before, and the epilogue waits for its end.
    realign : bool
        Whether A or B, or both, lie as TMA cannot read them: their address or leading dimension is no multiple of 16
        bytes. A small kernel then copies them ahead of the GEMM, into workspace, to lines that are aligned.
    raster, swizzle
        Order in which tiles are visited: strips of ``swizzle`` clusters, along M or N of the kernel's orientation.
        Launch arguments: they do not change the compiled code.
    by_gpc : bool
        Whether each GPC (graphics processing cluster) takes a run of tiles that follow each other in that order: its
        multiprocessors' reads of one line are merged on their way to the L2 cache. For problems of few waves, where
        that traffic is the limit; such a launch does not overlap with the kernel before it. A launch argument.
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
    raster: Raster = "heuristic"
    swizzle: int = 1
    by_gpc: bool = False

    arch: ClassVar[str] = "sm90"
    default_target: ClassVar[str] = "sm_90a"

    @property
    def ordered(self) -> bool:
        """Whether its tiles have an order that a launch may choose: a persistent kernel that does not split K."""
        return self.schedule != "warp_specialized" and self.whole_k

    @property
    def whole_k(self) -> bool:
        """Whether one thread block adds up all of a tile's K, first to last. All such kernels round alike."""
        return self.scheduler == "persistent" and self.split_k == 1

    @property
    def side_by_side(self) -> bool:
        """Whether the two warpgroups of a cooperative tile share its columns: where it has an odd number of 64 rows."""
        return self.schedule == "cooperative" and self.threadblock.m % 128 != 0

    @property
    def part(self) -> ThreadblockShape:
        """The part of a tile that one thread block finishes: all of it, unless blocks split K and then its columns."""
        tile = self.threadblock
        return tile if self.split_k == 1 else replace(tile, n=max(1, tile.n // self.split_k))

    @property
    def order(self) -> str:
        """Short readable name of the order of its tiles."""
        return f"{self.raster} {self.swizzle}" + (" by gpc" if self.by_gpc else "")

    @property
    def slug(self) -> str:
        """Short readable name, unique among legal configurations that differ in compiled code."""
        schedule = {"pingpong": "pp", "cooperative": "coop", "warp_specialized": "ws"}[self.schedule]
        split = "_streamk" if self.scheduler == "stream_k" else ""
        split += f"_split{self.split_k}" if self.split_k != 1 else ""
        tail = split + ("_swap" if self.swap_ab else "") + ("" if self.means == "gathered" else f"_{self.means}")
        tail += "_realign" if self.realign else ""
        stages = "" if self.stages is None else f"_s{self.stages}"
        return f"sm90_{self.threadblock}_{self.cluster}_{schedule}{stages}{tail}"

    def binary(self) -> Sm90Config:
        """Return the configuration as far as it changes the compiled code: without the launch arguments."""
        return replace(self, raster="heuristic", swizzle=1, by_gpc=False)


@dataclass(frozen=True)
class GemvConfig:
    """A kernel of ordinary loads for few rows of A, for Sm80 and every later target.

    With up to four rows, each warp multiplies them by one column of B, all of whose K it reads, in FP32 arithmetic.
    With eight or sixteen, a thread block has sixteen columns, its warps share K, and ``mma.sync`` multiplies. It serves
    any number of rows, but reads B again for each ``rows`` of them.

    Attributes
    ----------
    rows : int
        Rows of A that are multiplied at a time.
    warps : int
        Warps of a thread block.
    pieces : int
        Accesses of 16 bytes to a column of B that a thread has on their way at a time; with eight rows and more, to
        each of two.
    """

    rows: int = 1
    warps: int = 8
    pieces: int = 8

    arch: ClassVar[str] = "gemv"
    default_target: ClassVar[str] = "sm_80"
    swizzle: ClassVar[int] = 1  # there is one order

    @property
    def by_tile(self) -> bool:
        """Whether a thread block's warps share its columns, which Tensor Cores multiply."""
        return self.rows >= 8

    @property
    def threadblock(self) -> ThreadblockShape:
        """What one thread block computes at a time, in elements of 16 bits."""
        if self.by_tile:
            return ThreadblockShape(self.rows, 16, 32 * self.warps * self.pieces)
        return ThreadblockShape(self.rows, self.warps, 256 * self.pieces)

    @property
    def whole_k(self) -> bool:
        """Whether it rounds as the kernels do that add up a tile's K first to last: no, lanes share K."""
        return False

    @property
    def slug(self) -> str:
        """Short readable name, unique among legal configurations."""
        return f"gemv_{self.rows}x{self.warps}_p{self.pieces}"

    def binary(self) -> GemvConfig:
        """Return the configuration as far as it changes the compiled code: all of it."""
        return self


Config = Sm80Config | Sm90Config | GemvConfig

_SHAPES = {
    "threadblock": ThreadblockShape,
    "warp": WarpShape,
    "instruction": InstructionShape,
    "cluster": ClusterShape,
}


def config_to_json(config: Config) -> dict[str, Any]:
    """Return the canonical JSON form of a configuration. What came later is left out where it says nothing."""
    values = {"arch": config.arch} | asdict(config)
    for name, says_nothing in (("split_k", 1), ("means", "gathered"), ("realign", False)):
        if values.get(name) == says_nothing:
            del values[name]
    return values


# What a field of JSON may hold besides shapes; legality says which numbers make sense.
_PLAIN: dict[str, tuple[str | int | bool | None, ...] | type] = {
    "schedule": get_args(Schedule),
    "scheduler": get_args(TileScheduler),
    "raster": get_args(Raster),
    "swizzle": int,
    "swap_ab": bool,
    "split_k": int,
    "means": get_args(Means),
    "realign": bool,
    "by_gpc": bool,
    "stream_k": bool,
    "rows": int,
    "warps": int,
    "pieces": int,
}


def _check_plain(name: str, value: Any) -> None:
    if name == "stages":
        if value is not None and type(value) is not int:
            raise ConfigError(f"stages must be an integer or null, not {plain.shown(value)}")
        return
    allowed = _PLAIN[name]
    if isinstance(allowed, tuple):
        if value not in allowed:
            raise ConfigError(f"{name} must be one of {', '.join(map(str, allowed))}, not {plain.shown(value)}")
    elif type(value) is not allowed:
        raise ConfigError(f"{name} must be of type {allowed.__name__}, not {plain.shown(value)}")


def config_from_json(data: object) -> Config:
    """Rebuild a configuration from :func:`config_to_json`'s value.

    Raises
    ------
    ConfigError
        If the architecture or a field is unknown, or a value has the wrong type.
    """
    kinds: dict[str, type[Config]] = {c.arch: c for c in (Sm80Config, Sm90Config, GemvConfig)}
    if not isinstance(data, dict):
        raise ConfigError(f"a configuration is a JSON object, not {type(data).__name__}")
    arch = data.get("arch")
    if not isinstance(arch, str) or arch not in kinds:
        raise ConfigError(f"unknown configuration arch {plain.shown(arch)}: use one of {', '.join(kinds)}")
    cls = kinds[arch]
    names = {f.name for f in fields(cls)}
    values: dict[str, Any] = {}
    for name, value in data.items():
        if name == "arch":
            continue
        if name not in names:
            shown = plain.shown(name)
            raise ConfigError(f"unknown field {shown} in an {arch} configuration: it has {', '.join(sorted(names))}")
        if name in _SHAPES:
            if not isinstance(value, dict) or not all(type(v) is int for v in value.values()):
                raise ConfigError(f"{name} must be an object of integers, not {plain.shown(value)}")
            try:
                value = _SHAPES[name](**value)
            except TypeError as exc:
                raise ConfigError(f"{name}: {exc}") from None
        else:
            _check_plain(name, value)
        values[name] = value
    try:
        return cls(**values)
    except TypeError as exc:
        raise ConfigError(f"{arch} configuration: {exc}") from None
