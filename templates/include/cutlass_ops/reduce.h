// What reductions do with values: for each, what it keeps, that of nothing, what one element counts as, which has a place
// along the row or column that is reduced, and how two join.

#pragma once

#include "cutlass_ops/epilogue_math.h"

namespace cutlass_ops {

#if defined(__CUDACC__)

// What another lane keeps, and what another thread block has left. Those of two numbers have overloads (reductions.h).
CUTLASS_DEVICE float shuffle_xor(float x, int lanes) { return __shfl_xor_sync(0xffffffff, x, lanes); }
CUTLASS_DEVICE float load_part(float const* at) { return __ldcg(at); }

#endif

namespace reduce {

struct Sum {
  using State = float;
  CUTLASS_DEVICE static float identity() { return 0.0f; }
  CUTLASS_DEVICE static float lift(float x, int) { return x; }
  CUTLASS_DEVICE static float combine(float x, float y) { return x + y; }
};

struct SumSquare : Sum {
  CUTLASS_DEVICE static float lift(float x, int) { return x * x; }
};

// NaN wins, as in torch.amax.
struct Max {
  using State = float;
  CUTLASS_DEVICE static float identity() { return -infinity(); }
  CUTLASS_DEVICE static float lift(float x, int) { return x; }
  CUTLASS_DEVICE static float combine(float x, float y) { return maximum(x, y); }
};

}  // namespace reduce

// What several elements of one result keep together: their values, their places along the row or column, which grow, and
// whether they are there at all. A reduction of two numbers has a way of its own.
template <class Reduce, int kCount>
CUTLASS_DEVICE typename Reduce::State fold(float const (&x)[kCount], int const (&at)[kCount], bool const (&there)[kCount]) {
  if constexpr (sizeof(typename Reduce::State) > sizeof(float)) {
    return Reduce::fold(x, at, there);
  } else {
    float kept = there[0] ? Reduce::lift(x[0], at[0]) : Reduce::identity();
    CUTLASS_PRAGMA_UNROLL
    for (int i = 1; i < kCount; ++i) {
      kept = Reduce::combine(kept, there[i] ? Reduce::lift(x[i], at[i]) : Reduce::identity());
    }
    return kept;
  }
}

// What is stored of what a reduction has kept.
template <class Reduce, class Element>
CUTLASS_DEVICE Element result_of(typename Reduce::State const& kept) {
  if constexpr (cutlass::platform::is_same<typename Reduce::State, float>::value) {
    return Element(kept);
  } else {
    return Element(Reduce::result(kept));
  }
}

}  // namespace cutlass_ops
