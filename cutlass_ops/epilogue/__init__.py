"""Epilogues as plain Python functions: traced once into an immutable expression graph."""

from __future__ import annotations

from cutlass_ops.epilogue import functions
from cutlass_ops.epilogue.functions import *  # noqa: F403
from cutlass_ops.epilogue.graph import Graph, canonical, validate
from cutlass_ops.epilogue.nodes import Input, Kind, Node, Output
from cutlass_ops.epilogue.trace import Epilogue, epilogue
from cutlass_ops.epilogue.values import Col, Integer, Product, Reduction, Row, Scalar, Tile, Value

__all__ = [
    "Col",
    "Epilogue",
    "Graph",
    "Input",
    "Integer",
    "Kind",
    "Node",
    "Output",
    "Product",
    "Reduction",
    "Row",
    "Scalar",
    "Tile",
    "Value",
    "canonical",
    "epilogue",
    "validate",
]
__all__ += functions.__all__
