"""Check in the machine code that a kernel uses the Tensor Cores, and reads no register's former value."""

from __future__ import annotations

from pathlib import Path

from cutlass_ops.base import sass
from cutlass_ops.base.errors import CompileError
from cutlass_ops.base.mma import mma_of, pairs
from cutlass_ops.base.sass import opcodes
from cutlass_ops.declare.compressing import CompressSpec
from cutlass_ops.declare.quantizing import Declaration, QuantizeSpec
from cutlass_ops.kinds.table import kind_of


def prove_tensor_cores(library: Path, spec: Declaration) -> dict[str, int]:
    """Call :func:`proved` with a library on disk."""
    return proved(library.read_bytes(), str(library), spec)


def proved(library: bytes, where: str, spec: Declaration) -> dict[str, int]:
    """Check that a kernel has the instructions that its configuration requires, and return its opcode counts."""
    sass.require_none_stale(library, where)
    counts = opcodes(library, where)
    if isinstance(spec, QuantizeSpec | CompressSpec):
        return counts
    mma = mma_of(spec.a.dtype, spec.b.dtype)
    if mma is None:
        raise CompileError(f"no instruction multiplies {spec.a.dtype} by {spec.b.dtype}: there are {pairs()}")
    unit = mma.by(spec.config.family)
    if unit is None:
        raise CompileError(f"no {spec.config.family} instruction multiplies {spec.a.dtype} by {spec.b.dtype}")
    missing = [op for op in kind_of(spec.config).proof(spec.config, unit) if not counts.get(op)]
    if missing:
        found = ", ".join(f"{n} {op}" for op, n in counts.items()) or "none of the instructions looked for"
        raise CompileError(
            f"the machine code for {spec.target} holds no {' and no '.join(missing)} instruction, which a "
            f"{spec.config.arch} configuration must use; it holds {found}"
        )
    return counts
