"""The ledger of proven kernels: which compile tests passed with which kernels.

A kernel's key is of its source, the headers, the flags and the compilers. Where all of these are as they were, a
compile test has the same kernel, and says the same: it is skipped, with the day on which it passed, unless the store
has the kernel anyway. A test whose own text changed runs again. The command that compiles everything and writes the
ledger again::

    python -m tests.ledger                         # all compile tests
    python -m tests.ledger tests/compile/test_fp8.py    # some

It takes half an hour on two cores. CI compiles only what the ledger lacks.
"""

from __future__ import annotations

import datetime
import hashlib
import inspect
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

LEDGER = Path(__file__).parent / "golden" / "ledger.json"
RECORD = "CUTLASS_OPS_TESTS_RECORD"


def read() -> dict[str, Any]:
    """Return the entries: for each kernel its opcodes, the day, the compilers, and the tests with their digests."""
    return json.loads(LEDGER.read_text()) if LEDGER.exists() else {}


def digest(test: Callable[..., Any]) -> str:
    """Return what a test's text is known by."""
    return hashlib.sha256(inspect.getsource(test).encode()).hexdigest()[:16]


def proven(entries: dict[str, Any], key: str, name: str, text: str) -> str | None:
    """Return the day on which a test of this text passed with a kernel; None if it did not."""
    entry = entries.get(key)
    return entry["date"] if entry is not None and entry["tests"].get(name) == text else None


def note(kernels: dict[str, dict[str, Any]], name: str, text: str) -> None:
    """Write that a test passed, with each of these kernels: their keys, each with opcodes and compiler."""
    entries = read()
    today = datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat()
    for key, said in kernels.items():
        tests = entries.get(key, {}).get("tests", {})
        entries[key] = {**said, "date": today, "tests": dict(sorted({**tests, name: text}.items()))}
    LEDGER.write_text(json.dumps(dict(sorted(entries.items())), indent=1) + "\n")


def main() -> int:
    """Run compile tests, with every kernel compiled and proven."""
    import pytest

    os.environ[RECORD] = "1"
    if not sys.argv[1:]:  # all of them: kernels of earlier sources go
        LEDGER.write_text("{}\n")
    return pytest.main(["-m", "compile", *(sys.argv[1:] or ["tests/compile"])])


if __name__ == "__main__":
    raise SystemExit(main())
