// Means of A's rows read from global memory, where the main loop does not gather them (gather.h): the same sums in the same
// order. Either a small kernel takes them ahead of the GEMM. Or, on Sm90, warps of the GEMM that would be idle take them
// beside its main loop, each row once in the whole grid; then the small kernel only marks all of them as missing. On Sm90
// the GEMM starts while the small kernel runs, and its epilogue waits for what it needs.

#pragma once

#include "cutlass_ops/halves.h"

#include "cutlass_ops/binding.h"
#include "cutlass_ops/gather.h"

namespace cutlass_ops {

// Means of all rows come first in the result, then means of squares, of those that `What` has.
template <class What_, class Element_, Major kMajor, int kAlignment>
struct MeansOfRows {
  using What = What_;
  using Element = Element_;
  struct Params {
    Element const* a;
    int64_t ld;
    int rows;
    int k;
    float inverse_k;
    float* means;
    int* claimed;  // by the warps beside the main loop; every row before is somebody's
  };
  static constexpr int kLanes = 8, kPiece = 8;  // threads that share a row, and elements that one of them reads at once

  // The sums of a row for eight neighbouring lanes, which read so many pieces before they add the first. For whole warps.
  template <int kAtOnce>
  CUTLASS_DEVICE static RowSums<What> sums(Params const& params, int64_t row, int lane) {
    RowSums<What> result;
    if (row < params.rows) {
      CUTLASS_PRAGMA_NO_UNROLL
      for (int64_t k = lane * kPiece; k < params.k; k += kAtOnce * kLanes * kPiece) {
        uint4 pieces[kAtOnce];
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kAtOnce; ++i) pieces[i] = piece(params, row, k + i * kLanes * kPiece);
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kAtOnce; ++i) result.template add<Element>(pieces[i]);
      }
    }
    result.share();
    return result;
  }

  // Means are whole words, so nobody sees a part of one: no order of memory is needed but their own.
  CUTLASS_DEVICE static void publish(Params const& params, int64_t row, RowSums<What> const& sums) {
    if constexpr (What::kMean) store(params.means + row, sums.sum * params.inverse_k);
    if constexpr (What::kMeanSquare) {
      store(params.means + row + (What::kMean ? int64_t(params.rows) : 0), sums.squares * params.inverse_k);
    }
  }

 private:
  CUTLASS_DEVICE static void store(float* at, float value) { *static_cast<float volatile*>(at) = value; }

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

// What wrote A has ended then, for the GEMM as well, which starts after this.
CUTLASS_DEVICE void begin_before_gemm() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// ---- Ahead -------------------------------------------------------------------------------------------------------

template <class Rows>
struct MeansAhead {
  using Params = typename Rows::Params;
  static constexpr int kThreads = 128, kRows = kThreads / Rows::kLanes;
  static constexpr int kAtOnce = 16;  // threads would else wait for memory most of the time

  static int64_t blocks(Problem problem, int64_t) { return (int64_t(problem.m) + kRows - 1) / kRows; }

  CUTLASS_DEVICE static void run(Params const& params) {
    begin_before_gemm();
    int64_t const row = int64_t(blockIdx.x) * kRows + int(threadIdx.x) / Rows::kLanes;
    int const lane = int(threadIdx.x) % Rows::kLanes;
    auto const sums = Rows::template sums<kAtOnce>(params, row, lane);
    if (row < params.rows && lane == 0) Rows::publish(params, row, sums);
  }
};

// ---- Beside ------------------------------------------------------------------------------------------------------

// A mean that may not be there yet: no sum of squares or of elements has these bits, for NaN has others where it is computed.
struct Awaited {
  static constexpr uint32_t kMissing = 0xffffffff;
  uint32_t bits;

  Awaited() = default;
  CUTLASS_HOST_DEVICE explicit Awaited(float value) : bits(__builtin_bit_cast(uint32_t, value)) {}
  CUTLASS_HOST_DEVICE explicit operator float() const { return __builtin_bit_cast(float, bits); }

