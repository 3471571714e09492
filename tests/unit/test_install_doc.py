"""docs/install.md names what is there: extras, versions, targets, variables, and what doctor prints."""

import itertools
import re
import sys
from pathlib import Path

import pytest

from cutlass_ops.base import arch, env
from cutlass_ops.compilation import toolchain
from cutlass_ops.tools.doctor import Diagnosis

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def page():
    return (ROOT / "docs" / "install.md").read_text()


def test_the_site_and_the_readme_lead_to_it():
    assert re.search(r"^ +- \S+: install\.md$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert "(install.md)" in (ROOT / "docs" / "index.md").read_text()
    assert "(docs/install.md)" in (ROOT / "README.md").read_text()


def test_every_extra_is_in_the_table(page):
    table = page.partition("| Extra |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| (`.*?`) \|", table, re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(PROJECT["optional-dependencies"])
    assert set(re.findall(r"\[(\w+)\]\"", page)) <= PROJECT["optional-dependencies"].keys()


def test_versions_are_those_that_are_required(page):
    assert f"Python {PROJECT['requires-python'].removeprefix('>=')} or later" in " ".join(page.split())
    (torch,) = (each for each in PROJECT["dependencies"] if each.startswith("torch"))
    assert f"PyTorch {torch.removeprefix('torch>=')} or later" in page
    assert f"nvcc {'.'.join(map(str, toolchain.MIN_NVCC))} or later" in " ".join(page.split())
    (nvcc,) = (each for each in PROJECT["optional-dependencies"]["toolkit"] if each.startswith("cuda-toolkit"))
    assert f"CUDA {re.search(r'>=([0-9]+)', nvcc)[1]} for the extra `toolkit`" in " ".join(page.split())


def test_gpus_and_targets_are_those_that_are_supported(page):
    (row,) = re.findall(r"^\| GPU \| (.*) \|$", page, re.MULTILINE)
    named = {tuple(map(int, found)) for found in re.findall(r"(\d)\.(\d)", row)}
    assert named == {target.capability for target in arch.TARGETS.values()}
    assert set(re.findall(r"sm_\w+", page)) <= arch.TARGETS.keys()


def test_variables_exist(page):
    named = set(re.findall(r"`([A-Z][A-Z_]{3,})", page))
    assert "CUTLASS_OPS_CACHE_DIR" in named
    assert named <= {variable.name for variable in env.VARIABLES} | {"PATH"}


def test_doctor_ends_with_these_lines(page):
    rows = re.findall(r"^\| (Can compile .*?) \|", page, re.MULTILINE)
    last = {
        list(
            Diagnosis({}, None, (), None, None, (), *able, (), (), dict.fromkeys(v.name for v in env.VARIABLES)).lines()
        )[-1]
        for able in itertools.product((True, False), repeat=2)
    }
    assert len(rows) == 4
    assert set(rows) == last
