"""``co.bench``, and what benchmarks share, on a real GPU."""

from importlib.util import find_spec

import pytest
import torch

import cutlass_ops as co
from tests.scripts import script

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]  # of the other ways, as a user sees them


def test_an_op_against_every_way_that_is_there():
    found = co.bench("gemm_bias_relu", (1024, 1024, 1024), rounds=5)
    (row,) = found.rows
    for method in ("graph", "between"):
        times = row.times[method]
        assert {"ours", "eager", "cublaslt", "compile"} <= set(times), row
        if find_spec("triton") is not None:
            assert "triton" in times
        # Eager reads and writes D once more: it cannot be twice as fast, nor ten times as slow.
        assert 0.5 < times["eager"].ratio < 10
        # No way is faster than the chip allows.
        assert row.roofline is None or min(x.microseconds for x in times.values()) > row.roofline.compute
    assert row.error_over_eager <= 2
    # Between other kernels, caches are cold and nothing overlaps.
    assert row.times["between"]["ours"].microseconds > row.times["graph"]["ours"].microseconds / 2
    assert "<svg" in found.html()


def test_a_triton_kernel_computes_what_pytorch_does():
    pytest.importorskip("triton")

    from cutlass_ops.tools.bench.triton_gemm import gemm

    a, w, bias = (torch.randn(*s, device="cuda", dtype=torch.float16) for s in ((300, 200), (520, 200), (520,)))
    exact = torch.relu(a.double() @ w.double().t() + bias.double())
    found = gemm(a, w.t(), bias, relu=True)
    eager = torch.relu(torch.nn.functional.linear(a, w, bias))
    assert (found.double() - exact).norm() <= 2 * (eager.double() - exact).norm()


def test_launches_are_those_of_the_gpu():
    x = torch.zeros(8, device="cuda")
    launches = script("harness").launches
    assert launches(lambda: x.add_(1.0).mul_(2.0)) == 2
    assert launches(lambda: x.add_(1.0)) == 1
    assert not x.any()  # they are captured, and not run


def test_memory_at_rest_is_what_is_held():
    at_rest = script("harness").memory_at_rest
    before = at_rest()
    held = torch.empty(1 << 20, device="cuda")
    assert at_rest() - before == held.numel() * held.element_size()
    del held
    assert at_rest() == before
