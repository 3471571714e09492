"""The same kernels for JAX arrays, under ``jax.jit``: forward only.

>>> import jax
>>> import jax.numpy as jnp
>>> import cutlass_ops.jax as cj
>>> @jax.jit
... def layer(x, w, bias):
...     return cj.gemm_bias_relu(x, w, bias)

A GEMM is a primitive of JAX. Its kernel is chosen, and built if nothing has it, when JAX lowers a program for a GPU:
the shapes are known then. XLA calls the kernel's exported function on its own stream, by jax-tvm-ffi and without
Python, unless it needs a workspace. On the CPU, PyTorch evaluates the same expression in a callback. docs/interop.md
says what is supported.
"""

from __future__ import annotations

import functools
import itertools
import keyword
import operator
from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

try:
    import jax
    import jax.numpy as jnp
    from jax import lax
    from jax.extend.core import Primitive
    from jax.interpreters import ad, batching, mlir
except ImportError as exc:
    raise ImportError(
        'cutlass_ops.jax needs JAX, which is not installed: pip install "jax[cuda13]" jax-tvm-ffi, or pip install jax '
        "for the CPU alone"
    ) from exc

from cutlass_ops.artifacts.loader import as_exported
from cutlass_ops.base.errors import NoDeviceError, UnsupportedError
from cutlass_ops.base.session import cached
from cutlass_ops.choose import dispatch
from cutlass_ops.choose.dispatch import Decision
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.epilogue import Epilogue
from cutlass_ops.epilogue.graph import Graph
from cutlass_ops.epilogue.nodes import Kind
from cutlass_ops.epilogue.unknown import unknown_name
from cutlass_ops.operand.call import Call, check_call, device_of, signature_of, without_modes
from cutlass_ops.run import named, refusals
from cutlass_ops.run.ops import Op, op_of
from cutlass_ops.run.registry import Registry
from cutlass_ops.run.values import Scaled

__all__ = [
    "gemm",
    "gemm_bias",
    "gemm_bias_gelu",
    "gemm_bias_relu",
    "gemm_bias_relu_residual",
    "gemm_bias_residual",
    "gemm_bias_silu",
    "gemm_residual",
]

_OPERANDS = (torch.float16, torch.bfloat16)
# The platform of kernels in JAX's registry.
_PLATFORM = "gpu"
_ALIGNMENT = 256  # of a workspace, in bytes
_serials = itertools.count()


def gemm(a: Any, b: Any, *, epilogue: Epilogue | None = None, out_dtype: Any = None, **inputs: Any) -> Any:
    """Compute D = epilogue(A @ B, inputs) in one kernel.

    Parameters
    ----------
    a : jax.Array
        (..., K), FP16 or BF16; leading dimensions are folded into M.
    b : jax.Array
        (K, N), the same dtype, row-major as JAX's arrays are.
    epilogue : Epilogue, optional
        A function decorated with :func:`cutlass_ops.epilogue`. Default: D = A @ B.
    out_dtype : dtype, optional
        D's dtype, FP16, BF16 or FP32; by default that of ``a``.
    **inputs
        The epilogue's inputs by name, as for :func:`cutlass_ops.gemm`. A ``Scalar`` is a number or a 0-d array. There
        are no ``Integer`` inputs, which have 64 bits.

    Returns
    -------
    jax.Array or named tuple
        D (..., N), or all outputs with D first.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit. The message names it and says what to do.
    NotImplementedError
        If the call is differentiated or mapped by ``jax.vmap``.
    UnsupportedError
        If no kernel supports the device, when the program is lowered.
    ImportError
        If jax-tvm-ffi is not installed, when the program is lowered for a GPU.
    MissingKernelError, CompileError, ToolchainError, StoreError, LoadError
        If the kernel cannot be compiled, stored or loaded, when the program is lowered.

    Examples
    --------
    >>> import cutlass_ops.jax as cj
    >>> a, b = jnp.ones((2, 8), jnp.bfloat16), jnp.ones((8, 3), jnp.bfloat16)
    >>> cj.gemm(a, b).tolist()
    [[8.0, 8.0, 8.0], [8.0, 8.0, 8.0]]
    >>> @co.epilogue
    ... def scaled(acc, bias: co.Row, scale: co.Scalar):
    ...     return (acc + bias) * scale
    >>> jax.jit(lambda a, b, x: cj.gemm(a, b, epilogue=scaled, bias=x, scale=0.5))(a, b, jnp.arange(3.0)).tolist()
    [[4.0, 4.5, 5.0], [4.0, 4.5, 5.0]]
    """
    return _run(op_of(epilogue), a, b, (), inputs, out_dtype)


