"""The declaration of a kernel that writes a weight into a 2:4 sparse form that is there already."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cutlass_ops.base import arch, checked_json
from cutlass_ops.base.dtypes import DECLARED, STORED_OF, DType, dtype
from cutlass_ops.base.errors import ConfigError
from cutlass_ops.base.frozen import hashed_once

FIELD = "compress"


@hashed_once
@dataclass(frozen=True)
class CompressSpec:
    """One kernel: stored elements are W's at the places that metadata name, or W is pruned anew.

    Attributes
    ----------
    w : DType
        Element type of W (N, K).
    prune : bool
        Whether the two of largest magnitude in each group are stored, and metadata written.
    target : str
        Machine-code target.

    Raises
    ------
    ConfigError
        If a field has another value.
    """

    w: DType
    prune: bool
    target: str

    def __post_init__(self) -> None:
        known = tuple(STORED_OF.values())
        if self.w not in known or type(self.prune) is not bool:
            raise ConfigError(f"{self.w} is not stored 2:4 sparse: use {', '.join(t.name for t in known)}")
        if self.target not in arch.TARGETS:
            raise ConfigError(f"target is {checked_json.shown(self.target)}: use one of {', '.join(arch.TARGETS)}")

    def to_json(self) -> dict[str, Any]:
        """Return the canonical JSON: equal specs give equal values."""
        return {FIELD: {"w": self.w.name, "prune": self.prune}, "target": self.target}

    def canonical(self) -> str:
        """Return the canonical JSON text."""
        return json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CompressSpec:
        """Rebuild a spec from :meth:`to_json`'s value. Raises ConfigError if it is anything else."""
        of = data.get(FIELD)
        if set(data) != {FIELD, "target"} or not isinstance(of, Mapping) or set(of) != {"w", "prune"}:
            raise ConfigError(f"a spec of a compression has the fields {FIELD}, of w and prune, and target")
        try:
            return cls(dtype(of["w"], DECLARED), of["prune"], data["target"])
        except (ValueError, TypeError) as exc:
            raise ConfigError(f"not a spec of a compression: {exc}") from exc

    @property
    def slug(self) -> str:
        """The kernel's name in files, C++, traces and profiles."""
        digest = hashlib.sha256(self.canonical().encode()).hexdigest()[:12]
        return f"compress_{self.w}_{'pruned' if self.prune else 'placed'}_{self.target}_{digest}"
