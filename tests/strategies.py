"""Hypothesis strategies for whole epilogues, with an evaluation of their own.

A :class:`Program` is drawn as a list of steps and can be run twice: through the epilogue language, which gives a traced
graph, and directly on PyTorch tensors, which shares no code with :mod:`cutlass_ops.operand.reference`.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from cutlass_ops.epilogue import functions
from cutlass_ops.epilogue.nodes import Kind
from cutlass_ops.epilogue.trace import Epilogue, epilogue
from cutlass_ops.epilogue.values import Col, Row, Scalar, Tile

# For tests on machines that do other things too.
PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def at_most(examples: int) -> settings:
    """Settings for a test whose cases take long: so many at most, and fewer in the quick tests."""
    return settings(PATIENT, max_examples=min(examples, PATIENT.max_examples))


# Those whose values are there before the GEMM: what a program takes of A itself has tests of its own.
ANNOTATIONS = {Kind.ROW: Row, Kind.COL: Col, Kind.TILE: Tile, Kind.SCALAR: Scalar}
INPUT_NAMES = ("bias", "scale", "residual", "gate", "shift", "weight")
OUTPUT_NAMES = ("pre", "saved", "stat", "norm")

_ROUNDED = {"bf16": torch.bfloat16, "f16": torch.float16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def _cast(x: torch.Tensor, name: str) -> torch.Tensor:
    if name in ("e4m3", "e5m2"):  # saturate
        most = {"e4m3": 448.0, "e5m2": 57344.0}[name]
        x = torch.where(x > most, most, torch.where(x < -most, -most, x))
    return x.to(_ROUNDED[name]).to(x.dtype)


# The language's functions once more, in PyTorch.
TORCH = SimpleNamespace(
    neg=operator.neg,
    minimum=torch.minimum,
    maximum=torch.maximum,
    clamp=torch.clamp,
    abs=torch.abs,
    square=lambda x: x * x,
    sqrt=torch.sqrt,
    rsqrt=torch.rsqrt,
    exp=torch.exp,
    tanh=torch.tanh,
    sigmoid=torch.sigmoid,
    relu=torch.relu,
    leaky_relu=F.leaky_relu,
    gelu=lambda x, approximate="none": (
        0.5 * x * torch.erfc(x * -math.sqrt(0.5)) if approximate == "none" else F.gelu(x, approximate=approximate)
    ),
    silu=F.silu,
    hardswish=F.hardswish,
    where=torch.where,
    isnan=torch.isnan,
    erf=torch.erf,
    log=torch.log,
    log2=torch.log2,
    log1p=torch.log1p,
    exp2=torch.exp2,
    expm1=torch.expm1,
    pow=torch.pow,
    reciprocal=torch.reciprocal,
    sign=torch.sign,
    floor=torch.floor,
    ceil=torch.ceil,
    round=torch.round,
    trunc=torch.trunc,
    softplus=lambda x: torch.where(x > 20, x, torch.log1p(torch.exp(x))),
    elu=lambda x, alpha: torch.where(x > 0, x, torch.tensor(alpha, dtype=x.dtype) * torch.expm1(x)),
    mish=lambda x: x * torch.tanh(torch.log1p(torch.exp(x))),
    cast=lambda x, name: _cast(x, name),
)

Step = Callable[..., Any]

# Steps that keep values of order one and errors of the order of FP32's: for comparisons by tolerance. The first
# argument is the namespace of functions, the language's or TORCH.
TAME_UNARY: dict[str, Step] = {
    "neg": lambda f, x: -x,
    "abs": lambda f, x: abs(x),
    "square": lambda f, x: f.square(f.tanh(x)),
    "sqrt": lambda f, x: f.sqrt(f.abs(x) + 0.5),
    "rsqrt": lambda f, x: f.rsqrt(f.abs(x) + 0.5),
    "exp": lambda f, x: f.exp(f.clamp(x, -4.0, 1.0)),
    "tanh": lambda f, x: f.tanh(x),
    "sigmoid": lambda f, x: f.sigmoid(x),
    "relu": lambda f, x: f.relu(x),
    "leaky_relu": lambda f, x: f.leaky_relu(x, 0.125),
    "gelu": lambda f, x: f.gelu(x),
    "gelu_tanh": lambda f, x: f.gelu(x, approximate="tanh"),
    "silu": lambda f, x: f.silu(x),
    "hardswish": lambda f, x: f.hardswish(x),
    "clamp": lambda f, x: f.clamp(x, min=-1.5, max=2.0),
    "clamp_min": lambda f, x: f.clamp(x, min=-0.5),
    "erf": lambda f, x: f.erf(x),
    "log": lambda f, x: f.log(f.abs(x) + 0.5),
    "log2": lambda f, x: f.log2(f.abs(x) + 0.5),
    "log1p": lambda f, x: f.log1p(f.abs(x)),
    "exp2": lambda f, x: f.exp2(f.clamp(x, -4.0, 1.0)),
    "expm1": lambda f, x: f.expm1(f.clamp(x, -4.0, 1.0)),
    "reciprocal": lambda f, x: f.reciprocal(f.abs(x) + 1.0),
    "softplus": lambda f, x: f.softplus(x),
    "elu": lambda f, x: f.elu(x, 0.5),
    "mish": lambda f, x: f.mish(x),
    # Neither side of a condition is far from the other where they meet.
    "where": lambda f, x: f.where(x >= 0.0, x, 0.25 * x),
    "not_nan": lambda f, x: f.where(~f.isnan(x), x, 0.0 * x),
}
TAME_BINARY: dict[str, Step] = {
    "add": lambda f, x, y: x + y,
    "sub": lambda f, x, y: x - y,
    "mul": lambda f, x, y: x * f.tanh(y),
    "div": lambda f, x, y: x / (f.abs(y) + 1.0),
    "minimum": lambda f, x, y: f.minimum(x, y),
    "maximum": lambda f, x, y: f.maximum(x, y),
    "pow": lambda f, x, y: f.pow(f.abs(x) + 0.5, f.tanh(y)),
    "greater": lambda f, x, y: f.where((x > y) | f.isnan(x), x, y + 0.0 * x),
}
# Steps that reach infinities, NaN and rounding to 16 bits: for exact comparisons.
WILD_UNARY: dict[str, Step] = TAME_UNARY | {
    "square": lambda f, x: f.square(x),
    "sqrt": lambda f, x: f.sqrt(x),
    "rsqrt": lambda f, x: f.rsqrt(x),
    "exp": lambda f, x: f.exp(x),
    "cast_bf16": lambda f, x: f.cast(x, "bf16"),
    "cast_f16": lambda f, x: f.cast(x, "f16"),
    "cast_e4m3": lambda f, x: f.cast(x, "e4m3"),
    "cast_e5m2": lambda f, x: f.cast(x, "e5m2"),
    "inverse": lambda f, x: 1.0 / x,
    "reciprocal": lambda f, x: f.reciprocal(x),
    "log": lambda f, x: f.log(x),
    "log2": lambda f, x: f.log2(x),
    "log1p": lambda f, x: f.log1p(x),
    "exp2": lambda f, x: f.exp2(x),
    "expm1": lambda f, x: f.expm1(x),
    "sign": lambda f, x: f.sign(x),
    "floor": lambda f, x: f.floor(x),
    "ceil": lambda f, x: f.ceil(x),
    "round": lambda f, x: f.round(x),
    "trunc": lambda f, x: f.trunc(x),
    "cleaned": lambda f, x: f.where(f.isnan(x), 0.0 * f.sign(x), x),
    "rsub": lambda f, x: 1.0 - x,
}
WILD_BINARY: dict[str, Step] = TAME_BINARY | {
    "mul": lambda f, x, y: x * y,
    "div": lambda f, x, y: x / y,
    "pow": lambda f, x, y: f.pow(x, y),
    "lt": lambda f, x, y: x * (x < y),
    "le": lambda f, x, y: f.where(x <= y, x, y),
    "ge": lambda f, x, y: f.where(x >= y, y, x),
    "eq": lambda f, x, y: x + (x == y),
    "ne": lambda f, x, y: f.where((x != y) & (y > x), x, y + x),
}
# Steps whose conditions are exactly the same at any precision, for a namespace that knows places.
PLACED_BINARY: dict[str, Step] = {
    "causal": lambda f, x, y: f.where(f.column_index() <= f.row_index() + 3, x, y),
    "striped": lambda f, x, y: f.where((f.row_index() == 7) | (f.column_index() > 40), y, x),
    "dropped": lambda f, x, y: f.where(f.uniform(11, 5) >= 0.25, x, y),
    "sloped": lambda f, x, y: x + f.tanh(y) * (f.column_index() < 32) * 0.5,
}
STEPS: dict[bool, dict[str, Step]] = {True: TAME_UNARY | TAME_BINARY | PLACED_BINARY, False: WILD_UNARY | WILD_BINARY}

REDUCED: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "sum": torch.sum,
    "sum_square": torch.sum,
    "max": torch.amax,
    "min": torch.amin,
    "logsumexp": torch.logsumexp,
    "argmax": lambda x, dim: torch.argmax(x, dim).int(),
    "argmin": lambda x, dim: torch.argmin(x, dim).int(),
}
# Those of which a small difference makes a small one.
SMOOTH = ("sum", "sum_square", "max", "min", "logsumexp")

# A leaf's name, a step's index, or a number.
Argument = str | int | float


@dataclass(frozen=True)
class Program:
    """One epilogue, drawn.

    Attributes
    ----------
    tame : bool
        Which table of steps it uses.
    inputs : tuple of (str, Kind)
        Declared inputs, all of them used.
    steps : tuple of (str, arguments)
        Each step's name and its arguments: a leaf's name, an earlier step's index, or a number.
    outputs : tuple of (str, argument, str or None, int or None)
        Name, value, and for a reduction its function and dimension; ``"d"`` comes first.
    """

    tame: bool
    inputs: tuple[tuple[str, Kind], ...]
    steps: tuple[tuple[str, tuple[Argument, ...]], ...]
    outputs: tuple[tuple[str, Argument, str | None, int | None], ...]

    def epilogue(self, name: str = "drawn") -> Epilogue:
        """Trace it."""

        def body(*values: Any) -> dict[str, Any]:
            leaves: dict[Argument, Any] = dict(zip(["acc", *(n for n, _ in self.inputs)], values, strict=True))
            found = self._run(functions, leaves)
            return {
                name: found[value] if reduce is None else getattr(functions, reduce)(found[value], dim)
                for name, value, reduce, dim in self.outputs
            }

        positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
        body.__name__ = name
        body.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter("acc", positional)]
            + [inspect.Parameter(n, positional, annotation=ANNOTATIONS[k]) for n, k in self.inputs]
        )
        return epilogue(body)

    def evaluate(
        self, acc: torch.Tensor, inputs: Mapping[str, torch.Tensor], dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        """Compute its outputs on tensors, in the given precision, not rounded."""
        kinds = dict(self.inputs)
        leaves: dict[Argument, Any] = {"acc": acc.to(dtype)}
        for name, tensor in inputs.items():
            leaves[name] = (tensor[:, None] if kinds[name] is Kind.COL else tensor).to(dtype)
        found = self._run(TORCH, leaves, dtype)
        outputs = {}
        for name, value, reduce, dim in self.outputs:
            tile = found[value].expand(acc.shape)
            if reduce == "sum_square":
                tile = tile * tile
            outputs[name] = tile if reduce is None else REDUCED[reduce](tile, dim)
        return outputs

    def tensors(
        self, m: int, n: int, seed: int, dtype: torch.dtype = torch.float32
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return a random accumulator (FP32) and inputs of a dtype, of order one."""
        generator = torch.Generator().manual_seed(seed)
        shapes = {Kind.ROW: (n,), Kind.COL: (m,), Kind.TILE: (m, n), Kind.SCALAR: ()}
        inputs = {name: torch.randn(shapes[kind], generator=generator).to(dtype) for name, kind in self.inputs}
        return torch.randn(m, n, generator=generator), inputs

    def _run(
        self, namespace: Any, leaves: Mapping[Argument, Any], number: torch.dtype | None = None
    ) -> dict[Argument, Any]:
        found: dict[Argument, Any] = dict(leaves)
        for index, (name, args) in enumerate(self.steps):
            if any(a not in found for a in args if not isinstance(a, float)):
                continue  # no output needs it, and it took an input that therefore was not declared
            values = [
                found[a] if not isinstance(a, float) else a if number is None else torch.tensor(a, dtype=number)
                for a in args
            ]
            found[index] = STEPS[self.tame][name](namespace, *values)
        return found


