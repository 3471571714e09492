"""The polynomial in kernels' GELU is the one that its script fits."""

import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from cutlass_ops.base import resources
from tests.scripts import script

FIT = script("fit_normal")


def test_the_header_has_what_the_script_fits():
    header = (resources.include() / "cutlass_ops" / "normal.h").read_text()
    written = re.findall(r"-?\d+\.\d+f", header[header.index("kFactors[]") : header.index("};")])
    fitted = FIT.fit()
    assert [float(each[:-1]) for each in written] == pytest.approx(fitted, rel=1e-7)
    x = np.linspace(-12, 12, 20_001).astype(np.float32).astype(np.float64)
    wanted = F.gelu(torch.from_numpy(x)).numpy()
    assert np.abs(FIT.gelu(x, fitted) - wanted).max() <= 1.2e-7 * 12