def _for_jax(op: Op) -> Callable[..., Any]:
    """Return a named op as a function of JAX arrays."""

    def function(a: Any, b: Any, *inputs: Any, out_dtype: Any = None, **named: Any) -> Any:
        return _run(op, a, b, inputs, named, out_dtype)

    function.__name__ = function.__qualname__ = op.name
    shapes = ", ".join(f"{i.name} {_SHAPES[i.kind]}" for i in op.graph.inputs)
    function.__doc__ = (
        f"{op.epilogue.doc.splitlines()[0]}\n\nArguments are a (..., K), b (K, N), {shapes} and out_dtype, as for "
        ":func:`gemm`, with its results and errors."
    )
    return function


_SHAPES = {Kind.ROW: "(N,)", Kind.TILE: "(..., N)"}

gemm_bias = _for_jax(named.gemm_bias)
gemm_bias_relu = _for_jax(named.gemm_bias_relu)
gemm_bias_gelu = _for_jax(named.gemm_bias_gelu)
gemm_bias_silu = _for_jax(named.gemm_bias_silu)
gemm_residual = _for_jax(named.gemm_residual)
gemm_bias_residual = _for_jax(named.gemm_bias_residual)
gemm_bias_relu_residual = _for_jax(named.gemm_bias_relu_residual)


def _run(op: Op, a: Any, b: Any, inputs: tuple[Any, ...], by_name: dict[str, Any], out_dtype: Any) -> Any:
    if "groups" in by_name:
        raise TypeError("cutlass_ops.jax has no groups: call it for each group, or cutlass_ops.gemm with tensors")
    for i in op.graph.inputs:
        if i.kind is Kind.INTEGER:
            raise TypeError(f"{op.name} takes {i.name}, an Integer of 64 bits, which cutlass_ops.jax cannot pass")
    values = op.positional(inputs, by_name)
    arrays = [_array(name, x) for name, x in zip(("a", "b", *op.names), (a, b, *values), strict=True)]
    wanted = None if out_dtype is None else np.dtype(out_dtype).name
    found = _compiled(*arrays, graph=op.graph, name=op.name, out_dtype=wanted)
    return found[0] if len(found) == 1 else _outputs(op.outputs)(*found)


def _array(name: str, value: Any) -> Any:
    if isinstance(value, (bool, int, float)):  # a number of FP32, whatever JAX's own default is
        return jnp.float32(value)
    if isinstance(value, (jax.Array, np.ndarray, np.generic)):
        return jnp.asarray(value)
    instead = ": call the function of this name in cutlass_ops" if isinstance(value, Tensor) else ""
    if isinstance(value, Scaled):
        instead = f": pass {name}.values, and {name}.scale as an input of the epilogue"
    raise TypeError(f"{name} must be a jax.Array, not {type(value).__name__}{instead}")


@functools.cache
def _outputs(names: tuple[str, ...]) -> Any:
    # A named tuple of its own, since JAX knows these.
    return namedtuple("Outputs", [f"{name}_" if keyword.iskeyword(name) else name for name in names], rename=True)


# ---- The primitive -------------------------------------------------------------------------------------------------

_GEMM = Primitive("cutlass_ops_gemm")
_GEMM.multiple_results = True


@functools.partial(jax.jit, static_argnames=("graph", "name", "out_dtype"), inline=True)
def _compiled(*arrays: Any, graph: Graph, name: str, out_dtype: str | None) -> tuple[Any, ...]:
    return tuple(_GEMM.bind(*arrays, graph=graph, name=name, out_dtype=out_dtype))


def _types_of_results(*arrays: Any, graph: Graph, name: str, out_dtype: str | None) -> list[Any]:
    """Return the types of results, which vary over each axis of a mesh over which an argument does: JAX adds that up.

    It has done so in several ways, and knows what else belongs to a type.
    """
    call = _checked(arrays, graph, out_dtype)

    def made_of(*arrays: Any) -> list[Any]:
        one = functools.reduce(operator.add, (x.sum(dtype="float32") for x in arrays))
        return [
            jnp.broadcast_to(one, call.arguments.output_shape(o)).astype(_dtype_of(t))
            for o, t in zip(graph.outputs, call.outputs, strict=True)
        ]

    return list(jax.make_jaxpr(made_of)(*arrays).out_avals)


_GEMM.def_abstract_eval(_types_of_results)


