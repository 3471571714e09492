"""One drawn call: its tensors, how it is made, and how its results are judged."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import cutlass_ops as co
from cutlass_ops.choose import dispatch, policies
from cutlass_ops.declare.config import Config
from cutlass_ops.declare.device import Device
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.signature import OpSignature
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.operand.call import signature_of
from cutlass_ops.run import requests
from cutlass_ops.run.kernels import Kernel
from tests.gpu import oracle
from tests.gpu.fuzz import alike
from tests.gpu.memory import Memory, Placed, WholeMemory

# Problems for which kernels are drawn: the logarithms of M, and of N and K in pieces of 16.
_PROBLEMS, _LOG2 = 100, ((0, 13), (2, 10), (2, 10))


@dataclass(frozen=True)
class Exact:
    """Calls whose results have one right value, so that they are compared to the last bit.

    Operands are whole numbers, three quarters of them zeros, and factors are powers of two.

    Attributes
    ----------
    limit : int
        What the absolute values of a sum's products add up to at most, in units of `loud`. The Tensor Cores add up FP8
        with 13 bits, and others with 24. What follows, such as a sum of rows, needs some of these bits for itself.
    loud : float
        What A, and what is added to sums, are multiples of. From 16 on, GELU gives its argument or 0; from 128 on, SiLU
        does.
    eps : float, optional
        What makes the root of a norm a power of two: rows of A have then a mean of 1 and a mean square of 4.
    """

    limit: int = 2**22
    loud: float = 1.0
    eps: float | None = None

    def memory(self, device: str, rng: random.Random, k: int) -> Memory:
        """Return what draws the tensors of a call: numbers as large as the limit allows."""
        mean = k / 16  # of the products of a sum that are not zero; hardly any sum has more than `most`
        most = mean + 6 * mean**0.5 + 6
        return WholeMemory(device, rng, max(1, int((self.limit / most) ** 0.5)))

    def require(self, absolute: Tensor) -> None:
        """Require that no partial sum can have been rounded, given what absolute products add up to."""
        most = float(absolute.amax()) if absolute.numel() else 0.0
        assert most <= self.limit * self.loud, f"sums of {most} are not exact: a fault of the test"


@dataclass(frozen=True)
class Wanted:
    """What an output should be.

    Attributes
    ----------
    exact : Tensor
        Its values in float64.
    moved : Tensor
        How far they move if the sums are off by what they may be.
    apart : mapping of str to list of int
        Rows that are compared by themselves, since their scales are far from those of others.
    unknown : Tensor, optional
        Where the result is not known.
    """

    exact: Tensor
    moved: Tensor
    apart: Mapping[str, list[int]] = field(default_factory=dict)
    unknown: Tensor | None = None

    def why_not(self, found: Tensor, sums: float) -> str | None:
        """Say why an output is not what it should be; None if it is."""
        if found.shape != self.exact.shape:
            return f"the shape is {tuple(found.shape)} and not {tuple(self.exact.shape)}"
        exact = self.exact if self.unknown is None else torch.where(self.unknown, found.double(), self.exact)
        alone = {row for rows in self.apart.values() for row in rows}
        others = [row for row in range(len(found)) if row not in alone] if alone else slice(None)
        for name, rows in {"": others, **self.apart}.items():
            why = oracle.why_not(_rows(found, rows), exact[rows], sums, self.moved[rows])
            if why is not None:
                return f"{f'in rows with {name}, ' if name else ''}{why}"
        return None


@dataclass
class Case:
    """One drawn call.

    Attributes
    ----------
    function : callable
        What a user calls.
    arguments, named : tuple, dict
        Its tensors, one after the other: A, B, where groups end, and scales; and its other arguments.
    out : dict of str to Placed
        Outputs of the caller, all or none.
    wanted : callable
        Returns what each output should be. It is asked before the call, which might change its operands.
    sums : float
        What the Tensor Cores' sums may be off by: see ``oracle.SUMS``.
    used : int or Tensor, optional
        How many of D's rows are written, or which; by default all.
    refused : str, optional
        A part of the error of a call that must be refused.
    about : str
        The problem, for messages.
    grouped : str, optional
        What the third tensor says of groups: their "offsets", or their "counts" of rows.
    of_any_values : callable, optional
        Draws a call like it whose results are not known to the last bit: for relations between calls.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    named: dict[str, Any]
    out: dict[str, Placed]
    wanted: Callable[[], Mapping[str, Wanted]]
    sums: float
    used: int | Tensor | None = None
    refused: str | None = None
    about: str = ""
    grouped: str | None = None
    of_any_values: Callable[[], Case] | None = None

    def values(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments as a user passes them: scales in their operands, and ends in groups."""
        a, b, *others = self.arguments
        groups = {"groups": co.Groups(**{self.grouped: others.pop(0)})} if self.grouped else {}
        operands = tuple(map(co.Scaled, (a, b), others)) if others else (a, b)
        return operands, {**groups, **self.named}

    def given(self) -> dict[str, Any]:
        """Return the argument for outputs, if the caller gives them."""
        if not self.out:
            return {}
        views = {name: placed.view for name, placed in self.out.items()}
        return {"out": views["d"] if len(views) == 1 else views}

    def call(self) -> Any:
        """Make the call as a user does."""
        arguments, named = self.values()
        return self.function(*arguments, **named, **self.given())

    def by(self, spec: KernelSpec) -> Any:
        """Have an exact kernel compute it."""
        asked = self.request()
        return _exact(spec)(*asked.arguments, **{**asked.named, **self.given()})

    def why_not_alike(self, spec: KernelSpec) -> str | None:
        """Say which relation between calls of an exact kernel does not hold; None if all do."""
        return alike.why_not(_exact(spec), self.request())

    def request(self) -> requests.Request:
        """Return the op behind the call, and its arguments, without outputs."""
        arguments, named = self.values()
        asked = requests.requested(self.function, *arguments, **named)
        named = {name: x for name, x in asked.named.items() if name not in ("out", "out_dtype")}
        return requests.Request(asked.op, asked.arguments, named)

    def signature(self, device: Device) -> tuple[OpSignature, Problem]:
        """Return what kernels of the call are declared by, and for which problem they are chosen."""
        op, (a, b, *inputs), named = self.request()
        call = op.checked(a, b, tuple(inputs), named, None, self.named.get("out_dtype"))
        return signature_of(call, device), call.chosen_for

    def why_wrong(self, results: Any, wanted: Mapping[str, Wanted]) -> str | None:
        """Say what is wrong with results, or with what surrounds the caller's outputs; None if nothing is."""
        found = [results] if isinstance(results, Tensor) else list(results)
        names = self.request().op.outputs
        for name, tensor in zip(names, found, strict=True):
            placed = self.out.get(name)
            if placed is not None and tensor.data_ptr() != placed.view.data_ptr():
                return f"{name} is not the tensor that was passed"
        own = slice(self.used) if not isinstance(self.used, Tensor) else self.used
        for name, placed in self.out.items():
            stray = placed.stray(own)
            if stray:
                return f"{stray} elements outside of {name} were written"
        for name, tensor in zip(names, found, strict=True):
            why = wanted[name].why_not(tensor if self.used is None else tensor[own], self.sums)
            if why is not None:
                return f"{name}: {why}"
        return None


def _rows(tensor: Tensor, rows: list[int] | slice) -> Tensor:
    """Return some rows, of FP8 as bytes: not every version of PyTorch indexes it."""
    return tensor[rows] if tensor.itemsize > 1 else tensor.view(torch.uint8)[rows].view(tensor.dtype)


@functools.cache
def _exact(spec: KernelSpec) -> Kernel:
    """Return an exact kernel, one for all calls, so that it remembers them."""
    return co.build(spec)


@dataclass(frozen=True)
class Kernels:
    """The kernels of a family: the first serves calls, and all are called as they are."""

    specs: tuple[KernelSpec, ...]

    @staticmethod
    def key(spec: KernelSpec) -> str:
        """Return the key of one that is compiled, with its configuration for readers."""
        return f"{spec.config.slug} {_exact(spec).loaded.artifact.key}"

    @classmethod
    def of(cls, case: Case, device: Device, problems: Sequence[tuple[int, int, int]]) -> Kernels:
        """Choose kernels for a case's signature, the best ones at some problems."""
        signature, problem = case.signature(device)
        found = {}
        for m, n, k in problems:
            decision = dispatch.decide(signature, device, problem._replace(m=m, n=n, k=k))
            assert decision is not None, f"no kernel serves {signature}"
            others = policies.policy(signature, device).every(decision.problem)
            every = (decision.config, *(each.config for each in others))
            # Kernels for few rows take no others.
            found[next(config for config in every if not config.few_rows)] = None
        return cls(tuple(device.spec(signature, config) for config in found))

    @classmethod
    def drawn(cls, case: Case, device: Device, first: int, count: int, *, few_rows: bool = False) -> Kernels:
        """Choose some of a signature's kernels: the best ones at drawn problems, and then others of the tables.

        They are in an order of their own. After the last one, the first one follows. Kernels for few rows take lines
        of whole pieces alone, so they are for calls of their own.
        """
        signature, problem = case.signature(device)
        rng, found = random.Random(0), dict[Config, None]()
        for _ in range(_PROBLEMS):
            m, n, k = (int(2 ** rng.uniform(*ends)) for ends in _LOG2)
            decision = dispatch.decide(signature, device, problem._replace(m=m, n=16 * n, k=16 * k))
            assert decision is not None, f"no kernel serves {signature}"
            found[decision.config] = None
        every = policies.policy(signature, device).every(problem)
        found |= dict.fromkeys(each.config for each in every)
        usual = [config for config in found if config.few_rows == few_rows]
        chosen = [usual[at % len(usual)] for at in range(first, first + count)]
        return cls(tuple(device.spec(signature, config) for config in dict.fromkeys(chosen)))


def moved_by(function: Callable[[Tensor], Mapping[str, Tensor]], sums: Tensor, slack: Tensor) -> dict[str, Wanted]:
    """Return the outputs of an epilogue, and how far they move if the sums do."""
    exact, other = function(sums), function(sums + slack)
    return {name: Wanted(x.double(), (other[name] - x).double()) for name, x in exact.items()}
