"""When a module's parameters may be read in place of calling it, and how ops get them.

A fused forward reads the parameters of several modules. That equals calling them only as long as nobody gave one of
them another class, forward or hook, or a weight of another class. Each call asks, since adapters and hooks may come at
any time.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.fx import _symbolic_trace
from torch.nn.modules.module import _has_any_global_hook

from cutlass_ops.base import arch
from cutlass_ops.operand import watching
from cutlass_ops.operand.call import device_of
from cutlass_ops.operand.matrices import has_lines_along
from cutlass_ops.run import casting, fp8, little

_PLAIN = (Tensor, torch.nn.Parameter)


def is_spread(tensor: Any) -> bool:
    """Whether a tensor is a DTensor, whose parts lie on several devices."""
    kind = type(tensor)
    return kind not in _PLAIN and hasattr(kind, "to_local")  # at once: what a class lacks takes long to find out


def is_own(weight: Any) -> bool:
    """Whether a weight's class says itself what ``F.linear`` does, as those of quantised weights do."""
    kind = type(weight)
    if kind in _PLAIN or not isinstance(weight, Tensor):
        return False
    function = kind.__torch_function__  # the tracers' own classes have none of their own
    # PyTorch's tracer finds no default of getattr here.
    is_usual = isinstance(function, MethodType) and function.__func__ is _USUAL_FUNCTION
    return function is not _NO_FUNCTION and not is_usual


_NO_FUNCTION = torch._C._disabled_torch_function_impl
_USUAL_FUNCTION = Tensor.__torch_function__.__func__  # type: ignore[attr-defined]


def is_dense(x: Any) -> bool:
    """Whether x is neither sparse nor nested. Other objects may become tensors, as a tracer's proxy does."""
    return not isinstance(x, Tensor) or (x.layout is torch.strided and not x.is_nested)


def needs_pytorch(x: Any, weight: Any) -> bool:
    """Whether PyTorch can multiply x by a weight and no kernel can, also because the weight's class does it."""
    return is_spread(weight) or is_own(weight) or is_foreign(x, weight)


def is_foreign(x: Any, *weights: Any) -> bool:
    """Whether PyTorch can multiply x by plain weights, and no kernel can.

    These are sparse and nested tensors, classes that say themselves what ``F.linear`` does, devices without kernels,
    transforms of torch.func, and other dtypes than those of 16 bits and FP8 unless torch.autocast casts them. FP64 has
    kernels, but not for norms and for all derivatives. So are recorded calls that PyTorch serves (``run/little.py``).
    """
    if not isinstance(x, Tensor):
        return False
    if not is_dense(x) or is_own(x) or not has_kernels(x.device):
        return True
    if not torch.compiler.is_dynamo_compiling() and watching.is_transformed():
        return True
    if x.dtype not in _MULTIPLIED:
        dtype = casting.dtype_of(x)
        if dtype not in _MULTIPLIED and all(casting.dtype_of(w) == dtype for w in weights):
            return True
    return little.is_recorded_by_pytorch(x, *weights)


def has_kernels(device: torch.device) -> bool:
    """Whether there are kernels for a device, or an implementation on it."""
    if device not in _HAS_KERNELS:
        capability = device_of(device).capability if device.type == "cuda" else None
        known = any(target.capability == capability for target in arch.TARGETS.values())
        _HAS_KERNELS[device] = known or device.type in ("cpu", "meta")
    return _HAS_KERNELS[device]


_HAS_KERNELS: dict[torch.device, bool] = {}
has_kernels.__dict__["_dynamo_marked_constant"] = True  # torch.compiler.assume_constant_result imports the compiler


# PyTorch has no F.linear for FP8.
_MULTIPLIED = frozenset((torch.float16, torch.bfloat16, *fp8.DTYPES))


def is_watched(*modules: Any) -> bool:
    """Whether modules have hooks or a forward that is not their class's: they must be called then, as before."""
    for m in modules:
        if m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks:
            return True
        if not has_class_forward(m):
            return True
    return bool(_has_any_global_hook())  # type: ignore[no-untyped-call]


def has_class_forward(module: Any) -> bool:
    """Whether a module's forward is its class's, also if it is an attribute: libraries that wrap it put it back so."""
    forward = module.forward
    # PyTorch's tracer finds no default of getattr here.
    is_bound = isinstance(forward, MethodType)
    return is_bound and forward.__func__ is type(module).forward and forward.__self__ is module


