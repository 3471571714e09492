"""The kernels of the training steps that tests run: found by running the steps on a device that is made up."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from pathlib import Path

import pytest
import torch

from cutlass_ops.declare.device import Device
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.run import backward
from tests import modules
from tests.layers import LAYERS, tuple_of

sys.path.append(str(Path(__file__).parents[1] / "unit"))
from fake_device import fake_device


def _layers() -> None:
    """Make the steps of test_backward.py."""
    for layer, _, shapes in LAYERS.values():
        for dtype in (torch.bfloat16, torch.float16):
            given = [torch.randn([8 * x if x > 1 else x for x in s]).to(dtype).requires_grad_() for s in shapes]
            found = tuple_of(layer(*given))
            torch.autograd.grad(found, given, [torch.ones_like(x) for x in found])


def specs(device: Device, tests: Collection[str]) -> list[KernelSpec]:
    """Return the kernels that the steps of some test modules launch on a device."""

    def run() -> None:
        if "test_backward" in tests:
            _layers()
        if "test_modules" in tests:
            for each in modules.steps():
                each()

    return noted(device, run)


def noted(device: Device, run: Callable[[], object]) -> list[KernelSpec]:
    """Return the kernels that something launches on a device, which it takes the CPU for."""
    with pytest.MonkeyPatch.context() as patch, fake_device(patch, device) as fake:
        patch.setattr(backward, "has_kernels", lambda a: True)
        run()
        return list(fake.loaded)
