"""Exact kernels: one declaration, built, loaded and called exactly as declared."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from cutlass_ops.artifacts.loader import LoadedKernel
from cutlass_ops.base.errors import NoDeviceError
from cutlass_ops.base.mma import math_of
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.epilogue.graph import Graph
from cutlass_ops.operand import groups
from cutlass_ops.operand.call import Call, check_call
from cutlass_ops.run import portable, traced
from cutlass_ops.run.plan import make_plan
from cutlass_ops.run.registry import Registry
from cutlass_ops.run.warm import Warm

if TYPE_CHECKING:
    from cutlass_ops.run.launch import Launch


class Kernel(Warm):
    """One exact kernel, as its specification declares it: call it as ``kernel(a, b, *inputs, out=None)``.

    It converts no operands and never runs another kernel.

    Attributes
    ----------
    spec : KernelSpec
        The declaration.
    loaded : LoadedKernel
        The compiled kernel.

    Examples
    --------
    >>> kernel = co.build(spec)  # doctest: +SKIP
    >>> kernel(x, weight.t(), bias=bias, out=d)  # doctest: +SKIP
    """

    autocasts = False

    def __init__(self, spec: KernelSpec, loaded: LoadedKernel) -> None:
        super().__init__(spec.slug, spec.epilogue, spec.form)
        self.spec = spec
        self.loaded = loaded
        name = f"kernel_{spec.slug}"
        self.about = portable.register(name, spec.epilogue, self, portable.EXACT, spec.to_json(), spec.form)

    def __repr__(self) -> str:
        return f"<kernel {self.spec.slug}>"

    def __call__(self, a: Tensor, b: Tensor, *inputs: Any, out: Any = None, **named: Any) -> Any:
        """Run the kernel.

        Parameters
        ----------
        a, b : Tensor
            A (..., M, K) and B (K, N) of the declared types; of the form batched, B (..., K, N); of the form grouped,
            A (T, K) or (E, M, K) and B (E, K, N); of the form ragged_k, A (M, T) and B (T, N).
        *inputs, **named
            The epilogue's inputs, by position or by name. Of the forms grouped and ragged_k, offsets come before them;
            with A (E, M, K), these are how many rows each group has, as in :class:`cutlass_ops.Groups`.
        out : Tensor or mapping of str to Tensor, optional
            Where to write the outputs.

        Returns
        -------
        Tensor or named tuple
            D, or all outputs with D first.

        Raises
        ------
        TypeError, ValueError
            If an argument does not match the declaration.
        NoDeviceError
            If the operands are not on a CUDA device.
        """
        if torch.compiler.is_dynamo_compiling():
            return traced.Traced(self.about)(a, b, *inputs, out=out, **named)
        if named:  # such as out_dtype, which the declaration decides
            inputs = self.positional(inputs, named)
        return super().__call__(a, b, *inputs, out=out)

    def _run_cold(self, a: Any, b: Any, inputs: Sequence[Any], out: Any, out_dtype: torch.dtype | None) -> Any:
        call = self.checked_call(a, b, inputs, out, out_dtype)
        call.refuse_differentiated()
        self._require_device(call.arguments.a)
        self.copied_inputs += len(call.arguments.copied)
        if call.is_reference:
            call.run_reference()
            return self.wrap(call)
        results = self._run_spread(call, a, b, out, out_dtype)
        if results is not None:
            return results
        plan = make_plan(self.name, self.spec, self.spec.order, call, exact=True)
        plan.launch_call(call)
        self.copied_operands += plan.copies
        self._remember(plan, call, a, b, out_dtype)
        return self.wrap(call)

    def prepare_launch(self, a: Tensor, b: Tensor, *inputs: Any, out: Any = None, **named: Any) -> Launch:
        """Prepare calls with these tensors: see :func:`prepare_launch`."""
        from cutlass_ops.run import launch  # late: few programs prepare launches

        values = self.positional(inputs, named)
        launch.check(self, a, b, values, out)
        call = self.checked_call(a, b, values, out)
        self._require_device(call.arguments.a)
        launch.require_given(self, call.tensors(), (a, b, values, call.outputs), launch.COPY)
        plan = None if call.is_reference else make_plan(self.name, self.spec, self.spec.order, call, exact=True)
        return launch.make(self, plan, call, (a, b, *values))

    def results_of(
        self, a: Tensor, b: Tensor, inputs: Sequence[Any], out_dtype: torch.dtype | None = None
    ) -> list[Tensor]:
        """Return empty outputs of the right shapes, dtypes and device for checked arguments."""
        return self.checked_call(a, b, inputs, None, out_dtype).results()

    def of(self, graph: Graph) -> NoReturn:
        """Refuse gradients: they would need other kernels than this one."""
        raise NotImplementedError(
            f"{self!r} is one exact kernel and has no backward: call an op, such as cutlass_ops.gemm, or call under "
            "torch.no_grad()"
        )

    def _require_device(self, a: Tensor) -> None:
        if a.device.type != "cuda":
            raise NoDeviceError(f"a is on {a.device}, and {self!r} runs only on CUDA devices: move the operands there")

    def checked_call(  # noqa: D102
        self, a: Any, b: Any, inputs: Sequence[Any], out: Any, out_dtype: torch.dtype | None = None
    ) -> Call:
        values = dict(zip(self.names, inputs, strict=True))
        (offsets,) = [values.pop(name) for name in self.spec.form.operands] or [None]
        math, form = math_of(self.spec.a.dtype), groups.form_of_call(self.spec.form, a)
        return check_call(self.graph, a, b, values, out, out_dtype, self.spec, offsets, math, form)


def build(spec: KernelSpec) -> Kernel:
    """Build and load exactly the kernel that a specification declares.

    Parameters
    ----------
    spec : KernelSpec
        The declaration.

    Returns
    -------
    Kernel
        Callable as ``kernel(a, b, *inputs, out=None)``.

    Raises
    ------
    TypeError
        If `spec` is not a KernelSpec.
    ConfigError
        If the declaration is illegal. The message lists every reason.
    MissingKernelError, CompileError, ToolchainError, StoreError, LoadError
        If the kernel cannot be compiled, stored or loaded.

    Examples
    --------
    >>> config = co.Sm90Config(co.ThreadblockShape(128, 128, 64))
    >>> spec = co.KernelSpec(a="bf16.row", b="bf16.col", d="bf16.row", epilogue=f, config=config)  # doctest: +SKIP
    >>> kernel = co.build(spec)  # doctest: +SKIP
    >>> d = kernel(x, weight.t(), bias=bias)  # doctest: +SKIP
    """
    if not isinstance(spec, KernelSpec):
        raise TypeError(f"spec must be a KernelSpec, not {reprlib.repr(spec)}")
    return Kernel(spec, Registry.current().kernel(spec))


def kernel_again(name: str, plain: Any) -> Kernel:
    """Return the kernel that a program names, by :func:`cutlass_ops.run.portable.find`."""
    return build(KernelSpec.from_json(plain))
