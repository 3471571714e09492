// Groups of K for Sm90 kernels: A (M, T) and B (T, N) have E groups of columns and rows that follow each other, and each group
// has a D of its own of (E, M, N). So is the gradient of the weights of groups of rows (grouped.h). Where groups end is known on
// the device alone, when the kernel runs.
//
// CUTLASS's kernels and our epilogue are those of batches. Each tile has its own number of steps along K, and its operands end
// where its group does.

#pragma once

#include "cutlass_ops/sm90_batched.h"

#include "cutlass_ops/grouped.h"
#include "cutlass_ops/ragged.h"

namespace cutlass_ops {

#if CUTLASS_OPS_HOST

// Reads the arguments of one call: A, B, D with a matrix for each group, where groups end, and what the epilogue reads and
// writes, as for batches.
class RaggedKOperands : public BatchedOperands {
 public:
  explicit RaggedKOperands(Call& call) : BatchedOperands(call) {}

  Problem problem(BatchedMatrix const& a, BatchedMatrix const& b, BatchedMatrix const& d) {
    found_ = ~0u;  // only D has a dimension of groups
    Problem const p = BatchedOperands::problem(a, b, d);
    if (rank_ != 1 || p.k > kRaggedRows) fail_shape(0);
    return p;
  }

  template <class Element = int32_t>  // of which a kernel's source says what DLPack calls it
  RowGroups groups(Problem p) {
    expect_none();
    RowGroups const found{vector<Element>(p.count).values, p.count, p.k};
    expect(p.count);
    return found;
  }
};

#endif  // CUTLASS_OPS_HOST

// Tag of the scheduler below.
struct RaggedKScheduler {};

// The tiles of batches, in the same order. The kernels below count steps along K by tiles.
class RaggedKTileScheduler : public BatchedTileScheduler {
  using Base = BatchedTileScheduler;
  using Usual = cutlass::gemm::kernel::detail::PersistentTileSchedulerSm90;

 public:
  struct Params : Base::Params {
    // CUTLASS's kernels give these two back to get_grid_shape.
    int log_swizzle_size_ = 0;
    Usual::RasterOrder raster_order_ = Usual::RasterOrder::AlongM;
  };

  template <class... Given>
  static Params to_underlying_arguments(Given const&... given) {
    return {Base::to_underlying_arguments(given...)};
  }

  template <class Problem, class Tile, class Cluster, class... Others>
  static dim3 get_grid_shape(Params const& params, Problem const&, Tile, Cluster cluster, Others const&...) {
    return Base::grid(params, cluster);
  }

  // What runs before may compute where groups end.
  CUTLASS_DEVICE explicit RaggedKTileScheduler(Params const& params) : Base(params) {
    cutlass::arch::wait_on_dependent_grids();
    asm volatile("" ::: "memory");  // nothing is read before
  }

  template <class... Others>
  CUTLASS_HOST_DEVICE static int get_work_k_tile_count(WorkTileInfo const&, Others const&...) {
    return 1;
  }
};

// A main loop whose tiles have the steps along K of their group. CUTLASS's kernels think that a tile has one, and count what a
// warpgroup's tiles have: the main loop itself knows how many stages these take.
template <class Base>
class RaggedKMainloop : public Base {
  static constexpr int kTileK = cute::size<2>(typename Base::TileShape{});
  using Cluster = typename Base::DispatchPolicy::ClusterShape;
  using Stages = typename Base::PipelineState;
  template <int kSide>
  static int clusters(int extent) {
    constexpr int kExtent = cute::size<kSide>(typename Base::TileShape{}) * cute::size<kSide>(Cluster{});
    return (extent + kExtent - 1) / kExtent;
  }

 public:
  using typename Base::MainloopPipeline;
  using typename Base::TensorStorage;

  // How many of the block's tiles a consumer has behind it, its own and the other warpgroup's.
  struct PipelineState {
    int tiles = 0;

    CUTLASS_DEVICE void advance(int count) { tiles += count; }
  };

  struct Arguments : Base::Arguments {
    RowGroups groups;
  };
  struct Params : Base::Params {
    RowGroups groups;
    cutlass::FastDivmod of_group;  // clusters of one group's tiles
  };

