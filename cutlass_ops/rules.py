"""What a rule of legality is, and the rules for all kinds of kernels.

Each rule is one small function in a table: :data:`VALUES` or :data:`COMMON` here, and one table for each kind in
:mod:`cutlass_ops.rules_sm90`, :mod:`cutlass_ops.rules_sm80` and :mod:`cutlass_ops.rules_gemv`. It stands on one of
three grounds: the hardware cannot do it, CUTLASS does not compile it, or this library refuses it because it would be
wrong, slow or untested.
``docs/legality.md`` lists them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, Literal, TypeGuard, TypeVar

from cutlass_ops import arch
from cutlass_ops.config import (
    SWIZZLES,
    ClusterShape,
    Config,
    GemvConfig,
    InstructionShape,
    Sm80Config,
    Sm90Config,
    ThreadblockShape,
    WarpShape,
)
from cutlass_ops.dtypes import bf16, f16
from cutlass_ops.epilogue.graph import Kind
from cutlass_ops.footprint import MAX_STAGES, MIN_STAGES, shared_memory
from cutlass_ops.spec import KernelSpec, Operand

Ground = Literal["hardware", "compiler", "policy"]
AnyConfig = TypeVar("AnyConfig", bound=Config)


@dataclass(frozen=True)
class Rule(Generic[AnyConfig]):
    """One constraint.

    Attributes
    ----------
    name : str
        Name in :class:`~cutlass_ops.legality.Violation` and in the documentation.
    ground : str
        ``"hardware"``, ``"compiler"`` or ``"policy"``.
    broken : callable
        Yields one message for each way in which a spec breaks the rule.
    """

    name: str
    ground: Ground
    broken: Callable[[KernelSpec, AnyConfig], Iterator[str]]


# ---- Fields that mean something ------------------------------------------------------------------------------------

_SHAPES = {
    "threadblock": ThreadblockShape,
    "warp": WarpShape,
    "instruction": InstructionShape,
    "cluster": ClusterShape,
}


def _field_values(spec: KernelSpec, config: Config) -> Iterator[str]:
    for name, cls in _SHAPES.items():
        shape = getattr(config, name, None)
        if hasattr(config, name) and not (isinstance(shape, cls) and all(_positive(v) for v in vars(shape).values())):
            yield f"{name} is {shape}: give a {cls.__name__} with positive integers"
    # The declaration as it was given: KernelSpec leaves launch arguments out of `config`.
    for name, allowed in _CHOICES[type(config)].items():
        value = getattr(spec.launch_config, name)
        if not any(value == a and type(value) is type(a) for a in allowed):
            yield f"{name} is {value!r}: use {' or '.join(map(repr, allowed))}"
    if isinstance(config, GemvConfig) or (config.stages is None and isinstance(config, Sm90Config)):
        return
    if not _positive(config.stages) or not MIN_STAGES <= config.stages <= MAX_STAGES:
        yield f"stages is {config.stages!r}: use {MIN_STAGES} to {MAX_STAGES}, since one is filled while one is used"


def _positive(value: object) -> TypeGuard[int]:
    return type(value) is int and value > 0


_SM80_CHOICES: dict[str, tuple[object, ...]] = {"stream_k": (False, True), "swizzle": SWIZZLES}
_SM90_CHOICES: dict[str, tuple[object, ...]] = {
    "schedule": ("pingpong", "cooperative", "warp_specialized"),
    "scheduler": ("persistent", "stream_k"),
    "swap_ab": (False, True),
    "split_k": (1, 2, 4, 8),
    "means": ("gathered", "beside", "ahead"),
    "realign": (False, True),
    "raster": ("heuristic", "along_m", "along_n"),
    "swizzle": SWIZZLES,
    "by_gpc": (False, True),
}
_GEMV_CHOICES: dict[str, tuple[object, ...]] = {
    "rows": (1, 2, 4, 8, 16),
    "warps": (1, 2, 4, 8, 16, 32),
    "pieces": (1, 2, 4, 8, 16),
}
_CHOICES: dict[type[Config], dict[str, tuple[object, ...]]] = {
    Sm80Config: _SM80_CHOICES,
    Sm90Config: _SM90_CHOICES,
    GemvConfig: _GEMV_CHOICES,
}


VALUES: tuple[Rule[Config], ...] = (Rule("field_values", "policy", _field_values),)


# ---- Fields that fit together --------------------------------------------------------------------------------------


def _target(spec: KernelSpec, config: Config) -> Iterator[str]:
    wgmma = isinstance(config, Sm90Config)
    if arch.target(spec.target).wgmma != wgmma:
        fitting = ", ".join(t.name for t in arch.TARGETS.values() if t.wgmma == wgmma)
        yield f"target is {spec.target}, which does not run an {type(config).__name__}: use {fitting}"


def _operand_dtypes(spec: KernelSpec, _: Config) -> Iterator[str]:
    if spec.a.dtype not in (f16, bf16) or spec.a.dtype != spec.b.dtype:
        yield f"a is {spec.a.dtype} and b is {spec.b.dtype}: both must be f16, or both bf16; convert one of them"


def _alignment(spec: KernelSpec, _: Config) -> Iterator[str]:
    for name, operand in _matrices(spec):
        widest = operand.dtype.tma_alignment
        if operand.alignment < 1 or operand.alignment > widest or operand.alignment & (operand.alignment - 1):
            yield (
                f"{name} has alignment {operand.alignment}: use a power of two from 1 to {widest}, the {operand.dtype} "
                f"elements in 16 bytes"
            )


def _matrices(spec: KernelSpec) -> Iterator[tuple[str, Operand]]:
    yield from (("a", spec.a), ("b", spec.b), ("d", spec.d))
    for given, operand in spec.typed_inputs:
        if given.kind is Kind.TILE:
            yield f"input {given.name}", operand
    for output, operand in spec.typed_outputs:
        if output.reduce is None:
            yield f"output {output.name}", operand


def _shared_memory(spec: KernelSpec, config: Config) -> Iterator[str]:
    if isinstance(config, GemvConfig):
        return  # it keeps a few numbers there
    limit = arch.target(spec.target).shared_memory
    stages = config.stages if config.stages is not None else MIN_STAGES
    needed = shared_memory(spec, stages)
    if needed > limit:
        yield (
            f"{stages} stages of threadblock {config.threadblock} and the epilogue take {needed} bytes of shared "
            f"memory, and a thread block on {spec.target} has {limit}: use a smaller tile or fewer stages"
        )


COMMON: tuple[Rule[Config], ...] = (
    Rule("target", "hardware", _target),
    Rule("operand_dtypes", "policy", _operand_dtypes),
    Rule("alignment", "policy", _alignment),
    Rule("shared_memory", "hardware", _shared_memory),
)
