"""Checks of a call's tensors, and their operand types.

This runs once for each new combination of shapes. A warm call goes straight to its kernel, which checks its arguments
itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from cutlass_ops.base import arch, mma
from cutlass_ops.base.dtypes import ALL, READ, DType, i32
from cutlass_ops.declare.form import BATCHED, DENSE, GROUPED, Form
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.spec import Major, Operand
from cutlass_ops.epilogue.graph import Graph
from cutlass_ops.epilogue.nodes import BLOCKS, Input, Kind, Output
from cutlass_ops.epilogue.operations import REDUCTIONS
from cutlass_ops.run import batches, traced

_DTYPES: dict[torch.dtype, DType] = {getattr(torch, t.torch_name): t for t in ALL}
MAJORS: tuple[Major, ...] = ("row", "col")


@dataclass(frozen=True)
class Matrix:
    """The type of a matrix, or of one for each batch, aligned by address and strides, and its contiguous extent.

    TMA loads need no more. All other whole accesses, TMA stores included, need an aligned extent too.
    """

    operand: Operand
    length: int

    def for_vector_access(self) -> Operand:
        """Return the type for accesses that also need an aligned extent."""
        return Operand(self.operand.dtype, self.operand.major, math.gcd(self.operand.alignment, self.length))


def element_type(name: str, tensor: Tensor, allowed: Sequence[DType] = ALL) -> DType:
    """Return a tensor's element type.

    Raises
    ------
    TypeError
        If it is not allowed.
    """
    found = _DTYPES.get(tensor.dtype)
    if found is None or found not in allowed:
        names = ", ".join(str(getattr(torch, t.torch_name)) for t in ALL if t in allowed)
        raise TypeError(f"{name} is {tensor.dtype}: use one of {names}")
    return found


def matrix(name: str, tensor: Tensor, dtype: DType) -> Matrix:
    """Return the type of a matrix, the last two dimensions of a tensor.

    Raises
    ------
    ValueError
        If neither dimension is contiguous, or rows overlap in memory.
    """
    # A dimension of extent 1 allows both majors: take the better aligned one, row-major if equal.
    return max(_readings(name, tensor, dtype), key=lambda m: m.operand.alignment)


def weights(
    b: Tensor, products: Mapping[str, Tensor], dtype: DType, majors: Sequence[Major] = MAJORS
) -> tuple[Matrix, ...]:
    """Return the types of B and of each product's matrix, with one major of those given and one alignment.

    Raises
    ------
    ValueError
        If they have no major in common, or a kernel cannot address one of them.
    """
    named = {"b": b} | dict(products)
    readings = {n: {m.operand.major: m for m in _readings(n, t, dtype)} for n, t in named.items()}
    common = [major for major in majors if all(major in by for by in readings.values())]
    alike = [[by[major] for by in readings.values()] for major in common]
    if not alike:
        found = ", ".join(f"{name} is {'- or '.join(by)}-major" for name, by in readings.items())
        raise ValueError(
            f"{found}: both weights need the same major. If one is weight.t(), pass the other as a transpose as well"
        )
    lowest = [min(m.operand.alignment for m in matrices) for matrices in alike]
    best = lowest.index(max(lowest))
    return tuple(replace(m, operand=replace(m.operand, alignment=lowest[best])) for m in alike[best])


def _readings(name: str, tensor: Tensor, dtype: DType) -> list[Matrix]:
    found = [m for inner in (1, 0) if (m := as_major(tensor, inner, dtype)) is not None]
    if not found:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}: one dimension must have stride 1, "
            f"and the other a stride of at least its extent. Call {name}.contiguous() first"
        )
    return found


def has_lines_along(tensor: Tensor, inner: int) -> bool:
    """Whether a matrix, the last two dimensions of a tensor, is contiguous along one of them: 0 or 1.

    An extent of 1 can make both true.
    """
    along, across = inner - 2, -1 - inner
    length, runs = tensor.shape[along], tensor.shape[across]
    return (length <= 1 or tensor.stride(along) == 1) and (runs <= 1 or tensor.stride(across) >= length)


def as_major(tensor: Tensor, inner: int, dtype: DType) -> Matrix | None:
    """Return the type of a matrix whose lines are along one of its dimensions, 0 or 1; None if they are not."""
    if not has_lines_along(tensor, inner):
        return None
    along, across = inner - 2, -1 - inner
    length, runs, ld = tensor.shape[along], tensor.shape[across], tensor.stride(across)
    addresses = math.gcd(tensor.data_ptr(), arch.TMA_ALIGNMENT_BYTES)
    if runs > 1:
        addresses = math.gcd(addresses, ld * dtype.bytes)
    for extent, stride in zip(tensor.shape[:-2], tensor.stride(), strict=False):
        if extent > 1:
            addresses = math.gcd(addresses, stride * dtype.bytes)
    return Matrix(Operand(dtype, "row" if inner == 1 else "col", addresses // dtype.bytes), length)


def check_lines(arguments: Arguments, products: Mapping[str, Tensor]) -> Sequence[Major]:
    """Return the majors that B may have; refuse A and B if their types are read along K only and they are not so.

    Raises
    ------
    ValueError
        If a matrix is not contiguous along K, or not aligned to 16 bytes. The message says what to pass.
    """
    a, b = arguments.a, arguments.b
    found = mma.mma_of(element_type("a", a), element_type("b", b))
    if found is None or not found.wgmma_k_major_only:
        return MAJORS
    for name, tensor, along_k in (("a", a, 1), ("b", b, 0), *((n, t, 0) for n, t in products.items())):
        lines = as_major(tensor, along_k, element_type(name, tensor))
        if lines is None:
            once = f"pass weight.t() of a contiguous weight (N, K), or prepare({name}).matrix, which transposes it once"
            instead = "pass a row-major matrix" if name == "a" else once
            raise ValueError(
                f"{name} is {tensor.dtype} and has strides {tensor.stride()}, and Tensor Cores read this type along K "
                f"only: {instead}"
            )
        if not lines.operand.aligned and 0 not in arguments.problem.extents:
            raise ValueError(
                f"{name} is {tensor.dtype}, and its lines of K={arguments.problem.k} elements do not begin at "
                f"multiples of 16 bytes: pad K of a and b with zeros to a multiple of 16"
                + ("" if name == "a" else f", or pass prepare({name}).matrix, whose lines are longer than K")
            )
    return ("col",)


class Arguments(NamedTuple):
    """One call's checked arguments, in two dimensions; batched ones with one or two leading dimensions of batches.

    Grouped ones have A in two dimensions, B in three, and where groups end as the first of the inputs.

    Attributes
    ----------
    problem : Problem
        Extents of the product.
    leading : tuple of int
        The dimensions of D before N: those of A, folded into M, or batches and M.
    a, b : Tensor
        A (M, K) and B (K, N). Batched, both have all batches, those that they share with a stride of 0.
    inputs : mapping of str to Tensor or float
        The epilogue's inputs by name: (N,), (M,), (M, N), a product's (K, N), or a scalar. Batched, a tensor is
        shared by all batches, or has all of them.
    spread, copied : tuple of str
        The inputs that the caller gave in another shape, and those that were copied since they repeat values.
    """

    problem: Problem
    leading: tuple[int, ...]
    a: Tensor
    b: Tensor
    inputs: Mapping[str, Tensor | float]
    spread: tuple[str, ...] = ()
    copied: tuple[str, ...] = ()
    form: Form = DENSE

    def output_shape(self, output: Output) -> tuple[int, ...]:
        """Return an output's shape for the caller."""
        return shape_of(output.kind, self.leading, self.problem.n, self._batches)

    def flat_shape(self, output: Output) -> tuple[int, ...]:
        """Return an output's shape for the kernel."""
        each = () if self.form == GROUPED else tuple(self.a.shape[:-2])
        return shape_of(output.kind, (*each, self.problem.m), self.problem.n, each)

    @property
    def is_folded(self) -> bool:
        """Whether there are more dimensions of batches than a kernel knows, and some were folded into one."""
        return self.form == BATCHED and len(self._batches) > self.a.ndim - 2

    @property
    def _batches(self) -> tuple[int, ...]:
        return self.leading[:-1] if self.form == BATCHED else ()


