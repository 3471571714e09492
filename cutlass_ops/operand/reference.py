"""Epilogues and fused GEMMs in plain PyTorch: the CPU implementation, and the oracle of the tests.

In FP32 it matches the kernels, up to the order of sums and the last bit of the functions. In FP64 it is the oracle.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from cutlass_ops.base.dtypes import ALL, FP8, INTEGERS, dtype
from cutlass_ops.base.mma import BLOCK_K
from cutlass_ops.declare.form import why_one_gemm
from cutlass_ops.epilogue.graph import Expression, Graph
from cutlass_ops.epilogue.nodes import D_SCALE, Input, Kind, Node, Output
from cutlass_ops.epilogue.operations import GATHERED, INDICES, REDUCTIONS, UNIFORM, to_fp32
from cutlass_ops.operand.matrices import OPERANDS, BlockScaled, Matrix, operand
from cutlass_ops.operand.results import quantized_dtype
from cutlass_ops.operand.sizes import surely
from cutlass_ops.operand.tensors import element_type

# The terms to average over a row, for each entry of cutlass_ops.epilogue.operations.GATHERED.
_FP8 = frozenset(getattr(torch, t.torch_name) for t in FP8)
_TERMS: dict[str, Callable[[Tensor], Tensor]] = {"mean_of_a": lambda a: a, "mean_square_of_a": torch.square}


def _swap_pairs(x: Tensor) -> Tensor:
    # A value that is the same in all columns is its own neighbour.
    if x.ndim == 0 or x.shape[-1] == 1:
        return x
    return x.reshape(-1, 2).flip(1).reshape(x.shape)


def _softplus(x: Tensor) -> Tensor:
    return torch.where(x > 20, x, torch.log1p(torch.exp(x)))


# One entry for each operation of cutlass_ops.epilogue.operations.OPS, but for three that take more than their
# arguments: ``cast`` takes its dtype from the node, ``to_float`` that of the computation, ``uniform`` D's extents.
_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "neg": torch.neg,
    "minimum": torch.minimum,
    "maximum": torch.maximum,
    "lt": torch.lt,
    "le": torch.le,
    "gt": torch.gt,
    "ge": torch.ge,
    "eq": torch.eq,
    "ne": torch.ne,
    "logical_and": torch.logical_and,
    "logical_or": torch.logical_or,
    "logical_not": torch.logical_not,
    "where": torch.where,
    "isnan": torch.isnan,
    "sign": torch.sign,
    "floor": torch.floor,
    "ceil": torch.ceil,
    "round": torch.round,
    "trunc": torch.trunc,
    "reciprocal": torch.reciprocal,
    "pow": torch.pow,
    "exp2": torch.exp2,
    "expm1": torch.expm1,
    "log": torch.log,
    "log2": torch.log2,
    "log1p": torch.log1p,
    "erf": torch.erf,
    "ndtr": lambda x: 0.5 * torch.erfc(x * -math.sqrt(0.5)),
    "elu": lambda x, alpha: torch.where(x > 0, x, alpha * torch.expm1(x)),
    "mish": lambda x: x * torch.tanh(torch.log1p(torch.exp(x))),
    "softplus": _softplus,
    "abs": torch.abs,
    "square": torch.square,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "exp": torch.exp,
    "sin": torch.sin,
    "cos": torch.cos,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    "leaky_relu": lambda x, slope: torch.where(x > 0, x, x * slope),
    # F.gelu on the CPU gives NaN for infinity; and 1 + erf(x) = erfc(-x) without the cancellation at negative x.
    "gelu": lambda x: 0.5 * x * torch.erfc(x * -math.sqrt(0.5)),
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "hardswish": F.hardswish,
    "swap_pairs": _swap_pairs,
}


_PHILOX_FACTORS = 0xD2511F53, 0xCD9E8D57
_PHILOX_STEPS = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Compute Philox 4x32-10: four random words of 32 bits.

    `counter` has four words and `key` two. Words are INT64 tensors with values from 0 to 2³² − 1; they are broadcast.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # A product is truncated to 64 bits, and its halves are read as unsigned.
        first, second = c0 * _PHILOX_FACTORS[0], c2 * _PHILOX_FACTORS[1]
        c0, c2 = ((second >> 32) & _LOW) ^ c1 ^ k0, ((first >> 32) & _LOW) ^ c3 ^ k1
        c1, c3 = second & _LOW, first & _LOW
        k0, k1 = (k0 + _PHILOX_STEPS[0]) & _LOW, (k1 + _PHILOX_STEPS[1]) & _LOW
    return c0, c1, c2, c3


def uniform(seed: Tensor | int, offset: Tensor | int, m: int, n: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the random numbers of :func:`cutlass_ops.e.uniform`, (M, N) FP32, bit for bit those of a kernel.

    They are multiples of 2⁻²⁴ in [0, 1). `seed` and `offset` are signed 64-bit integers, or tensors of one.
    """

    def halves(number: Tensor | int) -> tuple[Tensor, Tensor]:
        whole = torch.as_tensor(number, dtype=torch.int64, device=device).reshape(())
        return whole & _LOW, (whole >> 32) & _LOW

    rows, columns = torch.arange(m, device=device)[:, None], torch.arange(n, device=device)[None, :]
    # Places that differ in bit 3 of the row, of the column, or of both, share a counter.
    words = philox((columns & ~8, rows & ~8, *halves(offset)), halves(seed))
    left, right = (torch.where(rows & 8 != 0, words[at + 2], words[at]) for at in range(2))
    found = torch.where(columns & 8 != 0, right, left)
    return (found >> 8).to(torch.float32) * 2.0**-24


