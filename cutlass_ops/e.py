"""The epilogue language: every operation, and the annotations of an epilogue function's parameters.

>>> @co.epilogue
... def swish(acc, bias: co.e.Row):
...     return co.e.silu(acc + bias)

Some operations have the names of Python built-ins: ``abs``, ``max``, ``sum``. So ``from cutlass_ops import *`` does not
import the operations. ``cutlass_ops.relu`` and the others are the same functions.

Every operation raises ``EpilogueError`` outside of an epilogue function, or if an argument is neither a traced value
nor a number. A reduction raises it if ``dim`` is neither 0 nor 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cutlass_ops.epilogue import functions
from cutlass_ops.epilogue.functions import *  # noqa: F403
from cutlass_ops.epilogue.trace import epilogue
from cutlass_ops.epilogue.unknown import unknown_name
from cutlass_ops.epilogue.values import Col, Integer, Product, Row, Scalar, Tile

__all__ = ["Col", "Integer", "Product", "Row", "Scalar", "Tile", "epilogue"]
__all__ += functions.__all__


# Type checkers would take any name to be there.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        raise unknown_name(__name__, name, __all__)


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
