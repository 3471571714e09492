"""``profile`` on a real GPU: kernels whose limits are known beforehand."""

import pytest

from cutlass_ops.tools.profile import profiling

pytestmark = pytest.mark.gpu

SCRIPT = """
import torch

torch.backends.cuda.matmul.allow_tf32 = False
x = torch.randn(4096, 4096, device="cuda")
half = x.bfloat16()
long = torch.randn(1 << 27, device="cuda")
for _ in range(2):
    half @ half
    x @ x
    long + long
torch.cuda.synchronize()
"""


def test_it_tells_products_in_bf16_from_those_in_fp32_and_from_sums(tmp_path):
    script = tmp_path / "three_kernels.py"
    script.write_text(SCRIPT)
    found, refusal = profiling.run(profiling.Asked(str(script), (), kernels="gemm|nvjet|cutlass|elementwise"))
    if refusal is not None:
        assert [d.name for d in found.diagnoses].count("time only") >= 3
        pytest.skip(refusal.why)
    said = list(zip(found.kernels, found.diagnoses, strict=True))
    limited = {name: [k for k, d in said if d.name == name] for name in ("cuda-cores", "memory-bound")}
    assert max(kernel.fma for kernel in limited["cuda-cores"]) > 50
    assert max(kernel.bytes for kernel in limited["memory-bound"]) == pytest.approx(2 * 4 * (1 << 27), rel=0.1)
    fast = max(found.kernels, key=lambda kernel: kernel.tensor or 0)
    assert fast.tensor > 50
    if fast.capability == (9, 0):
        assert fast.wgmma
    assert len(found.points()) >= 3
    assert all(kernel.name in found.traced for kernel in found.kernels)


def test_an_op_is_profiled_alone():
    found, refusal = profiling.run(profiling.Asked("gemm", ("4096x4096x4096",), traced=False))
    if refusal is not None:
        pytest.skip(refusal.why)
    (kernel,) = found.kernels
    assert kernel.calls == 3
    assert kernel.tensor > 50
