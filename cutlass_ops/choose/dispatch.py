"""The one decision about a call: by a loaded bundle, else by measurements and models.

A call uses a :class:`Decision`'s kernel or peer, the background and ``warm_up`` its other kernels, and ``explain`` its
candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from cutlass_ops.base import arch
from cutlass_ops.base.dtypes import FP8
from cutlass_ops.base.errors import UnsupportedError
from cutlass_ops.base.mma import mma_of
from cutlass_ops.choose import limits
from cutlass_ops.declare.config import Config, Ordered
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
    """Return the error message for a signature that no kernel serves on a device.

    Parameters
    ----------
    what : str
        The op and its operands' types.
    signature : OpSignature
        Its signature.
    device : Device
        The device.
    name : str
        Name of the device for the message, if known.
    """
    advice = _without_wgmma(signature, device)
    if not advice and arch.target_for(device.capability, wgmma=False) is not None:
        from cutlass_ops.kinds import legality

        advice = legality.why_unserved(signature, device.capability)
    return arch.unserved(what, device.capability, name, advice)


def _without_wgmma(signature: OpSignature, device: Device) -> str:
    """Return what to do about a signature that only kernels of wgmma serve, on a device without it; or nothing."""
    mma = mma_of(signature.a.dtype, signature.b.dtype)
    if device.has_wgmma:
        return ""
    if signature.form == GROUPED:
        return "groups of rows need wgmma, which sm_90 alone has: call gemm for each expert's rows"
    if signature.form == RAGGED_K:
        return "groups of K need wgmma, which sm_90 alone has: multiply each expert's rows by themselves"
    if mma is not None and not mma.shapes:
        return "these types need wgmma, which sm_90 alone has: convert a and b to BF16"
    if mma is not None and mma.k_major_only and signature.realigns:
        return (
            f"{signature.a.dtype} is read along K only, from lines at multiples of 16 bytes, and copied to such lines "
            "on sm_90 alone: pass a row-major a and prepare(b).matrix, with K a multiple of 16"
        )
    if any(t.dtype in FP8 for t in (signature.d, *signature.outputs)) and device.capability < arch.STORES_FP8:
        return "results in FP8 are stored on sm_90 alone: take them in BF16, and convert them"
    return ""


@dataclass(frozen=True)
class Decision:
    """What serves a problem.

    Attributes
    ----------
    signature : OpSignature
        The call's signature.
    device : Device
        Where it runs.
    problem : Problem
        Its extents.
    config : Config
        The kernel's configuration.
    order : TileOrder
        The order of its tiles.
    kept : tuple of Config
        The kernels that this weight (N, K) may need at some number of rows.
    bundled : bool
        Whether the decision was made with the bundle, without tables or models.
    peer : str or None
        The peer that serves the call instead: it was measured faster, and tuning allowed it.
    """

    signature: OpSignature
    device: Device
    problem: Problem
    config: Config
    order: TileOrder
    kept: tuple[Config, ...]
    bundled: bool
    peer: str | None = None
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

    def near(self) -> Iterator[tuple[KernelSpec, Ordered]]:
        """Yield the weight's kernels that serve numbers of rows near the problem's, the nearest first."""
        weight = self._weight
        return iter(()) if weight is None else ((weight.specs[e.config], e) for e in weight.near(self.problem))

    @property
    def is_finished(self) -> bool:
        """Whether nothing is left for :meth:`finish`."""
        return self._weight is None or self._weight.finished

    def finish(self) -> None:
        """Do what was left for when there is time: what other numbers of rows and later processes need.

        No decision changes by it. It takes milliseconds.
        """
        if self._weight is not None:
            self._weight.finish()

    def candidates(self) -> tuple[Candidate, ...]:
        """Return the kernels considered with their times, the one that serves first."""
        policy = _policy(self.signature, self.device)
        ranked = policy.ranked(self.problem, policy.kernels if self.bundled else self.kept)
        if not self.bundled:
            return tuple(ranked)
        (known,) = policy.ranked(self.problem, [self.config])
        return (replace(known, order=self.order), *(c for c in ranked if c.config != self.config))

    def alternatives(self) -> Iterator[Candidate]:
        """Yield the signature's other kernels that can be launched, the fastest first, measured or not."""
        policy = _policy(self.signature, self.device)
        return (c for c in policy.every(self.problem) if c.config != self.config)

    def beside(self, loaded: Callable[[Set[KernelSpec]], Iterable[KernelSpec]]) -> tuple[KernelSpec, Ordered] | None:
        """Return another kernel of the signature that is loaded and can be launched, the fastest by the model alone.

        Parameters
        ----------
        loaded : callable
            Returns which of some kernels are loaded.
        """
        policy = _policy(self.signature, self.device)
        there = {policy.by_spec[spec]: spec for spec in loaded(policy.by_spec.keys())}
        there.pop(self.config, None)
        found = policy.quick(self.problem, there) if there else None
        return None if found is None else (there[found.config], found)


def decide(signature: OpSignature, device: Device, problem: Problem) -> Decision | None:
    """Decide what serves a problem; None if no kernel serves the signature on the device.

    Raises
    ------
    UnsupportedError
        If kernels serve the signature, but none can be launched at the problem.
    """
    m, n, k = problem.m, problem.n, problem.k
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
    weight = _recalled(signature, device, limited, problem)
    if weight is None:
        policy = _policy(signature, device, limited)
        if not policy.kernels:
            return None
        best, weight = policy.serves(problem)
    else:
        best = weight.serves(problem) or _policy(signature, device, limited).choose(problem, weight.kept).ordered
    peer = weight.peers.get(problem.m)
    kept = weight.kept
    return Decision(signature, device, problem, best.config, best.order, kept, bundled=False, peer=peer, _weight=weight)


def specs(signature: OpSignature, device: Device) -> tuple[KernelSpec, ...]:
    """Return every kernel that may be chosen for a signature on a device."""
    return tuple(device.spec(signature, c) for c in _policy(signature, device).kernels)


def specs_for(signature: OpSignature, device: Device, n: int, k: int) -> tuple[KernelSpec, ...]:
    """Return the kernels that a weight (N, K) may need at any number of rows."""
    decision = decide(signature, device, Problem(1, n, k))
    return () if decision is None else decision.specs


def choose(signature: OpSignature, device: Device, problem: Problem) -> tuple[KernelSpec, TileOrder]:
    """Return a decision's kernel and the order of its tiles, even if a peer serves instead.

    For the tuner, catalogues and benchmarks, which ask for what some kernel must serve.

    Raises
    ------
    UnsupportedError
        If no kernel serves the signature on the device, or none can be launched at the problem.
    """
    decision = decide(signature, device, problem)
    if decision is None:
        what = f"a GEMM of a {signature.a}, b {signature.b} and d {signature.d}"
        raise UnsupportedError(unserved(what, signature, device, device.name))
    return decision.spec, decision.order


# Imported late: tables and models take as long to import as everything that a bundled call needs.


def _recalled(signature: OpSignature, device: Device, limited: limits.Limit, problem: Problem) -> Weight | None:
    from cutlass_ops.choose import policies

    return policies.recalled(signature, device, limited, problem)


def _policy(signature: OpSignature, device: Device, limited: limits.Limit | None = None) -> Policy:
    from cutlass_ops.choose import policies

    return policies.policy(signature, device, limited)
