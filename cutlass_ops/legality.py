"""Why a kernel declaration cannot be built, before any compiler runs.

The rules lie in :mod:`cutlass_ops.rules`, :mod:`cutlass_ops.rules_sm90`, :mod:`cutlass_ops.rules_sm80` and
:mod:`cutlass_ops.rules_gemv`;
``docs/legality.md`` lists them all.
"""

from __future__ import annotations

from dataclasses import dataclass

from cutlass_ops.config import GemvConfig, Sm90Config
from cutlass_ops.errors import ConfigError
from cutlass_ops.rules import COMMON, VALUES, AnyConfig, Rule
from cutlass_ops.rules_gemv import GEMV
from cutlass_ops.rules_sm80 import SM80
from cutlass_ops.rules_sm90 import SM90
from cutlass_ops.spec import KernelSpec


@dataclass(frozen=True)
class Violation:
    """One reason why a declaration is illegal.

    Attributes
    ----------
    rule : str
        Name of the broken rule, as in ``docs/legality.md``.
    message : str
        The field, its value, what is needed, and what to do.
    """

    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.message}"


def check(spec: KernelSpec) -> tuple[Violation, ...]:
    """Return every reason why a declaration cannot become a kernel; none if it can.

    Parameters
    ----------
    spec : KernelSpec
        Any declaration.

    Returns
    -------
    tuple of Violation
        In the order of the tables. If a field has no meaning at all (a negative tile, an unknown schedule), only such
        fields are reported, since nothing can be derived from them.
    """
    return _violations(VALUES, spec, spec.config) or _violations(COMMON, spec, spec.config) + _arch_violations(spec)


def require_legal(spec: KernelSpec) -> None:
    """Refuse a declaration that cannot become a kernel.

    Raises
    ------
    ConfigError
        If :func:`check` finds anything; the message lists all of it.
    """
    violations = check(spec)
    if violations:
        reasons = "\n".join(f"  {v}" for v in violations)
        raise ConfigError(f"the declaration is illegal for {spec.target}:\n{reasons}")


def _arch_violations(spec: KernelSpec) -> tuple[Violation, ...]:
    if isinstance(spec.config, Sm90Config):
        return _violations(SM90, spec, spec.config)
    if isinstance(spec.config, GemvConfig):
        return _violations(GEMV, spec, spec.config)
    return _violations(SM80, spec, spec.config)


def _violations(rules: tuple[Rule[AnyConfig], ...], spec: KernelSpec, config: AnyConfig) -> tuple[Violation, ...]:
    return tuple(Violation(rule.name, message) for rule in rules for message in rule.broken(spec, config))
