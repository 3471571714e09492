"""The functions and kinds of epilogues, without the rest of the package."""

import inspect
from types import SimpleNamespace

from cutlass_ops.epilogue import functions
from cutlass_ops.epilogue.trace import epilogue
from cutlass_ops.epilogue.values import Col, Row, Scalar, Tile

# What the package exports, under the name that its users import it by.
co = SimpleNamespace(
    **{n: f for n, f in vars(functions).items() if inspect.isfunction(f) and f.__module__ == functions.__name__},
    epilogue=epilogue,
    Row=Row,
    Col=Col,
    Tile=Tile,
    Scalar=Scalar,
)
