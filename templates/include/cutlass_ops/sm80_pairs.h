// Values of the column beside, in Sm80 kernels: a visitor of CUTLASS's tree between two others.

#pragma once

#include "cutlass_ops/sm80_visitors.h"

namespace cutlass_ops {
namespace sm80 {

struct NoParams {};

// An access has an even number of neighbours in a row, and begins at an even column.
struct SwapPairs : Visitor<NoParams> {
  using Visitor<NoParams>::Visitor;

  struct Callbacks : EmptyCallbacks {
    template <class Accumulator, class Value, int kVector>
    CUTLASS_DEVICE Array<float, kVector> visit(int, int, int, int, Array<Accumulator, kVector> const&,
                                               Array<Value, kVector> const& values) {
      static_assert(kVector % 2 == 0);
      Array<float, kVector> result;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kVector; ++i) result[i] = float(values[i ^ 1]);
      return result;
    }
  };

  template <class ProblemShape>
  CUTLASS_DEVICE auto get_callbacks(GemmCoord, int, ProblemShape) {
    return Callbacks{};
  }
};

}  // namespace sm80
}  // namespace cutlass_ops
