"""The hardware limits of each target, in one table.

Validation, tuning and offline generation all read these values.

Sources: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability" (shared memory, registers,
threads); PTX ISA, sections on ``mma.sync`` and ``wgmma.mma_async`` (instruction shapes) and ``cp.async`` (copy sizes).
"""

from __future__ import annotations

import os
import re
import sys
from typing import NamedTuple

KIB = 1024


class Target(NamedTuple):
    """One machine-code target.

    Attributes
    ----------
    name : str
        nvcc's name, such as ``"sm_90a"``.
    capability : tuple of int
        Compute capability of the devices that run this machine code.
    shared_memory : int
        Maximum shared memory of one thread block, in bytes.
    shared_memory_per_sm : int
        Shared memory of one SM, in bytes. Each resident block takes RESERVED_SHARED_MEMORY more than it requests.
    blocks_per_sm, threads_per_sm : int
        Maximum number of thread blocks and threads resident on one SM.
    wgmma : bool
        Whether the target has wgmma, TMA and clusters.
    """

    name: str
    capability: tuple[int, int]
    shared_memory: int
    shared_memory_per_sm: int
    blocks_per_sm: int
    threads_per_sm: int
    wgmma: bool = False

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
        Target("sm_90a", (9, 0), 227 * KIB, 228 * KIB, 32, 2048, wgmma=True),
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

# wgmma: M is 64 per warpgroup, N any multiple of 8 up to 256, K 32 bytes.
WGMMA_M = 64
WGMMA_N_STEP = 8
WGMMA_N_MAX = 256
WGMMA_K_BYTES = 32

# cp.async copies 4, 8 or 16 bytes. Narrower loads go through registers, which allows only two stages.
CP_ASYNC_BYTES = (4, 8, 16)
TMA_ALIGNMENT_BYTES = 16
TMA_LOAD_OPCODE = "UTMALDG"


def target(name: str) -> Target:
    """Look up a target by name.

    Raises
    ------
    ValueError
        If there is no such target. The message lists the targets and says what to do on another architecture.
    """
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
    oldest, newest = TARGETS["sm_80"].capability, TARGETS["sm_90a"].capability
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
        f"compute capability {major}.{minor} {why}. Supported targets: {', '.join(TARGETS)} (compute capability 8.0, "
        f"8.6, 8.9 and 9.0). Use one of these on such a device, or use torch.matmul on this one"
    )


def target_for(capability: tuple[int, int], *, wgmma: bool) -> Target | None:
    """Return the target for devices of this compute capability, or None."""
    found = [t for t in TARGETS.values() if t.capability == capability and t.wgmma == wgmma]
    return found[0] if found else None


def unserved(what: str, capability: tuple[int, int], device: str = "", advice: str = "") -> str:
    """Return the error message for an op that no kernel supports on this compute capability.

    Parameters
    ----------
    what : str
        The op and its operands' types.
    capability : tuple of int
        Compute capability of the device.
    device : str
        Name of the device, if known.
    advice : str
        What to do, instead of the usual advice.
    """
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


# Opcode bits (the lowest 9 of an instruction) of the instructions that sass.py counts.
# Read off nvdisasm 13.5's output for kernels by nvcc 13.0 and 13.5 for sm_80, sm_86, sm_89, sm_90 and sm_90a; no other
# instruction in these kernels shares the bits. tests/unit/test_sass.py compares with nvdisasm where it is installed.
OPCODES: dict[int, str] = {
    0x037: "IMMA",
    0x03C: "HMMA",
    0x03F: "DMMA",
    0x183: "LDL",
    0x187: "STL",
    0x1AE: "LDGSTS",
    0x1B4: "UTMALDG",
    0x1B5: "UTMASTG",
    0x1B6: "UTMAREDG",
    0x1BA: "UBLKCP",
    0x1F0: "HGMMA",
    0x1F1: "IGMMA",
    0x1F3: "QGMMA",
}
