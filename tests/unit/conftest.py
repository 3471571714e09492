from __future__ import annotations

import fake_device
import pytest

from cutlass_ops.choose import policies


@pytest.fixture
def no_user_tables(tmp_path, monkeypatch):
    """Have dispatch find no tables but those that ship, and those that the test itself leaves in the user's folder."""
    monkeypatch.setenv("CUTLASS_OPS_TUNING_DIR", str(tmp_path / "tuning"))
    policies.forget()
    yield
    policies.forget()


@pytest.fixture
def device(monkeypatch, no_user_tables):
    """A made-up H100: see fake_device.py. Its `device` may be exchanged for another one."""
    with fake_device.fake_device(monkeypatch) as fake:
        yield fake
