"""Kernels of what an epilogue can say besides functions of one value: places, random numbers, indices, any name."""

from __future__ import annotations

import random
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch

import cutlass_ops as co
from cutlass_ops.declare.config import Config
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.epilogue import functions
from cutlass_ops.epilogue.nodes import Kind
from cutlass_ops.epilogue.trace import Epilogue
from tests import strategies
from tests.strategies import Program

_shape, _cluster = co.ThreadblockShape, co.ClusterShape

# ---- Places and random numbers, in kernels of every kind and orientation -------------------------------------------

SM90 = co.Sm90Config(_shape(64, 64, 64), _cluster(2, 1), schedule="pingpong")
SM80 = co.Sm80Config(_shape(64, 64, 32), co.WarpShape(32, 32, 32), stages=3)
WHOLE: tuple[Config, ...] = (
    SM90,
    co.Sm90Config(_shape(128, 104, 64), _cluster(1, 2), schedule="pingpong", swap_ab=True),
    co.Sm90Config(_shape(256, 64, 64), schedule="cooperative"),
    co.Sm90Config(_shape(64, 8, 128), schedule="warp_specialized", swap_ab=True),
    co.Sm90Config(_shape(192, 48, 64), schedule="cooperative"),
    co.Sm90Config(_shape(192, 48, 64), schedule="cooperative", swap_ab=True),
    co.Sm90Config(_shape(128, 64, 64), schedule="cooperative", scheduler="stream_k"),
    co.Sm90Config(_shape(64, 64, 128), schedule="warp_specialized", split_k=4, swap_ab=True),
    co.Sm90Config(_shape(128, 64, 64), schedule="cooperative", split_k=2),
    SM80,
    co.Sm80Config(_shape(64, 64, 32), co.WarpShape(32, 32, 32), stages=3, stream_k=True),
    co.types.GemvConfig(1, 4, 16),
    co.types.GemvConfig(4, 8, 8),
    co.types.GemvConfig(16, 4, 4),
)


@co.epilogue
def placed(acc, seed: co.Integer, offset: co.Integer):
    """Whole numbers that say where an element is, and what its random number is."""
    lower = co.column_index() * 2 - 5 <= co.row_index()
    place = co.row_index() * 4096 + co.column_index()
    return co.where(lower, place, -1.0 * place) + acc * 0.0 + co.uniform(seed, offset)


@co.epilogue
def placed_and_saved(acc, seed: co.Integer, offset: co.Integer):
    """The same beside a further tile, which CUTLASS's own epilogue stores."""
    return {"d": placed(acc, seed, offset), "u": co.uniform(seed, offset), "pre": acc}


@co.epilogue
def placed_product(acc, other: co.Product, seed: co.Integer):
    """The same in a kernel of two products, whose tile of D is half as large."""
    return placed(acc + other * 0.0, seed, 3)


def _spec(epilogue: Epilogue, config: Config, d: str = "f32.row", **types: Any) -> KernelSpec:
    target = None if isinstance(config, co.Sm90Config) else "sm_90"
    return KernelSpec(a="bf16.row", b="bf16.col", d=d, epilogue=epilogue, config=config, target=target, **types)


def places() -> dict[str, KernelSpec]:
    found = {f"placed-{c.slug}": _spec(placed, c) for c in WHOLE}
    for c in (SM90, WHOLE[1], SM80):
        found[f"placed_and_saved-{c.slug}"] = _spec(placed_and_saved, c)
    for d in ("f32.row.align1", "f32.col", "f32.col.align1"):
        for c in (SM90, WHOLE[1], SM80):
            found[f"placed-{d}-{c.slug}"] = _spec(placed, c, d)
    for c in (
        SM90,
        co.Sm90Config(_shape(128, 48, 64), schedule="pingpong", swap_ab=True),
        co.types.GemvConfig(4, 8, 8),
    ):
        found[f"placed_product-{c.slug}"] = _spec(placed_product, c)
    return found


@co.epilogue
def wrapped(acc):
    """Index arithmetic beyond 32 bits, and comparisons that a compiler would simplify if that could not happen."""
    column, row = co.column_index() * 1103515245, co.row_index() * 2654435761
    signs = (column < 0) + 2.0 * (-row > 0) + 4.0 * (column + row < column) + 8.0 * (row - column < row)
    return acc * 0.0 + signs


def wrapping() -> dict[str, KernelSpec]:
    return {f"wrapped-{c.slug}": _spec(wrapped, c) for c in (SM90, SM80, co.types.GemvConfig(4, 8, 8))}


# ---- Reductions of two numbers -------------------------------------------------------------------------------------


@co.epilogue
def of_rows(acc, residual: co.Tile):
    x = acc + residual
    return {"d": x, "most": co.argmax(x, 1), "least": co.argmin(x, 1), "lse": co.logsumexp(x, 1), "low": co.min(x, 1)}


@co.epilogue
def of_columns(acc, residual: co.Tile):
    x = acc + residual
    return {"d": x, "most": co.argmax(x, 0), "least": co.argmin(x, 0), "lse": co.logsumexp(x, 0), "low": co.min(x, 0)}


@co.epilogue
def least_and_saved(acc, residual: co.Tile):
    """Minima in CUTLASS's own epilogue."""
    x = acc + residual
    return {"d": x, "pre": acc, "low": co.min(x, 1), "lowest": co.min(x, 0)}


