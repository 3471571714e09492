"""GPUs by name: those that tables and rooflines know, and nothing else."""

import json

import pytest

from cutlass_ops.base import arch, resources
from cutlass_ops.base.errors import ConfigError
from cutlass_ops.declare import chips, gpus


def test_every_gpu_that_something_is_known_of_has_a_name():
    assert all(chip.tflops > 0 and chip.gb_per_s > 0 and chip.l2_bytes > 0 for chip in chips.CHIPS.values())
    for path in resources.tuned().glob("*.json"):
        table = json.loads(path.read_text())
        assert gpus.GPUS[table["device"]].multiprocessors == table["multiprocessors"]


def test_every_target_that_kernels_are_shipped_for_has_one():
    for target, gpu in gpus.BY_TARGET.items():
        assert gpu.capability == arch.target(target).capability


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("h100", "NVIDIA H100 80GB HBM3"),
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3"),
        ("H100 PCIe", "NVIDIA H100 PCIe"),
        ("H200", "NVIDIA H200"),
        ("a100-sxm4-40gb", "NVIDIA A100-SXM4-40GB"),
        ("nvidia_l4", "NVIDIA L4"),
        ("L40S", "NVIDIA L40S"),
        ("sm_90", "NVIDIA H100 80GB HBM3"),
        ("sm_90a", "NVIDIA H100 80GB HBM3"),
        ("SM80", "NVIDIA A100-SXM4-80GB"),
        ("8.6", "NVIDIA RTX A6000"),
        ("compute_89", "NVIDIA L40S"),
    ],
)
def test_names_and_capabilities(text, name):
    assert gpus.gpu_named(text).name == name


@pytest.mark.parametrize(
    "text", ["", " ", "nvidia", "sm_75", "sm_100", "10.0", "T4", "L", "100", "cuda:0", "()", "[", "\\"]
)
def test_others_are_refused_with_the_choices(text):
    with pytest.raises(ConfigError, match=r"is not a known GPU: use sm_80, .*NVIDIA H200.*NVIDIA L4"):
        gpus.gpu_named(text)
