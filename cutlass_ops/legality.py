"""Why a kernel declaration cannot be built, before any compiler runs.

Each rule is one small function in a table: :data:`VALUES`, :data:`COMMON`, :data:`SM90` or :data:`SM80`. It stands on
one of three grounds: the hardware cannot do it, CUTLASS does not compile it, or this library refuses it because it
would be wrong, slow or untested. ``docs/legality.md`` lists them all.

Sources: the headers of CUTLASS 4.2, named at each formula relative to ``cutlass/``; PTX ISA, ``wgmma.mma_async``,
``cp.async.bulk.tensor`` and ``cp.async``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, Literal, TypeGuard, TypeVar

from cutlass_ops import arch
from cutlass_ops.config import (
    ClusterShape,
    Config,
    InstructionShape,
    Sm80Config,
    Sm90Config,
    ThreadblockShape,
    WarpShape,
)
from cutlass_ops.dtypes import bf16, f16, f32
from cutlass_ops.epilogue.graph import Kind
from cutlass_ops.errors import ConfigError
from cutlass_ops.footprint import (
    MAX_STAGES,
    MIN_STAGES,
    shared_memory,
    sm90_epilogue_tile,
    sm90_slicing_obstacle,
    sm90_stages,
)
from cutlass_ops.orientation import reduced_along_m, sides
from cutlass_ops.spec import KernelSpec, Operand

Ground = Literal["hardware", "compiler", "policy"]
AnyConfig = TypeVar("AnyConfig", bound=Config)


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


@dataclass(frozen=True)
class Rule(Generic[AnyConfig]):
    """One constraint.

    Attributes
    ----------
    name : str
        Name in :class:`Violation` and in the documentation.
    ground : str
        ``"hardware"``, ``"compiler"`` or ``"policy"``.
    broken : callable
        Yields one message for each way in which a spec breaks the rule.
    """

    name: str
    ground: Ground
    broken: Callable[[KernelSpec, AnyConfig], Iterator[str]]


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
    return _violations(SM80, spec, spec.config)


def _violations(rules: tuple[Rule[AnyConfig], ...], spec: KernelSpec, config: AnyConfig) -> tuple[Violation, ...]:
    return tuple(Violation(rule.name, message) for rule in rules for message in rule.broken(spec, config))


# ---- Rules: fields that mean something -----------------------------------------------------------------------------

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
    for name, allowed in (_SM90_CHOICES if isinstance(config, Sm90Config) else _SM80_CHOICES).items():
        value = getattr(spec.launch_config, name)
        if not any(value == a and type(value) is type(a) for a in allowed):
            yield f"{name} is {value!r}: use {' or '.join(map(repr, allowed))}"
    if config.stages is None and isinstance(config, Sm90Config):
        return
    if not _positive(config.stages) or not MIN_STAGES <= config.stages <= MAX_STAGES:
        yield f"stages is {config.stages!r}: use {MIN_STAGES} to {MAX_STAGES}, since one is filled while one is used"


def _positive(value: object) -> TypeGuard[int]:
    return type(value) is int and value > 0


_SWIZZLES = (1, 2, 4, 8)
_SM80_CHOICES: dict[str, tuple[object, ...]] = {"stream_k": (False, True), "swizzle": _SWIZZLES}
_SM90_CHOICES: dict[str, tuple[object, ...]] = {
    "schedule": ("pingpong", "cooperative", "warp_specialized"),
    "scheduler": ("persistent", "stream_k"),
    "swap_ab": (False, True),
    "raster": ("heuristic", "along_m", "along_n"),
    "swizzle": _SWIZZLES,
}


VALUES: tuple[Rule[Config], ...] = (Rule("field_values", "policy", _field_values),)


# ---- Rules: both architectures -------------------------------------------------------------------------------------


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


# ---- Rules: Sm90 ---------------------------------------------------------------------------------------------------

# Accumulator registers that a thread may have. Consumer threads get 240 registers (MmaRegisterRequirement in
# gemm/kernel/sm90_gemm_tma_warpspecialized_{pingpong,cooperative}.hpp), those of the third kernel what it
# needs of 255. Sixteen more spill: 700 bytes a thread at 224 with the first two (nvcc 13.0, bf16, bias + ReLU).
_SM90_MAX_ACCUMULATORS = {"pingpong": 208, "cooperative": 208, "warp_specialized": 224}
_SM90_MAX_SIDE = 256


def _tma_alignment(spec: KernelSpec, _: Sm90Config) -> Iterator[str]:
    for name, operand in (("a", spec.a), ("b", spec.b)):
        if not operand.aligned:
            yield (
                f"{name} is {operand}, and the bulk tensor copy engine needs {arch.TMA_ALIGNMENT_BYTES} bytes, "
                f"{operand.dtype.tma_alignment} elements: use an Sm80Config, or pad {name}'s leading dimension"
            )


def _sm90_tile_m(_: KernelSpec, config: Sm90Config) -> Iterator[str]:
    step = arch.WGMMA_M * (2 if config.schedule == "cooperative" else 1)
    if config.threadblock.m % step:
        yield (
            f"threadblock.m is {config.threadblock.m}: with schedule {config.schedule!r} a tile's warpgroups cover "
            f"rows in steps of {step}; use a multiple of that"
        )


def _sm90_tile_n(_: KernelSpec, config: Sm90Config) -> Iterator[str]:
    n = config.threadblock.n
    if n % arch.WGMMA_N_STEP or n > arch.WGMMA_N_MAX:
        yield (
            f"threadblock.n is {n}: wgmma has N from {arch.WGMMA_N_STEP} to {arch.WGMMA_N_MAX} in steps of "
            f"{arch.WGMMA_N_STEP}; use one of these"
        )


def _sm90_tile_k(spec: KernelSpec, config: Sm90Config) -> Iterator[str]:
    step = arch.WGMMA_K_BYTES // spec.a.dtype.bytes
    if config.threadblock.k % step:
        yield f"threadblock.k is {config.threadblock.k}: wgmma takes {step} elements along K; use a multiple of that"


def _sm90_tile_size(_: KernelSpec, config: Sm90Config) -> Iterator[str]:
    for side in ("m", "k"):
        extent = getattr(config.threadblock, side)
        if extent > _SM90_MAX_SIDE:
            yield (
                f"threadblock.{side} is {extent}: a box of the bulk tensor copy engine has at most {_SM90_MAX_SIDE} "
                f"elements a side, and tiles of several boxes are not tested; use {_SM90_MAX_SIDE} or less"
            )


def _sm90_epilogue_step(spec: KernelSpec, config: Sm90Config) -> Iterator[str]:
    epi_n = sm90_epilogue_tile(spec)[1]
    if epi_n % arch.WGMMA_N_STEP == 0 and epi_n & (epi_n - 1):
        yield (
            f"threadblock.n is {config.threadblock.n}: CUTLASS's epilogue would take {epi_n} columns a step, which its "
            f"wgmma of another width does not divide; use 16 or 32"
        )


def _sm90_k_major_tile(spec: KernelSpec, config: Sm90Config) -> Iterator[str]:
    k, stages = config.threadblock.k, sm90_stages(spec)
    for operand in sides(spec):
        side = f"threadblock.{operand.side}"
        where = f"{side} is {operand.extent} and {operand.name} has K adjacent in memory, which CuTe cannot slice"
        obstacle = sm90_slicing_obstacle(spec, operand, stages)
        if obstacle == "side":
            yield f"{where}: use 8 or a multiple of 16 for {side}"
        elif obstacle == "k":
            yield f"{where} with threadblock.k {k}: use a power of two for threadblock.k"
        elif obstacle == "stages":
            yield f"{where} with {stages} stages of threadblock.k {k}: use an even number of stages"


def _sm90_accumulators(_: KernelSpec, config: Sm90Config) -> Iterator[str]:
    tile, limit = config.threadblock, _SM90_MAX_ACCUMULATORS[config.schedule]
    threads = arch.WARPGROUP * (2 if config.schedule == "cooperative" else 1)
    registers = tile.m * tile.n // threads
    if registers > limit:
        advice = "" if config.schedule == "cooperative" else ", or schedule 'cooperative'"
        yield (
            f"threadblock {tile} with schedule {config.schedule!r} takes {registers} accumulator registers a thread, "
            f"and more than {limit} spill: use a smaller tile{advice}"
        )


def _sm90_scheduler(_: KernelSpec, config: Sm90Config) -> Iterator[str]:
    if config.scheduler == "stream_k" and config.schedule != "cooperative":
        yield f"scheduler 'stream_k' with schedule {config.schedule!r}: CUTLASS has it for 'cooperative' only; use that"


def _sm90_cluster_size(_: KernelSpec, config: Sm90Config) -> Iterator[str]:
    cluster = config.cluster
    if cluster.m * cluster.n > arch.MAX_CLUSTER:
        yield (
            f"cluster is {cluster}: {cluster.m * cluster.n} thread blocks, and more than {arch.MAX_CLUSTER} are not "
            f"portable; use a smaller one"
        )


def _sm90_cluster_shape(_: KernelSpec, config: Sm90Config) -> Iterator[str]:
    cluster = config.cluster
    if any(side & (side - 1) for side in (cluster.m, cluster.n)):
        yield f"cluster is {cluster}: CUTLASS's tile schedulers divide by its sides with shifts; use powers of two"


def _sm90_multicast(spec: KernelSpec, config: Sm90Config) -> Iterator[str]:
    # Thread blocks side by side along N each load a part of A's tile for all of them, and so for B's along M.
    peers = {"m": config.cluster.n, "n": config.cluster.m}
    for operand in sides(spec):
        sharing = peers[operand.side]
        tile_bytes = operand.extent * config.threadblock.k * spec.a.dtype.bytes
        if tile_bytes % (sharing * _TMA_SMEM_ALIGNMENT):
            yield (
                f"cluster is {config.cluster}: {sharing} thread blocks share {operand.name}'s tile of {tile_bytes} "
                f"bytes, and the part that each loads must be a multiple of {_TMA_SMEM_ALIGNMENT} bytes; use a smaller "
                f"cluster or a larger threadblock.{operand.side}"
            )


_TMA_SMEM_ALIGNMENT = 128  # PTX ISA, cp.async.bulk.tensor: alignment of the address in shared memory


def _sm90_reduction_schedule(spec: KernelSpec, config: Sm90Config) -> Iterator[str]:
    for output in spec.epilogue.outputs:
        if output.reduce is not None and config.schedule == "warp_specialized":
            yield (
                f"output {output.name} is a reduction, and CUTLASS's 'warp_specialized' kernel gives an epilogue no "
                f"workspace for partial results: use schedule 'pingpong' or 'cooperative'"
            )


def _sm90_reduction_tile(spec: KernelSpec, config: Sm90Config) -> Iterator[str]:
    # Sm90RowReduction halves, in shuffles between the 8 lanes of a column, what a thread holds for n / 8 column pairs.
    # From 8 pairs on it takes for granted that each lane is left with the same number of them.
    n = config.threadblock.n
    if n > 64 and n % 64:
        for name in reduced_along_m(spec):
            yield (
                f"threadblock.n is {n} and output {name} is reduced along the kernel's M: CUTLASS's shuffles then drop "
                f"values; use at most 64 or a multiple of 64"
            )


def _sm90_reduction_buffer(spec: KernelSpec, config: Sm90Config) -> Iterator[str]:
    epi_m, epi_n = sm90_epilogue_tile(spec)
    warps = 8 if config.schedule == "cooperative" else 4
    needed, there = warps * config.threadblock.n * f32.bytes, epi_m * epi_n * spec.d.dtype.bytes
    if needed > there:
        for name in reduced_along_m(spec):
            yield (
                f"threadblock.n is {config.threadblock.n} and output {name} is reduced along the kernel's M: that "
                f"needs {needed} bytes, and the epilogue's buffer of {epi_m}x{epi_n} elements of d has {there}; use a "
                f"smaller threadblock.n, or a multiple of 32"
            )


SM90: tuple[Rule[Sm90Config], ...] = (
    Rule("tma_alignment", "hardware", _tma_alignment),
    Rule("tile_m", "compiler", _sm90_tile_m),
    Rule("tile_n", "hardware", _sm90_tile_n),
    Rule("tile_k", "hardware", _sm90_tile_k),
    Rule("tile_size", "policy", _sm90_tile_size),
    Rule("k_major_tile", "compiler", _sm90_k_major_tile),
    Rule("epilogue_step", "compiler", _sm90_epilogue_step),
    Rule("accumulators", "policy", _sm90_accumulators),
    Rule("scheduler", "compiler", _sm90_scheduler),
    Rule("cluster_size", "policy", _sm90_cluster_size),
    Rule("cluster_shape", "policy", _sm90_cluster_shape),
    Rule("multicast", "hardware", _sm90_multicast),
    Rule("reduction_schedule", "policy", _sm90_reduction_schedule),
    Rule("reduction_tile", "policy", _sm90_reduction_tile),
    Rule("reduction_buffer", "compiler", _sm90_reduction_buffer),
)


# ---- Rules: Sm80 ---------------------------------------------------------------------------------------------------

# Accumulator registers a thread may have, as a share of those there are: operands and epilogue need the rest.
_SM80_MAX_ACCUMULATOR_SHARE = 2
_SM80_ACCESS = 8  # 16-bit elements in one 16-byte access, how shared memory is always written
_SM80_MAX_PREDICATES = 64  # transform/threadblock/predicated_tile_access_iterator.h: 4 words of 16
_EPILOGUE_ROWS = 8


def _sm80_instruction(spec: KernelSpec, config: Sm80Config) -> Iterator[str]:
    shapes = arch.MMA_SHAPES.get(spec.a.dtype.name, ())
    i = config.instruction
    if (i.m, i.n, i.k) not in shapes:
        known = ", ".join("x".join(map(str, shape)) for shape in shapes)
        yield f"instruction is {i}: mma.sync for {spec.a.dtype} operands has {known}; use one of these"


def _sm80_warp_tile(_: KernelSpec, config: Sm80Config) -> Iterator[str]:
    for side in ("m", "n", "k"):
        block, warp, instruction = (getattr(s, side) for s in (config.threadblock, config.warp, config.instruction))
        if block % warp:
            yield f"warp.{side} is {warp}, which does not divide threadblock.{side} {block}: use a divisor"
        if warp % instruction:
            yield f"warp.{side} is {warp}: use a multiple of instruction.{side} {instruction}"


def _sm80_sliced_k(_: KernelSpec, config: Sm80Config) -> Iterator[str]:
    if config.warp.k != config.threadblock.k:
        yield (
            f"warp.k is {config.warp.k} and threadblock.k is {config.threadblock.k}: warps that divide K among them "
            f"are not offered; use equal values, or stream_k"
        )


def _sm80_k_steps(_: KernelSpec, config: Sm80Config) -> Iterator[str]:
    steps = config.warp.k // config.instruction.k
    if config.warp.k % config.instruction.k == 0 and steps % 2:
        yield (
            f"warp.k is {config.warp.k}, {steps} steps of instruction.k {config.instruction.k}: CUTLASS's main loop "
            f"takes two at a time; use a multiple of {2 * config.instruction.k}"
        )


def _sm80_warps(_: KernelSpec, config: Sm80Config) -> Iterator[str]:
    limit = arch.MAX_THREADS // arch.WARP
    if not 1 <= config.warps <= limit:
        yield f"threadblock {config.threadblock} in warp tiles {config.warp} is {config.warps} warps: use 1 to {limit}"


def _sm80_accumulators(_: KernelSpec, config: Sm80Config) -> Iterator[str]:
    warp, threads = config.warp, max(config.warps, 1) * arch.WARP
    registers = min(arch.MAX_REGISTERS_PER_THREAD + 1, arch.REGISTERS_PER_SM // threads)
    used, limit = warp.m * warp.n // arch.WARP, registers // _SM80_MAX_ACCUMULATOR_SHARE
    if used > limit:
        yield (
            f"warp {warp} takes {used} accumulator registers a thread, and more than {limit} of the {registers} that "
            f"{threads} threads can each have spill: use a smaller warp tile"
        )


def _sm80_load_map(spec: KernelSpec, config: Sm80Config) -> Iterator[str]:
    k = config.threadblock.k
    for operand in sides(spec):
        contiguous, strided = (k, operand.extent) if operand.k_major else (operand.extent, k)
        if not _sm80_covers(contiguous, strided, config.warps, operand.k_major):
            yield (
                f"{config.warps} warps cannot share the loads of {operand.name}'s tile, {strided} lines of "
                f"{contiguous} adjacent elements, evenly: use powers of two for threadblock.{operand.side} and "
                f"threadblock.k, or fewer warps"
            )


def _sm80_covers(contiguous: int, strided: int, warps: int, k_major: bool) -> bool:
    """Whether the warps' accesses cover an operand's tile exactly.

    ``DefaultMmaCore`` in ``gemm/threadblock/default_mma_core_sm80.h`` arranges a warp's lanes, and
    ``PitchLinearWarpRakedThreadMap`` in ``transform/pitch_linear_thread_map.h`` the warps, silently rounding down.
    """
    accesses = contiguous // _SM80_ACCESS
    lanes = accesses if k_major else min(accesses, 8)
    if contiguous % _SM80_ACCESS or warps < 1 or lanes < 1 or arch.WARP % lanes or accesses % lanes:
        return False
    lines = arch.WARP // lanes
    if strided % lines:
        return False
    across, along = accesses // lanes, strided // lines
    warps_along = min(along, warps)
    warps_across = warps // warps_along
    return (
        warps_along * warps_across == warps
        and along % warps_along == 0
        and across >= warps_across
        and across % warps_across == 0
    )


def _sm80_load_predicates(spec: KernelSpec, config: Sm80Config) -> Iterator[str]:
    threads = max(config.warps, 1) * arch.WARP
    for operand in sides(spec):
        alignment = (spec.a if operand.name == "a" else spec.b).alignment
        accesses = operand.extent * config.threadblock.k // alignment // threads
        if accesses > _SM80_MAX_PREDICATES:
            yield (
                f"each of {threads} threads makes {accesses} accesses to {operand.name}'s tile, and CUTLASS has "
                f"predicates for {_SM80_MAX_PREDICATES}: use a smaller tile, more warps, or a wider alignment"
            )


def _sm80_k_extent(spec: KernelSpec, config: Sm80Config) -> Iterator[str]:
    limit = 128 // spec.a.dtype.bytes
    for operand in sides(spec):
        if operand.k_major and config.threadblock.k > limit:
            yield (
                f"threadblock.k is {config.threadblock.k} and {operand.name} has K adjacent in memory: CUTLASS's "
                f"layout of shared memory has lines of at most 128 bytes, {limit} elements; use that or less"
            )


def _sm80_cp_async(spec: KernelSpec, config: Sm80Config) -> Iterator[str]:
    for name, operand in (("a", spec.a), ("b", spec.b)):
        if config.stages > 2 and operand.alignment * operand.dtype.bytes < min(arch.CP_ASYNC_BYTES):
            yield (
                f"{name} is {operand} and stages is {config.stages}: cp.async copies at least "
                f"{min(arch.CP_ASYNC_BYTES)} bytes; use stages=2, which loads through registers, or pad {name}"
            )


def _sm80_store_map(spec: KernelSpec, config: Sm80Config) -> Iterator[str]:
    warps_n = config.threadblock.n // config.warp.n
    if not _sm80_stores_exactly(config.threadblock.n, warps_n, spec.d):
        yield (
            f"{warps_n} warps side by side cannot share the stores of rows of {config.threadblock.n} elements of d, "
            f"{spec.d}, evenly: use a power of two for threadblock.n, or fewer warps along N"
        )


def _sm80_stores_exactly(n: int, warps_n: int, d: Operand) -> bool:
    """Whether the warps' accesses cover the eight rows that the epilogue writes in one step.

    ``RowArrangement`` in ``epilogue/threadblock/output_tile_thread_map.h``; ``templates/include/cutlass_ops/
    sm80_visitors.h`` asserts what this returns.
    """
    if not 1 <= warps_n < _EPILOGUE_ROWS or n % d.alignment:
        return False
    vectors, rows = n // d.alignment, _EPILOGUE_ROWS // warps_n
    lanes = 256 // (d.alignment * d.dtype.bytes)  # what covers 256 bytes, CUTLASS's preferred width
    if arch.WARP // lanes > rows:
        width, height = arch.WARP // rows, rows
    else:
        width = min(vectors, lanes, arch.WARP)
        height = min(_EPILOGUE_ROWS, arch.WARP // width)
    return (
        width * height == arch.WARP and vectors % width == 0 and height * (rows // height) * warps_n == _EPILOGUE_ROWS
    )


SM80: tuple[Rule[Sm80Config], ...] = (
    Rule("instruction", "hardware", _sm80_instruction),
    Rule("warp_tile", "compiler", _sm80_warp_tile),
    Rule("sliced_k", "policy", _sm80_sliced_k),
    Rule("k_steps", "compiler", _sm80_k_steps),
    Rule("warps", "hardware", _sm80_warps),
    Rule("warp_accumulators", "policy", _sm80_accumulators),
    Rule("k_extent", "compiler", _sm80_k_extent),
    Rule("load_map", "policy", _sm80_load_map),
    Rule("load_predicates", "compiler", _sm80_load_predicates),
    Rule("store_map", "compiler", _sm80_store_map),
    Rule("cp_async", "hardware", _sm80_cp_async),
)
