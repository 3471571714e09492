"""One kernel of the catalogue for each architecture goes through the real compiler."""

import pytest

from cutlass_ops.artifacts.store import KernelStore
from cutlass_ops.base import resources
from cutlass_ops.compilation.builder import build_artifact
from cutlass_ops.ship import catalog
from cutlass_ops.ship.packing import pack
from cutlass_ops.ship.shipping import Catalogue
from cutlass_ops.tools.inspection import inspect

ENTRIES = {entry.file: entry for entry in catalog.default()}


@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "opcodes", "stages"),
    [
        ("sm_80/gemm_bias_relu_residual_bf16.cu", {"HMMA", "LDGSTS"}, 4),
        ("sm_90a/gemm_bias_relu_bf16.cu", {"HGMMA", "UTMALDG", "UTMASTG"}, 6),
    ],
)
def test_a_kernel_compiles_to_what_it_declares(file, opcodes, stages):
    artifact = build_artifact(ENTRIES[file].spec)
    report = inspect(artifact)
    assert artifact.source.read_text() == (resources.generated() / file).read_text()
    assert opcodes <= set(report.sass)
    assert report.stages == stages
    assert report.spill_stores == report.spill_loads == 0
    assert artifact.size <= 300_000


@pytest.mark.compile
@pytest.mark.slow
def test_a_kernel_that_is_compiled_twice_makes_the_same_bundle(tmp_path):
    """Another folder, another time: not a byte of a bundle depends on either."""
    wanted = Catalogue(specs=(ENTRIES["sm_80/gemm_bias_relu_residual_bf16.cu"].spec,))
    pack(wanted).write(tmp_path / "a.bundle")
    pack(wanted, store=KernelStore(tmp_path / "elsewhere")).write(tmp_path / "b.bundle")
    assert (tmp_path / "a.bundle").read_bytes() == (tmp_path / "b.bundle").read_bytes()
