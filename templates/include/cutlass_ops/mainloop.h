// The main loop of Sm90 kernels: both operands by TMA into shared memory, from there by wgmma. It is what CUTLASS's
// CollectiveMma for MainloopSm90TmaGmmaWarpSpecialized is to CUTLASS's kernels, with three differences. First, each stage of
// an operand has its own layout, at a multiple of its size: CuTe cannot take a stage out of a layout of all stages unless
// rows are a multiple of 16. Second, one wgmma covers the tile's whole N, for any multiple of 8. Third, rows of a tile
// beyond the matrix are not loaded: TMA takes several times as long for a row of zeros as for a real one. What lies in their
// place only reaches sums that nobody stores.
//
// An epilogue may ask for two things more. A tile of the weight can be half one matrix and half another. Then one thread has
// both products, a fixed number of registers apart. And sums of A's rows can be gathered (gather.h).

#pragma once

#include "cute/tensor.hpp"
#include "cutlass/arch/mma_sm90.h"
#include "cutlass/gemm/collective/builders/sm90_common.inl"
#include "cutlass/gemm/dispatch_policy.hpp"
#include "cutlass/pipeline/pipeline.hpp"

#include "cutlass_ops/gather.h"
#include "cutlass_ops/sm90_launch.h"
#include "cutlass_ops/wgmma.h"

namespace cutlass_ops {

// One operand: its tile has `Rows` along the problem's M or N, and `Columns` along K. Several matrices share the rows
// evenly. An instruction reads `kAtOnce` rows.
template <class Element, cute::GMMA::Major kMajor, class Rows, class Columns, int kStages, class Blocks, int kMatrices,
          int kAtOnce>
struct Operand {
  // One stage; TMA boxes are as large as the layout allows.
  using Stage = decltype(cute::tile_to_shape(
      cutlass::gemm::collective::detail::ss_smem_selector<kMajor, Element, Rows, Columns>(),
      cute::Shape<Rows, Columns>{},
      cute::conditional_t<kMajor == cute::GMMA::Major::MN, cute::Step<cute::_2, cute::_1>,
                          cute::Step<cute::_1, cute::_2>>{}));
  static constexpr int kElements = cute::cosize_v<Stage>;  // of a stage
  static constexpr uint32_t kBytes = kElements * sizeof(Element);
  static constexpr bool kMulticast = Blocks::value > 1;
  // A box has lines as long as swizzling reaches. If they lie along K, TMA brings any number of rows, and multicasting blocks
  // bring some of them each. Otherwise it brings whole boxes, and a multicasting block brings all rows of its part of K.
  static constexpr bool kAnyRows = kMajor == cute::GMMA::Major::K;
  static constexpr int kSwizzle = decltype(Stage{}.layout_a())::num_bits, kLine = (16 << kSwizzle) / int(sizeof(Element));
  static_assert(kSwizzle == swizzle_of((kAnyRows ? Columns::value : Rows::value) * int(sizeof(Element))));
  static constexpr int kBoxes = (kAnyRows ? Columns::value : Rows::value) / kLine;  // of a stage
  static constexpr int kBox = kElements / kBoxes;
  // Of one matrix: the rows of a tile, and the lines of a box that one block loads.
  static constexpr int kRows = Rows::value / kMatrices, kLines = kAnyRows ? kRows : Columns::value;
  static constexpr int kColumns = Columns::value, kSlice = kLines / Blocks::value;
  static_assert(kAnyRows || kLines % Blocks::value == 0);
  static constexpr uint32_t kRowBytes = kBytes / kRows;  // of all matrices
  using Load = cute::conditional_t<kMulticast, cute::SM90_TMA_LOAD_MULTICAST, cute::SM90_TMA_LOAD>;
  using Storage = cute::array_aligned<Element, kStages * kElements>;

  // Where an element lies in a stage, but for swizzling.
  static constexpr int place(int row, int column) {
    int const along = kAnyRows ? column : row, line = kAnyRows ? row : column;
    return along / kLine * kBox + line * kLine + along % kLine;
  }

