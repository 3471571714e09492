"""Rung 10: CUTLASS, from a declaration of this library, as one would first write it, and as the library chooses."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

import cutlass_ops as co
from cutlass_ops.choose import dispatch
from cutlass_ops.declare.gpus import gpu_named
from cutlass_ops.operand.call import check_call, device_of, signature_of

from .problem import Shape


@co.epilogue
def plain(acc):  # noqa: ANN001, ANN201
    """D = A @ B."""
    return acc


# A tile, and every other choice left as it is.
UNTUNED = co.KernelSpec(
    a="f16.row",
    b="f16.col",
    d="f16.row",
    epilogue=plain,
    config=co.Sm90Config(co.ThreadblockShape(128, 128, 64)),
)


@cache
def _kernel(spec: co.KernelSpec) -> object:
    return co.build(spec)


def machine_code(spec: co.KernelSpec) -> bytes:
    """Compile a declaration, or find it in the store, and return its library."""
    return _kernel(spec).loaded.artifact.read_library()


def run_untuned(a: Tensor, b: Tensor, d: Tensor) -> object:
    """Run exactly this kernel."""
    return _kernel(UNTUNED)(a, b.t(), out=d)


def run_tuned(a: Tensor, b: Tensor, d: Tensor) -> object:
    """Run the kernel that the library chooses for the shape."""
    return co.gemm(a, b.t(), out=d)


def chosen(shape: Shape) -> co.KernelSpec:
    """Return the kernel that the library chooses for a shape: on this GPU, or on an H100 where there is none."""
    device = device_of(torch.device("cuda", 0)) if torch.cuda.is_available() else gpu_named("H100")
    a, b = (torch.empty(side, shape.k, dtype=torch.float16, device="meta") for side in (shape.m, shape.n))
    call = check_call(plain.graph, a, b.t(), {}, None, None)
    return dispatch.choose(signature_of(call, device), device, call.problem)[0]
