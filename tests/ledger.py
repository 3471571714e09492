"""The ledger of proven kernels: which compile tests passed with which kernels.

A kernel's key is of its source, the headers, the flags and the compilers. Where all of these are as they were, a
compile test has the same kernel, and says the same: it is skipped, with the day on which it passed, unless the store
has the kernel anyway. A test whose own text changed runs again. After a change of templates or headers::

    python -m tests.ledger                              # what the ledger lacks, as CI would compile it again and again
    python -m tests.ledger --all                        # every kernel, in half an hour on two cores
    python -m tests.ledger tests/compile/test_fp8.py    # some tests

A test's kernels of earlier sources go as it is noted.
"""

from __future__ import annotations

import datetime
import hashlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

LEDGER = Path(__file__).parent / "golden" / "ledger.json"
RECORD = "CUTLASS_OPS_TESTS_RECORD"
# Tests of how the library compiles, of which a kernel's key knows nothing: they always run.
ALWAYS = ("::test_a_file_of_several_gives_the_bytes_of_each_alone[sm80]",)


def read() -> dict[str, Any]:
    """Return the entries: for each kernel its opcodes, the day, the compilers, and the tests with their digests."""
    return json.loads(LEDGER.read_text()) if LEDGER.exists() else {}


def digest(test: Callable[..., Any]) -> str:
    """Return what a test's text is known by."""
    return hashlib.sha256(inspect.getsource(test).encode()).hexdigest()[:16]


def proven(entries: dict[str, Any], key: str, name: str, text: str) -> str | None:
    """Return the day on which a test of this text passed with a kernel; None if it did not."""
    entry = None if name.endswith(ALWAYS) else entries.get(key)
    return entry["date"] if entry is not None and entry["tests"].get(name) == text else None


def note(kernels: dict[str, dict[str, Any]], name: str, text: str) -> None:
    """Write that a test passed, with these kernels alone: their keys, each with opcodes and compiler."""
    entries = read()
    for entry in entries.values():
        entry["tests"].pop(name, None)
    today = datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat()
    for key, said in kernels.items():
        tests = entries.get(key, {}).get("tests", {})
        entries[key] = {**said, "date": today, "tests": dict(sorted({**tests, name: text}.items()))}
    kept = {key: entry for key, entry in sorted(entries.items()) if entry["tests"]}
    LEDGER.write_text(json.dumps(kept, indent=1) + "\n")


@contextmanager
def once(request: pytest.FixtureRequest, *sources: object) -> Iterator[None]:
    """Skip the rest of a test that compiles by itself if it passed with these sources and compilers, or note that."""
    from cutlass_ops.compilation.toolchain import find_toolchain

    toolchain = find_toolchain().identity
    key = hashlib.sha256(json.dumps([list(map(str, sources)), toolchain]).encode()).hexdigest()
    name, text = request.node.nodeid, digest(request.function)
    if (day := proven(read(), key, name, text)) is not None:
        pytest.skip(f"it passed on {day} with the same sources and compilers")
    yield
    if RECORD in os.environ:
        note({key: {"toolchain": toolchain}}, name, text)


def main() -> int:
    """Run compile tests, and note those that pass."""
    tests = [word for word in sys.argv[1:] if word != "--all"]
    os.environ[RECORD] = "1"
    if "--all" in sys.argv:
        LEDGER.write_text("{}\n")
    return pytest.main(["-m", "compile", *(tests or ["tests/compile", "tests/examples/test_ladder.py"])])


if __name__ == "__main__":
    raise SystemExit(main())