def evaluate(
    graph: Expression,
    acc: Tensor,
    inputs: Mapping[str, Tensor | float],
    compute_dtype: torch.dtype = torch.float32,
    *,
    a: Tensor | None = None,
) -> dict[str, Tensor]:
    """Evaluate an epilogue, or another expression, in PyTorch.

    `acc` is A @ B, or what :func:`accumulator` returns: (M, N) in any float dtype, with leading dimensions for batches.
    Each input then has all of these, or none. An epilogue that means something else for several GEMMs has no batches
    (``declare.form.why_one_gemm``).

    Inputs are (N,) for a row, (M,) for a column, (M, N) for a tile, (K, N) for a product, a number or 0-d tensor for a
    scalar, and an int or 0-d INT64 tensor for an integer. Python numbers are rounded to FP32, as at a kernel's launch.
    Scales of blocks are in the accumulator already. `compute_dtype` is FP32 as in a kernel, or FP64 as an oracle. `a`,
    (M, K), is required if the epilogue has a product or statistics of A's rows.

    Returns the outputs by name, D as ``"d"``, not rounded to their dtypes: (M, N), (M,) for a reduction over each row,
    (N,) for one over each column; indices are INT32. :data:`cutlass_ops.epilogue.operations.REDUCTIONS` defines a
    reduction over nothing.
    """
    why = why_one_gemm(graph) if acc.ndim > 2 else None
    if why:
        raise ValueError(f"acc has shape {tuple(acc.shape)}, and {why}")
    of_a = (*graph.gathered, *graph.products)
    if of_a and (a is None or a.ndim != 2 or a.shape[0] != acc.shape[0]):
        given = "none" if a is None else f"one of shape {tuple(a.shape)}"
        raise ValueError(f"the epilogue takes {', '.join(of_a)} of A: pass a=, of shape (M, K), not {given}")
    _check_inputs(graph, acc, inputs, a)
    if graph.swaps_pairs and acc.shape[-1] % 2:
        raise ValueError(f"the epilogue swaps pairs of columns, and acc has {acc.shape[-1]}: N must be even")
    kinds = {i.name: i.kind for i in graph.inputs}
    values: list[Tensor] = []
    for node in graph.nodes:
        if node.op == "acc":
            values.append(acc.to(compute_dtype))
        elif node.op == "input" and kinds[str(node.attr)] is Kind.INTEGER:
            values.append(torch.as_tensor(inputs[str(node.attr)], dtype=torch.int64, device=acc.device).reshape(()))
        elif node.op in ("seed", "integer"):
            dtype = torch.int64 if node.op == "seed" else torch.int32
            values.append(torch.full((), int(node.attr or 0), dtype=dtype, device=acc.device))
        elif node.op in INDICES:
            is_row = node.op == "row_index"
            index = torch.arange(acc.shape[-2 if is_row else -1], dtype=torch.int32, device=acc.device)
            values.append(index[:, None] if is_row else index)
        elif node.op == UNIFORM:
            seed, offset = (values[at] for at in node.args)
            values.append(uniform(seed, offset, acc.shape[0], acc.shape[1], acc.device).to(compute_dtype))
        elif node.op == "input":
            name = str(node.attr)
            value = _broadcastable(kinds[name], inputs[name], acc.device).to(compute_dtype)
            values.append(value if a is None or kinds[name] is not Kind.PRODUCT else a.to(compute_dtype) @ value)
        elif node.op == "const" and isinstance(node.attr, float):
            values.append(_number(node.attr, acc.device).to(compute_dtype))
        elif node.op in GATHERED and a is not None:
            # The mean over nothing is 0, as in a kernel.
            sums = _TERMS[node.op](a.to(compute_dtype)).sum(1, keepdim=True)
            values.append(sums / max(a.shape[1], 1))
        else:
            values.append(apply(node, [values[a] for a in node.args], compute_dtype))
    found = {o.name: _output(o, values[o.node].expand(acc.shape)) for o in graph.outputs}
    to = quantized_dtype(graph)
    if to is not None:
        found["d"], found[D_SCALE] = quantized(found["d"], to)
    return found


