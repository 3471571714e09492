"""The families of matrix instructions, and the hardware limits of each target, in one table each.

Validation, tuning and offline generation all read these values.

Sources: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability" (shared memory, registers,
threads); PTX ISA, sections on ``cp.async`` (copy sizes), ``mma.sync`` and ``wgmma.mma_async``.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from typing import NamedTuple


class Family(NamedTuple):
    """A family of matrix instructions. A kind of kernels, and a target, belong to one."""

    name: str  # PTX's name
    reads: str  # what reads operands, in messages
    m: int = 0  # rows of an instruction; this and the next three are 0 if types differ in shape
    n_step: int = 0  # step of its N
    n_max: int = 0  # maximum of its N
    k_bytes: int = 0  # its K in bytes
    tma: bool = False  # whether TMA loads operands, from lines at multiples of 16 bytes; kernels copy others first

    def __str__(self) -> str:
        return self.name


MMA_SYNC = Family("mma.sync", "CUTLASS's main loop")
WGMMA = Family("wgmma", "wgmma", m=64, n_step=8, n_max=256, k_bytes=32, tma=True)
KIB = 1024


class Target(NamedTuple):
    """One machine-code target."""

    name: str  # nvcc's name, such as ``"sm_90a"``
    capability: tuple[int, int]  # compute capability of the devices that run this machine code
    shared_memory: int  # maximum of one thread block, in bytes
    shared_memory_per_sm: int  # In bytes. Each resident block takes RESERVED_SHARED_MEMORY more than it requests.
    blocks_per_sm: int  # maximum number of thread blocks resident on one SM
    threads_per_sm: int  # maximum number of threads resident on one SM
    family: Family = MMA_SYNC  # the matrix instructions that its kernels use

    @property
    def gencode(self) -> str:
        """The ``-gencode`` value for nvcc: machine code for this target, no PTX."""
        return f"arch=compute_{self.name[3:]},code={self.name}"


TARGETS: dict[str, Target] = {
    t.name: t
    for t in (
        Target("sm_80", (8, 0), 163 * KIB, 164 * KIB, 32, 2048),
        Target("sm_86", (8, 6), 99 * KIB, 100 * KIB, 16, 1536),
        Target("sm_89", (8, 9), 99 * KIB, 100 * KIB, 24, 1536),
        Target("sm_90", (9, 0), 227 * KIB, 228 * KIB, 32, 2048),
        Target("sm_90a", (9, 0), 227 * KIB, 228 * KIB, 32, 2048, WGMMA),
    )
}

MAX_THREADS = 1024
RESERVED_SHARED_MEMORY = KIB  # of each resident block, beyond what it asks for
MAX_GRID_Y = 65535
MAX_EXTENT = 2**31 - 1  # of a problem: kernels number rows and columns with 32 bits (binding.h)
REGISTERS_PER_SM = 64 * KIB
MAX_REGISTERS_PER_THREAD = 255
STORES_FP8 = (9, 0)  # lowest compute capability whose kernels store FP8; it converts it in hardware
OVERLAPS = (9, 0)  # lowest compute capability with programmatic dependent launch
WARP = 32
WARPGROUP = 128
CACHE_LINE_BYTES = 128
SWIZZLE_BYTES = (128, 64, 32)  # widths of the swizzled layouts that TMA and wgmma share, widest first
UNSWIZZLED_BYTES = 16  # width of the unswizzled layout, for every other extent
MAX_CLUSTER = 8  # 16 is not portable: it needs an opt-in, and the launch may fail

# cp.async copies 4, 8 or 16 bytes. Narrower loads go through registers, which allows only two stages.
CP_ASYNC_BYTES = (4, 8, 16)
TMA_ALIGNMENT_BYTES = 16
TMA_LOAD_OPCODE = "UTMALDG"


def target(name: str) -> Target:
    """Look up a target by name. Raises ValueError, with the targets and what to do, if there is no such target."""
    if isinstance(name, str) and name in TARGETS:
        return TARGETS[name]
    raise ValueError(f"target {name!r} is not supported: {_instead(name)}")


_SM = r"sm_?(?P<number>[0-9]{2,3})[af]?"  # compiled when it is first needed, as re does with texts


def _instead(name: object) -> str:
    """Say what to use instead of an unknown target."""
    match = re.fullmatch(_SM, name) if isinstance(name, str) else None
    if match is None:
        return f"use one of {', '.join(TARGETS)}"
    major, minor = divmod(int(match["number"]), 10)
    known = sorted({t.capability for t in TARGETS.values()})
    oldest, newest = known[0], known[-1]
    *others, last = (f"{a}.{b}" for a, b in known)
    same = ", ".join(t.name for t in TARGETS.values() if t.capability == (major, minor))
    if same:
        return f"use one of {same}"
    if (major, minor) < oldest:
        why = "lacks the instructions that the kernels use (mma.sync on BF16, cp.async)"
    elif (major, minor) > newest:
        why = "cannot run the kernels' machine code, and they contain no PTX"
    else:
        why = "has no kernels of its own"
    return (
        f"compute capability {major}.{minor} {why}. Supported targets: {', '.join(TARGETS)} (compute capability "
        f"{', '.join(others)} and {last}). Use one of these on such a device, or use torch.matmul on this one"
    )


def target_for(capability: tuple[int, int], family: Family) -> Target | None:
    """Return the target for devices of this compute capability and instructions of a family, or None."""
    return next((t for t in TARGETS.values() if t.capability == capability and t.family == family), None)


@functools.cache
def best_target(capability: tuple[int, int]) -> Target | None:
    """Return the target with the fastest instructions for devices of this compute capability, or None."""
    return next((t for t in reversed(TARGETS.values()) if t.capability == capability), None)


def unserved(what: str, capability: tuple[int, int], device: str = "", advice: str = "") -> str:
    """Return the error message for an op that no kernel supports on this compute capability."""
    major, minor = capability
    known = sorted({t.capability for t in TARGETS.values()})
    *others, last = (f"sm_{a}{b}" for a, b in known)
    served = f"{', '.join(others)} and {last}"
    there = f"{device and device + ', '}compute capability {major}.{minor} (sm_{major}{minor})"
    where = f"no kernel supports {what} on {there}"
    if capability in known:
        return f"{where}: {advice or 'use other layouts or alignments'}, or use PyTorch's operation"
    age = "newer devices are not supported yet" if capability > known[-1] else "this device is not supported"
    return (
        f"{where}: there are kernels for {served}, and {age}. Use PyTorch's operation on this device, or the reference "
        "implementation on the CPU"
    )


def other_platform() -> str:
    """Return why this machine cannot compile or load kernels; an empty string on Linux on x86-64."""
    here = f"{sys.platform} on {os.uname().machine}"
    if here == "linux on x86_64":
        return ""
    return (
        f"kernels need Linux on x86-64, and this is {here}: only the reference implementation works here, on CPU "
        "tensors"
    )


def no_device(device: object) -> str:
    """Return the error message for tensors that are on neither a CUDA device nor the CPU."""
    return (
        f"tensors are on {device}: kernels run on CUDA devices, the reference implementation on the CPU. Move the "
        "tensors, or use PyTorch's operation"
    )
