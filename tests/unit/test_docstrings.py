"""Public docstrings have examples, which run on the CPU, and the API reference has every public object."""

import doctest
import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest
import torch

import cutlass_ops as co
from cutlass_ops import e, errors, nn, types
from cutlass_ops.base import env
from cutlass_ops.epilogue import functions

ROOT = Path(__file__).resolve().parents[2]

PUBLIC = {f"cutlass_ops.{name}": getattr(co, name) for name in co.__all__}
PUBLIC |= {f"cutlass_ops.e.{name}": getattr(e, name) for name in e.__all__}
PUBLIC |= {f"cutlass_ops.nn.{name}": getattr(nn, name) for name in nn.__all__}
PUBLIC |= {f"cutlass_ops.errors.{name}": getattr(errors, name) for name in errors.__all__}
PUBLIC |= {f"cutlass_ops.types.{name}": getattr(types, name) for name in types.__all__}
# Names of errors, and the version, say all there is to say.
SHORT = {
    name
    for name, value in PUBLIC.items()
    if isinstance(value, str) or (isinstance(value, type) and issubclass(value, Exception))
}
OPERATIONS = [f"cutlass_ops.e.{name}" for name in functions.__all__]


def _documented():
    """Objects that have docstrings: public ones and their methods, each once, by name."""
    found = {"cutlass_ops": co}
    for name, value in PUBLIC.items():
        found[name] = value
        if isinstance(value, type):
            members = {key: member for key, member in vars(value).items() if not key.startswith("_")}
            found |= {f"{name}.{key}": member for key, member in members.items() if inspect.getdoc(member)}
    return {name: value for name, value in found.items() if ">>>" in (inspect.getdoc(value) or "")}


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", _documented())
def test_examples_run(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    value = _documented()[name]
    globs = {"torch": torch, "co": co}
    example = doctest.DocTestParser().get_doctest(inspect.getdoc(value), globs, name, None, 0)
    torch.manual_seed(0)
    said = []
    failures = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE).run(
        example, out=said.append
    )
    assert failures.failed == 0, "".join(said)


def test_every_public_object_has_an_example():
    for name in (
        set(PUBLIC) - SHORT - {"cutlass_ops.registry", "cutlass_ops.nn", "cutlass_ops.errors", "cutlass_ops.types"}
    ):
        doc = inspect.getdoc(PUBLIC[name])
        assert ">>>" in doc, name
        assert name == "cutlass_ops.e" or "\n\nExamples\n--------\n" in doc, name


def test_sections_are_indented_as_the_reference_reads_them():
    """Else a parameter is a part of the description of the one before, or a section has nothing."""
    docs = [inspect.getdoc(value) for value in _documented().values()]
    for section in (each for doc in docs for each in re.split(r"\n\n(?=\w+\n-{3,}\n)", doc)[1:]):
        title, _, first, *others = section.split("\n\n")[0].split("\n")
        if title not in ("Parameters", "Attributes", "Returns", "Raises"):
            continue
        assert not first.startswith(" "), (title, first)
        for line in others:
            indent = len(line) - len(line.lstrip())
            assert indent in (0, 4) or line.lstrip().startswith("-"), (title, line)
            assert indent == 0 or not re.match(r"\w+(, \w+)* : \w", line.lstrip()), (title, line)


# They need a GPU, a compiler or a bundle.
SKIPPED = {"types.Benchmark", "types.Bundle", "types.Kernel", "bench", "build", "explain", "load_bundle", "tune"}


def test_few_examples_are_skipped():
    skipped = {
        name.partition(".")[2]
        for name, value in _documented().items()
        if any(doctest.SKIP in each.options for each in doctest.DocTestParser().get_examples(inspect.getdoc(value)))
    }
    assert skipped == SKIPPED


def test_every_operation_says_what_its_example_uses():
    assert [n for n in OPERATIONS if f"co.e.{n.rpartition('.')[2]}(" not in inspect.getdoc(PUBLIC[n])] == []


def _directives():
    pages = sorted((ROOT / "docs" / "api").glob("*.md"))
    return [name for page in pages for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)]


def _resolved(path):
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def test_the_reference_has_every_public_object_once():
    directives = _directives()
    assert len(directives) == len(set(directives))
    documented = {id(_resolved(path)) for path in directives}
    assert len(documented) == len(directives)
    missing = [
        name for name, value in PUBLIC.items() if id(value) not in documented and value not in (e, errors, nn, types)
    ]
    assert missing == []


def test_the_reference_has_every_variable_as_it_is():
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*) \|$", (ROOT / "docs/api/environment.md").read_text(), re.MULTILINE)
    assert rows == [(v.name, v.default, v.doc) for v in env.VARIABLES]


def test_the_reference_names_the_variables_that_must_not_be_empty(monkeypatch):
    text = (ROOT / "docs/api/environment.md").read_text()
    said = re.search(r"counts as unset, except (.*?), which are refused", text, re.DOTALL)[1]
    readers = (env.cache_dir, env.cache_size, env.tuning_dir, env.bundles, env.bundle_keys, env.bundle_version)
    readers += (env.remote_store, env.jit_enabled, env.stand_in, env.remembers_choices, env.nvcc, env.cuda_homes)
    readers += (env.host_compiler, env.cutlass_dir, env.jobs, env.lineinfo_enabled, env.nvtx_enabled)
    readers += (env.executor_timeout, env.progress)
    for variable in env.VARIABLES:
        monkeypatch.setenv(variable.name, "")

    def refused_by(read):
        try:
            read()
        except ValueError as exc:
            return {str(exc).split()[0]}
        return set()

    refused = set().union(*map(refused_by, readers))
    assert refused == set(re.findall(r"`(\w+)`", said))
