// Means of A's rows that the main loop does not gather (gather.h): what the kernels take that do, and how a launch gives it.

#pragma once

#include "cutlass_ops/halves.h"

#include "cutlass_ops/binding.h"

namespace cutlass_ops {

// Which means an epilogue wants: of a row's elements, of their squares.
template <bool kMean_, bool kMeanSquare_>
struct WhichMeans {
  static constexpr bool kMean = kMean_, kMeanSquare = kMeanSquare_;
  static constexpr int kCount = int(kMean) + int(kMeanSquare);
};

// Means of all rows come first in the result, then means of squares, of those that are wanted.
template <class Element>
struct RowsToRead {
  Element const* a;
  int64_t ld;
  int rows;
  int k;
  float inverse_k;
  float* means;
};

// Of a kernel ahead of the GEMM, each warp of which takes a row.
constexpr int kMeansThreads = 128;

#if CUTLASS_OPS_HOST

template <class Element>
RowsToRead<Element> rows_of(Matrix const& a, Problem problem) {
  return {a.ptr<Element>(), a.ld, problem.m, problem.k, 1.0f / float(problem.k), nullptr};
}

// Bytes of the means, rounded up so that what follows in a workspace is aligned.
template <class What>
int64_t means_bytes(Problem problem) {
  constexpr int64_t kAlignment = 256;
  return (int64_t(problem.m) * What::kCount * int64_t(sizeof(float)) + kAlignment - 1) / kAlignment * kAlignment;
}

// `overlap` lets it start while the kernel before it in the stream is still ending.
template <class Params>
cudaError_t launch_means_ahead(void const* kernel, Params const& params, Queue const& queue, bool overlap) {
  constexpr int kRows = kMeansThreads / 32;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned((int64_t(params.rows) + kRows - 1) / kRows));
  config.blockDim = dim3(kMeansThreads);
  config.attrs = &attribute;
  config.numAttrs = overlap ? 1 : 0;
  return queue.launch(config, kernel, params);
}

#endif  // CUTLASS_OPS_HOST

}  // namespace cutlass_ops
