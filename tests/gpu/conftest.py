from __future__ import annotations

import pytest
import torch

from cutlass_ops.base import env


@pytest.fixture(scope="session", autouse=True)
def _kernels(request):
    """Compile the kernels that parameters of this run's tests name, side by side, before the first one."""
    if torch.cuda.is_available() and env.jit_enabled():
        from tests.gpu import kernels

        items = [item for item in request.session.items if item.get_closest_marker("gpu") and hasattr(item, "callspec")]
        kernels.build(p for item in items for p in item.callspec.params.values() if isinstance(p, str))


@pytest.fixture(autouse=True)
def _nothing_in_the_background(request, monkeypatch):
    """Kernels that no test needs would take the processors from those that one does."""
    if "background" not in request.keywords:
        from cutlass_ops.compilation.background import Background

        monkeypatch.setattr(Background, "guess", lambda *_: None)
        # So that a test's calls are served by their best kernels, whatever a store holds, and small gradients too.
        monkeypatch.setenv("CUTLASS_OPS_STAND_IN", "0")


@pytest.fixture
def hopper():
    from tests.gpu import tensors

    tensors.require_hopper()


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
