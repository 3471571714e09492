// How kernels that compute one element of D after the other read an (M, N) tensor, and a number.

#pragma once

#include "cutlass_ops/binding.h"

namespace cutlass_ops {

template <class Element, Major kMajor>
CUTLASS_DEVICE Element& element(Matrix const& matrix, int row, int column) {
  return static_cast<Element*>(matrix.data)[kMajor == Major::kRow ? row * matrix.ld + column : row + column * matrix.ld];
}

template <class Element>
CUTLASS_DEVICE float value(Scalar<Element> const& scalar) {
  return float(scalar.ptr == nullptr ? scalar.value : *scalar.ptr);
}

}  // namespace cutlass_ops
