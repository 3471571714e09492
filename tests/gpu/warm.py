"""What a warm call is, for tests: one that a remembered plan serves, and whose kernel refuses nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cutlass_ops.run.warm import Warm


def served_warm(called: Warm, call: Callable[[], Any], times: int = 1) -> Any:
    """Make a call again, whose like was made before; require that it is served warm, and return what it returns.

    Parameters
    ----------
    called : Warm
        The op or kernel that the call reaches.
    call : callable
        Makes it.
    times : int
        How often the call reaches it.
    """
    served, refused = called.served_warm, called.refused_warm
    found = call()
    assert called.served_warm == served + times, f"{called!r} looked at a call like one before"
    assert called.refused_warm == refused, f"{called!r}: a kernel refused a warm launch"
    return found
