"""Build the kernels that tests lack, side by side, and run the tests.

    python -m tests.gpu.missing tests/gpu/test_fp8.py tests/gpu/test_modules.py
    CUTLASS_OPS_JIT=0 python -m pytest tests/gpu/test_fp8.py > log.txt; python -m tests.gpu.missing log.txt

Without a compiler a test stops at the first kernel that is missing, so files of tests take as many turns as a test
needs kernels, two or three, each with fewer tests. A turn costs what the slowest kernel does, where tests that compile
for themselves wait for one kernel after the other. Logs are built from, and nothing is run.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from cutlass_ops.compilation.builder import build_many
from cutlass_ops.declare.quantizing import Declaration, declaration_from_json

_SAID = re.compile(r"SPEC\.json: *(?=\{)")
_TURNS = 6  # at most


def missing(text: str) -> Iterator[Declaration]:
    """Yield the kernels that a log of pytest says are missing, each once."""
    decoder, seen = json.JSONDecoder(), set()
    for said in _SAID.finditer(text):
        found, end = decoder.raw_decode(text, said.end())
        if (spec := text[said.end() : end]) not in seen:
            seen.add(spec)
            yield declaration_from_json(found)


def build(logs: Sequence[str]) -> int:
    """Build what logs say is missing; return how many kernels that is."""
    found = dict.fromkeys(spec for log in logs for spec in missing(log))
    print(f"{len(found)} missing", flush=True)
    build_many(list(found))
    return len(found)


def run(tests: Sequence[str]) -> int:
    """Build what tests lack, turn by turn; return the exit status. A turn runs what failed in the one before.

    What fails in the end and lacks no kernel runs once more with a compiler, since that may be what it needs.
    """
    with tempfile.TemporaryDirectory() as folder:
        pytest = [sys.executable, "-m", "pytest", "-q", "-o", f"cache_dir={folder}", *tests]
        for _ in range(_TURNS):
            turn = subprocess.run(pytest, env=os.environ | {"CUTLASS_OPS_JIT": "0"}, stdout=subprocess.PIPE, text=True)
            print(turn.stdout.rstrip().rpartition("\n")[2], flush=True)
            if turn.returncode == 0:
                return 0
            pytest += [] if "--lf" in pytest else ["--lf", "--lfnf=none"]
            if not build([turn.stdout]):
                break
        return subprocess.run(pytest).returncode


def main() -> None:
    """Build what the logs named on the command line lack, or run the tests."""
    logs = [Path(name) for name in sys.argv[1:] if name.endswith((".txt", ".log"))]
    if logs:
        build([log.read_text(errors="replace") for log in logs])
    else:
        sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
