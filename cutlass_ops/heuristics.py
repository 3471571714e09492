"""A configuration for a shape, without measuring: a handful of kernels a signature, and a cost model that picks one.

The model counts waves of tiles over the multiprocessors. Its constants rank one H100's times for bias + ReLU in BF16 as
``benchmarks/sweep.py`` measured them; they are no promises.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf

from cutlass_ops import arch, legality, model
from cutlass_ops.config import (
    ClusterShape,
    Config,
    Schedule,
    Sm80Config,
    Sm90Config,
    ThreadblockShape,
    WarpShape,
)
from cutlass_ops.registry import OpSignature
from cutlass_ops.spec import KernelSpec


@dataclass(frozen=True)
class Device:
    """What the choice needs to know of a device: compute capability and number of multiprocessors."""

    capability: tuple[int, int]
    multiprocessors: int


@dataclass(frozen=True)
class Candidate:
    """A configuration with the constants of its cost.

    Attributes
    ----------
    config : Config
        The configuration.
    step : float
        Microseconds for one K step of one wave of tiles, at a sustained clock.
    tile : float
        Microseconds that a tile costs besides its K steps: prologue and epilogue that nothing hides. A pingpong kernel
        pays once, since one tile's epilogue runs beside the next tile's main loop.
    beyond_l2 : float
        Factor on the time once both A and B exceed the L2 cache: small tiles read them more often.
    """

    config: Config
    step: float
    tile: float
    beyond_l2: float = 1.0

    @property
    def shape(self) -> tuple[int, int, int]:
        """Tile extents along the problem's M, N and K."""
        t = self.config.threadblock
        swap = isinstance(self.config, Sm90Config) and self.config.swap_ab
        return (t.n, t.m, t.k) if swap else (t.m, t.n, t.k)

    @property
    def cluster(self) -> tuple[int, int]:
        """Thread blocks in a cluster along the problem's M and N."""
        if not isinstance(self.config, Sm90Config):
            return 1, 1
        c = self.config.cluster
        return (c.n, c.m) if self.config.swap_ab else (c.m, c.n)


def _sm90(
    m: int, n: int, k: int, schedule: Schedule, cluster: tuple[int, int] = (1, 1), *, swap_ab: bool = False
) -> Sm90Config:
    return Sm90Config(ThreadblockShape(m, n, k), ClusterShape(*cluster), schedule=schedule, swap_ab=swap_ab)


SM90 = (
    Candidate(_sm90(64, 48, 128, "warp_specialized"), 0.375, 0.90),
    Candidate(_sm90(64, 16, 256, "warp_specialized", swap_ab=True), 0.735, 0.83),
    Candidate(_sm90(64, 32, 256, "warp_specialized", swap_ab=True), 0.725, 0.87),
    Candidate(_sm90(64, 64, 128, "warp_specialized", swap_ab=True), 0.355, 0.94),
    Candidate(_sm90(64, 64, 128, "warp_specialized", (1, 2), swap_ab=True), 0.350, 0.94),
    Candidate(_sm90(64, 96, 64, "warp_specialized", (2, 1)), 0.225, 0.90, 1.20),
    Candidate(_sm90(64, 128, 64, "warp_specialized", (2, 1)), 0.245, 0.90, 1.25),
    Candidate(_sm90(64, 128, 128, "warp_specialized"), 0.550, 0.40, 1.25),
    Candidate(_sm90(128, 96, 64, "warp_specialized", (2, 1)), 0.312, 1.20, 1.30),
    Candidate(_sm90(128, 128, 64, "warp_specialized", (2, 1)), 0.376, 1.10, 1.20),
    Candidate(_sm90(128, 112, 64, "pingpong", (2, 1)), 0.352, 1.40, 1.10),
    Candidate(_sm90(128, 128, 64, "pingpong", (2, 1)), 0.378, 1.40, 1.07),
    Candidate(_sm90(128, 160, 64, "pingpong", (2, 1)), 0.466, 1.60, 1.08),
    Candidate(_sm90(128, 176, 64, "pingpong", (2, 1)), 0.519, 1.70, 1.02),
    Candidate(_sm90(128, 192, 64, "pingpong", (2, 1)), 0.558, 1.80, 1.02),
    Candidate(_sm90(256, 128, 64, "cooperative", (2, 1)), 0.752, 1.80, 1.02),
)


def _sm80(m: int, n: int, warp_m: int, warp_n: int, stages: int) -> Sm80Config:
    return Sm80Config(
        threadblock=ThreadblockShape(m, n, 32), warp=WarpShape(warp_m, warp_n, 32), stages=stages, swizzle=1
    )


SM80 = (
    Candidate(_sm80(64, 64, 32, 32, 5), 0.13, 2.0, 1.3),
    Candidate(_sm80(128, 128, 64, 64, 4), 0.36, 3.0),
)
# Operands aligned to less than 4 bytes cannot use cp.async: two stages, through registers.
SM80_UNALIGNED = tuple(replace(c, config=replace(c.config, stages=2)) for c in SM80)

_L2_BYTES = 50e6
_BANDWIDTH = 2.9e6  # bytes a microsecond
_LAUNCH = 3.0  # microseconds from one kernel to the next, with the first loads


# Row counts at which the choice is asked in advance; beyond, the largest tiles stay the choice.
_ROWS = (*range(1, 257), *range(272, 16385, 16))


def specs(signature: OpSignature, device: Device) -> tuple[KernelSpec, ...]:
    """Return every kernel that :func:`choose` may pick for a signature on a device."""
    return tuple(spec(signature, c.config, device) for c in candidates(signature, device))


