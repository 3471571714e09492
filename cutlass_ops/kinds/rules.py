"""Legality rules.

Each rule is a small function in a table. Common rules are in :mod:`cutlass_ops.kinds.common`, and each kind's rules are
in ``rules.py`` of its folder. A rule has one of three grounds: the hardware cannot do it, CUTLASS does not compile it,
or this library rejects it as wrong, slow or untested. ``docs/legality.md`` lists all rules.
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
    """One way in which a declaration breaks a rule, and what to do.

    Attributes
    ----------
    what : str
        The field, its value, and what is needed.
    changes : tuple of mapping
        Changes that would satisfy the rule: new values by the name of a field of the configuration (such as
        ``"threadblock.m"``), or ``"target"``. The message leaves out changes that would break another rule.
    advice : str
        Other ways to satisfy the rule.
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
        Yields each way in which a spec breaks the rule: a complete message, or a :class:`Broken` if the advice depends
        on other rules.
    """

    name: str
    ground: Ground
    broken: Callable[[KernelSpec, AnyConfig], Iterator[str | Broken]]
