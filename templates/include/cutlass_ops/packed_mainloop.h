// The main loop of Sm90 kernels whose weight is packed (packed.h). The kernel computes the transposed problem, so the weight is
// its A, and wgmma takes A from registers: threads read a stage's numbers from shared memory, 16 bytes for four instructions,
// convert them, and multiply. TMA brings numbers, scales and the other operand, B.
//
// A piece is four instructions, 64 of K for 64 rows. While the Tensor Cores multiply one, threads convert the next one: its
// registers are not those of the one before. So a stage has an even number of pieces of each warpgroup, at least two.

#pragma once

#include "cutlass_ops/mainloop.h"
#include "cutlass_ops/packed_launch.h"

namespace cutlass_ops {

// D (64, N) += A (64, 16) B (16, N): A in four registers of each thread, B in shared memory along K.
template <int N, class Element>
struct PackedWgmma;

// N, then the numbers of the operands that follow the accumulators: A's registers, B's descriptor, whether to accumulate.
#define CUTLASS_OPS_PACKED_WGMMA(N, A0, A1, A2, A3, B, P, Element, types)                                              \
  template <>                                                                                                          \
  struct cutlass_ops::PackedWgmma<N, Element> {                                                                        \
    CUTE_DEVICE static void issue(float* d, uint32_t const (&a)[4], uint64_t b, int accumulate) {                      \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N types           \
                   " {" CUTLASS_OPS_REGISTERS_##N "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B ", p, 1, 1, 0;\n}\n" \
                   : CUTLASS_OPS_OPERANDS_##N                                                                          \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));                             \
    }                                                                                                                  \
  };

// `kGroup` numbers along K share a scale, or all with kWholeK.
template <class Numbers, int kGroup, class ElementB_, class LayoutB, class Tile, class Cluster, int kStages, class Schedule>
class PackedMainloop {
  static constexpr bool kCooperative =
      cute::is_same_v<Schedule, cutlass::gemm::KernelTmaWarpSpecializedCooperative>;
  template <int kSide>
  using Extent = cute::remove_cvref_t<decltype(cute::get<kSide>(Tile{}))>;
  static constexpr int kTileM = Extent<0>::value, kTileK = Extent<2>::value;
  // As in mainloop.h: two warpgroups share the tile's rows, or its columns if it has an odd number of 64 rows.
  static constexpr bool kSideBySide = kCooperative && kTileM % 128 != 0;
  static constexpr int kAcross = kSideBySide ? 2 : 1, kDown = kCooperative && !kSideBySide ? 2 : 1;
  static constexpr int kColumns = Extent<1>::value / kAcross, kRows = kTileM / kDown / 64;

 public:
  using DispatchPolicy = cutlass::gemm::MainloopSm90TmaGmmaWarpSpecialized<kStages, Cluster, Schedule>;
  using ArchTag = cutlass::arch::Sm90;
  using TileShape = Tile;
  using ElementA = ElementB_;  // in which threads give it to the Tensor Cores
  using ElementB = ElementB_;
  using ElementAccumulator = float;
  using StrideA = cutlass::gemm::TagToStrideA_t<cutlass::layout::RowMajor>;
  using StrideB = cutlass::gemm::TagToStrideB_t<LayoutB>;
  // Says where results lie. The main loop issues another instruction.
  using TiledMma = decltype(cute::make_tiled_mma(
      Wgmma<kColumns, ElementA, ElementB, cute::GMMA::Major::K, cute::GMMA::Major::K>{},
      cute::Layout<cute::Shape<cute::Int<kDown>, cute::Int<kAcross>, cute::_1>>{}));
  using B = Operand<ElementB, cute::GMMA::Major::K, Extent<1>, Extent<2>, kStages,
                    cute::remove_cvref_t<decltype(cute::get<0>(Cluster{}))>, 1, kColumns>;
  static_assert(cute::size<1>(Cluster{}) == 1, "no blocks share a weight's tile");

