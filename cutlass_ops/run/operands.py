"""Checks of a call's A and B against each other, and the arguments that follow: in the dimensions that kernels know.

This runs once for each new combination of shapes. A warm call goes straight to its kernel, which checks its arguments
itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from torch import Tensor

from cutlass_ops.base import arch, mma
from cutlass_ops.base.dtypes import FP8, DType, f32, f64
from cutlass_ops.declare.form import BATCHED, DENSE, RAGGED_K, Form
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.spec import Major
from cutlass_ops.epilogue import doubles
from cutlass_ops.epilogue.graph import Graph
from cutlass_ops.epilogue.nodes import Kind, Output
from cutlass_ops.run import batches
from cutlass_ops.run.inputs import VECTORS, check_inputs, own_shapes
from cutlass_ops.run.matrices import MAJORS, aligning, as_major
from cutlass_ops.run.sizes import agree, repeats, same, surely
from cutlass_ops.run.tensors import as_stored, element_type, fold, require_same_device, require_tensor


class Arguments(NamedTuple):
    """One call's checked arguments, in two dimensions; batched ones with one or two leading dimensions of batches.

    Grouped ones have A in two dimensions, B in three, and where groups end as the first of the inputs. Those of groups
    of K have A and B in two dimensions, and others as batched ones have them. Masked ones are as batched ones, with how
    many rows each group has as the first of the inputs; columns and tiles have all groups.

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
    math : str or None
        What the Tensor Cores make of FP32, or how sums of FP8 products are added up.
    expected : int
        Of masked ones: the rows that a group is expected to have, for which a kernel is chosen. 0 if nobody says.
    """

    problem: Problem
    leading: tuple[int, ...]
    a: Tensor
    b: Tensor
    inputs: Mapping[str, Tensor | float]
    spread: tuple[str, ...] = ()
    copied: tuple[str, ...] = ()
    form: Form = DENSE
    math: mma.Math | None = None
    expected: int = 0

    @property
    def types(self) -> tuple[DType, DType]:
        """What the Tensor Cores multiply: the types of A and B."""
        return multiplied("a", self.a, self.math), multiplied("b", self.b, self.math)

    def output_shape(self, output: Output) -> tuple[int, ...]:
        """Return an output's shape for the caller."""
        return shape_of(output.kind, self.leading, self.problem.n, self._batches)

    def flat_shape(self, output: Output) -> tuple[int, ...]:
        """Return an output's shape for the kernel."""
        each = (self.problem.count,) if self.form == RAGGED_K else tuple(self.a.shape[:-2])
        return shape_of(output.kind, (*each, self.problem.m), self.problem.n, each)

    @property
    def is_folded(self) -> bool:
        """Whether there are more dimensions of batches than a kernel knows, and some were folded into one."""
        return self.form == BATCHED and len(self._batches) > self.a.ndim - 2

    @property
    def _batches(self) -> tuple[int, ...]:
        return self.leading[:-1] if self.form.stacked else ()


