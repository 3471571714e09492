// The main loop of Sm90 kernels whose weight is 2:4 sparse (sparse.h). wgmma takes a sparse matrix only as its A, from shared
// memory. So the kernel computes the transposed problem. A's tile has the stored elements, half as many along K as B's. TMA
// brings both and the metadata, as they lie.
//
// A thread reads a word of metadata for 64 elements along K of each 64 rows, and gives it to one instruction or two. The
// registers of a step are not those of the step before, which the Tensor Cores may still read: two sets take turns.

#pragma once

#include "cutlass_ops/mainloop.h"
#include "cutlass_ops/sparse_launch.h"

namespace cutlass_ops {

// D (64, N) += A (64, K) B (K, N), K being 64 bytes of B: the stored elements of A are 32. Metadata are in a register of each
// thread. In 16 bits, only one pair of each four threads gives them: the first with selector 0, the second with 1.
template <int N, class Element>
struct SparseWgmma;

// N, then the numbers of the operands that follow the accumulators: both descriptors, metadata, whether to accumulate, the
// selector. `Registers` are CUTLASS_OPS_OPERANDS or CUTLASS_OPS_INTEGERS. `rest` is what follows the predicate.
#define CUTLASS_OPS_SPARSE_WGMMA(N, A, B, META, P, SELECTOR, Element, Sum, Registers, types, rest)                        \
  template <>                                                                                                          \
  struct cutlass_ops::SparseWgmma<N, Element> {                                                                        \
    template <int kSelector>                                                                                           \
    CUTE_DEVICE static void issue(Sum* d, uint64_t a, uint64_t b, uint32_t meta, int accumulate) {                     \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P ", 0;\nwgmma.mma_async.sp.sync.aligned.m64n" #N types        \
                   " {" CUTLASS_OPS_REGISTERS_##N "}, %" #A ", %" #B ", %" #META ", %" #SELECTOR ", p" rest ";\n}\n"   \
                   : Registers##_##N                                                                                   \
                   : "l"(a), "l"(b), "r"(meta), "r"(accumulate), "n"(kSelector));                                      \
    }                                                                                                                  \
  };

template <class Sparse, class ElementB_, class LayoutB, class Tile, class Cluster, int kStages, class Schedule>
class SparseMainloop {
  static constexpr bool kCooperative =
      cute::is_same_v<Schedule, cutlass::gemm::KernelTmaWarpSpecializedCooperative>;
  template <int kSide>
  using Extent = cute::remove_cvref_t<decltype(cute::get<kSide>(Tile{}))>;
  template <int kSide>
  using Blocks = cute::remove_cvref_t<decltype(cute::get<kSide>(Cluster{}))>;
  static constexpr int kTileM = Extent<0>::value, kTileK = Extent<2>::value;
  // As in mainloop.h: two warpgroups share the tile's rows, or its columns if it has an odd number of 64 rows.
  static constexpr bool kSideBySide = kCooperative && kTileM % 128 != 0;
  static constexpr int kAcross = kSideBySide ? 2 : 1, kDown = kCooperative && !kSideBySide ? 2 : 1;
  static constexpr int kColumns = Extent<1>::value / kAcross, kRows = kTileM / kDown / 64;

 public:
  using DispatchPolicy = cutlass::gemm::MainloopSm90TmaGmmaWarpSpecialized<kStages, Cluster, Schedule>;
  using ArchTag = cutlass::arch::Sm90;
  using TileShape = Tile;
  using ElementA = typename StoredOf<Sparse>::Type;
  using ElementB = ElementB_;
  using ElementAccumulator = float;
  using StrideA = cutlass::gemm::TagToStrideA_t<cutlass::layout::RowMajor>;
  using StrideB = cutlass::gemm::TagToStrideB_t<LayoutB>;
  // Says where results lie. The main loop issues another instruction.
  using TiledMma = decltype(cute::make_tiled_mma(
      Wgmma<kColumns, ElementA, ElementB, cute::GMMA::Major::K, cute::GMMA::Major::K>{},
      cute::Layout<cute::Shape<cute::Int<kDown>, cute::Int<kAcross>, cute::_1>>{}));
  // Blocks of a cluster in a row share A's tile, those in a column B's.
  using A = Operand<ElementA, cute::GMMA::Major::K, Extent<0>, cute::Int<kTileK / 2>, kStages, Blocks<1>, 1, 64>;
  using B = Operand<ElementB, cute::GMMA::Major::K, Extent<1>, Extent<2>, kStages, Blocks<0>, 1, kColumns>;

