from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    monkeypatch.setenv("CUTLASS_OPS_PROGRESS", "0")
    monkeypatch.delenv("CUTLASS_OPS_JIT", raising=False)


@pytest.fixture
def toolkit(tmp_path):
    from fake_toolkit import FakeToolkit

    return FakeToolkit(tmp_path / "toolkit")


@pytest.fixture
def store(tmp_path):
    from cutlass_ops.artifacts.store import KernelStore

    return KernelStore(tmp_path / "store")


@pytest.fixture(scope="session")
def processes():
    import crowd

    return crowd.context()