  // Descriptors of what wgmma reads (PTX ISA, matrix descriptors), in units of 16 bytes: how far it is from eight lines to the
  // next, and from box to box. Without swizzling the two change places. What an instruction has one of is as CuTe leaves it.
  static constexpr int kUnit = 16 / int(sizeof(Element));
  static constexpr uint32_t kEightLines = kAnyRows && kAtOnce == 8 ? 0 : 8 * kLine / kUnit;
  static constexpr uint32_t kAcross = kAnyRows ? 1 : kAtOnce > kLine ? kBox / kUnit : 0;
  static constexpr uint32_t kUpperHalf = uint32_t((4 - kSwizzle) % 4) << 30 | (kSwizzle == 0 ? kAcross : kEightLines);
  static constexpr uint32_t kLeading = (kSwizzle == 0 ? kEightLines : kAcross) << 16;
  static_assert(!kAnyRows || kSwizzle != 0);

  // The lower half, for what begins some elements into the first stage.
  CUTLASS_DEVICE static uint32_t descriptor(Storage& storage, int elements) {
    return (cute::cast_smem_ptr_to_uint(storage.data() + elements) >> 4 & 0x3fff) | kLeading;
  }

  // The whole, some elements further.
  CUTLASS_DEVICE static uint64_t further(uint32_t lower_half, int elements) {
    return uint64_t(kUpperHalf) << 32 | (lower_half + uint32_t(elements / kUnit));
  }

  // Rows of the next matrix begin where whole blocks of a stage's swizzle end.
  static_assert(kMatrices == 1 || (kMajor == cute::GMMA::Major::K && Rows::value % (8 * kMatrices) == 0));
};

// Where loads of tiles begin: within matrices of which a part is multiplied (sm90_grouped.h, sm90_ragged_k.h).
struct Origin {
  int row_a = 0, row_b = 0, k = 0;
};

// What one block loads of an operand's tile: boxes of rows, as long as the matrix has any.
template <class Operand, bool kBatched>
struct Filler {
  Descriptors const* descriptors;
  uint16_t mask;
  int left;      // rows of the matrix from the first one on that this block loads
  int row, k;    // that one, and the first of the steps along K
  int batch[2];  // its coordinates
  typename Operand::Storage::value_type* to;

  CUTLASS_DEVICE void operator()(uint64_t& barrier, int step, int stage) const {
    constexpr int kLine = Operand::kLine;
    auto* const at = to + stage * Operand::kElements;
    int const first = k + step * Operand::kColumns;
    if (left <= 0) return;
    auto const* const from = !Operand::kAnyRows || left >= Operand::kSlice ? &descriptors->whole : &descriptors->last;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Operand::kBoxes; ++i) {
      if constexpr (Operand::kAnyRows) {
        copy(from, barrier, at + i * Operand::kBox, first + i * kLine, row);
      } else {
        if (left <= i * kLine) break;
        copy(from, barrier, at + i * Operand::kBox, row + i * kLine, first);
      }
    }
  }

  // x counts along lines. The hint is that of CuTe's copies.
  CUTLASS_DEVICE void copy(cute::TmaDescriptor const* from, uint64_t& barrier, void* at, int x, int y) const {
    constexpr auto kHint = uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL);
    if constexpr (Operand::kMulticast && kBatched) {
      Operand::Load::copy(from, &barrier, mask, kHint, at, x, y, batch[0], batch[1]);
    } else if constexpr (Operand::kMulticast) {
      Operand::Load::copy(from, &barrier, mask, kHint, at, x, y, 0);
    } else if constexpr (kBatched) {
      Operand::Load::copy(from, &barrier, kHint, at, x, y, batch[0], batch[1]);
    } else {
      Operand::Load::copy(from, &barrier, kHint, at, x, y, 0);
    }
  }

  // How many bytes a stage lacks, if the matrix has `rows` rows from the tile's first one on.
  CUTLASS_DEVICE static uint32_t missing(int rows) {
    constexpr int kUnit = Operand::kAnyRows ? 1 : Operand::kLine;
    int const there = rows < 0 ? 0 : rows < Operand::kRows ? rows : Operand::kRows;
    return uint32_t(Operand::kRows - (there + kUnit - 1) / kUnit * kUnit) * Operand::kRowBytes;
  }
};

// Nothing is taken of A's rows.
struct NoRows {
  using Params = Nothing;
};

// No blocks of the operands have scales (block_scales.h): sums are added up as they are.
struct NoScales {
  static constexpr bool kAny = false;

  template <int kTileM, int kTileN, int kAcross, int kStages, bool kOneReleases>
  struct For {
    using Params = Nothing;
  };
};

