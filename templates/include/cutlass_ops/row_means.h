// A small kernel that takes means of A's rows ahead of the GEMM, where its main loop does not gather them (gather.h): the
// same sums in the same order. On Sm90 the GEMM starts while it runs, and waits for it before its first epilogue only.

#pragma once

#include "cutlass_ops/halves.h"

#include "cutlass_ops/binding.h"
#include "cutlass_ops/gather.h"

namespace cutlass_ops {

// Means of all rows come first in the result, then means of squares, of those that `What` has.
template <class What, class Element, Major kMajor, int kAlignment>
struct MeansAhead {
  struct Params {
    Element const* a;
    int64_t ld;
    int rows;
    int k;
    float inverse_k;
    float* means;
  };
  static constexpr int kThreads = 128, kLanes = 8, kPiece = 8, kRows = kThreads / kLanes;

  CUTLASS_DEVICE static void run(Params const& params) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    // What wrote A has ended then, for the GEMM as well, which starts after this.
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;");
#endif
    int const row = int(blockIdx.x) * kRows + int(threadIdx.x) / kLanes;
    int const lane = int(threadIdx.x) % kLanes;
    RowSums<What> sums;
    if (row < params.rows) {
      // Several at a time: a row's lanes would else wait for memory most of the time.
      constexpr int kAtOnce = 8;
      uint4 pieces[kAtOnce];
      for (int64_t k = lane * kPiece; k < params.k; k += kAtOnce * kLanes * kPiece) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kAtOnce; ++i) pieces[i] = piece(params, row, k + i * kLanes * kPiece);
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kAtOnce; ++i) sums.template add<Element>(pieces[i]);
      }
    }
    sums.share();
    if (row >= params.rows || lane != 0) return;
    if constexpr (What::kMean) params.means[row] = sums.sum * params.inverse_k;
    if constexpr (What::kMeanSquare) {
      params.means[row + (What::kMean ? int64_t(params.rows) : 0)] = sums.squares * params.inverse_k;
    }
  }

 private:
  // Eight elements of a row, with zeros beyond its end.
  CUTLASS_DEVICE static uint4 piece(Params const& params, int64_t row, int64_t k) {
    uint4 result{0, 0, 0, 0};
    if constexpr (kMajor == Major::kRow && kAlignment == kPiece) {
      if (k + kPiece <= params.k) return *reinterpret_cast<uint4 const*>(params.a + row * params.ld + k);
    }
    auto* const elements = reinterpret_cast<Element*>(&result);
    for (int i = 0; i < kPiece && k + i < params.k; ++i) {
      elements[i] = params.a[kMajor == Major::kRow ? row * params.ld + k + i : row + (k + i) * params.ld];
    }
    return result;
  }
};

#if CUTLASS_OPS_HOST

// `overlap` lets it start while the kernel before it in the stream is still ending.
template <class Kernel, class Element>
cudaError_t take_means_ahead(void const* kernel, Matrix const& a, Problem problem, float* means, cudaStream_t stream,
                             bool overlap) {
  typename Kernel::Params params{a.ptr<Element>(), a.ld, problem.m, problem.k, 1.0f / float(problem.k), means};
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned((int64_t(problem.m) + Kernel::kRows - 1) / Kernel::kRows));
  config.blockDim = dim3(Kernel::kThreads);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = overlap ? 1 : 0;
  void* arguments[] = {&params};
  return cudaLaunchKernelExC(&config, kernel, arguments);
}

// Bytes of the result, rounded up so that what follows in a workspace is aligned.
template <class What>
int64_t means_bytes(Problem problem) {
  constexpr int64_t kAlignment = 256;
  return (int64_t(problem.m) * What::kCount * int64_t(sizeof(float)) + kAlignment - 1) / kAlignment * kAlignment;
}

#endif  // CUTLASS_OPS_HOST

}  // namespace cutlass_ops
