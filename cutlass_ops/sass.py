"""Proof from the machine code itself that a kernel uses the Tensor Cores.

The opcodes are decoded here, from the artifact's own bytes. That always works: no toolkit needs to bring cuobjdump or
nvdisasm (the minimal ones do not), nothing is started, and a deployed kernel can be examined where no toolkit is.
It is possible because artifacts hold their machine code uncompressed, and because from sm_70 on every instruction
has 16 bytes, of which the lowest 9 bits are the opcode without its operand form.
"""

from __future__ import annotations

import struct
from collections import Counter
from pathlib import Path

from cutlass_ops import arch, elf
from cutlass_ops.arch import OPCODES
from cutlass_ops.config import GemvConfig
from cutlass_ops.errors import CompileError
from cutlass_ops.spec import KernelSpec


def count_opcodes(library: Path) -> dict[str, int]:
    """Count the instructions of :data:`cutlass_ops.arch.OPCODES` in a shared library, as :func:`opcodes` does."""
    return opcodes(library.read_bytes(), str(library))


def opcodes(library: bytes, where: str) -> dict[str, int]:
    """Count the instructions of :data:`cutlass_ops.arch.OPCODES` in a shared library's bytes.

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


def prove_tensor_cores(library: Path, spec: KernelSpec) -> dict[str, int]:
    """Return the opcode counts of a library on disk, as :func:`proved` does."""
    return proved(library.read_bytes(), str(library), spec)


def proved(library: bytes, where: str, spec: KernelSpec) -> dict[str, int]:
    """Return a kernel's opcode counts, once they show the instructions that its declaration promises.

    An Sm90 configuration promises ``wgmma`` (HGMMA) and bulk tensor copies of the operands (UTMALDG), an Sm80
    configuration ``mma.sync`` (HMMA), a GEMV configuration that too, from eight rows on.

    Parameters
    ----------
    library : bytes
        What the file holds.
    where : str
        Where it lies, for messages.
    spec : KernelSpec
        The declaration.

    Raises
    ------
    CompileError
        If an expected instruction is missing: the kernel would run, but not as declared.
    """
    counts = opcodes(library, where)
    target = arch.target(spec.target)
    if isinstance(spec.config, GemvConfig):
        expected = [target.mma_opcode] * spec.config.by_tile
    elif spec.sm90 is None:
        expected = [target.mma_opcode]
    else:
        expected = [target.wgmma_opcode, "UTMALDG"]
    missing = [op for op in expected if not counts.get(op)]
    if missing:
        found = ", ".join(f"{n} {op}" for op, n in counts.items()) or "none of the instructions looked for"
        raise CompileError(
            f"the machine code for {spec.target} holds no {' and no '.join(missing)} instruction, which a "
            f"{spec.config.arch} configuration must use; it holds {found}"
        )
    return counts
