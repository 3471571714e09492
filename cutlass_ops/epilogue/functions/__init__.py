# ruff: noqa: F403, F405
"""The functions of the epilogue language, for use inside an ``@epilogue`` function: a module for each subject.

Arguments are traced values or Python numbers, results are traced values. Formulas and PyTorch equivalents stand in
:data:`cutlass_ops.epilogue.operations.OPS` and docs/epilogues.md; NaN and infinities behave as in PyTorch. Every
function raises EpilogueError outside of an epilogue function, or for another argument. A reduction raises it for
another ``dim`` than 0 and 1 (or -2 and -1).
"""

from __future__ import annotations

import inspect

from cutlass_ops.epilogue.functions.activations import *
from cutlass_ops.epilogue.functions.arithmetic import *
from cutlass_ops.epilogue.functions.conditions import *
from cutlass_ops.epilogue.functions.gathered import *
from cutlass_ops.epilogue.functions.places import *
from cutlass_ops.epilogue.functions.reductions import *
from cutlass_ops.epilogue.functions.rounding import *
from cutlass_ops.epilogue.functions.transcendental import *

__all__ = [
    "abs",
    "add",
    "amax",
    "argmax",
    "argmin",
    "cast",
    "ceil",
    "clamp",
    "column_index",
    "cos",
    "div",
    "dropout_mask",
    "elu",
    "eq",
    "erf",
    "exp",
    "exp2",
    "expm1",
    "floor",
    "ge",
    "gelu",
    "gt",
    "hardswish",
    "isnan",
    "le",
    "leaky_relu",
    "log",
    "log1p",
    "log2",
    "logical_and",
    "logical_not",
    "logical_or",
    "logsumexp",
    "lt",
    "max",
    "maximum",
    "mean_of_a",
    "mean_square_of_a",
    "min",
    "minimum",
    "mish",
    "mul",
    "ndtr",
    "ne",
    "neg",
    "pow",
    "quantize",
    "reciprocal",
    "relu",
    "round",
    "row_index",
    "rsqrt",
    "sigmoid",
    "sign",
    "silu",
    "sin",
    "softplus",
    "sqrt",
    "square",
    "sub",
    "sum",
    "sum_square",
    "swap_pairs",
    "tanh",
    "to_float",
    "trunc",
    "uniform",
    "where",
]

_RAISES = """Raises
------
EpilogueError
    Outside of an epilogue function, or if an argument is neither a traced value nor a number.

"""

# What most functions raise is written once, and stands in the help of each.
for _function in map(globals().__getitem__, __all__):
    if _function.__doc__ and "Raises\n" not in _function.__doc__:
        _before, _examples, _after = inspect.cleandoc(_function.__doc__).partition("Examples\n")
        _function.__doc__ = f"{_before}{_RAISES}{_examples}{_after}"
