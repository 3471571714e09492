"""Legality rules for all kinds of kernels."""

from __future__ import annotations

from collections.abc import Iterator

from cutlass_ops.base import arch
from cutlass_ops.base.dtypes import DECLARED, FP8, INTEGERS, REDUCED, dtype, f32, i32
from cutlass_ops.base.mma import BLOCK_K, MMAS, Block, mma_of, pairs, unit_of
from cutlass_ops.declare.config import Config
from cutlass_ops.declare.form import BATCHED, GROUPED, RAGGED_K, why_one_gemm
from cutlass_ops.declare.spec import KernelSpec, Operand
from cutlass_ops.epilogue import integers
from cutlass_ops.epilogue.nodes import PARTS, Kind
from cutlass_ops.kinds.kind import Broken, Rule
from cutlass_ops.kinds.layout import MAX_STAGES, MIN_STAGES
from cutlass_ops.kinds.table import KINDS, kind_of

# ---- Valid values ---------------------------------------------------------------------------------------------------


def _field_values(spec: KernelSpec, config: Config) -> Iterator[str]:
    for name, allowed in kind_of(config).values.items():
        value = getattr(config, name)
        if value not in allowed:
            yield f"{name} is {value}: use {' or '.join(map(str, allowed))}"
    stages = getattr(config, "stages", None)
    if stages is not None and not MIN_STAGES <= stages <= MAX_STAGES:
        yield f"stages is {stages}: use {MIN_STAGES} to {MAX_STAGES}, since one is filled while one is used"


VALUES: tuple[Rule[Config], ...] = (Rule("field_values", "policy", _field_values),)


# ---- Fields that fit together --------------------------------------------------------------------------------------


def _target(spec: KernelSpec, config: Config) -> Iterator[Broken]:
    if arch.target(spec.target).family != config.family:
        fitting = [t.name for t in arch.TARGETS.values() if t.family == config.family]
        yield Broken(
            f"target is {spec.target}, which does not run {kind_of(config).noun}",
            tuple({"target": name} for name in fitting),
        )


def _form(spec: KernelSpec, config: Config) -> Iterator[Broken]:
    kind = kind_of(config)
    if spec.form not in kind.forms:
        serving = [other.noun for other in KINDS if spec.form in other.forms]
        yield Broken(
            f"form is {spec.form}, and {kind.noun} serves {', '.join(map(str, kind.forms))}",
            advice=f"use {' or '.join(serving)}" if serving else "use another form; no kind of kernel serves this one",
        )


def _product(spec: KernelSpec, config: Config) -> Iterator[Broken]:
    kind = kind_of(config)
    if spec.epilogue.is_pointwise != kind.pointwise:
        reads = "no" if spec.epilogue.is_pointwise else "the"
        serving = [other.noun for other in KINDS if other.pointwise != kind.pointwise and spec.form in other.forms]
        yield Broken(
            f"the epilogue reads {reads} product of A and B, and kernels of this kind do not serve that",
            advice=f"use {' or '.join(serving)}" if serving else "use form dense",
        )


def _one_gemm(spec: KernelSpec, _: Config) -> Iterator[str]:
    why = why_one_gemm(spec.epilogue, spec.form) if spec.form in (BATCHED, GROUPED, RAGGED_K) else None
    if why is not None:
        yield f"form is {spec.form}, and {why}: use form dense for each {'batch' if spec.form == BATCHED else 'group'}"


def _operand_dtypes(spec: KernelSpec, config: Config) -> Iterator[Broken]:
    mma = mma_of(spec.a.dtype, spec.b.dtype)
    what = f"a is {spec.a.dtype} and b is {spec.b.dtype}"
    if mma is None:
        yield Broken(f"{what}, and there are kernels for {pairs()}", advice="convert one of them")
    elif not kind_of(config).multiplies(mma):
        yield Broken(
            f"{what}, which kernels of this kind do not multiply",
            advice=lambda others: f"use {' or '.join(others)}" if others else "convert both to bf16",
        )


