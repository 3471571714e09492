"""Prepared launches of modules: the kernels of a forward in their order, for callers who repeat it.

The forward runs once, and its calls of ops are noted. Each call becomes a prepared launch with the same tensors, so
that one kernel reads what another one has written. What PyTorch computes from parameters alone, such as a weight with
gamma folded in, is kept. A forward in which PyTorch computes from x is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.modules import module as of_pytorch
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from cutlass_ops.base.errors import UnsupportedError
from cutlass_ops.nn.folded import once
from cutlass_ops.nn.reading import is_watched
from cutlass_ops.operand import watching
from cutlass_ops.operand.tensors import refuse_differentiated, require_tensor
from cutlass_ops.run import launch as launches
from cutlass_ops.run import portable, traced
from cutlass_ops.run.launch import Launch
from cutlass_ops.run.ops import Op

_GLOBAL_HOOKS = of_pytorch._global_forward_hooks, of_pytorch._global_forward_pre_hooks
_AGAIN = "prepare another launch, or call the module"


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class ModuleLaunch:
    """A module's forward that is ready to run without gradients, made by ``module.prepare(x)``.

    ``launch()`` computes the forward from what x, the other tensors of the preparation and the parameters have now. It
    writes and returns the same tensor each time. ``launch(x)`` and ``launch(x, residual=r)`` use other tensors for one
    call, of the same shapes, strides, dtypes and device. That takes about as long as ordinary calls of the ops.

    A launch raises an error if the module would compute something else:

    - if a parameter or layer was replaced, or a parameter's memory has moved, as after ``module.to()``;
    - if a parameter was written in place and the launch has a copy of it, such as a weight with a norm folded in. All
      other parameters are read at each launch. Writes by ``parameter.data`` and by fused optimizers are not noticed;
    - if the module, or a module inside it, has a hook or another forward, or a dropout inside it another mode;
    - if gradients are enabled, and a parameter or another tensor requires grad;
    - if PyTorch is tracing, or a mode is active.

    ``torch.autocast`` matters only for the preparation: weights are cast once, and x must have the dtype to which it
    would be cast. Numbers, such as a norm's eps, keep the values of the preparation. For streams and CUDA graphs, see
    :class:`cutlass_ops.Launch`. Prepare before the capture.

    Attributes
    ----------
    results : Tensor
        What each launch writes and returns.
    launches : tuple of Launch
        The kernels, in their order.

    Examples
    --------
    >>> mlp = co.nn.MLP(16, 64, dtype=torch.bfloat16).requires_grad_(False)
    >>> x = torch.ones(4, 16).bfloat16()
    >>> launch = mlp.prepare(x, residual=x)
    >>> launch() is launch.results, len(launch.launches)
    (True, 2)
    >>> torch.equal(launch(), mlp(x, residual=x)), torch.equal(launch(2 * x), mlp(2 * x, residual=x))
    (True, True)
    >>> mlp.fc1 = co.nn.Linear(16, 64, dtype=torch.bfloat16)
    >>> launch()
    Traceback (most recent call last):
    ValueError: fc1 of MLP is another one than when the launch was prepared: prepare another launch, or call the module
    """

    results: Tensor
    launches: tuple[Launch, ...]
    _name: str
    _given: dict[str, Tensor]  # as they lay at the preparation
    _reads: tuple[dict[str, tuple[str, Tensor]], ...]  # of each kernel: which arguments are views of what is given
    _tensors: tuple[tuple[str, Tensor, Callable[[], int], int, torch.Size], ...]  # where each lay, and its shape
    _parts: tuple[tuple[str, Callable[[], Any], Any], ...]  # parameters, layers, forwards: how to look each up
    _hooks: tuple[dict[Any, Any], ...]
    _copied: tuple[tuple[str, Tensor, int], ...]  # the parameters that have been copied, with their versions
    _memory: tuple[Tensor, ...]  # nothing else may come to lie there

    def __call__(self, x: Tensor | None = None, /, **others: Tensor) -> Tensor:
        """Launch. The class's own documentation says more.

        Parameters
        ----------
        x : Tensor, optional
            Another x.
        **others
            Other tensors of the preparation, by name.

        Returns
        -------
        Tensor
            :attr:`results`.

        Raises
        ------
        TypeError, ValueError
            If a tensor does not fit the preparation, or the module has changed. The message says what to do.
        NotImplementedError
            If PyTorch is tracing, or a mode is active.
        """
        launches.require_untraced(self._name)
        if any(self._hooks):
            raise ValueError(f"{self._name} has a hook now, which a launch does not call: {_AGAIN}")
        for what, look_up, before in self._parts:
            if look_up() is not before:
                raise ValueError(f"{what} is another one than when the launch was prepared: {_AGAIN}")
        for what, p, version in self._copied:
            if p._version != version:
                raise ValueError(f"{what} was written after the launch was prepared, which has a copy of it: {_AGAIN}")
        given = others if x is None else {"x": x, **others}
        grad, moved = torch.is_grad_enabled(), False
        for what, tensor, where, address, shape in self._tensors:
            if grad and tensor.requires_grad:
                refuse_differentiated(what, tensor)
            if where() != address or tensor.shape != shape:
                if what not in self._given:
                    raise ValueError(f"{what} has other memory, or another shape, than at the preparation: {_AGAIN}")
                moved = True
        if moved or given or forward_ad._current_level >= 0:
            return self._run_with(given)
        for each in self.launches:
            each._repeat()
        return self.results

    def _run_with(self, given: dict[str, Any]) -> Tensor:
        """Run it with some tensors instead of those of the preparation, and with these wherever they are now."""
        now = {what: tensor for what, tensor, *_ in self._tensors}
        for what, tensor in now.items():
            watching.refuse_tangent(what, tensor)
        given = {name: now[name] for name in self._given} | given
        for name, tensor in given.items():
            self._check(name, tensor)
        for launch, reads in zip(self.launches, self._reads, strict=True):
            launch(**{to: _as_view(view, self._given[of], given[of]) for to, (of, view) in reads.items()})
        return self.results

    def _check(self, name: str, tensor: Any) -> None:
        before = self._given.get(name)
        if before is None:
            raise TypeError(f"{name} is unknown to the launch of {self._name}, which takes {', '.join(self._given)}")
        require_tensor(name, tensor)
        launches.require_plain(name, tensor)
        for what in ("dtype", "device", "shape", "stride"):
            found, wanted = (x.stride() if what == "stride" else getattr(x, what) for x in (tensor, before))
            if found != wanted:
                error = TypeError if what == "dtype" else ValueError
                raise error(f"{name} has {what} {found}, and the launch was prepared for {wanted}: {_AGAIN}")

    def __repr__(self) -> str:
        return f"<launch of {self._name}: {', '.join(map(repr, self.launches))}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a prepared launch cannot be copied or pickled: prepare one where it is used")


def _as_view(view: Tensor, whole: Tensor, other: Tensor) -> Tensor:
    """Return the same view of another tensor with the same layout."""
    if view.shape == whole.shape and view.stride() == whole.stride():
        return other
    offset = other.storage_offset() + view.storage_offset() - whole.storage_offset()
    return other.as_strided(view.shape, view.stride(), offset)


# ---- Preparation -----------------------------------------------------------------------------------------------------


class Prepares:
    """A module whose forward may consist of kernels only."""

    def prepare(self: Any, x: Tensor, /, **named: Any) -> ModuleLaunch:
        """Prepare a forward that will be repeated without gradients: see :class:`ModuleLaunch`.

        The forward runs once, and the best kernels are compiled if necessary.

        Parameters
        ----------
        x : Tensor
            As for a call of the module.
        **named
            As for a call of the module. Numbers keep their values.

        Returns
        -------
        ModuleLaunch
            The launch.

        Raises
        ------
        TypeError, ValueError
            As for a call. Also if gradients are enabled and a tensor requires grad, or the module or one inside it has
            a hook or another forward.
        NotImplementedError
            If PyTorch would compute something of x, such as a copy, an attention, or all of it in FP32. Also if
            PyTorch is tracing, a mode is active, or the stream is being captured into a CUDA graph.
        MissingKernelError, CompileError, ToolchainError, StoreError, LoadError
            If a kernel cannot be compiled, stored or loaded.
        """
        return _prepared(self, x, named)


def _prepared(module: Any, x: Tensor, named: dict[str, Any]) -> ModuleLaunch:
    name = type(module).__name__
    launches.require_preparable(name)
    modules = {_of(path, name): each for path, each in module.named_modules()}
    parameters = {_of(path, name): p for path, p in module.named_parameters()}
    for what, each in modules.items():
        if is_watched(each):
            raise ValueError(
                f"{what} has a hook or another forward, or all modules have a hook, and a launch would not call it: "
                "remove it, or call the module"
            )
    tensors = {n: t for n, t in {"x": x, **named}.items() if isinstance(t, Tensor)}
    every = parameters | tensors
    for what, tensor in every.items():
        launches.require_plain(what, tensor)
    given = {n: t.detach() for n, t in tensors.items()}  # each one a tensor of its own, even if two are the same
    noting = _Noting(name, given)
    # Values are not stored for a backward, as they might be for a program that is traced.
    with torch.no_grad(), traced.recompute(), once():
        module(x, **named)  # folds if necessary
        with noting:
            results = module(given.get("x", x), **{n: given.get(n, value) for n, value in named.items()})
    if not isinstance(results, Tensor) or id(results) not in noting.known or not noting.calls:
        raise NotImplementedError(f"{name} does not return one tensor that a kernel has written: call the module")
    steps = [launch for call in noting.calls for launch in _launches(*call)]
    own = {_storage(p) for p in parameters.values()}
    read = [t for launch in steps for t in launch._ordinary.arguments if isinstance(t, Tensor)]
    copies = any(id(t) not in noting.known and _storage(t) not in own for t in read)
    every["the result"] = results
    return ModuleLaunch(
        results=results,
        launches=tuple(steps),
        _name=name,
        _given=given,
        _reads=tuple(map(noting.reads, steps)),
        _tensors=tuple((what, t, t.data_ptr, t.data_ptr(), t.shape) for what, t in every.items()),
        _parts=tuple(part for what, each in modules.items() for part in _parts(what, each, name)),
        _hooks=(*_GLOBAL_HOOKS, *(h for m in modules.values() for h in (m._forward_hooks, m._forward_pre_hooks))),
        _copied=tuple((what, p, _version(what, p)) for what, p in parameters.items()) if copies else (),
        _memory=tuple(p.detach() for p in parameters.values()),
    )


def _of(path: str, name: str) -> str:
    return f"{path} of {name}" if path else name


def _parts(what: str, module: Any, name: str) -> Iterator[tuple[str, Callable[[], Any], Any]]:
    """Yield what decides what a module computes: a description, how to look it up, and what is there."""
    path = what.removesuffix(name).removesuffix(" of ")
    for of in (module._parameters, module._modules):
        for key, value in of.items():
            yield _of(f"{path}.{key}" if path else key, name), partial(of.get, key), value
    if isinstance(module, torch.nn.modules.dropout._DropoutNd):
        yield f"the mode of {what}", partial(vars(module).get, "training"), module.training
    yield f"the forward of {what}", partial(vars(module).get, "forward"), vars(module).get("forward")


def _launches(op: Op, a: Tensor, b: Tensor, inputs: tuple[Any, ...], outputs: list[Tensor]) -> list[Launch]:
    """Return the launch of a noted call, or the launches of the other ops that serve it."""
    found: list[Launch] = []

    def add(op: Op, a: Tensor, b: Tensor, *inputs: Any, out: Any = None, out_dtype: torch.dtype | None = None) -> Any:
        try:
            found.append(op.prepare_launch(a, b, *inputs, out=out, out_dtype=out_dtype))
        except UnsupportedError:
            if op._instead is None:
                raise
            return op._instead.compute(add, a, b, *inputs, out=out, out_dtype=out_dtype)
        return found[-1].results

    out = outputs[0] if len(outputs) == 1 else dict(zip(op.outputs, outputs, strict=True))
    add(op, a, b, *inputs, out=out, out_dtype=outputs[0].dtype)
    return found


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _version(what: str, parameter: Tensor) -> int:
    if parameter.is_inference():
        raise ValueError(
            f"{what} was created inside torch.inference_mode() and has no version counter, and the launch would have a "
            "copy of it whose changes it could not notice: create or load the module outside of it"
        )
    return parameter._version


class _Noting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes a forward's calls of ops, and refuses anything else that is computed from the given tensors."""

    def __init__(self, name: str, given: dict[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._name = name
        # op, A, B, inputs and outputs of each call
        self.calls: list[tuple[Any, Tensor, Tensor, tuple[Any, ...], list[Tensor]]] = []
        # by identity: the tensors that depend on given ones, and the given one of which each is a view
        self.known: dict[int, tuple[Tensor, str | None]] = {id(x): (x, n) for n, x in given.items()}

    def reads(self, launch: Launch) -> dict[str, tuple[str, Tensor]]:
        """Return which arguments of a launch are views of what is given."""
        named = zip(launch._ordinary.names, launch._ordinary.arguments, strict=True)
        views = ((to, self.known.get(id(x), (x, None))) for to, x in named)
        return {to: (of, view) for to, (view, of) in views if of is not None}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204
        found = function(*args, **(kwargs or {}))
        of = None
        if function is torch.ops.cutlass_ops.fused_gemm.default:
            op, a, b, tensors, numbers, places = args[:6]
            inputs = traced.inputs_of(tensors, numbers, places)
            self.calls.append((portable.find(op), a, b, inputs, found))
        else:
            read = [x for x in _pytree.tree_leaves((args, kwargs)) if id(x) in self.known]
            if not read:
                return found
            if not function.is_view:
                raise NotImplementedError(
                    f"{self._name} calls PyTorch's {function.overloadpacket.__name__} for this input, and a prepared "
                    "launch is kernels of this library alone: pass contiguous tensors in the weights' dtype, FP16 or "
                    "BF16, prepare a module inside this one, or call the module"
                )
            of = self.known[id(read[0])][1]
        self.known |= {id(x): (x, of) for x in _pytree.tree_leaves(found) if isinstance(x, Tensor)}
        return found