def are_read(kinds: tuple[type, ...], *modules: Any) -> bool:
    """Whether reading the weights of modules equals calling them: these very classes, plain weights, and no hooks."""
    for m in modules:
        weight = parameter(m, "weight")
        if type(m) not in kinds or is_spread(weight) or is_own(weight):
            return False
    return not is_watched(*modules)


def parameter(module: Any, name: str) -> Any:
    """Return a module's parameter, or the attribute in its place, such as that of ``torch.nn.utils.weight_norm``.

    An attribute of a module takes ten times as long as an entry of its parameters. But ``torch.fx`` sees only
    attributes: its graph would have the tensor as a constant.
    """
    own = module._parameters
    return own[name] if name in own and not _symbolic_trace._is_fx_tracing_flag else getattr(module, name, None)


# ---- Operands --------------------------------------------------------------------------------------------------------


def rows(x: Any) -> Any:
    """Return A or a residual as kernels read it: copied if leading dimensions do not fold, or lines are not whole."""
    if not isinstance(x, Tensor) or not is_dense(x) or x.ndim < 2 or x.is_contiguous():
        return x
    along_n = has_lines_along(x, 1) and _folds(x)
    return x if along_n or (x.ndim == 2 and has_lines_along(x, 0)) else x.contiguous()


def _folds(x: Tensor) -> bool:
    """Whether one stride leads through all leading dimensions."""
    wanted = None
    for extent, stride in zip(reversed(x.shape[:-1]), reversed(x.stride()[:-1]), strict=True):
        if extent == 1:
            continue
        if wanted is not None and stride != wanted:
            return False
        wanted = extent * stride
    return True


def matrix(weight: Tensor) -> Tensor:
    """Return the B of a weight (N, K)."""
    found = readable(weight)
    # The former takes half the time. PyTorch's tracer fails at that of a class of one's own.
    return found.mT if type(found) in _PLAIN and found.ndim == 2 else found.t()


def readable(weight: Tensor) -> Tensor:
    """Return a weight as kernels read it, or a copy: a parametrization may have returned any strides."""
    if not isinstance(weight, Tensor) or weight.is_contiguous() or weight.ndim < 2:
        return weight
    return weight if has_lines_along(weight, 0) or has_lines_along(weight, 1) else weight.contiguous()


def matrices(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Return the Bs of two weights (N, K) that one kernel reads: copied if their lines lie in different ways.

    A copy has no ``main_grad``. With gradients each product is a GEMM of its own, which reads either way.
    """
    first, second = readable(first), readable(second)
    # A proxy of torch.fx has no strides, and counts as contiguous.
    if isinstance(first, Tensor) and not (first.is_contiguous() and second.is_contiguous()):
        alike = (has_lines_along(first, inner) and has_lines_along(second, inner) for inner in (1, 0))
        if not any(alike) and not has_main_grad(*(w for w in (first, second) if w.requires_grad)):
            first, second = first.contiguous(), second.contiguous()
    return first.t(), second.t()


def vectors(*biases: Tensor | None) -> list[Tensor]:
    """Return the biases that are not None."""
    return [bias.contiguous() for bias in biases if bias is not None]


# ---- Gradients that are added to main_grad ---------------------------------------------------------------------------


def has_main_grad(*weights: Any) -> bool:
    """Whether a backward of this call would add the gradient of one of these parameters to its ``main_grad``."""
    if torch.is_grad_enabled():
        for w in weights:
            if getattr(w, "main_grad", None) is not None:
                return True
    return False


def must_leave_trace(*weights: Any) -> bool:
    """Whether PyTorch's tracer must leave a call out: programs get copies of parameters, and these no ``main_grad``."""
    return torch.compiler.is_dynamo_compiling() and has_main_grad(*weights)


# As torch.compiler.disable, but it imports PyTorch's tracer with the first call: that takes a second.
@torch._disable_dynamo  # type: ignore[attr-defined]
def add_to_main_grad(function: Callable[..., Tensor], *arguments: Any, **named: Any) -> Tensor:
    """Make a call in eager mode, where its backward finds ``main_grad``. With ``fullgraph=True`` PyTorch refuses it."""
    return function(*arguments, **named)