  static constexpr int NumProducerThreadEvents = 1;
  using MainloopPipeline = cutlass::PipelineTmaAsync<kStages>;
  using PipelineState = cutlass::PipelineState<kStages>;
  using PipelineStorage = typename MainloopPipeline::SharedStorage;
  using RowsBeside = NoRows;
  static constexpr bool kTransposed = true;

  // Of a stage: lines of numbers, and of scales.
  static constexpr int kLines = kTileM / kLine, kPieces = kTileK / kPiece;
  static constexpr int kGroups = kGroup >= kTileK ? 1 : kTileK / kGroup;  // with a part of it
  static constexpr int kScales = kGroups * Numbers::kParts * kLine;       // of a line
  static constexpr uint32_t kValueBytes = kTileM * kTileK / 2, kScaleBytes = kLines * kScales * 2;
  static constexpr uint32_t TmaTransactionBytes = kValueBytes + kScaleBytes + B::kBytes;
  static_assert(kGroup == kWholeK || kTileK % kGroup == 0, "a stage has whole groups");
  static_assert(kScales <= 256 && kTileK <= 256, "TMA brings a line at once");
  static_assert(kPieces % 2 == 0, "pieces take turns in two sets of registers");

  struct TensorStorage : cute::aligned_struct<128, cute::_0> {
    typename B::Storage smem_B;
    alignas(128) uint4 values[kStages * kValueBytes / 16];
    alignas(128) uint32_t scales[kStages * kScaleBytes / 4];
  };
  struct SharedStorage {
    TensorStorage tensors;
    PipelineStorage pipeline;
  };

  struct Arguments;  // as in mainloop.h
  using Params = PackedParams;

  CUTLASS_DEVICE static void prefetch_tma_descriptors(Params const& params) {
    cute::prefetch_tma_descriptor(&params.values);
    cute::prefetch_tma_descriptor(&params.scales);
    cute::prefetch_tma_descriptor(&params.b.whole);
    cute::prefetch_tma_descriptor(&params.b.last);
  }

  // ---- Producer ----

  // As in mainloop.h.
  template <class Problem>
  CUTLASS_DEVICE auto load_init(Problem const& problem, Params const&) const {
    using namespace cute;
    auto const [m, n, k, l] = problem;
    auto const shape = make_shape(_1{}, _1{}, m, ceil_div(k, get<2>(Tile{})), l);
    auto const tiles = make_tensor(static_cast<ElementB const*>(nullptr), make_layout(shape, repeat_like(shape, _0{})));
    return make_tuple(tiles, tiles);
  }

  // Returns what fills a stage with a step along K and counts it at a barrier: called by one thread.
  template <class Coord>
  CUTLASS_DEVICE static auto filler(Params const& params, Origin const&, Coord const& coord, uint32_t rank,
                                    TensorStorage& storage) {
    constexpr uint32_t kSharing = cute::size<0>(Cluster{});
    int const first_line = int(cute::get<0>(coord)) * kLines, row = int(cute::get<1>(coord)) * B::kRows;
    int const part = B::kMulticast ? int(rank % kSharing) * B::kSlice : 0, left = params.rows_b - row;
    uint16_t const mask = uint16_t((1u << kSharing) - 1);
    uint32_t const missing = BFiller::missing(left);
    BFiller const load_b{&params.b,    mask, left - part, row + part, 0, {0, 0},
                         storage.smem_B.data() + part * B::kLine};
    return [&params, &storage, load_b, first_line, missing](uint64_t& barrier, int step, int stage) {
      constexpr int kFirst = kGroup >= kTileK ? 1 : kGroups;  // groups from one step to the next
      int const group = kGroup == kWholeK ? 0 : step * kFirst;
      bring(params.values, barrier, storage.values + stage * (kValueBytes / 16), step * kTileK, first_line);
      bring(params.scales, barrier, storage.scales + stage * (kScaleBytes / 4), group * Numbers::kParts * kLine, first_line);
      load_b.fill(barrier, step, stage);
      if (missing != 0) count(barrier, missing);
    };
  }

