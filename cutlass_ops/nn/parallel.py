"""Linear layers whose weight is a DTensor: each process multiplies its own part, as ``to_local()`` gives it.

``ColwiseParallel`` gives each process rows of the weight: D is split along its columns. ``RowwiseParallel`` gives each
process columns of the weight, and D is a sum over the processes, to which the bias is added.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cutlass_ops.nn.epilogues import chosen
from cutlass_ops.nn.reading import is_spread, rows
from cutlass_ops.operand.tensors import require_tensor
from cutlass_ops.run import casting
from cutlass_ops.run.gemm import gemm


def sum_dtype(x: Tensor, residual: Tensor | None) -> torch.dtype | None:
    """Return the dtype of a layer's result plus a residual, as PyTorch promotes them; None for the layer's own."""
    if residual is None:
        return None
    require_tensor("residual", residual)
    own = casting.autocast_dtype(x) or x.dtype
    found = torch.promote_types(own, residual.dtype)
    return None if found == own else found


def plus(d: Tensor, residual: Tensor | None) -> Tensor:
    """Return a result plus a residual, which is whole in each process if only the result is a DTensor."""
    if residual is None:
        return d
    require_tensor("residual", residual)
    if is_spread(d) and not is_spread(residual):
        from torch.distributed.tensor import DTensor, Replicate

        mesh = d.device_mesh  # type: ignore[attr-defined]
        residual = DTensor.from_local(residual, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return d + residual


def linear(layer: Any, x: Tensor, residual: Tensor | None) -> Tensor:
    """Compute a layer (:class:`cutlass_ops.nn.Linear`) whose weight is a DTensor.

    `x`, (..., K), is whole in each process for rows of the weight, and split along K for its columns. A plain tensor is
    the part of this process. `residual`, (..., N), is split as the result is: along N, or a sum that is still to be
    added up over the processes. Raises NotImplementedError if the weight is split in another way, or an activation
    would need the whole sum.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    weight = layer.weight
    mesh, placements = weight.device_mesh, weight.placements
    if len(placements) != 1 or not (placements[0].is_shard(0) or placements[0].is_shard(1)):
        raise NotImplementedError(
            f"weight is split as {placements}, and cutlass_ops.nn.Linear multiplies a weight of one mesh dimension, "
            "split along its rows or columns: use ColwiseParallel or RowwiseParallel"
        )
    by_rows = placements[0].is_shard(0)
    of_x = Replicate() if by_rows else Shard(x.ndim - 1)
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, [of_x], run_check=False)
    # Each process sees a part of what the gradient of a whole x adds up.
    x = rows(x.redistribute(mesh, [of_x]).to_local(grad_placements=[Partial() if by_rows else of_x]))
    last = Shard(x.ndim - 1)
    if layer._epilogue is not None and layer._epilogue.graph.inputs:
        raise NotImplementedError(
            "the weight is a DTensor, and the epilogue has inputs, of which each process would need its part: multiply "
            "by weight.to_local() with co.gemm"
        )
    if by_rows:
        bias = None if layer.bias is None else _local(layer.bias, mesh, Shard(0))
        part = None if residual is None else _local(residual, mesh, last)
        op, inputs = chosen(layer._ops, bias, part)
        d = op(x, weight.to_local().t(), *inputs, out_dtype=sum_dtype(x, residual))
        return DTensor.from_local(d, mesh, [last], run_check=False)
    if layer.is_activated:
        raise NotImplementedError(
            f"the weight is split along K, and {layer.activation or 'the epilogue'} needs the whole sum over it: give "
            "this layer none"
        )
    total: Tensor = DTensor.from_local(gemm(x, weight.to_local().t()), mesh, [Partial()], run_check=False)
    dtype = sum_dtype(x, residual) or total.dtype
    for added in (layer.bias, residual):
        if added is not None:
            whole = added if isinstance(added, DTensor) else DTensor.from_local(added, mesh, [Replicate()])
            total = total + whole.redistribute(mesh, [Replicate()])
    return total.to(dtype)  # under autocast, a bias in FP32 has promoted it


def _local(tensor: Tensor, mesh: Any, placement: Any) -> Tensor:
    if not is_spread(tensor):
        return tensor
    found: Tensor = tensor.redistribute(mesh, [placement]).to_local()  # type: ignore[attr-defined]
    return found
