"""The Tensor Core contract: what each target's hardware offers, in one table.

Validation, tuning and offline generation read these values here and nowhere else.

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
        The name that nvcc gives it, ``"sm_90a"``.
    capability : tuple of int
        Compute capability of the devices that run its machine code.
    shared_memory : int
        Bytes of shared memory that one thread block may use.
    shared_memory_per_sm : int
        Bytes of shared memory on one multiprocessor, each resident block taking 1 KiB more than it asks for.
    blocks_per_sm, threads_per_sm : int
        Thread blocks and threads that one multiprocessor holds at a time, at most.
    wgmma : bool
        Whether warpgroup-wide matrix instructions, the bulk tensor copy engine and clusters are there.
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
        """The ``-gencode`` value for nvcc: this target's machine code and no PTX."""
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
MAX_GRID_Y = 65535
REGISTERS_PER_SM = 64 * KIB
MAX_REGISTERS_PER_THREAD = 255
OVERLAPS = (9, 0)  # compute capability from which a kernel may start while the one before it ends
WARP = 32
WARPGROUP = 128
CACHE_LINE_BYTES = 128
SWIZZLE_BYTES = (128, 64, 32)  # widths of the swizzled layouts that TMA and wgmma share, the widest first
UNSWIZZLED_BYTES = 16  # of the layout that serves every other extent
MAX_CLUSTER = 8  # 16 is a non-portable size: it needs an opt-in and may fail to be scheduled

# wgmma: M is 64 for a warpgroup, N any multiple of 8 up to 256, K 32 bytes.
WGMMA_M = 64
WGMMA_N_STEP = 8
WGMMA_N_MAX = 256
WGMMA_K_BYTES = 32

# cp.async copies 4, 8 or 16 bytes; narrower loads go through registers, which allows two stages only.
CP_ASYNC_BYTES = (4, 8, 16)
TMA_ALIGNMENT_BYTES = 16
TMA_LOAD_OPCODE = "UTMALDG"


def target(name: str) -> Target:
    """Look up a target by name.

    Raises
    ------
    ValueError
        If there is no such target; the message lists those there are, and says what to do for another architecture.
    """
    if isinstance(name, str) and name in TARGETS:
        return TARGETS[name]
    raise ValueError(f"target is {name!r}, for which there are no kernels: {_instead(name)}")


_SM = re.compile(r"sm_?(?P<number>[0-9]{2,3})[af]?")


def _instead(name: object) -> str:
    """Say what to do about a target that is none of these."""
    match = _SM.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        return f"use one of {', '.join(TARGETS)}"
    major, minor = divmod(int(match["number"]), 10)
    oldest, newest = TARGETS["sm_80"].capability, TARGETS["sm_90a"].capability
    same = ", ".join(t.name for t in TARGETS.values() if t.capability == (major, minor))
    if same:
        return f"use one of {same}"
    if (major, minor) < oldest:
        why = "is older than the instructions that kernels are made of (mma.sync on BF16, cp.async)"
    elif (major, minor) > newest:
        why = "does not run their machine code, and they hold no PTX"
    else:
        why = "has none of its own"
    return (
        f"compute capability {major}.{minor} {why}. Supported are {', '.join(TARGETS)}, compute capability 8.0, 8.6, "
        f"8.9 and 9.0: name one of these and run on such a device, or use torch.matmul on this one"
    )


def target_for(capability: tuple[int, int], *, wgmma: bool) -> Target | None:
    """Return the target whose machine code runs on a device of this compute capability, or None."""
    found = [t for t in TARGETS.values() if t.capability == capability and t.wgmma == wgmma]
    return found[0] if found else None


def unserved(what: str, capability: tuple[int, int], device: str = "") -> str:
    """Return the message for what no kernel serves on devices of a compute capability: why, and what to do.

    Parameters
    ----------
    what : str
        The op, with its operands' types.
    capability : tuple of int
        Of the device.
    device : str
        Its name, where that is known.
    """
    major, minor = capability
    known = sorted({t.capability for t in TARGETS.values()})
    *others, last = (f"sm_{a}{b}" for a, b in known)
    served = f"{', '.join(others)} and {last}"
    there = f"{device and device + ', '}compute capability {major}.{minor} (sm_{major}{minor})"
    where = f"no kernel serves {what} on {there}"
    if capability in known:
        return f"{where}: use PyTorch's operation for these types, or other layouts or alignments"
    age = "newer devices are not supported yet" if capability > known[-1] else "this device is not supported"
    return (
        f"{where}: there are kernels for {served}, and {age}. Use PyTorch's operation on it; on the CPU the reference "
        "implementation computes the same"
    )


def other_platform() -> str:
    """Return why kernels are neither compiled nor loaded on this machine; an empty string on Linux on x86-64."""
    here = f"{sys.platform} on {os.uname().machine}"
    if here == "linux on x86_64":
        return ""
    return (
        f"kernels are compiled and run on Linux on x86-64, and this is {here}: here the reference implementation alone "
        "works, on tensors on the CPU"
    )


def no_device(device: object) -> str:
    """Return the message for tensors that are on neither a CUDA device nor the CPU."""
    return (
        f"tensors are on {device}: kernels run on CUDA devices, the reference implementation on the CPU. Use PyTorch's "
        "operation there, or move the tensors"
    )


# What of a machine instruction's lowest bits says what it is, for those that are counted (sass.py).
# Read off nvdisasm 13.5's output for kernels by nvcc 13.0 and 13.5 for sm_80, sm_86, sm_89, sm_90 and sm_90a; no other
# instruction in them shares these bits. tests/unit/test_sass.py compares with nvdisasm again, where there is one.
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