def specs_for(signature: OpSignature, device: Device, n: int, k: int) -> tuple[KernelSpec, ...]:
    """Return the kernels that :func:`choose` may pick for any number of rows of A, given B's extents.

    A service's weights are fixed and its batch is not: once these are there, nothing is compiled for any M.
    """
    return tuple(spec(signature, c.config, device) for c in _reachable(signature, device, n, k))


def choose(signature: OpSignature, device: Device, problem: tuple[int, int, int]) -> tuple[KernelSpec, Config]:
    """Pick a kernel for a problem.

    Parameters
    ----------
    signature : OpSignature
        Epilogue and operand types.
    device : Device
        Where it runs.
    problem : tuple of int
        M, N and K.

    Returns
    -------
    KernelSpec, Config
        The kernel, and its configuration with the launch arguments.
    """
    _, n, k = problem
    best = min(_reachable(signature, device, n, k), key=lambda c: cost(c, problem, device.multiprocessors))
    return spec(signature, best.config, device), with_order(best.config, problem)


@lru_cache(maxsize=4096)
def _reachable(signature: OpSignature, device: Device, n: int, k: int) -> tuple[Candidate, ...]:
    pool = candidates(signature, device)
    best = {min(pool, key=lambda c: cost(c, (m, n, k), device.multiprocessors)) for m in _ROWS}
    return tuple(c for c in pool if c in best)


def with_order(config: Config, problem: tuple[int, int, int]) -> Config:
    """Set the order in which tiles are visited.

    With a cluster of two along M, walking along N in strips of two cluster rows was on average within 2% of the best
    order (benchmarks/NOTES.md). An odd strip at the end would leave multiprocessors without a tile, which only many
    rows hide.
    """
    if not isinstance(config, Sm90Config) or config.cluster.m == 1:
        return config
    strips = _ceil(problem[0], config.threadblock.m * config.cluster.m)
    return replace(config, raster="along_n", swizzle=2 if strips % 2 == 0 or strips > 8 else 1)


def cost(candidate: Candidate, problem: tuple[int, int, int], multiprocessors: int) -> float:
    """Predict a time in microseconds, good for comparing candidates; infinite if the kernel cannot be launched."""
    m, n, k = problem
    tile_m, tile_n, tile_k = candidate.shape
    cluster_m, cluster_n = candidate.cluster
    rows = _ceil(_ceil(m, tile_m), cluster_m) * cluster_m
    columns = _ceil(_ceil(n, tile_n), cluster_n) * cluster_n
    if _grid_y(candidate.config, rows, columns) > arch.MAX_GRID_Y:
        return inf
    waves = _ceil(rows * columns, multiprocessors)
    exposed = 1 if isinstance(candidate.config, Sm90Config) and candidate.config.schedule == "pingpong" else waves
    time = _LAUNCH + waves * _ceil(k, tile_k) * candidate.step + exposed * candidate.tile
    if 2 * min(m * k, k * n) > _L2_BYTES:
        time *= candidate.beyond_l2
    # Each cluster row reads B again, most of it from the L2 cache.
    rereads = 1 + 0.05 * (min(rows // cluster_m, 5) - 1)
    floor = 2 * (m * k + k * n * rereads + m * n) / _BANDWIDTH + _LAUNCH
    # Among kernels that all wait for memory, the one with the least padding wins.
    padding = 1 + 0.02 * (rows * tile_m / m - 1)
    return max(time, floor) * padding


def _grid_y(config: Config, rows: int, columns: int) -> int:
    """Return the grid's second extent: a kernel that is not persistent has a thread block for each tile."""
    if not isinstance(config, Sm90Config) or config.schedule != "warp_specialized":
        return 1
    return rows if config.swap_ab else columns


@lru_cache(maxsize=4096)
def candidates(signature: OpSignature, device: Device) -> tuple[Candidate, ...]:
    """Return the candidates that are legal for a signature on a device, without duplicates."""
    if device.capability == (9, 0) and signature.a.aligned and signature.b.aligned:
        legal = _legal(signature, SM90, device)
        if legal:
            return legal
    if arch.target_for(device.capability, wgmma=False) is None:
        return ()
    narrow = min(signature.a.alignment, signature.b.alignment) == 1
    return _legal(signature, SM80_UNALIGNED if narrow else SM80, device)


def _legal(signature: OpSignature, pool: Iterable[Candidate], device: Device) -> tuple[Candidate, ...]:
    variants = (_first_legal(signature, c, device) for c in pool)
    unique = {c.config: c for c in variants if c is not None}
    return tuple(unique.values())


def _first_legal(signature: OpSignature, candidate: Candidate, device: Device) -> Candidate | None:
    """Return a candidate if it is legal, else its pingpong form: reductions need a persistent kernel's workspace."""
    tried = [candidate]
    if isinstance(candidate.config, Sm90Config) and candidate.config.schedule == "warp_specialized":
        tried.append(replace(candidate, config=replace(candidate.config, schedule="pingpong")))
    return next((c for c in tried if not legality.check(spec(signature, c.config, device))), None)


def spec(signature: OpSignature, config: Config, device: Device) -> KernelSpec:
    """Return the kernel that serves a signature on a device with a configuration."""
    major, minor = device.capability
    target = None if isinstance(config, Sm90Config) else f"sm_{major}{minor}"
    return signature.spec(config, target)


def predict(config: Config, problem: tuple[int, int, int], device: Device) -> float:
    """Return a configuration's time in microseconds, predicted."""
    if isinstance(config, Sm90Config):
        return model.predict(config, problem, replace(model.H100, multiprocessors=device.multiprocessors))
    known = {c.config: c for c in (*SM80, *SM80_UNALIGNED)}
    return cost(known[config], problem, device.multiprocessors)


def _ceil(x: int, y: int) -> int:
    return -(-x // y)