// How many of the producer's threads arrive at a stage's barrier: one, for what TMA brings, or the whole warp as well.
// CUTLASS's kernel without persistence counts only one.
template <int kStages, int kProducers>
struct MainloopPipeline : cutlass::PipelineTmaAsync<kStages> {
  using Base = cutlass::PipelineTmaAsync<kStages>;
  template <class Cluster>
  CUTLASS_DEVICE MainloopPipeline(typename Base::SharedStorage& storage, typename Base::Params params, Cluster cluster)
      : Base(storage, with_producers(params), cluster) {}

 private:
  CUTLASS_DEVICE static typename Base::Params with_producers(typename Base::Params params) {
    params.num_producers = kProducers;
    return params;
  }
};

// If `kProducts` is 2, half of the weight's tile is a second matrix, and the problem's M or N counts both. The weight is B.
// In a kernel that computes the transposed problem, `kSwapped`, it is A. `Means` says what is gathered of the other
// operand's rows and where it goes; if it is void, nothing is. `Rows` says what idle warps take of A's rows beside the main
// loop (means_beside.h). With `kPromotes`, each stage's products are added up separately. Their sums, times the scales of
// `Scaling`, are added in FP32.
template <class ElementA_, class LayoutA, class ElementB_, class LayoutB, class Tile, class Cluster, int kStages,
          class Schedule, bool kSwapped = false, int kProducts = 1, class Means = void, class Rows = NoRows,
          bool kPromotes = false, class Scaling = NoScales>
class Mainloop {
  static constexpr auto kMajorA = cutlass::gemm::collective::detail::gmma_ss_tag_to_major_A<ElementA_, LayoutA>();
  static constexpr auto kMajorB = cutlass::gemm::collective::detail::gmma_ss_tag_to_major_B<ElementB_, LayoutB>();
  static constexpr bool kCooperative =
      cute::is_same_v<Schedule, cutlass::gemm::KernelTmaWarpSpecializedCooperative>;
  template <int kSide>
  using Extent = cute::remove_cvref_t<decltype(cute::get<kSide>(Tile{}))>;
  // Two warpgroups share the tile's rows, or its columns where it has an odd number of 64 rows.
  static constexpr bool kSideBySide = kCooperative && Extent<0>::value % 128 != 0;
  static constexpr int kAcross = kSideBySide ? 2 : 1, kDown = kCooperative && !kSideBySide ? 2 : 1;
  // A warpgroup's columns, and its 64 rows of one instruction each. An instruction takes 32 bytes along K.
  static constexpr int kColumnsAtOnce = Extent<1>::value / kAcross, kRowsAtOnce = Extent<0>::value / kDown / 64;
  static constexpr int kK = 32 / int(sizeof(ElementA_)), kInstructions = Extent<2>::value / kK;

 public:
  using DispatchPolicy = cutlass::gemm::MainloopSm90TmaGmmaWarpSpecialized<kStages, Cluster, Schedule>;
  using ArchTag = cutlass::arch::Sm90;
  using TileShape = Tile;
  using ElementA = ElementA_;
  using ElementB = ElementB_;
  using ElementAccumulator = float;
  using StrideA = cutlass::gemm::TagToStrideA_t<LayoutA>;
  using StrideB = cutlass::gemm::TagToStrideB_t<LayoutB>;
  // Batches have strides of their own in two dimensions (sm90_batched.h); one GEMM has none.
  static constexpr bool kBatched = cute::rank_v<cute::remove_cvref_t<decltype(cute::get<2>(StrideA{}))>> == 2;
  using TiledMma = decltype(cute::make_tiled_mma(
      Wgmma<Extent<1>::value / kAcross, ElementA, ElementB, kMajorA, kMajorB>{},
      cute::Layout<cute::Shape<cute::Int<kDown>, cute::Int<kAcross>, cute::_1>>{}));
  static constexpr int kMatricesA = kSwapped ? kProducts : 1, kMatricesB = kSwapped ? 1 : kProducts;
  // Blocks of a cluster in a row share A's tile, those in a column B's.
  using A = Operand<ElementA, kMajorA, Extent<0>, Extent<2>, kStages, cute::remove_cvref_t<decltype(cute::get<1>(Cluster{}))>,
                    kMatricesA, 64>;
  using B = Operand<ElementB, kMajorB, Extent<1>, Extent<2>, kStages, cute::remove_cvref_t<decltype(cute::get<0>(Cluster{}))>,
                    kMatricesB, kColumnsAtOnce>;
  // Rows are gathered from shared memory as they lie there, K along each.
  static_assert(cute::is_void_v<Means> || (kSwapped ? kMajorB : kMajorA) == cute::GMMA::Major::K);
  using RowGather = typename SelectGather<
      Means, ElementA, typename cute::conditional_t<kSwapped, B, A>::Stage, kCooperative ? 2 : 1>::Type;

