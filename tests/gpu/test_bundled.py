"""Calls served by a bundle's kernels on the device, with nothing there that compiles."""

import json
import os
import subprocess
import sys
import textwrap

import pytest

import cutlass_ops as co
from cutlass_ops.ship import packing, shipping

pytestmark = pytest.mark.gpu

# One exact kernel, and what two numbers of rows need with one weight.
WANTED = shipping.Catalogue(
    kernels=(shipping.Kernels(ops=("gemm_bias_relu",), archs=("sm_90a",), shapes=("64,300x512x256",)),),
    specs=(
        co.KernelSpec(
            a="bf16.row",
            b="bf16.col",
            d="bf16.row",
            epilogue=co.gemm_bias_relu.graph,
            config=co.Sm90Config(co.ThreadblockShape(64, 64, 64), schedule="warp_specialized"),
        ),
    ),
)

SERVE = textwrap.dedent("""
    import json, sys, torch

    MAKING = ("os.mkdir", "os.rename", "os.link", "os.symlink")
    STARTING = ("subprocess.Popen", "os.system", "os.posix_spawn", "os.exec", "os.fork")

    def watch(event, args):
        if event in STARTING:
            started.append(event)
        if event in MAKING or event == "open" and isinstance(args[2], int) and args[2] & 0x43:  # to write, or to make
            written.append(str(args[0]))

    started, written, errors = [], [], []
    sys.addaudithook(watch)
    import cutlass_ops as co
    from cutlass_ops.artifacts.bundle import BundledKernel
    from cutlass_ops.run.registry import Registry

    bundle = co.load_bundle(sys.argv[1])
    for m in (64, 300, 7):
        x, weight = (torch.randn(rows, 256, device="cuda", dtype=torch.bfloat16) for rows in (m, 512))
        bias = torch.randn(512, device="cuda", dtype=torch.bfloat16)
        d = torch.full((m, 512), float("nan"), device="cuda", dtype=torch.bfloat16)
        co.gemm_bias_relu(x, weight.t(), bias, out=d)
        exact = torch.relu(x.double() @ weight.double().t() + bias.double())
        errors.append(float((d.double() - exact).norm() / exact.norm()))
    try:
        co.gemm_bias_gelu(x, weight.t(), bias)
        missing = None
    except co.errors.MissingKernelError as exc:
        missing = str(exc)
    bundled = [isinstance(entry.kernel.artifact, BundledKernel) for entry in Registry.current().entries()]
    found = {"errors": errors, "bundled": bundled, "missing": missing}
    print(json.dumps(found | {"started": started, "written": written}))
""")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    path = tmp_path_factory.mktemp("bundled") / "kernels.bundle"
    packing.pack(WANTED).write(path)
    return path


def test_a_process_without_compilers_and_store_is_served(bundle, tmp_path):
    nowhere = {"CUTLASS_OPS_CACHE_DIR": str(tmp_path / "none"), "CUTLASS_OPS_NVCC": str(tmp_path / "no nvcc")}
    command = [sys.executable, "-c", SERVE, str(bundle)]
    done = subprocess.run(command, env=os.environ | nowhere, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    # One rounding to BF16, of values of every size.
    assert all(error <= 2**-8 for error in found["errors"]), found
    assert found["bundled"]
    assert all(found["bundled"])
    assert found["started"] == found["written"] == []
    assert "gelu" in found["missing"] or "epilogue" in found["missing"]
    assert not (tmp_path / "none").exists()
