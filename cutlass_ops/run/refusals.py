"""Calls that no kernel serves: on the CPU they are refused as on a GPU.

Tensors on the CPU are refused as on a GPU, so that code that runs on the CPU also runs on a GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from cutlass_ops.base import arch
from cutlass_ops.base.errors import UnsupportedError
from cutlass_ops.base.session import cached
from cutlass_ops.declare.device import Device
from cutlass_ops.declare.signature import OpSignature
from cutlass_ops.operand.call import Call, signature_of

BY_PYTORCH = "PyTorch serves, for tensors on the CPU or without elements"

_log = logging.getLogger("cutlass_ops")

# Its kernels serve every call that those of other devices serve.
_NEWEST = Device(max(target.capability for target in arch.TARGETS.values()), 1)


@lru_cache(maxsize=1024)
def _is_served(signature: OpSignature) -> bool:
    from cutlass_ops.kinds import legality  # late: calls on a GPU do not ask

    return legality.is_served(signature)


def say(name: str, shape: object, what: str) -> None:
    """Log once what serves calls of a shape, and why."""
    if _log.isEnabledFor(logging.INFO):
        _say_once(name, str(shape), what)


@cached(maxsize=4096)
def _say_once(name: str, shape: str, what: str) -> None:
    _log.info("%s %s: %s", name, shape, what)


def require(name: str, call: Call, instead: Callable[[Call], Sequence[tuple[Any, Call]]]) -> None:
    """Refuse a call of the reference that no kernel of any device would serve, nor several ops instead.

    `instead` is ``Op.instead_of``: it returns the fallback ops and their calls. Raises ValueError if a kernel cannot
    address a matrix, and UnsupportedError for such a call. The message says which rule of kernels it breaks.
    """
    call.check_layouts()
    if 0 in call.problem:
        return
    for part in call.parts() if call.why_apart is not None else (call,):
        signature = signature_of(part, _NEWEST)
        if _is_served(signature):
            continue
        if several := instead(part):
            for op, its in several:
                require(op.name, its, op.instead_of)
            continue
        from cutlass_ops.kinds import legality  # late: few calls are refused

        why = legality.why_unserved(signature, _NEWEST.capability)
        what = f"{name} with a {signature.a}, b {signature.b} and d {signature.d}"
        raise UnsupportedError(f"no kernel of any device supports {what}, so that the CPU refuses it as well: {why}")
