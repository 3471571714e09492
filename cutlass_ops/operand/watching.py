"""Checks for what watches a call, and for arguments that only PyTorch's dispatcher can read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_transforms = torch._C._functorch.peek_interpreter_stack
_jit_tracer = torch._C._get_tracing_state
_before_dispatch: Callable[[], int] = torch._ops._len_torch_dispatch_stack_pre_dispatch
_Function = TypeVar("_Function", bound=Callable[..., Any])
_excluded = torch._C._dispatch_tls_local_exclude_set


def is_watched() -> bool:
    """Whether a mode, a tracer, or a transform such as vmap watches this thread's operators."""
    if _dispatch_modes() or _transforms() is not None or _jit_tracer() is not None:
        return True
    # Tracing before dispatch has its own modes, and always a function mode as well.
    return bool(_function_modes()) and _before_dispatch() > 0


def is_transformed() -> bool:
    """Whether this thread is in a transform of torch.func or in forward-mode differentiation, which ops refuse."""
    return _transforms() is not None or forward_ad._current_level >= 0


def in_no_program(why: str) -> Callable[[_Function], _Function]:
    """Return a decorator of functions that PyTorch's compiler leaves out, and refuses with ``fullgraph=True``.

    It is like ``torch.compiler.disable``, but that imports the compiler, which takes a second. `why` is the compiler's
    error message, with what to do instead.
    """

    def decorated(function: _Function) -> _Function:
        function.__dict__.update(_torchdynamo_disable=True, _torchdynamo_disable_msg=why)
        return function

    return decorated


def _dense() -> int:
    """Return the dispatch keys of a tensor whose values are the bits in its memory."""
    names = ("CPU", "CUDA", "AutogradCPU", "AutogradCUDA", "AutocastCPU", "AutocastCUDA", "ADInplaceOrView")
    found = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    for name in names:
        found = found.add(getattr(torch._C.DispatchKey, name))
    return found.raw_repr()


_DENSE = _dense()


def is_memory(tensor: Tensor) -> bool:
    """Whether a tensor is exactly the values in its memory, as a kernel reads them.

    Then it wraps no other tensor, and is not lazy, nested, sparse, quantised or fake. A kernel would read the memory of
    a lazy tensor without its pending operation. It refuses tensors without an address, and PyTorch hands out no others.
    So a warm call only asks whether a tensor is a lazy negation, which takes a tenth of the time, and calls this
    function after a launch failed.
    """
    return not torch._C._dispatch_keys(tensor).raw_repr() & ~_DENSE


def goes_by_operator(**tensors: Any) -> bool:
    """Whether a function that is not an op must run as an operator for these arguments, as ops do (``traced.detour``).

    Raises TypeError, ValueError or NotImplementedError if an operator cannot read an argument.
    """
    if torch.compiler.is_dynamo_compiling():
        return True
    values = tuple(tensors.values())
    special = any(overrides(x) or needs_operator(x) for x in values)
    if not is_watched() and not special and not only_shapes(values):
        return False
    for name, value in tensors.items():
        refuse_others(name, value)
    return True


def is_special(value: Any) -> bool:
    """Whether an argument is something other than the values in its memory."""
    if not isinstance(value, Tensor):
        return overrides(value)
    differentiated = value.requires_grad and is_recording()
    return differentiated or overrides(value) or needs_operator(value) or value.device.type == "meta"


def is_recording() -> bool:
    """Whether autograd records calls. In inference mode it does not, even if gradients are enabled inside it.

    PyTorch's compiler cannot ask for that mode. It needs no answer, since it compiles an operator in any case.
    """
    if not torch.is_grad_enabled():
        return False
    return torch.compiler.is_dynamo_compiling() or not torch.is_inference_mode_enabled()


def is_differentiated(*values: Any) -> bool:
    """Whether autograd records a call with these arguments."""
    return is_recording() and any(isinstance(x, Tensor) and x.requires_grad for x in values)


def _is_meta(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "meta"


def only_shapes(values: Sequence[Any]) -> bool:
    """Whether all tensors are on "meta". If only some are, the call's checks report different devices."""
    return all(_is_meta(x) for x in values if isinstance(x, Tensor))


def has_values(tensor: Tensor) -> bool:
    """Whether a tensor has values: it is neither on "meta" nor a fake one."""
    return not _is_meta(tensor) and not is_fake(tensor)


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor is one of those by which PyTorch's tracers represent others."""
    return isinstance(tensor, torch._subclasses.FakeTensor)


def overrides(value: Any) -> bool:
    """Whether an argument's class overrides PyTorch's functions, as proxies of torch.fx do."""
    # has_torch_function is true for every value while a function mode is active.
    kind = type(value)
    return (
        kind not in (Tensor, Parameter)
        and hasattr(kind, "__torch_function__")
        and torch.overrides.has_torch_function((value,))
    )


def needs_operator(value: Any) -> bool:
    """Whether only PyTorch's dispatcher can read a tensor."""
    if not isinstance(value, Tensor):
        return False
    others = type(value).__torch_dispatch__ is not Tensor.__torch_dispatch__
    return others or torch._is_functional_tensor(value)


def is_batched(tensor: Tensor) -> bool:
    """Whether vmap made a tensor: that of torch.func, or the one by which autograd differentiates several results."""
    functorch = torch._C._functorch
    return functorch.is_batchedtensor(tensor) or functorch.is_legacy_batchedtensor(tensor)


def is_left_over(tensor: Tensor) -> bool:
    """Whether a transform of torch.func made a tensor around another, and no transform is active any more."""
    if torch.compiler.is_dynamo_compiling() or _transforms() is not None:
        return False
    return is_batched(tensor) or torch._C._functorch.is_gradtrackingtensor(tensor)


def refuse_tangent(name: str, tensor: Tensor) -> None:
    """Raise ValueError for a tensor with a tangent, since results have none. The message says what to pass."""
    # No tensor has a tangent outside a level. Below autograd, as in an operator, PyTorch cannot tell. The function
    # that called the operator has checked.
    if forward_ad._current_level < 0 or _excluded().has(torch._C.DispatchKey.ADInplaceOrView):
        return
    if forward_ad.unpack_dual(tensor).tangent is not None:  # type: ignore[no-untyped-call]
        raise ValueError(
            f"{name} has a tangent, and cutlass_ops has no forward-mode differentiation: pass "
            f"torch.autograd.forward_ad.unpack_dual({name}).primal"
        )


def refuse_others(name: str, value: Any) -> None:
    """Raise TypeError, ValueError or NotImplementedError for a tensor that no operator can read, with what to pass."""
    if not isinstance(value, Tensor):
        return
    if type(value) not in (Tensor, Parameter) and hasattr(type(value), "to_local"):
        raise TypeError(
            f"{name} is a {type(value).__name__}, spread over several devices, and a kernel runs on one: pass "
            f"{name}.to_local()"
        )
    if value.is_nested:
        raise TypeError(f"{name} is a nested tensor: pass {name}.values() or {name}.to_padded_tensor(0)")
    if _transforms() is not None and torch._C._functorch.is_gradtrackingtensor(value):
        raise NotImplementedError(NO_TRANSFORM)
    refuse_tangent(name, value)


NO_TRANSFORM = (
    "cutlass_ops does not support torch.func.grad, jvp or vmap: call it outside of the transformed function. Instead "
    "of vmap, use leading dimensions of a, which are folded into M. A backward is such a function with "
    "is_grads_batched=True or jacobian(vectorize=True): leave these out"
)
