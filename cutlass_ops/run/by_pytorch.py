"""What PyTorch's own operators compute for a call: products, and each value of its epilogue.

:mod:`.composition` says which of these a call takes.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from cutlass_ops.base.mma import BLOCK_K
from cutlass_ops.declare.form import DENSE, GROUPED, RAGGED_K, Form
from cutlass_ops.epilogue.graph import Graph
from cutlass_ops.epilogue.nodes import Kind, Node
from cutlass_ops.epilogue.operations import UNIFORM, to_fp32
from cutlass_ops.operand import reference
from cutlass_ops.operand.matrices import operand
from cutlass_ops.operand.results import FP8

FP8_DTYPES = frozenset(FP8.values())
_LEAST_ROWS_OF_INT8 = 17  # torch._int_mm takes no fewer

Value: TypeAlias = Any  # a tensor, or a Python number


class Manner(NamedTuple):
    """How the calls of a composition are computed."""

    wide: torch.dtype  # dtype of the epilogue's values
    form: Form
    math: str | None  # how FP32 operands are multiplied, or FP8 products added up
    eps: Node | None  # added to the mean squares of A's rows, if products are of normalised rows
    graph: Graph  # the epilogue


class Operands:
    """The arguments of one call, while it is computed: A, B and the inputs as kernels see them."""

    def __init__(self, manner: Manner, a: Tensor, b: Tensor, inputs: Mapping[str, Any]) -> None:
        self.a, self.b, self.inputs = a, b, inputs
        self.wide, self.form, self.math, self.eps, self.graph = manner
        rows = a.shape[:-1] if self.form is not RAGGED_K else (*inputs["offsets"].shape, a.shape[-2])
        self.shape = (*rows, b.shape[-1])  # D's
        self._left: Tensor | None = None
        self._ends: Tensor | None = None

    @property
    def left(self) -> Tensor:
        """A as it is multiplied: normalised if the epilogue normalises it."""
        if self._left is None:
            self._left = self.a
            if self.eps is not None:
                eps: Any = self.eps.attr if self.eps.op == "const" else self.inputs[str(self.eps.attr)]
                self._left = F.rms_norm(self.a, self.a.shape[-1:], eps=float(eps))
        return self._left

    @property
    def groups(self) -> Tensor:
        """The group of each row, (T,); rows of none have the last one's."""
        if self._ends is None:
            ends, rows = self.inputs["offsets"], torch.arange(self.a.shape[0], device=self.a.device)
            self._ends = torch.searchsorted(ends, rows, right=True).clamp_(max=len(ends) - 1)
        return self._ends


# ---- Products ------------------------------------------------------------------------------------------------------


def product(of: Operands, name: str | None = None, *, left: bool = False) -> Tensor:
    """Return the product of A, as it is or normalised, and of B or a second matrix."""
    a, b = of.left if left else of.a, of.b if name is None else of.inputs[name]
    if of.form in (GROUPED, RAGGED_K):
        return _grouped(of, a, b).to(of.wide)
    if name is None and of.graph.parts:
        return _of_parts(of, a, b)
    if a.dtype in FP8_DTYPES:
        return _of_fp8(of, a, b)
    if a.dtype == torch.int8:
        return _of_int8(a, b).to(of.wide)
    if of.math is not None:
        with _tf32(of.math):
            return torch.matmul(a, b)
    if of.wide == torch.float32 and a.is_cuda and a.ndim <= 3:
        return (torch.mm if a.ndim == 2 else torch.bmm)(a, b, out_dtype=torch.float32)
    if of.wide.itemsize > a.dtype.itemsize:
        a, b = a.to(of.wide), b.to(of.wide)
    return torch.matmul(a, b).to(of.wide)


@contextlib.contextmanager
def _tf32(math: str) -> Iterator[None]:
    """Let cuBLAS multiply FP32 operands as TF32, if that is asked for. With 3xTF32 they stay FP32, which is nearer."""
    before = torch._C._get_cublas_allow_tf32()
    torch._C._set_cublas_allow_tf32(math == "tf32")
    try:
        yield
    finally:
        torch._C._set_cublas_allow_tf32(before)


def biased(name: str, activation: str | None, of: Operands) -> Tensor:
    """Return A @ B + bias, and its activation, by one call of cuBLASLt."""
    bias = of.inputs[name]
    bias = bias if bias.dtype == of.wide else bias.to(of.wide)
    if of.a.dtype != of.wide:  # FP8, or D of another type
        return _activated(activation, product(of, left=True) + bias)
    if activation is None or not of.a.is_cuda or torch.is_grad_enabled():  # the other has no derivative
        return _activated(activation, torch.addmm(bias, of.left, of.b))
    return torch._addmm_activation(bias, of.left, of.b, use_gelu=activation == "gelu_tanh")


def _activated(activation: str | None, x: Tensor) -> Tensor:
    return x if activation is None else _UNARY[activation](x)


