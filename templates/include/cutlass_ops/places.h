// Rows and columns of D as values of an epilogue.
//
// Visitors of CUTLASS's pass FP32 values from one to the next, and these hold no whole number beyond 2^24. So an index
// travels as the bits of one, and functions take it back.

#pragma once

#include "cutlass/cutlass.h"

#if !defined(__CUDACC__)
int __float_as_int(float);  // declared by nvcc; see halves.h
#endif

namespace cutlass_ops {

CUTLASS_DEVICE float index_bits(int index) { return __int_as_float(index); }
CUTLASS_DEVICE int index_of(float bits) { return __float_as_int(bits); }

// What a value is made of that only depends on its place: a functor of row and column of D, and one of an even column and
// the next.
struct RowOfPlace {
  CUTLASS_DEVICE float operator()(int row, int) const { return index_bits(row); }
  CUTLASS_DEVICE float2 pair(int row, int) const { return {index_bits(row), index_bits(row)}; }
};
struct ColumnOfPlace {
  CUTLASS_DEVICE float operator()(int, int column) const { return index_bits(column); }
  CUTLASS_DEVICE float2 pair(int, int column) const { return {index_bits(column), index_bits(column + 1)}; }
};

// The launch arguments of such a value, of which rows and columns need none.
template <class Functor>
struct PlaceArguments {
  CUTLASS_DEVICE Functor functor() const { return {}; }
};

}  // namespace cutlass_ops
