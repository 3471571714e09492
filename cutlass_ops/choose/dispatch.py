"""Which kernel serves a call: the one that a loaded bundle says, else by what is known of the signature's kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cutlass_ops.artifacts.bundles import BUNDLES
from cutlass_ops.declare.config import Config
from cutlass_ops.declare.device import Device, Problem, with_order
from cutlass_ops.declare.signature import OpSignature
from cutlass_ops.declare.spec import KernelSpec

if TYPE_CHECKING:
    from cutlass_ops.choose.policies import Policy


def serves(signature: OpSignature, device: Device) -> bool:
    """Whether any kernel serves a signature on a device."""
    return bool(BUNDLES.of_one_kind(signature, device.capability) or _policy(signature, device).kernels)


def fallback(signature: OpSignature, device: Device, problem: Problem) -> str | None:
    """Return the peer that serves a problem in place of every kernel, if the user allowed it where they tuned.

    What was chosen when a bundle was made holds before that.
    """
    if chosen_in_bundle(signature, device, problem) is not None:
        return None
    return _policy(signature, device).fallback(problem)


def specs(signature: OpSignature, device: Device) -> tuple[KernelSpec, ...]:
    """Return every kernel that may be picked for a signature on a device; none if none serves it."""
    return tuple(device.spec(signature, c) for c in _policy(signature, device).kernels)


def specs_for(signature: OpSignature, device: Device, n: int, k: int) -> tuple[KernelSpec, ...]:
    """Return the kernels that may be picked for any number of rows of A, given B's extents."""
    if chosen_in_bundle(signature, device, (1, n, k)) is not None:
        return tuple(device.spec(signature, c) for c in BUNDLES.of_one_kind(signature, device.capability))
    return tuple(device.spec(signature, c) for c in _kept(signature, device, n, k))


def choose(signature: OpSignature, device: Device, problem: Problem) -> tuple[KernelSpec, Config]:
    """Pick a kernel for a problem.

    Returns
    -------
    KernelSpec, Config
        The kernel, and its configuration with the launch arguments.
    """
    config = chosen_in_bundle(signature, device, problem) or _policy(signature, device).choose(problem).config
    return device.spec(signature, config.binary()), config


def chosen_in_bundle(signature: OpSignature, device: Device, problem: Problem) -> Config | None:
    """Return what a loaded bundle says about a problem, or its only kernel; None if no bundle says anything.

    Neither a table nor the model is looked at.
    """
    configs = BUNDLES.of_one_kind(signature, device.capability)
    if len(configs) == 1:
        return with_order(configs[0], problem)
    return BUNDLES.choice(signature, device.capability, problem) if configs else None


# Tables and the model take as long to import as all that a call needs which a bundle has decided.


def _policy(signature: OpSignature, device: Device) -> Policy:
    from cutlass_ops.choose import policies

    return policies.policy(signature, device)


def _kept(signature: OpSignature, device: Device, n: int, k: int) -> tuple[Config, ...]:
    from cutlass_ops.choose import policies

    return policies.kept(policies.policy(signature, device), n, k)