def _of_int8(a: Tensor, b: Tensor) -> Tensor:
    """Return the exact sums of INT8 products."""
    rows, (k, n) = a.shape[-2], b.shape[-2:]
    if not a.is_cuda or a.ndim > 2 or k % 8 or n % 8:
        return torch.matmul(a.double(), b.double())
    padded = F.pad(a, (0, 0, 0, _LEAST_ROWS_OF_INT8 - rows)) if rows < _LEAST_ROWS_OF_INT8 else a
    return torch._int_mm(padded, b)[:rows]


def _of_parts(of: Operands, a: Tensor, b: Tensor) -> Tensor:
    """Return the product of operands with further tensors, such as scales of blocks."""
    scales = [of.inputs[name] for name in of.graph.block_scales]
    if scales and _takes_blocks(a, b, scales[1]):
        scale_a, scale_b = scales[0].t().contiguous().t(), scales[1].t()
        return torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=torch.bfloat16).to(of.wide)
    dtype = torch.bfloat16 if a.dtype in FP8_DTYPES else a.dtype
    x, w = operand("a", a, of.graph, of.inputs), operand("b", b, of.graph, of.inputs)
    return torch.matmul(x.values().to(dtype), w.values().to(dtype)).to(of.wide)


def _of_fp8(of: Operands, a: Tensor, b: Tensor) -> Tensor:
    """Return the product of FP8 operands."""
    if not _takes_scales(a, b):
        return torch.matmul(a.to(torch.bfloat16), b.to(torch.bfloat16)).to(of.wide)
    one = torch.ones((), device=a.device)
    return torch._scaled_mm(a, b, one, one, out_dtype=of.wide, use_fast_accum=of.math == "fast")


def _takes_scales(a: Tensor, b: Tensor) -> bool:
    """Whether ``torch._scaled_mm`` multiplies two matrices in FP8."""
    k, n = b.shape[-2:]
    in_order = a.stride(-1) == 1 and b.stride(-2) == 1
    one_kind = a.dtype == b.dtype == torch.float8_e5m2
    return a.is_cuda and a.ndim == 2 and in_order and not one_kind and k % 16 == 0 and n % 16 == 0


def _takes_blocks(a: Tensor, b: Tensor, scale_b: Tensor) -> bool:
    whole = all(extent % BLOCK_K == 0 for extent in b.shape)
    of_squares = scale_b.shape[0] == b.shape[1] // BLOCK_K
    in_lines = b.shape[0] // BLOCK_K % 4 == 0 and scale_b.is_contiguous()  # of multiples of 16 bytes
    return (
        _takes_scales(a, b)
        and whole
        and in_lines
        and of_squares
        and torch.cuda.get_device_capability(a.device) == (9, 0)
    )


def scaled(of_a: str, of_b: str, kinds: tuple[Kind, Kind], of: Operands) -> Tensor:
    """Return A @ B times a factor of each row or of all, and one of each column or of all."""
    a, b = of.a, of.b
    first, second = (_scale(of.inputs[name], a) for name in (of_a, of_b))
    rows = kinds[0] is Kind.COL or kinds[1] is Kind.ROW
    if of.form == DENSE and a.dtype in FP8_DTYPES and _takes_scales(a, b):
        if not rows:
            return torch._scaled_mm(
                a, b, first.reshape(()), second.reshape(()), out_dtype=of.wide, use_fast_accum=of.math == "fast"
            )
        if of.wide == torch.bfloat16:
            scale_a, scale_b = first.reshape(-1, 1), second.reshape(1, -1)
            if kinds[0] is not Kind.COL:
                scale_a = scale_a.expand(a.shape[0], 1)
            if kinds[1] is not Kind.ROW:
                scale_b = scale_b.expand(1, b.shape[1])
            scales = scale_a.contiguous(), scale_b.contiguous()
            return torch._scaled_mm(a, b, *scales, out_dtype=of.wide, use_fast_accum=of.math == "fast")
    acc = product(of)
    by_row = first[..., None] if kinds[0] is Kind.COL else first
    by_column = input_value(of_b, kinds[1], of) if kinds[1] is Kind.ROW else second
    return acc * by_row.to(acc.dtype) * by_column.to(acc.dtype)


def _scale(value: Any, a: Tensor) -> Tensor:
    if isinstance(value, Tensor):
        return value.float()
    return torch.full((), to_fp32(value), dtype=torch.float32, device=a.device)


def _grouped(of: Operands, a: Tensor, b: Tensor) -> Tensor:
    """Return the products of groups of rows, or of K, that follow each other."""
    ends = of.inputs["offsets"]
    if a.dtype in FP8_DTYPES:
        a, b = a.to(torch.bfloat16), b.to(torch.bfloat16)
    if a.is_cuda and a.dtype == torch.bfloat16:
        return torch._grouped_mm(in_whole_lines(a), in_whole_lines(b), offs=ends)
    last, found = 0, []
    for expert, end in enumerate(ends.tolist()):
        rows = slice(last, max(last, min(end, a.shape[0] if of.form == GROUPED else b.shape[0])))
        pair = (a[rows], b[expert]) if of.form == GROUPED else (a[:, rows], b[rows])
        found.append(torch.matmul(*(x.to(of.wide) for x in pair)))
        last = rows.stop
    if of.form == GROUPED:
        found.append(a.new_zeros((a.shape[0] - last, b.shape[-1]), dtype=of.wide))
        return torch.cat(found)
    return torch.stack(found)


