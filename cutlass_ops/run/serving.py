"""What serves a call that no plan serves yet: the decision, the kernel, and a plan for calls like it."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from cutlass_ops.base.errors import UnsupportedError
from cutlass_ops.choose import dispatch
from cutlass_ops.choose.dispatch import Decision
from cutlass_ops.declare.device import Device
from cutlass_ops.run.call import Call, device_of, signature_of
from cutlass_ops.run.plan import Plan, make_plan
from cutlass_ops.run.registry import OpSignature
from cutlass_ops.run.rows import Rows
from cutlass_ops.run.supply import Supply, supply, supply_others

if TYPE_CHECKING:
    from cutlass_ops.run.fallbacks import PeerPlan

_log = logging.getLogger("cutlass_ops")


def plan(name: str, call: Call) -> tuple[Plan | PeerPlan, Supply | None, Rows | None]:
    """Return a plan for an op's call, ready to run, and what plans others like it. A missing kernel is built.

    Raises
    ------
    UnsupportedError
        If no single kernel serves the call.
    MissingKernelError, CompileError, ToolchainError, StoreError, LoadError
        If the kernel cannot be compiled, stored or loaded.
    """
    decision = decided(name, call)
    if decision.peer is not None:
        _log.info("%s %s: PyTorch (%s) serves, as tuning allowed", name, decision.problem, decision.peer)
        from cutlass_ops.run import fallbacks  # late: tuning seldom allows PyTorch

        return fallbacks.make_peer_plan(decision.peer, call), None, Rows.of(name, decision, call)
    supplied = supply(decision)
    if _log.isEnabledFor(logging.DEBUG):  # a slug takes longer than the choice
        _log.debug("%s %s: %s serves", name, decision.problem, supplied.spec.slug)
    plan = make_plan(name, supplied.spec, supplied.serves.order, call)
    supply_others(decision, call.arguments.a.device)
    return plan, supplied, Rows.of(name, decision, call)


def decided(name: str, call: Call) -> Decision:
    """Decide what serves an op's call.

    Raises
    ------
    UnsupportedError
        If no single kernel does.
    """
    device = device_of(call.arguments.a.device)
    if call.why_apart is not None:
        raise UnsupportedError(f"{name}: {call.why_apart}")
    signature = signature_of(call, device)
    decision = decide(signature, device, call)
    if decision is None:
        what = f"{name} with a {signature.a}, b {signature.b} and d {signature.d}"
        raise UnsupportedError(dispatch.unserved(what, signature, device))
    return decision


def decide(signature: OpSignature, device: Device, call: Call) -> Decision | None:
    """Decide what serves a checked call; None if no kernel serves its signature. Unsuitable peers are dropped.

    Raises
    ------
    UnsupportedError
        If no kernel of the signature can be launched at this problem.
    """
    found = dispatch.decide(signature, device, call.chosen_for)
    if found is None or found.peer is None:
        return found
    from cutlass_ops.run import fallbacks  # late: tuning seldom allows PyTorch

    return found if fallbacks.can_fall_back(call, found.peer) else replace(found, peer=None)
