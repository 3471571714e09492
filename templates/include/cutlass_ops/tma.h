// CuTe, with a function of ours between it and the driver's that encodes TMA descriptors:
//
// - What is read brings 256 bytes into the L2 cache, not 128, for which CuTe has no parameter. DRAM prefers longer runs: where
//   the weight's bandwidth is the limit, kernels take 0.2 to 1.4% less time.
// - What the driver refuses is an error of the launch. CuTe prints it and goes on with a descriptor of zeros.
// - The driver's function is looked up once, not three times a launch.
// - A descriptor's box can have fewer rows than CuTe's layouts say, which are static (`Shortened`).

#pragma once

#include <algorithm>
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

// While one lives, boxes of descriptors that this thread encodes have `left` rows for `rows`: their second extent, in an
// operand with K along its lines.
class Shortened {
 public:
  Shortened(uint32_t rows, uint32_t left) : rows_(rows), left_(left) { current() = this; }
  ~Shortened() { current() = nullptr; }
  Shortened(Shortened const&) = delete;

  static Shortened*& current() {
    static thread_local Shortened* shortened = nullptr;
    return shortened;
  }
  bool apply(uint32_t* box) const {
    bool const expected = box[1] == rows_;
    box[1] = left_;
    return expected;
  }

 private:
  uint32_t rows_, left_;
};

// Takes what the driver's function takes.
template <class... Arguments>
CUresult driver_cuTensorMapEncodeTiled(Arguments... arguments) {
  static auto const encode = find_encoder();
  std::tuple<Arguments...> all(arguments...);
  std::get<CUtensorMapL2promotion>(all) = CU_TENSOR_MAP_L2_PROMOTION_L2_256B;
  constexpr int kRank = 2, kBox = 6, kMost = 5;
  bool legal = encode != nullptr;
  uint32_t box[kMost];
  if (auto const* const shortened = Shortened::current()) {
    std::copy_n(std::get<kBox>(all), std::get<kRank>(all), box);
    legal = legal && shortened->apply(box);
    std::get<kBox>(all) = box;
  }
  CUresult const error = legal ? std::apply(encode, all) : CUDA_ERROR_NOT_SUPPORTED;
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
