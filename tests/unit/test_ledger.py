"""The ledger of proven kernels: a compile test is skipped for the same kernel and the same test alone."""

from types import SimpleNamespace

import pytest

from cutlass_ops.compilation import toolchain
from tests import ledger


def test_another_kernel_or_another_text_of_the_test_is_not_proven(tmp_path, monkeypatch):
    monkeypatch.setattr(ledger, "LEDGER", tmp_path / "ledger.json")
    assert ledger.read() == {}
    ledger.note({"key": {"opcodes": {"HMMA": 4}}}, "test_a", "text")
    ledger.note({"key": {"opcodes": {"HMMA": 4}}}, "test_b", "other")
    found = ledger.read()
    day = found["key"]["date"]
    assert ledger.proven(found, "key", "test_a", "text") == ledger.proven(found, "key", "test_b", "other") == day
    for key, name, text in (("other", "test_a", "text"), ("key", "test_c", "text"), ("key", "test_a", "other")):
        assert ledger.proven(found, key, name, text) is None
    ledger.note({"new": {"opcodes": {"HMMA": 8}}}, "test_a", "text")
    assert ledger.proven(ledger.read(), "key", "test_a", "text") is None
    ledger.note({"new": {"opcodes": {"HMMA": 8}}}, "test_b", "text")
    assert ledger.read().keys() == {"new"}


def test_a_test_is_known_by_its_text():
    def one():
        return 1

    def two():
        return 2

    assert ledger.digest(one) == ledger.digest(one) != ledger.digest(two)


def test_a_test_that_compiles_by_itself_runs_once_for_its_sources(tmp_path, monkeypatch, request):
    monkeypatch.setattr(ledger, "LEDGER", tmp_path / "ledger.json")
    monkeypatch.setattr(toolchain, "find_toolchain", lambda: SimpleNamespace(identity={"nvcc": "13.0"}))
    for record, *sources in ((False, "a", "b"), (True, "a", "b"), (True, "a", "c"), (True, "a", "b")):
        monkeypatch.setenv(ledger.RECORD, "1") if record else monkeypatch.delenv(ledger.RECORD, raising=False)
        with ledger.once(request, *sources):
            pass
    with pytest.raises(pytest.skip.Exception, match="it passed on"), ledger.once(request, "a", "b"):
        pytest.fail("it ran again")
    with pytest.raises(ZeroDivisionError), ledger.once(request, "a", "d"):
        1 / 0  # noqa: B018
    assert len(ledger.read()) == 1  # what failed is not noted
