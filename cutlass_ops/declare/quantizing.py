"""The declaration of a kernel that quantises a tensor, and what can be compiled at all."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cutlass_ops.base import arch, checked_json
from cutlass_ops.base.dtypes import FP8, READ, DType, dtype
from cutlass_ops.base.errors import ConfigError
from cutlass_ops.base.frozen import hashed_once
from cutlass_ops.base.mma import BLOCK_K
from cutlass_ops.declare import compressing
from cutlass_ops.declare.compressing import CompressSpec
from cutlass_ops.declare.spec import KernelSpec

_FIELD = "quantize"


@hashed_once
@dataclass(frozen=True)
class QuantizeSpec:
    """One kernel: D is X in FP8, with a scale for each block of a row, or for each row.

    Attributes
    ----------
    x : DType
        Element type of X (M, N).
    d : DType
        That of D: a type of FP8.
    block : int or None
        Columns that share a scale, 128; None for a whole row.
    target : str
        Machine-code target.

    Raises
    ------
    ConfigError
        If a field has another value.
    """

    x: DType
    d: DType
    block: int | None
    target: str

    def __post_init__(self) -> None:
        if self.x not in READ or self.d not in FP8:
            raise ConfigError(f"{self.x} is not quantised to {self.d}: use {_names(READ)} and {_names(FP8)}")
        if self.block is not None and (type(self.block) is not int or self.block != BLOCK_K):
            raise ConfigError(f"block is {self.block!r}: use {BLOCK_K}, or None for a scale of each row")
        found = arch.TARGETS.get(self.target)
        if found is None or found.capability < arch.STORES_FP8:
            raise ConfigError(f"target is {checked_json.shown(self.target)}: FP8 is stored on Hopper only")

    def to_json(self) -> dict[str, Any]:
        """Return the canonical JSON: equal specs give equal values."""
        of = {"x": self.x.name, "d": self.d.name, "block": self.block}
        return {_FIELD: of, "target": self.target}

    def canonical(self) -> str:
        """Return the canonical JSON text."""
        return json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> QuantizeSpec:
        """Rebuild a spec from :meth:`to_json`'s value. Raises ConfigError if it is anything else."""
        of = data.get(_FIELD)
        if set(data) != {_FIELD, "target"} or not isinstance(of, Mapping) or set(of) != {"x", "d", "block"}:
            raise ConfigError(f"a spec of a quantisation has the fields {_FIELD}, of x, d and block, and target")
        try:
            return cls(dtype(of["x"]), dtype(of["d"]), of["block"], data["target"])
        except (ValueError, TypeError) as exc:
            raise ConfigError(f"not a spec of a quantisation: {exc}") from exc

    @property
    def slug(self) -> str:
        """The kernel's name in files, C++, traces and profiles."""
        digest = hashlib.sha256(self.canonical().encode()).hexdigest()[:12]
        each = "rows" if self.block is None else f"blocks1x{self.block}"
        return f"quantize_{self.x}_{self.d}_{each}_{self.target}_{digest}"


# What can be compiled.
Declaration = KernelSpec | QuantizeSpec | CompressSpec


def declaration_from_json(data: Mapping[str, Any]) -> Declaration:
    """Rebuild a declaration from its ``to_json``. Raises ConfigError if it is none."""
    if isinstance(data, Mapping) and _FIELD in data:
        return QuantizeSpec.from_json(data)
    if isinstance(data, Mapping) and compressing.FIELD in data:
        return CompressSpec.from_json(data)
    return KernelSpec.from_json(data)


def _names(types: tuple[DType, ...]) -> str:
    return " or ".join(t.name for t in types)
