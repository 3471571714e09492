// Groups of rows for Sm90 kernels (grouped.h): which tiles there are, where a tile's operands lie, and where its results end.
// CUTLASS's kernels, our main loop and our epilogue are those of batches. They get a tile's place in its group, and the group's
// number where that of a batch would be.

#pragma once

#include "cutlass_ops/sm90_batched.h"

#include "cutlass_ops/sm90_grouped_launch.h"

namespace cutlass_ops {

// Tag of the scheduler below.
template <bool kSwapped>
struct GroupedScheduler {};

// The tiles of one group after the other. Tiles begin at a group's first row, so none has rows of two. Within a group, strips
// of a few rows of clusters walk along N: the clusters that run at a time share both operands, and a small group's B is read
// once. Each cluster takes every so many-th tile, and finds the group of its next one from that of its last: a warp looks at
// 128 groups at a time, and every warp finds the same.
//
// CUTLASS's kernels take it as a tile scheduler. It inherits what they ask of one that splits no tile along K.
template <bool kSwapped, class TileShape, class ClusterShape>
class GroupedTileScheduler : public cutlass::gemm::kernel::detail::PersistentTileSchedulerSm90 {
  using Base = cutlass::gemm::kernel::detail::PersistentTileSchedulerSm90;
  static constexpr int kClusterM = cute::size<0>(ClusterShape{}), kClusterN = cute::size<1>(ClusterShape{});
  static constexpr int kM = cute::size<0>(TileShape{}) * kClusterM, kN = cute::size<1>(TileShape{}) * kClusterN;
  static constexpr int kRows = kSwapped ? kN : kM;  // of D, that a cluster has
  static constexpr int kStrip = 8;  // rows of clusters
  static constexpr int kEach = 4;   // groups of a lane at a time

 public:
  using Params = GroupedOrder<kSwapped>;

  // `params` is the kernel's own argument: reading it needs no copy. What runs before may compute where groups end.
  CUTLASS_DEVICE explicit GroupedTileScheduler(Params const& params)
      : params_(params), next_(int(cute::cluster_id_in_grid().x)) {
    cutlass::arch::wait_on_dependent_grids();
    asm volatile("" ::: "memory");  // nothing is read before
  }

  CUTLASS_DEVICE WorkTileInfo initial_work_tile_info(ClusterShape) { return get_current_work(); }

  CUTLASS_DEVICE WorkTileInfo get_current_work() {
    int const rows = find();
    if (rows == 0) return WorkTileInfo::invalid_work_tile();
    int const each = kStrip * params_.columns, within = next_ - first_;
    int const strip = within / each, place = within % each;
    int const width = rows - strip * kStrip < kStrip ? rows - strip * kStrip : kStrip;
    int const row = strip * kStrip + place % width, column = place / width;
    auto const [x, y, z] = cute::block_id_in_cluster();
    int const m = kSwapped ? column : row, n = kSwapped ? row : column;
    return {m * kClusterM + int(x), n * kClusterN + int(y), group_, true};
  }

  CUTLASS_DEVICE void advance_to_next_work(uint32_t count = 1) { next_ += params_.active * int(count); }

  // Asked before the kernel after this one may start, which waits for the end of this one in any case.
  CUTLASS_DEVICE bool is_last_tile(WorkTileInfo&, uint32_t = 1) const { return true; }

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
  // Goes on to the group of the next tile. Returns how many clusters its rows take, 0 where no tile is left. Groups that end
  // before an earlier one does count as empty, so that there are never more tiles than rows take.
  CUTLASS_DEVICE int find() {
    if (next_ - first_ < rows_ * params_.columns) return rows_;  // the same group's
    rows_ = 0;
    constexpr unsigned kWarp = 0xffffffff;
    int const lane = int(threadIdx.x % 32);
    RowGroups const& groups = params_.groups;
    while (group_ < groups.count) {
      int ends[kEach], furthest = 0;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kEach; ++i) {
        int const group = group_ + lane * kEach + i;
        ends[i] = group < groups.count ? groups.end(group) : 0;
      }
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kEach; ++i) furthest = furthest < ends[i] ? ends[i] : furthest;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 1; i < 32; i *= 2) {
        int const other = __shfl_up_sync(kWarp, furthest, i);
        if (lane >= i && furthest < other) furthest = other;
      }
      // Where the groups before this lane's end.
      int before = __shfl_up_sync(kWarp, furthest, 1);
      if (lane == 0 || before < reached_) before = reached_;
      int clusters[kEach], mine = 0;
      int end = before;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kEach; ++i) {
        int const begin = groups.begin(group_ + lane * kEach + i, end);
        clusters[i] = ends[i] > begin ? (ends[i] - begin + kRows - 1) / kRows : 0;
        mine += clusters[i];
        end = ends[i] > end ? ends[i] : end;
      }
      mine *= params_.columns;
      int upto = mine;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 1; i < 32; i *= 2) {
        int const other = __shfl_up_sync(kWarp, upto, i);
        if (lane >= i) upto += other;
      }
      int const wanted = next_ - first_;
      unsigned const found = __ballot_sync(kWarp, wanted < upto);
      if (found == 0) {
        first_ += __shfl_sync(kWarp, upto, 31);
        int const last = __shfl_sync(kWarp, furthest, 31);
        reached_ = reached_ < last ? last : reached_;
        group_ += 32 * kEach;
        continue;
      }
      // Which of its groups, as the lane that has it knows.
      int start = upto - mine, group = 0;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kEach - 1; ++i) {
        int const next = start + clusters[i] * params_.columns;
        bool const passed = group == i && wanted >= next;
        start = passed ? next : start;
        before = passed && before < ends[i] ? ends[i] : before;
        group += passed;
      }
      int rows = clusters[0];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 1; i < kEach; ++i) rows = group == i ? clusters[i] : rows;
      int const owner = __ffs(int(found)) - 1;
      group_ += owner * kEach + __shfl_sync(kWarp, group, owner);
      first_ += __shfl_sync(kWarp, start, owner);
      reached_ = __shfl_sync(kWarp, before, owner);
      rows_ = __shfl_sync(kWarp, rows, owner);
      return rows_;
    }
    return 0;
  }

  Params const& params_;
  int next_;         // tile, counted in clusters
  int group_ = 0;    // of the last tile
  int first_ = 0;    // tile of that group
  int rows_ = 0;     // clusters that its rows take
  int reached_ = 0;  // row at which the groups before it end
};

