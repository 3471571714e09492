"""What tests of groups of rows share: epilogues, tensors, and where groups end."""

import torch

import cutlass_ops as co

BF16 = torch.bfloat16


@co.epilogue
def mixed(acc, bias: co.Row, scale: co.Col, residual: co.Tile, factor: co.Scalar):
    return co.e.relu(acc * scale + bias) * factor + residual


@co.epilogue
def saved(acc, bias: co.Row):
    return {"d": co.e.relu(acc + bias), "pre": acc}


@co.epilogue
def summed(acc):
    return {"d": acc, "of_rows": co.e.sum(acc, dim=1)}


@co.epilogue
def numbered(acc):
    return acc * 0 + co.e.row_index()


@co.epilogue
def clash(acc, offsets: co.Row):
    return acc + offsets


# Groups that end there, of 12 rows.
OFFSETS = [(3, 7, 12), (0, 12, 12), (12, 12, 12), (0, 0, 0), (2, 2, 9), (0, 0, 5)]


def ends(*offsets):
    """Return where groups end, or how many rows each has."""
    return torch.tensor(offsets, dtype=torch.int32)


def normal(*shape, dtype=BF16):
    return torch.randn(*shape).to(dtype)


def close(found, wanted):
    """Require a result to be one in float64, but for rounding."""
    torch.testing.assert_close(found.double(), wanted.to(found.dtype).double(), rtol=2**-6, atol=2**-4)
