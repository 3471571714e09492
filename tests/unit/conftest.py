from __future__ import annotations

import fake_device
import pytest

from cutlass_ops.choose import policies

# The file whose tests were the last to make policies, of nothing but what ships.
_made_by = None


@pytest.fixture
def no_user_tables(request, tmp_path):
    """Have dispatch find no tables but those that ship, and those that the test itself leaves in the user's folder.

    To make a policy takes a second. Where all tests of a file use this, they share those that no test has changed.
    """
    global _made_by
    module = request.node.getparent(pytest.Module)
    mark = module.get_closest_marker("usefixtures")
    shared = mark is not None and "no_user_tables" in mark.args and "monkeypatch" not in request.fixturenames
    if not shared or _made_by != module.path:
        policies.forget()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUTLASS_OPS_TUNING_DIR", str(tmp_path / "tuning"))
        yield
    if shared and not (tmp_path / "tuning").exists():
        _made_by = module.path
    else:
        _made_by = None
        policies.forget()


@pytest.fixture
def device(monkeypatch, no_user_tables):
    """A made-up H100: see fake_device.py. Its `device` may be exchanged for another one."""
    with fake_device.fake_device(monkeypatch) as fake:
        yield fake
