"""Find and clear operand reuse flags that ptxas left on registers which are written in between.

A flag on an operand (``R23.reuse``) keeps the register's value at its operand slot, for an instruction that reads the
same register at the same slot. Writing the register does not renew what is kept there. ptxas 13.0 sometimes leaves a
flag whose register is written before it is read again: one of 2,107 kernels had one, and gave a zero for one result in
192 without any other sign. A flag saves a read of the register file and means nothing else. So clearing one is always
right, and every flag that may be stale is cleared before a kernel is proved and stored.

An instruction has 16 bytes. The bits read here were read off nvdisasm's output for sm_80, sm_86, sm_89, sm_90 and
sm_90a, as those of :data:`cutlass_ops.base.arch.OPCODES` were.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from cutlass_ops.base import elf
from cutlass_ops.base.errors import CompileError

_INSTRUCTION = struct.Struct("<QQ")
_ZERO = 255  # RZ
_FLAGS = 58  # in the upper half: three bits, one for each slot
_ANY_FLAG = 0b111 << _FLAGS
# How far a flag is followed. What is kept for longer has been displaced: no two reads of a slot are that far apart.
_WINDOW = 128
# Operation codes: the lowest nine bits. Below the first are those that compute with registers of a thread, from there
# to the second those with registers of a warp, and from the third on those that use memory.
_UNIFORM, _END_OF_UNIFORM, _MEMORY = 0x80, 0xD0, 0x180
_WRITE_NONE = frozenset(
    (
        *(0x004, 0x00B, 0x00C, 0x01C, 0x02A, 0x02D, 0x034),  # R2P, FSETP, ISETP, PLOP3, DSETP, PREEXIT, HSETP2
        *(0x044, 0x185, 0x186, 0x187, 0x188),  # stores: STSM, ST, STG, STL, STS
        *(0x118, 0x145, 0x147, 0x148, 0x14D, 0x192, 0x1C6),  # NOP, BSSY, BRA, WARPSYNC, EXIT, MEMBAR, FENCE
        *(0x11D, 0x1A7, 0x1AE, 0x1B4, 0x1B5, 0x1C3),  # BAR, SYNCS, LDGSTS, UTMALDG, UTMASTG, S2UR
    )
)
# These write two registers or more, as loads do: CS2R, IMAD.WIDE, DMUL, DADD, DFMA, IMMA, HMMA, DMMA.
_WIDE = frozenset((0x005, 0x025, 0x028, 0x029, 0x02B, 0x037, 0x03C, 0x03F))
_MOST_WRITTEN = 4
# The form of the operands is in bits 9 to 11. Where the last one is an immediate, a constant or a uniform register, the
# second one has the third's place.
_ALL_REGISTERS, _LAST_IS_NONE = 1, (2, 3, 7)
# The second operand of additions uses the third slot.
_ADDITIONS = frozenset((0x021, 0x030))  # FADD, HADD2


def stale(code: bytes) -> Iterator[tuple[int, int]]:
    """Yield each flag that may be stale, as the offset of its instruction and its slot.

    It may be where the register is written before the same slot reads it. Some instructions write none where others
    name the one that they write; a flag that is found for that alone costs nothing when it is cleared.

    Parameters
    ----------
    code : bytes
        The contents of an executable section.

    Raises
    ------
    struct.error
        If the last instruction is not whole.
    """
    instructions = list(_INSTRUCTION.iter_unpack(code))
    for index, (low, high) in enumerate(instructions):
        if not high & _ANY_FLAG:
            continue
        later = instructions[index + 1 : index + _WINDOW]
        yield from (
            (index * _INSTRUCTION.size, s) for s, kept in flagged(low, high).items() if _is_stale(later, kept, s)
        )


def flagged(low: int, high: int) -> dict[int, int | None]:
    """Return which register an instruction keeps at each slot with a flag; None where it reads none there.

    Parameters
    ----------
    low, high : int
        The two halves of its 16 bytes.
    """
    return {slot: _read(low, high, slot) for slot in range(3) if high >> (_FLAGS + slot) & 1}


def mended(library: bytes) -> bytes:
    """Return a kernel's shared library without the flags that may be stale.

    Raises
    ------
    CompileError
        If its machine code cannot be read.
    """
    for code in _executable(library):
        clean = bytearray(code)
        for offset, slot in stale(code):
            low, high = _INSTRUCTION.unpack_from(clean, offset)
            _INSTRUCTION.pack_into(clean, offset, low, high & ~(1 << (_FLAGS + slot)))
        library = library.replace(code, bytes(clean))
    return library


def require_none_stale(library: bytes, where: str) -> None:
    """Require machine code without flags that may be stale.

    Parameters
    ----------
    library : bytes
        Contents of the file.
    where : str
        Its path, for messages.

    Raises
    ------
    CompileError
        If there is one, or the machine code cannot be read.
    """
    for code in _executable(library):
        for offset, slot in stale(code):
            raise CompileError(
                f"the machine code in {where} may read a register's former value at {offset:#x}, operand {slot + 1}: "
                "the compiler left a reuse flag on a register that is written in between; compile the kernel again "
                "with this version of cutlass_ops, which clears such flags"
            )


def _executable(library: bytes) -> list[bytes]:
    try:
        return list(elf.gpu_code(library))
    except struct.error as exc:
        raise CompileError(f"the machine code cannot be read: {exc}") from None


def _is_stale(later: list[tuple[int, int]], kept: int | None, slot: int) -> bool:
    """Return whether a register is written before an instruction certainly reads it at a slot."""
    if kept is None or kept == _ZERO:
        return False
    for low, high in later:
        if low & 0x1FF < _UNIFORM and _read(low, high, slot) == kept:
            return False
        if kept in _written(low):
            return True
    return False


def _read(low: int, high: int, slot: int) -> int | None:
    """Return the register that an instruction reads at a slot, or None."""
    form = low >> 9 & 7
    first, second, third = low >> 24 & 255, low >> 32 & 255, high & 255
    if slot == 0:
        return first
    if form in _LAST_IS_NONE:
        return third if slot == 1 else None
    if form != _ALL_REGISTERS:
        return third if slot == 2 else None
    return third if slot == 2 and low & 0x1FF not in _ADDITIONS else second


def _written(low: int) -> range:
    """Return the registers that an instruction may write."""
    operation, first = low & 0x1FF, low >> 16 & 255
    if operation in _WRITE_NONE or _UNIFORM <= operation < _END_OF_UNIFORM or first == _ZERO:
        return range(0)
    wide = operation >= _MEMORY or operation in _WIDE
    return range(first, first + (_MOST_WRITTEN if wide else 1))