  CUTLASS_DEVICE static Awaited peek(Awaited const* at) {
    Awaited found;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(found.bits) : "l"(at) : "memory");
    return found;
  }
  // Whoever took the row is running, and waits for nobody.
  CUTLASS_DEVICE static void settle(Awaited& found, Awaited const* at) {
    while (found.bits == kMissing) {
      asm volatile("nanosleep.u32 20;");
      found = peek(at);
    }
  }
};

// Marks all means as missing, and all rows as nobody's: the number before the first is claimed.
template <class Rows>
struct NoMeansYet {
  using Params = typename Rows::Params;
  static constexpr int kThreads = 128, kBytes = kThreads * int(sizeof(uint4));

  static int64_t blocks(Problem, int64_t bytes) { return (bytes + kBytes - 1) / kBytes; }

  CUTLASS_DEVICE static void run(Params const& params) {
    begin_before_gemm();
    int64_t const at = int64_t(blockIdx.x) * kThreads + int(threadIdx.x);
    // The counter and the means, each beginning at a whole number of these.
    int64_t const words = int64_t(params.rows) * Rows::What::kCount + (params.means - reinterpret_cast<float*>(params.claimed));
    if (at * 4 < words) reinterpret_cast<uint4*>(params.claimed)[at] = {~0u, ~0u, ~0u, ~0u};
  }
};

// The work of idle warps, whichever run: they claim a few rows at a time in the order of the rows, and so does whoever comes
// later. None waits for another, so all rows are taken even if parts of the grid have yet to start.
template <class Rows>
CUTLASS_DEVICE void take_means_beside(typename Rows::Params const& params) {
  constexpr int kRows = 32 / Rows::kLanes;  // of a warp
  constexpr int kAtOnce = 4;                // no more fit in these warps' registers
  asm volatile("griddepcontrol.wait;" ::: "memory");
  int const lane = int(threadIdx.x) % 32;
  auto const claim = [&] { return lane == 0 ? atomicAdd(params.claimed, 1) + 1 : 0; };
  for (int next = claim();;) {
    int64_t const first = int64_t(__shfl_sync(0xffffffff, next, 0)) * kRows;
    if (first >= params.rows) return;
    next = claim();
    int64_t const row = first + lane / Rows::kLanes;
    auto const sums = Rows::template sums<kAtOnce>(params, row, lane % Rows::kLanes);
    if (row < params.rows && lane % Rows::kLanes == 0) Rows::publish(params, row, sums);
  }
}

#if CUTLASS_OPS_HOST

inline Awaited const* awaited(float const* means) { return reinterpret_cast<Awaited const*>(means); }

// Bytes before the means, for the counter.
constexpr int64_t kClaimedBytes = 256;

// Bytes of all, rounded up so that what follows in a workspace is aligned.
template <class What>
int64_t means_bytes(Problem problem) {
  constexpr int64_t kAlignment = 256;
  int64_t const bytes = int64_t(problem.m) * What::kCount * int64_t(sizeof(float));
  return kClaimedBytes + (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

template <class Rows>
typename Rows::Params means_params(Matrix const& a, Problem problem, void* workspace) {
  auto* const claimed = static_cast<int*>(workspace);
  auto* const means = reinterpret_cast<float*>(static_cast<char*>(workspace) + kClaimedBytes);
  return {a.ptr<typename Rows::Element>(), a.ld, problem.m, problem.k, 1.0f / float(problem.k), means, claimed};
}

// Launches what comes before the GEMM; `overlap` lets it start while the kernel before it in the stream is still ending.
template <class Kernel>
cudaError_t launch_means(void const* kernel, Problem problem, typename Kernel::Params params, int64_t bytes,
                         cudaStream_t stream, bool overlap) {
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(Kernel::blocks(problem, bytes)));
  config.blockDim = dim3(Kernel::kThreads);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = overlap ? 1 : 0;
  void* arguments[] = {&params};
  return cudaLaunchKernelExC(&config, kernel, arguments);
}

#endif  // CUTLASS_OPS_HOST

}  // namespace cutlass_ops
