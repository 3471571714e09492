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


@pytest.mark.slow
def test_digits_mlp():
    pytest.importorskip("sklearn")
    assert "1797 of 1797 images" in _run("digits_mlp.py")


@pytest.mark.slow
def test_transformer_block():
    pytest.importorskip("transformers")
    assert "errors against float64" in _run("transformer_block.py")


@pytest.mark.slow
def test_fp8_layer():
    pytest.importorskip("transformers")
    said = _run("fp8_layer.py")
    assert "prefill, static scales of tensors, fused" in said
    assert "decoding, dynamic scales of rows, PyTorch" in said


@pytest.mark.slow
def test_custom_epilogue():
    assert "row_sum_square (256,) torch.float32" in _run("custom_epilogue.py")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gpt_oss_gate.py", "of the gates are clamped"),
        ("cross_entropy.py", "96 of 96 predictions are those of float64"),
        ("dropout_residual.py", "step 1: 89.9% kept"),
    ],
)
def test_epilogues_that_choose_count_and_draw(name, said):
    assert said in _run(name)


@pytest.mark.slow
def test_moe_layer():
    pytest.importorskip("transformers")
    said = _run("moe_layer.py")
    assert "qwen3: 8 of 32 experts a token" in said
    assert "mixtral: 2 of 8 experts a token" in said
    assert said.count("and transformers'") == 4


@pytest.mark.slow
def test_train_gpt2_small(tmp_path):
    pytest.importorskip("matplotlib")
    said = _run("train_gpt2_small.py", "--steps", "12", "--plot", str(tmp_path / "losses.svg"))
    assert "fused and plain differ by" in said
    assert (tmp_path / "losses.svg").read_text().startswith("<?xml")


@pytest.mark.slow
def test_patch_llama():
    pytest.importorskip("transformers")
    assert "co.unpatch gives 21 modules their own forwards again" in _run("patch_llama.py")


@pytest.mark.slow
def test_jax_layer():
    pytest.importorskip("jax")
    assert "errors against FP32, of d and of amax: fused" in _run("jax_layer.py")


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "kernel"), [("sm80", "DefaultGemmWithVisitor"), ("sm90", "GemmUniversal")])
def test_read_the_source(arch, kernel):
    assert kernel in _run("read_the_source.py", arch)


def test_cpp_declares_one_kernel():
    catalogue = shipping.load(str(EXAMPLES / "cpp" / "catalogue.toml"))
    (spec,) = shipping.shipment(catalogue).specs
    assert (spec.target, str(spec.a), str(spec.b), str(spec.d)) == ("sm_90a", "bf16.row", "bf16.col", "bf16.row")


def test_deploy_declares_what_it_ships():
    catalogue = shipping.load(str(EXAMPLES / "deploy" / "catalogue.toml"))
    found = shipping.shipment(catalogue)
    assert {spec.target for spec in found.specs} == {"sm_80", "sm_90a"}
    assert len(found.choices) == 2