def in_whole_lines(x: Tensor) -> Tensor:
    """Return a tensor, or a copy, whose lines begin at multiples of 16 bytes: PyTorch's groups need that."""
    lines, step = (x if x.stride(-1) == 1 else x.mT), 16 // x.element_size()
    if lines.stride(-1) == 1 and all(at % step == 0 for at in (*lines.stride()[:-1], x.storage_offset())):
        return x
    extent = lines.shape[-1]
    whole = F.pad(lines, (0, -extent % step)).contiguous()[..., :extent]
    return whole if lines is x else whole.mT


# ---- Values --------------------------------------------------------------------------------------------------------


def input_value(name: str, kind: Kind, of: Operands) -> Value:
    """Return an input as the epilogue computes with it: broadcastable over D, in the dtype of its values."""
    value = of.inputs[name]
    if not isinstance(value, Tensor):
        return to_fp32(value) if kind is Kind.SCALAR else value
    if kind in (Kind.SCALAR, Kind.INTEGER):
        return value.reshape(())
    if kind is Kind.ROW and value.ndim > 1:
        value = value[of.groups] if of.form == GROUPED else value[..., None, :]
    elif kind is Kind.COL:
        value = value[..., None]
    return value.to(of.wide)


def constant(value: Value, of: Operands) -> Value:
    """Return a number of the epilogue."""
    return value


def index(is_row: bool, of: Operands) -> Tensor:
    """Return the row or the column of each element of D, counted from 0; in groups, from the group's first row."""
    count = torch.arange(of.shape[-2 if is_row else -1], dtype=torch.int32, device=of.a.device)
    if not is_row:
        return count
    if of.form == GROUPED:
        starts = F.pad(of.inputs["offsets"], (1, 0))[:-1]
        count = count - starts[of.groups]
    return count[:, None]


def mean(of_squares: bool, of: Operands) -> Tensor:
    """Return the mean of each row of A, or of its squares."""
    # The mean over nothing is 0, as in a kernel.
    a = of.a.to(of.wide)
    return (a.square() if of_squares else a).sum(-1, keepdim=True) / max(a.shape[-1], 1)


def as_tensor(value: Value, of: Operands) -> Tensor:
    """Return a value as a tensor. It is filled on the device: a CUDA graph cannot contain a copy from the host."""
    if isinstance(value, Tensor):
        return value
    dtype = of.wide if isinstance(value, float) else torch.int64
    return torch.full((), value, dtype=dtype, device=of.a.device)


def call(function: Callable[..., Tensor], of: Operands, *arguments: Value) -> Tensor:
    """Return a function of values, each of D's shape."""
    first, *others = (as_tensor(x, of).expand(of.shape) for x in arguments)
    return function(first, *others)


# These take numbers directly, if one argument is a tensor.
_OF_NUMBERS: Mapping[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "pow": operator.pow,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "eq": operator.eq,
    "ne": operator.ne,
}

# One operator each; the reference computes them in several.
_UNARY: Mapping[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "mish": F.mish,
    "softplus": F.softplus,
    "ndtr": torch.special.ndtr,
}


def apply(node: Node, of: Operands, *arguments: Value) -> Value:
    """Return the result of an operation of the epilogue."""
    op = node.op
    if op in _OF_NUMBERS and any(isinstance(x, Tensor) for x in arguments):
        return _OF_NUMBERS[op](*arguments)
    if op in ("leaky_relu", "elu") and isinstance(arguments[0], Tensor) and isinstance(arguments[1], float):
        return getattr(F, op)(*arguments)
    tensors = [as_tensor(x, of) for x in arguments]
    if op == "cast":
        return tensors[0] if str(node.attr) == _NAMES.get(of.wide) else reference.apply(node, tensors, of.wide)
    if op == UNIFORM:
        seed, offset = tensors
        return reference.uniform(seed, offset, of.shape[-2], of.shape[-1], of.a.device).to(of.wide)
    if op in _UNARY:
        return _UNARY[op](*tensors)
    return reference.apply(node, tensors, of.wide)


_NAMES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}

# Each takes values, the dimension, and the dtype of sums.
REDUCED: Mapping[str, Callable[[Tensor, int, torch.dtype], Any]] = {
    "sum": lambda x, dim, wide: x.sum(dim, dtype=wide),
    "sum_square": lambda x, dim, wide: torch.linalg.vector_norm(x, dim=dim, dtype=wide).square(),
    "max": lambda x, dim, wide: x.amax(dim),
    "min": lambda x, dim, wide: x.amin(dim),
    "argmax": lambda x, dim, wide: x.argmax(dim).int(),
    "argmin": lambda x, dim, wide: x.argmin(dim).int(),
    "logsumexp": lambda x, dim, wide: torch.logsumexp(x.to(wide), dim),
}