@without_modes()
def _checked(arrays: Sequence[Any], graph: Graph, out_dtype: str | None) -> Call:
    """Check a call by tensors of the arrays' shapes and dtypes, without data.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit. The message names it.
    """
    names = ("a", "b", *(i.name for i in graph.inputs))
    a, b, *inputs = (
        torch.empty(x.shape, dtype=_torch_dtype(name, x.dtype), device="meta")
        for name, x in zip(names, arrays, strict=True)
    )
    for name, x in (("a", a), ("b", b)):
        if x.dtype not in _OPERANDS:
            raise TypeError(f"{name} is {arrays[name == 'b'].dtype}: cutlass_ops.jax takes float16 and bfloat16")
    if b.ndim != 2:
        raise ValueError(f"b has shape {tuple(b.shape)}: cutlass_ops.jax takes one matrix (K, N)")
    if graph.quantized is not None:
        raise TypeError("the epilogue quantises D, and cutlass_ops.jax has no results in FP8")
    dtype = None if out_dtype is None else _torch_dtype("out_dtype", out_dtype)
    if dtype not in (None, *_OPERANDS, torch.float32):
        raise TypeError(f"out_dtype is {out_dtype}: use float16, bfloat16 or float32")
    try:
        call = check_call(graph, a, b, dict(zip(names[2:], inputs, strict=True)), None, dtype)
    except ValueError as exc:
        raise ValueError(str(exc).replace(".t()", ".T")) from None  # as arrays are transposed
    if 0 in call.problem:
        raise ValueError(f"a {tuple(a.shape)} and b {tuple(b.shape)}: cutlass_ops.jax takes no extent of 0")
    return call


def _torch_dtype(name: str, dtype: Any) -> torch.dtype:
    found = getattr(torch, np.dtype(dtype).name, None)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{name} is {dtype}, which no kernel supports: use float16, bfloat16 or float32")
    return found


def _dtype_of(tensor: Tensor) -> Any:
    return jnp.dtype(str(tensor.dtype).removeprefix("torch."))


def _in_the_kernels_shape(array: Any, tensor: Tensor | float, full: tuple[int, ...]) -> Any:
    """Return an array in the shape of a checked argument: leading dimensions folded, what broadcasts written out."""
    assert isinstance(tensor, Tensor)
    if array.size != tensor.numel():
        array = jnp.broadcast_to(array, full if array.ndim == len(full) else tensor.shape)
    return array.reshape(tensor.shape)


def _not_differentiated(*_: Any, **__: Any) -> Any:
    raise NotImplementedError(
        "cutlass_ops.jax has no gradients: write them in a jax.custom_vjp whose forward calls it, or stop them with "
        "jax.lax.stop_gradient"
    )


def _not_mapped(*_: Any, **__: Any) -> Any:
    raise NotImplementedError(
        "cutlass_ops.jax is not mapped by jax.vmap: pass a with leading dimensions, which are rows, or use jax.lax.map"
    )


ad.primitive_jvps[_GEMM] = _not_differentiated
batching.primitive_batchers[_GEMM] = _not_mapped


# ---- On a GPU: XLA calls the kernel --------------------------------------------------------------------------------


def _by_kernel(*arrays: Any, graph: Graph, name: str, out_dtype: str | None) -> list[Any]:
    """Call the best kernel for these shapes.

    A kernel takes a, b, D, inputs, other outputs, then two numbers. jax-tvm-ffi passes all operands together, so
    outputs are operands too: arrays without values, which XLA lets the results share memory with.
    """
    call = _checked(arrays, graph, out_dtype)
    decision = _decision(name, call)
    a, b, *inputs = arrays
    full = (*a.shape[:-1], b.shape[1])
    given = call.arguments
    inputs = [_in_the_kernels_shape(x, given.inputs[i.name], full) for i, x in zip(graph.inputs, inputs, strict=True)]
    d, *others = (lax.empty(tuple(t.shape), _dtype_of(t)) for t in call.outputs)
    workspace = _workspace(decision, call.problem)
    if workspace:
        others.append(lax.empty((workspace + _ALIGNMENT,), jnp.uint8))
    operands = (a.reshape(given.a.shape), b, d, *inputs, *others)
    places = (2, *range(3 + len(inputs), len(operands)))
    raster, swizzle = map(np.int64, decision.order.numbers)
    results = jax.ffi.ffi_call(
        _target(decision.spec, in_workspace=bool(workspace)),
        [jax.ShapeDtypeStruct(operands[at].shape, operands[at].dtype) for at in places],
        input_output_aliases={at: result for result, at in enumerate(places)},
    )(*operands, raster=raster, swizzle=swizzle)
    # A workspace comes last, as no output of the graph.
    return [x.reshape(given.output_shape(o)) for o, x in zip(graph.outputs, results, strict=False)]


