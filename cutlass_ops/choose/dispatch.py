"""The one decision about a call: by a loaded bundle, else by measurements and models.

A call uses a :class:`Decision`'s kernel or peer, the background and ``warm_up`` its other kernels, and ``explain`` its
candidates.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from cutlass_ops.artifacts.bundles import Bundles
from cutlass_ops.base import arch, env
from cutlass_ops.base.arch import MMA_SYNC
from cutlass_ops.base.dtypes import FP8, SPARSE
from cutlass_ops.base.errors import UnsupportedError
from cutlass_ops.base.mma import mma_of
from cutlass_ops.base.session import cached
from cutlass_ops.choose import limits
from cutlass_ops.declare.config import Config
from cutlass_ops.declare.device import Device
from cutlass_ops.declare.form import GROUPED, RAGGED_K
from cutlass_ops.declare.order import TileOrder
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.signature import OpSignature
from cutlass_ops.declare.spec import KernelSpec

if TYPE_CHECKING:
    from cutlass_ops.choose.knowledge import Candidate
    from cutlass_ops.choose.policies import Policy
    from cutlass_ops.choose.weight import Weight


def unserved(what: str, signature: OpSignature, device: Device, name: str = "") -> str:
    """Return the error message for a signature that no kernel serves on a device."""
    advice = _without_tma(signature, device)
    if not advice and arch.best_target(device.capability) is not None:
        from cutlass_ops.kinds import legality

        advice = legality.why_unserved(signature, device.capability)
    return arch.unserved(what, device.capability, name, advice)


def _without_tma(signature: OpSignature, device: Device) -> str:
    """Return what to do about a signature that only kernels of wgmma serve, on a device without it; or nothing."""
    mma = mma_of(signature.a.dtype, signature.b.dtype)
    warp = None if mma is None else mma.by(MMA_SYNC)
    if device.has_tma:
        return ""
    if signature.form == GROUPED:
        return "groups of rows need wgmma, which sm_90 alone has: call gemm for each expert's rows"
    if signature.form == RAGGED_K:
        return "groups of K need wgmma, which sm_90 alone has: multiply each expert's rows by themselves"
    if signature.b.dtype in SPARSE:
        return "a 2:4 sparse weight needs wgmma, which sm_90 alone has: multiply by its to_dense()"
    if mma is not None and warp is None:
        return "these types need wgmma, which sm_90 alone has: convert a and b to BF16"
    if warp is not None and warp.k_major_only and signature.realigns:
        return (
            f"{signature.a.dtype} is read along K only, from lines at multiples of 16 bytes, and copied to such lines "
            "on sm_90 alone: pass a row-major a and prepare(b).matrix, with K a multiple of 16"
        )
    if any(t.dtype in FP8 for t in (signature.d, *signature.outputs)) and device.capability < arch.STORES_FP8:
        return "results in FP8 are stored on sm_90 alone: take them in BF16, and convert them"
    return ""


@dataclass(frozen=True)
class Decision:
    """What serves a problem."""

    signature: OpSignature  # the call's signature
    device: Device  # where it runs
    problem: Problem  # its extents
    config: Config  # the kernel's configuration
    order: TileOrder  # the order of its tiles
    kept: tuple[Config, ...]  # the kernels that this weight (N, K) may need at some number of rows
    bundled: bool  # whether the decision was made with the bundle, without tables or models
    peer: str | None = None  # the peer that serves the call instead: it was measured faster, and tuning allowed it
    _weight: Weight | None = field(default=None, repr=False, compare=False)

    @property
    def spec(self) -> KernelSpec:
        """The kernel."""
        known = self._weight and self._weight.specs.get(self.config)
        return known or self.device.spec(self.signature, self.config)

    @property
    def specs(self) -> tuple[KernelSpec, ...]:
        """The specifications of :attr:`kept`."""
        if self._weight is not None:
            return tuple(self._weight.specs.values())
        return tuple(self.device.spec(self.signature, c) for c in self.kept)

    @property
    def is_deterministic(self) -> bool:
        """Whether tuning chose it so that no choice changes a bit."""
        return self._weight is not None and self._weight.is_deterministic

    def candidates(self) -> tuple[Candidate, ...]:
        """Return the kernels considered with their times, the one that serves first."""
        policy = _policy(self.signature, self.device)
        ranked = policy.ranked(self.problem, policy.kernels if self.bundled else self.kept)
        if not self.bundled:
            return tuple(ranked)
        (known,) = policy.ranked(self.problem, [self.config])
        return (replace(known, order=self.order), *(c for c in ranked if c.config != self.config))


def decide(signature: OpSignature, device: Device, problem: Problem) -> Decision | None:
    """Decide what serves a problem; None if no kernel serves the signature on the device."""
    m, n, k, count = problem
    if max(m, n, k) > arch.MAX_EXTENT:
        raise UnsupportedError(
            f"M={m} N={n} K={k} is too large to launch: a kernel's extents have 32 bits. Split the call by a's rows or "
            "b's columns"
        )
    limited = limits.limit(signature, device.capability)
    bundled = limits.chosen(limited, signature, device.capability, problem)
    if bundled is not None:
        served = bundled.ordered
        return Decision(signature, device, problem, served.config, served.order, bundled.kept, bundled=True)
    weight = _weight(signature, device, limited, problem)
    if weight is None:
        return None
    best = weight.serves(problem) or _policy(signature, device, limited).choose(problem, weight.kept).ordered
    _weights()[signature, device, n, k, count] = None
    peer = weight.peers.get(problem.m)
    kept = weight.kept
    return Decision(signature, device, problem, best.config, best.order, kept, bundled=False, peer=peer, _weight=weight)


@cached(maxsize=1)
def _weights() -> dict[tuple[OpSignature, Device, int, int, int], None]:
    """Return the weights that were decided about, as keys."""
    return {}


def is_decided(signature: OpSignature, device: Device, problem: Problem) -> bool:
    """Whether :func:`decide` takes no more than a look-up: it has decided about the weight, or refuses its extents."""
    m, n, k, count = problem
    return max(m, n, k) > arch.MAX_EXTENT or (signature, device, n, k, count) in _weights()


def is_served_by_package(signature: OpSignature, device: Device) -> bool:
    """Whether kernels serve a signature, and the package's tables and models alone decide between them."""
    if limits.limit(signature, device.capability).configs:
        return False
    if _may_be_tuned(signature):
        from cutlass_ops.choose import policies

        if policies.has_tables_of_its_own(signature, device):
            return False
    from cutlass_ops.kinds import legality

    return legality.is_served(signature, device.capability)


