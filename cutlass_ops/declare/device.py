"""A device as the choice of a kernel sees it, and decisions that need neither table nor model."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cutlass_ops.declare.config import Config, Sm90Config
from cutlass_ops.declare.signature import OpSignature
from cutlass_ops.declare.spec import KernelSpec, Operand

Problem = tuple[int, int, int]

# An operand up to this size stays in the 50 MB L2 cache of chips with wgmma while another operand streams through.
_KEPT_BYTES = 40e6


@dataclass(frozen=True)
class Device:
    """A device as the choice of a kernel sees it.

    Attributes
    ----------
    capability : tuple of int
        Compute capability.
    multiprocessors : int
        Number of multiprocessors.
    name : str
        The driver's name, under which measurements are kept.
    """

    capability: tuple[int, int]
    multiprocessors: int
    name: str = ""

    @property
    def has_wgmma(self) -> bool:
        """Whether the device has TMA and wgmma."""
        return self.capability == (9, 0)

    def loads_by_tma(self, a: Operand, b: Operand) -> bool:
        """Whether TMA can load A and B without a copy: their addresses and lines are aligned."""
        return self.has_wgmma and a.aligned and b.aligned

    def spec(self, signature: OpSignature, config: Config) -> KernelSpec:
        """Return the specification of a signature's kernel with a configuration on this device."""
        return signature.spec(config, config.target_on(self.capability))


def with_order(config: Config, problem: Problem) -> Config:
    """Set the order of tiles.

    An operand too large for the L2 cache is read from device memory once for each strip of tiles that crosses it. The
    order with the fewest such reads wins. If equal: kernels whose idle warps read A's rows take new rows last, since
    epilogues wait for them; others let neighbours share the operand that is not multicast (benchmarks/NOTES.md).
    """
    if not isinstance(config, Sm90Config) or not config.ordered:
        return config
    m, n, k = (problem[1], problem[0], problem[2]) if config.swap_ab else problem
    tile, cluster = config.threadblock, config.cluster
    rows, columns = _ceil(m, tile.m * cluster.m), _ceil(n, tile.n * cluster.n)
    by_m, by_n = _reads_again(m * k, columns), _reads_again(n * k, rows)
    otherwise = not config.swap_ab if config.means == "beside" else cluster.m >= cluster.n
    along_n = otherwise if by_n == by_m else by_n < by_m
    strips = rows if along_n else columns
    return replace(config, raster="along_n" if along_n else "along_m", swizzle=2 if strips >= 8 else 1)


def _reads_again(elements: int, strips: int) -> float:
    """Return the bytes of an operand that strips after the first read again from device memory."""
    size = 2.0 * elements
    return size * (strips - 1) if size > _KEPT_BYTES else 0.0


def _ceil(x: int, y: int) -> int:
    return -(-x // y)
