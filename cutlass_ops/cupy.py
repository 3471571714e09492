"""The ops for CuPy arrays: the same kernels, on CuPy's current stream, without a copy.

>>> import cupy
>>> import cutlass_ops.cupy as cc
>>> a, b = cupy.ones((512, 4096), cupy.float16), cupy.ones((4096, 4096), cupy.float16)
>>> d = cc.gemm_bias_relu(a, b, cupy.zeros(4096, cupy.float16))

Each function takes what the one of this name in ``cutlass_ops`` takes, with CuPy arrays for tensors, also in
``cutlass_ops.Scaled`` and ``cutlass_ops.Groups``, and gives arrays.
Arrays and tensors share their memory by DLPack. docs/interop.md says more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.utils.dlpack
from torch import Tensor
from torch.utils import _pytree

try:
    import cupy
except ImportError as exc:
    raise ImportError(
        "cutlass_ops.cupy needs CuPy, which is not installed: pip install cupy-cuda13x, or cupy-cuda12x for CUDA 12"
    ) from exc

from cutlass_ops.epilogue.unknown import unknown_name
from cutlass_ops.operand.results import Outputs
from cutlass_ops.run import gated, named, norms, weights
from cutlass_ops.run import gemm as of_gemm

__all__ = [
    "gemm",
    "gemm_bias",
    "gemm_bias_gelu",
    "gemm_bias_relu",
    "gemm_bias_relu_residual",
    "gemm_bias_residual",
    "gemm_bias_silu",
    "gemm_residual",
    "gemm_swiglu",
    "layernorm_gemm",
    "prepare",
    "rmsnorm_gemm",
]

# Tensors by their id, each with the caller's array of which it shares the memory. An id holds while the tensor is kept.
_Given: TypeAlias = dict[int, tuple[Tensor, Any]]


def _for_cupy(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of tensors as one of CuPy arrays."""

    def of_arrays(*arguments: Any, **by_name: Any) -> Any:
        with _on_cupys_stream(_first(*arguments, *by_name.values())):
            given: _Given = {}
            tensors = [_tensors(x, given) for x in arguments]
            try:
                result = function(*tensors, **{name: _tensors(x, given) for name, x in by_name.items()})
            except ValueError as exc:
                if type(exc) is not ValueError:
                    raise
                raise ValueError(str(exc).replace(".t()", ".T")) from None  # as arrays are transposed
            return _as_arrays(result, given)

    of_arrays.__name__ = of_arrays.__qualname__ = function.__name__
    of_arrays.__doc__ = (
        f"{(function.__doc__ or '').splitlines()[0]}\n\nIt is ``cutlass_ops.{function.__name__}`` for CuPy arrays, "
        "with its arguments, results and errors."
    )
    return of_arrays


def _first(*values: Any) -> Any:
    return next((x for x in _pytree.tree_leaves(values) if isinstance(x, cupy.ndarray)), None)


@contextlib.contextmanager
def _on_cupys_stream(array: Any) -> Iterator[None]:
    """Make CuPy's current stream on an array's device PyTorch's, so that neither waits for the other."""
    if array is None:  # the op itself says what it needs
        yield
        return
    with cupy.cuda.Device(array.device.id):
        address = cupy.cuda.get_current_stream().ptr
        stream = _stream(address, torch.device("cuda", array.device.id))
        with torch.cuda.stream(stream):
            yield


def _stream(address: int, device: torch.device) -> torch.cuda.Stream:
    if not address:
        return torch.cuda.default_stream(device)
    return torch.cuda.ExternalStream(address, device)  # type: ignore[no-untyped-call]


def _tensors(value: Any, given: _Given) -> Any:
    """Return an argument with tensors for arrays, and note which is which."""

    def tensor_of(x: Any) -> Any:
        if not isinstance(x, cupy.ndarray):
            return x
        tensor: Tensor = torch.utils.dlpack.from_dlpack(x)
        given[id(tensor)] = tensor, x
        return tensor

    return _pytree.tree_map(tensor_of, value)


def _as_arrays(result: Any, given: _Given) -> Any:
    if isinstance(result, Outputs):
        return Outputs(result._fields, (_as_arrays(x, given) for x in result))
    if not isinstance(result, Tensor):  # a prepared weight
        return result
    return given[id(result)][1] if id(result) in given else cupy.from_dlpack(result)


gemm = _for_cupy(of_gemm.gemm)
gemm_bias = _for_cupy(named.gemm_bias)
gemm_bias_relu = _for_cupy(named.gemm_bias_relu)
gemm_bias_gelu = _for_cupy(named.gemm_bias_gelu)
gemm_bias_silu = _for_cupy(named.gemm_bias_silu)
gemm_residual = _for_cupy(named.gemm_residual)
gemm_bias_residual = _for_cupy(named.gemm_bias_residual)
gemm_bias_relu_residual = _for_cupy(named.gemm_bias_relu_residual)
gemm_swiglu = _for_cupy(gated.gemm_swiglu)
layernorm_gemm = _for_cupy(norms.layernorm_gemm)
prepare = _for_cupy(weights.prepare)
rmsnorm_gemm = _for_cupy(norms.rmsnorm_gemm)


# Type checkers would take any name to be there.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        raise unknown_name(__name__, name, __all__)