  template <class Tensors, class Coord, class Steps>
  CUTLASS_DEVICE void load(Params const& params, MainloopPipeline pipeline, PipelineState state, Tensors const&,
                           Coord const& coord, Steps step, int count, int lane, uint32_t rank, TensorStorage& storage) {
    if (!cute::elect_one_sync()) return;
    auto const fill = filler(params, Origin{}, coord, rank, storage);
    CUTLASS_PRAGMA_NO_UNROLL
    for (; count > 0; --count, ++step, ++state) {
      pipeline.producer_acquire(state);
      fill(*pipeline.producer_get_barrier(state), *step, state.index());
    }
  }

  CUTLASS_DEVICE void load_tail(MainloopPipeline pipeline, PipelineState state) {
    if (cute::elect_one_sync()) pipeline.producer_tail(state);
  }

  // ---- Consumers ----

  // Leaves the last step's products unfinished and its stage unreleased: mma_tail waits for them.
  template <class Sums>
  CUTLASS_DEVICE void mma(MainloopPipeline pipeline, PipelineState state, Sums& sums, int steps, int thread,
                          TensorStorage& storage, Params const&) {
    Multiplier multiply(storage, thread);
    PipelineState release = state;
    pipeline.consumer_wait(state, pipeline.consumer_try_wait(state));
    multiply(sums, state.index(), true, [] {});
    ++state;
    CUTLASS_PRAGMA_NO_UNROLL
    for (; steps > 1; --steps, ++state, ++release) {
      pipeline.consumer_wait(state, pipeline.consumer_try_wait(state));
      multiply(sums, state.index(), false, [&] { pipeline.consumer_release(release); });
    }
    cute::warpgroup_fence_operand(sums);
  }

  CUTLASS_DEVICE void mma_tail(MainloopPipeline pipeline, PipelineState release, int steps) {
    release.advance(steps - 1);
    cute::warpgroup_wait<0>();
    pipeline.consumer_release(release);
  }

  // Returns what adds a stage's product to a warpgroup's sums, or sets them to it, and waits for it (split_k.h).
  CUTLASS_DEVICE static auto multiplier(TensorStorage& storage, int thread) {
    return [first_stage = Multiplier(storage, thread)](auto& sums, int stage, bool first) {
      Multiplier multiply = first_stage;
      multiply(sums, stage, first, [] {});
      cute::warpgroup_wait<0>();
      multiply.fence();
    };
  }

 private:
  // A thread's numbers of a piece, for four instructions, and the values of their groups.
  struct Piece {
    static constexpr int kCount = kGroup >= kPiece ? 1 : kPiece / kGroup;  // of groups
    uint4 numbers;
    GroupOfRows<Numbers> groups[kCount];
  };

  class Multiplier {
   public:
    CUTLASS_DEVICE Multiplier(TensorStorage& storage, int thread) : lane_(thread % 32) {
      int const group = __shfl_sync(0xffffffff, thread / 128, 0);
      line_ = (kDown == 1 ? 0 : group * 4) + thread % 128 / 32;
      values_ = storage.values + line_ * (kPieces * 32) + lane_;
      scales_ = storage.scales + line_ * (kScales / 2);
      b_ = B::descriptor(storage.smem_B, kAcross == 1 ? 0 : group * B::place(kColumns, 0));
    }

