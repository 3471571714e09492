"""The Python code of documents, as a reader runs it: the blocks of a page in order, from that page alone."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
from processes import run_with_pytorch

ROOT = Path(__file__).parents[1]
GPU = "a GPU"

# A comment above a block names what it needs besides this library, or says why no test runs it.
_BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>runs with|not run): (?P<text>[^\n]+) -->\n+)?^```(?P<language>py\w*)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)

# Code keeps its lines, so that a traceback names those of the page.
_SCRIPT = """
import json, sys
namespace = {"__name__": "__main__"}
for line, code in json.loads(sys.argv[2]):
    exec(compile("\\n" * line + code, sys.argv[1], "exec"), namespace)
"""


class Block(NamedTuple):
    """A block of Python of a page.

    Attributes
    ----------
    line : int
        The line of the page that opens it.
    language : str
        What the page calls its language.
    code : str
        Its text.
    needs : tuple of str
        Packages that it needs besides this library, and :data:`GPU`.
    not_run : str
        Why no test runs it; empty if one does.
    """

    line: int
    language: str
    code: str
    needs: tuple[str, ...]
    not_run: str

    def missing(self, gpu: bool) -> list[str]:
        """Return what it needs and does not find, with or without a GPU."""
        return [need for need in self.needs if not (gpu if need == GPU else importlib.util.find_spec(need))]


def blocks(page: Path) -> list[Block]:
    """Return the blocks of Python of a page, in order."""
    text = page.read_text()
    found = []
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start("language")) + 1
        needs = tuple(match["text"].split(", ")) if match["mark"] == "runs with" else ()
        not_run = match["text"] if match["mark"] == "not run" else ""
        found.append(Block(line, match["language"], match["code"], needs, not_run))
    return found


PAGES = [
    page
    for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md")
    for page in sorted(ROOT.glob(pattern))
    if blocks(page)
]


def name(page: Path) -> str:
    """Return how tests call a page."""
    return str(page.relative_to(ROOT))


def run(page: Path, *, gpu: bool) -> subprocess.CompletedProcess[str]:
    """Run what can be run of a page, in one namespace and a process of its own, which sees the GPU or none."""
    found = blocks(page)
    code = [(each.line, each.code) for each in found if not each.not_run and not each.missing(gpu)]
    if not code:
        pytest.skip(f"needs {', '.join(need for each in found for need in each.missing(gpu))}")
    variables = {"CUTLASS_OPS_STAND_IN": "1"} if gpu else {"CUDA_VISIBLE_DEVICES": ""}
    return run_with_pytorch(f"import os\nos.environ |= {variables}\n{_SCRIPT}", page, json.dumps(code))
