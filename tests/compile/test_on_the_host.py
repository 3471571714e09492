"""Random numbers, indices and rounding of kernels, by the host's compiler, against PyTorch's: bit for bit."""

import math
import subprocess
from pathlib import Path

import pytest
import torch

from cutlass_ops.operand import reference
from tests.compile import host

pytestmark = [pytest.mark.compile, pytest.mark.slow]

SEEDS = [(0, 0), (1, 5), (2**63 - 1, -1), (-(2**63), 2**40 + 5), (0x123456789ABCDEF0, 7)]
VALUES = [1.0, 3.0, 3.0, math.nan, math.nan, -math.inf, math.inf, 0.0, -0.0]


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    source = Path(__file__).with_name("on_the_host.cpp")
    program = host.program(tmp_path_factory.mktemp("host"), source, *host.UNRESOLVED)
    numbers = [str(number) for pair in SEEDS for number in pair]
    text = subprocess.run([program, *numbers], check=True, capture_output=True, text=True).stdout
    lines = [line.split() for line in text.splitlines()]
    return {what: [tuple(map(int, rest)) for first, *rest in lines if first == what] for what in {x[0] for x in lines}}


def test_random_numbers_have_the_bits_of_the_reference(said):
    wanted = torch.stack([reference.uniform(seed, offset, 20, 20) for seed, offset in SEEDS]).view(torch.int32)
    by_quad, by_place = torch.tensor(said["uniform"], dtype=torch.int32).unbind(1)
    assert torch.equal(by_quad, wanted.flatten())
    assert torch.equal(by_place, wanted.flatten())
    assert len(wanted.unique()) > 0.99 * wanted.numel()


def test_gelu_is_exact_to_fp32_at_every_bf16_number(said):
    x, found = torch.tensor(said["gelu"], dtype=torch.int32).view(torch.float32).unbind(1)
    wanted = 0.5 * x.double() * torch.special.erfc(-x.double() / math.sqrt(2))
    finite = x.isfinite()
    assert ((found - wanted).abs()[finite] <= 1.2e-7 * wanted.abs().clamp(1)[finite]).all()
    # Where 1 + erf would cancel. Below, results are no normal numbers of BF16.
    near = finite & (x.abs() < 12) & (x.abs() > 2.0**-100)
    assert ((found - wanted).abs()[near] <= 1e-5 * wanted.abs()[near]).all()
    assert ((found - wanted).abs()[near & (x > -4)] <= 1e-6 * wanted.abs()[near & (x > -4)]).all()
    # Infinities and NaN as PyTorch's on the GPU, which multiplies by the distribution.
    assert (found[x == math.inf] == math.inf).all()
    assert found[(x == -math.inf) | x.isnan()].isnan().all()
    assert torch.equal(found[x == 0].signbit(), x[x == 0].signbit())


def test_of_two_values_a_reduction_keeps_the_one_that_pytorch_does(said):
    pairs = [torch.tensor([y, x]) for x in VALUES for y in VALUES]  # y comes first: its index is less
    assert said["joined"] == [((2, 5)[pair.argmax()], (2, 5)[pair.argmin()]) for pair in pairs]


def test_sums_of_exponentials_keep_infinities_and_nan(said):
    triples = torch.tensor([[x, y, z] for x in VALUES for y in VALUES for z in (0.5, math.nan, -math.inf)])
    found = torch.tensor(said["summed"], dtype=torch.int32).view(torch.float32)[:, 0]
    torch.testing.assert_close(found, triples.logsumexp(1), equal_nan=True)


def test_elements_of_a_row_keep_together_what_pytorch_keeps(said):
    rows = [torch.tensor([x, y, z][:count]) for x in VALUES for y in VALUES for z in VALUES for count in (3, 2)]
    wanted = [(int(row.argmax()), int(row.argmin())) for row in rows]
    assert [found[:2] for found in said["folded"]] == wanted
    sums = torch.tensor([found[2] for found in said["folded"]], dtype=torch.int32).view(torch.float32)
    torch.testing.assert_close(sums, torch.stack([row.logsumexp(0) for row in rows]), equal_nan=True)


