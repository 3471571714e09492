// What reductions do with values: for each, the value of nothing, what one element counts as, and how two values join.

#pragma once

#include "cutlass_ops/epilogue_math.h"

namespace cutlass_ops {
namespace reduce {

struct Sum {
  CUTLASS_DEVICE static float identity() { return 0.0f; }
  CUTLASS_DEVICE static float lift(float x) { return x; }
  CUTLASS_DEVICE static float combine(float x, float y) { return x + y; }
};

struct SumSquare : Sum {
  CUTLASS_DEVICE static float lift(float x) { return x * x; }
};

// NaN wins, as in torch.amax.
struct Max {
  CUTLASS_DEVICE static float identity() { return -infinity(); }
  CUTLASS_DEVICE static float lift(float x) { return x; }
  CUTLASS_DEVICE static float combine(float x, float y) { return maximum(x, y); }
};

}  // namespace reduce
}  // namespace cutlass_ops
