"""The fuzzers' harnesses take their seeds as bundles; fuzzing itself is `tests/faults/fuzz/run.sh`."""

import contextlib
import importlib
import sys
import types

import pytest

from cutlass_ops.artifacts import manifest
from cutlass_ops.base import checked_json
from cutlass_ops.base.errors import BundleError
from tests.faults.fuzz import seeds


@pytest.fixture
def harness(monkeypatch):
    """The Python reader's harness, without atheris."""
    monkeypatch.setattr(checked_json, "hashlib", checked_json.hashlib)  # which the harness replaces
    stub = types.SimpleNamespace(
        instrument_imports=lambda **_: contextlib.nullcontext(), Mutate=lambda data, most: (data + b"x")[:most]
    )
    monkeypatch.setitem(sys.modules, "atheris", stub)
    yield importlib.import_module("tests.faults.fuzz.fuzz_reader")
    del sys.modules["tests.faults.fuzz.fuzz_reader"]


def test_the_python_harness_reads_its_seeds(harness, tmp_path, monkeypatch):
    seeds.main(str(tmp_path))
    monkeypatch.setenv("FUZZ_SCRATCH", str(tmp_path))
    used = []
    harness._use = lambda found, use=harness._use: (use(found), used.append(found))
    for name, target in harness.TARGETS.items():
        files = sorted((tmp_path / name).iterdir())
        assert files
        for file in files:
            target(file.read_bytes())
            target(file.read_bytes()[:-7])
    assert len(used) == 4  # two manifests, by themselves and in archives


@pytest.mark.slow
def test_its_mutations_are_manifests_as_well(harness, tmp_path):
    text = seeds.without_seal(seeds.made()[0].to_bytes())
    changed = [harness.mutated(text, 1 << 16, seed) for seed in range(300)]
    assert len(set(changed)) > 200
    accepted = 0
    for data in changed:
        with contextlib.suppress(BundleError):
            manifest.Manifest.from_bytes(data)
            accepted += 1
    assert 0 < accepted < 300
    assert harness.mutated(b"no JSON", 100, 1) == b"no JSONx"