def test_functions_of_special_values(said):
    x = torch.tensor(VALUES)
    wanted = torch.stack([torch.sign(x).view(torch.int32), torch.round(x / 2).view(torch.int32), x.isnan().int()], 1)
    found = torch.tensor(said["functions"], dtype=torch.int32)
    numbers = ~x.isnan()  # NaN has many bits
    assert torch.equal(found[numbers], wanted[numbers])
    assert torch.equal(found[:, 0], wanted[:, 0])
    assert torch.equal(found[:, 2], wanted[:, 2])


def operands_of_divisions():
    """Return what on_the_host.cpp divides."""
    state, drawn = 1, []
    for _ in range(40000):
        state = (state * 1664525 + 1013904223) % 2**32
        drawn.append(state)
    bits = torch.tensor(drawn).to(torch.int32).view(torch.float32).view(-1, 2)
    special = [0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -3.0, 1e-45, -1e-40, 3e38, 2.0**-64, 2.0**64]
    pairs = torch.tensor([(x, y) for x in special for y in special])
    return torch.cat([bits, pairs]).unbind(1)


def test_division_and_square_root_are_exact_at_every_size(said):
    x, y = operands_of_divisions()
    quotient, root = torch.tensor(said["divided"], dtype=torch.int32).view(torch.float32).unbind(1)
    for found, wanted in ((quotient, x / y), (root, x.sqrt())):
        number = ~wanted.isnan()
        assert torch.equal(found.isnan(), ~number)
        assert torch.equal(found.signbit()[number], wanted.signbit()[number])
        # One unit in the last place; below the least normal number, one of the smallest steps.
        step = torch.maximum(wanted.abs() * 2.0**-23, torch.tensor(2.0**-149))
        finite = number & wanted.isfinite()
        assert torch.equal(found.isfinite() & number, finite)
        assert ((found - wanted).abs() <= step)[finite].all()


@pytest.mark.parametrize(("at", "dtype"), [(1, torch.float8_e4m3fn), (2, torch.float8_e5m2)])
def test_casts_to_fp8_are_those_of_the_reference(said, at, dtype):
    """Every exponent and sign, with what lies on, just above, between and just below values of 16 bits."""
    bits = torch.tensor(said["cast"], dtype=torch.int32)
    x, found = bits[:, 0].contiguous().view(torch.float32), bits[:, at].contiguous().view(torch.float32)
    wanted = reference.rounded(x, dtype).float()
    nan = x.isnan()
    assert nan.any()
    assert torch.equal(found.isnan(), nan)
    assert torch.equal(found[~nan].view(torch.int32), wanted[~nan].view(torch.int32))


@pytest.mark.parametrize(("at", "dtype"), [(1, torch.float8_e4m3fn), (3, torch.float8_e5m2)])
def test_scales_of_blocks_are_those_of_the_reference(said, at, dtype):
    """Every exponent, zero, infinity and NaN."""
    bits = torch.tensor(said["scale"], dtype=torch.int32)
    most, inverse, scale = (bits[:, column].contiguous().view(torch.float32) for column in (0, at, at + 1))
    # One value a block: the value times its inverse is the quotient of a block of 1.
    wanted = reference.quantized(most[:, None], dtype)[1][:, 0]
    largest = torch.full_like(most, torch.finfo(dtype).max)
    nan = most.isnan()
    assert nan.any()
    assert torch.equal(scale.isnan(), nan)
    assert torch.equal(inverse.isnan(), nan)
    assert torch.equal(scale[~nan].view(torch.int32), wanted[~nan].view(torch.int32))
    assert torch.equal(inverse[~nan], (largest / most.clamp(min=2.0**-110))[~nan])
    finite = most.isfinite()
    for each in (inverse[finite], scale[finite]):
        assert (each >= torch.finfo(torch.float32).tiny).all()
        assert each.isfinite().all()
