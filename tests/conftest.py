import signal

import pytest
import torch
from hypothesis import settings

# A case may take as long as it takes. Where the slow tests are left out, tests of properties try fewer cases.
settings.register_profile("all", deadline=None)
settings.register_profile("quick", deadline=None, max_examples=15)


def pytest_configure(config):
    settings.load_profile("quick" if "not slow" in config.option.markexpr else "all")


@pytest.fixture
def write(tmp_path):
    """Write bytes as a kernel's library; return its path."""

    def _write(data):
        path = tmp_path / "kernel.so"
        path.write_bytes(data)
        return path

    return _write


@pytest.fixture
def interruptible():
    """Have SIGINT interrupt this process and its children: in the background of a shell they ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