def blocks(extent: int) -> int:
    """Return how many blocks of 128 an extent has: the last one may be shorter."""
    return -(-extent // mma.BLOCK_K)


def shape_of(kind: Kind, leading: tuple[int, ...], n: int, each: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Return the shape of an output of a kind, for D's dimensions before N, and those of them that are batches."""
    return {
        Kind.ROW: (*each, n),
        Kind.COL: leading,
        Kind.TILE: (*leading, n),
        Kind.BLOCKS_D: (*leading, blocks(n)),
    }[kind]


def scaling(graph: Graph, arguments: Arguments) -> tuple[mma.Block, mma.Block]:
    """Return the blocks of A and of B that share a scale, from the shapes of checked scales.

    For one column of B, both ways to have scales are the same.
    """
    _, scale_b = (arguments.inputs[name] for name in graph.block_scales)
    n = arguments.problem.n
    assert isinstance(scale_b, Tensor)
    return (1, mma.BLOCK_K), (mma.BLOCK_K, mma.BLOCK_K if scale_b.shape[0] == blocks(n) else 1)


def check_arguments(graph: Graph, a: Any, b: Any, inputs: Mapping[str, Any]) -> Arguments:
    """Check a call's operands and inputs against each other.

    Raises
    ------
    TypeError
        If an argument is not a tensor, has the wrong dtype, or is missing or unknown.
    ValueError
        If shapes or devices differ.
    """
    require_tensor("a", a)
    require_tensor("b", b)
    found = mma.mma_of(element_type("a", a, mma.OPERANDS), element_type("b", b, mma.OPERANDS))
    if found is None:
        raise TypeError(f"b is {b.dtype} and a is {a.dtype}: A and B must have the same dtype, or both FP8")
    if graph.gathered and found.bits != 16:
        raise TypeError(
            f"a is {a.dtype}, and the epilogue takes {', '.join(graph.gathered)} of its rows, as of 16 bits only: "
            f"compute it before, and pass it as a Col"
        )
    if graph.block_scales and not found.scalings:
        raise TypeError(
            f"a is {a.dtype} and b is {b.dtype}, and {' and '.join(graph.block_scales)} are scales of blocks, which "
            "there are for FP8 only: use a scale for each row and each column, or one number"
        )
    if b.ndim > 2:
        return _check_batched(graph, a, b, inputs)
    if a.ndim < 1 or b.ndim != 2 or a.shape[-1] != b.shape[0]:
        transposed = b.ndim == 2 and a.ndim >= 1 and a.shape[-1] == b.shape[1]
        raise ValueError(
            f"a {tuple(a.shape)} and b {tuple(b.shape)}: a must be (..., M, K) and b (K, N) with the same K"
            + (". b looks like a weight of shape (N, K): pass b.t()" if transposed else "")
        )
    require_same_device("b", b, a)
    a, b = as_stored(a), as_stored(b)
    batch, (k, n) = tuple(a.shape[:-1]), b.shape
    if graph.swaps_pairs and n % 2:
        raise ValueError(f"b has {n} columns, and the epilogue swaps pairs of them: N must be even, so pad b by one")
    m = math.prod(batch)
    flat_a = fold("a", a, (m, k))
    checked = check_inputs(graph, inputs, a, b, batch)
    pairs = [(i.name, checked[i.name], inputs[i.name]) for i in graph.inputs if i.kind in VECTORS]
    spread = tuple(name for name, x, given in pairs if isinstance(x, Tensor) and x.shape != given.shape)
    copied = tuple(
        name for name, x, given in pairs if isinstance(x, Tensor) and (repeats(given) or x.numel() > given.numel())
    )
    return Arguments(Problem(m, n, k), batch, flat_a, b, checked, spread, copied)


# Inputs that may be spread over what they are given for.
VECTORS = (Kind.ROW, Kind.COL, Kind.TILE)


def _check_batched(graph: Graph, a: Tensor, b: Tensor, inputs: Mapping[str, Any]) -> Arguments:
    """Check the operands of a GEMM for each batch, whose dimensions broadcast as those of torch.matmul do."""
    if a.ndim < 2 or a.shape[-1] != b.shape[-2]:
        transposed = a.ndim >= 2 and a.shape[-1] == b.shape[-1]
        raise ValueError(
            f"a {tuple(a.shape)} and b {tuple(b.shape)}: a must be (..., M, K) and b (..., K, N) with the same K"
            + (". b looks like weights of shape (..., N, K): pass b.mT" if transposed else "")
        )
    shape = batches.broadcast(tuple(a.shape[:-2]), tuple(b.shape[:-2]))
    if shape is None:
        raise ValueError(
            f"a {tuple(a.shape)} and b {tuple(b.shape)}: the dimensions before the last two are batches, which must be "
            "equal or 1"
        )
    batches.require(graph)
    require_same_device("b", b, a)
    a, b = as_stored(a), as_stored(b)
    (m, k), n = a.shape[-2:], b.shape[-1]
    if graph.swaps_pairs and n % 2:
        raise ValueError(f"b has {n} columns, and the epilogue swaps pairs of them: N must be even, so pad b by one")
    checked = check_inputs(graph, inputs, a, b, (*shape, m))
    own = _own_shapes(m, n, k)
    tensors = {i.name: x for i in graph.inputs if i.kind in own and isinstance(x := checked[i.name], Tensor)}
    dimensions = {i.name: len(own[i.kind]) for i in graph.inputs if i.name in tensors}
    folded = batches.folded({"a": a, "b": b, **tensors}, {"a": 2, "b": 2, **dimensions}, shape)
    given = [(i, inputs[i.name]) for i in graph.inputs if i.kind in VECTORS]
    copied = tuple(i.name for i, x in given if batches.is_copied(i.kind, x, shape, own[i.kind]))
    spread = tuple(i.name for i, x in given if folded[i.name].shape != x.shape)
    flat_a, flat_b = folded.pop("a"), folded.pop("b")
    problem = Problem(m, n, k, math.prod(shape))
    return Arguments(problem, (*shape, m), flat_a, flat_b, {**checked, **folded}, spread, copied, BATCHED)


def _own_shapes(m: int, n: int, k: int) -> dict[Kind, tuple[int, ...]]:
    """Return the shape of each kind of tensor for one GEMM."""
    return {Kind.ROW: (n,), Kind.COL: (m,), Kind.TILE: (m, n), Kind.PRODUCT: (k, n)}


def check_inputs(
    graph: Graph, inputs: Mapping[str, Any], a: Tensor, b: Tensor, leading: tuple[int, ...]
) -> dict[str, Tensor | float]:
    """Check an epilogue's inputs, and return them as kernels take them. `leading` are D's dimensions before N.

    Raises
    ------
    TypeError, ValueError
        If one is missing, unknown or does not fit. The message names it.
    """
    declared = {i.name: i for i in graph.inputs}
    missing = [name for name in declared if name not in inputs]
    unknown = [name for name in inputs if name not in declared]
    if missing or unknown:
        wrong = [f"{name} is missing" for name in missing] + [f"{name} is unknown" for name in unknown]
        raise TypeError(f"the epilogue takes ({', '.join(declared)}): {', '.join(wrong)}")
    return {name: _check_input(i, inputs[name], a, b, leading) for name, i in declared.items()}


def scalar(name: str, value: Any) -> Any:
    """Convert a scalar for a kernel: a float, or a 0-d FP32, FP16 or BF16 tensor on a GPU.

    Eager, warm and compiled calls accept a real number of Python or NumPy, or a tensor of one element of any real
    dtype. Values that only PyTorch's dispatcher can read are returned unchanged.

    Raises
    ------
    TypeError
        If the value is not a real number, or a bool or complex tensor.
    ValueError
        If it is beyond the range of a double, or a tensor of several elements.
    """
    if isinstance(value, (torch.SymInt, torch.SymFloat)) or traced.is_special(value):
        return value
    if not isinstance(value, Tensor):
        return traced.number(name, value)
    return value if traced.is_watched() else _scalar_tensor(name, value)


def _scalar_tensor(name: str, value: Tensor) -> Tensor | float:
    require_tensor(name, value)
    if value.dtype == torch.bool or value.is_complex():
        raise TypeError(f"{name} is {value.dtype}: a Scalar must be a real number")
    if value.numel() != 1:
        raise ValueError(f"{name} has shape {tuple(value.shape)}: a Scalar must have one element")
    # A number on the host needs no copy at launch.
    if value.device.type == "cpu":
        return float(value.item())
    one = value.reshape(())
    return one if _DTYPES.get(one.dtype) in READ else one.float()


def integer(name: str, value: Any) -> Any:
    """Return a whole number of 64 bits as kernels take it: an int, or an INT64 tensor without dimensions on a GPU.

    What only PyTorch's dispatcher can read is returned as it is.

    Raises
    ------
    TypeError
        If it is no int and no tensor of an integer dtype.
    ValueError
        If it has more bits, or is a tensor of several elements.
    """
    if isinstance(value, torch.SymInt) or traced.is_special(value):
        return value
    if not isinstance(value, Tensor):
        return traced.integer(name, value)
    return value if traced.is_watched() else _integer_tensor(name, value)


def _integer_tensor(name: str, value: Tensor) -> Tensor | int:
    require_tensor(name, value)
    if value.dtype == torch.bool or value.is_floating_point() or value.is_complex():
        raise TypeError(f"{name} is {value.dtype}: an Integer is a whole number")
    if value.numel() != 1:
        raise ValueError(f"{name} has shape {tuple(value.shape)}: an Integer has one element")
    return int(value.item()) if value.device.type == "cpu" else value.reshape(()).long()


def _check_input(declared: Input, value: Any, a: Tensor, b: Tensor, leading: tuple[int, ...]) -> Tensor | float:
    if declared.kind is Kind.SCALAR:
        found = _scalar_tensor(declared.name, value) if isinstance(value, Tensor) else value
        if isinstance(found, Tensor):
            require_same_device(declared.name, found, a)
            return found
        return traced.number(declared.name, found)
    if declared.kind is Kind.INTEGER:
        whole = _integer_tensor(declared.name, value) if isinstance(value, Tensor) else value
        if isinstance(whole, Tensor):
            require_same_device(declared.name, whole, a)
            return whole
        return traced.integer(declared.name, whole)
    require_tensor(declared.name, value)
    if declared.kind in BLOCKS:
        return _check_blocks(declared, value, a, b)
    if declared.kind is Kind.PRODUCT:
        return _check_product(declared.name, value, b)
    return _check_input_tensor(declared, value, a, leading, b.shape[-1], b_batches=b.ndim > 2)


def _check_product(name: str, value: Tensor, b: Tensor) -> Tensor:
    if value.dtype != b.dtype:
        raise TypeError(f"{name} is {value.dtype} and b is {b.dtype}: a Product must have b's dtype")
    k, n = b.shape[-2:]
    if tuple(value.shape) not in ((k, n), tuple(b.shape)):
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}: as a Product it must have b's shape (K, N), {(k, n)}"
            + (f". It looks like a weight of shape (N, K): pass {name}.t()" if tuple(value.shape) == (n, k) else "")
        )
    require_same_device(name, value, b)
    return as_stored(value)


