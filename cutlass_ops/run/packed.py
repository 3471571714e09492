"""Packed weights: what calls take for B in 4 bits, made of a dense weight or of those of other libraries.

PyTorch's tracers must know this class before they meet one, so the library imports this module at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.utils import _pytree

from cutlass_ops.base import dtypes
from cutlass_ops.epilogue import Epilogue
from cutlass_ops.epilogue.graph import Graph
from cutlass_ops.epilogue.nodes import Input, Kind, Node, Output
from cutlass_ops.operand import packing, watching
from cutlass_ops.operand.tensors import require_tensor
from cutlass_ops.run.values import OwnWeight, _named

Numbers = Literal["int4", "uint4", "e2m1"]
_ELEMENTS = {"int4": dtypes.i4, "uint4": dtypes.u4, "e2m1": dtypes.e2m1}
_KINDS = {"int4": Kind.GROUPS_I4, "uint4": Kind.GROUPS_U4, "e2m1": Kind.GROUPS_E2M1}
_16_BITS = (torch.float16, torch.bfloat16)
# The greatest number that a symmetric INT4 weight has, and the greatest code.
_GREATEST, _MOST = 7, 15
# Columns of AWQ's eight numbers in 32 bits, those of the lowest bits first.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_MX_GROUP, _MX_BIAS = 32, 127
_NV_GROUP = 16


def _scaled(kind: Kind) -> Epilogue:
    """Return the epilogue that takes a packed weight's scales. The accumulator has them already."""
    graph = Graph((Input("scale_b", kind),), (Node("acc"),), (Output("d", 0),))
    return Epilogue("packed", "D = A @ B, where B is a packed weight.", graph)


_SCALED = {numbers: _scaled(kind) for numbers, kind in _KINDS.items()}


