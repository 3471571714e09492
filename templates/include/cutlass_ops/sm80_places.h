// Values that depend on their place, in Sm80 kernels: leaves of CUTLASS's tree that read no memory.

#pragma once

#include "cutlass_ops/places.h"
#include "cutlass_ops/sm80_visitors.h"

namespace cutlass_ops {
namespace sm80 {

// `Functor` gives the value of a row and a column of D. Where the kernel computes the transposed problem, its own rows are
// D's columns.
template <class ThreadMap, class Functor, bool kSwapped>
struct PlaceInput : Visitor<PlaceArguments<Functor>> {
  using Visitor<PlaceArguments<Functor>>::Visitor;
  using At = Accesses<ThreadMap>;

  struct Callbacks : EmptyCallbacks {
    Functor functor;
    int row, column;  // of the thread's first access

    CUTLASS_DEVICE Callbacks(Functor const& functor, At at) : functor(functor), row(at.row), column(at.column) {}

    template <class Accumulator, int kVector>
    CUTLASS_DEVICE Array<float, kVector> visit(int step, int row_idx, int column_idx, int,
                                               Array<Accumulator, kVector> const&) {
      int const m = row + At::row_offset(step, row_idx), n = column + At::column_offset(column_idx);
      Array<float, kVector> result;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kVector; ++i) result[i] = kSwapped ? functor(n + i, m) : functor(m, n + i);
      return result;
    }
  };

  template <class ProblemShape>
  CUTLASS_DEVICE auto get_callbacks(GemmCoord tile, int thread_idx, ProblemShape) {
    return Callbacks(this->params_->functor(), At(tile, thread_idx));
  }
};

}  // namespace sm80
}  // namespace cutlass_ops
