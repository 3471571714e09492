"""Rotary embeddings, which take values of the column beside."""

import math

import pytest
import torch

import cutlass_ops as co
from tests.gpu import kernels

pytestmark = pytest.mark.gpu

WIDE = [name for name in kernels.pairs() if name.startswith("rotary-f32")]
ROTARY = [name for name in kernels.pairs() if name.startswith("rotary") and name not in WIDE]


def rotated(x, angles):
    """Rotate pairs of columns in float64; angles are those of pairs."""
    first, second = x[:, 0::2], x[:, 1::2]
    turned = first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()
    return torch.stack(turned, dim=2).flatten(1)


@pytest.mark.parametrize("name", ROTARY)
def test_a_rotary_embedding_against_float64(name):
    m, n, k = 777, 384, 512
    a = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(n, k, device="cuda", dtype=torch.bfloat16).t()
    position = torch.arange(130_000, 130_000 + m, device="cuda", dtype=torch.float32)
    inverse = 500_000.0 ** -(torch.arange(n // 2, device="cuda") * 2 / n)
    inverse[-8:] = 0
    frequency = torch.stack((-inverse, inverse), dim=1).flatten()
    found = co.build(kernels.pairs()[name])(a, b, position=position, frequency=frequency)
    # An angle is one FP32 product, as in transformers.
    exact = rotated(a.double() @ b.double(), (position[:, None] * inverse).double())
    for part in (slice(None), slice(-16, None)):  # of which the last are not rotated
        assert (found[:, part].double() - exact[:, part]).norm() / exact[:, part].norm() < 2**-9


@pytest.mark.parametrize("name", WIDE)
def test_sines_and_cosines_against_float64(name):
    """With A @ B of ones in even columns and zeros in odd ones, D has cosines and sines."""
    kernel = co.build(kernels.pairs()[name])
    m, n, k = 512, 256, 8
    a = torch.zeros(m, k, device="cuda", dtype=torch.bfloat16)
    b = torch.zeros(n, k, device="cuda", dtype=torch.bfloat16)
    a[:, 0], b[0::2, 0] = 1, 1
    size = torch.logspace(-6, math.log10(2 * math.pi * 2**18), m, device="cuda")
    frequency = torch.tensor([1.0, 1.0, -1.0, -1.0], device="cuda").repeat(n // 4)
    found = kernel(a, b.t(), position=size, frequency=frequency)
    angle = (size[:, None] * frequency).double()
    exact = torch.where(torch.arange(n, device="cuda") % 2 == 0, angle.cos(), angle.sin())
    assert (found.double() - exact).abs().max() < 1e-6
    special = torch.tensor([math.inf, -math.inf, math.nan, 3e38, 1e12], device="cuda")
    found = kernel(a[:5], b.t(), position=special, frequency=frequency)
    assert found[:3].isnan().all()
    assert (found[3:].abs() <= 1).all()
