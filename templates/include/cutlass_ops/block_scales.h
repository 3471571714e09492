// Scales of blocks of FP8 operands: each step of the main loop along K has scales of its own. The producer's warp copies
// those of a tile's rows and columns into the step's stage, beside what TMA brings. They arrive at the same barrier. TMA
// does not bring them, since it wants lines of scales at multiples of 16 bytes, and scales may have any strides. A consumer
// multiplies each sum of a step by its two scales and adds it up in FP32.
//
// "Row" and "column" are the kernel's, as everywhere: rows are A's of the kernel, which are B's columns in one that computes
// the transposed problem.

#pragma once

#include <cstdint>
#include <numeric>

#include "cute/arch/copy_sm80.hpp"
#include "cute/tensor.hpp"
#include "cutlass/arch/barrier.h"

#include "cutlass_ops/binding.h"
#include "cutlass_ops/gather.h"
#include "cutlass_ops/sm90_launch.h"

namespace cutlass_ops {

// Rows (or columns) of a tile, `kBlock` of which share a scale. A warpgroup's rows begin at a multiple of `kPart`.
template <int kTile, int kBlock_, int kPart>
struct ScaledSide {
  static constexpr int kBlock = kBlock_;
  // A block can end within a tile, but never within a run of `kRun` rows. Each run has an entry in a stage.
  static constexpr int kRun = std::gcd(std::gcd(kTile, kPart), kBlock);
  static constexpr int kCount = kTile / kRun;
  static_assert(kTile % kPart == 0);

  // What one lane copies of a tile's entries, every 32nd one: those of one step after the other. All that does not depend on the
  // step is computed before, since a step's copies have to be begun in less time than its products take.
  class Copies {
   public:
    // Rows beyond the matrix have the last one's scale, which nobody uses.
    CUTLASS_DEVICE Copies(StridedScales const& from, int tile, int step, int lane) : lane_(lane), next_step_(from.step_stride) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kEach; ++i) {
        uint32_t const block = (uint32_t(tile) * kTile + uint32_t(i * 32 + lane) * kRun) / kBlock;
        int64_t const row = block < uint32_t(from.last) ? block : uint32_t(from.last);
        from_[i] = from.data + row * from.stride + step * from.step_stride;
      }
    }

    CUTLASS_DEVICE void step(float* to) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kEach; ++i) {
        int const at = i * 32 + lane_;
        if (at < kCount) cute::SM80_CP_ASYNC_CACHEALWAYS<float>::copy(*from_[i], to[at]);
        from_[i] += next_step_;
      }
    }

   private:
    static constexpr int kEach = (kCount + 31) / 32;

    float const* from_[kEach];
    int lane_;
    int64_t next_step_;
  };
};

// What a rendered file asks for: how many rows of A, and columns of B, share a scale, and how the scales lie.
template <int kBlockA, int kBlockB, class Strided = StridedScales>
struct BlockScales {
  static constexpr bool kAny = true;

  // `kAcross` warpgroups lie side by side. Threads of a warpgroup meet before they release a stage if one releases it for all.
  template <int kTileM, int kTileN, int kAcross, int kStages, bool kOneReleases>
  struct For {
    using Rows = ScaledSide<kTileM, kBlockA, 64>;
    using Columns = ScaledSide<kTileN, kBlockB, kTileN / kAcross>;
    static constexpr int kColumns = kTileN / kAcross;  // of a warpgroup
    // Columns come first: they are read two at once if each has its own scale, and otherwise four at once.
    static constexpr int kOfStage = (Columns::kCount + Rows::kCount + 3) / 4 * 4;
    // Scales of columns wait in registers, as those of rows do, unless each column has its own. Those are read when they are
    // needed, from a stage that this warpgroup has not released. So are many of warpgroups side by side, whose sums and
    // products leave fewer registers: 192x208 spills.
    static constexpr int kRuns = Columns::kBlock == 1 ? kColumns : kColumns / Columns::kRun;
    static constexpr bool kReadsLate = Columns::kBlock == 1 || kRuns > (Columns::kCount == kRuns ? 16 : 4);
    // Shared memory is what limits products, and each read of it takes a clock, of one number or of four.
    static constexpr bool kByFours = !kReadsLate && kRuns > 2 && Columns::kCount == kRuns;
    static constexpr int kKept = kReadsLate ? 1 : kByFours ? (kRuns + 3) / 4 * 4 : kRuns;

    struct Storage {
      alignas(16) float values[kStages * kOfStage];
    };
    using Params = BlockScalesParams<Strided>;

    // What one lane of the producer's warp copies. The stage is full once the copies of all lanes are there as well.
    class Copies {
     public:
      CUTLASS_DEVICE Copies(Params const& params, int tile_m, int tile_n, int step, int lane)
          : columns_(params.columns, tile_n, step, lane), rows_(params.rows, tile_m, step, lane) {}

      CUTLASS_DEVICE void step(Storage& storage, int stage, uint64_t const& barrier) {
        float* const to = storage.values + stage * kOfStage;
        columns_.step(to);
        rows_.step(to + Columns::kCount);
        cutlass::arch::cpasync_barrier_arrive_noinc(&barrier);
      }

     private:
      typename Columns::Copies columns_;
      typename Rows::Copies rows_;
    };

