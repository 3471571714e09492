"""The functions and kinds of epilogues, without the rest of the package."""

from types import SimpleNamespace

from cutlass_ops.epilogue import functions
from cutlass_ops.epilogue.trace import epilogue
from cutlass_ops.epilogue.values import Col, Row, Scalar, Tile

# What the package exports, under the name that its users import it by.
co = SimpleNamespace(
    **{name: getattr(functions, name) for name in functions.__all__},
    epilogue=epilogue,
    Row=Row,
    Col=Col,
    Tile=Tile,
    Scalar=Scalar,
)
