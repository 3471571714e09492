"""Rendered kernels that are kept whole, each under the declaration in its own first lines.

A change of templates or lowering shows here as the difference that it makes to kernels. After a change that is meant::

    python -m tests.golden.kernels

writes them again; look at what git says is different. To keep another kernel, put its rendered file beside them.
"""

from __future__ import annotations

import json
from pathlib import Path

from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.kinds.render import source

FOLDER = Path(__file__).parent / "kernels"


def paths() -> list[Path]:
    """Return the kept files."""
    return sorted(FOLDER.glob("*.cu"))


def declaration(path: Path) -> KernelSpec:
    """Return what a rendered file says of itself."""
    lines = path.read_text().splitlines()
    last = next(at for at, line in enumerate(lines) if line.startswith("// Rebuild:"))
    text = " ".join(line.removeprefix("//   ") for line in lines[:last] if line.startswith("//   "))
    return KernelSpec.from_json(json.loads(text))


if __name__ == "__main__":
    for kept in paths():
        kept.write_text(source(declaration(kept)))
