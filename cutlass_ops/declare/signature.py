"""A call's signature: what a kernel must compute, as values and as JSON."""

from __future__ import annotations

import functools
from dataclasses import MISSING, dataclass, fields
from functools import cached_property
from typing import Any, cast

from cutlass_ops.base.errors import ConfigError
from cutlass_ops.base.frozen import hashed_once
from cutlass_ops.declare.config import CONFIGS, Config, config_to_json
from cutlass_ops.declare.form import DENSE, Form
from cutlass_ops.declare.order import TileOrder
from cutlass_ops.declare.spec import KernelSpec, Major, Operand, copied, loaded
from cutlass_ops.epilogue.graph import Graph


@functools.cache
def _any_config() -> Config:
    """Return some configuration, where a signature needs one and it does not matter which."""
    return next(cls() for cls in CONFIGS.values() if all(f.default is not MISSING for f in fields(cast(type, cls))))


@hashed_once
@dataclass(frozen=True)
class OpSignature:
    """What a call asks for: the epilogue and the type of every operand, without a configuration."""

    epilogue: Graph  # the traced epilogue
    # Types of A, B and D
    a: Operand
    b: Operand
    d: Operand
    # Types of the epilogue's inputs and outputs besides D, in order
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    form: Form = DENSE  # how the GEMMs of one call belong together

    @classmethod
    def of(cls, spec: KernelSpec) -> OpSignature:
        """Return the signature that a kernel serves."""
        return cls(spec.epilogue, spec.a, spec.b, spec.d, spec.inputs, spec.outputs, spec.form)

    @property
    def majors(self) -> tuple[Major, Major]:
        """Majors of A and B."""
        return self.a.major, self.b.major

    @property
    def alignments(self) -> tuple[int, int]:
        """Alignments of A and B in elements."""
        return self.a.alignment, self.b.alignment

    @property
    def realigns(self) -> bool:
        """Whether A or B must be copied before a kernel that loads by TMA can multiply it."""
        return any(copied(self.a, self.b))

    @property
    def loaded_majors(self) -> tuple[Major, Major]:
        """Majors of A and B as TMA loads them: those of their copies, where they are copied."""
        a, b = loaded(self.a, self.b)
        return a.major, b.major

    @property
    def promoted(self) -> bool:
        """Whether sums of products are added up in FP32 every 128 of K: as asked for, or to apply scales of blocks."""
        return self.a.promoted or bool(self.epilogue.block_scales)

    def spec(self, config: Config, target: str | None = None, order: TileOrder | None = None) -> KernelSpec:
        """Return the kernel that serves this signature with a configuration."""
        return self._any.with_config(config, target, order)

    @cached_property
    def _any(self) -> KernelSpec:
        """A kernel that serves this signature, legal or not: what all of them have in common is checked once."""
        return KernelSpec(
            a=self.a,
            b=self.b,
            d=self.d,
            epilogue=self.epilogue,
            inputs={i.name: t for i, t in zip(self.epilogue.inputs, self.inputs, strict=True)},
            outputs={o.name: t for o, t in zip(self.epilogue.outputs[1:], self.outputs, strict=True)},
            config=_any_config(),
            form=self.form,
        )


def signature_to_json(signature: OpSignature) -> dict[str, Any]:
    """Return a signature as plain values."""
    spec = signature.spec(_any_config()).to_json()
    return {name: value for name, value in spec.items() if name not in ("config", "target")}


def signature_from_json(data: object) -> OpSignature:
    """Rebuild a signature from :func:`signature_to_json`'s value. Raises ConfigError if it is not a signature."""
    if not isinstance(data, dict):
        raise ConfigError(f"signature must be an object, not {type(data).__name__}")
    if data.keys() & {"config", "target"}:
        raise ConfigError("a signature must not have config or target")
    config = _any_config()
    spec = KernelSpec.from_json({**data, "config": config_to_json(config), "target": config.default_target})
    return OpSignature.of(spec)
