// Groups of K for Sm90 kernels: A (M, T) and B (T, N) have E groups of columns and rows that follow each other, and each group
// has a D of its own of (E, M, N). So is the gradient of the weights of groups of rows (grouped.h). Where groups end is known on
// the device alone, when the kernel runs.
//
// CUTLASS's kernels and our epilogue are those of batches. Each tile has its own number of steps along K, and its operands end
// where its group does.

#pragma once

#include "cutlass_ops/sm90_batched.h"

#include "cutlass_ops/sm90_grouped_launch.h"

namespace cutlass_ops {

// Tag of the scheduler below.
struct RaggedKScheduler {};

// The tiles of batches, in the same order. The kernels below count steps along K by tiles.
class RaggedKTileScheduler : public BatchedTileScheduler {
  using Base = BatchedTileScheduler;
 public:
  using typename Base::Params;

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
  using Stages = typename Base::PipelineState;
 public:
  using typename Base::MainloopPipeline;
  using typename Base::TensorStorage;

  // How many of the block's tiles a consumer has behind it, its own and the other warpgroup's.
  struct PipelineState {
    int tiles = 0;

    CUTLASS_DEVICE void advance(int count) { tiles += count; }
  };

  using Params = WithGroupsOfK<typename Base::Params>;

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