  static constexpr bool kScaled = Scaling::kAny;
  static_assert(kPromotes || !kScaled, "the Tensor Cores know no scales");
  using Scales = typename Scaling::template For<Extent<0>::value, Extent<1>::value, kAcross, kStages,
                                                (cute::size(Cluster{}) > 1)>;
  static constexpr int NumProducerThreadEvents = kScaled ? 33 : 1;  // 32 lanes copy scales
  using MainloopPipeline = cute::conditional_t<kScaled, cutlass_ops::MainloopPipeline<kStages, NumProducerThreadEvents>,
                                               cutlass::PipelineTmaAsync<kStages>>;
  using PipelineState = cutlass::PipelineState<kStages>;
  using PipelineStorage = typename MainloopPipeline::SharedStorage;
  static constexpr uint32_t TmaTransactionBytes = A::kBytes + B::kBytes;
  using RowsBeside = Rows;
  static constexpr bool kTransposed = kSwapped;

  struct OperandStorage : cute::aligned_struct<128, cute::_0> {
    typename A::Storage smem_A;
    typename B::Storage smem_B;
  };
  template <class Each>
  struct ScaledStorage : OperandStorage {
    typename Each::Storage scales;  // an empty one would take memory
  };
  using TensorStorage = cute::conditional_t<kScaled, ScaledStorage<Scales>, OperandStorage>;
  struct SharedStorage {
    TensorStorage tensors;
    PipelineStorage pipeline;
  };

  struct Arguments;  // which CUTLASS's kernels name: a launch fills parameters without (sm90_launch.h)
  using Params = MainloopParams<kProducts == 2, typename Rows::Params, typename Scales::Params>;

  CUTLASS_DEVICE static void prefetch_tma_descriptors(Params const& params) {
    auto const prefetch = [](Descriptors const& of) {
      cute::prefetch_tma_descriptor(&of.whole);
      cute::prefetch_tma_descriptor(&of.last);
    };
    prefetch(params.a);
    prefetch(params.b);
    if constexpr (kProducts == 2) prefetch(params.second);
  }

  // ---- Producer ----

  // What CUTLASS's kernels ask of A and B, as tensors of tiles: how many there are along K, and the batches' shape. Of the
  // mode of tiles along rows, they only ask that it be a number.
  template <class Problem>
  CUTLASS_DEVICE auto load_init(Problem const& problem, Params const&) const {
    using namespace cute;
    auto const [m, n, k, l] = problem;
    auto const shape = make_shape(_1{}, _1{}, m, ceil_div(k, get<2>(Tile{})), l);
    auto const tiles = make_tensor(static_cast<ElementA const*>(nullptr), make_layout(shape, repeat_like(shape, _0{})));
    return make_tuple(tiles, tiles);
  }

  // Returns what fills a stage with a step along K and counts it at a barrier: called by one thread.
  template <class Coord>
  CUTLASS_DEVICE static auto filler(Params const& params, Origin const& origin, Coord const& coord, uint32_t rank,
                                    TensorStorage& storage) {
    using namespace cute;
    int const block_m = get<0>(coord), block_n = get<1>(coord);
    int batch[2] = {0, 0};
    if constexpr (kBatched) {
      batch[0] = get<0>(get<3>(coord));
      batch[1] = get<1>(get<3>(coord));
    }
    constexpr uint32_t kClusterM = size<0>(Cluster{}), kClusterN = size<1>(Cluster{});
    uint32_t const x = rank % kClusterM, y = rank / kClusterM;
    uint16_t mask_a = 0, mask_b = 0;
    if constexpr (A::kMulticast) {
      for (uint32_t i = 0; i < kClusterN; ++i) mask_a |= uint16_t(1u << (x + i * kClusterM));
    }
    if constexpr (B::kMulticast) {
      for (uint32_t i = 0; i < kClusterM; ++i) mask_b |= uint16_t(1u << (i + y * kClusterM));
    }
    int const left_a = params.rows_a - block_m * A::kRows, left_b = params.rows_b - block_n * B::kRows;
    auto const filler_a = [&](Descriptors const& from, int matrix) {
      return filler_of<A>(from, mask_a, left_a, block_m, origin.row_a, origin.k, batch, int(y), storage.smem_A, matrix);
    };
    auto const filler_b = [&](Descriptors const& from, int matrix) {
      return filler_of<B>(from, mask_b, left_b, block_n, origin.row_b, origin.k, batch, int(x), storage.smem_B, matrix);
    };
    auto const load_a = filler_a(params.a, 0);
    auto const load_b = filler_b(params.b, 0);
    auto const load_second = [&] {
      if constexpr (kProducts == 1) {
        return Nothing{};
      } else if constexpr (kSwapped) {
        return filler_a(params.second, 1);
      } else {
        return filler_b(params.second, 1);
      }
    }();
    uint32_t const missing = load_a.missing(left_a) + load_b.missing(left_b);
    return [=](uint64_t& barrier, int k, int stage) {
      load_a(barrier, k, stage);
      load_b(barrier, k, stage);
      if constexpr (kProducts == 2) load_second(barrier, k, stage);
      if (missing != 0) count(barrier, missing);
    };
  }

