"""The command line: ``python -m cutlass_ops``, or ``cutlass-ops``.

Exit codes: 0 success, 1 an error or a negative answer, 2 wrong usage, 3 a kernel does not compile, 4 a compiler, GPU,
store or kernel is missing or unusable, 5 a bundle is invalid, 130 interrupted.

A command imports what it needs when it runs: importing PyTorch takes a second, and help and version do not need it.
"""

from cutlass_ops.tools.cli.program import app, main

__all__ = ["app", "main"]