def accumulator(
    graph: Expression, a: Tensor, b: Tensor, inputs: Mapping[str, Tensor | float], compute_dtype: torch.dtype
) -> Tensor:
    """Return the accumulator of tensors, (M, N): see :func:`product`. `inputs` may hold scales of their blocks."""
    return product(operand("a", a, graph, inputs), operand("b", b, graph, inputs), compute_dtype)


def product(a: Matrix, b: Matrix, dtype: torch.dtype) -> Tensor:
    """Return A @ B, or with scales of blocks the sum of the blocks' scaled products."""
    if a.tensor.dtype == torch.int8:
        return (a.sums(torch.float64) @ b.sums(torch.float64)).to(dtype)  # exact, and rounded once
    x, y = a.sums(dtype), b.sums(dtype)
    rows, columns = a.factors(dtype), b.factors(dtype)
    if rows is None or columns is None:
        return x @ y
    found = x.new_zeros(x.shape[0], y.shape[1])
    for step in range(rows.shape[1]):
        along_k = slice(step * BLOCK_K, (step + 1) * BLOCK_K)
        found += (x[:, along_k] @ y[along_k]) * (rows[:, step, None] * columns[:, step])
    return found


def dequantised(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> tuple[Tensor, Tensor]:
    """Return A and B times the scales of their blocks, in the dtype of the scales."""
    named = (("a", a, scale_a), ("b", b, scale_b))
    x, y = (BlockScaled(n, t, element_type(n, t), {f"scale_{n}": scale}).values() for n, t, scale in named)
    return x, y


def gemm_reference(
    a: Tensor | Matrix,
    b: Tensor | Matrix,
    graph: Graph,
    inputs: Mapping[str, Tensor | float],
    *,
    d_dtype: torch.dtype,
    output_dtypes: Mapping[str, torch.dtype] | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    """Compute a GEMM and its epilogue in PyTorch, rounding each output once at the end.

    A is (M, K) and B (K, N), with leading dimensions for batches; see :func:`evaluate`. D and other (M, N) outputs have
    `d_dtype`, unless `output_dtypes` names them; other outputs are as :func:`result_dtype` says.
    """
    if isinstance(a, Matrix) and isinstance(b, Matrix):
        left, right = a, b
    else:
        left = operand("a", cast(Tensor, a), graph, inputs)
        right = operand("b", cast(Tensor, b), graph, inputs)
    of_a, of_b = left.shape, right.shape
    if min(len(of_a), len(of_b)) < 2 or of_a[:-2] != of_b[:-2] or of_a[-1] != of_b[-2]:
        raise ValueError(f"a and b must have shapes (M, K) and (K, N), not {of_a} and {of_b}")
    given = dict(output_dtypes or {})
    if d_dtype == torch.int32:
        compute_dtype = torch.float64  # which has every sum
    # Autocast would compute the products in 16 bits.
    with torch.autocast(left.tensor.device.type, enabled=False):
        values = evaluate(
            graph, product(left, right, compute_dtype), inputs, compute_dtype, a=left.values(compute_dtype)
        )
    default = {o.name: result_dtype(graph, o) or d_dtype for o in graph.outputs}
    # New row-major tensors, since an output may be a broadcast or an input itself.
    found = {}
    for name, value in values.items():
        element = (default | given)[name]
        found[name] = torch.empty(value.shape, dtype=element, device=value.device).copy_(rounded(value, element))
    return found


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to a dtype as kernels do, to nearest even.

    FP8 saturates: values beyond its largest finite value become that value, infinities included. NaN stays NaN. INT8
    saturates as well, and NaN becomes 0. PyTorch's own conversion differs by type and by version (docs/fp8.md).
    """
    if x.dtype == dtype:
        return x
    if dtype in _FP8:
        most = torch.finfo(dtype).max
        x = x.clamp(-most, most)
    if dtype is torch.int8:
        x = x.round().clamp(-128, 127).nan_to_num(nan=0.0)
    return x.to(dtype)


# The least value that a block's greatest counts as: scale and inverse are then normal FP32 numbers.
_LEAST = 2.0**-110


def quantized(x: Tensor, dtype: torch.dtype, block: int | None = BLOCK_K) -> tuple[Tensor, Tensor]:
    """Scale each block of a row so that its greatest absolute value is the type's largest, as kernels do.

    `block` columns share a scale; None is for a whole row. Returns x times the inverse of its scale, (M, N), not yet
    rounded, and the scales, (M, ceil(N / block)) or (M, 1).
    """
    m, n = x.shape
    steps = 1 if block is None else -(-n // block)
    block = block or max(n, 1)
    whole = F.pad(x.abs(), (0, steps * block - n)).view(m, steps, block)
    most = whole.amax(2).clamp(min=_LEAST)
    # Divisions of tensors, since PyTorch multiplies by the inverse of a number.
    largest = torch.full_like(most, torch.finfo(dtype).max)
    inverse = (largest / most).repeat_interleave(block, 1)[:, :n]
    return x * inverse, most / largest


def _check_inputs(graph: Expression, acc: Tensor, inputs: Mapping[str, Tensor | float], a: Tensor | None) -> None:
    names = [i.name for i in graph.inputs]
    missing, unknown = [n for n in names if n not in inputs], sorted(set(inputs) - set(names))
    if missing or unknown:
        wrong = [f"lacks {n}" for n in missing] + [f"has no {n}" for n in unknown]
        raise ValueError(f"the epilogue's inputs are ({', '.join(names)}): the call {', '.join(wrong)}")
    for declared in graph.inputs:
        _check_shape(declared, inputs[declared.name], acc, 0 if a is None else a.shape[1])


def _check_shape(declared: Input, value: Tensor | float, acc: Tensor, k: int) -> None:
    if declared.kind in OPERANDS:
        return  # of the accumulator
    *batches, m, n = acc.shape
    shapes = {Kind.ROW: (n,), Kind.COL: (m,), Kind.TILE: (m, n), Kind.SCALAR: (), Kind.PRODUCT: (k, n)}
    shapes[Kind.INTEGER] = ()
    wanted = shapes[declared.kind]
    shape = tuple(value.shape) if isinstance(value, Tensor) else ()
    has_all = batches and wanted and shape == (*batches, *wanted)
    if shape != wanted and not has_all:
        raise ValueError(
            f"input {declared.name} is a {declared.kind.value} and must have shape {wanted} for an (M, N) of "
            f"({m}, {n}), not {shape}"
        )


def _broadcastable(kind: Kind, value: Tensor | float, device: torch.device) -> Tensor:
    if not isinstance(value, Tensor):
        return _number(value, device)
    if kind is Kind.ROW and value.ndim > 1:
        return value[..., None, :]
    return value[..., None] if kind is Kind.COL else value


def _number(value: float, device: torch.device) -> Tensor:
    # Fill on the device: a CUDA graph cannot contain a copy from the host.
    return torch.full((), to_fp32(value), dtype=torch.float32, device=device)


def apply(node: Node, args: Sequence[Tensor], compute_dtype: torch.dtype) -> Tensor:
    """Compute one operation of :data:`cutlass_ops.epilogue.operations.OPS`, other than ``uniform``."""
    if node.op == "cast":
        element: torch.dtype = getattr(torch, dtype(str(node.attr)).torch_name)
        return rounded(args[0], element).to(args[0].dtype)
    if node.op == "to_float":
        return args[0].to(compute_dtype)
    return _FUNCTIONS[node.op](*args)


def result_dtype(graph: Expression, output: Output) -> torch.dtype | None:
    """Return the dtype of an output that nothing else decides; None for D's.

    Reductions are FP32, or INT32 if they give indices. A further tile that is a cast to FP8 has that FP8 type.
    """
    name = graph.stored_type(output)
    return getattr(torch, dtype(name, (*ALL, *INTEGERS)).torch_name) if name else None


# One entry for each of cutlass_ops.epilogue.operations.REDUCTIONS.
_REDUCED: dict[str, Callable[[Tensor, int], Tensor]] = {
    "sum": lambda x, dim: x.sum(dim),
    "sum_square": lambda x, dim: x.square().sum(dim),
    "max": lambda x, dim: x.amax(dim),
    "min": lambda x, dim: x.amin(dim),
    "argmax": lambda x, dim: x.argmax(dim).int(),
    "argmin": lambda x, dim: x.argmin(dim).int(),
    "logsumexp": torch.logsumexp,
}


def _output(output: Output, tile: Tensor) -> Tensor:
    if output.reduction is None:
        return tile
    dim = 1 if output.kind is Kind.COL else 0
    if surely(tile.shape[dim] == 0):  # PyTorch refuses the maximum of nothing
        info = REDUCTIONS[output.reduction]
        found = tile.new_full((tile.shape[1 - dim],), info.empty)
        return found.int() if info.result == "i32" else found
    return _REDUCED[output.reduction](tile, dim)