def _decision(name: str, call: Call) -> Decision:
    """Return the best kernel for a checked call, and the order of its tiles.

    Raises
    ------
    UnsupportedError
        If no kernel serves.
    """
    of = device_of(_device())
    signature = signature_of(call, of)
    decision = dispatch.decide(signature, of, call.problem)
    if decision is None:
        what = f"{name} with a {signature.a}, b {signature.b} and d {signature.d}"
        raise UnsupportedError(dispatch.unserved(what, signature, of))
    return decision


def _workspace(decision: Decision, problem: Problem) -> int:
    """Return how many bytes of workspace a launch needs."""
    with torch.cuda.device(_device()):
        return Registry.current().kernel(decision.spec).workspace_size(*problem, *decision.order.numbers)


def _device() -> torch.device:
    """Return the GPU of JAX for which kernels are chosen. The process's others are taken to be like it."""
    if not torch.cuda.is_available():
        raise NoDeviceError(
            f"JAX has a GPU, and PyTorch {torch.__version__} sees none, which cutlass_ops needs to choose a kernel: "
            "install a PyTorch with CUDA"
        )
    return torch.device("cuda", jax.local_devices(backend="cuda")[0].local_hardware_id)


@cached(maxsize=None)
def _target(spec: KernelSpec, *, in_workspace: bool) -> str:
    """Return the name under which XLA knows a kernel, once it is loaded."""
    try:
        import jax_tvm_ffi
    except ImportError as exc:
        raise ImportError(
            "JAX calls kernels on a GPU by jax-tvm-ffi, which is not installed: pip install jax-tvm-ffi"
        ) from exc
    kernel = Registry.current().kernel(spec)
    kernel.load_on(_device())  # now, so that the first call does not wait for the driver
    # A name is registered for good, and another session may have another build of the kernel.
    name = f"cutlass_ops.{next(_serials)}.{spec.slug}"
    order = ["args", "attrs.raster", "attrs.swizzle"]
    launch = as_exported(functools.partial(_launch_in_workspace, kernel.launch)) if in_workspace else kernel.launch
    jax_tvm_ffi.register_ffi_target(name, launch, order, platform=_PLATFORM, pass_owned_tensor=in_workspace)
    return name


def _launch_in_workspace(launch: Callable[..., int], *given: Any) -> None:
    """Launch a kernel with the last array as its workspace, from the first address that is aligned as kernels ask.

    XLA aligns memory to 128 bytes only. A kernel would refuse that, and XLA not see it.
    """
    *operands, space, raster, swizzle = given
    space = torch.utils.dlpack.from_dlpack(space)
    space = space[-space.data_ptr() % _ALIGNMENT :]
    if launch(*operands, raster, swizzle, space):
        raise RuntimeError("the kernel refused its operands: please report this, with the program")


mlir.register_lowering(_GEMM, mlir.lower_fun(_by_kernel, multiple_results=True), platform="cuda")


# ---- On the CPU: PyTorch in a callback -----------------------------------------------------------------------------


def _by_reference(*arrays: Any, graph: Graph, name: str, out_dtype: str | None) -> list[Any]:
    results = [
        jax.ShapeDtypeStruct(x.shape, x.dtype)
        for x in _types_of_results(*arrays, graph=graph, name=name, out_dtype=out_dtype)
    ]

    def compute(*given: Any) -> list[np.ndarray]:
        a, b, *inputs = map(_tensor, given)
        named = dict(zip((i.name for i in graph.inputs), inputs, strict=True))
        dtype = None if out_dtype is None else _torch_dtype("out_dtype", out_dtype)
        with torch.no_grad():
            call = check_call(graph, a, b, named, None, dtype)
            refusals.say(name, call.problem, refusals.BY_PYTORCH)
            call.run_reference()
        return [_values(x, like.dtype) for x, like in zip(call.results(), results, strict=True)]

    return list(jax.pure_callback(compute, results, *arrays))


def _tensor(array: Any) -> Tensor:
    # By their bytes: NumPy has no BF16 that PyTorch reads.
    values = np.asarray(array)
    flat = torch.frombuffer(bytearray(values.tobytes()), dtype=_torch_dtype("an argument", values.dtype))
    return flat.reshape(values.shape)


def _values(tensor: Tensor, dtype: Any) -> np.ndarray:
    return np.frombuffer(tensor.contiguous().view(torch.uint8).numpy().tobytes(), dtype).reshape(tensor.shape)


mlir.register_lowering(_GEMM, mlir.lower_fun(_by_reference, multiple_results=True), platform="cpu")


# Type checkers would take any name to be there.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        raise unknown_name(__name__, name, __all__)
