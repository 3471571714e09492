"""Which instructions machine code holds, counted.

The opcodes are decoded here, from the artifact's own bytes. That always works: no toolkit needs to bring cuobjdump or
nvdisasm (the minimal ones do not), nothing is started, and a deployed kernel can be examined where no toolkit is.
It is possible because artifacts hold their machine code uncompressed, and because from sm_70 on every instruction
has 16 bytes, of which the lowest 9 bits are the opcode without its operand form.
"""

from __future__ import annotations

import struct
from collections import Counter
from pathlib import Path

from cutlass_ops.base import elf
from cutlass_ops.base.arch import OPCODES
from cutlass_ops.base.errors import CompileError


def count_opcodes(library: Path) -> dict[str, int]:
    """Count the instructions of :data:`cutlass_ops.base.arch.OPCODES` in a shared library, as :func:`opcodes` does."""
    return opcodes(library.read_bytes(), str(library))


def opcodes(library: bytes, where: str) -> dict[str, int]:
    """Count the instructions of :data:`cutlass_ops.base.arch.OPCODES` in a shared library's bytes.

    Parameters
    ----------
    library : bytes
        What the file holds.
    where : str
        Where it lies, for messages.

    Raises
    ------
    CompileError
        If the library holds no readable machine code.
    """
    counts: Counter[str] = Counter()
    sections = 0
    try:
        for image in elf.gpu_images(library):
            for code in (s.data for s in elf.sections(image) if s.executable):
                sections += 1
                counts.update(
                    OPCODES[op] for low, _ in struct.iter_unpack("<QQ", code) if (op := low & 0x1FF) in OPCODES
                )
    except struct.error as exc:
        raise CompileError(f"the machine code in {where} cannot be read: {exc}") from None
    if not sections:
        raise CompileError(f"{where} holds no uncompressed GPU machine code")
    return dict(sorted(counts.items()))
