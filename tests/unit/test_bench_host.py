"""The benchmark of host time: each row's calls are made and measured."""

import pytest
import torch

from tests.scripts import script

bench_host = script("bench_host")


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch):
    monkeypatch.setattr(bench_host, "DEVICE", "cpu")
    for name in ("CALLS", "ROUNDS", "AHEAD"):
        monkeypatch.setattr(bench_host, name, 1)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    torch.manual_seed(0)


@pytest.mark.slow
def test_rows_are_made_and_measured():
    table = bench_host.table()
    assert len(table) > 70
    changing = {name for name in table if name.startswith("bias + ReLU, ") and name.endswith("changes")}
    left_out = {name for name in table if name.endswith((", forward", ", backward"))} | {"JAX"}
    found = {name: bench_host.made(table[name]) for name in sorted({*bench_host.ROWS, *changing} - left_out)}
    absent = {name for name, form in found.items() if isinstance(form, str)}
    # Of those, PyTorch has kernels for GPUs, and some versions for scales of rows on the CPU.
    assert {name for name in absent if "rows" not in name} <= {"scaled_gemm, blocks, promoted", "groups, FP8", "CuPy"}
    assert sum(not isinstance(form, str) and form.prepare is not None for form in found.values()) > 25
    names = "gemm", "MLP, inference", "bias + ReLU, size changes"
    rows = [bench_host.measured(name, found[name]) for name in names]
    assert [sorted(row.keys() - {"form", "kernel", "us"}) for row in rows] == [
        ["launch_over_ours", "launch_over_out", "other_tensors_over_out", "over_pytorch"],
        ["launch_over_ours", "over_pytorch"],
        ["over_pytorch"],
    ]
