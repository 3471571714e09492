"""Check whether a kernel declaration can be built, without running a compiler.

The rules are in :mod:`cutlass_ops.kinds.common` and in ``rules.py`` of each kind's folder.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from cutlass_ops.base import arch
from cutlass_ops.base.errors import ConfigError
from cutlass_ops.base.mma import mma_of
from cutlass_ops.declare.signature import OpSignature
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.kinds.common import COMMON, VALUES
from cutlass_ops.kinds.kind import AnyConfig, Broken, Kind, Rule
from cutlass_ops.kinds.table import KINDS, kind_of


@dataclass(frozen=True)
class Violation:
    """One reason why a declaration is illegal.

    Attributes
    ----------
    rule : str
        Name of the broken rule, as in ``docs/legality.md``.
    message : str
        The field, its value, what is needed, and what to do.

    Examples
    --------
    >>> @co.epilogue
    ... def plain(acc):
    ...     return acc
    >>> config = co.Sm90Config(co.ThreadblockShape(128, 128, 64), stages=1)
    >>> spec = co.KernelSpec(a="bf16.row", b="bf16.col", d="bf16.row", epilogue=plain, config=config)
    >>> [violation.rule for violation in co.check(spec)]
    ['field_values']
    """

    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.message}"


def check(spec: KernelSpec) -> tuple[Violation, ...]:
    """Return every reason why a declaration is illegal.

    Parameters
    ----------
    spec : KernelSpec
        The declaration.

    Returns
    -------
    tuple of Violation
        Empty if the declaration is legal. If a field has an invalid value (such as a single stage, or a swizzle of
        three), only such fields are reported, since the other rules need valid values.

    Raises
    ------
    TypeError
        If `spec` is not a KernelSpec.

    Examples
    --------
    >>> @co.epilogue
    ... def bias_relu(acc, bias: co.Row):
    ...     return co.e.relu(acc + bias)
    >>> config = co.Sm90Config(co.ThreadblockShape(128, 128, 64), co.ClusterShape(2, 1))
    >>> spec = co.KernelSpec(a="bf16.row", b="bf16.col", d="bf16.row", epilogue=bias_relu, config=config)
    >>> co.check(spec)
    ()
    >>> wide = co.Sm90Config(co.ThreadblockShape(128, 100, 64))
    >>> spec = co.KernelSpec(a="bf16.row", b="bf16.col", d="bf16.row", epilogue=bias_relu, config=wide)
    >>> for violation in co.check(spec):
    ...     print(violation)
    tile_n: threadblock.n is 100: ...
    """
    if not isinstance(spec, KernelSpec):
        raise TypeError(f"spec must be a KernelSpec, not {reprlib.repr(spec)}")
    return tuple(Violation(name, _message(spec, name, broken)) for name, broken in _broken(spec))


def is_legal(spec: KernelSpec) -> bool:
    """Return whether a declaration is legal. This is faster than :func:`check`, which builds the messages."""
    return next(_broken(spec), None) is None


def require_legal(spec: KernelSpec) -> None:
    """Raise an error if a declaration is illegal."""
    violations = check(spec)
    if violations:
        reasons = "\n".join(f"  {v}" for v in violations)
        raise ConfigError(f"the declaration is illegal for {spec.target}:\n{reasons}")


def serves(kind: Kind[Any], signature: OpSignature, capability: tuple[int, int] | None = None) -> bool:
    """Return whether kernels of a kind serve a signature at any number of rows, on a device or at all."""
    if capability is not None and arch.target_for(capability, kind.config.family) is None:
        return False
    targets = ((c, None if capability is None else c.target_on(capability)) for c in kind.usual(signature))
    return any(is_legal(signature.spec(c, target)) for c, target in targets)


def is_served(signature: OpSignature, capability: tuple[int, int] | None = None) -> bool:
    """Return whether some kind of kernels serves a signature at any number of rows, on a device or at all."""
    return any(serves(kind, signature, capability) for kind in KINDS)


# One of so many candidates is asked: there are tens of thousands, and a few hundred differ in every field.
_STEP = 97


def why_unserved(signature: OpSignature, capability: tuple[int, int]) -> str:
    """Return which rules a signature breaks with every configuration, in their own words; empty if it breaks none."""
    mma = mma_of(signature.a.dtype, signature.b.dtype)
    there = (k for k in KINDS if k.general and arch.target_for(capability, k.config.family) is not None)
    kind = next((k for k in there if mma and k.multiplies(mma) and signature.form in k.forms), None)
    if kind is None:
        return ""
    asked = (signature.spec(c, c.target_on(capability)) for c in islice(kind.candidates(signature), 0, None, _STEP))
    broken = [(spec, [name for name, _ in _broken(spec)]) for spec in asked]
    always = set.intersection(*(set(names) for _, names in broken))
    nearest, _ = min(broken, key=lambda each: len(each[1]))  # its own fields break the least
    return "; ".join(v.message for v in check(nearest) if v.rule in always)


def _broken(spec: KernelSpec) -> Iterator[tuple[str, str | Broken]]:
    """Yield the name of each broken rule and how it is broken."""
    meaningless = tuple(_apply(VALUES, spec, spec.config))
    if meaningless:
        yield from meaningless
        return
    yield from _apply(COMMON, spec, spec.config)
    yield from _apply(kind_of(spec.config).rules, spec, spec.config)


def _apply(
    rules: tuple[Rule[AnyConfig], ...], spec: KernelSpec, config: AnyConfig
) -> Iterator[tuple[str, str | Broken]]:
    return ((rule.name, broken) for rule in rules for broken in rule.broken(spec, config))


def _message(spec: KernelSpec, rule: str, broken: str | Broken) -> str:
    if isinstance(broken, str):
        return broken
    before = {name for name, _ in _broken(spec)}
    named = []
    for change in broken.changes:
        after = {name for name, _ in _broken(_changed(spec, change))}
        # Do not advise a change that breaks another rule.
        if rule not in after and after <= before:
            named.append(_spelled(spec, change))
    said = broken.advice if isinstance(broken.advice, str) else broken.advice(_others(spec))
    advice = [said] if said else []
    if named:
        advice.append(f"use {' or '.join(dict.fromkeys(named))}")
    elif not advice:
        changes = [text for change in broken.changes if (text := _spelled(spec, change))]
        advice = [" with ".join(("use another tile", *changes[:1]))]
    return f"{broken.what}: {', or '.join(advice)}"


def _others(spec: KernelSpec) -> list[str]:
    """Name the other kinds of kernels that serve a declaration, those for most targets first."""
    signature = OpSignature.of(spec)
    others = (kind for kind in reversed(KINDS) if kind is not kind_of(spec.config))
    return [kind.noun for kind in others if serves(kind, signature)]


def _spelled(spec: KernelSpec, change: Mapping[str, object]) -> str:
    """Spell a change as Python keyword arguments, without fields that already have the value."""
    now = {name: spec.target if name == "target" else _value(spec, name) for name in change}
    return ", ".join(f"{name}={value!r}" for name, value in change.items() if now[name] != value)


def _value(spec: KernelSpec, name: str) -> object:
    value: object = spec.config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _changed(spec: KernelSpec, change: Mapping[str, object]) -> KernelSpec:
    """Return a declaration with other values of some fields, named as :attr:`Broken.changes` names them."""
    config: Any = spec.config
    for name, value in change.items():
        if name == "target":
            continue
        field, _, side = name.partition(".")
        config = replace(config, **{field: replace(getattr(config, field), **{side: value}) if side else value})
    return spec.with_config(config, str(change.get("target", spec.target)))
