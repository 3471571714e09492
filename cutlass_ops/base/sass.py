"""The instructions in a kernel's machine code: count them, and clear operand reuse flags that may be stale.

The opcodes are decoded from the artifact's bytes, so this works without cuobjdump and nvdisasm, which minimal toolkits
lack, and on deployment machines without a toolkit. Two facts make it possible. Artifacts hold uncompressed code. From
sm_70 on, every instruction has 16 bytes, whose lowest 9 bits are the opcode without its operand form.

A flag on an operand (``R23.reuse``) keeps the register's value at its operand slot, for an instruction that reads the
same register at the same slot. Writing the register does not renew what is kept there. ptxas 13.0 sometimes leaves a
flag whose register is written before it is read again: one of 2,107 kernels had one, and gave a zero for one result in
192 without any other sign. A flag saves a read of the register file and means nothing else. So clearing one is always
right, and every flag that may be stale is cleared before a kernel is proved and stored.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from cutlass_ops.base import elf
from cutlass_ops.base.errors import CompileError

# Opcode bits (the lowest 9 of an instruction) of the instructions that are counted.
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
# Those with a sparse form, which has this bit in its upper half. It is counted by a name of its own: HGMMA.SP.
_WITH_SPARSE, _IS_SPARSE = (0x1F0, 0x1F1, 0x1F3), 1 << 9
SPARSE: dict[int, str] = {op: f"{OPCODES[op]}.SP" for op in _WITH_SPARSE}
COUNTED = frozenset((*OPCODES.values(), *SPARSE.values()))


def count_opcodes(library: Path) -> dict[str, int]:
    """Count the instructions of :data:`OPCODES` in a shared library."""
    return opcodes(library.read_bytes(), str(library))


def opcodes(library: bytes, where: str) -> dict[str, int]:
    """Count a library's instructions in `COUNTED`. Raises CompileError if it has no readable code."""
    counts: Counter[str] = Counter()
    sections = 0
    try:
        for code in elf.gpu_code(library):
            sections += 1
            counts.update(
                SPARSE[op] if high & _IS_SPARSE and op in SPARSE else OPCODES[op]
                for low, high in struct.iter_unpack("<QQ", code)
                if (op := low & 0x1FF) in OPCODES
            )
    except struct.error as exc:
        raise CompileError(f"the machine code in {where} cannot be read: {exc}") from None
    if not sections:
        raise CompileError(f"{where} has no uncompressed GPU machine code")
    return dict(sorted(counts.items()))


# ---- Operand reuse flags ---------------------------------------------------------------------------------------------


_INSTRUCTION = struct.Struct("<QQ")
_ZERO = 255  # RZ
_FLAGS = 58  # in the upper half: three bits, one for each slot
_ANY_FLAG = 0b111 << _FLAGS
# How far a flag is followed. A longer-kept value has been displaced: no two reads of a slot are that far apart.
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

    It may be stale if the register is written before the same slot reads it. Some instructions write no register, but
    their bits look as if they did. A flag found for that reason alone can be cleared at no cost. ``code`` is the
    contents of an executable section. Raises struct.error if the last instruction is not whole.
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
    """Return which register an instruction, in two halves, keeps at each slot with a flag; None if it reads none."""
    return {slot: _read(low, high, slot) for slot in range(3) if high >> (_FLAGS + slot) & 1}


def mended(library: bytes) -> bytes:
    """Return a kernel's library without flags that may be stale. Raises CompileError if its code cannot be read."""
    for code in _executable(library):
        clean = bytearray(code)
        for offset, slot in stale(code):
            low, high = _INSTRUCTION.unpack_from(clean, offset)
            _INSTRUCTION.pack_into(clean, offset, low, high & ~(1 << (_FLAGS + slot)))
        library = library.replace(code, bytes(clean))
    return library


def require_none_stale(library: bytes, where: str) -> None:
    """Raise CompileError if machine code has flags that may be stale, or cannot be read."""
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
