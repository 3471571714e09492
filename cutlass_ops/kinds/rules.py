"""What a rule of legality is.

Each rule is one small function in a table: that of :mod:`cutlass_ops.kinds.common`, and one for each kind, in the
``rules`` of its folder. It stands on one of three grounds: the hardware cannot do it, CUTLASS does not compile it, or
this library refuses it because it would be wrong, slow or untested.
``docs/legality.md`` lists them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from cutlass_ops.declare.config import Config
from cutlass_ops.declare.spec import KernelSpec

Ground = Literal["hardware", "compiler", "policy"]
AnyConfig = TypeVar("AnyConfig", bound=Config)


@dataclass(frozen=True)
class Broken:
    """One way in which a declaration breaks a rule, and what to do about it.

    Attributes
    ----------
    what : str
        The field, its value, and what is needed.
    changes : tuple of mapping
        Values of fields with which the rule would be kept: of the configuration (a side of a shape is
        ``"threadblock.m"``), or ``"target"``. Only those are named with which no other rule is broken instead.
    advice : str
        What else to do.
    """

    what: str
    changes: tuple[Mapping[str, object], ...] = ()
    advice: str = ""


@dataclass(frozen=True)
class Rule(Generic[AnyConfig]):
    """One constraint.

    Attributes
    ----------
    name : str
        Name in :class:`~cutlass_ops.kinds.legality.Violation` and in the documentation.
    ground : str
        ``"hardware"``, ``"compiler"`` or ``"policy"``.
    broken : callable
        Yields each way in which a spec breaks the rule; text where nothing depends on other rules.
    """

    name: str
    ground: Ground
    broken: Callable[[KernelSpec, AnyConfig], Iterator[str | Broken]]
