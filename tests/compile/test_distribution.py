"""A distribution of three kernels: built, installed by pip, found where nothing compiles, and a kernel of it loaded.

They are of the architecture whose kernels compile in half the time. Other tests compile those of Hopper.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cutlass_ops.artifacts.installed import NAMESPACE

pytestmark = [pytest.mark.compile, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]

FIND = """
import sys

import torch

STARTING = ("subprocess.Popen", "os.system", "os.posix_spawn", "os.exec", "os.fork")
started = []
sys.addaudithook(lambda event, args: event in STARTING and started.append(event))

from cutlass_ops import __version__
from cutlass_ops.choose import dispatch
from cutlass_ops.declare.gpus import BY_TARGET
from cutlass_ops.declare.problem import Problem
from cutlass_ops.epilogue import builtin
from cutlass_ops.operand.call import call_at, signature_of
from cutlass_ops.run.registry import Registry

device = BY_TARGET["sm_80"]
# A weight whose choices are in the bundle, and another one.
for problem in (Problem(64, 4096, 4096), Problem(300, 4096, 4104)):
    call = call_at(builtin.bias_relu.graph, problem, "bf16", "row", "col")
    decision = dispatch.decide(signature_of(call, device), device, problem)
    kernel = Registry.current().kernel(decision.spec)
    assert kernel.describe()["threads"] >= 128
    assert kernel.artifact.origin == f"installed with cutlass-ops-kernels-sm80 {__version__}", kernel.artifact.origin
    print("bundle" if decision.bundled else "model", "tables" if "cutlass_ops.choose.policies" in sys.modules else "")
assert started == [], started
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder in which pip has installed it."""
    folder = tmp_path_factory.mktemp("distribution")
    which = ("--op", "gemm_bias_relu", "--dtype", "bf16", "--most", "3")
    build = [sys.executable, "-m", "cutlass_ops", "distribution", "sm_80", *which, "--out", str(folder)]
    subprocess.run(build, check=True, cwd=ROOT)
    (wheel,) = folder.glob("*.whl")
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        folder / "site",
    ]
    subprocess.run([*install, wheel], check=True, umask=0o022)
    return folder / "site"


def test_each_bundle_is_what_it_claims(site):
    (path,) = (site / NAMESPACE / "cutlass_ops_kernels_sm80").iterdir()
    done = subprocess.run(
        [sys.executable, "-m", "cutlass_ops", "verify", path], capture_output=True, text=True, check=True
    )
    assert "3 kernels for sm_80 match the manifest" in done.stdout


@pytest.mark.parametrize("jit", ["0", "1"])
def test_calls_find_their_kernels_where_nothing_compiles(site, jit):
    """Without a compiler, whether compiling is allowed or not; no program is started."""
    paths = os.pathsep.join([str(ROOT), str(site)])
    bare = {"PATH": "/nowhere", "HOME": "/nowhere", "PYTHONPATH": paths, "CUTLASS_OPS_JIT": jit}
    nothing = {"CUTLASS_OPS_NVCC": "/nowhere/nvcc"}  # the test's environment has the wheels of a toolkit
    done = subprocess.run([sys.executable, "-c", FIND], env=bare | nothing, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # The first choice needs neither tables nor a model.
    assert done.stdout == "bundle \nmodel tables\n"