def _may_be_tuned(signature: OpSignature) -> bool:
    """Whether there are tables besides the package's, of any signature. To ask of which takes a long import."""
    if next(Bundles.current().tables(signature), None) is not None:
        return True
    try:
        return bool(os.listdir(env.tuning_dir()))
    except OSError:
        return False
    except (ValueError, env.NoHomeError):
        return True


def specs(signature: OpSignature, device: Device) -> tuple[KernelSpec, ...]:
    """Return every kernel that may be chosen for a signature on a device."""
    return tuple(device.spec(signature, c) for c in _policy(signature, device).kernels)


def specs_for(signature: OpSignature, device: Device, n: int, k: int) -> tuple[KernelSpec, ...]:
    """Return the kernels that a weight (N, K) may need at any number of rows."""
    decision = decide(signature, device, Problem(1, n, k))
    return () if decision is None else decision.specs


def choose(signature: OpSignature, device: Device, problem: Problem) -> tuple[KernelSpec, TileOrder]:
    """Return a decision's kernel and the order of its tiles, even if a peer serves instead."""
    decision = decide(signature, device, problem)
    if decision is None:
        what = f"a GEMM of a {signature.a}, b {signature.b} and d {signature.d}"
        raise UnsupportedError(unserved(what, signature, device, device.name))
    return decision.spec, decision.order


# Imported late: tables and models take as long to import as everything that a bundled call needs.


def _weight(signature: OpSignature, device: Device, limited: limits.Limit, problem: Problem) -> Weight | None:
    from cutlass_ops.choose import policies

    return policies.weight(signature, device, limited, problem.n, problem.k, problem.count)


def _policy(signature: OpSignature, device: Device, limited: limits.Limit | None = None) -> Policy:
    from cutlass_ops.choose import policies

    return policies.policy(signature, device, limited)
