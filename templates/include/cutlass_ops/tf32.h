// FP32 operands that wgmma multiplies in TF32. The instruction cuts the last 13 bits of each element off. TMA can round them
// instead, on the way to shared memory, if its descriptor names the type.

#pragma once

#include "cutlass_ops/mainloop.h"

namespace cutlass_ops {

// As 32 bits without a type, but for what TMA makes of them.
template <cute::GMMA::Major kMajor, class Rows, class Columns, int kStages, class Blocks, int kMatrices, int kAtOnce>
struct Operand<cutlass::tfloat32_t, kMajor, Rows, Columns, kStages, Blocks, kMatrices, kAtOnce>
    : Operand<uint32_t, kMajor, Rows, Columns, kStages, Blocks, kMatrices, kAtOnce> {
  using Bits = cutlass::tfloat32_t;
};

}  // namespace cutlass_ops
