"""What a kind of kernels is to the rest of the library: one object with everything that depends on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol

from cutlass_ops.base.mma import MmaSpec
from cutlass_ops.declare.device import Device
from cutlass_ops.declare.form import Form
from cutlass_ops.declare.order import TileOrder
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.signature import OpSignature
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.kinds.arrays import Flags, Floats
from cutlass_ops.kinds.rules import AnyConfig, Rule
from cutlass_ops.kinds.traits import Traits


class Timer(Protocol):
    """The model of some configurations of one kind. Problems count the columns of all weights."""

    def times(self, problems: Sequence[Problem], device: Device) -> tuple[Floats, Flags]:
        """Return microseconds, and where an order of tiles by GPC takes so long; of shape (problems, configurations).

        Infinite where a kernel cannot be launched.
        """
        ...

    def besides(self, problems: Sequence[Problem], device: Device) -> Floats:
        """Return the microseconds of these that are for what kernels do besides a GEMM, of the same shape."""
        ...


@dataclass(frozen=True, eq=False)
class Kind(Generic[AnyConfig]):
    """One kind of kernels.

    Attributes
    ----------
    config : type
        The class of its configurations.
    forms : tuple of Form
        The forms of problems that its kernels serve.
    noun : str
        What messages call such a configuration.
    template : str
        The file that is rendered.
    rules : tuple of Rule
        When a configuration is legal, besides the rules of all kinds.
    shared_memory : callable
        Bytes that one thread block takes, with some stages or the configuration's own.
    context : callable
        What the template renders.
    proof : callable
        Opcodes that the machine code must hold.
    timer : callable
        The model of some configurations, for operands with some traits.
    candidates : callable
        Configurations worth considering for a signature, legal or not.
    near : callable
        Whether one configuration is a step away from another.
    values : mapping of str to tuple of int
        Numbers that a field may have, where not every one has a meaning.
    variants : callable
        What stands for a configuration where it is not legal for a signature, itself first.
    gathering : callable
        A configuration with means of A's rows from where they cost least.
    orders, orders_by_gpc : callable
        The orders of a configuration's tiles that are worth measuring at a problem, and those of them by GPC.
    handicap : callable
        What a predicted time is multiplied by before it is compared with others.
    unit : callable
        Which instructions compute, and how D is stored if not as its type says; in words.
    means : callable
        Where means of A's rows are from; in words.
    """

    config: type[AnyConfig]
    forms: tuple[Form, ...]
    noun: str
    template: str
    rules: tuple[Rule[AnyConfig], ...]
    shared_memory: Callable[[KernelSpec, AnyConfig, int | None], int]
    context: Callable[[KernelSpec], dict[str, Any]]
    proof: Callable[[AnyConfig, MmaSpec], tuple[str, ...]]
    timer: Callable[[Sequence[AnyConfig], Traits], Timer]
    candidates: Callable[[OpSignature], Iterator[AnyConfig]]
    near: Callable[[AnyConfig, AnyConfig], bool]
    unit: Callable[[AnyConfig], tuple[str, str | None]]
    means: Callable[[AnyConfig], str]
    variants: Callable[[OpSignature, AnyConfig], Iterator[AnyConfig]] = lambda _, config: iter((config,))
    values: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    gathering: Callable[[AnyConfig], AnyConfig] = lambda config: config
    orders: Callable[[AnyConfig, Problem, Device], list[TileOrder]] = lambda *_: []
    orders_by_gpc: Callable[[AnyConfig, Problem, Device], list[TileOrder]] = lambda *_: []
    handicap: Callable[[AnyConfig], float] = lambda _: 1.0