  template <class Tensors, class Coord, class Steps>
  CUTLASS_DEVICE void load(Params const& params, MainloopPipeline pipeline, PipelineState state, Tensors const&,
                           Coord const& coord, Steps step, int count, int lane, uint32_t rank, TensorStorage& storage) {
    load(params, params.scales, pipeline, state, Origin{}, coord, step, count, lane, rank, storage);
  }

  // The same of a part of the matrices, with scales that begin where those of a tile do: of groups of rows (sm90_grouped.h).
  template <class Coord, class Steps>
  CUTLASS_DEVICE void load(Params const& params, typename Scales::Params const& scales, MainloopPipeline pipeline,
                           PipelineState state, Origin const& origin, Coord const& coord, Steps step, int count, int lane,
                           uint32_t rank, TensorStorage& storage) {
    if constexpr (kScaled) {
      return load_scaled(params, scales, pipeline, state, origin, coord, step, count, lane, rank, storage);
    }
    if (!cute::elect_one_sync()) return;
    auto const fill = filler(params, origin, coord, rank, storage);
    CUTLASS_PRAGMA_NO_UNROLL
    for (; count > 0; --count, ++step, ++state) {
      pipeline.producer_acquire(state);
      fill(*pipeline.producer_get_barrier(state), *step, state.index());
    }
  }

  // Other blocks of the cluster may still signal this one's barriers: it stays until they have.
  CUTLASS_DEVICE void load_tail(MainloopPipeline pipeline, PipelineState state) {
    if (cute::elect_one_sync()) pipeline.producer_tail(state);
  }

  // ---- Consumers ----

  // What a warpgroup multiplies, in the first stage or in another one: its first rows of A and its first columns of B, each
  // as the lower half of a descriptor.
  struct Factors {
    uint32_t a, b;

    CUTLASS_DEVICE Factors(TensorStorage& storage, int thread) {
      int const group = __shfl_sync(0xffffffff, thread / 128, 0);
      a = A::descriptor(storage.smem_A, kDown == 1 ? 0 : group * A::place(64, 0));
      b = B::descriptor(storage.smem_B, kAcross == 1 ? 0 : group * B::place(kColumnsAtOnce, 0));
    }

    CUTLASS_DEVICE Factors in(int stage) const {
      Factors other = *this;
      other.a += uint32_t(stage * (A::kElements / A::kUnit));
      other.b += uint32_t(stage * (B::kElements / B::kUnit));
      return other;
    }

    // Descriptors for an instruction along K: of some of the warpgroup's 64 rows, and of its columns from one on.
    CUTLASS_DEVICE uint64_t rows(int index, int k) const { return A::further(a, A::place(index * kDown * 64, k * kK)); }
    CUTLASS_DEVICE uint64_t columns(int first, int k) const { return B::further(b, B::place(first, k * kK)); }
  };

