"""What is said of matrices whose lines do not begin at multiples of 16 bytes: following it helps."""

import pytest
import torch

import cutlass_ops as co

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
M, N, K, ENDS = 32, 48, 256, torch.tensor([5, 32], dtype=torch.int32)

pytestmark = pytest.mark.usefixtures("session")


def wide(*shape, dtype=E4M3, by=8, at=0):
    """Return a matrix (..., rows, length) whose lines are longer, or begin somewhere else."""
    *lead, rows, length = shape
    return torch.randn(*lead, rows, length + by).to(dtype)[..., at : at + length]


def misplaced(*shape, dtype=E4M3):
    """Return a contiguous one at an address that is no multiple of 16 bytes."""
    size = torch.Size(shape).numel()
    return torch.randn(size + 4).to(dtype)[4:].view(shape)


@pytest.mark.parametrize("draw", [wide, misplaced, lambda *shape: wide(*shape, by=16, at=8)])
@pytest.mark.parametrize("name", ["a", "b", "batched b"])
def test_a_copy_aligns_lines_of_a_whole_length(draw, name):
    a = draw(M, K) if name == "a" else torch.randn(M, K).to(E4M3)
    shape = (2, N, K) if name == "batched b" else (N, K)
    b = (torch.randn(shape).to(E4M3) if name == "a" else draw(*shape)).mT
    with pytest.raises(
        ValueError, match=rf"^{name[-1]} is .*strides \(.*\) and storage offset \d.*: call {name[-1]}.clone\(\)"
    ) as caught:
        co.gemm(a, b)
    assert ("prepare(b)" in str(caught.value)) is (name == "b")
    assert "pad" not in str(caught.value)
    co.gemm(a.clone(), b.clone())


def test_lines_of_another_length_are_padded():
    a, b = torch.zeros(M, K)[:, :250].to(E4M3), torch.randn(N, K).to(E4M3)[:, :250].t()
    with pytest.raises(ValueError, match=r"^a is .*250.*: pad K of a and b with zeros to a multiple of 16$"):
        co.gemm(a, b)


@pytest.mark.parametrize("dtype", [E4M3, BF16])
@pytest.mark.parametrize("draw", [wide, misplaced])
@pytest.mark.parametrize("by_columns", [True, False])
def test_groups_say_what_helps(dtype, draw, by_columns):
    x, w = (torch.randn(M, 16)).to(dtype), torch.randn(2, N, 16).to(dtype).mT
    given = {"dtype": dtype, **({"by": 4} if draw is wide else {})}
    bad = draw(M, 16, **given)
    with pytest.raises(ValueError, match=r"^a is .*: call a.clone\(\), whose lines do$"):
        co.gemm(bad, w, groups=co.Groups(ENDS))
    co.gemm(bad.clone(), w, groups=co.Groups(ENDS))
    if dtype is E4M3 and not by_columns:
        return
    bad = draw(2, N, 16, **given).mT if by_columns else draw(2, 16, N, **given)
    with pytest.raises(ValueError, match=r"^b is .*: call b.clone\(\), whose lines do$"):
        co.gemm(x, bad, groups=co.Groups(ENDS))
    co.gemm(x, bad.clone(), groups=co.Groups(ENDS))


def test_weights_of_experts_along_k_are_padded_along_k():
    x, w = wide(M, 12, dtype=BF16, by=4), torch.randn(2, N, 12).to(BF16).mT
    with pytest.raises(ValueError, match=r"^b is .*: pad K of a and b with zeros to a multiple of 8$"):
        co.gemm(x, w, groups=co.Groups(ENDS))


def test_a_repeated_row_of_a_weight_is_not_made_row_major():
    a, b = torch.randn(M, K).to(E4M3), torch.randn(1, K).to(E4M3).expand(N, K).t()
    with pytest.raises(ValueError, match=r"^b is .* along K only: pass weight.t\(\) of a contiguous weight \(N, K\)"):
        co.gemm(a, b)
    co.gemm(a, co.prepare(b).matrix)


def test_no_batches_are_prepared():
    a, b = torch.randn(2, M, K).to(E4M3), torch.randn(2, K, N).to(E4M3)
    with pytest.raises(ValueError, match=r"pass weights.mT of contiguous weights \(..., N, K\)$"):
        co.gemm(a, b)