  static constexpr int NumProducerThreadEvents = 1;
  using MainloopPipeline = cutlass::PipelineTmaAsync<kStages>;
  using PipelineState = cutlass::PipelineState<kStages>;
  using PipelineStorage = typename MainloopPipeline::SharedStorage;
  using RowsBeside = NoRows;
  static constexpr bool kTransposed = true;

  // Of a stage: blocks of metadata below each other, and along K. An instruction takes 32 bytes of stored elements.
  static constexpr int kBlocksDown = kTileM / kMetaBlock, kBlocksAlong = kTileK / kMetaBlock;
  static constexpr int kBlockWords = kMetaBytes / 4;
  static constexpr int kStored = 32 / int(sizeof(ElementA)), kInstructions = kTileK / (2 * kStored);
  static constexpr int kOfAWord = kMetaBlock / (2 * kStored);  // instructions
  static constexpr uint32_t kStageMeta = kBlocksDown * kBlocksAlong * kMetaBytes;
  static constexpr uint32_t TmaTransactionBytes = A::kBytes + B::kBytes + kStageMeta;
  static_assert(kTileK % kMetaBlock == 0 && kTileK <= 256, "whole blocks of metadata, in one box of TMA");

  struct TensorStorage : cute::aligned_struct<128, cute::_0> {
    typename A::Storage smem_A;
    typename B::Storage smem_B;
    alignas(128) uint32_t meta[kStages * kStageMeta / 4];
  };
  struct SharedStorage {
    TensorStorage tensors;
    PipelineStorage pipeline;
  };

  struct Arguments;  // as in mainloop.h
  using Params = SparseParams;

