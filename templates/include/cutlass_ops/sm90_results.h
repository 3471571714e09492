// Where reductions of D to one value for each row or each column leave their results, and what the tiles of a launch leave for
// the last of them (sm90_reduction.h).

#pragma once

#include "cutlass_ops/results.h"
#include "cutlass_ops/sm90_launch.h"
#include "cutlass_ops/standing.h"

namespace cutlass_ops {

// What tiles leave for the last of them.
struct Parts {
  void* values = nullptr;       // what the tiles kept of each result, side by side
  unsigned* arrived = nullptr;  // for the results that a warp has of a tile, how many parts: zero before a kernel, and after it
};

template <class Element>
struct Reduced {
  typename ResultsOf<Element>::Type results{};
  Parts parts;
};

#if CUTLASS_OPS_HOST

// One of a kernel's reductions: results of a tile, elements of D that a part is of, parts of a tile, warps that have some of a
// tile's results each, and bytes that are kept of a result.
struct Reducing {
  int results, elements, sides, warps, bytes;

  // Bytes of the parts of so many results, each of `extent` elements.
  int64_t parts_bytes(int count, int extent) const {
    int64_t const each = int64_t(extent + elements - 1) / elements * sides;
    return each == 1 ? 0 : Preparing::rounded(count * each * bytes);
  }

  // Finds memory for them. Each of a kernel's results counts its own parts: `kWhich` says which this is.
  template <int kWhich>
  cudaError_t share(Parts& parts, int count, int extent, Preparing& preparing) const {
    if (preparing.queue.gives_up()) return cudaSuccess;  // the memory is its stream's
    parts.values = preparing.take(parts_bytes(count, extent));
    int64_t const tiles = (int64_t(count) + results - 1) / results;
    void* start;
    int64_t const found = tiles * warps * int64_t(sizeof(unsigned));
    cudaError_t const error =
        Standing::of<std::integral_constant<int, kWhich>>(preparing.device, preparing.queue.stream(), found, &start);
    parts.arrived = static_cast<unsigned*>(start);
    return error;
  }
};

#endif  // CUTLASS_OPS_HOST

}  // namespace cutlass_ops
