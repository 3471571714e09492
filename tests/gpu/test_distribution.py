"""Calls served on the device by an installed distribution, with nothing there that compiles."""

import json
import os
import subprocess
import sys
import textwrap
import zipfile

import pytest
import torch

from cutlass_ops import __version__
from cutlass_ops.declare.gpus import BY_TARGET
from cutlass_ops.operand.call import device_of
from cutlass_ops.ship import distributing

pytestmark = pytest.mark.gpu

SERVE = textwrap.dedent("""
    import gc, json, time, torch

    def tensors(m, n, k):
        x, weight = (torch.randn(rows, k, device="cuda", dtype=torch.bfloat16) for rows in (m, n))
        return x, weight, torch.randn(n, device="cuda", dtype=torch.bfloat16)

    def error(d, x, weight, bias):
        exact = torch.relu(x.double() @ weight.double().t() + bias.double())
        return float((d.double() - exact).norm() / exact.norm())

    x, weight, bias = tensors(64, 4096, 4096)
    torch.cuda.synchronize()
    gc.collect()
    began = time.perf_counter()
    import cutlass_ops as co
    d = co.gemm_bias_relu(x, weight.t(), bias)
    torch.cuda.synchronize()
    milliseconds = 1000 * (time.perf_counter() - began)
    errors = [error(d, x, weight, bias)]
    for problem in ((1, 4096, 4096), (3000, 4096, 4096), (300, 520, 264)):
        x, weight, bias = tensors(*problem)
        errors.append(error(co.gemm_bias_relu(x, weight.t(), bias), x, weight, bias))
    origins = sorted({entry.kernel.artifact.origin for entry in co.registry.entries()})
    print(json.dumps({"milliseconds": milliseconds, "errors": errors, "origins": origins}))
""")


@pytest.fixture(scope="module")
def arch():
    capability = device_of(torch.device("cuda", 0)).capability
    return next(name for name, device in BY_TARGET.items() if device.capability == capability)


@pytest.fixture(scope="module")
def site(tmp_path_factory, arch):
    folder = tmp_path_factory.mktemp("distribution")
    wheel = distributing.build(arch, distributing.parts(arch, ["gemm_bias_relu"], ["bf16"], most=3), folder)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


@pytest.mark.parametrize("jit", ["0", "1"])
def test_a_process_without_compilers_and_store_is_served(site, arch, tmp_path, jit, record_property):
    nowhere = {"CUTLASS_OPS_CACHE_DIR": str(tmp_path / "none"), "CUTLASS_OPS_NVCC": str(tmp_path / "no nvcc")}
    paths = {"PYTHONPATH": os.pathsep.join([str(site), *sys.path]), "CUTLASS_OPS_JIT": jit}
    command = [sys.executable, "-c", SERVE]
    done = subprocess.run(command, env=os.environ | nowhere | paths, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    # One rounding to BF16, of values of every size.
    assert all(error <= 2**-8 for error in found["errors"]), found
    assert found["origins"] == [f"installed with {distributing.name_of(arch)} {__version__}"]
    assert not (tmp_path / "none").exists()
    # bench_first_call.py measures it; a test on a busy machine only notes it.
    record_property("milliseconds_from_import_to_result", found["milliseconds"])
    print(f"{found['milliseconds']:.0f} ms from the import to the first result")
