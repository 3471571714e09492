"""The Tensor Core instructions of each architecture: those that our kernels use, and those that other programs use.

What our kernels use comes from :data:`cutlass_ops.base.mma.MMAS`, the table of the legality rules. The other rows are
for programs of other people: WMMA, Triton, cuBLAS, and GPUs for which there are no kernels here.

Sources: PTX ISA, sections on ``mma.sync``, ``wgmma.mma_async`` and ``tcgen05.mma`` (shapes, types, majors, targets);
NVIDIA's architecture whitepapers (multiply-adds of a multiprocessor in a clock); CUDA C++ Programming Guide,
"Arithmetic Instructions" (lanes) and "Technical Specifications per Compute Capability" (shared memory).
"""

from __future__ import annotations

from dataclasses import dataclass

from cutlass_ops.base import arch, dtypes
from cutlass_ops.base.mma import MMAS

TCGEN05, WGMMA, MMA_SYNC = "tcgen05", arch.WGMMA.name, arch.MMA_SYNC.name

# Elements by name: the library's own, and what other programs multiply.
ELEMENTS = {t.name: t for t in dtypes.DECLARED}
_ALIASES = {"s8": "i8", "fp8": "e4m3"}


@dataclass(frozen=True)
class Architecture:
    """The units of one architecture that multiply matrices."""

    name: str  # nvcc's name without a suffix, such as ``"sm_90"``
    capability: tuple[int, int]  # compute capability
    families: tuple[str, ...]  # families of instructions that reach the Tensor Cores, fastest first
    # multiply-adds of 16-bit operands in a clock by the Tensor Cores of one multiprocessor, summed in FP32
    tensor_fmas: int
    fp32_lanes: int  # the same for the CUDA cores; so is `fp64_lanes`
    fp64_lanes: int
    shared_memory: int  # maximum of a thread block, in bytes
    mma_sync_reach: float | None = 1.0  # the part of the peak that ``mma.sync`` can reach; None if unknown

    @property
    def tma(self) -> bool:
        """Whether its fastest family is fed by TMA, which addresses multiples of 16 bytes."""
        return self.families[0] != MMA_SYNC


ARCHITECTURES = {
    each.name: each
    for each in (
        Architecture("sm_70", (7, 0), (MMA_SYNC,), 512, 64, 32, 96 * arch.KIB),
        Architecture("sm_75", (7, 5), (MMA_SYNC,), 512, 64, 2, 64 * arch.KIB),
        Architecture("sm_80", (8, 0), (MMA_SYNC,), 1024, 64, 32, arch.TARGETS["sm_80"].shared_memory),
        # For GeForce cards: half as many multiply-adds if they are summed in FP32.
        Architecture("sm_86", (8, 6), (MMA_SYNC,), 512, 128, 2, arch.TARGETS["sm_86"].shared_memory),
        Architecture("sm_89", (8, 9), (MMA_SYNC,), 512, 128, 2, arch.TARGETS["sm_89"].shared_memory),
        # mma.sync reaches 62.9% of the peak of an H100: Luo et al., arXiv:2402.13499.
        Architecture("sm_90", (9, 0), (WGMMA, MMA_SYNC), 2048, 128, 64, arch.TARGETS["sm_90a"].shared_memory, 0.63),
        Architecture("sm_100", (10, 0), (TCGEN05, MMA_SYNC), 4096, 128, 64, 227 * arch.KIB, None),
        Architecture("sm_120", (12, 0), (MMA_SYNC,), 512, 128, 2, 99 * arch.KIB),
    )
}


@dataclass(frozen=True)
class Instruction:
    """One Tensor Core instruction, for one pair of operand types."""

    family: str  # ``"mma.sync"``, ``"wgmma"`` or ``"tcgen05"``
    a: str
    b: str
    accumulator: str
    shape: str  # M, N and K of one instruction; N is a letter if programs choose it
    opcode: str  # its name in machine code, as nvdisasm has it
    on: tuple[str, ...]  # the architectures that have it
    rate: float = 1.0  # peak throughput relative to 16-bit operands
    k_major_only: bool = False  # whether operands must be K-major in shared memory

    @property
    def name(self) -> str:
        """Family and shape, such as ``"wgmma m64nNk16"``."""
        return f"{self.family} {self.shape}"

    def __str__(self) -> str:
        return self.name


def _since(capability: tuple[int, int]) -> tuple[str, ...]:
    return tuple(name for name, each in ARCHITECTURES.items() if each.capability >= capability)


