"""The public function: an op at problems against other ways, timed on this machine's GPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from cutlass_ops.base import env
from cutlass_ops.base.errors import MeasuringError, NoDeviceError
from cutlass_ops.base.frozen import plain
from cutlass_ops.base.terminal import progress
from cutlass_ops.declare import spelling
from cutlass_ops.declare.chips import CHIPS
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.roofline import Roofline, roofline
from cutlass_ops.operand import reference
from cutlass_ops.run import requests
from cutlass_ops.run.peers import Peer, peers
from cutlass_ops.tools.bench.result import METHODS, OURS, Benchmark, Rival, Row
from cutlass_ops.tools.bench.rivals import NAMES, Missing, rival
from cutlass_ops.tools.workload import Workload, workload
from cutlass_ops.tuner import comparing
from cutlass_ops.tuner.comparing import ROUNDS, Timing
from cutlass_ops.tuner.timing import Run, expected_us, rotation

# Our error may be this many times eager PyTorch's, or nothing is timed.
_WORST_ERROR = 2.0
# Relative errors that count as none: FP64 is compared with another sum in FP64, and two numbers of TF32 have 22 bits.
_LEAST_ERRORS = {"f64": 1e-14, "tf32x3": 2.0**-21}
_MESSAGE = 160  # characters of an error of another way

# A, B and the epilogue's inputs.
_Set: TypeAlias = tuple[Tensor, Tensor, tuple[Any, ...]]


class Clock(Protocol):
    """How variants are timed: a :class:`Device` on a GPU, or a replacement in tests."""

    device: str

    def environment(self) -> Mapping[str, Any]:
        """Return the chip, date and versions."""

    def timed(self, method: str, variants: Mapping[str, Run], expected_us: float, rounds: int) -> dict[str, Timing]:
        """Time variants by one of :data:`METHODS`."""


class Device:
    """Time variants on this machine's GPU."""

    device = "cuda"

    def environment(self) -> Mapping[str, Any]:
        """Return the chip, date and versions."""
        return comparing.environment()

    def timed(self, method: str, variants: Mapping[str, Run], expected_us: float, rounds: int) -> dict[str, Timing]:
        """Time variants by one of :data:`METHODS`."""
        if method == "between":
            return comparing.time_between(variants, rounds)
        return comparing.time_interleaved(variants, expected_us, rounds)


def bench(
    op: object,
    problems: Any,
    *,
    dtype: str = "bf16",
    a: str = "row",
    b: str = "col",
    against: str | Iterable[str] = NAMES,
    rounds: int = ROUNDS,
    clock: Clock | None = None,
) -> Benchmark:
    """Time an op against other implementations of the same computation, as this library's benchmarks do.

    All implementations run once in every round, in random order. Ratios are formed within rounds. Inputs rotate, so
    that no operand is still in the L2 cache. First our result is compared with one in FP64.

    Parameters
    ----------
    op : Op, Epilogue, function or str
        A named op such as ``cutlass_ops.gemm_bias_relu``, a function decorated with :func:`cutlass_ops.epilogue`, or a
        function such as ``cutlass_ops.rmsnorm_gemm``. Or the name of one: ``"gemm_bias_relu"``, or ``"MODULE:NAME"`` of
        an epilogue.
    problems : str or sequence
        ``"4096x4096x4096"``, ``"1,16x4096x4096"``, an (M, N, K), or a sequence of these.
    dtype : str
        Dtype of A and B.
    a, b : str
        Majors of A and B, ``"row"`` or ``"col"``. A weight (N, K) passed as ``weight.t()`` is ``"col"``.
    against : str or iterable of str
        The other implementations: ``"eager"``, ``"cublaslt"``, ``"compile"`` (torch.compile with max-autotune),
        ``"triton"`` and ``"quack"``. Those that are not installed, or do not support the op, are left out; the result
        names them.
    rounds : int
        Number of measured rounds.
    clock : Clock, optional
        Another clock, for tests.

    Returns
    -------
    Benchmark
        Print it, show it in a notebook, or use ``to_json()`` and ``html()``.

    Raises
    ------
    NoDeviceError
        If there is no GPU.
    MeasuringError
        If our result's error is more than twice that of eager PyTorch.
    TypeError, ValueError
        If an argument is unknown.

    Examples
    --------
    >>> print(co.bench("gemm_bias_relu", "1,512x4096x4096", against=["eager", "cublaslt"]))  # doctest: +SKIP
    """
    asked = requests.name_or_op(op)
    for name, value in (("a", a), ("b", b)):
        if not isinstance(value, str):
            raise TypeError(f"{name} must be 'row' or 'col', not {type(value).__name__}")
    if not isinstance(against, Iterable):
        raise TypeError(f"against must be a list of {', '.join(NAMES)}, not {type(against).__name__}")
    chosen, named = (
        list(dict.fromkeys([against] if isinstance(against, str) else against)),
        asked if isinstance(asked, str) else asked.name,
    )
    for name in chosen:
        require_way(name)
    rounds = plain(rounds)
    if type(rounds) is not int:
        raise TypeError(f"rounds must be an integer, not {type(rounds).__name__}")
    if rounds < 1:
        raise ValueError(f"rounds is {rounds}: use at least 1")
    dtype, a_major, b_major = spelling.dtype_of(dtype), spelling.major_of(a), spelling.major_of(b)
    works = [workload(asked, problem, dtype, a_major, b_major) for problem in _problems(problems)]
    if clock is None:
        if not torch.cuda.is_available():
            raise NoDeviceError("bench needs a CUDA device, and there is none here: run it on a machine with a GPU")
        clock = Device()
    environment = dict(clock.environment())
    rows = []
    with _kernels_alone(), torch.no_grad(), progress(len(works), "problems timed") as shown:
        for work in works:
            with _as_multiplied(work):
                rows.append(_row(work, chosen, rounds, clock, str(environment.get("chip"))))
            shown.finished(rows[-1].name)
    return Benchmark(named, dtype, a_major, b_major, environment, tuple(rows))