  CUTLASS_DEVICE static void prefetch_tma_descriptors(Params const& params) {
    cute::prefetch_tma_descriptor(&params.a.whole);
    cute::prefetch_tma_descriptor(&params.a.last);
    cute::prefetch_tma_descriptor(&params.b.whole);
    cute::prefetch_tma_descriptor(&params.b.last);
    cute::prefetch_tma_descriptor(&params.meta);
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

  // Returns what fills a stage with a step along K and counts it at a barrier: called by one thread. Each block brings the
  // metadata that it needs.
  template <class Coord>
  CUTLASS_DEVICE static auto filler(Params const& params, Origin const&, Coord const& coord, uint32_t rank,
                                    TensorStorage& storage) {
    constexpr uint32_t kClusterM = Blocks<0>::value, kClusterN = Blocks<1>::value;
    uint32_t const x = rank % kClusterM, y = rank / kClusterM;
    uint16_t mask_a = 0, mask_b = 0;
    for (uint32_t i = 0; i < kClusterN; ++i) mask_a |= uint16_t(1u << (x + i * kClusterM));
    for (uint32_t i = 0; i < kClusterM; ++i) mask_b |= uint16_t(1u << (i + y * kClusterM));
    int const row_a = int(cute::get<0>(coord)) * A::kRows, row_b = int(cute::get<1>(coord)) * B::kRows;
    int const left_a = params.rows_a - row_a, left_b = params.rows_b - row_b;
    auto const load_a = filler_of<A>(params.a, mask_a, left_a, row_a, int(y), storage.smem_A);
    auto const load_b = filler_of<B>(params.b, mask_b, left_b, row_b, int(x), storage.smem_B);
    uint32_t const missing = load_a.missing(left_a) + load_b.missing(left_b);
    int const first_block = row_a / kMetaBlock;
    return [&params, &storage, load_a, load_b, missing, first_block](uint64_t& barrier, int step, int stage) {
      constexpr auto kHint = uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL);
      cute::SM90_TMA_LOAD::copy(&params.meta, &barrier, kHint, storage.meta + stage * (kStageMeta / 4), step * kTileK,
                                first_block);
      load_a(barrier, step, stage);
      load_b(barrier, step, stage);
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
    Multiplier const multiply(storage, thread);
    Meta meta[2];
    PipelineState release = state;
    auto const begin = [&](Meta& mine, bool first) {
      pipeline.consumer_wait(state, pipeline.consumer_try_wait(state));
      mine = multiply.meta_of(state.index());
      cute::warpgroup_fence_operand(sums);
      mine.fence();
      cute::warpgroup_arrive();
      multiply(sums, mine, state.index(), first);
      cute::warpgroup_commit_batch();
      ++state;
    };
    auto const end = [&](Meta& before) {
      cute::warpgroup_wait<1>();
      cute::warpgroup_fence_operand(sums);
      before.fence();
      pipeline.consumer_release(release);
      ++release;
    };
    begin(meta[0], true);
    CUTLASS_PRAGMA_NO_UNROLL
    for (; steps > 2; steps -= 2) {
      begin(meta[1], false);
      end(meta[0]);
      begin(meta[0], false);
      end(meta[1]);
    }
    if (steps == 2) {
      begin(meta[1], false);
      end(meta[0]);
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
    return [multiply = Multiplier(storage, thread)](auto& sums, int stage, bool first) {
      Meta meta = multiply.meta_of(stage);
      meta.fence();
      cute::warpgroup_arrive();
      multiply(sums, meta, stage, first);
      cute::warpgroup_commit_batch();
      cute::warpgroup_wait<0>();
      meta.fence();
    };
  }

 private:
  // A thread's metadata of a step.
  struct Meta {
    uint32_t words[kRows][kBlocksAlong];

    // Keeps registers until the instructions that read them have ended.
    CUTLASS_DEVICE void fence() {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kRows * kBlocksAlong; ++i) {
        cute::warpgroup_fence_operand(words[i / kBlocksAlong][i % kBlocksAlong]);
      }
    }
  };

  class Multiplier {
   public:
    CUTLASS_DEVICE Multiplier(TensorStorage& storage, int thread) {
      int const group = __shfl_sync(0xffffffff, thread / 128, 0);
      int const down = kDown == 1 ? 0 : group;
      a_ = A::descriptor(storage.smem_A, down * A::place(64, 0));
      b_ = B::descriptor(storage.smem_B, kAcross == 1 ? 0 : group * B::place(kColumns, 0));
      meta_ = storage.meta + down * (kBlocksAlong * kBlockWords) + thread % 128;
    }

    CUTLASS_DEVICE Meta meta_of(int stage) const {
      uint32_t const* const from = meta_ + stage * (kStageMeta / 4);
      Meta found;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kRows * kBlocksAlong; ++i) {
        int const row = i / kBlocksAlong, block = i % kBlocksAlong;
        found.words[row][block] = from[(row * kDown * kBlocksAlong + block) * kBlockWords];
      }
      return found;
    }

    // Begins to multiply a stage.
    template <class Sums>
    CUTLASS_DEVICE void operator()(Sums& sums, Meta const& meta, int stage, bool first) const {
      uint32_t const a = a_ + uint32_t(stage * (A::kElements / A::kUnit));
      uint32_t const b = b_ + uint32_t(stage * (B::kElements / B::kUnit));
      cute::for_each(cute::make_int_sequence<kInstructions>{}, [&](auto index) {
        constexpr int k = decltype(index)::value;
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kRows; ++i) {
          SparseWgmma<kColumns, ElementA>::template issue<k % kOfAWord>(
              &sums(i * (kColumns / 2)), A::further(a, A::place(i * kDown * 64, k * kStored)),
              B::further(b, B::place(0, k * 2 * kStored)), meta.words[i][k / kOfAWord], first && k == 0 ? 0 : 1);
        }
      });
    }

   private:
    uint32_t a_, b_;
    uint32_t const* meta_;
  };

  // Of an operand's tile, this block's part among those of blocks that multicast it.
  template <class Operand>
  CUTLASS_DEVICE static Filler<Operand, false> filler_of(Descriptors const& from, uint16_t mask, int left, int row, int part,
                                                         typename Operand::Storage& storage) {
    int const first = Operand::kMulticast ? part * Operand::kSlice : 0;
    return {&from, mask, left - first, row + first, 0, {0, 0}, storage.data() + first * Operand::kLine};
  }

  CUTLASS_DEVICE static void count(uint64_t& barrier, uint32_t bytes) {
    asm volatile("mbarrier.complete_tx.shared::cluster.relaxed.cluster.b64 [%0], %1;" ::"r"(
                     cute::cast_smem_ptr_to_uint(&barrier)),
                 "r"(bytes)
                 : "memory");
  }
};

}  // namespace cutlass_ops
