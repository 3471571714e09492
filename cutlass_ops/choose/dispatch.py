"""The one decision about a call: by a loaded bundle, else by measurements and models.

A call uses a :class:`Decision`'s kernel or peer, the background and ``warm_up`` its other kernels, and ``explain`` its
candidates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cutlass_ops.artifacts.bundles import BUNDLES
from cutlass_ops.declare.config import Config
from cutlass_ops.declare.device import Device, Problem, with_order
from cutlass_ops.declare.signature import OpSignature
from cutlass_ops.declare.spec import KernelSpec

if TYPE_CHECKING:
    from cutlass_ops.choose.knowledge import Candidate
    from cutlass_ops.choose.policies import Policy


@dataclass(frozen=True)
class Decision:
    """What serves a problem.

    Attributes
    ----------
    signature : OpSignature
        The call's signature.
    device : Device
        Where it runs.
    problem : tuple of int
        M, N and K.
    config : Config
        The kernel's configuration, with its tile order.
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
    kept: tuple[Config, ...]
    bundled: bool
    peer: str | None = None

    @property
    def spec(self) -> KernelSpec:
        """The kernel's specification."""
        return self.device.spec(self.signature, self.config.binary())

    @property
    def specs(self) -> tuple[KernelSpec, ...]:
        """The specifications of :attr:`kept`."""
        return tuple(self.device.spec(self.signature, c) for c in self.kept)

    def candidates(self) -> tuple[Candidate, ...]:
        """Return the kernels considered with their times, the one that serves first."""
        policy = _policy(self.signature, self.device)
        ranked = policy.ranked(self.problem, policy.kernels if self.bundled else self.kept)
        if not self.bundled:
            return tuple(ranked)
        mine = self.config.binary()
        (known,) = policy.ranked(self.problem, [mine])
        return (replace(known, config=self.config), *(c for c in ranked if c.config.binary() != mine))


def decide(signature: OpSignature, device: Device, problem: Problem) -> Decision | None:
    """Decide what serves a problem; None if no kernel serves the signature on the device.

    Raises
    ------
    UnsupportedError
        If kernels serve the signature, but none can be launched at the problem.
    """
    config = chosen_in_bundle(signature, device, problem)
    if config is not None:
        kept = BUNDLES.of_one_kind(signature, device.capability)
        return Decision(signature, device, problem, config, kept, bundled=True)
    policy = _policy(signature, device)
    if not policy.kernels:
        return None
    best, peer = policy.choose(problem), policy.fallback(problem)
    return Decision(signature, device, problem, best.config, _kept(policy, problem), bundled=False, peer=peer)


def specs(signature: OpSignature, device: Device) -> tuple[KernelSpec, ...]:
    """Return every kernel that may be chosen for a signature on a device."""
    return tuple(device.spec(signature, c) for c in _policy(signature, device).kernels)


def specs_for(signature: OpSignature, device: Device, n: int, k: int) -> tuple[KernelSpec, ...]:
    """Return the kernels that a weight (N, K) may need at any number of rows."""
    decision = decide(signature, device, (1, n, k))
    return () if decision is None else decision.specs


def choose(signature: OpSignature, device: Device, problem: Problem) -> tuple[KernelSpec, Config]:
    """Return the kernel that serves a problem, and its configuration with the tile order.

    For the tuner, catalogues and benchmarks: some kernel must serve the signature, and peers are not considered.
    """
    config = chosen_in_bundle(signature, device, problem) or _policy(signature, device).choose(problem).config
    return device.spec(signature, config.binary()), config


def chosen_in_bundle(signature: OpSignature, device: Device, problem: Problem) -> Config | None:
    """Return a loaded bundle's choice for a problem, or its only kernel; None if there is neither."""
    configs = BUNDLES.of_one_kind(signature, device.capability)
    if len(configs) == 1:
        return with_order(configs[0], problem)
    return BUNDLES.choice(signature, device.capability, problem) if configs else None


# Imported late: tables and models take as long to import as everything that a bundled call needs.


def _policy(signature: OpSignature, device: Device) -> Policy:
    from cutlass_ops.choose import policies

    return policies.policy(signature, device)


def _kept(policy: Policy, problem: Problem) -> tuple[Config, ...]:
    from cutlass_ops.choose import policies

    return policies.kept(policy, *problem[1:])