def require_way(name: str) -> None:
    """Require the name of a way to compute the same; a ValueError lists them."""
    if name not in NAMES:
        raise ValueError(f"{name!r} is not a way to compare with: use some of {', '.join(NAMES)}")


def _problems(given: Any) -> list[Problem]:
    if isinstance(given, str):
        return spelling.problems_of(given)
    if isinstance(given, Sequence) and given and all(type(x) is int for x in given):
        return [Problem.of(given)]
    if not isinstance(given, Sequence):
        raise TypeError(f"a problem is a text such as '16x4096x4096' or an (M, N, K), not {type(given).__name__}")
    return [problem for each in given for problem in _problems(each)]


@contextmanager
def _kernels_alone() -> Any:
    """Make calls wait for the kernels that they choose, so that PyTorch serves none of them."""
    before = os.environ.get(env.STAND_IN.name)
    os.environ[env.STAND_IN.name] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[env.STAND_IN.name]
        else:
            os.environ[env.STAND_IN.name] = before


@contextmanager
def _as_multiplied(work: Workload) -> Any:
    """Let PyTorch multiply FP32 in TF32 if the op does."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = work.call.arguments.math == "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _row(work: Workload, names: Sequence[str], rounds: int, clock: Clock, chip: str) -> Row:
    sets = [work.draw(clock.device) for _ in range(rotation(work.moved))]
    error, kernel = _checked(work, sets[0])
    variants: dict[str, Run] = {OURS: _ours(work, sets)}
    missing: dict[str, str] = {}
    for name in names:
        run, why = _tried(name, work, sets)
        if run is not None:
            variants[name] = run
        else:
            missing[name] = why
    rough = expected_us(work.problem, work.call.arguments.a.element_size())
    times = {}
    for method in METHODS:
        found = clock.timed(method, variants, rough, rounds)
        times[method] = {name: _rival(found[OURS], found[name]) for name in variants}
    extents = work.problem.extents
    return Row(extents, work.problem.flops, work.moved, _roof(work, chip), kernel, error, times, missing)


def _ours(work: Workload, sets: Sequence[_Set]) -> Run:
    return _run(lambda a, b, inputs: work.op(a, b, *inputs), sets)


def _run(function: Peer, sets: Sequence[_Set]) -> Callable[[int], object]:
    def run(index: int) -> object:
        return function(*sets[index % len(sets)])

    return run


def _tried(name: str, work: Workload, sets: Sequence[_Set]) -> tuple[Run | None, str]:
    """Run another way once; return it, or why it cannot be timed."""
    try:
        run = _run(rival(name, work), sets)
        run(0)
    except Missing as exc:
        return None, str(exc)
    except Exception as exc:  # other people's code may raise anything, and the other ways are timed all the same
        first = next(iter(str(exc).strip().splitlines()), type(exc).__name__)
        return None, f"failed: {first[:_MESSAGE]}"
    return run, ""


def _rival(ours: Timing, other: Timing) -> Rival:
    ratio = comparing.ratios(ours, other)
    return Rival(other.median * 1e3, ratio["median"], ratio["min"], ratio["max"])


def _roof(work: Workload, chip: str) -> Roofline | None:
    found = CHIPS.get(chip)
    return None if found is None else roofline(work.problem, work.moved, found, work.rate)


def _checked(work: Workload, tensors: _Set) -> tuple[float, str]:
    """Return our error over eager's, and what serves the call. Raises MeasuringError if that ratio is more than 2."""
    a, b, inputs = tensors
    graph = work.graph
    wide = {
        i.name: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x
        for i, x in zip(graph.inputs, inputs, strict=True)
    }
    acc = reference.accumulator(graph, a, b, wide, torch.float64)
    name = graph.outputs[0].name
    exact = reference.evaluate(graph, acc, wide, torch.float64, a=a)[name]
    eager, ours = peers(graph, a.dtype)["eager"](a, b, inputs), work.op(a, b, *inputs)
    least = _LEAST_ERRORS.get(work.dtype, 0.0)
    error = comparing.error_ratio(_first(ours, name), exact, _first(eager, name), least)
    if not error <= _WORST_ERROR:
        what = f"{work.op.name} at {work.problem}"
        raise MeasuringError(f"{what} is wrong: its error is {error:.2f} times eager PyTorch's")
    return error, _served(work, a, b, inputs)


def _first(found: Any, name: str) -> Tensor:
    """Return D of what an op or a peer returned."""
    if isinstance(found, Tensor):
        return found
    d: Tensor = found[name] if isinstance(found, Mapping) else found[0]
    return d


def _served(work: Workload, a: Tensor, b: Tensor, inputs: tuple[Any, ...]) -> str:
    """Return what serves our call, by the slug of its configuration."""
    if not a.is_cuda:
        return "PyTorch"
    decision = work.op.plan(a, b, *inputs)
    return decision.spec.config.slug if decision.peer is None else f"PyTorch ({decision.peer})"
