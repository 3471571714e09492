// FP32 operands that wgmma multiplies in TF32. The instruction cuts the last 13 bits of each element off. TMA can round them
// instead, on the way to shared memory, if its descriptor names the type.

#pragma once

#include "cutlass_ops/mainloop.h"

namespace cutlass_ops {

// As 32 bits without a type, but for what TMA makes of them.
template <cute::GMMA::Major kMajor, class Rows, class Columns, int kStages, class Blocks, int kMatrices>
struct Operand<cutlass::tfloat32_t, kMajor, Rows, Columns, kStages, Blocks, kMatrices>
    : Operand<uint32_t, kMajor, Rows, Columns, kStages, Blocks, kMatrices> {
  using Base = Operand<uint32_t, kMajor, Rows, Columns, kStages, Blocks, kMatrices>;
  using Bits = cutlass::tfloat32_t;

  CUTLASS_DEVICE static auto stage(typename Base::Storage& storage, int index) {
    auto* const data = reinterpret_cast<cutlass::tfloat32_t*>(storage.data() + index * Base::kElements);
    return cute::make_tensor(cute::make_smem_ptr(data), typename Base::Stage{});
  }
};

}  // namespace cutlass_ops
