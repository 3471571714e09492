"""Groups of rows: which epilogues have a meaning for them, where they end, and what a kernel is chosen for."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from cutlass_ops.base import arch
from cutlass_ops.declare.form import GROUPED, why_one_gemm
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.signature import OpSignature
from cutlass_ops.declare.spec import Operand
from cutlass_ops.epilogue.graph import Graph
from cutlass_ops.epilogue.nodes import Kind


def require(graph: Graph) -> None:
    """Refuse an epilogue that no kernel computes for groups.

    Raises
    ------
    ValueError
        If it is one. The message says what to do.
    """
    why = why_one_gemm(graph, GROUPED)
    if why:
        raise ValueError(f"{why}: call gemm for each expert, or leave that out of the epilogue")
    taken = sorted(set(GROUPED.operands) & {i.name for i in graph.inputs})
    if taken:
        raise ValueError(f"the epilogue has an input {taken[0]}, and so has grouped_gemm: rename the input")


def ends(offsets: Tensor, rows: int) -> Iterator[slice]:
    """Yield the rows of each group, from offsets that the host may read.

    Raises
    ------
    ValueError
        If they fall, or are beyond the last row.
    """
    first = 0
    for at, end in enumerate(offsets.tolist()):
        if not first <= end <= rows:
            raise ValueError(
                f"offsets[{at}] is {end}, after {first}, and x has {rows} rows: offsets are where groups end, so they "
                "must not fall, nor be above the number of rows"
            )
        yield slice(first, end)
        first = end


def typical(rows: int, n: int, k: int, groups: int) -> Problem:
    """Return the problem for which a kernel is chosen, since the host does not know the groups.

    All groups are taken to have as many rows: the mean and one standard deviation, as if each row took one of the
    groups at random. A tile of exactly the mean would leave every second group a second one.
    """
    mean = rows / groups
    return Problem(max(1, min(rows, math.ceil(mean + math.sqrt(mean)))), n, k, groups)


def read_by_registers(signature: OpSignature) -> OpSignature:
    """Return the types of kernels that serve a call of groups.

    TMA stops at the end of a group for D and one input (M, N). Where there are more such tensors, or one is not
    aligned, all of them go through registers, which a lower alignment says.
    """
    graph = signature.epilogue
    read = [i.kind is Kind.TILE for i in graph.inputs]
    written = [o.kind is Kind.TILE for o in graph.outputs[1:]]
    tiles = [signature.d]
    tiles += [t for t, is_tile in zip(signature.inputs, read, strict=True) if is_tile]
    tiles += [t for t, is_tile in zip(signature.outputs, written, strict=True) if is_tile]
    if all(t.aligned for t in tiles) and sum(read) <= 1 and not any(written):
        return signature
    lowest = min(min(t.alignment, arch.TMA_ALIGNMENT_BYTES // t.dtype.bytes // 2) for t in tiles)

    def lower(operand: Operand, is_tile: bool) -> Operand:
        return replace(operand, alignment=lowest) if is_tile else operand

    return replace(
        signature,
        d=lower(signature.d, True),
        inputs=tuple(map(lower, signature.inputs, read)),
        outputs=tuple(map(lower, signature.outputs, written)),
    )