  template <class Problem>
  static Params to_underlying_arguments(Problem problem, Arguments arguments, void* workspace) {
    using namespace cute;
    int const m = int(get<0>(problem)), n = int(get<1>(problem));
    get<2>(problem) = kRaggedRows;
    auto const all = make_shape(get<0>(problem), get<1>(problem), get<2>(problem), make_shape(kRaggedExtent, kRaggedExtent));
    twice(arguments.dA);
    twice(arguments.dB);
    Params params{Base::to_underlying_arguments(all, arguments, workspace), arguments.groups};
    params.of_group = cutlass::FastDivmod(std::max(1, clusters<0>(m) * clusters<1>(n)));
    return params;
  }

  // K of one step, which is what CUTLASS's kernels count.
  template <class Problem>
  CUTLASS_DEVICE auto load_init(Problem problem, Params const& params) const {
    cute::get<2>(problem) = kTileK;
    return Base::load_init(problem, params);
  }

  // An empty group has none.
  CUTLASS_DEVICE static int steps_of(RowGroups::Rows group) { return (group.size + kTileK - 1) / kTileK; }

  // ---- Producer ----

  // Where a group's tiles are loaded from, and the batch's coordinates: both operands from the group's first row on, and none
  // of their rows behind its last one (ragged.h).
  CUTLASS_DEVICE static Origin origin_of(RowGroups::Rows group) { return {0, 0, kRaggedRows - group.size}; }
  CUTLASS_DEVICE static auto batch_of(RowGroups::Rows group) {
    return cute::make_coord(group.first + group.size, cute::Int<kRaggedRows>{});
  }

  template <class State, class Tensors, class Coord, class Step>
  CUTLASS_DEVICE void load(Params const& params, MainloopPipeline pipeline, State const&, Tensors const&,
                           Coord const& coord, Step const&, int, int lane, uint32_t rank, TensorStorage& storage) {
    using namespace cute;
    RowGroups::Rows const group = params.groups.of(int(get<0>(get<3>(coord))));
    int const steps = steps_of(group);
    auto const here = make_coord(get<0>(coord), get<1>(coord), get<2>(coord), batch_of(group));
    Base::load(params, params.scales, pipeline, filled_, origin_of(group), here, make_coord_iterator(steps), steps, lane, rank,
               storage);
    filled_.advance(steps);
  }

  template <class State>
  CUTLASS_DEVICE void load_tail(MainloopPipeline pipeline, State const&) {
    Base::load_tail(pipeline, filled_);
  }

  // ---- Consumers ----

  template <class Sums>
  CUTLASS_DEVICE void mma(MainloopPipeline pipeline, PipelineState state, Sums& sums, int, int thread, TensorStorage& storage,
                          Params const& params) {
    for (; tiles_ < state.tiles; ++tiles_) read_.advance(steps_at(params, tiles_));
    steps_ = steps_at(params, state.tiles);
    if (steps_ == 0) return cute::clear(sums);
    Base::mma(pipeline, read_, sums, steps_, thread, storage, params);
  }

  CUTLASS_DEVICE void mma_tail(MainloopPipeline pipeline, PipelineState, int) {
    if (steps_ != 0) Base::mma_tail(pipeline, read_, steps_);
  }

 private:
  // Steps of the block's tile of a number, as the scheduler counts them.
  CUTLASS_DEVICE static int steps_at(Params const& params, int tile) {
    int const place = int(cute::cluster_id_in_grid().x) + tile * int(cute::cluster_grid_dims().x);
    return steps_of(params.groups.of(params.of_group.div(place)));
  }

  // The distance between steps along K, a second time and wrapped around, in the places of those between batches.
  template <class Stride>
  static void twice(Stride& stride) {
    int64_t const row = cute::get<1>(stride);
    cute::get<2>(stride) = cute::make_stride(row, kRaggedWrap - row);
  }

  Stages filled_ = cutlass::make_producer_start_state<MainloopPipeline>();  // of the producer
  Stages read_;                                                            // of a consumer, before the tile of its number
  int tiles_ = 0;                                                          // which that is
  int steps_ = 0;                                                          // of the tile that a consumer multiplied last
};

}  // namespace cutlass_ops

template <class TileShape, class ClusterShape, uint32_t kStages>
struct cutlass::gemm::kernel::detail::TileSchedulerSelector<cutlass_ops::RaggedKScheduler, cutlass::arch::Sm90, TileShape,
                                                            ClusterShape, kStages> {
  using Scheduler = cutlass_ops::RaggedKTileScheduler;
};
