"""A kernel is chosen alike whatever the process has PyTorch or NumPy do: no tensor takes part."""

import contextlib

import numpy as np
import pytest
import torch
from processes import run_with_pytorch
from signatures import A100, H100, H200, signature
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from cutlass_ops.base.session import Session
from cutlass_ops.choose import dispatch, policies, space
from cutlass_ops.declare.problem import Problem
from cutlass_ops.epilogue import builtin, composed
from cutlass_ops.operand.call import call_at
from cutlass_ops.tools.explaining import explain_call
from cutlass_ops.tuner import tuning

pytestmark = pytest.mark.usefixtures("session")


class NoDispatch(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        raise AssertionError(f"{function} was called")


class NoFunction(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        raise AssertionError(f"{function} was called")


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def default_device(name):
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


SURROUNDINGS = {
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float16": lambda: default_dtype(torch.float16),
    "float64": lambda: default_dtype(torch.float64),
    "default meta": lambda: default_device("meta"),
    "default cuda": lambda: default_device("cuda"),
    "with meta": lambda: torch.device("meta"),
    "with cuda": lambda: torch.device("cuda"),
    "fake tensors": FakeTensorMode,
    "no dispatch": NoDispatch,
    "no function": NoFunction,
    "inference": torch.inference_mode,
    "NumPy raises": lambda: np.errstate(all="raise"),
}


# Measured and not, a norm, operands that are copied, and a device of which no table ships.
CALLS = [
    (H100, builtin.bias_relu.graph, "bf16", Problem(4096, 4096, 4096)),
    (H200, composed.rms_norm.graph, "f16", Problem(333, 5000, 4096)),
    (H100, builtin.residual.graph, "bf16", Problem(100, 4096, 4097)),
    (A100, builtin.bias_relu.graph, "f16", Problem(333, 5000, 4096)),
]


def asked():
    """Return all that is decided of some calls, as if they were this process's first."""
    policies.forget(shipped=True)
    found = []
    with Session().active():
        for device, graph, dtype, problem in CALLS:
            call = call_at(graph, problem, dtype, "row", "col")
            of = tuning.signature_at(graph, problem, dtype, "row", "col", None, device)
            found.append(dispatch.choose(of, device, problem))
            found.append(explain_call("it", call, device).to_json())
            found.append(dispatch.specs_for(of, device, problem.n, problem.k))
    found.append(space.ranked(signature(), Problem(333, 5000, 4096), 20, H100))
    return found


@pytest.fixture(scope="module")
def usual():
    return asked()


@pytest.mark.slow
@pytest.mark.parametrize("name", SURROUNDINGS)
def test_what_a_process_sets_changes_no_choice(name, usual):
    with SURROUNDINGS[name]():
        found = asked()
    assert found == usual


@pytest.mark.slow
def test_the_first_choice_of_a_process_may_be_made_under_any_default():
    """What is made at import, and what is kept from one choice to the next, is made there too."""
    script = """
import torch
torch.set_default_dtype(torch.float16)
torch.set_default_device("meta")
from cutlass_ops.epilogue import builtin, composed
from cutlass_ops.choose import dispatch
from cutlass_ops.tuner import tuning
from cutlass_ops.declare.device import Device
from cutlass_ops.declare.problem import Problem
H100 = Device((9, 0), 132, "NVIDIA H100 80GB HBM3")
of = tuning.signature_at(builtin.bias_relu.graph, Problem(333, 5000, 4096), "bf16", "row", "col", None, H100)
print(dispatch.choose(of, H100, Problem(333, 5000, 4096))[0].config.slug)
"""
    done = run_with_pytorch(script)
    expected, _ = dispatch.choose(signature(), H100, Problem(333, 5000, 4096))
    assert (done.stdout.strip(), done.stderr) == (expected.config.slug, "")