@dataclass(frozen=True, eq=False)
class Packed(OwnWeight):
    """A weight in 4 bits for each number, with a scale for each group of numbers along K, in the order of kernels.

    Pass it to :func:`cutlass_ops.gemm` as b, with any epilogue. It represents number * scale, or (number - zero point)
    * scale. N must be a multiple of 16, and K of 64. Make one by :meth:`from_dense`, :meth:`from_gptq`,
    :meth:`from_awq`, :meth:`from_compressed_tensors`, :meth:`from_mxfp4` or :meth:`from_nvfp4`. They compute on the
    device of their arguments, and take a few times the weight's memory.

    In kernels for many rows, number times scale is rounded once, to the type of a, as a user would dequantise a weight.
    Kernels for up to 16 rows multiply FP32 sums of each group by its scale instead, which rounds nothing of the weight.

    Gradients pass to a and to the epilogue's inputs. For that of a, the backward dequantises the weight and multiplies
    by a GEMM in a's type. Values and scale are frozen. Batches and groups of rows are not supported.

    Attributes
    ----------
    values : Tensor
        (K / 2, N), UINT8, contiguous along K: two numbers in a byte, in an order of kernels.
    scale : Tensor
        (N, K / group), in FP16 or BF16, the type of a; (N, 2 K / group) with zero points. Also in an order of kernels.
    group : int
        How many numbers along K share a scale: 16, 32, 64, 128 or K.
    numbers : str
        ``"int4"`` for -8 to 7, ``"uint4"`` for 0 to 15 less a zero point, ``"e2m1"`` for FP4.
    version : int
        Of the order in memory: 1. Another one is refused.

    Raises
    ------
    TypeError, ValueError
        If a field does not fit. The message names it and says what to do.

    Examples
    --------
    >>> weight = torch.randn(32, 128).bfloat16()  # (N, K) of a linear layer
    >>> packed = co.Packed.from_dense(weight.t(), bits=4, group=64)
    >>> packed.shape, packed.numbers, packed.values.nbytes
    (torch.Size([128, 32]), 'int4', 2048)
    >>> x = torch.randn(4, 128).bfloat16()
    >>> co.gemm(x, packed, epilogue=lambda acc: co.e.relu(acc)).shape
    torch.Size([4, 32])
    """

    values: Tensor
    scale: Tensor
    group: int
    numbers: Numbers = "int4"
    version: int = packing.VERSION

    def __post_init__(self) -> None:
        if self.version != packing.VERSION:
            raise ValueError(
                f"version is {self.version!r}, and this library reads version {packing.VERSION} of the packed form: "
                "pack the weight again"
            )
        if self.numbers not in _KINDS:
            raise ValueError(f"numbers is {self.numbers!r}: use one of {', '.join(map(repr, _KINDS))}")
        if not (_is_plain(self.values) and _is_plain(self.scale)):
            return  # the call refuses them; PyTorch makes operand values of other things
        if self.values.dtype != torch.uint8:
            raise TypeError(f"values is {self.values.dtype}: packed numbers are torch.uint8, two in a byte")
        if self.scale.dtype not in _16_BITS:
            raise TypeError(f"scale is {self.scale.dtype}: use a's type, torch.bfloat16 or torch.float16")
        if self.values.ndim != 2:
            raise ValueError(f"values has shape {tuple(self.values.shape)}: it must be (K / 2, N)")
        half, n = self.values.shape
        packing.require_extents(n, 2 * half)
        _require_group(self.group, 2 * half)
        wanted = (n, (2 if self.numbers == "uint4" else 1) * 2 * half // self.group)
        if tuple(self.scale.shape) != wanted:
            raise ValueError(
                f"scale has shape {tuple(self.scale.shape)}: with K={2 * half}, N={n}, group {self.group} and "
                f"{self.numbers} it must have shape {wanted}"
            )
        if not self.values.t().is_contiguous():
            raise ValueError(
                f"values has strides {self.values.stride()}: the numbers of all columns must follow each other, "
                f"({1}, {half}), since their order is not that of the matrix"
            )

    # ---- What calls ask ----

    @property
    def parts(self) -> tuple[Tensor, Tensor | None]:  # noqa: D102
        return self.values, self.scale

    def before(self, a: Any, scale_a: Any, scale_b: Any = None) -> Epilogue:  # noqa: D102
        if scale_a is not None:
            raise TypeError("a has a scale, and b is packed: pass a in FP16 or BF16, without a scale")
        given: tuple[tuple[str, Any], ...] = (("b", self.values), ("scale_b", self.scale))
        for name, x in given:
            if x is None:
                raise TypeError(f"{name} is missing: a Packed has values and a scale")
            require_tensor(name, x)
        if isinstance(a, Tensor) and a.dtype is not self.scale.dtype:
            if a.dtype in _16_BITS:
                raise TypeError(f"a is {a.dtype}, and b is packed for {self.dtype}: convert a, or pack b with dtype=")
            raise TypeError(f"a is {a.dtype}, and b is packed: pass a as {self.dtype}")
        return _SCALED[self.numbers]

    # ---- As a matrix ----

    @property
    def shape(self) -> torch.Size:
        """(K, N)."""
        half, n = self.values.shape
        return torch.Size((2 * half, n))

    @property
    def dtype(self) -> torch.dtype:
        """The type of a, and of the scales."""
        return self.scale.dtype

    @property
    def device(self) -> torch.device:
        """The device of both tensors."""
        return self.values.device

    def to(self, device: torch.device | str) -> Packed:
        """Return it on another device."""
        return replace(self, values=self.values.t().to(device).t(), scale=self.scale.to(device))

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the weight (K, N) that it represents.

        Parameters
        ----------
        dtype : torch.dtype, optional
            By default the scales', in which each number times its scale is rounded once. FP32 and FP64 are exact.

        Examples
        --------
        >>> packed = co.Packed.from_dense(torch.full((64, 16), 3.5).bfloat16(), group=64)
        >>> packed.dequantize()[0, 0].item()
        3.5
        """
        found = packing.dequantized(self.values.t(), self.scale, _ELEMENTS[self.numbers], dtype)
        return found.t()

    # ---- In files ----

    def tensors(self, prefix: str = "") -> dict[str, Tensor]:
        """Return it as contiguous tensors by name, for ``safetensors`` or a state dict; `prefix` precedes each name."""
        form = (self.version, list(_KINDS).index(self.numbers), self.group)
        found = {"values": self.values.t(), "scale": self.scale, "form": torch.tensor(form, dtype=torch.int64)}
        return {prefix + name: x.contiguous() for name, x in found.items()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], prefix: str = "") -> Packed:
        """Return what :meth:`tensors` was called of.

        Raises ValueError if a tensor is missing, or of another version of the packed form.

        Examples
        --------
        >>> packed = co.Packed.from_dense(torch.ones(64, 16).bfloat16(), group=64)
        >>> co.Packed.from_tensors(packed.tensors("weight."), "weight.").shape
        torch.Size([64, 16])
        """
        missing = [prefix + name for name in ("values", "scale", "form") if prefix + name not in tensors]
        if missing:
            raise ValueError(f"tensors has no {', '.join(missing)}, which Packed.tensors returns")
        version, numbers, group = tensors[f"{prefix}form"].tolist()
        known = get_args(Numbers)
        if version != packing.VERSION or numbers not in range(len(known)):
            raise ValueError(
                f"{prefix}form has version {version}, and this library reads version {packing.VERSION} of the packed "
                "form: pack the weight again"
            )
        return cls(tensors[f"{prefix}values"].t(), tensors[f"{prefix}scale"], group, known[numbers], version)

    # ---- From other weights ----

    @classmethod
    def from_dense(cls, w: Tensor, bits: int = 4, group: int | None = 128, *, symmetric: bool = True) -> Packed:
        """Quantise a weight, each number rounded to the nearest.

        Let m be a group's largest absolute value. Symmetric: numbers from -7 to 7, and a scale of m / 7. Otherwise
        numbers from 0 to 15, a scale of 1/15 of the distance from the smallest value, or 0, to the largest, or 0, and
        a zero point that represents 0. Scales are rounded to w's type.

        Parameters
        ----------
        w : Tensor
            (K, N), FP16 or BF16, the type of a: ``weight.t()`` of a linear layer.
        bits : int
            4.
        group : int, optional
            16, 32, 64, 128 or K, which None means too.
        symmetric : bool
            Whether there are no zero points.

        Raises
        ------
        TypeError, ValueError
            If an argument does not fit.

        Examples
        --------
        >>> w = torch.linspace(-7, 7, 64)[:, None].repeat(1, 16).bfloat16()
        >>> co.Packed.from_dense(w, group=64).dequantize()[::21, 0].tolist()
        [-7.0, -2.0, 2.0, 7.0]
        """
        if bits != 4:
            raise ValueError(f"bits is {bits!r}: packed weights have 4. For 8 bits see co.prepare and co.Scaled")
        _require_matrix("w", w, _16_BITS)
        k, n = w.shape
        group = k if group is None else group
        _require_group(group, k)
        packing.require_extents(n, k)
        grouped = w.t().float().reshape(n, k // group, group)
        if symmetric:
            scale = (grouped.abs().amax(-1) / _GREATEST).to(w.dtype)
            codes = _divided(grouped, scale).clamp_(-_GREATEST, _GREATEST) + packing.BIAS
            return _of(codes.view(n, k), scale, None, group, "int4")
        least, most = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
        scale = ((most - least) / _MOST).to(w.dtype)
        zero = _divided(-least[..., None], scale)[..., 0].clamp_(0, _MOST)
        codes = (_divided(grouped, scale) + zero[..., None]).clamp_(0, _MOST)
        return _of(codes.view(n, k), scale, zero, group, "uint4")

    @classmethod
    def from_gptq(
        cls,
        qweight: Tensor,
        scales: Tensor,
        qzeros: Tensor,
        g_idx: Tensor | None = None,
        *,
        version: int = 1,
        dtype: torch.dtype | None = None,
    ) -> Packed:
        """Pack a weight of GPTQ in 4 bits, as GPTQModel and AutoGPTQ store it.

        If all zero points are 8, the result has none.

        Parameters
        ----------
        qweight : Tensor
            (K / 8, N), INT32: eight numbers along K in each, the first in the lowest bits.
        scales : Tensor
            (K / group, N), FP16 or BF16.
        qzeros : Tensor
            (K / group, N / 8), INT32: eight zero points along N in each.
        g_idx : Tensor, optional
            (K,), the group of each line along K. It must be in order: activation order is refused.
        version : int
            1 if stored zero points are one less than they mean (``checkpoint_format`` ``"gptq"``), 2 if not
            (``"gptq_v2"``).
        dtype : torch.dtype, optional
            The type of a, to which scales are rounded: by default that of `scales`.

        Raises
        ------
        TypeError, ValueError
            If an argument does not fit, or the weight has activation order.
        """
        if version not in (1, 2):
            raise ValueError(f"version is {version!r}: GPTQ's formats are 1 and 2")
        _require_matrix("qweight", qweight, (torch.int32,))
        _require_matrix("qzeros", qzeros, (torch.int32,))
        k, n = 8 * qweight.shape[0], qweight.shape[1]
        group = _group_of("scales", scales, k, n)
        _require_shape("qzeros", qzeros, (k // group, n // 8))
        _require_in_order(g_idx, k, group)
        codes = _nibbles(qweight.t()).reshape(n, k)
        zero = _nibbles(qzeros).reshape(k // group, n).t() + (2 - version)
        return _with_zeros(codes, scales.t(), zero, group, dtype)

    @classmethod
    def from_awq(cls, qweight: Tensor, scales: Tensor, qzeros: Tensor, *, dtype: torch.dtype | None = None) -> Packed:
        """Pack a weight of AWQ in 4 bits, in the form ``"gemm"`` of AutoAWQ.

        Parameters
        ----------
        qweight : Tensor
            (K, N / 8), INT32: eight numbers along N in each. From the lowest bits on these are 0, 2, 4, 6, 1, 3, 5, 7.
        scales : Tensor
            (K / group, N), FP16 or BF16.
        qzeros : Tensor
            (K / group, N / 8), INT32, in the same order.
        dtype : torch.dtype, optional
            The type of a, to which scales are rounded: by default that of `scales`.

        Raises
        ------
        TypeError, ValueError
            If an argument does not fit.
        """
        _require_matrix("qweight", qweight, (torch.int32,))
        _require_matrix("qzeros", qzeros, (torch.int32,))
        k, n = qweight.shape[0], 8 * qweight.shape[1]
        group = _group_of("scales", scales, k, n)
        _require_shape("qzeros", qzeros, (k // group, n // 8))
        order = torch.tensor(_AWQ_ORDER, device=qweight.device).argsort()
        codes = _nibbles(qweight)[..., order].reshape(k, n).t()
        zero = _nibbles(qzeros)[..., order].reshape(k // group, n).t()
        return _with_zeros(codes, scales.t(), zero, group, dtype)

    @classmethod
    def from_compressed_tensors(
        cls,
        weight_packed: Tensor,
        weight_scale: Tensor,
        weight_zero_point: Tensor | None = None,
        weight_g_idx: Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> Packed:
        """Pack a weight of compressed-tensors (LLM Compressor) in 4 bits, of the format ``"pack-quantized"``.

        Parameters
        ----------
        weight_packed : Tensor
            (N, K / 8), INT32: eight numbers along K in each, the first in the lowest bits, each with 8 added.
        weight_scale : Tensor
            (N, K / group), FP16 or BF16.
        weight_zero_point : Tensor, optional
            (N / 8, K / group), INT32, packed along N in the same way; or (N, K / group), INT8, from -8 to 7.
        weight_g_idx : Tensor, optional
            (K,), the group of each column. It must be in order: activation order is refused.
        dtype : torch.dtype, optional
            The type of a, to which scales are rounded: by default that of `weight_scale`.

        Raises
        ------
        TypeError, ValueError
            If an argument does not fit, or the weight has activation order.
        """
        _require_matrix("weight_packed", weight_packed, (torch.int32,))
        n, k = weight_packed.shape[0], 8 * weight_packed.shape[1]
        group = _group_of("weight_scale", weight_scale, k, n, along_k=1)
        _require_in_order(weight_g_idx, k, group, "weight_g_idx")
        codes = _nibbles(weight_packed).reshape(n, k)
        zero = weight_zero_point
        if zero is None:
            return _of(codes, _rounded(weight_scale, dtype), None, group, "int4")
        _require_matrix("weight_zero_point", zero, (torch.int32, torch.int8))
        if zero.dtype == torch.int8:
            _require_shape("weight_zero_point", zero, (n, k // group))
            zero = zero.int() + packing.BIAS
        else:
            _require_shape("weight_zero_point", zero, (n // 8, k // group))
            zero = _nibbles(zero.t()).reshape(k // group, n).t()
        return _with_zeros(codes, weight_scale, zero, group, dtype)

    @classmethod
    def from_mxfp4(cls, blocks: Tensor, scales: Tensor, *, dtype: torch.dtype = torch.bfloat16) -> Packed:
        """Pack a weight of MXFP4, as gpt-oss has it: FP4 (E2M1), with a scale of 2^(e - 127) for each 32 along K.

        Parameters
        ----------
        blocks : Tensor
            (N, K / 32, 16) or (N, K / 2), UINT8: two numbers along K in a byte, the first in the lower bits.
        scales : Tensor
            (N, K / 32), UINT8 or ``torch.float8_e8m0fnu``: the exponents e.
        dtype : torch.dtype
            The type of a. BF16 holds every scale; FP16 those from 2^-24 to 2^15, and others are refused.

        Raises
        ------
        TypeError, ValueError
            If an argument does not fit.

        Examples
        --------
        >>> blocks = torch.full((16, 2, 16), 0x21, dtype=torch.uint8)  # 0.5, 1.0, and so on
        >>> scales = torch.full((16, 2), 128, dtype=torch.uint8)  # 2.0
        >>> co.Packed.from_mxfp4(blocks, scales).dequantize()[:2, 0].tolist()
        [1.0, 2.0]
        """
        codes = _codes_of_fp4(blocks, _MX_GROUP)
        n, k = codes.shape
        _require_matrix("scales", scales, (torch.uint8, torch.float8_e8m0fnu))
        _require_shape("scales", scales, (n, k // _MX_GROUP))
        if dtype not in _16_BITS:
            raise TypeError(f"dtype is {dtype}: use torch.bfloat16 or torch.float16")
        exponents = scales.view(torch.uint8).int()
        scale = torch.exp2((exponents - _MX_BIAS).double())
        scale = scale.masked_fill(exponents == 255, float("nan"))
        found = scale.to(dtype)
        if dtype == torch.float16 and bool(((found.double() != scale) & ~scale.isnan()).any()):
            raise ValueError("scales has some that FP16 cannot hold, below 2^-24 or above 2^15: use BF16")
        return _of(codes, found, None, _MX_GROUP, "e2m1")

    @classmethod
    def from_nvfp4(
        cls, blocks: Tensor, scales: Tensor, scale: Tensor | float, *, dtype: torch.dtype = torch.bfloat16
    ) -> Packed:
        """Pack a weight of NVFP4: FP4 (E2M1), with an E4M3 scale for each 16 along K and an FP32 scale of the tensor.

        The product of both scales is rounded once, to the type of a: by at most 2^-8 of it in BF16, and 2^-11 in FP16.

        Parameters
        ----------
        blocks : Tensor
            (N, K / 16, 8) or (N, K / 2), UINT8: two numbers along K in a byte, the first in the lower bits.
        scales : Tensor
            (N, K / 16), ``torch.float8_e4m3fn``, in the order of the matrix: not swizzled.
        scale : Tensor or float
            The scale of the tensor, by which others are multiplied. compressed-tensors stores its inverse: pass
            ``1 / weight_global_scale``.
        dtype : torch.dtype
            The type of a. FP16 refuses products of scales above 65504, and rounds those below 2^-14 by more.

        Raises
        ------
        TypeError, ValueError
            If an argument does not fit.

        Examples
        --------
        >>> blocks = torch.full((16, 32), 0x21, dtype=torch.uint8)  # 0.5, 1.0, and so on
        >>> scales = torch.full((16, 4), 4.0).to(torch.float8_e4m3fn)
        >>> co.Packed.from_nvfp4(blocks, scales, 0.5).dequantize()[:2, 0].tolist()
        [1.0, 2.0]
        """
        codes = _codes_of_fp4(blocks, _NV_GROUP)
        n, k = codes.shape
        _require_matrix("scales", scales, (torch.float8_e4m3fn,))
        _require_shape("scales", scales, (n, k // _NV_GROUP))
        if isinstance(scale, Tensor) and scale.numel() != 1:
            raise ValueError(f"scale has shape {tuple(scale.shape)}: NVFP4 has one scale of the tensor")
        wide = scales.double() * (scale.double().reshape(()) if isinstance(scale, Tensor) else scale)
        found = _rounded(wide, dtype)
        if bool((found.isinf() & ~wide.isinf()).any()):
            raise ValueError("scales times scale has some above 65504, which FP16 cannot hold: use BF16")
        return _of(codes, found, None, _NV_GROUP, "e2m1")


# ---- How weights are packed ------------------------------------------------------------------------------------------


def _of(codes: Tensor, scale: Tensor, zero: Tensor | None, group: int, numbers: Numbers) -> Packed:
    values = packing.packed(codes.to(torch.uint8).contiguous())
    return Packed(values.t(), packing.packed_scales(scale, zero), group, numbers)


def _with_zeros(codes: Tensor, scale: Tensor, zero: Tensor, group: int, dtype: torch.dtype | None) -> Packed:
    """Pack numbers from 0 to 15 with zero points; without these where all are the middle."""
    if bool((zero == packing.BIAS).all()):
        return _of(codes, _rounded(scale, dtype), None, group, "int4")
    return _of(codes, _rounded(scale, dtype), zero, group, "uint4")


def _rounded(scale: Tensor, dtype: torch.dtype | None) -> Tensor:
    dtype = scale.dtype if dtype is None else dtype
    if dtype not in _16_BITS:
        raise TypeError(f"scales are {dtype}: pass dtype=torch.bfloat16 or torch.float16, the type of a")
    return scale.to(dtype)


def _divided(x: Tensor, scale: Tensor) -> Tensor:
    """Return x / scale as whole numbers; 0 where the scale is 0."""
    by = scale.float()[..., None]
    return torch.where(by == 0, 0.0, x / by).round_()


def _codes_of_fp4(blocks: object, group: int) -> Tensor:
    """Return the codes (N, K) of two numbers along K in each byte."""
    if not isinstance(blocks, Tensor) or blocks.dtype != torch.uint8 or blocks.ndim not in (2, 3):
        raise TypeError(
            f"blocks must be (N, K / {group}, {group // 2}) or (N, K / 2) in torch.uint8, not {_shown(blocks)}"
        )
    blocks = blocks.flatten(1)
    return torch.stack((blocks & 15, blocks >> 4), -1).flatten(1)


def _nibbles(x: Tensor) -> Tensor:
    """Return the eight numbers in each INT32, those of the lowest bits first, in a last dimension."""
    return x[..., None] >> torch.arange(0, 32, 4, device=x.device, dtype=torch.int32) & 15


# ---- What does not fit -----------------------------------------------------------------------------------------------


def _is_plain(x: object) -> bool:
    """Whether a tensor's shape is that of its memory."""
    if not isinstance(x, Tensor) or x.is_nested or x.is_quantized or x.layout is not torch.strided:
        return False
    return torch.compiler.is_dynamo_compiling() or not watching.is_left_over(x)


def _shown(x: object) -> str:
    return f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__


def _require_matrix(name: str, x: object, allowed: tuple[torch.dtype, ...]) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, not {type(x).__name__}")
    if x.dtype not in allowed:
        raise TypeError(f"{name} is {x.dtype}: it must be {' or '.join(map(str, allowed))}")
    if x.ndim != 2:
        raise ValueError(f"{name} has shape {tuple(x.shape)}: it must have two dimensions")


def _require_shape(name: str, x: Tensor, wanted: tuple[int, ...]) -> None:
    if tuple(x.shape) != wanted:
        raise ValueError(f"{name} has shape {tuple(x.shape)}: beside the other tensors it must have shape {wanted}")


def _require_group(group: object, k: int) -> None:
    known = (*packing.GROUPS, k)
    if group not in known or k % int(str(group)):
        raise ValueError(f"group is {group!r}, and K is {k}: use one of {', '.join(map(str, known))}, which divides K")


def _group_of(name: str, scales: Tensor, k: int, n: int, along_k: int = 0) -> int:
    """Return the size of groups, which the shape of scales says."""
    _require_matrix(name, scales, (torch.float16, torch.bfloat16, torch.float32))
    groups, columns = scales.shape[along_k], scales.shape[1 - along_k]
    if columns != n or not groups or k % groups:
        wanted = "(K / group, N)" if along_k == 0 else "(N, K / group)"
        raise ValueError(f"{name} has shape {tuple(scales.shape)}: it must be {wanted}, with K={k} and N={n}")
    _require_group(k // groups, k)
    return k // groups


def _require_in_order(g_idx: Tensor | None, k: int, group: int, name: str = "g_idx") -> None:
    if g_idx is None or not g_idx.numel():
        return
    _require_shape(name, g_idx, (k,))
    if not torch.equal(g_idx.long(), torch.arange(k, device=g_idx.device) // group):
        raise ValueError(
            f"{name} is not in order: the weight was quantised with activation order (desc_act), whose groups are no "
            "neighbours along K. Quantise without it, or sort the weight's K and a's columns by it"
        )


def _packed(fixed: tuple[int, Numbers, int], values: Tensor, scale: Tensor) -> Packed:
    return Packed(values, scale, *fixed)


_pytree.register_pytree_node(
    Packed,
    lambda x: ([x.values, x.scale], (x.group, x.numbers, x.version)),
    lambda tensors, fixed: _packed(fixed, *tensors),
    serialized_type_name="cutlass_ops.Packed",
    flatten_with_keys_fn=lambda x: (_named(x, "values", "scale"), (x.group, x.numbers, x.version)),
)
torch.serialization.add_safe_globals([Packed])