def reductions() -> dict[str, KernelSpec]:
    configs: tuple[Config, ...] = (
        SM90,
        co.Sm90Config(_shape(128, 104, 64), _cluster(1, 2), schedule="pingpong", swap_ab=True),
        co.Sm90Config(_shape(256, 64, 64), _cluster(2, 1), schedule="cooperative"),
        co.Sm90Config(_shape(64, 8, 128), schedule="warp_specialized", swap_ab=True),
        SM80,
        co.Sm80Config(_shape(64, 64, 32), co.WarpShape(32, 32, 32), stages=3, stream_k=True),
    )
    types = {"inputs": {"residual": "f32.row"}}
    found = {f"{e.name}-{c.slug}": _spec(e, c, **types) for e in (of_rows, of_columns) for c in configs}
    found[f"of_rows-col-{SM80.slug}"] = _spec(of_rows, SM80, "f32.col", **types)
    found[f"of_columns-col-{SM80.slug}"] = _spec(of_columns, SM80, "f32.col", **types)
    for c in (SM90, SM80):
        found[f"least-{c.slug}"] = _spec(least_and_saved, c, **types)
    return found


# ---- Names ---------------------------------------------------------------------------------------------------------


@co.epilogue
def named(acc, c: co.Row, d: co.Col, n: co.Tile, float_: co.Scalar, threadIdx: co.Integer):  # noqa: N803
    x = acc * c + d + n * float_
    return {"d": x, "stream": co.max(x, 1), "MAX__": co.sum(x + co.uniform(threadIdx) * 0.0, 0)}


def names() -> dict[str, KernelSpec]:
    return {f"named-{c.slug}": _spec(named, c) for c in (SM90, WHOLE[1], SM80)}


# ---- Drawn epilogues -----------------------------------------------------------------------------------------------

INPUTS = (("bias", Kind.ROW), ("scale", Kind.COL), ("residual", Kind.TILE), ("gate", Kind.SCALAR))
DRAWN, _TOGETHER = 300, 6  # values in all, and of one kernel, which would take long to compile with more


def _draw(rng: random.Random) -> Program:
    steps: list[tuple[str, tuple[strategies.Argument, ...]]] = []
    values: list[strategies.Argument] = ["acc", *(name for name, _ in INPUTS)]
    unary = sorted(strategies.TAME_UNARY)
    binary = sorted(strategies.TAME_BINARY | strategies.PLACED_BINARY)
    for _ in range(rng.randint(2, 8)):
        name = rng.choice(unary + 2 * binary)
        # The last value more often than others, so that most of what is drawn is used.
        args = [rng.choice((*values, *values[-1:] * len(values))) for _ in range(2 if name in binary else 1)]
        values.append(len(steps))
        steps.append((name, tuple(args)))
    return Program(True, INPUTS, tuple(steps), (("d", len(steps) - 1, None, None),))


@lru_cache(maxsize=1)
def drawn() -> dict[str, tuple[Program, ...]]:
    """Draw epilogues, the same ones every time, by the names of kernels that compute some of them each."""
    rng = random.Random(0)
    programs = [_draw(rng) for _ in range(DRAWN)]
    parts = (programs[at : at + _TOGETHER] for at in range(0, DRAWN, _TOGETHER))
    return {f"drawn_values{number}": tuple(part) for number, part in enumerate(parts)}


def value_of(program: Program, leaves: dict[Any, Any], shape: tuple[int, int] | None = None) -> Any:
    """Return what a program computes: traced, or for tensors of a shape in FP64."""
    namespace: Any = functions
    if shape is not None:
        from cutlass_ops.operand import reference

        device = leaves["acc"].device
        namespace = SimpleNamespace(
            **vars(strategies.TORCH),
            row_index=lambda: torch.arange(shape[0], device=device)[:, None],
            column_index=lambda: torch.arange(shape[1], device=device),
            uniform=lambda seed, offset: reference.uniform(seed, offset, *shape, device),
        )
    return program._run(namespace, leaves, None if shape is None else torch.float64)[program.outputs[0][1]]


def _together(programs: tuple[Program, ...]) -> Epilogue:
    @co.epilogue
    def several(acc, bias: co.Row, scale: co.Col, residual: co.Tile, gate: co.Scalar):
        leaves = {"acc": acc, "bias": bias, "scale": scale, "residual": residual, "gate": gate}
        values = {f"v{at}": value_of(program, leaves) for at, program in enumerate(programs)}
        return {"d": acc + bias * scale + residual * gate} | values

    return several


@lru_cache(maxsize=1)
def drawn_specs() -> dict[str, KernelSpec]:
    """Kernels of three kinds in turn; D and all tiles are FP32."""
    configs = (SM80, co.types.GemvConfig(16, 4, 4), co.Sm90Config(_shape(64, 32, 64), schedule="warp_specialized"))
    return {
        name: _spec(
            _together(programs),
            configs[number % len(configs)],
            inputs={"bias": "bf16", "scale": "bf16", "residual": "bf16.row"},
        )
        for number, (name, programs) in enumerate(drawn().items())
    }


def specs() -> dict[str, KernelSpec]:
    """Every kernel of this module."""
    return places() | wrapping() | reductions() | names() | drawn_specs()