// A main loop whose rows of A, and their scales, begin where the tile's group does. The rows behind the group's are those of the next one, and
// behind A's last row zeros: their sums are not stored.
template <class Base, bool kSwapped>
class GroupedMainloop : public Base {
 public:
  using typename Base::MainloopPipeline;
  using typename Base::PipelineState;
  using typename Base::TensorStorage;

  using Params = WithGroups<typename Base::Params>;

  template <class Tensors, class Coord, class Steps>
  CUTLASS_DEVICE void load(Params const& params, MainloopPipeline pipeline, PipelineState state, Tensors const&,
                           Coord const& coord, Steps step, int count, int lane, uint32_t rank, TensorStorage& storage) {
    int const group = cute::get<1>(cute::get<3>(coord));
    RowGroups::Rows const rows = params.groups.of(group);
    Base::load(params, scales_of(params.scales, rows, group), pipeline, state, origin_of(rows), coord, step, count, lane, rank,
               storage);
  }

  // Where a group's tiles are loaded from.
  CUTLASS_DEVICE static Origin origin_of(RowGroups::Rows rows) {
    return kSwapped ? Origin{0, rows.first, 0} : Origin{rows.first, 0, 0};
  }

  // The scales of a group's blocks, if blocks have any: they begin where those of its rows and of its matrix do.
  template <class Scales>
  CUTLASS_DEVICE static Scales scales_of(Scales scales, RowGroups::Rows rows, int group) {
    if constexpr (Base::kScaled) {
      auto& of_rows = kSwapped ? scales.columns : scales.rows;
      auto& of_weight = kSwapped ? scales.rows : scales.columns;
      of_rows.move_to(rows.first, group);
      of_rows.last = rows.size - 1;
      of_weight.move_to(rows.first, group);
    }
    return scales;
  }
};

// An epilogue that gets one group's rows: as many as the group has, and its first row and number where a batch's coordinates
// would be.
template <class Base, bool kSwapped>
class GroupedEpilogue : public Base {
 public:
  using typename Base::LoadPipeline;
  using typename Base::LoadPipelineState;
  using typename Base::StorePipeline;
  using typename Base::StorePipelineState;
  using typename Base::TensorStorage;

  using Params = WithGroups<typename Base::Params>;

  CUTLASS_DEVICE GroupedEpilogue(Params const& params, TensorStorage& storage) : Base(params, storage), params_(params) {}

  template <class Problem, class Tile, class Coord, class TiledMma>
  CUTLASS_DEVICE auto load(LoadPipeline pipeline, LoadPipelineState state, Problem problem, Tile tile, Coord coord,
                           TiledMma mma, int thread, TensorStorage& storage, int part = -1) {
    auto const rows = params_.groups.of(number(coord));
    return Base::load(pipeline, state, with_rows(problem, rows), tile, with_rows_at(coord, rows), mma, thread, storage, part);
  }

  template <class Problem, class Tile, class Coord, class Sums, class TiledMma>
  CUTLASS_DEVICE auto store(LoadPipeline load_pipeline, LoadPipelineState loaded, StorePipeline store_pipeline,
                            StorePipelineState stored, Problem problem, Tile tile, Coord coord, Sums const& sums,
                            TiledMma mma, int thread, TensorStorage& storage, int part = -1) {
    auto const rows = params_.groups.of(number(coord));
    return Base::store(load_pipeline, loaded, store_pipeline, stored, with_rows(problem, rows), tile,
                       with_rows_at(coord, rows), sums, mma, thread, storage, part);
  }

 private:
  template <class Coord>
  CUTLASS_DEVICE static int number(Coord const& coord) {
    return cute::get<1>(cute::get<3>(coord));
  }

  // CUTLASS's own loads and stores of tiles also compare the batch's coordinates with the problem's, and a group's first row,
  // which is one of them, lies beyond any number of batches.
  template <class Problem>
  CUTLASS_DEVICE static Problem with_rows(Problem problem, RowGroups::Rows rows) {
    cute::get<kSwapped ? 1 : 0>(problem) = rows.size;
    cute::get<0>(cute::get<3>(problem)) = INT32_MAX;
    return problem;
  }

  template <class Coord>
  CUTLASS_DEVICE static auto with_rows_at(Coord const& coord, RowGroups::Rows rows) {
    return cute::make_coord(cute::get<0>(coord), cute::get<1>(coord), cute::get<2>(coord),
                            cute::make_coord(rows.first, number(coord)));
  }

  Params const& params_;
};

}  // namespace cutlass_ops

template <bool kSwapped, class TileShape, class ClusterShape, uint32_t kStages>
struct cutlass::gemm::kernel::detail::TileSchedulerSelector<cutlass_ops::GroupedScheduler<kSwapped>, cutlass::arch::Sm90,
                                                            TileShape, ClusterShape, kStages> {
  using Scheduler = cutlass_ops::GroupedTileScheduler<kSwapped, TileShape, ClusterShape>;
};