def _of_the_library() -> list[Instruction]:
    """Return what our kernels multiply with, read from the table of the legality rules.

    Not 3xTF32, which is three products in TF32, nor weights in forms of their own, nor FP64, whose rows below say which
    chips have a unit for it.
    """
    found = []
    for mma in MMAS:
        if mma.own or mma.a in (dtypes.tf32x3, dtypes.f64):
            continue
        types = (mma.a.name, mma.b.name, mma.accumulator.name)
        if warps := mma.by(arch.WGMMA):
            shape = f"m{warps.family.m}nNk{mma.a.count_in(warps.family.k_bytes)}"
            found.append(Instruction(WGMMA, *types, shape, warps.opcode, ("sm_90",), mma.rate, warps.k_major_only))
        if warp := mma.by(arch.MMA_SYNC):
            m, n, k = warp.shapes[0]
            found.append(Instruction(MMA_SYNC, *types, f"m{m}n{n}k{k}", warp.opcode, _since((8, 0)), mma.rate))
    return found


_FP8 = tuple(t.name for t in dtypes.FP8)
_PAIRS = tuple((a, b) for a in _FP8 for b in _FP8)
_OTHERS = (
    Instruction(MMA_SYNC, "f16", "f16", "f32", "m8n8k4", "HMMA", ("sm_70",)),
    Instruction(MMA_SYNC, "f16", "f16", "f32", "m16n8k8", "HMMA", ("sm_75",)),
    Instruction(MMA_SYNC, "i8", "i8", "i32", "m8n8k16", "IMMA", ("sm_75",), 2.0),
    Instruction(WGMMA, "tf32", "tf32", "f32", "m64nNk8", "HGMMA", ("sm_90",), 0.5, True),
    Instruction(MMA_SYNC, "tf32", "tf32", "f32", "m16n8k8", "HMMA", _since((8, 0)), 0.5),
    Instruction(WGMMA, "i8", "i8", "i32", "m64nNk32", "IGMMA", ("sm_90",), 2.0, True),
    Instruction(MMA_SYNC, "i8", "i8", "i32", "m16n8k32", "IMMA", _since((8, 0)), 2.0),
    # sm_86, sm_89 and sm_120 execute the same PTX on two lanes of FP64: no unit of matrices.
    Instruction(MMA_SYNC, "f64", "f64", "f64", "m8n8k4", "DMMA", ("sm_80",), 1 / 16),
    Instruction(MMA_SYNC, "f64", "f64", "f64", "m16n8k16", "DMMA", ("sm_90",), 1 / 16),
    Instruction(TCGEN05, "f16", "f16", "f32", "kind::f16 k16", "UTCHMMA", ("sm_100",)),
    Instruction(TCGEN05, "bf16", "bf16", "f32", "kind::f16 k16", "UTCHMMA", ("sm_100",)),
    Instruction(TCGEN05, "tf32", "tf32", "f32", "kind::tf32 k8", "UTCHMMA", ("sm_100",), 0.5),
    Instruction(TCGEN05, "i8", "i8", "i32", "kind::i8 k32", "UTCIMMA", ("sm_100",), 2.0),
    *(Instruction(TCGEN05, a, b, "f32", "kind::f8f6f4 k32", "UTCQMMA", ("sm_100",), 2.0) for a, b in _PAIRS),
    # On sm_90 and sm_100, programs convert FP8 to FP16 for mma.sync.
    *(Instruction(MMA_SYNC, a, b, "f32", "m16n8k32", "QMMA", ("sm_89", "sm_120"), 2.0) for a, b in _PAIRS),
)

# Our own rows come first and take precedence over the others.
INSTRUCTIONS: tuple[Instruction, ...] = (*_of_the_library(), *_OTHERS)


def instructions(a: str, b: str, architecture: Architecture) -> dict[str, Instruction]:
    """Return an architecture's instructions for two element types, by family, fastest first."""
    found: dict[str, Instruction] = {}
    for family in architecture.families:
        for each in INSTRUCTIONS:
            if (each.family, each.a, each.b) == (family, a, b) and architecture.name in each.on:
                found.setdefault(family, each)
    return found


def element(name: object) -> str:
    """Return the name of a type that Tensor Cores multiply, or ``"f32"``. Raises ValueError if it is unknown."""
    text = str(name).strip().lower().removeprefix("torch.")
    text = _ALIASES.get(text, text)
    known = dtypes.NAMES.get(text)
    if known is not None:
        text = known.name
    if text not in ELEMENTS:
        raise ValueError(f"unknown dtype {name!r}: use one of {', '.join(ELEMENTS)}")
    return text


def architecture(name: str) -> Architecture:
    """Look up an architecture by nvcc's name, a compute capability or its digits: ``"sm_90a"``, ``"9.0"``, ``"90"``.

    Raises ValueError if it is unknown. The message lists the names.
    """
    digits = name.strip().lower().removeprefix("sm").removeprefix("_").replace(".", "").rstrip("af")
    found = ARCHITECTURES.get(f"sm_{digits}")
    if found is None:
        raise ValueError(f"architecture {name!r} is not known: use one of {', '.join(ARCHITECTURES)}")
    return found