def _check_blocks(declared: Input, value: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return scales of blocks in two dimensions, with any strides."""
    name = declared.name
    if value.dtype != torch.float32:
        raise TypeError(f"{name} is {value.dtype}: scales of blocks are torch.float32, so pass {name}.float()")
    k, n = b.shape
    batch, steps = tuple(a.shape[:-1]), blocks(k)
    if declared.kind is Kind.BLOCKS_A:
        shapes = [(*batch, steps), (math.prod(batch), steps)]
        what = f"{shapes[0]}, a scale for each 1x{mma.BLOCK_K} of a"
    else:
        shapes = [(blocks(n), steps), (n, steps)]
        what = (
            f"{shapes[0]}, a scale for each {mma.BLOCK_K}x{mma.BLOCK_K} of b, or {shapes[1]}, one for each "
            f"{mma.BLOCK_K} of a column"
        )
    if tuple(value.shape) not in shapes:
        transposed = value.ndim == 2 and tuple(value.shape[::-1]) in shapes
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}: with M={math.prod(batch)}, N={n} and K={k} it must have shape "
            + what
            + (f". It looks transposed: pass {name}.t()" if transposed else "")
        )
    require_same_device(name, value, a)
    value = as_stored(value)
    return value if declared.kind is Kind.BLOCKS_B else fold(name, value, shapes[1])


def as_stored(tensor: Tensor) -> Tensor:
    """Return a tensor without a lazy negation, since kernels read memory as it is."""
    return tensor.resolve_neg()


def _check_input_tensor(
    declared: Input, value: Tensor, a: Tensor, batch: tuple[int, ...], n: int, *, b_batches: bool
) -> Tensor:
    name = declared.name
    element_type(name, value, READ)
    if b_batches:
        return _check_batched_input(declared, value, a, batch, n)
    m = math.prod(batch)
    shapes = {Kind.ROW: (n,), Kind.COL: batch, Kind.TILE: (*batch, n)}
    flat = {Kind.ROW: (n,), Kind.COL: (m,), Kind.TILE: (m, n)}[declared.kind]
    value = _spread(declared.kind, value, shapes[declared.kind], flat)
    if tuple(value.shape) not in (shapes[declared.kind], flat):
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}: as a {declared.kind.name.capitalize()} it must have shape "
            f"{shapes[declared.kind]} for a result of shape {(*batch, n)}"
        )
    require_same_device(name, value, a)
    folded = fold(name, as_stored(value), flat)
    if folded.ndim == 1 and folded.shape[0] > 1 and folded.stride(0) != 1:
        raise ValueError(f"{name} has stride {folded.stride(0)}: call {name}.contiguous() first")
    return folded


def _check_batched_input(declared: Input, value: Tensor, a: Tensor, leading: tuple[int, ...], n: int) -> Tensor:
    """Return an input that all batches share without their dimensions, or one with all of them."""
    name, (*shape, m) = declared.name, leading
    require_same_device(name, value, a)
    own = _own_shapes(m, n, a.shape[-1])[declared.kind]
    found = batches.spread(declared.kind, as_stored(value), tuple(shape), own)
    if found is None:
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}: as a {declared.kind.name.capitalize()} it must have shape {own}, "
            f"or {(*shape, *own)} for a result of shape {(*leading, n)}"
        )
    if len(own) == 1 and found.shape[-1] > 1 and found.stride(-1) != 1:
        raise ValueError(f"{name} has stride {found.stride(-1)}: call {name}.contiguous() first")
    return found


def _spread(kind: Kind, value: Tensor, wanted: tuple[int, ...], flat: tuple[int, ...]) -> Tensor:
    """Return an input that PyTorch would broadcast in its full shape, and any other as it is.

    That is a row with leading dimensions of 1, a column with a last one of 1, and a tile with any of 1. What has a
    stride of 0 is copied.
    """
    shape = tuple(value.shape)
    if kind is Kind.ROW and value.ndim > 1 and shape[-1:] == wanted and value.numel() == wanted[0]:
        value = value.reshape(wanted)
    elif kind is Kind.COL and shape in ((*wanted, 1), (*flat, 1)):
        value = value.squeeze(-1)
    elif kind is Kind.TILE:
        for full in (wanted, flat):
            if len(shape) == len(full) and all(x in (1, y) for x, y in zip(shape, full, strict=True)):
                value = value.expand(full)
                break
    return value.contiguous() if repeats(value) else value


def repeats(tensor: Tensor) -> bool:
    """Whether one place in memory is several elements."""
    return any(extent > 1 and stride == 0 for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))


def fold(name: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """View a tensor with its leading dimensions folded into M, without a copy.

    Raises
    ------
    ValueError
        If its strides do not allow the view.
    """
    if tensor.shape == shape:
        return tensor
    try:
        return tensor.view(shape)
    except RuntimeError:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}, which cannot be viewed as {shape} "
            f"without a copy: call {name}.contiguous() first"
        ) from None


def output_name(output: Output) -> str:
    """Return the name of a caller's output in messages."""
    return "out" if output.name == "d" else f"out[{output.name!r}]"


def check_out(
    arguments: Arguments, output: Output, out: Any, allowed: Sequence[DType], dtype: torch.dtype | None = None
) -> Tensor:
    """Check a caller's output tensor, of one of the allowed types, and return its flat view.

    Raises
    ------
    TypeError, ValueError
        If it is not a tensor, or has the wrong dtype, shape or device.
    """
    name = output_name(output)
    require_tensor(name, out)
    refuse_differentiated(name, out)
    if output.reduction is not None and REDUCTIONS[output.reduction].result == i32.name:
        if out.dtype != torch.int32:
            raise TypeError(f"{name} is {out.dtype}: indices are {torch.int32}")
    else:
        element_type(name, out, allowed)
    if output.kind is Kind.BLOCKS_D:
        check_scales(name, out)
    if dtype is not None and out.dtype != dtype:
        raise TypeError(f"{name} is {out.dtype}, and out_dtype asks for {dtype}")
    if out.is_neg():
        raise ValueError(f"{name} is a lazy negation: pass a tensor from torch.empty, for example")
    wanted, flat = arguments.output_shape(output), arguments.flat_shape(output)
    if tuple(out.shape) not in (wanted, flat):
        raise ValueError(f"{name} has shape {tuple(out.shape)}: it must have shape {wanted}")
    require_same_device(name, out, arguments.a)
    if arguments.form != DENSE and not batches.is_nested(out):
        raise ValueError(f"{name} has strides {out.stride()}, by which elements share memory: pass one of torch.empty")
    if arguments.form == GROUPED and not has_lines_along(out, 1):
        raise ValueError(f"{name} has strides {out.stride()}, and groups are rows in memory: pass a row-major tensor")
    return fold(name, out, flat)


def check_scales(name: str, out: Tensor) -> None:
    """Refuse a tensor that cannot hold the scales of blocks.

    Raises
    ------
    TypeError, ValueError
        If it is not FP32, or scales would share memory.
    """
    if out.dtype != torch.float32:
        raise TypeError(f"{name} is {out.dtype}: scales of blocks are torch.float32")
    strides = sorted((stride, extent) for stride, extent in zip(out.stride(), out.shape, strict=True) if extent > 1)
    reached = 0  # by the dimensions with smaller strides
    for stride, extent in strides:
        if stride <= reached:
            raise ValueError(
                f"{name} has shape {tuple(out.shape)} and strides {out.stride()}, with which scales share memory: pass "
                "a tensor from torch.empty, for example"
            )
        reached += stride * (extent - 1)


def check_quantized(n: int, dtype: torch.dtype, d: Tensor | None) -> None:
    """Refuse a D that an epilogue cannot quantise.

    Parameters
    ----------
    n : int
        Its columns.
    dtype : torch.dtype
        Its type of FP8.
    d : Tensor, optional
        The caller's tensor for it, in two dimensions.

    Raises
    ------
    TypeError, ValueError
        If it is of another type, not row-major, or its lines are not whole pieces of 16 bytes. The message says what
        to do.
    """
    if d is not None and d.dtype != dtype:
        raise TypeError(f"out is {d.dtype}, and the epilogue quantises D to {dtype}")
    step = arch.TMA_ALIGNMENT_BYTES
    if n % step:
        raise ValueError(
            f"b has {n} columns, and the epilogue quantises D, whose lines are then multiples of {step} elements: pad "
            f"b by columns of zeros to {-(-n // step) * step}"
        )
    lines = None if d is None else as_major(d, 1, _DTYPES[d.dtype])
    if d is not None and (lines is None or not lines.operand.aligned):
        raise ValueError(
            f"out has strides {d.stride()}, and the epilogue quantises D: pass a row-major tensor whose lines begin at "
            f"multiples of {step} bytes"
        )


def check_overlap(graph: Graph, arguments: Arguments, outputs: Sequence[Tensor]) -> None:
    """Refuse outputs that share memory with an operand or with each other.

    An (M, N) input of the same layout may be overwritten in place.

    Raises
    ------
    ValueError
        If two tensors overlap; the message names them.
    """
    names = list(map(output_name, graph.outputs))
    tiles = {i.name for i in graph.inputs if i.kind is Kind.TILE}
    inputs = {"a": arguments.a, "b": arguments.b}
    inputs |= {k: v for k, v in arguments.inputs.items() if isinstance(v, Tensor)}
    for position, (name, out) in enumerate(zip(names, outputs, strict=True)):
        others = inputs | dict(zip(names[:position], outputs, strict=False))
        for other_name, other in others.items():
            in_place = other_name in tiles and _same_layout(out, other)
            if not in_place and overlap(out, other):
                raise ValueError(
                    f"{name} shares memory with {other_name}: pass a separate tensor"
                    + (" (in place needs the same strides and dtype)" if other_name in tiles else "")
                )


def _same_layout(x: Tensor, y: Tensor) -> bool:
    return (x.data_ptr(), x.shape, x.stride(), x.dtype) == (y.data_ptr(), y.shape, y.stride(), y.dtype)


def overlap(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors share memory."""
    if x.numel() == 0 or y.numel() == 0:
        return False
    (x_begin, x_end), (y_begin, y_end) = _bytes(x), _bytes(y)
    if x_end <= y_begin or y_end <= x_begin:
        return False
    return batches.meet(x, y)


def _bytes(tensor: Tensor) -> tuple[int, int]:
    last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    return begin, begin + (last + 1) * tensor.element_size()


def require_tensor(name: str, value: Any) -> None:
    """Require a dense tensor without a tangent.

    Raises
    ------
    TypeError, ValueError
        If it is not one. The message says what to do.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, not {type(value).__name__}")
    if value.is_nested:
        raise TypeError(f"{name} is a nested tensor: pass {name}.values() or {name}.to_padded_tensor(0)")
    if value.layout != torch.strided:
        raise TypeError(f"{name} has layout {value.layout}: call {name}.to_dense() first")
    if _has_tangent(value):
        raise ValueError(
            f"{name} has a tangent, and cutlass_ops has no forward-mode differentiation: pass "
            f"torch.autograd.forward_ad.unpack_dual({name}).primal"
        )


def refuse_differentiated(name: str, value: Any) -> None:
    """Refuse a tensor whose use autograd should record, where nothing does.

    Raises
    ------
    ValueError
        If it is one. The message says what to do.
    """
    if traced.is_differentiated(value):
        raise ValueError(
            f"{name} requires grad, and this has no backward: call under torch.no_grad(), or pass {name}.detach()"
        )


def _has_tangent(tensor: Tensor) -> bool:
    # No tensor has a tangent outside of a level.
    if forward_ad._current_level < 0:
        return False
    return forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]


def require_memory(name: str, tensor: Tensor) -> None:
    """Require a tensor with memory that a kernel can read.

    Raises
    ------
    TypeError, ValueError
        If it wraps other tensors, or its storage was freed.
    """
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise TypeError(
            f"{name} is a {type(tensor).__name__}, which has no memory of its own: pass the tensor that it wraps"
        )
    if tensor.device.type != "meta" and tensor.numel() > 0 and tensor.data_ptr() == 0:
        raise ValueError(f"{name} has no memory, since its storage was freed or resized to 0: pass another tensor")


def require_same_device(name: str, tensor: Tensor, a: Tensor, name_of_a: str = "a") -> None:
    """Require that a tensor is where another one is.

    Raises
    ------
    ValueError
        If it is not.
    """
    if tensor.device != a.device:
        raise ValueError(f"{name} is on {tensor.device} and {name_of_a} is on {a.device}: move them to one device")
