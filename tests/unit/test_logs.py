"""What the logger says of calls and kernels, as docs/usage.md describes it."""

import logging

import pytest
import torch
from fake_device import Everything
from fake_toolkit import FakeToolkit, sm80_spec

import cutlass_ops as co
from cutlass_ops.base.session import Session
from cutlass_ops.compilation.apart import Apart
from cutlass_ops.compilation.builder import build_artifact


@pytest.fixture
def said(caplog):
    """Messages at INFO since the last look."""
    caplog.set_level(logging.INFO, "cutlass_ops")

    def _said():
        found = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
        caplog.clear()
        return found

    return _said


@pytest.fixture
def toolkit(tmp_path, monkeypatch):
    found = FakeToolkit(tmp_path / "kit")
    for name, value in (
        ("CUTLASS_OPS_CACHE_DIR", tmp_path / "store"),
        ("CUTLASS_OPS_NVCC", found.nvcc),
        ("NVCC_CCBIN", found.host),
    ):
        monkeypatch.setenv(name, str(value))
    return found


def matrices(*sizes):
    return (torch.randn(*size, dtype=torch.bfloat16) for size in sizes)


@pytest.mark.usefixtures("session")
def test_the_first_call_of_a_shape_that_pytorch_serves(said):
    a, weight, bias = matrices((32, 64), (48, 64), (48,))
    for _ in range(2):
        co.gemm_bias_relu(a, weight.t(), bias)
    assert said() == ["gemm_bias_relu 32x48x64: PyTorch serves, for tensors on the CPU or without elements"]
    co.gemm_bias_relu(a[:16], weight.t(), bias)
    co.prepare_launch(co.gemm_bias_relu, a[:8], weight.t(), bias, out=torch.empty(8, 48, dtype=a.dtype))
    co.Scaled.quantize(a, "e4m3")
    assert [message.partition(":")[0] for message in said()] == [
        "gemm_bias_relu 16x48x64",
        "gemm_bias_relu 8x48x64",
        "quantize (32, 64)",
    ]


def test_the_first_call_of_a_shape_that_waits_for_its_kernel(said, device):
    a, weight, bias = matrices((32, 64), (48, 64), (48,))
    device.absent = Everything()
    for _ in range(2):
        co.gemm_bias_relu(a, weight.t(), bias)
    assert said().count("gemm_bias_relu 32x48x64: PyTorch serves until the kernel is there") == 1


@pytest.mark.slow
def test_the_first_call_of_a_shape_that_several_ops_serve(said, device):
    x, gate, up = matrices((32, 64), (64, 48), (64, 48))
    for _ in range(2):
        co.gemm_swiglu(x, gate, up)
    (several,) = [message for message in said() if "several ops" in message]
    assert several.startswith("gemm_swiglu 32x48x64: no single kernel serves, so several ops do: ")


@pytest.mark.slow
def test_each_kernel_that_is_compiled_also_in_the_background_and_none_that_is_found(said, toolkit):
    build_artifact(sm80_spec(2))
    apart = Apart(Session())
    try:
        for stages in (2, 3, 3):
            apart.submit(sm80_spec(stages), urgent=True).result()
    finally:
        apart.close()
    here, there = (message.partition(" in ") for message in said())
    assert [here[0], there[0]] == [f"compiled {sm80_spec(stages).slug}" for stages in (2, 3)]
    assert here[2].endswith(" s")
    assert there[2].endswith(" s")