@st.composite
def programs(
    draw: st.DrawFn, *, tame: bool = False, max_inputs: int = 4, max_steps: int = 10, max_outputs: int = 3
) -> Program:
    """Draw epilogues with inputs of the four kinds of ANNOTATIONS, shared values, further tiles and reductions.

    Parameters
    ----------
    tame : bool
        Only steps that keep values of order one, for comparisons by tolerance.
    max_inputs, max_steps, max_outputs : int
        Limits; the outputs include D.
    """
    unary, binary = (TAME_UNARY, TAME_BINARY) if tame else (WILD_UNARY, WILD_BINARY)
    kinds = draw(st.lists(st.sampled_from(tuple(ANNOTATIONS)), max_size=max_inputs))
    declared = list(zip(INPUT_NAMES, kinds, strict=False))
    values: list[Argument] = ["acc", *(name for name, _ in declared)]
    numbers = st.floats(-2, 2, width=32)
    steps: list[tuple[str, tuple[Argument, ...]]] = []
    for _ in range(draw(st.integers(0, max_steps))):
        name = draw(st.sampled_from(sorted(unary | binary)))
        args: list[Argument] = [draw(st.sampled_from(values))]
        if name in binary:
            args.insert(draw(st.integers(0, 1)), draw(st.sampled_from(values) | numbers))
        values.append(len(steps))
        steps.append((name, tuple(args)))
    outputs: list[tuple[str, Argument, str | None, int | None]] = [("d", draw(st.sampled_from(values)), None, None)]
    for name in OUTPUT_NAMES[: draw(st.integers(0, max_outputs - 1))]:
        reduce = draw(st.sampled_from((None, *(SMOOTH if tame else REDUCED))))
        dim = draw(st.sampled_from((0, 1, -1, -2))) if reduce else None
        outputs.append((name, draw(st.sampled_from(values)), reduce, dim))
    if "acc" not in _reached(steps, outputs):
        steps.append(("add", (outputs[0][1], "acc")))
        outputs[0] = ("d", len(steps) - 1, None, None)
    reached = _reached(steps, outputs)
    return Program(tame, tuple(i for i in declared if i[0] in reached), tuple(steps), tuple(outputs))


def epilogues(**limits: Any) -> st.SearchStrategy[Epilogue]:
    """Draw traced epilogues; the parameters are those of :func:`programs`."""
    return programs(**limits).map(Program.epilogue)


def _reached(
    steps: list[tuple[str, tuple[Argument, ...]]], outputs: list[tuple[str, Argument, str | None, int | None]]
) -> set[Argument]:
    reached: set[Argument] = {value for _, value, _, _ in outputs}
    for index in reversed(range(len(steps))):
        if index in reached:
            reached.update(a for a in steps[index][1] if not isinstance(a, float))  # 1.0 is no step
    return reached
