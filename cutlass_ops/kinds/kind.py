"""The interface of a kind of kernels: one object with everything that depends on the kind."""

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
from cutlass_ops.kinds.arrays import Flags, Floats, Places, Problems
from cutlass_ops.kinds.rules import AnyConfig, Rule
from cutlass_ops.kinds.traits import Traits


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


@dataclass(frozen=True, eq=False)
class Kind(Generic[AnyConfig]):
    """One kind of kernels.

    Attributes
    ----------
    config : type
        Class of its configurations.
    forms : tuple of Form
        The forms of problems that its kernels serve.
    multiplies : callable
        Whether its kernels multiply a pair of types. A new pair is refused until a kind says that it does.
    stores_fp8 : bool
        Whether its kernels store outputs in FP8.
    pointwise : bool
        Whether its kernels are for epilogues that read no product, and for no others.
    noun : str
        Name of such a configuration in messages.
    template : str
        File name of the template.
    rules : tuple of Rule
        Legality rules of this kind, besides the common ones.
    shared_memory : callable
        Returns the shared memory of one thread block in bytes, for given stages or the configuration's own.
    context : callable
        Returns the values for the template.
    proof : callable
        Returns the opcodes that the machine code must contain.
    timer : callable
        Returns the time model of some configurations for operands with given traits.
    candidates : callable
        Yields configurations worth considering for a signature, legal or not.
    near : callable
        Returns whether two configurations differ by one step.
    values : mapping of str to tuple of int
        Valid values of fields that allow only a few.
    variants : callable
        Yields a configuration and its substitutes for a signature for which it is not legal.
    of_width : callable
        Returns a configuration for elements of another size, whose tiles have as many bytes along K. Takes bytes of
        an element before and after.
    gathering : callable
        Returns a configuration with the cheapest way to take means of A's rows.
    orders, orders_by_gpc : callable
        Return the orders of tiles that are worth measuring at a problem: all of them, and those by GPC.
    handicap : callable
        Returns the factor on a predicted time before it is compared with other kernels' times.
    compile_seconds : float
        Usual time that one kernel takes to compile, of one processor: what tells kinds apart.
    unit : callable
        Returns which instructions compute, and how D is stored if its type does not determine it, in words.
    means : callable
        Returns where means of A's rows are computed, in words.
    """

    config: type[AnyConfig]
    forms: tuple[Form, ...]
    multiplies: Callable[[MmaSpec], bool]
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
    compile_seconds: float
    stores_fp8: bool = False
    pointwise: bool = False
    variants: Callable[[OpSignature, AnyConfig], Iterator[AnyConfig]] = lambda _, config: iter((config,))
    values: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    of_width: Callable[[AnyConfig, int, int], AnyConfig] = lambda config, *_: config
    gathering: Callable[[AnyConfig], AnyConfig] = lambda config: config
    orders: Callable[[AnyConfig, Problem, Device], list[TileOrder]] = lambda *_: []
    orders_by_gpc: Callable[[AnyConfig, Problem, Device], list[TileOrder]] = lambda *_: []
    handicap: Callable[[AnyConfig], float] = lambda _: 1.0
