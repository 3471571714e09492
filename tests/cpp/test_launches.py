"""Launches, and their refusals in words."""

from pathlib import Path

import pytest

from cutlass_ops.artifacts.loader import Reason
from cutlass_ops.ship import packing, shipping

# To build the program takes fifteen seconds.
pytestmark = pytest.mark.slow
HERE = Path(__file__).resolve().parent


def test_a_launch_passes_everything_on_the_caller_s_stream(probe, single):
    code, out = probe("launch", single, 0, 3, 512)
    assert code == 0
    assert out.splitlines() == [
        "mapped",
        "tensor code 4 bits 16 device 2:1 shape 16 32 strides 40 1",
        "tensor code 4 bits 16 device 2:1 shape 32 64 strides 1 48",
        "tensor code 2 bits 16 device 2:1 shape 16 64 strides 64 1",
        "tensor code 2 bits 32 device 2:1 shape 64 strides 1",
        "float 0.5",
        "tensor code 2 bits 32 device 2:1 shape 16 strides 1",
        "integer 0",
        "integer 3",
        "tensor code 1 bits 8 device 2:1 shape 512 strides 1",
        "stream 0x9",
        "stream after it 0x7",
    ]
    assert "none 1\nstream 0x9\n" in probe("launch", single, 0, 3, 0)[1]


@pytest.mark.parametrize(
    ("position", "reason", "said"),
    [
        (1, Reason.KIND, "b must be a tensor of bf16; it is bf16, shape (32, 64), strides (1, 48), on device 1."),
        (1, Reason.SHAPE, "b has a shape that disagrees with the other arguments;"),
        (2, Reason.DTYPE, "out must have elements of type f16; it is f16, shape (16, 64)"),
        (3, Reason.DEVICE, "bias must be on the same CUDA device as a;"),
        (0, Reason.MAJOR, "a must be row-major: contiguous along the last dimension;"),
        (1, Reason.MAJOR, "b must be col-major: contiguous along the first dimension;"),
        (2, Reason.ALIGNMENT, "out must be aligned to 16 bytes in address, leading dimension and extent;"),
        (3, Reason.ALIGNMENT, "bias must be aligned to 4 bytes"),
        (5, Reason.OVERLAP, "top shares memory with another argument;"),
        (4, Reason.KIND, "scale must be a tensor of f32; it is the number 0.5"),
        (8, Reason.WORKSPACE, "the workspace is too small"),
        (9, Reason.COUNT, "argument 9 was refused (9)"),
        (0, Reason.NULL, "a has no memory: its address is null; it is bf16, shape (16, 32)"),
        (8, Reason.NULL, "the workspace is too small, not aligned to 256 bytes, or null"),
    ],
)
def test_refusals_are_put_into_words(probe, single, keys, position, reason, said):
    code, out = probe("launch", single, 16 * position + reason, 1, 0)
    last = out.splitlines()[-1]
    assert code == 1
    assert last.startswith(f"ArgumentError: {said}")
    assert last.endswith(f"for sm_90a, {next(iter(keys.values()))[:12]}")


def test_every_reason_has_words():
    (cases,) = test_refusals_are_put_into_words.pytestmark
    assert {reason for _, reason, _ in cases.args[1]} == set(Reason)


def test_a_failure_of_cuda_is_an_error_and_the_stream_is_put_back(probe, single):
    code, out = probe("launch", single, 0, 0, 0)
    assert code == 1
    assert out.splitlines()[-2:] == ["stream after it 0x7", "LaunchError: launch failed: out of memory"]


@pytest.mark.compile
def test_a_real_kernel_refuses_in_words(probe, tmp_path):
    catalogue = shipping.load(str(HERE.parents[1] / "examples" / "cpp" / "catalogue.toml"))
    packing.pack(catalogue).write(tmp_path / "kernels.bundle")
    for how, said in {
        "shape": "b has a shape that disagrees",
        "dtype": "bias must have elements of type bf16; it is f32, shape (128)",
        "kind": "bias must be a tensor of bf16; it is the number 0.5",
        "number": "a must be a tensor; it is the number 0.5",
        "device": "bias must be on the same CUDA device as a",
        "major": "a must be row-major",
        "alignment": "out must be aligned to 16 bytes",
        "overlap": "out shares memory with another argument",
        "count": "d = relu(add(acc, bias)) with a bf16.row, b bf16.col, out bf16.row, bias bf16.row.align1 for sm_90a",
    }.items():
        code, out = probe("refuse", tmp_path / "kernels.bundle", how)
        assert code == 1, how
        assert out.startswith(f"ArgumentError: {said}"), how