def _operand_majors(spec: KernelSpec, config: Config) -> Iterator[Broken]:
    unit = unit_of(spec.a.dtype, spec.b.dtype, config.family)
    if unit is None or unit.takes_majors(spec.a.major, spec.b.major):
        return
    if not (config.copies and unit.copyable):  # else the kernel multiplies copies along K
        yield Broken(
            f"a is {spec.a} and b is {spec.b}, and {config.family.reads} reads these types along K only",
            ({"realign": True},) if unit.copyable else (),
            lambda others: f"use {' or '.join([f'{spec.a.dtype}.row and {spec.b.dtype}.col', *others])}",
        )


def _epilogue_dtypes(spec: KernelSpec, _: Config) -> Iterator[str]:
    read = {Kind.PRODUCT: (spec.b.dtype,), Kind.INTEGER: INTEGERS}
    read |= {kind: tuple(dtype(name, DECLARED) for name in part.dtypes) for kind, part in PARTS.items()}
    mma = mma_of(spec.a.dtype, spec.b.dtype) or MMAS[0]  # the rule operand_dtypes reports the others
    found = [("d", spec.d, mma.results)]
    found += [(f"input {i.name}", operand, read.get(i.kind, mma.read)) for i, operand in spec.typed_inputs]
    found += [(f"output {o.name}", t, mma.stored if o.reduce is None else REDUCED) for o, t in spec.typed_outputs]
    for name, operand, allowed in found:
        if operand.dtype not in allowed:
            yield f"{name} is {operand.dtype}: use {' or '.join(map(str, allowed))}"


def _integer_d(spec: KernelSpec, _: Config) -> Iterator[str]:
    why = integers.why_not(spec.epilogue) if spec.d.dtype is i32 else None
    if why is not None:
        yield f"d is {spec.d}, and {why}"


def _fp8_outputs(spec: KernelSpec, config: Config) -> Iterator[Broken]:
    kind = kind_of(config)
    newest = arch.target(spec.target).capability >= arch.STORES_FP8
    for name, operand in (("d", spec.d), *((f"output {o.name}", operand) for o, operand in spec.typed_outputs)):
        if operand.dtype not in FP8:
            continue
        if not kind.stores_fp8:
            yield Broken(
                f"{name} is {operand}, and kernels of this kind store no FP8",
                advice=lambda others: f"use {', or '.join([*others, 'bf16'])}, and convert it",
            )
        elif not newest:
            yield Broken(
                f"{name} is {operand}, and target is {spec.target}: FP8 is stored on Hopper only",
                tuple({"target": t.name} for t in arch.TARGETS.values() if t.capability >= arch.STORES_FP8),
                "use bf16, and convert it",
            )


def _quantized(spec: KernelSpec, config: Config) -> Iterator[str | Broken]:
    wanted = spec.epilogue.quantized
    if wanted is None:
        return
    if spec.d.dtype.name != wanted:
        yield f"d is {spec.d}, and the epilogue quantises it to {wanted}: use '{wanted}.row'"
    for output, operand in spec.typed_outputs:
        if output.kind is Kind.BLOCKS_D and operand.dtype is not f32:
            yield f"output {output.name} is {operand.dtype}: use f32 for scales of blocks"
    if not kind_of(config).quantizes:
        yield Broken(
            f"the epilogue quantises d in blocks of 1x{BLOCK_K}, which kernels of this kind do not support",
            advice=lambda others: (
                f"use {' or '.join(others)}" if others else "store d in bf16, and quantise it by co.Scaled.quantize"
            ),
        )


def _extents(block: Block | None) -> str:
    return "none" if block is None else f"{block[0]}x{block[1]}"


