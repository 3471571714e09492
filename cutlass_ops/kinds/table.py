"""The table of all kinds of kernels: each folder beside this file is one, with a ``kind.py`` that declares it."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from cutlass_ops import kinds
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.kinds.kind import DECLARED, AnyConfig, Kind

for _folder in iter_modules(kinds.__path__):
    if _folder.ispkg:
        import_module(f"{kinds.__name__}.{_folder.name}.kind")

# General kinds come first, and of these the newest family; then those that tables have.
KINDS: tuple[Kind[Any], ...] = tuple(
    sorted(DECLARED.values(), key=lambda k: (not k.general, not k.config.family.tma, not k.in_tables, k.pointwise))
)


def kind_of(config: AnyConfig) -> Kind[AnyConfig]:
    """Return the kind of a configuration."""
    return DECLARED[type(config)]


def shared_memory(spec: KernelSpec, stages: int | None = None) -> int:
    """Return the shared memory of one thread block in bytes."""
    return kind_of(spec.config).shared_memory(spec, spec.config, stages)
