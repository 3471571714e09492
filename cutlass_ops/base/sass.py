"""Count the instructions in a kernel's machine code.

The opcodes are decoded from the artifact's bytes, so this works without cuobjdump and nvdisasm, which minimal toolkits
lack, and on deployment machines without a toolkit. Two facts make it possible. Artifacts hold uncompressed code. From
sm_70 on, every instruction has 16 bytes, whose lowest 9 bits are the opcode without its operand form.
"""

from __future__ import annotations

import struct
from collections import Counter
from pathlib import Path

from cutlass_ops.base import elf
from cutlass_ops.base.arch import OPCODES
from cutlass_ops.base.errors import CompileError


def count_opcodes(library: Path) -> dict[str, int]:
    """Count the instructions of :data:`cutlass_ops.base.arch.OPCODES` in a shared library."""
    return opcodes(library.read_bytes(), str(library))


def opcodes(library: bytes, where: str) -> dict[str, int]:
    """Count the instructions of :data:`cutlass_ops.base.arch.OPCODES` in a shared library's bytes.

    Parameters
    ----------
    library : bytes
        Contents of the file.
    where : str
        Its path, for messages.

    Raises
    ------
    CompileError
        If the library holds no readable machine code.
    """
    counts: Counter[str] = Counter()
    sections = 0
    try:
        for code in elf.gpu_code(library):
            sections += 1
            counts.update(OPCODES[op] for low, _ in struct.iter_unpack("<QQ", code) if (op := low & 0x1FF) in OPCODES)
    except struct.error as exc:
        raise CompileError(f"the machine code in {where} cannot be read: {exc}") from None
    if not sections:
        raise CompileError(f"{where} has no uncompressed GPU machine code")
    return dict(sorted(counts.items()))