    // One thread's sums. `Mma` says which rows and columns these are of.
    template <class Mma>
    class Sums {
      static constexpr int kDown = cute::tile_size<0>(Mma{}) / 64;
      static constexpr int kRowsAtOnce = kTileM / 64 / kDown;  // instructions of a warpgroup, one below the other
      using Index = decltype(Mma{}.get_slice(0).partition_C(
          cute::make_identity_tensor(cute::Shape<cute::Int<kTileM>, cute::Int<kTileN>>{})));

     public:
      CUTLASS_DEVICE Sums(Storage const& storage, int thread)
          : values_(cute::cast_smem_ptr_to_uint(storage.values)),
            index_(Mma{}.get_slice(thread).partition_C(
                cute::make_identity_tensor(cute::Shape<cute::Int<kTileM>, cute::Int<kTileN>>{}))) {
        // Volatile, or else nvcc computes it again for each step, between two steps' products.
        asm volatile("mov.b32 %0, %1;" : "=r"(first_row_) : "r"(int(cute::get<0>(at(0, 0, 0, 0))) / Rows::kRun * 4));
      }

      // Reads the scales of a stage that has arrived. It comes before the products, so that no thread can be late.
      CUTLASS_DEVICE void begin(int stage) {
        stage_ = values_ + uint32_t(stage * kOfStage * int(sizeof(float)));
        CUTLASS_PRAGMA_UNROLL
        for (int m = 0; m < kRowsAtOnce; ++m) {
          CUTLASS_PRAGMA_UNROLL
          for (int half = 0; half < 2; ++half) {
            // Both halves of 16 rows are in one block of 64.
            constexpr int kHalf = Rows::kBlock == 1 ? 8 : 0;
            rows_[m][half] = read(Columns::kCount + (half * kHalf + m * 64 * kDown) / Rows::kRun, first_row_);
          }
        }
        if constexpr (kByFours) {
          CUTLASS_PRAGMA_UNROLL
          for (int run = 0; run < kRuns; run += 4) read_four(run);
        } else if constexpr (!kReadsLate) {
          CUTLASS_PRAGMA_UNROLL
          for (int run = 0; run < kRuns; ++run) columns_[run] = read(first_run() + run);
        }
      }

      // Adds a piece's products of the stage that was begun. `release` gives the stage back to the producer once it has been read.
      template <class Piece, class All, class Release>
      CUTLASS_DEVICE void add(All& sums, float const* products, Release const& release) {
        if constexpr (!kReadsLate) release();
        constexpr int m = Piece::kRow;
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < Piece::kColumns / 8; ++j) {
          float2 const of_columns = pair(Piece::kFirst / 8 + j);
          CUTLASS_PRAGMA_UNROLL
          for (int half = 0; half < 2; ++half) {
            int const at = j * 4 + half * 2;
            sums(Piece::kBegin + at) = fmaf(rows_[m][half] * of_columns.x, products[at], sums(Piece::kBegin + at));
            sums(Piece::kBegin + at + 1) = fmaf(rows_[m][half] * of_columns.y, products[at + 1], sums(Piece::kBegin + at + 1));
          }
        }
        if constexpr (kReadsLate && Piece::kIsLast) {
          if constexpr (kOneReleases) cutlass::arch::NamedBarrier::sync(128, uint32_t(kMeeting + consumer_group()));
          release();
        }
      }

     private:
      static constexpr int kMeeting = 4;  // of the barriers that CUTLASS leaves to others

      CUTLASS_DEVICE auto at(int column, int half, int j, int m) const {
        return index_(cute::make_coord(cute::make_coord(column, half, j), m, 0));
      }

      // The entry of the warpgroup's first columns.
      CUTLASS_DEVICE int first_run() const {
        if constexpr (Columns::kCount == kRuns) {
          return 0;
        } else {
          return int(cute::get<1>(at(0, 0, 0, 0))) / kColumns * kRuns;
        }
      }

      // The scales of a thread's two columns out of eight.
      CUTLASS_DEVICE float2 pair(int j) const {
        if constexpr (Columns::kBlock == 1) {
          float2 found;
          asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                       : "=f"(found.x), "=f"(found.y)
                       : "r"(stage_ + uint32_t(cute::get<1>(at(0, 0, j, 0)) * int(sizeof(float)))));
          return found;
        } else if constexpr (kReadsLate) {
          float const found = read(first_run() + j * 8 / Columns::kRun);
          return {found, found};
        } else {
          float const found = columns_[j * 8 / Columns::kRun];
          return {found, found};
        }
      }

      // Volatile keeps it behind the wait for the stage.
      CUTLASS_DEVICE float read(int entry, uint32_t bytes = 0) const {
        float found;
        asm volatile("ld.shared.f32 %0, [%1];" : "=f"(found) : "r"(stage_ + bytes + uint32_t(entry * int(sizeof(float)))));
        return found;
      }

      // What comes behind the last column's is not used.
      CUTLASS_DEVICE void read_four(int run) {
        float* const to = columns_ + run;
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3])
                     : "r"(stage_ + uint32_t(run * int(sizeof(float)))));
      }

      uint32_t values_, stage_ = 0, first_row_;
      Index index_;
      float rows_[kRowsAtOnce][2], columns_[kKept];
    };
  };
};

}  // namespace cutlass_ops
