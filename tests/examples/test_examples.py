"""The examples run on the CPU; the quick start, which compiles, is run by CI as README.md has it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cutlass_ops.ship import shipping

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def _run(name, *args):
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(EXAMPLES / name), *args]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# Each example, what it needs besides PyTorch, and what it says.
EXAMPLES_RUN = {
    "digits_mlp": ("sklearn", ["1797 of 1797 images"]),
    "transformer_block": ("transformers", ["errors against float64"]),
    "fp8_layer": (
        "transformers",
        ["prefill, static scales of tensors, fused", "decoding, dynamic scales of rows, PyTorch"],
    ),
    "custom_epilogue": (None, ["row_sum_square (256,) torch.float32"]),
    "gpt_oss_gate": (None, ["of the gates are clamped"]),
    "cross_entropy": (None, ["96 of 96 predictions are those of float64"]),
    "dropout_residual": (None, ["step 1: 89.9% kept"]),
    "moe_layer": (
        "transformers",
        ["qwen3: 8 of 32 experts a token", "mixtral: 2 of 8 experts a token", *["and transformers'"] * 4],
    ),
    "patch_llama": ("transformers", ["co.unpatch gives 21 modules their own forwards again"]),
    "jax_layer": ("jax", ["errors against FP32, of d and of amax: fused"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES_RUN)
def test_an_example_runs(name):
    package, wanted = EXAMPLES_RUN[name]
    if package is not None:
        pytest.importorskip(package)
    said = _run(f"{name}.py")
    for text in wanted:
        assert said.count(text) >= wanted.count(text)


@pytest.mark.slow
def test_train_gpt2_small(tmp_path):
    pytest.importorskip("matplotlib")
    said = _run("train_gpt2_small.py", "--steps", "12", "--plot", str(tmp_path / "losses.svg"))
    assert "fused and plain differ by" in said
    assert (tmp_path / "losses.svg").read_text().startswith("<?xml")


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "kernel"), [("sm80", "DefaultGemmWithVisitor"), ("sm90", "GemmUniversal")])
def test_read_the_source(arch, kernel):
    assert kernel in _run("read_the_source.py", arch)


def test_cpp_declares_one_kernel():
    catalogue = shipping.load(str(EXAMPLES / "cpp" / "catalogue.toml"))
    (spec,) = shipping.shipment(catalogue).specs
    assert (spec.target, str(spec.a), str(spec.b), str(spec.d)) == ("sm_90a", "bf16.row", "bf16.col", "bf16.row")


@pytest.mark.slow
def test_deploy_declares_what_it_ships():
    catalogue = shipping.load(str(EXAMPLES / "deploy" / "catalogue.toml"))
    found = shipping.shipment(catalogue)
    assert {spec.target for spec in found.specs} == {"sm_80", "sm_90a"}
    assert len(found.choices) == 2
