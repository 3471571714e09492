"""Configurations of Sm90 kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from cutlass_ops.base.arch import WGMMA, Family
from cutlass_ops.base.frozen import hashed_once
from cutlass_ops.declare.config import ClusterShape, Config, Means, ThreadblockShape
from cutlass_ops.declare.order import USUAL_ORDER, TileOrder
from cutlass_ops.declare.problem import Problem

Schedule = Literal["pingpong", "cooperative", "warp_specialized"]
TileScheduler = Literal["persistent", "stream_k"]
Accumulation = Literal["fast", "promoted"]
_NO_CLUSTER = ClusterShape(1, 1)


@hashed_once
@dataclass(frozen=True, repr=False)
class Sm90Config(Config):
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
    cluster: ClusterShape = _NO_CLUSTER
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
    family: ClassVar[Family] = WGMMA

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
