// The order in which the thread blocks of a persistent kernel take tiles.

#pragma once

#include <algorithm>
#include <cstdint>

#include "cute/tensor.hpp"
#include "cutlass/fast_math.h"
#include "cutlass/gemm/kernel/tile_scheduler.hpp"

#include "cutlass_ops/placement.h"

namespace cutlass_ops {

constexpr int kMaxPlaces = 192;  // clusters of one wave, at most, that can be told apart

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

  struct OneGemm {};
  struct SeveralGemms {
    cutlass::FastDivmod gemm;  // clusters of one
  };

  // The order itself: all that a thread keeps.
  struct Order : cute::conditional_t<kBatched, SeveralGemms, OneGemm> {
    cutlass::FastDivmod strip;  // clusters of a whole strip
    cutlass::FastDivmod width;  // clusters across a whole strip
    cutlass::FastDivmod last;   // and across the last one
    int whole_strips = 0;
    int clusters = 0;
    int active = 0;
    bool along_n = false;
  };

 public:
  struct Arguments : Base::Arguments {
    Groups groups;  // on the host; where fewer clusters are known than run, they keep their own numbers
  };

  struct Params {
    Order order;
    bool placed = false;
    uint8_t places[kMaxPlaces] = {};
  };

  template <class ProblemShape, class TileShape, class ClusterShape>
  static Params to_underlying_arguments(ProblemShape problem, TileShape tile, ClusterShape cluster,
                                        cutlass::KernelHardwareInfo const& hardware, Arguments const& arguments,
                                        void* = nullptr, uint32_t = 1, uint32_t = 1) {
    auto const extent = [&](auto side) {
      return int(cute::ceil_div(cute::ceil_div(cute::get<side>(problem), cute::get<side>(tile)),
                                cute::get<side>(cluster)));
    };
    int const rows = extent(cute::Int<0>{}), columns = extent(cute::Int<1>{});
    using Options = Base::RasterOrderOptions;
    bool const along_n =
        arguments.raster_order == Options::Heuristic ? columns <= rows : arguments.raster_order == Options::AlongN;
    int const across = along_n ? rows : columns, along = along_n ? columns : rows;
    int const width = std::max(1, std::min(arguments.max_swizzle_size, across));

    Params params;
    Order& order = params.order;
    order.strip = cutlass::FastDivmod(std::max(1, width * along));
    order.width = cutlass::FastDivmod(width);
    order.last = cutlass::FastDivmod(std::max(1, across % width));
    order.whole_strips = across / width;
    order.clusters = rows * columns;
    if constexpr (kBatched) {
      order.gemm = cutlass::FastDivmod(std::max(1, order.clusters));
      order.clusters *= int(cute::size(cute::get<3>(problem)));
    }
    order.active = std::min(order.clusters, std::max(1, int(hardware.max_active_clusters)));
    order.along_n = along_n;
    if (order.active <= std::min(arguments.groups.count, kMaxPlaces)) {
      params.placed = true;
      place(arguments.groups.of, order.active, params.places);
    }
    return params;
  }

  // One row of clusters: hardware numbers clusters along x.
  template <class ClusterShape>
  static dim3 grid(Params const& params, ClusterShape cluster) {
    return {unsigned(params.order.active) * unsigned(cute::get<0>(cluster)), unsigned(cute::get<1>(cluster)), 1};
  }

  static bool can_implement(Arguments const&) { return true; }

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

  // `groups` says to which group each cluster belongs: number them group by group.
  static void place(uint8_t const* groups, int count, uint8_t* places) {
    int next = 0;
    for (int group = 0, left = count; left > 0; ++group) {
      for (int i = 0; i < count; ++i) {
        if (groups[i] != group) continue;
        places[i] = uint8_t(next++);
        --left;
      }
    }
  }

  Order order_;
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
