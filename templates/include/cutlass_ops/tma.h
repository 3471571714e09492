// CuTe, with one constant of its TMA descriptors changed: what is read brings 256 bytes into the L2 cache, not 128. DRAM
// prefers longer runs: where the weight's bandwidth is the limit, kernels take 0.3 to 1.4% less time. CuTe has no parameter
// for it, so the constant's name means another one while CuTe is read. And what CuTe leaves out: a look at the result.

#pragma once

#if defined(CUTE_HOST_DEVICE)
#error "CuTe was included before cutlass_ops/tma.h, with its own constant"
#endif

#include <algorithm>

#include "cutlass_ops/halves.h"

#include <cuda.h>

#define CU_TENSOR_MAP_L2_PROMOTION_L2_128B CU_TENSOR_MAP_L2_PROMOTION_L2_256B
#include "cute/tensor.hpp"
#undef CU_TENSOR_MAP_L2_PROMOTION_L2_128B

namespace cutlass_ops {

// Whether the driver encoded a descriptor. Where it does not, CuTe prints that and goes on with zeros.
inline bool is_encoded(cute::TmaDescriptor const& descriptor) {
  auto const* const words = reinterpret_cast<uint64_t const*>(&descriptor);
  return std::any_of(words, words + sizeof(descriptor) / sizeof(*words), [](uint64_t word) { return word != 0; });
}

}  // namespace cutlass_ops
