"""The interface of a kind of kernels: one object with everything that depends on the kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar

import numpy as np

from cutlass_ops.base.dtypes import DType
from cutlass_ops.base.mma import MmaSpec, Unit
from cutlass_ops.declare.config import Config
from cutlass_ops.declare.device import Device
from cutlass_ops.declare.form import Form
from cutlass_ops.declare.order import TileOrder
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.signature import OpSignature
from cutlass_ops.declare.spec import KernelSpec

if TYPE_CHECKING:
    from cutlass_ops.kinds.arrays import Flags, Floats, Places, Problems
    from cutlass_ops.kinds.traits import Traits

Ground = Literal["hardware", "compiler", "policy"]
AnyConfig = TypeVar("AnyConfig", bound=Config)


@dataclass(frozen=True)
class Broken:
    """One way in which a declaration breaks a rule, and what to do."""

    what: str  # the field, its value, and what is needed
    # Changes that would satisfy the rule: new values by the name of a field of the configuration (such as
    # ``"threadblock.m"``), or ``"target"``. The message leaves out changes that would break another rule.
    changes: tuple[Mapping[str, object], ...] = ()
    # Other ways to satisfy the rule. A function takes the names of the other kinds of kernels that serve the
    # declaration.
    advice: str | Callable[[list[str]], str] = ""


@dataclass(frozen=True)
class Rule(Generic[AnyConfig]):
    """One constraint."""

    name: str  # name in :class:`~cutlass_ops.kinds.legality.Violation` and in the documentation
    ground: Ground  # ``"hardware"``, ``"compiler"`` or ``"policy"``
    # Yields each way in which a spec breaks the rule: a complete message, or a :class:`Broken` if the advice depends
    # on other rules
    broken: Callable[[KernelSpec, AnyConfig], Iterator[str | Broken]]


class Timer(Protocol):
    """The time model of some configurations of one kind. N of a problem is that of all weights together."""

    def times(self, problems: Problems, device: Device) -> tuple[Floats, Flags]:
        """Return times in microseconds, and whether they are for tiles ordered by GPC.

        Both have the shape (problems, configurations). The time is infinite if a kernel cannot be launched.
        """
        ...

    def besides(self, problems: Problems, device: Device) -> Floats:
        """Return the part of :meth:`times` that is not the GEMM, such as operand copies. The shape is the same."""
        ...

    def take(self, places: Places) -> Timer:
        """Return the model of some of these configurations, each as often as it is named."""
        ...


def late(module: str, name: str) -> Callable[..., Any]:
    """Return a function of a module of this package that is imported at its first call, since it is large."""
    return lambda *args: attrgetter(name)(import_module(f"cutlass_ops.kinds.{module}"))(*args)


@dataclass(frozen=True, eq=False)
class Kind(Generic[AnyConfig]):
    """One kind of kernels."""

    config: type[AnyConfig]  # class of its configurations
    forms: tuple[Form, ...]  # the forms of problems that its kernels serve
    # Whether its kernels multiply a pair of types. A new pair is refused until a kind says that it does.
    multiplies: Callable[[MmaSpec], bool]
    noun: str  # name of such a configuration in messages
    template: str  # file name of the template
    rules: tuple[Rule[AnyConfig], ...]  # legality rules of this kind, besides the common ones
    # Returns the shared memory of one thread block in bytes, for given stages or the configuration's own
    shared_memory: Callable[[KernelSpec, AnyConfig, int | None], int]
    context: Callable[[KernelSpec], dict[str, Any]]  # returns the values for the template
    # Returns the opcodes that the machine code must contain, given what the kind's family has for A and B
    proof: Callable[[AnyConfig, Unit], tuple[str, ...]]
    # Returns the time model of some configurations for operands with given traits
    timer: Callable[[Sequence[AnyConfig], Traits], Timer]
    # Yields configurations worth considering for a signature, legal or not
    candidates: Callable[[OpSignature], Iterator[AnyConfig]]
    near: Callable[[AnyConfig, AnyConfig], bool]  # returns whether two configurations differ by one step
    # Returns which instructions compute, and how D is stored if its type does not determine it, in words
    unit: Callable[[AnyConfig], tuple[str, str | None]]
    means: Callable[[AnyConfig], str]  # returns where means of A's rows are computed, in words
    general: bool = False  # whether its kernels are for any number of rows, and the model ranks them
    # Whether shipped tables have its kernels. Others are always considered beside those of tables.
    in_tables: bool = True
    # Returns the choices for a signature without a tuning table
    untuned: Callable[[OpSignature], tuple[AnyConfig, ...]] = lambda _: ()
    # Whether a configuration is one of those that the model can distinguish
    is_usual: Callable[[AnyConfig, DType], bool] = lambda *_: True
    # Whether a configuration of a kind that is not general is worth a race at a problem
    fits: Callable[[AnyConfig, Problem], bool] = lambda *_: False
    # Yields a few configurations for a signature, of which one is legal if the kind serves it at any number of rows;
    # none if the kind is for some problems only
    usual: Callable[[OpSignature], Iterator[AnyConfig]] = lambda _: iter(())
    stores_fp8: bool = False  # whether its kernels store outputs in FP8
    quantizes: bool = False  # whether its kernels quantise D in blocks
    scales_blocks: bool = False  # whether its main loop applies scales of blocks of A and B
    pointwise: bool = False  # whether its kernels are for epilogues that read no product, and for no others
    # Yields a configuration and its substitutes for a signature for which it is not legal
    variants: Callable[[OpSignature, AnyConfig], Iterator[AnyConfig]] = lambda _, config: iter((config,))
    values: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # valid values of fields that allow only a few
    # Returns a configuration for elements of another size, whose tiles have as many bytes along K. Takes bits of an
    # element before and after.
    of_width: Callable[[AnyConfig, int, int], AnyConfig] = lambda config, *_: config
    # Returns a configuration with the cheapest way to take means of A's rows
    gathering: Callable[[AnyConfig], AnyConfig] = lambda config: config
    # Return the orders of tiles that are worth measuring at a problem: all of them, and those by GPC
    orders: Callable[[AnyConfig, Problem, Device], list[TileOrder]] = lambda *_: []
    orders_by_gpc: Callable[[AnyConfig, Problem, Device], list[TileOrder]] = lambda *_: []
    # Returns the microseconds that copies of operands take, of a kind whose kernels copy some
    copying: Callable[[Traits, Problems], Floats] = lambda *_: np.zeros((1, 1))
    # Returns the factor on a predicted time before it is compared with other kernels' times
    handicap: Callable[[AnyConfig], float] = lambda _: 1.0

    def __post_init__(self) -> None:
        DECLARED[self.config] = self


# The kinds by their class of configurations. Each registers itself: see :mod:`cutlass_ops.kinds.table`.
DECLARED: dict[type, Kind[Any]] = {}
