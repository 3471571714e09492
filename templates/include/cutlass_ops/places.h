// Rows and columns of D as values of an epilogue.
//
// CUTLASS's visitors pass FP32 values, which do not hold all whole numbers beyond 2^24. So an index travels as the bits of
// an FP32 value, and functions take it back.

#pragma once

#include "cutlass_ops/halves.h"

#include "cutlass/detail/helper_macros.hpp"

#if !defined(__CUDACC__)
int __float_as_int(float);  // declared by nvcc; see halves.h
#endif

namespace cutlass_ops {

CUTLASS_DEVICE float index_bits(int index) { return __int_as_float(index); }
CUTLASS_DEVICE int index_of(float bits) { return __float_as_int(bits); }

// The values of two rows and two columns, each eight apart, as a thread has them in a fragment of wgmma, whichever of the two
// problems the kernel computes.
struct Quad {
  float at[2][2];  // by row and column
};

// A value that only depends on its place. It has two functors: one of a row and a column of D, and one of a row and a column
// that begin a quad, which have an even number of eights before them.
struct RowOfPlace {
  CUTLASS_DEVICE float operator()(int row, int) const { return index_bits(row); }
  CUTLASS_DEVICE Quad quad(int row, int) const {
    float const first = index_bits(row), second = index_bits(row + 8);
    return {{{first, first}, {second, second}}};
  }
};
struct ColumnOfPlace {
  CUTLASS_DEVICE float operator()(int, int column) const { return index_bits(column); }
  CUTLASS_DEVICE Quad quad(int, int column) const {
    float const first = index_bits(column), second = index_bits(column + 8);
    return {{{first, second}, {first, second}}};
  }
};

// The launch arguments of such a value, of which rows and columns need none.
template <class Functor>
struct PlaceArguments {
  CUTLASS_DEVICE Functor functor() const { return {}; }
};

}  // namespace cutlass_ops
