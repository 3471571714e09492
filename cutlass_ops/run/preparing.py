"""Preparation ahead of calls: every kernel that calls may need, or the launch of one call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from cutlass_ops.operand import watching
from cutlass_ops.run import launch
from cutlass_ops.run.gathering import gathering
from cutlass_ops.run.kernels import Kernel
from cutlass_ops.run.launch import Launch
from cutlass_ops.run.ops import Op
from cutlass_ops.run.registry import Registry
from cutlass_ops.run.requests import is_known, requested


def warm_up(op: object, /, *arguments: Any, **named: Any) -> int:
    """Compile and load every kernel that calls with this weight may need, or all that a function's calls need.

    Without it, PyTorch serves calls until their kernels are compiled in the background. If other ops serve a call, such
    as two GEMMs for :func:`cutlass_ops.gemm_swiglu` before Hopper, their kernels are compiled. Preparation by a
    function itself, such as folding gamma into a weight, does run. If an argument requires grad and gradients are
    enabled, the kernels of the backward are compiled too: for this, the call and its backward run once.

    Parameters
    ----------
    op : Op, Epilogue, module, function or str
        A named op such as ``cutlass_ops.gemm_bias_relu``, a decorated function, ``cutlass_ops.gemm`` with ``epilogue``,
        or a function such as ``cutlass_ops.rmsnorm_gemm``: then of A's shape, only K matters. Or the name of one, such
        as ``"gemm_bias_relu"``. Or a module or function of yours, such as a training step. It runs once with these
        arguments. All kernels of these calls are compiled together: not those for other numbers of rows.
    *arguments, **named
        The arguments of a call.

    Returns
    -------
    int
        The number of kernels: of a module or function of yours, of those that were not loaded before. 0 for tensors on
        the CPU.

    Raises
    ------
    TypeError, ValueError, UnsupportedError
        As for the call itself.
    MissingKernelError, CompileError, ToolchainError, StoreError, LoadError
        If a kernel cannot be compiled, stored or loaded.

    Examples
    --------
    >>> a = torch.ones(2, 8).bfloat16()  # (M, K)
    >>> b = torch.ones(3, 8).bfloat16().t()  # (K, N), from a weight (N, K)
    >>> co.warm_up(co.gemm_bias_relu, a, b, bias=torch.zeros(3).bfloat16())
    0
    >>> layer = co.nn.MLP(8, 16, dtype=torch.bfloat16)
    >>> co.warm_up(lambda x: layer(x).sum().backward(), a)
    0
    """
    if callable(op) and not is_known(op):
        return _warm_up_region(functools.partial(op, *arguments, **named))
    request = requested(op, *arguments, **named)
    served = request.as_autocast()
    specs = list(request.op.specs_of(*served.arguments, **served.named))
    if specs and watching.is_differentiated(*request.arguments, *request.named.values()):
        from cutlass_ops.run import recorded  # late, as for gradients

        # The first of these calls are the forward's, which may store more than a call without gradients.
        with gathering():
            calls = recorded.calls_of_a_step(request.op, request.arguments, request.named)
        for each in calls:
            if isinstance(each.called, Op):
                specs += each.called.specs_of(each.a, each.b, *each.inputs, out_dtype=each.out_dtype)
    return Registry.current().ready(dict.fromkeys(specs), request.arguments[0].device) if specs else 0


def _warm_up_region(run: Callable[[], object]) -> int:
    """Run a function while PyTorch serves its calls, and wait for all kernels that these need."""
    with gathering() as needed:
        run()
    kernels = dict.fromkeys(needed)
    for each in kernels:
        each.result()
    return len(kernels)


def prepare_launch(op: object, /, *arguments: Any, **named: Any) -> Launch:
    """Prepare a call that will be repeated: each launch then costs little more host time than CUDA's own launch.

    The best kernel is compiled first if necessary, as by :func:`warm_up`: no PyTorch operation serves the launch. Some
    kernels need a workspace that must be cleared before each launch (stream-K), or that they share with other launches
    on the stream (reductions of D on Hopper; means of a norm beside the main loop). These gain less: they save only the
    look-up.

    Parameters
    ----------
    op : Op, Kernel, Epilogue or function
        As for :func:`warm_up`, or the result of :func:`build`. Weights of norms must be prepared, by
        :func:`cutlass_ops.prepare`.
    *arguments, **named
        The arguments of a call. Outputs that are not in `out` are allocated once, here. The launch keeps a reference to
        all tensors.

    Returns
    -------
    Launch
        See its documentation for what may change between launches. If `op` is a function, the launch is that of its op:
        for :func:`cutlass_ops.gemm_residual_rms` it returns D and the sums of squares.

    Raises
    ------
    TypeError, ValueError
        As for the call itself. Also if an argument requires grad, or would be copied or computed at each call, such as
        a broadcast input.
    NotImplementedError
        If PyTorch is tracing, a mode is active, or the stream is being captured into a CUDA graph.
    UnsupportedError
        If no single kernel serves the call.
    MissingKernelError, CompileError, ToolchainError, StoreError, LoadError
        If the kernel cannot be compiled, stored or loaded.

    Examples
    --------
    >>> x, weight, bias = torch.ones(2, 8).bfloat16(), torch.ones(3, 8).bfloat16(), torch.zeros(3).bfloat16()
    >>> launch = co.prepare_launch(co.gemm_bias_relu, x, weight.t(), bias, out=torch.empty(2, 3).bfloat16())
    >>> for step in range(3):
    ...     d = launch()  # reads what x has now
    >>> d.tolist()
    [[8.0, 8.0, 8.0], [8.0, 8.0, 8.0]]
    """
    if isinstance(op, Kernel):
        return op.prepare_launch(*arguments, **named)
    request = requested(op, *arguments, **named)
    found = request.op
    launch.require_untraced(found.name)
    pairs = zip(("a", "b", *found.names), request.arguments, strict=False)
    launch.require_given(found, (*pairs, *request.named.items()), (arguments, named), launch.FOLD)
    return found.prepare_launch(*request.arguments, **request.named)
