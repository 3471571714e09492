// The order in which the thread blocks of a persistent kernel take tiles.

#pragma once

#include "cute/tensor.hpp"
#include "cutlass/gemm/kernel/tile_scheduler.hpp"

#include "cutlass_ops/sm90_launch.h"

namespace cutlass_ops {

// Tags of the scheduler below: for the tiles of one GEMM, and of one after the other.
struct OrderedScheduler {};
struct BatchedScheduler {};

// Tiles in strips: strips of `swizzle` rows of clusters walk along N, or strips of columns along M. The last strip may be
// narrower, so every tile of the order exists. Each cluster begins with the tile of its own number, or of the number that
// `places` gives it, and steps by the number of clusters.
//
// CUTLASS's kernels take it as a tile scheduler. It inherits what they ask of one that splits no tile along K.
template <bool kBatched>
class OrderedTileSchedulerOf : public cutlass::gemm::kernel::detail::PersistentTileSchedulerSm90 {
  using Base = cutlass::gemm::kernel::detail::PersistentTileSchedulerSm90;

 public:
  using Params = OrderedParams<kBatched>;

  // `params` is the kernel's own argument: reading one place of it needs no copy of them all.
  CUTLASS_DEVICE explicit OrderedTileSchedulerOf(Params const& params)
      : order_(params.order), next_(int(cute::cluster_id_in_grid().x)) {
    if (params.placed) next_ = params.places[next_];
  }

  template <class ClusterShape>
  CUTLASS_DEVICE WorkTileInfo initial_work_tile_info(ClusterShape) {
    return get_current_work();
  }

  CUTLASS_DEVICE WorkTileInfo get_current_work() const { return tile(next_); }

  CUTLASS_DEVICE void advance_to_next_work(uint32_t count = 1) { next_ += order_.active * int(count); }

  CUTLASS_DEVICE bool is_last_tile(WorkTileInfo&, uint32_t count = 1) const {
    return next_ + order_.active * int(count) >= order_.clusters;
  }

  CUTLASS_DEVICE auto fetch_next_work(WorkTileInfo) {
    advance_to_next_work();
    return cute::make_tuple(get_current_work(), true);
  }

  template <class Pipeline, class State>
  CUTLASS_DEVICE auto fetch_next_work(WorkTileInfo current, Pipeline&, State) {
    return fetch_next_work(current);
  }

  // ---- Of no concern to whole tiles ----

  using Base::compute_epilogue;
  using Base::fixup;

  CUTLASS_HOST_DEVICE static bool compute_epilogue(WorkTileInfo const&, Params const&) { return true; }
  CUTLASS_HOST_DEVICE static bool requires_separate_reduction(Params const&) { return false; }

  template <class Fragment>
  CUTLASS_DEVICE static void fixup(Params const&, WorkTileInfo const&, Fragment&, uint32_t, uint32_t) {}

 private:
  CUTLASS_DEVICE WorkTileInfo tile(int index) const {
    if (index >= order_.clusters) return WorkTileInfo::invalid_work_tile();
    int gemm = 0;
    if constexpr (kBatched) order_.gemm(gemm, index, index);
    int strip, within, along, across;
    order_.strip(strip, within, index);
    if (strip < order_.whole_strips) {
      order_.width(along, across, within);
    } else {
      order_.last(along, across, within);
    }
    across += strip * order_.width.divisor;
    int const row = order_.along_n ? across : along, column = order_.along_n ? along : across;
    auto const [x, y, z] = cute::block_id_in_cluster();
    auto const shape = cute::cluster_shape();
    return {row * int(shape.x) + int(x), column * int(shape.y) + int(y), gemm, true};
  }

  TileOrder<kBatched> order_;
  int next_;
};

using OrderedTileScheduler = OrderedTileSchedulerOf<false>;
using BatchedTileScheduler = OrderedTileSchedulerOf<true>;

}  // namespace cutlass_ops

template <class TileShape, class ClusterShape, uint32_t kStages>
struct cutlass::gemm::kernel::detail::TileSchedulerSelector<cutlass_ops::OrderedScheduler, cutlass::arch::Sm90,
                                                            TileShape, ClusterShape, kStages> {
  using Scheduler = cutlass_ops::OrderedTileScheduler;
};

template <class TileShape, class ClusterShape, uint32_t kStages>
struct cutlass::gemm::kernel::detail::TileSchedulerSelector<cutlass_ops::BatchedScheduler, cutlass::arch::Sm90,
                                                            TileShape, ClusterShape, kStages> {
  using Scheduler = cutlass_ops::BatchedTileScheduler;
};
