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


class Format(NamedTuple):
    """How a library stores a weight in 4 bits.

    `tensors` are the attributes that hold it, of which those from `needed` on may be missing. `bits` are the numbers'
    bits as a layer says them, and `pack` takes the layer, its tensors and the type of a.
    """

    tensors: tuple[str, ...]
    needed: int
    bits: Callable[[Any], object]
    pack: Callable[[Any, list[Any], torch.dtype | None], Packed]


def _of_gptq(layer: Any, tensors: list[Any], dtype: torch.dtype | None) -> Packed:
    # GPTQModel changes zero points in place for kernels that want them so, and then says so.
    version = layer.qzero_format() if hasattr(layer, "qzero_format") else 1
    return Packed.from_gptq(*tensors, version=version, dtype=dtype)


GPTQ = Format(("qweight", "scales", "qzeros", "g_idx"), 3, lambda layer: layer.bits, _of_gptq)
AWQ = Format(
    ("qweight", "scales", "qzeros"),
    3,
    lambda layer: getattr(layer, "w_bit", None) or layer.bits,
    lambda _, tensors, dtype: Packed.from_awq(*tensors, dtype=dtype),
)
COMPRESSED = Format(
    ("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx"),
    2,
    lambda layer: layer.quantization_scheme.weights.num_bits,
    lambda _, tensors, dtype: Packed.from_compressed_tensors(*tensors, dtype=dtype),
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


def pack(layer: Any, of: Format, dtype: torch.dtype | None = None) -> Packed:
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
    if found.shape[0] != wanted:
        raise ValueError(f"its weight has K={found.shape[0]}, and it takes {wanted}: its weight is in another order")
    return found


def refuses(layer: Any, of: Format) -> str:
    """Say why a layer's weight cannot be packed; an empty string if it can."""
    try:
        pack(layer, of)
    except (TypeError, ValueError, AttributeError) as error:
        return f"its weight cannot be packed: {error}"
    return ""


def pack_any(layer: Any, dtype: torch.dtype | None = None) -> Packed:
    """Return the weight of a layer of any known class, packed. Raises TypeError or ValueError if there is none."""
    of = format_of(type(layer))
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
