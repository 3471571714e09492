"""The backward of a product with a 2:4 sparse weight: that of the dense weight that it stands for.

The gradient of the stored elements has their form. An optimiser that changes these keeps their places: it trains with a
fixed mask. Transposed, the weight is not 2:4 sparse along its other extent, so the gradient of A is a dense product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from cutlass_ops.epilogue.graph import Graph
from cutlass_ops.epilogue.nodes import Input, Kind, Node, Output
from cutlass_ops.operand import sparsity
from cutlass_ops.run.backward import Forward
from cutlass_ops.run.portable import Portable
from cutlass_ops.run.recorded import Asked, OpRecorder


class SparseRecorder(OpRecorder):
    """How calls with a sparse weight are recorded: see :class:`OpRecorder`. Metadata are the first of `names`."""

    __slots__ = ("dense",)

    def __init__(
        self,
        called: Portable,
        names: tuple[str, ...],
        places: tuple[int, ...],
        wrt: frozenset[str],
        out_dtype: torch.dtype | None,
        of: torch.dtype,
        *,
        store: bool,
    ) -> None:
        graph = called.graph
        assert names[0] == graph.inputs[0].name
        dense = called.of(replace(graph, inputs=graph.inputs[1:]))
        forward = Forward.of(dense, wrt, of, store=store)
        takes_places = Graph((Input(names[0], Kind.META_B),), (Node("acc"),), (Output("d", 0),))
        runs = called if forward.runs is dense else called.of(takes_places.then(forward.runs.graph))
        super().__init__(called, names, places, wrt, replace(forward, runs=runs), out_dtype, None)
        self.matrices = ()  # stored elements are no matrix to whose gradient a kernel could add
        self.dense = OpRecorder(dense, names[1:], tuple(at - 1 for at in places), wrt, forward, out_dtype, None)

    def backward(self, asked: Asked, tensors: list[Tensor]) -> Sequence[Tensor | None]:  # noqa: D102
        values, meta = tensors[1:3]
        tensors[1:3] = [sparsity.dense(values.t(), meta).t()]
        needs = asked.needs
        of_a, of_b, *others = self.dense.backward(asked._replace(needs=(*needs[:2], *needs[3:])), tensors)
        return of_a, None if of_b is None else sparsity.stored(of_b.t(), meta, values.itemsize).t(), None, *others
