// Groups of rows, and of K, for Sm90 kernels (grouped.h): what the kernels take, and how a launch gives it.

#pragma once

#include "cutlass_ops/sm90_launch.h"

#include "cutlass_ops/grouped.h"

namespace cutlass_ops {

// Parameters of a main loop or of an epilogue that asks where groups are.
template <class Base>
struct WithGroups : Base {
  RowGroups groups;
};

// Of the main loop of groups of K.
template <class Base>
struct WithGroupsOfK : WithGroups<Base> {
  Divisor of_group;  // clusters of one group's tiles
};

// Of an epilogue whose tiles of C and D end with their group (ragged.h).
template <class Base>
struct Ragged : Base {
  TmaCopy tma_load_c{}, tma_store_d{};
};

constexpr int kRaggedRows = 1 << 30;        // along x; z is as much
constexpr int kRaggedExtent = 0x7fff0000;   // of y and z, which bound nothing
constexpr int64_t kRaggedWrap = 1ll << 34;  // elements

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

// The tiles of batches (sm90_ragged_k.h), of which none is placed by GPC.
struct RaggedKOrder : OrderedParams<true> {
  static constexpr bool kOrdered = false;
};

// The tiles of one group after the other (sm90_grouped.h).
template <bool kSwapped>
struct GroupedOrder : WholeTiles<false> {
  RowGroups groups;
  int columns = 0;  // of clusters
  int active = 0;   // clusters

#if CUTLASS_OPS_HOST
  GroupedOrder() = default;
  explicit GroupedOrder(RowGroups const& groups) : groups(groups) {}

  template <class Problem>
  void fill(Problem const& problem, Geometry const& shape, Hardware const& hardware, Order const&, void*) {
    int const m = shape.m * shape.cluster_m, n = shape.n * shape.cluster_n;
    int const in_rows = kSwapped ? n : m, in_columns = kSwapped ? m : n;  // of D, that a cluster has
    columns = ((kSwapped ? problem.m : problem.n) + in_columns - 1) / in_columns;
    // As many as there can be: each group that has rows may end within a cluster.
    int const rows = groups.all(), count = std::min(groups.count, rows);
    int64_t const most = int64_t(count + (rows - count) / in_rows) * columns;
    active = int(std::max<int64_t>(1, std::min<int64_t>(most, hardware.clusters)));
  }
  template <class Problem>
  dim3 grid(Problem const&, Geometry const& shape, Hardware const&) const {
    return {unsigned(active * shape.cluster_m), unsigned(shape.cluster_n), 1};
  }
#endif
};

#if CUTLASS_OPS_HOST

// The distance between rows, a second time and wrapped around, in the places of those between batches.
inline Batching twice(int64_t row) { return {2, {kRaggedExtent, kRaggedExtent}, {row, kRaggedWrap - row}}; }

// How TMA copies a tile whose rows end with a group.
template <class Element, Major kMajor>
TmaCopy ragged_copy(BatchedMatrix x, int length, int lines) {
  x.rows = kRaggedRows;
  return tile_copy<Element, kMajor>(x, twice(kMajor == Major::kRow ? x.ld : 1), length, lines);
}

#endif

}  // namespace cutlass_ops
