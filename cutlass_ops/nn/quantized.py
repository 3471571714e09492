"""Linear layers of other libraries with weights in 4 bits: how they are recognised, and packed.

Nothing here imports these libraries. A layer is recognised by its class's name and home, and by its tensors' names,
shapes and types. Classes whose tensors may have been put in another order for their own kernels, such as Marlin's and
ExLlama's, are not known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cutlass_ops.operand.call import device_of
from cutlass_ops.run.packed import Packed
from cutlass_ops.run.sparse import Sparse


class Format(NamedTuple):
    """How a library stores a weight in 4 bits.

    `tensors` are the attributes that hold it, of which those from `needed` on may be missing. `bits` are the numbers'
    bits as a layer says them, and `pack` takes the layer, its tensors and the type of a.
    """

    tensors: tuple[str, ...]
    needed: int
    bits: Callable[[Any], object]
    pack: Callable[[Any, list[Any], torch.dtype | None], Weight]


class Weight(NamedTuple):
    """A layer's weight, packed or sparse, and the order in which it takes x's columns: None for their own."""

    packed: Packed | Sparse
    order: Tensor | None = None

    def of(self, x: Tensor) -> Tensor:
        """Return x with its columns in the weight's order."""
        return x if self.order is None else x.index_select(-1, self.order)


def _of_gptq(layer: Any, tensors: list[Any], dtype: torch.dtype | None) -> Weight:
    qweight, scales, qzeros, g_idx = tensors
    # GPTQModel changes zero points in place for kernels that want them so, and then says so.
    version = layer.qzero_format() if hasattr(layer, "qzero_format") else 1
    order = _order(g_idx)
    if order is not None:
        qweight, g_idx = _sorted(qweight.t(), order).t(), g_idx[order]
    return Weight(Packed.from_gptq(qweight, scales, qzeros, g_idx, version=version, dtype=dtype), order)


def _of_compressed(_: Any, tensors: list[Any], dtype: torch.dtype | None) -> Weight:
    weight, scale, zero, g_idx = tensors
    order = _order(g_idx)
    if order is not None:
        weight, g_idx = _sorted(weight, order), g_idx[order]
    return Weight(Packed.from_compressed_tensors(weight, scale, zero, g_idx, dtype=dtype), order)


def _order(g_idx: Tensor | None) -> Tensor | None:
    """Return the order of K in which groups are neighbours: of activation order (``desc_act``). None if they are."""
    if g_idx is None or bool((g_idx[1:] >= g_idx[:-1]).all()):
        return None
    return g_idx.argsort(stable=True)


def _sorted(words: Tensor, order: Tensor) -> Tensor:
    """Return numbers (N, K), eight in each INT32 (N, K / 8), in another order of K."""
    shifts = torch.arange(0, 32, 4, device=words.device, dtype=torch.int32)
    codes = (words[..., None] >> shifts & 15).flatten(1)[:, order]
    return (codes.view(len(codes), -1, 8) << shifts).sum(-1, dtype=torch.int32)


GPTQ = Format(("qweight", "scales", "qzeros", "g_idx"), 3, lambda layer: layer.bits, _of_gptq)
AWQ = Format(
    ("qweight", "scales", "qzeros"),
    3,
    lambda layer: getattr(layer, "w_bit", None) or layer.bits,
    lambda _, tensors, dtype: Weight(Packed.from_awq(*tensors, dtype=dtype)),
)
COMPRESSED = Format(
    ("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx"),
    2,
    lambda layer: layer.quantization_scheme.weights.num_bits,
    _of_compressed,
)
# By a class's name: where its module's name begins, and the format.
KNOWN = {
    "TorchQuantLinear": ("gptqmodel.", GPTQ),
    "TorchLinear": ("gptqmodel.", GPTQ),
    "TritonV2QuantLinear": ("gptqmodel.", GPTQ),
    "TritonV2Linear": ("gptqmodel.", GPTQ),
    "QuantLinear": ("auto_gptq.nn_modules.qlinear.qlinear_", GPTQ),
    "AwqTorchQuantLinear": ("gptqmodel.", AWQ),
    "AwqTorchLinear": ("gptqmodel.", AWQ),
    "WQLinear_GEMM": ("awq.modules.linear.gemm", AWQ),
    "CompressedLinear": ("compressed_tensors.", COMPRESSED),
}
_AUTO_GPTQ = ("cuda", "cuda_old", "triton", "tritonv2")  # whose tensors stay as they were stored


def format_of(kind: type) -> Format | None:
    """Return the format of a class's layers, or None if it is not known."""
    home, found = KNOWN.get(kind.__name__, ("", None))
    if found is None or not kind.__module__.startswith(home):
        return None
    ours = home != KNOWN["QuantLinear"][0] or kind.__module__.removeprefix(home) in _AUTO_GPTQ
    return found if ours else None


def sources(layer: Any, of: Format) -> tuple[Tensor, ...]:
    """Return the tensors that hold a layer's weight, without those that there are not."""
    found = (getattr(layer, name, None) for name in of.tensors)
    return tuple(x for x in found if isinstance(x, Tensor))


def pack(layer: Any, of: Format, dtype: torch.dtype | None = None) -> Weight:
    """Return a layer's weight, packed for a's type, by default that of its scales.

    Raises TypeError or ValueError if its tensors are not what the format has, or its numbers have no 4 bits.
    """
    if getattr(layer, "adapter", None):
        raise ValueError("it has an adapter, which it adds itself")
    bits = of.bits(layer)
    if bits != 4:
        raise ValueError(f"its weight has {bits} bits, and packed weights have 4")
    tensors = [getattr(layer, name, None) for name in of.tensors]
    missing = [name for name, x in zip(of.tensors[: of.needed], tensors, strict=False) if not isinstance(x, Tensor)]
    if missing:
        raise ValueError(f"it has no {', '.join(missing)}: its weight was unpacked or put in another order")
    scales: Any = tensors[1]
    if dtype is None and scales.dtype not in (torch.float16, torch.bfloat16):
        dtype = torch.bfloat16
    found = of.pack(layer, tensors, dtype)
    wanted = layer.in_features if hasattr(layer, "in_features") else layer.infeatures
    k = found.packed.shape[0]
    if k != wanted:
        raise ValueError(f"its weight has K={k}, and it takes {wanted}: its weight is in another order")
    return found


def refuses(layer: Any, of: Format) -> str:
    """Say why a layer's weight cannot be packed; an empty string if it can."""
    try:
        pack(layer, of)
    except (TypeError, ValueError, AttributeError) as error:
        return f"its weight cannot be packed: {error}"
    return ""


def pack_any(layer: Any, dtype: torch.dtype | None = None) -> Weight:
    """Return the weight of a layer of any known class, packed. Raises TypeError or ValueError if there is none."""
    # compressed-tensors also keeps a linear layer's class, and replaces its weight.
    is_compressed = isinstance(getattr(layer, "weight_packed", None), Tensor) and hasattr(layer, "quantization_scheme")
    of = COMPRESSED if is_compressed else format_of(type(layer))
    if of is None:
        raise TypeError(
            f"layer is a {type(layer).__module__}.{type(layer).__name__}, of which this library does not know how it "
            f"holds its weight: it knows {', '.join(KNOWN)}; for others call co.Packed.from_gptq and the like"
        )
    try:
        return pack(layer, of, dtype)
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"layer cannot be packed: {error}") from None


def serves(device: torch.device) -> bool:
    """Whether packed weights have kernels on a device, or an implementation."""
    return device.type in ("cpu", "meta") or (device.type == "cuda" and device_of(device).has_tma)
