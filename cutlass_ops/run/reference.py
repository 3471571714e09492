"""Epilogues and fused GEMMs in plain PyTorch: the CPU implementation, and the oracle of the tests.

In FP32 it matches the kernels, up to the order of sums and the last bit of the functions. In FP64 it is the oracle.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from cutlass_ops.base.dtypes import dtype
from cutlass_ops.epilogue.graph import Graph
from cutlass_ops.epilogue.nodes import Input, Kind, Node, Output
from cutlass_ops.epilogue.operations import GATHERED, to_fp32

# The terms to average over a row, for each entry of cutlass_ops.epilogue.operations.GATHERED.
_TERMS: dict[str, Callable[[Tensor], Tensor]] = {"mean_of_a": lambda a: a, "mean_square_of_a": torch.square}


def _swap_pairs(x: Tensor) -> Tensor:
    # A value that is the same in all columns is its own neighbour.
    if x.ndim == 0 or x.shape[-1] == 1:
        return x
    return x.reshape(-1, 2).flip(1).reshape(x.shape)


# One entry for each operation of cutlass_ops.epilogue.operations.OPS; ``cast`` takes its dtype from the node.
_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "neg": torch.neg,
    "minimum": torch.minimum,
    "maximum": torch.maximum,
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


def evaluate(
    graph: Graph,
    acc: Tensor,
    inputs: Mapping[str, Tensor | float],
    compute_dtype: torch.dtype = torch.float32,
    *,
    a: Tensor | None = None,
) -> dict[str, Tensor]:
    """Evaluate an epilogue in PyTorch.

    Parameters
    ----------
    graph : Graph
        The epilogue.
    acc : Tensor
        The accumulator, A @ B, shape (M, N), any float dtype.
    inputs : mapping of str to Tensor or float
        The inputs by name: (N,) for a row, (M,) for a column, (M, N) for a tile, (K, N) for a product, a number or a
        0-d tensor for a scalar, in any float dtype. Python numbers are rounded to FP32, as at a kernel's launch.
    compute_dtype : torch.dtype
        Precision of the arithmetic, ``torch.float32`` as in a kernel or ``torch.float64`` as an oracle.
    a : Tensor, optional
        A, shape (M, K), any float dtype. Required if the epilogue has a product or statistics of A's rows.

    Returns
    -------
    dict of str to Tensor
        The outputs by name, D as ``"d"``, not rounded to their dtypes: (M, N), (M,) for a reduction over each row,
        (N,) for one over each column. A reduction over nothing is 0, or −inf for ``max``.

    Raises
    ------
    ValueError
        If an input is missing, unknown, or has the wrong shape, or A is missing.
    """
    if acc.ndim != 2:
        raise ValueError(f"acc must have two dimensions (M, N), not shape {tuple(acc.shape)}")
    of_a = (*graph.gathered, *graph.products)
    if of_a and (a is None or a.ndim != 2 or a.shape[0] != acc.shape[0]):
        given = "none" if a is None else f"one of shape {tuple(a.shape)}"
        raise ValueError(f"the epilogue takes {', '.join(of_a)} of A: pass a=, of shape (M, K), not {given}")
    _check_inputs(graph, acc, inputs, a)
    if graph.swaps_pairs and acc.shape[1] % 2:
        raise ValueError(f"the epilogue swaps pairs of columns, and acc has {acc.shape[1]}: N must be even")
    kinds = {i.name: i.kind for i in graph.inputs}
    values: list[Tensor] = []
    for node in graph.nodes:
        if node.op == "acc":
            values.append(acc.to(compute_dtype))
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
            values.append(_apply(node, [values[a] for a in node.args]))
    return {o.name: _output(o, values[o.node].expand(acc.shape)) for o in graph.outputs}


def gemm_reference(
    a: Tensor,
    b: Tensor,
    graph: Graph,
    inputs: Mapping[str, Tensor | float],
    *,
    d_dtype: torch.dtype,
    output_dtypes: Mapping[str, torch.dtype] | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    """Compute a GEMM and its epilogue in PyTorch, rounding each output once at the end.

    Parameters
    ----------
    a, b : Tensor
        A (M, K) and B (K, N), any float dtype and strides.
    graph, inputs
        As for :func:`evaluate`.
    d_dtype : torch.dtype
        Element type of D, and of other (M, N) outputs that ``output_dtypes`` does not name.
    output_dtypes : mapping of str to torch.dtype, optional
        Element types of the other outputs; by default reductions are FP32.
    compute_dtype : torch.dtype
        Precision of the product and of the epilogue.

    Returns
    -------
    dict of str to Tensor
        The outputs by name, D as ``"d"``.

    Raises
    ------
    ValueError
        If the shapes do not fit, or an input or output is missing or unknown.
    """
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"a and b must have shapes (M, K) and (K, N), not {tuple(a.shape)} and {tuple(b.shape)}")
    given = dict(output_dtypes or {})
    unknown = set(given) - {o.name for o in graph.outputs[1:]}
    if unknown:
        raise ValueError(f"output_dtypes names {', '.join(sorted(unknown))}, which the epilogue does not have")
    # Autocast would compute the products in 16 bits.
    with torch.autocast(a.device.type, enabled=False):
        values = evaluate(graph, a.to(compute_dtype) @ b.to(compute_dtype), inputs, compute_dtype, a=a)
    default = {o.name: torch.float32 if o.reduce else d_dtype for o in graph.outputs}
    # New row-major tensors, since an output may be a broadcast or an input itself.
    return {
        name: torch.empty(value.shape, dtype=(default | given)[name], device=value.device).copy_(value)
        for name, value in values.items()
    }


def _check_inputs(graph: Graph, acc: Tensor, inputs: Mapping[str, Tensor | float], a: Tensor | None) -> None:
    names = [i.name for i in graph.inputs]
    missing, unknown = [n for n in names if n not in inputs], sorted(set(inputs) - set(names))
    if missing or unknown:
        wrong = [f"lacks {n}" for n in missing] + [f"has no {n}" for n in unknown]
        raise ValueError(f"the epilogue's inputs are ({', '.join(names)}): the call {', '.join(wrong)}")
    for declared in graph.inputs:
        _check_shape(declared, inputs[declared.name], acc, 0 if a is None else a.shape[1])


def _check_shape(declared: Input, value: Tensor | float, acc: Tensor, k: int) -> None:
    m, n = acc.shape
    shapes = {Kind.ROW: (n,), Kind.COL: (m,), Kind.TILE: (m, n), Kind.SCALAR: (), Kind.PRODUCT: (k, n)}
    wanted = shapes[declared.kind]
    shape = tuple(value.shape) if isinstance(value, Tensor) else ()
    if shape != wanted:
        raise ValueError(
            f"input {declared.name} is a {declared.kind.value} and must have shape {wanted} for an (M, N) of "
            f"({m}, {n}), not {shape}"
        )


def _broadcastable(kind: Kind, value: Tensor | float, device: torch.device) -> Tensor:
    if not isinstance(value, Tensor):
        return _number(value, device)
    return value[:, None] if kind is Kind.COL else value


def _number(value: float, device: torch.device) -> Tensor:
    # Fill on the device: a CUDA graph cannot contain a copy from the host.
    return torch.full((), to_fp32(value), dtype=torch.float32, device=device)


def _apply(node: Node, args: list[Tensor]) -> Tensor:
    if node.op == "cast":
        element: torch.dtype = getattr(torch, dtype(str(node.attr)).torch_name)
        return args[0].to(element).to(args[0].dtype)
    return _FUNCTIONS[node.op](*args)


def _output(output: Output, tile: Tensor) -> Tensor:
    if output.reduce is None:
        return tile
    dim = 1 if output.kind is Kind.COL else 0
    if output.reduce == "max":
        # PyTorch has no maximum of nothing.
        return tile.amax(dim) if tile.shape[dim] else tile.new_full((tile.shape[1 - dim],), -torch.inf)
    return (tile if output.reduce == "sum" else tile.square()).sum(dim)
