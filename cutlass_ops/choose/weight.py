"""What is decided once for a weight (N, K): the kernels that it may need, and which serves how many rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

from cutlass_ops.base import checked_json
from cutlass_ops.base.errors import ConfigError
from cutlass_ops.choose.knowledge import order_of
from cutlass_ops.choose.steps import MOST_ROWS, Steps, StepsSoFar
from cutlass_ops.declare.config import Config, Ordered, config_from_json, config_to_json
from cutlass_ops.declare.device import Device
from cutlass_ops.declare.order import TileOrder
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.signature import OpSignature
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.kinds.traits import Traits

# A kernel that is the fastest at some number of rows may serve that many times as many, or as few, for a while.
NEAR = 4.0
# So many numbers of rows are left to the policy before a call searches for the steps itself. A thread that was asked to
# has begun by then.
_LEFT = 64


@dataclass(eq=False)
class Weight:
    """What is decided once for a weight.

    What the first call needs is there. What only other numbers of rows and other processes need comes with
    :meth:`finish`, which changes no decision.

    Attributes
    ----------
    signature : OpSignature
        The signature of its calls.
    device : Device
        Where they run.
    kept : tuple of Config
        The kernels that it may need at any number of rows.
    so_far : StepsSoFar
        Which of them serves at each number of rows, by what is foretold, as far as that was searched for.
    measured : mapping of int to Ordered
        The fastest of them by number of rows, where any was measured.
    peers : mapping of int to str
        The peer that serves instead, by number of rows.
    finished : bool
        Whether nothing is left for :meth:`finish`.
    """

    signature: OpSignature
    device: Device
    kept: tuple[Config, ...]
    so_far: StepsSoFar
    measured: Mapping[int, Ordered]
    peers: Mapping[int, str]
    finished: bool = False
    _keep: Callable[[Weight], object] | None = field(default=None, repr=False)
    _asked: Iterator[int] = field(default_factory=itertools.count, repr=False)
    _by_gpc: dict[int, TileOrder] = field(default_factory=dict, repr=False)

    def serves(self, problem: Problem) -> Ordered | None:
        """Return the kernel that serves one of the weight's problems; None if that was not decided."""
        known = self.measured.get(problem.m)
        if known is not None:
            return known
        found = self.so_far.now.at(problem.m)
        if found is None and not self.so_far.whole and next(self._asked) >= _LEFT:
            self.finish()
            found = self.so_far.now.at(problem.m)
        if found is None:
            return None
        place, by_gpc = found
        config = self.kept[place]
        if not by_gpc:
            return Ordered(config, order_of(config, problem, self._traits, self.device, by_gpc=False))
        # Where a kernel has an order by GPC, it is the same.
        if place not in self._by_gpc:
            self._by_gpc[place] = order_of(config, problem, self._traits, self.device, by_gpc=True)
        return Ordered(config, self._by_gpc[place])

    def near(self, problem: Problem) -> Iterator[Ordered]:
        """Yield the kernels that serve some number of rows within :data:`NEAR` of a problem's, the nearest first.

        That takes no model: a kernel that is the fastest nearby is not much slower here. Before all steps are known, it
        is those that are the fastest at the foretold numbers of rows.
        """
        rows, found, steps = problem.m, dict[int, float](), self.so_far.now
        ends = (*steps.starts[1:], MOST_ROWS + 1)
        for start, end, kernel in zip(steps.starts, ends, steps.kernels, strict=True):
            away = max(start / rows, rows / (end - 1), 1.0)
            if kernel >= 0 and away <= min(NEAR, found.get(kernel >> 1, NEAR)):
                found[kernel >> 1] = away
        configs = [self.kept[place] for place in sorted(found, key=found.__getitem__)]
        return (Ordered(c, order_of(c, problem, self._traits, self.device, by_gpc=False)) for c in configs)

    @property
    def steps(self) -> Steps:
        """All steps: they are searched for, if nobody has."""
        return self.so_far.all()

    def finish(self) -> None:
        """Do what is left: search for the other steps, and keep all that was decided for later processes.

        That takes milliseconds. Several threads may do it at a time.
        """
        self.so_far.all()
        if self._keep is not None and not self.finished:
            self._keep(self)
        self.finished = True

    @cached_property
    def specs(self) -> Mapping[Config, KernelSpec]:
        """The specifications of :attr:`kept`."""
        return {c: spec_of(self.signature, self.device, c) for c in self.kept}

    @cached_property
    def _traits(self) -> Traits:
        return Traits.of(self.signature)

    def to_json(self) -> dict[str, Any]:
        """Return what was decided as plain values, without the signature and the device."""
        index = {config: at for at, config in enumerate(self.kept)}
        return {
            "kept": [config_to_json(c) for c in self.kept],
            "starts": self.steps.starts,
            "kernels": self.steps.kernels,
            "measured": [[m, index[x.config], x.order.to_json()] for m, x in self.measured.items()],
            "peers": list(self.peers.items()),
        }

    @classmethod
    def from_json(cls, data: object, signature: OpSignature, device: Device) -> Weight:
        """Rebuild what :meth:`to_json` returned, for the same signature and device.

        Raises
        ------
        ConfigError
            If it is something else.
        """
        given = checked_json.mapping(data, "a decision", None)
        try:
            kept = tuple(map(config_from_json, given["kept"]))
            steps = Steps(tuple(map(int, given["starts"])), tuple(map(int, given["kernels"])))
            measured = {int(m): Ordered(kept[at], TileOrder.from_json(order)) for m, at, order in given["measured"]}
            peers = {int(m): str(name) for m, name in given["peers"]}
        except (KeyError, IndexError, TypeError, ValueError) as exc:
            raise ConfigError(f"a decision is not whole: {exc!r}") from None
        in_range = all(-1 <= number < 2 * len(kept) for number in steps.kernels)
        if steps.starts[:1] != (1,) or len(steps.starts) != len(steps.kernels) or not in_range:
            raise ConfigError("a decision's steps are not whole")
        return cls(signature, device, kept, StepsSoFar(steps), measured, peers, finished=True)


@lru_cache(maxsize=1 << 14)
def spec_of(signature: OpSignature, device: Device, config: Config) -> KernelSpec:
    """Return the specification of a kernel: made once for all weights."""
    return device.spec(signature, config)
