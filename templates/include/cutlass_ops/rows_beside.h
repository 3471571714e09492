// The same for means that are taken beside the main loop (means_beside.h).

#pragma once

#include "cutlass_ops/rows.h"
#include "cutlass_ops/sm90_launch.h"
#include "cutlass_ops/standing.h"

namespace cutlass_ops {

// How the blocks of a grid share the rows and their means. All of the memory is zero before a kernel, and after it.
struct Sharing {
  unsigned* claimed;  // rows that warps have claimed, and a last claim of each warp
  unsigned* seen;     // how many tiles of D have read each tile of rows, for each of the means
  int tiles;          // of rows
  int readers;        // tiles of D that a tile of rows has
};

template <class Element>
struct RowsToShare : RowsToRead<Element> {
  Sharing beside;
};

struct Awaited;

// Means of one kind as an epilogue reads them.
template <>
struct Vector<Awaited> {
  Awaited* values = nullptr;
  unsigned* seen = nullptr;
  int readers = 0;

  CUTLASS_DEVICE void forget(int tile, int first, int rows, int lane) const;
};

#if CUTLASS_OPS_HOST

// Finds memory for a launch. A tile of rows has as many readers as there are tiles of D along the other side, rounded up to
// whole clusters. `transposed`: whether A's rows are the kernel's columns.
template <class What, class Element, class Problem>
cudaError_t share_rows(RowsToShare<Element>& rows, Problem const& problem, Geometry const& shape, bool transposed,
                       Preparing const& preparing) {
  constexpr int kMeans = What::kCount;
  int const down = shape.clusters_down(problem.m) * shape.cluster_m;
  int const across = shape.clusters_across(problem.n) * shape.cluster_n;
  int const tiles = transposed ? across : down, readers = transposed ? down : across;

  constexpr int64_t kWord = sizeof(unsigned), kAlignment = 256 / kWord;
  auto const aligned = [](int64_t words) { return (words + kAlignment - 1) / kAlignment * kAlignment; };
  int64_t const seen = aligned(1), means = seen + aligned(int64_t(tiles) * kMeans);
  int64_t const words = means + int64_t(rows.rows) * kMeans;
  if (preparing.queue.gives_up()) return cudaSuccess;  // the memory is its stream's
  void* start;
  cudaError_t const error = Standing::of<Awaited>(preparing.device, preparing.queue.stream(), words * kWord, &start);
  if (error != cudaSuccess) return error;
  auto* const first = static_cast<unsigned*>(start);
  rows.beside = {first, first + seen, tiles, readers};
  rows.means = reinterpret_cast<float*>(first + means);
  return cudaSuccess;
}

// The first or the second of the means.
template <class Element>
Vector<Awaited> awaited(RowsToShare<Element> const& params, int index) {
  auto* const all = reinterpret_cast<Awaited*>(params.means + int64_t(index) * params.rows);
  return {all, params.beside.seen + int64_t(index) * params.beside.tiles, params.beside.readers};
}

#endif  // CUTLASS_OPS_HOST

}  // namespace cutlass_ops