    // Begins to multiply a stage; its last piece stays unfinished. `before` is called once all stages before are read.
    template <class Sums, class Before>
    CUTLASS_DEVICE void operator()(Sums& sums, int stage, bool first, Before const& before) {
      uint4 const* const values = values_ + stage * (kValueBytes / 16);
      uint32_t const* const scales = scales_ + stage * (kScaleBytes / 4);
      uint32_t const b = b_ + uint32_t(stage * (B::kElements / B::kUnit));
      Piece pieces[2];
      pieces[0] = read(values, scales, 0);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kRows * kPieces; ++i) {
        auto& registers = registers_[i % 2];
        converted(registers, pieces[i % 2]);
        if (i + 1 < kRows * kPieces) pieces[(i + 1) % 2] = read(values, scales, i + 1);
        cute::warpgroup_fence_operand(sums);
        fence(registers);
        cute::warpgroup_arrive();
        CUTLASS_PRAGMA_UNROLL
        for (int k = 0; k < 4; ++k) {
          PackedWgmma<kColumns, ElementB>::issue(&sums(i % kRows * (kColumns / 2)), registers[k],
                                                 B::further(b, B::place(0, (i / kRows * 4 + k) * 16)),
                                                 first && i < kRows && k == 0 ? 0 : 1);
        }
        cute::warpgroup_commit_batch();
        cute::warpgroup_wait<1>();  // for the piece before
        fence(registers_[(i + 1) % 2]);
        if (i == 0) before();
      }
      cute::warpgroup_fence_operand(sums);
    }

    CUTLASS_DEVICE void fence() {
      fence(registers_[0]);
      fence(registers_[1]);
    }

   private:
    // Pieces of the same K, one below the other, follow each other.
    CUTLASS_DEVICE Piece read(uint4 const* values, uint32_t const* scales, int index) const {
      int const row = index % kRows, piece = index / kRows, lines = row * kDown * 4;
      Piece found;
      found.numbers = values[lines * (kPieces * 32) + piece * 32];
      CUTLASS_PRAGMA_UNROLL
      for (int g = 0; g < Piece::kCount; ++g) {
        int const group = kGroup >= kTileK ? 0 : (piece * kPiece + g * (kPiece / Piece::kCount)) / kGroup;
        found.groups[g] =
            GroupOfRows<Numbers>::read(scales + lines * (kScales / 2) + group * (Numbers::kParts * kLine / 2), lane_);
      }
      return found;
    }

    CUTLASS_DEVICE static void converted(uint32_t (&to)[4][4], Piece const& piece) {
      CUTLASS_PRAGMA_UNROLL
      for (int k = 0; k < 4; ++k) {
        auto const& group = piece.groups[k * Piece::kCount / 4];
        convert<Numbers, ElementB>(to[k], (&piece.numbers.x)[k], group);
        scale<ElementB>(to[k], group);
      }
    }

    // Keeps registers until the instructions that read them have ended.
    CUTLASS_DEVICE static void fence(uint32_t (&registers)[4][4]) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 16; ++i) cute::warpgroup_fence_operand(registers[i / 4][i % 4]);
    }

    uint32_t registers_[2][4][4];
    uint4 const* values_;
    uint32_t const* scales_;
    uint32_t b_;
    int lane_, line_;
  };

  // What one block loads of B's tile (Filler in mainloop.h), for one matrix without batches.
  struct BFiller : Filler<B, false> {
    CUTLASS_DEVICE void fill(uint64_t& barrier, int step, int stage) const {
      if (this->left <= 0) return;
      auto const* const from = this->left >= B::kSlice ? &this->descriptors->whole : &this->descriptors->last;
      constexpr auto kHint = uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < B::kBoxes; ++i) {
        void* const at = this->to + stage * B::kElements + i * B::kBox;
        int const x = step * kTileK + i * B::kLine;
        if constexpr (B::kMulticast) {
          B::Load::copy(from, &barrier, this->mask, kHint, at, x, this->row);
        } else {
          B::Load::copy(from, &barrier, kHint, at, x, this->row);
        }
      }
    }
  };

  // A weight is read once, unless its tiles are read again for other rows.
  CUTLASS_DEVICE static void bring(cute::TmaDescriptor const& from, uint64_t& barrier, void* to, int x, int y) {
    cute::SM90_TMA_LOAD::copy(&from, &barrier, uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL), to, x, y);
  }

  CUTLASS_DEVICE static void count(uint64_t& barrier, uint32_t bytes) {
    asm volatile("mbarrier.complete_tx.shared::cluster.relaxed.cluster.b64 [%0], %1;" ::"r"(
                     cute::cast_smem_ptr_to_uint(&barrier)),
                 "r"(bytes)
                 : "memory");
  }
};

}  // namespace cutlass_ops
