"""``bench``."""

import json

import pytest
from test_bench import Clock

from cutlass_ops.tools.bench import benching


@pytest.fixture
def gpu(monkeypatch):
    """A machine whose times are known."""
    monkeypatch.setattr(benching, "Device", Clock)
    monkeypatch.setattr(benching.torch.cuda, "is_available", lambda: True)


def test_tables_json_and_page(kit, gpu, run, tmp_path):
    out, page = tmp_path / "r.json", tmp_path / "r.html"
    code, said, _ = run(
        *("bench", "gemm_bias_relu", "16x48x32", "--against", "eager", "--against", "cublaslt"),
        *("--out", out, "--html", page),
    )
    assert code == 0
    assert "single launches between other kernels:" in said
    assert json.loads(out.read_text())["geomean"]["graph"] == {"eager": 1.25, "cublaslt": 0.9}
    assert page.read_text().startswith("<!DOCTYPE html>")


def test_an_unknown_way_is_wrong_usage(kit, run):
    code, _, err = run("bench", "gemm", "16x48x32", "--against", "nope")
    assert (code, "'nope' is not a way to compare with: use some of eager, cublaslt" in err) == (2, True)


def test_without_a_gpu(kit, run):
    code, _, err = run("bench", "gemm", "16x48x32")
    assert (code, "run it on a machine with a GPU" in err) == (4, True)
