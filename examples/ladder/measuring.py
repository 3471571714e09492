"""Check the rungs against float64, and time them against each other. Needs a GPU."""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cutlass_ops.compilation.background import Background
from cutlass_ops.tuner.timing import Stopwatch, rotation

from .problem import Product, Shape

ROUNDS = 25
# A rung of the CUDA cores takes 0.1 s a product, and fewer rounds tell as much.
_SLOW_US, _SLOW_ROUNDS = 3000.0, 3
# D lies between guards of so many halves: a multiple of eight, so that it begins at a multiple of 16 bytes.
_GUARD = 4096
_UNTOUCHED = 12345.0
# Error of a rung over PyTorch's own, at most.
_LIMIT = 2.0


class WrongResult(Exception):
    """A rung's result is wrong. The message says how, and at which shape."""


class Guarded:
    """D with NaN in each element, and values before and after it that must not change."""

    def __init__(self, shape: Shape, device: str = "cuda") -> None:
        size = shape.m * shape.n
        self._memory = torch.full((size + 2 * _GUARD,), _UNTOUCHED, dtype=torch.float16, device=device)
        self.d = self._memory[_GUARD : _GUARD + size].view(shape.m, shape.n)
        self.d.fill_(torch.nan)

    def require_written(self, what: str) -> None:
        """Raise WrongResult if an element of D was not written, or one beside it was."""
        unwritten = int(self.d.isnan().sum())
        if unwritten:
            raise WrongResult(f"{what}: {unwritten} elements of D were not written, or are NaN")
        size = self.d.numel()
        if not bool((self._memory[:_GUARD] == _UNTOUCHED).all() & (self._memory[_GUARD + size :] == _UNTOUCHED).all()):
            raise WrongResult(f"{what}: it writes outside of D")


def operands(shape: Shape, kind: str, seed: int, device: str = "cuda") -> tuple[Tensor, Tensor]:
    """Return A and B: of a normal distribution, or ``"whole"``, -1, 0 and 1, whose sums are exact in FP16."""
    generator = torch.Generator(device).manual_seed(seed)
    sizes = (shape.m, shape.k), (shape.n, shape.k)
    if kind == "whole":
        made = [torch.randint(-1, 2, size, generator=generator, device=device) for size in sizes]
    else:
        made = [torch.randn(size, generator=generator, device=device) for size in sizes]
    return made[0].half(), made[1].half()


def check(product: Product, shape: Shape, seed: int, device: str = "cuda") -> float:
    """Check a product at a shape against float64: exactly with whole numbers, and its error with normal ones.

    Returns
    -------
    float
        Error over that of PyTorch's own product of the same operands, in the Frobenius norm.

    Raises
    ------
    WrongResult
        If an element is wrong, or not written, or the error is more than twice PyTorch's.
    """
    a, b = operands(shape, "whole", seed, device)
    guarded = Guarded(shape, device)
    product(a, b, guarded.d)
    guarded.require_written(f"{shape}")
    exact = a.double() @ b.double().t()
    wrong = (guarded.d.double() != exact).nonzero()
    if len(wrong):
        row, column = map(int, wrong[0])
        raise WrongResult(
            f"{shape}: {len(wrong)} of {exact.numel()} sums of whole numbers are wrong, the first at {row}, {column}: "
            f"{guarded.d[row, column].item()} instead of {exact[row, column].item()}"
        )
    a, b = operands(shape, "normal", seed + 1, device)
    guarded = Guarded(shape, device)
    product(a, b, guarded.d)
    guarded.require_written(f"{shape}")
    exact = a.double() @ b.double().t()
    ours, theirs = (float((found.double() - exact).norm()) for found in (guarded.d, torch.mm(a, b.t())))
    if ours > _LIMIT * theirs:
        raise WrongResult(f"{shape}: the error is {ours / theirs:.2f} times PyTorch's")
    return ours / theirs if theirs else 1.0


def check_all(product: Product, shapes: tuple[Shape, ...]) -> float:
    """Check a product at shapes; return the largest error over PyTorch's."""
    return max(check(product, shape, seed) for seed, shape in enumerate(shapes))


def time_all(products: Mapping[str, Product], shape: Shape) -> dict[str, list[float]]:
    """Time products at a shape, in microseconds, one for each round.

    Each is captured in a CUDA graph of several launches over rotated operands of a normal distribution, so neither
    Python nor a warm L2 cache counts. In a round every product runs once, right after a replay that is not timed, in a
    random order. Slow ones take part in the first rounds alone.
    """
    # Compilers of kernels that the library may need for other shapes would take processors from what is timed.
    Background.current().close()
    sets = []
    for index in range(rotation(shape.bytes)):
        a, b = operands(shape, "normal", index)
        sets.append((a, b, a.new_empty(shape.m, shape.n)))
    watches, rounds = {}, {}
    for name, product in products.items():
        run = partial(_run, product, sets)
        expected = _rough_us(run)
        watches[name] = Stopwatch(expected)
        watches[name].add(name, run)
        rounds[name] = _SLOW_ROUNDS if expected > _SLOW_US else ROUNDS
    times: dict[str, list[float]] = {name: [] for name in products}
    for number in range(ROUNDS):
        names = [name for name in products if number < rounds[name]]
        random.Random(number).shuffle(names)
        for name in names:
            times[name] += watches[name].round([name])
    return times


def _run(product: Product, sets: list[tuple[Tensor, Tensor, Tensor]], index: int) -> object:
    return product(*sets[index % len(sets)])


def _rough_us(run: Any) -> float:
    run(0)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run(1)
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3


def row(rung: str, shape: Shape, times: Mapping[str, list[float]], error: float) -> dict[str, Any]:
    """Return one line of the result: medians, and the ratio to cuBLAS within each round."""
    mine = times[rung]
    microseconds = statistics.median(mine)
    peer = times.get("11")
    ratio = statistics.median(p / m for p, m in zip(peer, mine, strict=False)) if peer else None
    return {
        "shape": list(shape),
        "rung": rung,
        "us": round(microseconds, 2),
        "us_range": [round(min(mine), 2), round(max(mine), 2)],
        "tflops": round(shape.flops / microseconds / 1e6, 2),
        "cublas_over_it": None if ratio is None else round(ratio, 4),
        "error_over_pytorch": round(error, 3),
    }
