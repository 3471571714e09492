// Descriptors by which TMA copies, as the driver makes them:
//
// - What is read brings 256 bytes into the L2 cache, not 128, for which CuTe has no parameter. DRAM prefers longer runs: where
//   the weight's bandwidth is the limit, kernels take 0.2 to 1.4% less time.
// - What the driver refuses is an error of the launch. CuTe prints it and goes on with a descriptor of zeros.
// - The driver's function is looked up once, not at each launch.

#pragma once

#include <cstdint>

#include "cutlass_ops/halves.h"

#include <cuda.h>
#include <cudaTypedefs.h>

#if CUTLASS_OPS_HOST
namespace cutlass_ops {

// The first refusal in this thread since it was last set to CUDA_SUCCESS.
inline CUresult& descriptor_error() {
  static thread_local CUresult error = CUDA_SUCCESS;
  return error;
}

inline auto find_encoder() {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
  cudaError_t const error =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
  bool const there = error == cudaSuccess && result == cudaDriverEntryPointSuccess;
  return there ? reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(found) : nullptr;
}

// Encodes how TMA reads or writes boxes of a tensor, whose elements lie beside each other along its first mode. The other modes
// are `apart` bytes.
inline void encode(CUtensorMap& descriptor, CUtensorMapDataType type, uint32_t rank, void const* data,
                   uint64_t const* extents, uint64_t const* apart, uint32_t const* box, CUtensorMapSwizzle swizzle) {
  static auto const encoder = find_encoder();
  uint32_t const every[] = {1, 1, 1, 1, 1};
  CUresult error = CUDA_ERROR_NOT_SUPPORTED;
  if (encoder != nullptr) {
    error = encoder(&descriptor, type, rank, const_cast<void*>(data), extents, apart, box, every,
                    CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                    CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  }
  if (descriptor_error() == CUDA_SUCCESS) descriptor_error() = error;
}

}  // namespace cutlass_ops
#endif
