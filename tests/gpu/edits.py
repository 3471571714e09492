"""Edit the machine code of a kernel for Hopper, so that a race shows: delay single instructions, or take a wait away.

An instruction has 16 bytes. Its upper half has a control word, by which the compiler says how long the warp waits
before the next one, and for which scoreboards before this one. A control word can delay by 15 cycles at most, which no
race of memory shows. So a delayed instruction moves behind the end of the code, where sections are filled with NOPs,
and a branch leads there and back:

    before:  I                     after:  BRA room          room:  S2UR UR60, SR_CLOCKLO
                                                                    ULOP3.LUT UR60, UR60, most
                                                                    NANOSLEEP UR60
                                                                    I
                                                                    BRA after

Each warp sleeps as long as the lowest bits of its clock say, so that warps come apart. ptxas gives uniform registers
from the lowest one on, and only ELECT writes UR62: no kernel has UR60 (`tests/compile/test_edits.py` looks).
"""

from __future__ import annotations

import dataclasses
import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cutlass_ops.artifacts.entry import LIBRARY, Artifact
from cutlass_ops.base import elf

# What is delayed: the operation codes of instructions that wait, signal, load, store or multiply.
NAMES = {
    0x02D: "PREEXIT",
    0x02E: "ACQBULK",
    0x03B: "LDSM",
    0x044: "STSM",
    0x11A: "DEPBAR",
    0x11D: "BAR",
    0x181: "LDG",
    0x184: "LDS",
    0x186: "STG",
    0x188: "STS",
    0x1A7: "SYNCS",
    0x1B4: "UTMALDG",
    0x1B5: "UTMASTG",
    0x1B6: "UTMAREDG",
    0x1B7: "UTMACMDFLUSH",
    0x1C5: "WARPGROUP",
    0x1C6: "FENCE",
    0x1C7: "UCGABAR",
    0x1F0: "HGMMA",
    0x1F1: "IGMMA",
    0x1F3: "QGMMA",
}
# What is taken away to plant a race: what waits for other warps, for copies, or orders them. Some were seen to be
# redundant in some kernels.
WAITS = ("BAR", "DEPBAR", "FENCE", "WARPGROUP", "branch")

_INSTRUCTION = struct.Struct("<QQ")
_OPERATION, _FORM = 0x1FF, 0xFFF
_NOP, _BRA, _TRY_WAIT = 0x118, 0x147, 0x5A7
_ALWAYS = 0x7000  # the predicate PT
_REUSE = 0b1111 << 58
_NO_BARRIER, _SCOREBOARD = 7, 5
_FLAGS_BEFORE = 8  # instructions whose reuse flags are cleared: a flag lasts until the same warp's next ones
_ROOM = 5


@dataclass(frozen=True)
class Site:
    """An instruction that may be edited.

    Attributes
    ----------
    at : int
        Its place in the library.
    name : str
        Its name, or "branch" where a wait for a barrier goes on waiting.
    start, room : int
        Where its section and the NOPs at that section's end begin.
    """

    at: int
    name: str
    start: int
    room: int


def control(stall: int, waits: int = 0, sets: int = _NO_BARRIER) -> int:
    """Return a control word: cycles until the next instruction, scoreboards to wait for, and the one that is set."""
    may_others_run = stall < 8  # longer waits have other codes
    return stall << 41 | may_others_run << 45 | sets << 46 | _NO_BARRIER << 49 | waits << 52


def sites(library: bytes) -> Iterator[Site]:
    """Yield what may be edited, of kernels whose code has room behind it.

    Raises
    ------
    ValueError
        If two sections have the same code.
    """
    for code in elf.gpu_code(library):
        if library.count(code) != 1:
            raise ValueError("two sections have the same code")
        start = library.find(code)
        instructions = list(_INSTRUCTION.iter_unpack(code))
        last = len(instructions)
        while last and instructions[last - 1][0] & _OPERATION == _NOP:
            last -= 1
        if len(instructions) - last < _ROOM:
            continue
        before = 0
        for index, (low, high) in enumerate(instructions[:last]):
            waits = before & _FORM == _TRY_WAIT and low & _OPERATION == _BRA and low >> 15 & 1 and not high & 1
            name = "branch" if waits else NAMES.get(low & _OPERATION)
            if name is not None:
                yield Site(start + index * 16, name, start, start + last * 16)
            before = low


def delayed(library: bytes, site: Site, most: int) -> bytes:
    """Return a library in which each warp sleeps before an instruction, for up to `most` nanoseconds.

    `most` is one less than a power of two.
    """
    edited = bytearray(library)
    low, high = _INSTRUCTION.unpack_from(edited, site.at)
    for at in range(max(site.start, site.at - _FLAGS_BEFORE * 16), site.at, 16):
        earlier_low, earlier_high = _INSTRUCTION.unpack_from(edited, at)
        _INSTRUCTION.pack_into(edited, at, earlier_low, earlier_high & ~_REUSE)
    _INSTRUCTION.pack_into(edited, site.at, *_branch(site.at, site.room))
    asleep = (
        (0x3C09C3 | _ALWAYS, control(4, sets=_SCOREBOARD) | 0x5000),  # S2UR UR60, SR_CLOCKLO
        (most << 32 | 0x3C3C0892 | _ALWAYS, control(15, 1 << _SCOREBOARD) | 0x0F8EC03F),  # ULOP3.LUT UR60, UR60, most
        (0x3C << 32 | 0x0D5D | _ALWAYS, control(5) | 0x0B800000),  # NANOSLEEP UR60
        (low, high & ~_REUSE),
        _branch(site.room + 4 * 16, site.at + 16),
    )
    for index, instruction in enumerate(asleep):
        _INSTRUCTION.pack_into(edited, site.room + index * 16, *instruction)
    return bytes(edited)


def without(library: bytes, site: Site) -> bytes:
    """Return a library with a NOP in an instruction's place, which waits for the same scoreboards as it did."""
    edited = bytearray(library)
    _, high = _INSTRUCTION.unpack_from(edited, site.at)
    _INSTRUCTION.pack_into(edited, site.at, 0x0918 | _ALWAYS, high & ~_REUSE & ~((1 << 41) - 1))
    return bytes(edited)


def written(artifact: Artifact, library: bytes, folder: Path) -> Artifact:
    """Write an edited library; return an artifact that loads it as any other."""
    path = folder / LIBRARY
    path.write_bytes(library)
    path.chmod(0o600)
    sha256 = hashlib.sha256(library).hexdigest()
    files = {**artifact.manifest["files"], LIBRARY: {"sha256": sha256, "size": len(library)}}
    manifest = {**artifact.manifest, "files": files}
    return dataclasses.replace(artifact, folder=folder, sha256=sha256, manifest=manifest, again=None)


def _branch(at: int, to: int) -> tuple[int, int]:
    """Return a branch: its distance is counted in pieces of four bytes from the next instruction, in 56 bits."""
    distance = (to - at - 16) // 4
    low = (distance & 0xFF) << 16 | (distance >> 8 & (1 << 30) - 1) << 34 | 0x0947 | _ALWAYS
    return low, control(5) | 0x03800000 | (distance >> 38 & (1 << 18) - 1)