def shape_of(kind: Kind, leading: tuple[int, ...], n: int, each: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Return the shape of an output of a kind, for D's dimensions before N, and those of them that are batches."""
    return {
        Kind.ROW: (*each, n),
        Kind.COL: leading,
        Kind.TILE: (*leading, n),
        Kind.BLOCKS_D: (*leading, mma.blocks(n)),
    }[kind]


def scaling(graph: Graph, arguments: Arguments) -> tuple[mma.Block, mma.Block]:
    """Return the blocks of A and of B that share a scale, from the shapes of checked scales.

    For one column of B, both ways to have scales are the same.
    """
    _, scale_b = (arguments.inputs[name] for name in graph.block_scales)
    n = arguments.problem.n
    assert isinstance(scale_b, Tensor)
    return (1, mma.BLOCK_K), (mma.BLOCK_K, mma.BLOCK_K if scale_b.shape[-2] == mma.blocks(n) else 1)


def check_lines(arguments: Arguments, products: Mapping[str, Tensor], *, one: bool) -> Sequence[Major]:
    """Return the majors that B may have; refuse A and B if their types are read along K only and they are not so.

    That is not refused where kernels copy such operands: if a launch is `one` GEMM, of types other than FP8. Of types
    that ``wgmma`` reads along K only, lines along K come first, in case that B has both majors.

    Raises
    ------
    ValueError
        If a matrix is not contiguous along K, or not aligned to 16 bytes. The message says what to pass.
    """
    a, b = arguments.a, arguments.b
    found = mma.mma_of(*arguments.types)
    if found is None or not found.wgmma_k_major_only:
        return MAJORS
    if not found.along_k_only or (found.copyable and one):
        return MAJORS[::-1]
    for name, tensor, along_k in (("a", a, 1), ("b", b, 0), *((n, t, 0) for n, t in products.items())):
        element = element_type(name, tensor)
        lines, by_prepare = as_major(tensor, along_k, element), ""
        if name != "a" and element in FP8 and arguments.form == DENSE:
            by_prepare = f", or pass prepare({name}).matrix, a copy made once"
        if lines is None:
            once = "pass weight.t() of a contiguous weight (N, K)"
            if arguments.form == BATCHED:
                once = "pass weights.mT of contiguous weights (..., N, K)"
            instead = "pass a row-major matrix" if name == "a" else once + by_prepare
            raise ValueError(
                f"{name} is {tensor.dtype} and has strides {tensor.stride()}, and Tensor Cores read this type along K "
                f"only: {instead}"
            )
        if not lines.operand.aligned and 0 not in arguments.problem.extents:
            raise ValueError(
                f"{name} is {tensor.dtype}, and its lines of K={arguments.problem.k} elements, with strides "
                f"{tensor.stride()} and storage offset {tensor.storage_offset()}, do not begin at multiples of "
                f"{arch.TMA_ALIGNMENT_BYTES} bytes: {aligning(name, tensor, along_k, 'pad K of a and b')}{by_prepare}"
            )
    return ("col",)


def multiplied(name: str, tensor: Tensor, math: mma.Math | None) -> DType:
    """Return the type in which the Tensor Cores multiply an operand.

    Raises
    ------
    TypeError
        If they multiply no such operand, or FP32 and `math` does not say how, or another type and `math` says so.
    """
    found = element_type(name, tensor, _MULTIPLIED)
    if found is not f32:
        if math in mma.MATHS:
            raise TypeError(f"{name} is {tensor.dtype}, and math={math!r} is for torch.float32 operands: omit math")
        if math is not None and found not in FP8:
            raise TypeError(f"{name} is {tensor.dtype}, and math={math!r} is for FP8 operands: omit math")
        return found
    if math is None or math in mma.ACCUMULATIONS:
        raise TypeError(
            f"{name} is {tensor.dtype}, which Tensor Cores cannot multiply directly: convert a and b to torch.bfloat16 "
            "or torch.float16; or use torch.matmul. Ops such as cutlass_ops.gemm also take math='tf32', which rounds a "
            "and b to 10 bits of fraction, or math='3xtf32', which has nearly FP32's accuracy, at a third of the speed "
            "of 'tf32' or less"
        )
    return mma.MATHS[math]


# Of tensors. FP32 has a type for each way to multiply it.
_MULTIPLIED = (*(t for t in mma.OPERANDS if mma.math_of(t) is None), f32)


def require_sums(graph: Graph, math: mma.Math | None) -> None:
    """Check that products can be added up in a way.

    Raises
    ------
    TypeError
        If blocks have scales, which only one way applies.
    """
    if graph.block_scales and math == "fast":
        raise TypeError(
            f"math is 'fast', and {' and '.join(graph.block_scales)} are scales of blocks, which need promoted "
            "sums: omit math"
        )


def check_arguments(graph: Graph, a: Any, b: Any, inputs: Mapping[str, Any], math: mma.Math | None = None) -> Arguments:
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
    found = mma.mma_of(multiplied("a", a, math), multiplied("b", b, math))
    if found is None:
        raise TypeError(f"b is {b.dtype} and a is {a.dtype}: A and B must have the same dtype, or both FP8")
    why = doubles.why_not(graph) if found.compute is f64 else None
    if why is not None:
        raise TypeError(f"a is {a.dtype}, so the epilogue computes in FP64, and {why}")
    if graph.gathered and found.bits != 16:
        raise TypeError(
            f"a is {a.dtype}, and the epilogue takes {', '.join(graph.gathered)} of its rows, as of 16 bits only: "
            "compute it before, and pass it as a Col, or as rstd= where a function takes that"
        )
    require_sums(graph, math)
    require_scalings(graph, found, a, b)
    if b.ndim > 2:
        return _check_batched(graph, a, b, inputs)._replace(math=math)
    if a.ndim < 1 or b.ndim != 2 or not agree(a.shape[-1:], b.shape[:1]):
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
    m = prod(batch)
    flat_a = fold("a", a, (m, k))
    checked = check_inputs(graph, inputs, a, b, batch)
    pairs = [(i.name, checked[i.name], inputs[i.name]) for i in graph.inputs if i.kind in VECTORS]
    spread = tuple(name for name, x, given in pairs if isinstance(x, Tensor) and not same(x.shape, given.shape))
    copied = tuple(
        name
        for name, x, given in pairs
        if isinstance(x, Tensor) and (repeats(given) or surely(x.numel() > given.numel()))
    )
    return Arguments(Problem(m, n, k), batch, flat_a, b, checked, spread, copied, math=math)


def require_scalings(graph: Graph, found: mma.MmaSpec, a: Tensor, b: Tensor, names: str = "ab") -> None:
    """Refuse scales of blocks of operands that no main loop scales.

    Raises
    ------
    TypeError
        If they are such. The message calls the operands by `names`, a letter each.
    """
    if graph.block_scales and not found.scalings:
        raise TypeError(
            f"{names[0]} is {a.dtype} and {names[1]} is {b.dtype}, and {' and '.join(graph.block_scales)} are scales "
            "of blocks, which only FP8 operands can have: use a scale for each row and each column, or one number"
        )


def _check_batched(graph: Graph, a: Tensor, b: Tensor, inputs: Mapping[str, Any]) -> Arguments:
    """Check the operands of a GEMM for each batch, whose dimensions broadcast as those of torch.matmul do."""
    if a.ndim < 2 or not agree(a.shape[-1:], b.shape[-2:-1]):
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
    own = own_shapes(m, n, k)
    tensors = {i.name: x for i in graph.inputs if i.kind in own and isinstance(x := checked[i.name], Tensor)}
    dimensions = {i.name: len(own[i.kind]) for i in graph.inputs if i.name in tensors}
    folded = batches.folded({"a": a, "b": b, **tensors}, {"a": 2, "b": 2, **dimensions}, shape)
    given = [(i, inputs[i.name]) for i in graph.inputs if i.kind in VECTORS]
    copied = tuple(i.name for i, x in given if batches.is_copied(i.kind, x, shape, own[i.kind]))
    spread = tuple(i.name for i, x in given if folded[i.name].shape != x.shape)
    flat_a, flat_b = folded.pop("a"), folded.pop("b")
    problem = Problem(m, n, k, prod(shape))
    return Arguments(problem, (*shape, m), flat_a, flat_b, {**checked, **folded}, spread, copied, BATCHED)
