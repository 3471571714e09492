// CuTe, with a function of ours between it and the driver's that encodes TMA descriptors:
//
// - What is read brings 256 bytes into the L2 cache, not 128, for which CuTe has no parameter. DRAM prefers longer runs: where
//   the weight's bandwidth is the limit, kernels take 0.2 to 1.4% less time.
// - What the driver refuses is an error of the launch. CuTe prints it and goes on with a descriptor of zeros.
// - The driver's function is looked up once, not three times a launch.

#pragma once

#include <tuple>

#if defined(CUTE_HOST_DEVICE)
#error "CuTe was included before cutlass_ops/tma.h, and calls the driver itself"
#endif

#include "cutlass_ops/halves.h"

#include <cuda.h>
#include <cudaTypedefs.h>

#include "cutlass/cuda_host_adapter.hpp"

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

inline auto encoder() {
  static auto const found = find_encoder();
  return found;
}

// Takes what the driver's function takes.
template <class... Arguments>
CUresult driver_cuTensorMapEncodeTiled(Arguments... arguments) {
  auto const encode = encoder();
  std::tuple<Arguments...> all(arguments...);
  std::get<CUtensorMapL2promotion>(all) = CU_TENSOR_MAP_L2_PROMOTION_L2_256B;
  CUresult const error = encode != nullptr ? std::apply(encode, all) : CUDA_ERROR_NOT_SUPPORTED;
  if (error != CUDA_SUCCESS && descriptor_error() == CUDA_SUCCESS) descriptor_error() = error;
  return CUDA_SUCCESS;  // CuTe would print another
}

// Descriptors of another kind, which no kernel here has.
template <class... Arguments>
CUresult driver_cuTensorMapEncodeIm2col(Arguments... arguments) {
  return cutlass::call_cuTensorMapEncodeIm2col(arguments...);
}

}  // namespace cutlass_ops

#undef CUTLASS_CUDA_DRIVER_WRAPPER_CALL
#define CUTLASS_CUDA_DRIVER_WRAPPER_CALL(function) cutlass_ops::driver_##function

#include "cute/tensor.hpp"

namespace cutlass_ops {

// Encodes how TMA reads boxes of a tensor, whose elements lie beside each other along its first mode. The other modes are
// `apart` bytes.
inline void encode(cute::TmaDescriptor& descriptor, CUtensorMapDataType type, uint32_t rank, void const* data,
                   uint64_t const* extents, uint64_t const* apart, uint32_t const* box, CUtensorMapSwizzle swizzle) {
  uint32_t const every[] = {1, 1, 1, 1, 1};
  driver_cuTensorMapEncodeTiled(&descriptor, type, rank, const_cast<void*>(data), extents, apart, box, every,
                                CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_NONE,
                                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

}  // namespace cutlass_ops
