"""What a GPU refuses, tensors on the CPU are refused for as well: so code that runs here also runs there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from cutlass_ops.base import arch
from cutlass_ops.base.errors import UnsupportedError
from cutlass_ops.declare.config import Sm90Config, ThreadblockShape
from cutlass_ops.declare.device import Device
from cutlass_ops.declare.signature import OpSignature
from cutlass_ops.run.call import Call, signature_of

_ANY = Sm90Config(ThreadblockShape(128, 128, 64))  # a kernel has one, and the question is not about it
# Its kernels serve whatever those of other devices do.
_NEWEST = Device(max(target.capability for target in arch.TARGETS.values()), 1)


@lru_cache(maxsize=4096)
def _is_served(signature: OpSignature) -> bool:
    from cutlass_ops.kinds import serving  # late: calls on a GPU do not ask

    return serving.serves(signature.spec(_ANY))


def require(name: str, call: Call, instead: Callable[[Call], Sequence[tuple[Any, Call]]]) -> None:
    """Refuse a call of the reference that no kernel of any device would serve, nor several ops instead.

    Parameters
    ----------
    name : str
        The op's name.
    call : Call
        The call.
    instead : callable
        Returns the ops that stand for the op where no single kernel does, and their calls: ``Op.instead_of``.

    Raises
    ------
    ValueError
        If a kernel cannot address a matrix.
    UnsupportedError
        If it is one. The message says which rule of kernels it breaks.
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
