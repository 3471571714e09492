"""What a rule of legality is, and the rules for all kinds of kernels.

Each rule is one small function in a table: :data:`VALUES` or :data:`COMMON` here, and one table for each kind, in the
``rules`` of its folder. It stands on one of three grounds: the hardware cannot do it, CUTLASS does not compile it, or
this library refuses it because it would be wrong, slow or untested.
``docs/legality.md`` lists them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from cutlass_ops.base import arch
from cutlass_ops.base.dtypes import bf16, f16
from cutlass_ops.declare.config import SWIZZLES, Config, GemvConfig, Sm80Config, Sm90Config
from cutlass_ops.declare.spec import KernelSpec, Operand
from cutlass_ops.epilogue.nodes import Kind
from cutlass_ops.kinds.footprint import MAX_STAGES, MIN_STAGES, shared_memory, sm90_plain_epilogue, sm90_source

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


def sm80_serves(spec: KernelSpec) -> bool:
    """Whether an :class:`Sm80Config` can be legal for what a spec computes; its rules say the same."""
    pairs = not spec.epilogue.swaps_pairs or (spec.d.major == "row" and spec.d.alignment > 1)
    return pairs and not spec.epilogue.products


def sm90_serves(spec: KernelSpec) -> bool:
    """Whether an :class:`Sm90Config` can be legal for what a spec computes; its rules say the same."""
    plain = sm90_plain_epilogue(spec)
    alone = plain and not spec.outputs and sm90_source(spec) is None and spec.b.major == "col"
    return (plain or not spec.epilogue.swaps_pairs) and (alone or not spec.epilogue.products)


# ---- Numbers that mean something ------------------------------------------------------------------------------------


def _field_values(spec: KernelSpec, config: Config) -> Iterator[str]:
    # The declaration as it was given: KernelSpec leaves launch arguments out of `config`.
    for name, allowed in _CHOICES[type(config)].items():
        value = getattr(spec.launch_config, name)
        if value not in allowed:
            yield f"{name} is {value}: use {' or '.join(map(str, allowed))}"
    if isinstance(config, GemvConfig) or config.stages is None:
        return
    if not MIN_STAGES <= config.stages <= MAX_STAGES:
        yield f"stages is {config.stages}: use {MIN_STAGES} to {MAX_STAGES}, since one is filled while one is used"


_CHOICES: dict[type[Config], dict[str, tuple[int, ...]]] = {
    Sm80Config: {"swizzle": SWIZZLES},
    Sm90Config: {"split_k": (1, 2, 4, 8), "swizzle": SWIZZLES},
    GemvConfig: {"rows": (1, 2, 4, 8, 16), "warps": (1, 2, 4, 8, 16, 32), "pieces": (1, 2, 4, 8, 16)},
}


VALUES: tuple[Rule[Config], ...] = (Rule("field_values", "policy", _field_values),)


# ---- Fields that fit together --------------------------------------------------------------------------------------


def _target(spec: KernelSpec, config: Config) -> Iterator[Broken]:
    wgmma = isinstance(config, Sm90Config)
    if arch.target(spec.target).wgmma != wgmma:
        fitting = [t.name for t in arch.TARGETS.values() if t.wgmma == wgmma]
        kind = "a GemvConfig" if isinstance(config, GemvConfig) else f"an {type(config).__name__}"
        yield Broken(
            f"target is {spec.target}, which does not run {kind}",
            tuple({"target": name} for name in fitting),
        )


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


def _shared_memory(spec: KernelSpec, config: Config) -> Iterator[Broken]:
    if isinstance(config, GemvConfig):
        return  # it keeps a few numbers there
    limit = arch.target(spec.target).shared_memory
    stages = config.stages if config.stages is not None else MIN_STAGES
    needed = shared_memory(spec, stages)
    if needed > limit:
        fewer = next((s for s in range(stages - 1, MIN_STAGES - 1, -1) if shared_memory(spec, s) <= limit), None)
        yield Broken(
            f"{stages} stages of threadblock {config.threadblock} and the epilogue take {needed} bytes of shared "
            f"memory, and a thread block on {spec.target} has {limit}",
            () if fewer is None else ({"stages": fewer},),
            "use a smaller tile" + (" or an epilogue of fewer tiles" if fewer is None else ""),
        )


COMMON: tuple[Rule[Config], ...] = (
    Rule("target", "hardware", _target),
    Rule("operand_dtypes", "policy", _operand_dtypes),
    Rule("alignment", "policy", _alignment),
    Rule("shared_memory", "hardware", _shared_memory),
)
