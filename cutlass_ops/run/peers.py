"""The same computation in PyTorch: the peers that kernels are compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from cutlass_ops.epilogue import builtin, composed
from cutlass_ops.epilogue.graph import Graph
from cutlass_ops.operand import reference
from cutlass_ops.operand.matrices import operand
from cutlass_ops.operand.results import usual_dtype

Peer = Callable[[Tensor, Tensor, Sequence[Any]], Any]


def peers(graph: Graph, dtype: torch.dtype = torch.bfloat16) -> Mapping[str, Peer]:
    """Return PyTorch's ways to compute an epilogue of an A of a given dtype, by name.

    Each returns D, or a mapping of several outputs.

    ``eager`` is torch.mm, or torch.matmul for batches, and one elementwise kernel for each operation. ``cublaslt`` is
    one of cuBLASLt's few fused epilogues, in 16 bits and two dimensions. FP16 epilogues with statistics of A are
    computed in FP32, since the unscaled product may overflow. So are epilogues with indices or random numbers, which 16
    bits do not hold. FP8 operands are converted to BF16, times the scales of their blocks.
    """
    names = [i.name for i in graph.inputs]

    def eager(a: Tensor, b: Tensor, inputs: Sequence[Any]) -> Any:
        wide = graph.knows_places or (graph.gathered and a.dtype is torch.float16)
        usual = usual_dtype(a.dtype, b.dtype)  # BF16 holds every FP8 value
        dtype = torch.float32 if wide else usual
        named = dict(zip(names, inputs, strict=True))
        x, w = operand("a", a, graph, named).values(), operand("b", b, graph, named).values()
        acc = torch.mm(x.to(dtype), w.to(dtype)) if x.ndim == 2 else torch.matmul(x.to(dtype), w.to(dtype))
        values = reference.evaluate(graph, acc, named, dtype, a=a)
        values = {o.name: values[o.name] if o.reduce else values[o.name].to(usual) for o in graph.outputs}
        return values if len(graph.outputs) > 1 else values[graph.outputs[0].name]

    found: dict[str, Peer] = {"eager": _NORMS.get(graph, eager)}
    fused = _FUSED.get(graph)
    if fused is not None and dtype.itemsize == 2:
        found["cublaslt"] = fused
    return found


_NORMS: Mapping[Graph, Peer] = {
    composed.rms_norm.graph: lambda a, b, inputs: F.rms_norm(a, a.shape[1:], eps=float(inputs[0])) @ b,
    composed.layer_norm.graph: lambda a, b, inputs: F.layer_norm(a, a.shape[1:], eps=float(inputs[1])) @ b,
}

_FUSED: Mapping[Graph, Peer] = {
    builtin.identity.graph: lambda a, b, inputs: torch.mm(a, b),
    builtin.bias.graph: lambda a, b, inputs: torch.addmm(inputs[0], a, b),
    builtin.bias_relu.graph: lambda a, b, inputs: torch._addmm_activation(inputs[0], a, b, use_gelu=False),
}