  // Returns what adds a stage's product to a warpgroup's sums, or sets them to it.
  CUTLASS_DEVICE static auto multiplier(TensorStorage& storage, int thread) {
    return [first_stage = Factors(storage, thread)](auto& sums, int stage, bool first) {
      auto const factors = first_stage.in(stage);
      CUTLASS_PRAGMA_UNROLL
      for (int k = 0; k < kInstructions; ++k) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kRowsAtOnce; ++i) {
          Wgmma<kColumnsAtOnce, ElementA, ElementB, kMajorA, kMajorB>::fma(
              &sums(i * (kColumnsAtOnce / 2)), factors.rows(i, k), factors.columns(0, k),
              first && k == 0 ? cute::GMMA::ScaleOut::Zero : cute::GMMA::ScaleOut::One);
        }
      }
    };
  }

  // Leaves the last step's products unfinished and its stage unreleased: mma_tail waits for them.
  template <class Sums>
  CUTLASS_DEVICE void mma(MainloopPipeline pipeline, PipelineState state, Sums& sums, int steps, int thread,
                          TensorStorage& storage, Params const& params) {
    if constexpr (kPromotes) return promote(pipeline, state, sums, steps, thread, storage);
    auto const multiply = multiplier(storage, thread);
    RowGather gather(of_rows(storage));
    PipelineState release = state;
    auto const step = [&](bool first) {
      pipeline.consumer_wait(state, pipeline.consumer_try_wait(state));
      cute::warpgroup_fence_operand(sums);
      cute::warpgroup_arrive();
      multiply(sums, state.index(), first);
      cute::warpgroup_commit_batch();
      gather.meet();
      gather.add(state.index());
      ++state;
    };
    step(true);
    CUTLASS_PRAGMA_NO_UNROLL
    for (; steps > 1; --steps, ++release) {
      step(false);
      cute::warpgroup_wait<1>();
      cute::warpgroup_fence_operand(sums);
      pipeline.consumer_release(release);
    }
    gather.finish(params.inverse_k);
    cute::warpgroup_fence_operand(sums);
  }

  CUTLASS_DEVICE void mma_tail(MainloopPipeline pipeline, PipelineState release, int steps) {
    if constexpr (kPromotes) return;
    release.advance(steps - 1);
    cute::warpgroup_wait<0>();
    pipeline.consumer_release(release);
  }

 private:
  // Of one matrix's tile, this block's part among those of blocks that multicast it.
  template <class Operand>
  CUTLASS_DEVICE static Filler<Operand, kBatched> filler_of(Descriptors const& from, uint16_t mask, int left, int tile, int row,
                                                            int k, int const (&batch)[2], int part,
                                                            typename Operand::Storage& storage, int matrix) {
    int const first = Operand::kMulticast ? part * Operand::kSlice : 0, first_row = Operand::kAnyRows ? first : 0;
    return {&from, mask, left - first_row, row + tile * Operand::kRows + first_row,
            k + first - first_row, {batch[0], batch[1]},
            storage.data() + (matrix * Operand::kLines + first) * Operand::kLine};
  }

  // As `load`, by the whole warp: each lane waits for the stage, and copies a part of the scales.
  template <class Coord, class Steps>
  CUTLASS_DEVICE static void load_scaled(Params const& params, typename Scales::Params const& scales,
                                         MainloopPipeline& pipeline, PipelineState state, Origin const& origin,
                                         Coord const& coord, Steps step, int count, int lane, uint32_t rank,
                                         TensorStorage& storage) {
    bool const elected = cute::elect_one_sync();
    int const tile_m = cute::get<0>(coord), tile_n = cute::get<1>(coord);
    auto const fill = filler(params, origin, coord, rank, storage);
    typename Scales::Copies copies(scales, tile_m, tile_n, *step, lane);
    CUTLASS_PRAGMA_NO_UNROLL
    for (; count > 0; --count, ++step, ++state) {
      pipeline.producer_acquire(state);
      uint64_t& barrier = *pipeline.producer_get_barrier(state);
      if (elected) fill(barrier, *step, state.index());
      copies.step(storage.scales, state.index(), barrier);
    }
  }

  // A piece is what a warpgroup multiplies of a step at once: one of its instructions below each other, or some columns of the
  // only one. While a piece is added up, the next one is multiplied, also that of the next step. For the latter, ptxas takes
  // registers for one piece more than a step has. Where these do not suffice, columns are not split, and each step ends before
  // the next begins. Columns are split from 128 on. Narrower tiles have one piece, and registers for those of two steps.
  //
  // Of the largest tiles, a step's products and the sums do not fit together. Their pieces take turns in the registers of one:
  // each is added up before the next is multiplied, and the other warpgroup multiplies meanwhile. Instructions as wide read A
  // less often, so that shared memory is not what limits them. So do tiles of 128 rows and as many columns or more, with few
  // scales of blocks: their only piece is a whole step.
  static constexpr bool scales_wait() {  // in registers
    if constexpr (kScaled) {
      return !Scales::kReadsLate;
    } else {
      return false;
    }
  }
  static constexpr bool kWhole =
      scales_wait() && kCooperative && kRowsAtOnce == 1 && kColumnsAtOnce >= 128 && kColumnsAtOnce <= 208;
  static constexpr bool kInTurn = kWhole || kRowsAtOnce * kColumnsAtOnce > 208;
  static constexpr int columns_of(int pieces) { return (kColumnsAtOnce + 8 * pieces - 1) / (8 * pieces) * 8; }
  static constexpr bool has_registers(int pieces) {
    return (kRowsAtOnce * kColumnsAtOnce + (kRowsAtOnce * pieces + 1) * columns_of(pieces)) / 2 <= (kScaled ? 208 : 220);
  }
  static constexpr int kSplit =
      kRowsAtOnce == 1 && kColumnsAtOnce >= 128 && !kWhole && (kInTurn || has_registers(2)) ? 2 : 1;
  static constexpr int kPieces = kRowsAtOnce * kSplit, kPieceColumns = columns_of(kSplit);
  static constexpr bool kTwoSteps = kPieces == 1 && kRowsAtOnce == 1 && kColumnsAtOnce <= (kScaled ? 96 : 104);
  static constexpr int kStepsAtOnce = kTwoSteps ? 4 : kPieces > 1 && !kInTurn && has_registers(kSplit) ? 2 : 1;
  static constexpr int kPlaces = kInTurn ? 1 : kTwoSteps ? 2 : kPieces;  // of products in registers
  // Both warpgroups of a tile wait for the same stages. If they also begin together, they multiply together and add up together,
  // and the Tensor Cores wait. So where pieces take turns, the second one begins a tile when the first has multiplied its first
  // piece, and stays as far behind. Whole steps lose a hundredth by that.
  static constexpr bool kLags = kInTurn && kCooperative && kPieces > 1;
  static constexpr uint32_t kLag = 1;  // of the barriers that CUTLASS leaves to others

  template <int kIndex>
  struct Piece {
    static constexpr int kRow = kIndex / kSplit, kFirst = kIndex % kSplit * kPieceColumns;
    static constexpr int kColumns = kFirst + kPieceColumns < kColumnsAtOnce ? kPieceColumns : kColumnsAtOnce - kFirst;
    static constexpr int kSums = kColumns / 2;                           // of a thread
    static constexpr int kBegin = (kRow * kColumnsAtOnce + kFirst) / 2;  // among all of them
    static constexpr bool kIsLast = kIndex == kPieces - 1;
  };

  // Returns what begins to multiply a piece of a stage.
  CUTLASS_DEVICE static auto piece_multiplier(TensorStorage& storage, int thread) {
    using namespace cute;
    return [first_stage = Factors(storage, thread)](auto piece, float* products, int stage) {
      using Of = decltype(piece);
      auto const factors = first_stage.in(stage);
      fence<Of::kSums>(products);
      warpgroup_arrive();
      CUTLASS_PRAGMA_UNROLL
      for (int k = 0; k < kInstructions; ++k) {
        Wgmma<Of::kColumns, ElementA, ElementB, kMajorA, kMajorB>::fma(
            products, factors.rows(Of::kRow, k), factors.columns(Of::kFirst, k),
            k == 0 ? GMMA::ScaleOut::Zero : GMMA::ScaleOut::One);
      }
      warpgroup_commit_batch();
    };
  }

  template <int kCount>
  CUTLASS_DEVICE static void fence(float* products) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount; ++i) cute::warpgroup_fence_operand(products[i]);
  }

  // Leaves nothing unfinished. While a warpgroup adds the products of one piece up, the Tensor Cores multiply its next one.
  template <class Sums>
  CUTLASS_DEVICE static void promote(MainloopPipeline& pipeline, PipelineState state, Sums& sums, int steps, int thread,
                                     TensorStorage& storage) {
    static_assert(cute::is_void_v<Means>, "nothing is gathered of rows");
    auto const multiply = piece_multiplier(storage, thread);
    auto scaled = [&] {
      if constexpr (kScaled) {
        return typename Scales::template Sums<TiledMma>(storage.scales, thread);
      } else {
        return NoScales{};
      }
    }();
    float products[kPlaces][kPieceColumns / 2];
    auto const place = [&](int index, int step) -> float* { return products[kInTurn ? 0 : kTwoSteps ? step % 2 : index]; };
    auto const start = [&](auto index, int step = 0) { multiply(Piece<index>{}, place(index, step), state.index()); };
    auto const arrived = [&] { pipeline.consumer_wait(state, pipeline.consumer_try_wait(state)); };
    auto const add = [&](auto index, auto const& release, int step = 0) {
      using Of = Piece<decltype(index)::value>;
      float* const mine = place(index, step);
      fence<Of::kSums>(mine);
      if constexpr (kScaled) {
        scaled.template add<Of>(sums, mine, release);
      } else {
        release();
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < Of::kSums; ++i) sums(Of::kBegin + i) += mine[i];
      }
    };
    cute::Int<0> const first;
    cute::Int<kPieces - 1> const last;
    // Some steps. ptxas waits for each instruction where products are read while others are unfinished since an earlier turn of a
    // loop. So nothing is unfinished at the end.
    auto const add_up = [&](auto count) {
      constexpr int kCount = decltype(count)::value;
      arrived();
      start(first);
      cute::for_each(cute::make_int_sequence<kCount>{}, [&](auto step) {
        constexpr bool kMore = decltype(step)::value < kCount - 1;
        if constexpr (kScaled) scaled.begin(state.index());
        cute::for_each(cute::make_int_sequence<kPieces - 1>{}, [&](auto index) {
          start(cute::Int<index + 1>{});
          cute::warpgroup_wait<1>();
          add(index, [] {});
        });
        auto const done = state;
        auto const release = [&] { pipeline.consumer_release(done); };
        ++state;
        if constexpr (kMore) {
          arrived();
          start(first, step + 1);
          cute::warpgroup_wait<1>();
        } else {
          cute::warpgroup_wait<0>();
        }
        add(last, release, step);
      });
    };
    bool const second = kLags && __shfl_sync(0xffffffff, thread / 128, 0) == 1;
    bool leads = kLags && !second;
    // A step whose pieces take turns.
    auto const in_turn = [&] {
      arrived();
      if constexpr (kScaled) scaled.begin(state.index());
      cute::for_each(cute::make_int_sequence<kPieces>{}, [&](auto index) {
        constexpr bool kFirst = decltype(index)::value == 0, kLast = decltype(index)::value == kPieces - 1;
        start(index);
        cute::warpgroup_wait<0>();
        if constexpr (kLags && kFirst) {
          if (leads) cutlass::arch::NamedBarrier::arrive(256, kLag);
          leads = false;
        }
        auto const release = [&] {
          if constexpr (kLast) pipeline.consumer_release(state);
        };
        add(index, release);
      });
      ++state;
    };
    cute::clear(sums);
    if constexpr (kInTurn) {
      if (steps > 0 && second) cutlass::arch::NamedBarrier::sync(256, kLag);
      CUTLASS_PRAGMA_NO_UNROLL
      for (; steps > 0; --steps) in_turn();
      return;
    }
    CUTLASS_PRAGMA_NO_UNROLL
    for (; steps >= kStepsAtOnce; steps -= kStepsAtOnce) add_up(cute::Int<kStepsAtOnce>{});
    if constexpr (kStepsAtOnce > 2) {
      CUTLASS_PRAGMA_NO_UNROLL
      for (; steps > 0; --steps) add_up(cute::Int<1>{});
    } else if (kStepsAtOnce > 1 && steps > 0) {
      add_up(cute::Int<1>{});
    }
  }

  // Counts bytes at a barrier of this block as if they had come.
  CUTLASS_DEVICE static void count(uint64_t& barrier, uint32_t bytes) {
    asm volatile("mbarrier.complete_tx.shared::cluster.relaxed.cluster.b64 [%0], %1;" ::"r"(
                     cute::cast_smem_ptr_to_uint(&barrier)),
                 "r"(bytes)
                 : "memory");
  }

  // The problem's A.
  CUTLASS_DEVICE static auto& of_rows(TensorStorage& storage) {
    if constexpr (kSwapped) {
      return storage.smem_B;
    } else {
      return storage.smem_A;
    }
  }
};

}  // namespace cutlass_ops
