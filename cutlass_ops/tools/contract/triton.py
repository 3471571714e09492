"""The rules by which Triton's compiler picks an instruction for ``tl.dot``.

They were read off compiled kernels of Triton 3.6: ``benchmarks/contract_triton.py`` compiles kernels for every
architecture and compares. Before sm_80, Triton multiplies on the CUDA cores.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from cutlass_ops.base import arch
from cutlass_ops.base.frozen import plain
from cutlass_ops.base.units import counted
from cutlass_ops.tools.contract import library
from cutlass_ops.tools.contract.given import Asked
from cutlass_ops.tools.contract.result import Condition, Ruling
from cutlass_ops.tools.contract.tensor_cores import MMA_SYNC, TCGEN05, WGMMA, Architecture, Instruction, instructions

_FIRST = (8, 0)  # compute capability
_FIRST_E4M3 = (8, 9)
_FP8 = ("e4m3", "e5m2")
_NO_TCGEN05 = ("i8",)
_MIN_M, _MIN_N = 64, 16
# Warps that share an instruction: any multiple of a warpgroup's four for wgmma, these for tensor memory.
_WARPGROUP = arch.WARPGROUP // arch.WARP
_TCGEN05_WARPS = (4, 8)
_MOST_WARPS = 32  # 1024 threads
# Registers of a thread for accumulators, as for our own kernels (rule "accumulators" of docs/legality.md).
_ACCUMULATORS = 208
_NO_LAUNCH = "does not launch"
# Tensor memory: 128 lanes of 512 columns of 32 bits.
_TENSOR_MEMORY = 128 * 512


_TOO_OLD = Condition(
    "architecture", False, "before sm_80, Triton multiplies on the CUDA cores", "use torch.mm or WMMA there",
    {"program": "library", **dict.fromkeys(("block_m", "block_n", "block_k", "num_warps", "num_stages"))},
)  # fmt: skip


@dataclass(frozen=True)
class Tile:
    """The constants of a Triton kernel."""

    m: int  # ``BLOCK_M``
    n: int  # ``BLOCK_N``
    k: int  # ``BLOCK_K``
    warps: int = 4  # ``num_warps``
    stages: int = 3  # ``num_stages``

    def __post_init__(self) -> None:
        named = {"block_m": self.m, "block_n": self.n, "block_k": self.k, "num_warps": self.warps}
        for name, value in named.items():
            if type(value) is not int or value < 1 or value & (value - 1):
                raise ValueError(f"{name} is {value!r}: Triton needs a power of two")
        if self.warps > _MOST_WARPS:
            raise ValueError(f"num_warps is {self.warps}: a thread block has at most {_MOST_WARPS}")
        if type(self.stages) is not int or self.stages < 1:
            raise ValueError(f"num_stages is {self.stages!r}: use at least 1")

    @classmethod
    def of(cls, extents: tuple[int, int, int], warps: int | None, stages: int | None) -> Tile:
        """Return a tile, with Triton's defaults for None."""
        others = {"warps": warps, "stages": stages}
        return cls(*map(plain, extents), **{name: plain(x) for name, x in others.items() if x is not None})


def require_effect(tile: str, given: bool, program: str | None, others: Mapping[str, int | None]) -> None:
    """Raise ValueError if constants of a Triton kernel have no effect. The message says which."""
    if given and program not in (None, "triton"):
        raise ValueError(f"{tile} and the program {program} exclude each other: only Triton's choice depends on them")
    named = [name for name, value in others.items() if value is not None]
    if named and not given:
        has = "has" if len(named) == 1 else "have"
        raise ValueError(
            f"{' and '.join(named)} {has} no effect without {tile}: they are of a Triton kernel, as its tile"
        )


def ruling(asked: Asked, tile: Tile, architecture: Architecture) -> Ruling:
    """Return the instruction of ``tl.dot`` and its conditions."""
    refused = [each for each in _compiles(asked, tile, architecture) if not each.met]
    if refused:
        return Ruling(None, tuple(refused), nothing="does not compile")
    found = _instructions(asked, architecture)
    types = library.operand_dtypes(asked, found, architecture) if architecture.capability >= _FIRST else _TOO_OLD
    remedy = f"use smaller tiles, or more rows and columns than {tile.m} by {tile.n}"
    useful, edge = library.edges(asked, (tile.m, tile.n, tile.k), remedy)
    if not found:
        fits = _shared_memory(asked, tile, None, architecture)
        return Ruling(None, (types, fits, edge), useful, "" if fits.met else _NO_LAUNCH)
    best = next(iter(found.values()))
    family = tuple(_family(tile, best))
    instruction = best if all(each.met for each in family) else _by_mma_sync(asked, architecture)
    fits = _shared_memory(asked, tile, instruction, architecture)
    every = (types, *family, *_feeding(asked, tile, instruction), fits, edge)
    return Ruling(instruction, every, useful, "" if fits.met else _NO_LAUNCH)


