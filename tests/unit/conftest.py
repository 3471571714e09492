from __future__ import annotations

import pytest


@pytest.fixture
def device(monkeypatch, session):
    """A made-up H100: see fake_device.py. Its `device` may be exchanged for another one."""
    import fake_device

    with fake_device.fake_device(monkeypatch) as fake:
        yield fake
