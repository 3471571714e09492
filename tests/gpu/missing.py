"""Build the kernels that tests without a compiler said they lack, side by side.

    CUTLASS_OPS_JIT=0 python -m pytest tests/gpu/test_fp8.py tests/gpu/test_modules.py > log.txt
    python -m tests.gpu.missing log.txt

A test stops at the first kernel that is missing, so this takes as many turns as a test needs kernels, two or three. A
turn costs what the slowest kernel does, where tests that compile for themselves wait for one kernel after the other.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from cutlass_ops.compilation.builder import build_many
from cutlass_ops.declare.quantizing import Declaration, declaration_from_json

_SAID = re.compile(r"SPEC\.json: *(?=\{)")


def missing(text: str) -> Iterator[Declaration]:
    """Yield the kernels that a log of pytest says are missing, each once."""
    decoder, seen = json.JSONDecoder(), set()
    for said in _SAID.finditer(text):
        found, end = decoder.raw_decode(text, said.end())
        if (spec := text[said.end() : end]) not in seen:
            seen.add(spec)
            yield declaration_from_json(found)


def main() -> None:
    """Build what the logs named on the command line lack."""
    found = dict.fromkeys(spec for path in sys.argv[1:] for spec in missing(Path(path).read_text(errors="replace")))
    print(f"{len(found)} missing")
    build_many(list(found))


if __name__ == "__main__":
    main()
