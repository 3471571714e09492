// Reductions of the (M, N) result to one value for each row or each column, in two steps that always give the same bits:
// each thread block writes the partial value of its tile, and a second kernel combines those in a fixed order. Atomic
// additions would need no second kernel, but they need an output that is initialised beforehand. Their order would be that
// in which thread blocks happen to finish.

#pragma once

#include <cstdint>

#include "cutlass_ops/halves.h"

#include "cutlass/cutlass.h"
#include "cutlass/numeric_conversion.h"

#include "cutlass_ops/reduce.h"

namespace cutlass_ops {
namespace sm80 {

constexpr int kFinishWidth = 32;   // results of one block: neighbours, so that reads coalesce
constexpr int kFinishHeight = 16;  // threads that share a result's partial values

// out[i] = combination over p of partial[p * length + i], a (parts, length) buffer.
template <class Reduce, class Element>
struct Finish {
  using State = typename Reduce::State;
  struct Params {
    State const* partial;
    Element* out;
    int64_t length;
    int parts;
  };
  static constexpr int kThreads = kFinishWidth * kFinishHeight;

  CUTLASS_DEVICE static void run(Params const& params) {
    __shared__ State shared[kFinishHeight][kFinishWidth];
    int64_t const i = int64_t(blockIdx.x) * kFinishWidth + threadIdx.x;

    State value = Reduce::identity();
    if (i < params.length) {
      for (int part = threadIdx.y; part < params.parts; part += kFinishHeight) {
        value = Reduce::combine(value, params.partial[part * params.length + i]);
      }
    }
    shared[threadIdx.y][threadIdx.x] = value;
    __syncthreads();

    if (threadIdx.y == 0 && i < params.length) {
      for (int y = 1; y < kFinishHeight; ++y) {
        value = Reduce::combine(value, shared[y][threadIdx.x]);
      }
      params.out[i] = result_of<Reduce, Element>(value);
    }
  }
};

// Launches a `Finish` kernel, whose handle is `kernel`.
template <class Params>
cudaError_t finish_reduction(void const* kernel, Params const& params, Queue const& queue) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned((params.length + kFinishWidth - 1) / kFinishWidth));
  config.blockDim = dim3(kFinishWidth, kFinishHeight);
  return queue.launch(config, kernel, params);
}

}  // namespace sm80
}  // namespace cutlass_ops
