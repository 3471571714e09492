from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _kernels():
    """Compile everything once, side by side, before the first test."""
    if torch.cuda.is_available():
        from tests.gpu import kernels

        kernels.build_all()


@pytest.fixture(autouse=True)
def _nothing_in_the_background(request, monkeypatch):
    """Kernels that no test needs would take the processors from those that one does."""
    if "background" not in request.keywords:
        from cutlass_ops.background import BACKGROUND

        monkeypatch.setattr(BACKGROUND, "add", lambda specs: None)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
