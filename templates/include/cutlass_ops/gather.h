// The sums of each row of A, and of its squares, gathered while the Tensor Cores multiply. The threads that issue wgmma also
// read each stage of A from shared memory, after they issued one step and before they wait for the step before.

#pragma once

#include "cutlass_ops/halves.h"

#include "cutlass_ops/row_sums.h"

#include "cute/tensor.hpp"
#include "cutlass/arch/barrier.h"

namespace cutlass_ops {

// Warpgroups are counted from the first that multiplies. To be called by whole warps.
CUTLASS_DEVICE int consumer_group() { return cutlass::canonical_warp_group_idx() - 1; }

// Where the means of a tile's rows lie until its epilogue reads them, for all tiles that are under way in a thread block.
// Main loop and epilogue both know the type, and so the address: CUTLASS's kernels cannot pass it on. The size keeps the
// shared memory behind it aligned, where TMA writes.
template <class What_, int kRows_, int kTiles>
struct TileMeans {
  using What = What_;
  static constexpr int kRows = kRows_, kAlignment = 1024;
  static constexpr int kBytes = (kTiles * What::kCount * kRows * int(sizeof(float)) + kAlignment - 1) / kAlignment * kAlignment;

  // Of the tile that a warpgroup works on.
  CUTLASS_DEVICE static float* mean(int group) { return of(group); }
  CUTLASS_DEVICE static float* mean_square(int group) { return of(group) + (What::kMean ? kRows : 0); }

 private:
  CUTLASS_DEVICE static float* of(int group) {
    alignas(kAlignment) __shared__ float means[kBytes / sizeof(float)];
    return means + (kTiles == 1 ? 0 : group) * (What::kCount * kRows);
  }
};

// One of the two, for a visitor.
template <class Means>
struct MeanOfRows {
  CUTLASS_DEVICE static float const* values() { return Means::mean(consumer_group()); }
};
template <class Means>
struct MeanSquareOfRows {
  CUTLASS_DEVICE static float const* values() { return Means::mean_square(consumer_group()); }
};

// One warpgroup's share of the rows. `Stage` is the layout of one step's tile of A, with K along each row of memory, and
// `kSharing` warpgroups have a tile in common.
template <class Means, class Element, class Stage, int kSharing>
class Gather {
  using What = typename Means::What;
  static constexpr int kRows = cute::size<0>(Stage{}), kColumns = cute::size<1>(Stage{});
  static constexpr int kLine = kRowLanes * kRowPiece, kPieces = kColumns / kLine;  // 128 bytes, and a lane's in a stage
  static constexpr int kTogether = 128 / kRowLanes * kSharing;  // rows that are read at a time
  static constexpr int kRounds = (kRows + kTogether - 1) / kTogether;
  static_assert(kColumns % kLine == 0 && kSegment % kColumns == 0, "whole lines of 128 bytes");
  static_assert(kRows % 8 == 0 && kRows == Means::kRows);
  static constexpr int kMeeting = 4;  // of the barriers that CUTLASS leaves to others

 public:
  template <class Storage>
  CUTLASS_DEVICE explicit Gather(Storage& storage)
      : group_(consumer_group()), row_(((kSharing == 1 ? 0 : group_) * 128 + int(threadIdx.x) % 128) / kRowLanes) {
    auto const tile = cute::make_tensor(cute::make_smem_ptr(storage.data()), Stage{});
    first_ = cute::cast_smem_ptr_to_uint(cute::raw_pointer_cast(&tile(row_ % kRows, int(threadIdx.x) % kRowLanes * kRowPiece)));
  }

  // Waits until all of the warpgroup have read the stage before: it may be released then.
  CUTLASS_DEVICE void meet() const { cutlass::arch::NamedBarrier::sync(128, uint32_t(kMeeting + group_)); }

  // Adds a stage, which must have arrived.
  CUTLASS_DEVICE void add(int stage) {
    uint32_t const from = first_ + uint32_t(stage * cute::cosize_v<Stage> * sizeof(Element));
    CUTLASS_PRAGMA_UNROLL
    for (int round = 0; round < kRounds; ++round) {
      if (kRows % kTogether != 0 && row_ + round * kTogether >= kRows) break;
      CUTLASS_PRAGMA_UNROLL
      for (int piece = 0; piece < kPieces; ++piece) {
        // In another block of 8 by 64 elements, of 1024 bytes, at the same place: swizzled alike.
        int const block = Stage{}.layout_b()(round * kTogether, piece * kLine);
        segment_[round].template add<Element>(read(from + uint32_t(block * sizeof(Element))));
      }
    }
    columns_ += kColumns;
    if (columns_ % kSegment == 0) end_segment();
  }

  // Leaves the means where the epilogue finds them once the threads that work on the tile have met.
  CUTLASS_DEVICE void finish(float inverse_k) {
    meet();
    end_segment();
    CUTLASS_PRAGMA_UNROLL
    for (int round = 0; round < kRounds; ++round) {
      sums_[round].share();
      int const row = row_ + round * kTogether;
      if (int(threadIdx.x) % kRowLanes != 0 || row >= kRows) continue;
      if constexpr (What::kMean) Means::mean(group_)[row] = sums_[round].sum * inverse_k;
      if constexpr (What::kMeanSquare) Means::mean_square(group_)[row] = sums_[round].squares * inverse_k;
    }
  }

 private:
  CUTLASS_DEVICE void end_segment() {
    CUTLASS_PRAGMA_UNROLL
    for (int round = 0; round < kRounds; ++round) {
      sums_[round].add(segment_[round]);
      segment_[round] = {};
    }
  }

  CUTLASS_DEVICE static uint4 read(uint32_t address) {
    uint4 piece;
    // Volatile keeps it behind the wait for the stage.
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(piece.x), "=r"(piece.y), "=r"(piece.z), "=r"(piece.w)
                 : "r"(address)
                 : "memory");
    return piece;
  }

  int group_;
  int row_;
  uint32_t first_;
  int columns_ = 0;
  RowSums<What> segment_[kRounds], sums_[kRounds];
};

// In a kernel that gathers nothing.
struct NoGather {
  template <class Storage>
  CUTLASS_DEVICE explicit NoGather(Storage&) {}
  CUTLASS_DEVICE void meet() const {}
  CUTLASS_DEVICE void add(int) {}
  CUTLASS_DEVICE void finish(float) {}
};

template <class Means, class Element, class Stage, int kSharing>
struct SelectGather {
  using Type = Gather<Means, Element, Stage, kSharing>;
};
template <class Element, class Stage, int kSharing>
struct SelectGather<void, Element, Stage, kSharing> {
  using Type = NoGather;
};

}  // namespace cutlass_ops
