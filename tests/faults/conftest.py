from __future__ import annotations

import sys
from pathlib import Path

import pytest
from fake_toolkit import FakeToolkit

from cutlass_ops.artifacts.store import KernelStore

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    monkeypatch.setenv("CUTLASS_OPS_PROGRESS", "0")
    monkeypatch.delenv("CUTLASS_OPS_JIT", raising=False)


@pytest.fixture
def toolkit(tmp_path):
    return FakeToolkit(tmp_path / "toolkit")


@pytest.fixture
def store(tmp_path):
    return KernelStore(tmp_path / "store")


@pytest.fixture(scope="session")
def processes():
    import crowd

    return crowd.context()