def _compiles(asked: Asked, tile: Tile, architecture: Architecture) -> Iterator[Condition]:
    bits = asked.a.element.bits
    least = 32 if bits == 8 else 16
    says = f"BLOCK_K is {tile.k}, and tl.dot asserts {least} for elements of {bits} bits"
    yield Condition("block_k", tile.k >= least, says, f"BLOCK_K={least}", {"block_k": least})
    if asked.a.dtype != asked.b.dtype:
        says = f"a is {asked.a.dtype} and b is {asked.b.dtype}: tl.dot needs one type"
        remedy = f"convert b to {asked.a.dtype}"
        yield Condition("one_dtype", False, says, remedy, {"b": f"{asked.a.dtype}.{asked.b.major}"})
    # Before sm_89, Triton has no e4m3; before sm_80 no integers. e5m2 it converts everywhere.
    firsts = {"e4m3": ("sm_89", _FIRST_E4M3), "i8": ("sm_80", _FIRST)}
    if asked.a.dtype in firsts:
        first, capability = firsts[asked.a.dtype]
        says = f"a is {asked.a.dtype}, which Triton compiles from {first} on"
        change = {x: f"f16.{given.major}" for x, given in (("a", asked.a), ("b", asked.b))}
        yield Condition("operand_dtypes", architecture.capability >= capability, says, "convert both to f16", change)


def _instructions(asked: Asked, architecture: Architecture) -> dict[str, Instruction]:
    """Return the instructions that Triton knows for these types, fastest first."""
    if architecture.capability < _FIRST:
        return {}
    found = instructions(*asked.types, architecture)
    if asked.types[0] in _NO_TCGEN05:
        found.pop(TCGEN05, None)
    if not found and asked.types[0] in _FP8:
        found[MMA_SYNC] = _by_mma_sync(asked, architecture)
    return found


def _by_mma_sync(asked: Asked, architecture: Architecture) -> Instruction:
    """Return what serves if the fast family does not: FP8 is converted to FP16 if mma.sync does not have it."""
    found = instructions(*asked.types, architecture).get(MMA_SYNC)
    return found or instructions("f16", "f16", architecture)[MMA_SYNC]


def _family(tile: Tile, best: Instruction) -> Iterator[Condition]:
    """Yield the conditions of the fast family on the tile."""
    if best.family == MMA_SYNC:
        return
    if best.family == WGMMA:
        says = f"num_warps is {tile.warps}; wgmma is issued by warpgroups of {_WARPGROUP} warps"
        yield Condition("num_warps", tile.warps % _WARPGROUP == 0, says, "num_warps=4", {"num_warps": 4})
    else:
        says = f"num_warps is {tile.warps}; Triton reads tensor memory with 4 or 8 warps"
        nearest = min(_TCGEN05_WARPS, key=lambda w: abs(w - tile.warps))
        met = tile.warps in _TCGEN05_WARPS
        yield Condition("num_warps", met, says, f"num_warps={nearest}", {"num_warps": nearest})
    for name, value, least in (("block_m", tile.m, _MIN_M), ("block_n", tile.n, _MIN_N)):
        says = f"{name.upper()} is {value}; {best.family} needs at least {least}"
        yield Condition(name, value >= least, says, f"{name.upper()}={least}", {name: least})


def _feeding(asked: Asked, tile: Tile, instruction: Instruction) -> Iterator[Condition]:
    """Yield the conditions that decide whether the instruction is fed, not which instruction it is."""
    if instruction.k_major_only:
        found = library.operand_majors(asked, instruction)
        says = found.says + "; Triton transposes them through registers" if not found.met else found.says
        yield Condition(found.name, found.met, says, found.remedy, found.change)
    yield library.whole_loads(asked)
    says = f"num_stages is {tile.stages}; with 1, loads wait for the products"
    yield Condition("num_stages", tile.stages >= 2, says, "num_stages=3", {"num_stages": 3})
    if instruction.family == TCGEN05:
        says = f"BLOCK_M x BLOCK_N is {tile.m}x{tile.n}; tensor memory holds {_TENSOR_MEMORY} sums"
        fits = tile.m * tile.n <= _TENSOR_MEMORY
        yield Condition("accumulators", fits, says, "BLOCK_N=256" if fits else "use a smaller tile")
        return
    registers = tile.m * tile.n // (arch.WARP * tile.warps)
    warps = tile.warps
    while tile.m * tile.n // (arch.WARP * warps) > _ACCUMULATORS:
        warps *= 2
    says = f"a thread has {registers} sums in registers; from {_ACCUMULATORS + 1} on, they spill"
    met = registers <= _ACCUMULATORS
    yield Condition("accumulators", met, says, f"num_warps={warps}", {"num_warps": warps})


def _shared_memory(asked: Asked, tile: Tile, instruction: Instruction | None, architecture: Architecture) -> Condition:
    """Return whether the buffers fit.

    wgmma and tcgen05 read one buffer while all others fill. Other instructions read registers, so one buffer was copied
    before. Without asynchronous copies, there is one buffer.
    """
    stage = asked.a.element.bytes_of((tile.m + tile.n) * tile.k)
    limit = architecture.shared_memory
    spare = 0 if instruction is not None and instruction.family != MMA_SYNC else 1
    if architecture.capability < _FIRST:
        spare = tile.stages

    def needs(stages: int) -> int:
        return stage * max(stages - spare, 1)

    says = f"{counted(tile.stages, 'stage')} of {stage} bytes, of {limit} on {architecture.name}"
    fewer = next((stages for stages in range(tile.stages, 0, -1) if needs(stages) <= limit), None)
    if fewer == tile.stages:
        return Condition("shared_memory", True, says)
    if fewer is None:
        return Condition("shared_memory", False, says, f"BLOCK_K={tile.k // 2}", {"block_k": tile.k // 2})
    return Condition("shared_memory", False, says, f"num_stages={fewer}", {"num_stages": fewer})
