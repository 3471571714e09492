import json
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from fake_toolkit import FakeToolkit, library, sm80_spec

from cutlass_ops.artifacts.store import KernelStore
from cutlass_ops.base.errors import LoadError
from cutlass_ops.compilation.builder import build_artifact
from cutlass_ops.tools import inspection
from cutlass_ops.tools.inspection import inspect

DESCRIBED = {"stages": 3, "threads": 128, "shared_memory": 49152}


@pytest.fixture
def artifact(tmp_path):
    kit = FakeToolkit(tmp_path / "toolkit")
    kit.makes(library(0x723C, 0x7387, 0x7983, 0x7983))
    chain, store = kit.find(), KernelStore(tmp_path / "store")
    return build_artifact(sm80_spec(), source="source", store=store, toolchain=chain)


@pytest.fixture
def _described(monkeypatch):
    monkeypatch.setattr(inspection, "load", lambda artifact: SimpleNamespace(describe=lambda: DESCRIBED))
    monkeypatch.setattr(inspection, "_ask_driver", lambda *_: None)


@pytest.mark.usefixtures("_described")
def test_report(artifact):
    report = inspect(artifact)
    assert report.slug == sm80_spec().slug
    assert report.sass == {"HMMA": 1, "LDL": 2, "STL": 1}
    assert (report.registers, report.stack, report.spill_stores, report.spill_loads) == (168, 8, 4, 12)
    assert (report.static_shared_memory, report.dynamic_shared_memory) == (1024, 49152)
    assert (report.stages, report.threads) == (3, 128)
    # Of 164 KiB three times 50; of 65536 registers three times 168 * 128.
    assert (report.blocks_per_sm, report.device) == (3, None)
    assert repr(report) == f"<report of {sm80_spec().slug}: 168 registers>"
    assert json.loads(json.dumps(report.to_json())) == report.to_json()


# Each with one limit below all others: threads for each block, its dynamic shared memory, registers for each thread.
OCCUPANCY = {
    "shared memory": ("sm_80", 128, 49 * 1024, 64, 3),
    "registers": ("sm_80", 256, 1024, 128, 2),
    "threads": ("sm_86", 1024, 1024, 32, 1),
    "threads, where there are more": ("sm_90a", 1024, 1024, 32, 2),
    "blocks": ("sm_86", 32, 0, 32, 16),
    "blocks, where there are more": ("sm_89", 32, 0, 32, 24),
    "blocks of an A100": ("sm_80", 32, 0, 32, 32),
}


@pytest.mark.parametrize(("target", "threads", "shared", "registers", "blocks"), OCCUPANCY.values(), ids=OCCUPANCY)
def test_each_limit_of_occupancy(monkeypatch, target, threads, shared, registers, blocks):
    monkeypatch.setattr(inspection, "_ask_driver", lambda *_: None)
    resources = {"function": "f", "registers": registers, "static_shared_memory": 1024}
    artifact, described = SimpleNamespace(target=target), {"threads": threads, "shared_memory": shared}
    assert inspection._occupancy(artifact, resources, described) == (blocks, None)


@pytest.mark.usefixtures("_described")
def test_by_path(artifact, monkeypatch):
    assert inspect(artifact.folder) == inspect(artifact.library) == inspect(str(artifact.source)) == inspect(artifact)
    monkeypatch.chdir(artifact.folder)
    assert inspect("kernel.so") == inspect(artifact)
    with pytest.raises(LoadError):
        inspect(artifact.folder.parent)


@pytest.mark.slow
def test_what_cannot_be_loaded_is_still_reported(artifact):
    report = inspect(artifact)
    assert report.registers == 168
    assert (report.stages, report.threads, report.dynamic_shared_memory, report.blocks_per_sm) == (None,) * 4


@pytest.mark.usefixtures("_described")
@pytest.mark.parametrize("error", [ImportError, RuntimeError])
def test_no_driver_is_no_device(artifact, monkeypatch, error):
    monkeypatch.setattr(inspection, "_ask_driver", Mock(side_effect=error))
    assert inspect(artifact).device is None
