// Means of A's rows read from global memory, where the main loop does not gather them (gather.h): the same sums in the same
// order. Either a small kernel takes them ahead of the GEMM. On Sm90, the GEMM starts while that kernel runs, and waits for
// it only before its first epilogue. Or, on Sm90, idle warps take them beside the main loop (means_beside.h).

#pragma once

#include "cutlass_ops/halves.h"

#include "cutlass_ops/binding.h"
#include "cutlass_ops/gather.h"

namespace cutlass_ops {

template <class What_, class Element_, Major kMajor, int kAlignment>
struct RowReader {
  using What = What_;
  using Element = Element_;
  using Params = RowsToRead<Element>;
  // Segments that a warp adds up at a time, elements of one that its lanes read together, and whether they do so in pieces.
  static constexpr int kSegments = 32 / kRowLanes, kStep = kRowLanes * kRowPiece;
  static constexpr bool kWhole = kMajor == Major::kRow && kAlignment == kRowPiece;

  // The sums of a row, one warp's: each eight lanes of it have segments of their own, and read so many pieces before they
  // add the first.
  template <int kAtOnce>
  CUTLASS_DEVICE static RowSums<What> sums(Params const& params, int64_t row) {
    int const own = int(threadIdx.x) % kRowLanes, group = int(threadIdx.x) % 32 / kRowLanes;
    auto const k_end = unsigned(params.k);
    RowSums<What> result;
    CUTLASS_PRAGMA_NO_UNROLL
    for (unsigned first = 0; first < k_end; first += kSegments * kSegment) {
      RowSums<What> segment;
      unsigned const begin = first + group * kSegment, end = cute::min(begin + kSegment, k_end);
      unsigned k = begin + own * kRowPiece;
      CUTLASS_PRAGMA_NO_UNROLL
      for (; k < end; k += kAtOnce * kStep) {
        uint4 pieces[kAtOnce];
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kAtOnce; ++i) pieces[i] = piece(params, row, k + i * kStep);
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kAtOnce; ++i) segment.template add<Element>(pieces[i]);
      }
      close(params, row, first, segment, result);
    }
    result.share();
    return result;
  }

  // Ends a warp's segments from the given first one on: adds the elements that fill no whole piece, and the segments to the
  // row's sums.
  CUTLASS_DEVICE static void close(Params const& params, int64_t row, unsigned first, RowSums<What>& segment,
                                   RowSums<What>& sums) {
    int const own = int(threadIdx.x) % kRowLanes, group = int(threadIdx.x) % 32 / kRowLanes;
    if constexpr (kWhole) {
      unsigned const begin = first + group * kSegment;
      // The last elements are a part of some lane's last piece. Read one by one they cost the others no registers.
      auto const k_end = unsigned(params.k);
      unsigned const rest = k_end - k_end % kRowPiece;
      if (rest - begin < unsigned(kSegment) && rest / kRowPiece % kRowLanes == unsigned(own)) {
        CUTLASS_PRAGMA_NO_UNROLL
        for (unsigned at = rest; at < k_end; ++at) segment.add(float(params.a[row * params.ld + at]));
      }
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kSegments; ++i) sums.add(segment.of_lane(i * kRowLanes + own));
  }

  // Starts to bring a row into the L2 cache: called by one thread, of a kernel for Sm90.
  CUTLASS_DEVICE static void prefetch(Params const& params, int64_t row) {
    unsigned const bytes = unsigned(params.k) / kRowPiece * (kRowPiece * sizeof(Element));
    if (!kWhole || bytes == 0) return;
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(params.a + row * params.ld), "r"(bytes) : "memory");
  }

  // Stores a row's means, as `store` does.
  template <class Store>
  CUTLASS_DEVICE static void publish(Params const& params, int64_t row, RowSums<What> const& sums, Store store) {
    if constexpr (What::kMean) store(params.means + row, sums.sum * params.inverse_k);
    if constexpr (What::kMeanSquare) {
      store(params.means + row + (What::kMean ? int64_t(params.rows) : 0), sums.squares * params.inverse_k);
    }
  }

 private:
  // Eight elements of a row, with zeros beyond its end. Where they are read as a whole, a part of them is nothing.
  CUTLASS_DEVICE static uint4 piece(Params const& params, int64_t row, unsigned k) {
    uint4 result{0, 0, 0, 0};
    if constexpr (kWhole) {
      if (k + kRowPiece <= unsigned(params.k)) result = *reinterpret_cast<uint4 const*>(params.a + row * params.ld + k);
    } else {
      auto* const elements = reinterpret_cast<Element*>(&result);
      for (int i = 0; i < kRowPiece && k + i < unsigned(params.k); ++i) {
        elements[i] = params.a[kMajor == Major::kRow ? row * params.ld + k + i : row + int64_t(k + i) * params.ld];
      }
    }
    return result;
  }
};

// A kernel ahead of the GEMM.
template <class Rows>
struct MeansAhead {
  using Params = typename Rows::Params;
  static constexpr int kThreads = kMeansThreads, kRows = kThreads / 32;
  static constexpr int kAtOnce = 16;  // a whole segment: threads would else wait for memory most of the time

  CUTLASS_DEVICE static void run(Params const& params) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    // What wrote A has ended then, for the GEMM as well, which starts after this.
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;");
#endif
    int64_t const row = int64_t(blockIdx.x) * kRows + int(threadIdx.x) / 32;
    if (row >= params.rows) return;
    auto const sums = Rows::template sums<kAtOnce>(params, row);
    if (threadIdx.x % 32 == 0) Rows::publish(params, row, sums, [](float* at, float mean) { *at = mean; });
  }
};

}  // namespace cutlass_ops
