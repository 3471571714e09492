"""The benchmark of host time: each form of call has its peer's result, and the report shows what was measured."""

import pytest
import torch

from tests.scripts import script

bench_host, report = script("bench_host"), script("report")


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch):
    monkeypatch.setattr(bench_host, "DEVICE", "cpu")
    monkeypatch.setattr(bench_host, "CALLS", 1)
    monkeypatch.setattr(bench_host, "ROUNDS", 1)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    torch.manual_seed(0)


def tensors(results):
    if isinstance(results, torch.Tensor):
        return [results]
    return [y for x in results for y in ([x.sum_square] if hasattr(x, "sum_square") else [x])]


def test_every_form_has_its_peers_result():
    for name, form in bench_host.forms().items():
        _, calls = form.calls()
        assert ("launch()" in calls) == form.prepares
        wanted = tensors(form.peer())
        for call, make in calls.items():
            for x, y in zip(tensors(make()), wanted, strict=True):
                error = (x.double() - y.double()).norm() / y.double().norm()
                assert error < 0.02, (name, call, float(error))


def test_a_copy_is_as_far_from_alignment():
    for offset in (0, 1):
        x = bench_host.draw(4, 8, offset=offset)
        other = bench_host.like(x.t())
        assert torch.equal(other, x.t())
        assert other.stride() == x.t().stride()
        assert other.data_ptr() % 16 == x.data_ptr() % 16


def test_the_report_shows_what_was_measured():
    forms = bench_host.forms()
    names = ("plain", "RMSNorm, not prepared")
    rows = [bench_host.form_row(name, forms[name]) for name in names]
    assert rows[0]["launch_over_out"] > 0
    assert "launch_over_out" not in rows[1]
    data = {"forms": rows, "processor": bench_host.processor(), "processors": 2}
    text, table = report.forms_tables(data)
    assert "2 cores of" in text
    assert all(name in table for name in names)
    assert table.count("–") >= 3  # no launch is prepared for the second
    assert report.forms_tables({}) == []
