"""What the tests of FP8 share: numbers where rounding may go wrong, and what a result may be off by."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tests.gpu import oracle

E4M3, E5M2, BF16, F32 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float32
NAMES = {"e4m3": E4M3, "e5m2": E5M2}
# What the Tensor Core keeps of a sum, relative to the norm of the result (docs/fp8.md).
SUMS = oracle.SUMS["e4m3"]


def zeros(m: int, n: int, k: int = 64, dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor]:
    """Return operands whose product is 0."""
    return torch.zeros(m, k, device="cuda").to(dtype), torch.zeros(n, k, device="cuda").to(dtype).t()


def draw(rows: int, k: int, dtype: torch.dtype) -> Tensor:
    """Draw normal numbers, in FP8 of most of its range."""
    x = torch.randn(rows, k, device="cuda")
    return (x * 16).to(dtype) if dtype.itemsize == 1 else x.to(dtype)


def quantised(rows: int, k: int, dtype: torch.dtype = E4M3) -> tuple[Tensor, Tensor]:
    """Draw a matrix in FP8, and the scale of each row."""
    x = torch.randn(rows, k, device="cuda")
    scale = x.abs().amax(1) / torch.finfo(dtype).max
    return (x / scale[:, None]).to(dtype), scale


def wide(x: Tensor, scale: Tensor) -> Tensor:
    """Return what a matrix stands for whose tensor or rows have scales, in float64."""
    return x.double() * scale.double().reshape(-1, 1)


def every_value(dtype: torch.dtype) -> Tensor:
    """Return FP32 values where rounding can go wrong, of either sign: see the lines below."""
    values = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    finite = values[values.isfinite()].unique()
    ties = (finite[1:] + finite[:-1]) / 2
    most = torch.finfo(dtype).max
    others = torch.tensor(
        [most * 1.03, most * 1.07, most * 1.08, most * 1.2, 2 * most, 1e30, 3e38, math.inf, math.nan, 0.0]
    )
    tiny = torch.tensor([2.0**-17, 1.001 * 2.0**-17, 2.0**-10, 1.001 * 2.0**-10, 2.0**-30, 2.0**-126, 2.0**-140])
    beside = [torch.nextafter(ties, torch.full_like(ties, way)) for way in (-math.inf, math.inf)]
    drawn = torch.randn(2048, generator=torch.Generator().manual_seed(0)) * 2.0 ** torch.linspace(-20, 20, 2048)
    found = torch.cat([values, ties, *beside, others, tiny, drawn])
    return torch.cat([found, -found])


def spread(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return such values in a tensor, in an order of no meaning."""
    values, count = every_value(dtype), math.prod(shape)
    order = torch.randperm(len(values), generator=torch.Generator().manual_seed(1))
    return values[order].repeat(-(-count // len(values)))[:count].view(shape).cuda()


def assert_same(found: Tensor, wanted: Tensor) -> None:
    """Require the same bits, and NaN in the same places."""
    assert found.dtype is wanted.dtype
    assert found.shape == wanted.shape
    nan = wanted.float().isnan()
    assert torch.equal(found.float().isnan(), nan)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[found.itemsize]
    # Zeros of FP32 and BF16 may have either sign.
    one, other = ((x.contiguous().view(bits) if x.itemsize == 1 else x)[~nan] for x in (found, wanted))
    assert torch.equal(one, other)


def assert_near(found: Tensor, exact: Tensor, sums: float = SUMS, worst: float = 8) -> None:
    """Require at most one rounding to the result's type, and an error of the sum, which one element may exceed."""
    info = torch.finfo(found.dtype)
    exact = exact.clamp(-info.max, info.max)
    assert found.shape == exact.shape
    # Errors that are smaller than they may be are still as large as roundings' on the whole, and no larger.
    assert oracle.error(found, exact) <= info.eps / 2 + sums
    rounding = torch.maximum(exact.abs() * info.eps / 2, torch.full_like(exact, info.smallest_normal * info.eps / 2))
    typical = exact.norm() / exact.numel() ** 0.5
    excess = (found.double() - exact).abs() - 1.02 * rounding - worst * (sums * typical + rounding * 2.0**-6)
    assert excess.max() <= 0
