"""The tests leave the user's store and tables alone."""

import os
import runpy

import pytest

from cutlass_ops.base import env
from tests.own_store import ROOT, USERS


@pytest.mark.parametrize("named", [None, "", "kept/kernels", "/kept/kernels"])
def test_nothing_of_the_users_is_read_or_written(monkeypatch, tmp_path, named):
    for name in ("HOME", env.CACHE_DIR.name, *USERS):
        monkeypatch.setenv(name, str(tmp_path))
    if named is None:
        monkeypatch.delenv("CI_KERNELS", raising=False)
    else:
        monkeypatch.setenv("CI_KERNELS", named)
    runpy.run_path(str(ROOT / "tests/conftest.py"))
    assert env.cache_dir() == ROOT / (named or "build/kernels")
    assert env.tuning_dir().parent == env.cache_dir()
    assert [name for name, value in os.environ.items() if value == str(tmp_path)] == ["HOME"]
