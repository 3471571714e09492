"""What documents link to and name is there, and their code runs."""

import importlib
import importlib.util
import re
import sys
from pathlib import Path

import pytest

from cutlass_ops.artifacts import installed
from tests import pages
from tests.scripts import script

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(
    path
    for pattern in (
        "*.md",
        "docs/*.md",
        "examples/*/README.md",
        "benchmarks/NOTES.md",
        "cutlass_ops/*/README.md",
        "templates/README.md",
    )
    for path in ROOT.glob(pattern)
)
FOLDERS = ("benchmarks", "cpp", "cutlass_ops", "docs", "examples", "generated", "templates", "tests")

_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def _anchors(path):
    """Return the anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", _FENCED.sub("", path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    wrong = []
    text = _FENCED.sub("", path.read_text())
    defined = dict(re.findall(r"^\[(\w+)\]: (\S+)$", text, re.MULTILINE))
    assert set(re.findall(r"\[(D\d+)\](?!:)", text)) == defined.keys()
    for link in [*re.findall(r"\]\(([^)]+)\)", text), *defined.values()]:
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        if not target.exists() or (anchor and anchor not in _anchors(target)):
            wrong.append(link)
    assert wrong == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_modules_that_are_named_are_there(path):
    text = path.read_text()
    files = re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]+\.(?:h|py|cpp|md|sh|toml))`", text)
    assert [name for name in files if not (ROOT / name).exists()] == []
    for name in re.findall(r"`(cutlass_ops(?:\.[a-z_]\w*)+)[`(]", text):
        assert _is_there(name), name


@pytest.mark.slow
@pytest.mark.parametrize("page", pages.PAGES, ids=pages.name)
def test_the_code_of_a_page_runs_from_that_page(page):
    ran = pages.run(page, gpu=False)
    assert ran.returncode == 0, ran.stderr
    assert "Warning" not in ran.stderr


@pytest.mark.slow
def test_the_support_matrix_is_what_the_library_answers(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["support.py", "--check"])
    with pytest.raises(SystemExit) as ended:
        script("support", ROOT / "docs").main()
    assert not ended.value.code


def test_few_blocks_are_not_run():
    found = [(pages.name(page), block) for page in pages.PAGES for block in pages.blocks(page)]
    assert {block.language for _, block in found} == {"python"}
    assert [page for page, block in found if block.not_run] == ["docs/deployment.md", "docs/grouped.md"]
    needed = {(page, *block.needs) for page, block in found if block.needs}
    assert needed == {
        ("docs/bench.md", pages.GPU),
        ("docs/interop.md", "cupy", pages.GPU),
        ("docs/interop.md", "jax", "jax_tvm_ffi"),
        ("docs/modules.md", "transformers"),
    }


def _is_there(name):
    parts = name.split(".")
    if name == installed.GROUP:  # of entry points
        return True
    if parts[-1] == "fused_gemm":  # an operator of PyTorch's
        return True
    if parts[1:] in (["cupy"], ["jax"]):  # their import needs these packages
        return importlib.util.find_spec(name) is not None
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        return all((found := getattr(found, part, None)) is not None for part in parts[end:])
    return False
