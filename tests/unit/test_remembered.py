"""Decisions about weights are kept from one process to the next, and are what would be decided again."""

import json
import os

import pytest
from signatures import A100, H100, signature

from cutlass_ops.base import env
from cutlass_ops.base.session import Session
from cutlass_ops.choose import dispatch, policies, tables
from cutlass_ops.compilation import memo
from cutlass_ops.declare.problem import Problem
from cutlass_ops.epilogue import composed

N, K = 4096, 1024
ROWS = (1, 3, 16, 17, 100, 128, 1000, 4096, 8192, 20_000)


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path, session):
    before = os.umask(0o002)
    monkeypatch.setenv(env.CHOICES.name, "1")
    monkeypatch.setenv(env.CACHE_DIR.name, str(tmp_path / "store"))
    policies.forget(shipped=True)
    yield tmp_path / "store" / "memo"
    policies.forget(shipped=True)
    os.umask(before)


def decided(of=None, device=H100, rows=ROWS, n=N):
    found = [dispatch.decide(of or signature(), device, Problem(m, n, K)) for m in rows]
    return [(d.config, d.order, d.kept, d.peer, d.spec, d.specs) for d in found]


def files(folder):
    return sorted(folder.rglob("choices-*"))


@pytest.fixture
def no_policy(monkeypatch):
    """Return a function after whose call no policy can be made."""
    return lambda: monkeypatch.setattr(policies, "policy", lambda *_: pytest.fail("decided again"))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("of", "device"),
    [(signature(), H100), (signature(composed.rms_norm, "f16"), H100), (signature(), A100)],
    ids=["bias + ReLU", "RMSNorm", "A100"],
)
def test_another_process_decides_the_same_without_a_policy(of, device, folder, no_policy):
    weight = policies.policy(of, device).weight_of(N, K, 1)
    assert files(folder) == []
    policies.forget(shipped=True)
    rows = [m for m in ROWS if weight.serves(Problem(m, N, K)) is not None]
    assert len(rows) > 5
    wanted = decided(of, device, rows)
    (file,) = files(folder)
    # Private, whatever the umask: kernels are loaded from the same store.
    assert all(path.stat().st_mode & 0o077 == 0 for path in (file, file.parent, folder, folder.parent))
    policies.forget(shipped=True)
    no_policy()
    assert decided(of, device, rows) == wanted
    with Session().active():
        assert decided(of, device, rows) == wanted


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_text("{"),
        lambda path: path.write_text('{"kept": []}'),
        lambda path: path.write_text(path.read_text().replace('"starts":[1,', '"starts":[')),
        lambda path: path.write_text(path.read_text().replace('"kernels":[', '"kernels":[999,')),
        lambda path: path.write_text(path.read_text().replace('"arch":"sm90"', '"arch":"sm91"')),
        lambda path: path.write_text(json.dumps(list(range(400_000)))),
        lambda path: path.chmod(0o666),
        lambda path: (path.unlink(), path.mkdir()),
    ],
)
def test_a_damaged_file_is_computed_again(spoil, folder):
    wanted = decided()
    (path,) = files(folder)
    spoil(path)
    policies.forget(shipped=True)
    assert decided() == wanted


def test_a_folder_that_cannot_be_written_costs_only_time(folder):
    folder.parent.mkdir()
    folder.write_text("no folder")
    assert decided()


def test_a_user_s_table_counts_though_a_decision_was_kept(folder, tmp_path):
    wanted = decided(rows=[100])
    path = tables.path_of(env.tuning_dir(), H100.name, signature())
    path.parent.mkdir()
    path.write_text("no table")
    policies.forget(shipped=True)
    with pytest.warns(RuntimeWarning, match="a tuning table is ignored"):
        assert decided(rows=[100]) == wanted


@pytest.mark.slow
def test_nothing_is_kept_where_that_is_switched_off_or_a_table_is_the_user_s(folder, monkeypatch):
    monkeypatch.setenv(env.CHOICES.name, "0")
    decided(rows=[1])
    assert not folder.exists()
    monkeypatch.setenv(env.CHOICES.name, "1")
    policies.forget(shipped=True)
    shipped = policies.policy(signature(), H100).own
    path = tables.path_of(env.tuning_dir(), H100.name, signature())
    path.parent.mkdir()
    path.write_text(json.dumps(shipped.to_json()))
    policies.forget(shipped=True)
    decided(rows=[1])
    assert files(folder) == []


def test_what_follows_from_code_that_has_changed_since_its_import_is_not_kept(folder, monkeypatch):
    memo._package.cache_clear()
    monkeypatch.setattr(memo.session, "IMPORTED", os.stat(memo.__file__).st_ctime_ns - 1)
    decided(rows=[1])
    memo._package.cache_clear()
    assert files(folder) == []
