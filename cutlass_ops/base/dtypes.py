"""The element types of operands, with their names in Python, C++ and DLPack."""

from __future__ import annotations

from typing import NamedTuple

# DLPack's type codes (dlpack.h, DLDataTypeCode).
_DL_INT = 0
_DL_UINT = 1
_DL_FLOAT = 2
_DL_BFLOAT = 4
_DL_FLOAT8_E4M3FN = 10
_DL_FLOAT8_E5M2 = 12


class DType(NamedTuple):
    """One element type."""

    name: str  # used in declarations: ``"f16"``, ``"bf16"``, ``"f32"``; PTX has the same names
    bits: int  # of one element
    cpp: str  # the type's name in CUTLASS C++
    torch_name: str  # attribute of ``torch`` that holds the same type
    dl_code: int  # DLPack type code, which the compiled kernel checks

    def bytes_of(self, count: int) -> int:
        """Return the size of adjacent elements in bytes. Elements of less than a byte are packed."""
        return -(-count * self.bits // 8)

    def count_in(self, size: int) -> int:
        """Return how many elements fit into a number of bytes."""
        return size * 8 // self.bits

    @property
    def tma_alignment(self) -> int:
        """Elements in 16 bytes: TMA's alignment of pointers and leading dimensions."""
        return self.count_in(16)

    def __str__(self) -> str:
        return self.name


f16 = DType("f16", 16, "cutlass::half_t", "float16", _DL_FLOAT)
bf16 = DType("bf16", 16, "cutlass::bfloat16_t", "bfloat16", _DL_BFLOAT)
f32 = DType("f32", 32, "float", "float32", _DL_FLOAT)
# FP32 in memory; the Tensor Cores multiply the first 10 bits of its fraction. A type of A and B only.
tf32 = DType("tf32", 32, "cutlass::tfloat32_t", "float32", _DL_FLOAT)
# The same as a sum of two TF32 numbers; the Tensor Cores add up three of the four products.
tf32x3 = DType("tf32x3", 32, "float", "float32", _DL_FLOAT)
# FP8. e4m3 has no infinities, and one NaN of each sign.
e4m3 = DType("e4m3", 8, "cutlass::float_e4m3_t", "float8_e4m3fn", _DL_FLOAT8_E4M3FN)
e5m2 = DType("e5m2", 8, "cutlass::float_e5m2_t", "float8_e5m2", _DL_FLOAT8_E5M2)

# FP64, in which GEMM and epilogue compute if A and B have it.
f64 = DType("f64", 64, "double", "float64", _DL_FLOAT)

# A type of A and B, whose products are added up as i32, and then of D as well, which saturates.
i8 = DType("i8", 8, "int8_t", "int8", _DL_INT)

# Types of B whose numbers have 4 bits, two in a byte: whole numbers from -8 to 7, those from 0 to 15 less a zero point,
# and FP4. Tensors have them in the order of operand/packing.py.
i4 = DType("i4", 4, "cutlass_ops::Int4", "uint8", _DL_UINT)
u4 = DType("u4", 4, "cutlass_ops::Uint4", "uint8", _DL_UINT)
e2m1 = DType("e2m1", 4, "cutlass_ops::E2M1", "uint8", _DL_UINT)
PACKED: tuple[DType, ...] = (i4, u4, e2m1)

# Types of B of which two of each four elements along K are stored, and the others are 0. Bits are those stored for an
# element of the matrix, without metadata.
bf16s = DType("bf16s", 8, "cutlass_ops::TwoOfFour<cutlass::bfloat16_t>", "bfloat16", _DL_BFLOAT)
f16s = DType("f16s", 8, "cutlass_ops::TwoOfFour<cutlass::half_t>", "float16", _DL_FLOAT)
e4m3s = DType("e4m3s", 4, "cutlass_ops::TwoOfFour<cutlass::float_e4m3_t>", "float8_e4m3fn", _DL_FLOAT8_E4M3FN)
e5m2s = DType("e5m2s", 4, "cutlass_ops::TwoOfFour<cutlass::float_e5m2_t>", "float8_e5m2", _DL_FLOAT8_E5M2)
i8s = DType("i8s", 4, "cutlass_ops::TwoOfFour<int8_t>", "int8", _DL_INT)
SPARSE: tuple[DType, ...] = (bf16s, f16s, e4m3s, e5m2s, i8s)
# Types of weights in forms of their own, which only kernels for these read.
OWN: tuple[DType, ...] = (*PACKED, *SPARSE)
STORED_OF: dict[DType, DType] = dict(zip(SPARSE, (bf16, f16, e4m3, e5m2, i8), strict=True))  # types of their elements
# Bytes of metadata: where the stored elements are.
u8 = DType("u8", 8, "uint8_t", "uint8", _DL_UINT)

# Types of a reduction's indices, of sums of products of i8, and of seeds.
i32 = DType("i32", 32, "int32_t", "int32", _DL_INT)
i64 = DType("i64", 64, "int64_t", "int64", _DL_INT)

# Numbers with a fraction. The types that a GEMM multiplies are in cutlass_ops.base.mma.
ALL: tuple[DType, ...] = (f16, bf16, f32, e4m3, e5m2)
FP8: tuple[DType, ...] = (e4m3, e5m2)
INTEGERS: tuple[DType, ...] = (i32, i64)
# Types of operands: of A and B, and of an epilogue's inputs and outputs.
DECLARED: tuple[DType, ...] = (*ALL, tf32, tf32x3, f64, i8, *OWN, u8)
# Element types of tensors.
HELD: tuple[DType, ...] = (*ALL, f64, i8, i32)
# Types that an epilogue reads, reduces to, stores as (M, N), and rounds values to.
READ: tuple[DType, ...] = (f16, bf16, f32)
REDUCED: tuple[DType, ...] = (*READ, i32)
STORED: tuple[DType, ...] = (f16, bf16, f32, *FP8)
ROUNDED: tuple[DType, ...] = (f16, bf16, *FP8)
# Operands of calls with groups of rows.
GROUPED: tuple[DType, ...] = (f16, bf16, *FP8)
# Types that D may have, but no (M, N) input of an epilogue.
UNREAD: tuple[DType, ...] = (*FP8, i8, i32)
# Our names, PyTorch's, and other common names.
NAMES: dict[str, DType] = {t.name: t for t in (*ALL, *INTEGERS)} | {t.torch_name: t for t in (*ALL, *INTEGERS)}
NAMES |= {
    "fp16": f16,
    "half": f16,
    "bfloat": bf16,
    "fp32": f32,
    "float": f32,
    "single": f32,
    "tf32": tf32,
    "tf32x3": tf32x3,
    "3xtf32": tf32x3,
    "f64": f64,
    "fp64": f64,
    "float64": f64,
    "double": f64,
    "i8": i8,
    "int8": i8,
    **{t.name: t for t in (*OWN, u8)},
}


def dtype(name: object, among: tuple[DType, ...] = ALL) -> DType:
    """Look up an element type. Raises ValueError, with the allowed types, if it is unknown or not allowed."""
    found = name if isinstance(name, DType) else NAMES.get(str(name).strip().lower().removeprefix("torch."))
    known = ", ".join(t.name for t in among)
    if found is None:
        raise ValueError(f"unknown dtype {name!r}: use one of {known}")
    if found not in among:
        raise ValueError(f"dtype {str(name)!r} is not supported here: use one of {known}")
    return found
