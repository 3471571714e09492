"""Kernels that were compiled in one file are those that each file alone gives."""

import pytest

import cutlass_ops as co
from cutlass_ops.artifacts.loader import load
from cutlass_ops.artifacts.store import KernelStore
from cutlass_ops.compilation.builder import build_artifact, build_together
from cutlass_ops.epilogue import builtin

pytestmark = [pytest.mark.compile, pytest.mark.slow]

CONFIGS = {
    "persistent": (
        co.Sm90Config(co.ThreadblockShape(128, 128, 64), co.ClusterShape(1, 2), schedule="pingpong"),
        co.Sm90Config(co.ThreadblockShape(64, 16, 256), schedule="warp_specialized", swap_ab=True),
    ),
    "sm80": (
        co.Sm80Config(co.ThreadblockShape(128, 128, 32), co.WarpShape(64, 64, 32), stages=4),
        co.Sm80Config(co.ThreadblockShape(64, 64, 32), co.WarpShape(32, 32, 32), stages=3),
    ),
}


@pytest.mark.parametrize("configs", CONFIGS.values(), ids=CONFIGS)
def test_a_file_of_several_gives_the_bytes_of_each_alone(tmp_path, monkeypatch, configs):
    specs = [
        co.KernelSpec(a="bf16.row", b="bf16.col", d="bf16.row", epilogue=builtin.bias_relu, config=config)
        for config in configs
    ]
    # They come first: if the ledger knows the kernels, nothing is compiled.
    alone = KernelStore(tmp_path / "alone")
    singles = [build_artifact(spec, store=alone) for spec in specs]
    monkeypatch.setenv("CUTLASS_OPS_CACHE_DIR", str(tmp_path / "together"))
    found = list(build_together(specs))
    assert [each.spec for each in found] == specs
    for single, kernel in zip(singles, found, strict=True):
        assert single.key == kernel.key
        assert single.read_library() == kernel.read_library()
        assert load(kernel).describe()["threads"] in (128, 256, 384)
