"""Linear layers whose weight is a DTensor: each process multiplies its own part, as ``to_local()`` gives it.

``ColwiseParallel`` gives each process rows of the weight: D is split along its columns. ``RowwiseParallel`` gives each
process columns of the weight, and D is a sum over the processes, to which the bias is added.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cutlass_ops.nn.reading import is_spread, rows
from cutlass_ops.run import casting
from cutlass_ops.run.ops import gemm
from cutlass_ops.run.tensors import require_tensor


def sum_dtype(x: Tensor, residual: Tensor | None) -> torch.dtype | None:
    """Return the dtype of a layer's result plus a residual, as PyTorch promotes them; None for the layer's own.

    Raises
    ------
    TypeError, ValueError
        If the residual is no tensor that an epilogue can read.
    """
    if residual is None:
        return None
    require_tensor("residual", residual)
    own = casting.autocast_dtype(x) or x.dtype
    found = torch.promote_types(own, residual.dtype)
    return None if found == own else found


def linear(layer: Any, x: Tensor, residual: Tensor | None) -> Tensor:
    """Compute a layer (:class:`cutlass_ops.nn.Linear`) whose weight is a DTensor.

    Parameters
    ----------
    layer : Linear
        The layer.
    x : Tensor
        (..., K): whole in each process for rows of the weight, split along K for its columns. A plain tensor is the
        part of this process.
    residual : Tensor, optional
        (..., N) as the result is split.

    Returns
    -------
    DTensor
        Split along N, or a sum that is still to be added up over the processes.

    Raises
    ------
    NotImplementedError
        If the weight is split in another way, or an activation would need the whole sum.
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
    if by_rows:
        inputs = [] if layer.bias is None else [_local(layer.bias, mesh, Shard(0))]
        op, out_dtype = layer._ops[int(layer.bias is not None)][int(residual is not None)], sum_dtype(x, residual)
        if residual is not None:
            inputs = [*inputs, rows(_local(residual, mesh, last))]
        d = op(x, weight.to_local().t(), *inputs, out_dtype=out_dtype)
        return DTensor.from_local(d, mesh, [last], run_check=False)
    if layer.activation not in (None, "none"):
        raise NotImplementedError(
            f"the weight is split along K, and {layer.activation} needs the whole sum over it: give this layer no "
            "activation"
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
