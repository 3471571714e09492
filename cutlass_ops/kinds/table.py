"""The table of all kinds of kernels."""

from __future__ import annotations

from typing import Any

from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.kinds.gemv.kind import GEMV
from cutlass_ops.kinds.kind import Kind
from cutlass_ops.kinds.pointwise.kind import POINTWISE
from cutlass_ops.kinds.rules import AnyConfig
from cutlass_ops.kinds.sm80.kind import SM80
from cutlass_ops.kinds.sm90.kind import SM90
from cutlass_ops.kinds.small.kind import SMALL

# Every kind is an entry here and a folder beside this file.
KINDS: tuple[Kind[Any], ...] = (SM90, SM80, GEMV, SMALL, POINTWISE)
_BY_CONFIG: dict[type, Kind[Any]] = {kind.config: kind for kind in KINDS}


def kind_of(config: AnyConfig) -> Kind[AnyConfig]:
    """Return the kind of a configuration."""
    return _BY_CONFIG[type(config)]


def shared_memory(spec: KernelSpec, stages: int | None = None) -> int:
    """Return the shared memory of one thread block in bytes.

    Parameters
    ----------
    spec : KernelSpec
        A declaration with valid field values.
    stages : int, optional
        Stages of the main loop. The default is the configuration's number, or else as many as fit.
    """
    return kind_of(spec.config).shared_memory(spec, spec.config, stages)
