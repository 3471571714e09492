"""Pools: the few kernels of a signature that are nearly as fast as its whole table.

A pool is chosen by measurements if there are any: at every problem of the tables that serve the signature, its own
and those that it borrows, some kernel of the pool was measured at most so much slower than the fastest. For targets
without tables the model takes the place of measurements, at the problems of the reference table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from cutlass_ops.artifacts.manifest import Choice
from cutlass_ops.choose import policies
from cutlass_ops.choose.knowledge import Knowledge
from cutlass_ops.choose.policies import Policy
from cutlass_ops.declare.config import Config, Ordered
from cutlass_ops.declare.device import Device
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.rows import ROWS
from cutlass_ops.declare.signature import OpSignature
from cutlass_ops.kinds.arrays import Flags, Floats

# Weights with at least this many problems in the tables have their choices in the bundle: 22 of well-known models. Each
# makes the first call of a signature half a millisecond later.
_PROBLEMS_OF_A_WEIGHT = 10
# Between measured numbers of rows a kernel goes on serving while it is expected to be so little behind.
_NEARLY = 0.01
# Tables round to 1e-4: a loss of exactly the limit is within it.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Pool:
    """The kernels that were chosen for a signature."""

    signature: OpSignature  # epilogue and operand types
    kernels: tuple[Config, ...]  # the kernels, most useful first
    problems: int  # number of problems at which it was judged, on all devices together
    measured: int  # at how many of them by measurements; at the others by the model
    # At how many of them it is further behind than it should be: none, unless it was limited to fewer kernels.
    beyond: int
    # How far it is behind the fastest kernel of the tables at the others, as a part of its time.
    worst: float
    mean: float


def pool(signature: OpSignature, devices: Sequence[Device], behind: float, most: int | None = None) -> Pool:
    """Choose as few kernels as are needed at the problems of the tables.

    The pool is behind the fastest kernel by at most ``behind``, as a part of its time. Of at most ``most`` kernels,
    those that help at most problems are kept.
    """
    known = [_losses(policies.policy(signature, device).knowledge) for device in devices]
    kernels = tuple(dict.fromkeys(config for configs, _, _ in known for config in configs))
    place = {config: at for at, config in enumerate(kernels)}
    losses = np.full((sum(len(each) for _, each, _ in known), len(kernels)), np.inf)
    row = 0
    for configs, each, _ in known:
        losses[row : row + len(each), [place[c] for c in configs]] = each
        row += len(each)
    chosen = cover(losses <= behind + _ROUNDING, most)
    reached = losses[:, chosen].min(1, initial=np.inf)
    within = reached[reached <= behind + _ROUNDING]
    return Pool(
        signature,
        tuple(kernels[at] for at in chosen),
        len(losses),
        sum(measured for _, _, measured in known),
        len(losses) - len(within),
        float(within.max(initial=0)),
        float(within.mean()) if len(within) else 0.0,
    )


def is_served(signature: OpSignature, device: Device) -> bool:
    """Whether some kernel serves a signature on a device."""
    return bool(policies.policy(signature, device).kernels)


@lru_cache(maxsize=16)
def _losses(knowledge: Knowledge) -> tuple[tuple[Config, ...], Floats, int]:
    """Return the known kernels, their losses to the fastest at each problem, and how many problems were measured."""
    kernels = knowledge.pool.configs
    problems = [p for p, known in knowledge.measured.items() if known]
    measured = len(problems)
    if not problems:
        problems = [point.problem for point in policies.reference().points]
    times = knowledge.expected(problems).decisive() if kernels else np.empty((0, 0))
    possible = times[np.isfinite(times).any(1)] if times.size else times
    return kernels, possible / possible.min(1, keepdims=True) - 1 if possible.size else possible, measured


def cover(near: Flags, most: int | None = None) -> list[int]:
    """Choose columns so that each row has a true value in one of them, most useful first."""
    left = near.any(1)
    chosen: list[int] = []
    while left.any() and (most is None or len(chosen) < most):
        chosen.append(int(near[left].sum(0).argmax()))
        left &= ~near[:, chosen[-1]]
    # The last ones help least, so they are the first to go.
    for at in chosen[::-1]:
        others = [other for other in chosen if other != at]
        if others and (near[:, others].any(1) | ~near[:, at]).all():
            chosen = others
    return chosen


def choices(of: Pool, device: Device) -> tuple[Choice, ...]:
    """Return which of a pool's kernels serve which numbers of rows, for the weights that the tables have often."""
    whole = policies.policy(of.signature, device)
    policy = Policy.of(whole.tables, of.signature, device, of.kernels)
    points = list(whole.knowledge.measured) or [point.problem for point in policies.reference().points]
    rows: dict[tuple[int, int], set[int]] = {}
    for problem in points:
        if problem.count == 1:
            rows.setdefault((problem.n, problem.k), set()).add(problem.m)
    return tuple(
        Choice(device.capability, n, k, tuple(_steps(policy, [Problem(m, n, k) for m in sorted({*ROWS, *mine})])))
        for (n, k), mine in sorted(rows.items())
        if len(mine) >= _PROBLEMS_OF_A_WEIGHT
    )


def _steps(policy: Policy, problems: Sequence[Problem]) -> Iterator[tuple[int, Ordered]]:
    """Yield up to how many rows which kernel serves, with as few changes as its expected times allow."""
    before: tuple[int, dict[Ordered, float]] | None = None
    for m, near in _near(policy, problems):
        if before is not None:
            both = {ordered: behind + near[ordered] for ordered, behind in before[1].items() if ordered in near}
            if not both:
                yield before[0], min(before[1], key=before[1].__getitem__)
            near = both or near
        before = m, near
    if before is not None:
        yield before[0], min(before[1], key=before[1].__getitem__)


def _near(policy: Policy, problems: Sequence[Problem]) -> Iterator[tuple[int, dict[Ordered, float]]]:
    """Yield how far those kernels are behind that may serve at each number of rows."""
    knowledge = policy.knowledge
    known = policy.expected(problems)
    times = known.decisive()
    for at, problem in enumerate(problems):
        measured = knowledge.measured.get(problem, {})
        best = times[at].min(initial=np.inf)
        if not np.isfinite(best):  # more rows than any kernel can be launched with
            continue
        places = np.flatnonzero(times[at] <= best * (1 + (0 if measured else _NEARLY) + _ROUNDING))
        yield (
            problem.m,
            {
                Ordered(
                    config,
                    measured[config].order
                    if config in measured
                    else knowledge.order(config, problem, by_gpc=bool(known.by_gpc[at, place])),
                ): float(times[at, place] / best - 1)
                for place in places.tolist()
                for config in (policy.kernels[place],)
            },
        )