def _scaling(spec: KernelSpec, config: Config) -> Iterator[str | Broken]:
    mma = mma_of(spec.a.dtype, spec.b.dtype)
    if mma is not None and not mma.scales((spec.a.scaling, spec.b.scaling)):
        known = " or ".join(" and ".join(_extents(x) for x in pair) for pair in mma.scalings)
        yield (
            f"a is {spec.a} and b is {spec.b}: no main loop applies scales of such blocks to {spec.a.dtype} and "
            f"{spec.b.dtype}; use operands " + (f"with blocks of {known}" if known else "without blocks")
        )
    blocks, scaled = (spec.a.scaling is not None, spec.b.scaling is not None), spec.epilogue.in_blocks
    if any(blocks) and not any(scaled):
        yield (
            f"a is {spec.a} and b is {spec.b}, and the epilogue has no scales of their blocks: use an epilogue "
            "with scales of blocks, or operands without blocks"
        )
    elif blocks != scaled:
        fitting = mma.scalings if mma is not None and mma.scalings else MMAS[-1].scalings
        each = [
            dict.fromkeys(f"'{x}.blocks{_extents(pair[side])}'" for pair in fitting if pair[side])
            for side, x in enumerate((spec.a, spec.b))
        ]
        advice = " and ".join(" or ".join(texts) for texts in each if texts)
        yield f"{spec.epilogue.parts_are}, and a is {spec.a} and b is {spec.b}: use {advice}"
    if any(scaled) and not kind_of(config).scales_blocks:
        nouns = " or ".join(k.noun for k in KINDS if k.scales_blocks and (mma is None or k.multiplies(mma)))
        promoted = "" if mma is not None and mma.own else " with accumulation='promoted'"
        yield Broken(
            f"{spec.epilogue.parts_are}, which kernels of this kind do not apply", advice=f"use {nouns}{promoted}"
        )
    if spec.a.promoted != spec.b.promoted:
        yield f"a is {spec.a} and b is {spec.b}: use '.promoted' for both or for neither"
    if spec.a.promoted and (mma is None or not mma.promotes):
        yield f"a is {spec.a} and b is {spec.b}: '.promoted' is for FP8 operands only; use operands without it"
    if spec.a.promoted and any(blocks):
        yield f"a is {spec.a}, and scales of blocks imply '.promoted': leave it out"
    if spec.d.promoted:
        yield f"d is {spec.d}: '.promoted' is for a and b only; use d without it"
    if spec.d.scaling is not None:
        yield f"d is {spec.d}: only a and b have blocks with scales; use one without"


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
    if not hasattr(config, "stages"):
        return  # a GEMV kernel needs only a few bytes
    limit = arch.target(spec.target).shared_memory
    stages = config.stages if config.stages is not None else MIN_STAGES

    def needs(stages: int) -> int:
        return kind_of(config).shared_memory(spec, config, stages)

    needed = needs(stages)
    if needed > limit:
        fewer = next((s for s in range(stages - 1, MIN_STAGES - 1, -1) if needs(s) <= limit), None)
        yield Broken(
            f"{stages} stages of threadblock {config.threadblock} and the epilogue take {needed} bytes of shared "
            f"memory, and a thread block on {spec.target} has {limit}",
            () if fewer is None else ({"stages": fewer},),
            "use a smaller tile" + (" or an epilogue of fewer tiles" if fewer is None else ""),
        )


COMMON: tuple[Rule[Config], ...] = (
    Rule("target", "hardware", _target),
    Rule("form", "policy", _form),
    Rule("product", "policy", _product),
    Rule("one_gemm", "policy", _one_gemm),
    Rule("operand_dtypes", "policy", _operand_dtypes),
    Rule("operand_majors", "hardware", _operand_majors),
    Rule("epilogue_dtypes", "policy", _epilogue_dtypes),
    Rule("integer_d", "policy", _integer_d),
    Rule("fp8_outputs", "policy", _fp8_outputs),
    Rule("quantized", "policy", _quantized),
    Rule("scaling", "policy", _scaling),
    Rule("alignment", "policy", _alignment),
    Rule("shared_memory", "hardware", _shared_memory),
)
