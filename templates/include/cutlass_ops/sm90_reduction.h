// Reductions of D to one value for each row or each column, for the epilogue of epilogue.h. They are visitors that pass on
// what they see. Each tile leaves its part of a result in memory. The tile that comes last joins the parts, always in the
// same order, so each launch gives the same bits. There is no second kernel, and no memory to clear before this one, so
// launches overlap as others do.

#pragma once

#include "cutlass_ops/epilogue.h"
#include "cutlass_ops/reduce.h"
#include "cutlass_ops/sm90_gemm.h"
#include "cutlass_ops/sm90_results.h"

namespace cutlass_ops {

#if defined(__CUDACC__)

// Called by a warp that has stored its part of some results. Returns whether all `each` parts of them are there.
CUTLASS_DEVICE bool all_arrived(unsigned* arrived, int each) {
  __syncwarp();
  bool last = false;
  if (threadIdx.x % 32 == 0) {
    __threadfence();
    last = atomicAdd(arrived, 1u) == unsigned(each) - 1;
    if (last) *arrived = 0;  // as it was found
    __threadfence();
  }
  __syncwarp();  // what this lane has seen, all have
  return __any_sync(0xffffffff, last);
}

// Joins the parts of `count` results, the first of which has this number; a warp's work.
template <class Reduce, class Element>
CUTLASS_DEVICE void join(Reduced<Element> const& reduced, int first, int count, int each) {
  using State = typename Reduce::State;
  // Results whose parts are on their way together, and parts of each for a lane: a few rows of a wide D have many hundred. No
  // more than some registers hold.
  constexpr int kWords = int(sizeof(State)) / 4, kAtOnce = kWords <= 2 ? 8 : 4, kAhead = kWords <= 2 ? 4 : 2;
  int const lane = int(threadIdx.x) % 32;
  CUTLASS_PRAGMA_NO_UNROLL
  for (int at = first; at < first + count; at += kAtOnce) {
    State const* const parts = static_cast<State const*>(reduced.parts.values) + int64_t(at) * each;
    int const left = first + count - at;
    State joined[kAtOnce], mine{};
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kAtOnce; ++i) joined[i] = Reduce::identity();
    CUTLASS_PRAGMA_NO_UNROLL
    for (int part = lane; part < each; part += 32 * kAhead) {
      State found[kAtOnce][kAhead];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kAtOnce; ++i) {
        CUTLASS_PRAGMA_UNROLL
        for (int ahead = 0; ahead < kAhead; ++ahead) {
          int const at = part + 32 * ahead;
          found[i][ahead] = i < left && at < each ? load_part(parts + i * each + at) : Reduce::identity();
        }
      }
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kAtOnce; ++i) {
        CUTLASS_PRAGMA_UNROLL
        for (int ahead = 0; ahead < kAhead; ++ahead) joined[i] = Reduce::combine(joined[i], found[i][ahead]);
      }
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      CUTLASS_PRAGMA_UNROLL
      for (int other = 16; other > 0; other /= 2) {
        joined[i] = Reduce::combine(joined[i], shuffle_xor(joined[i], other));
      }
      if (lane == i) mine = joined[i];
    }
    if (lane < kAtOnce && lane < left) put<Reduce>(reduced.results, at + lane, mine);
  }
}

// Stores what one tile has kept: a part, or the result where there is no other part.
template <class Reduce, class Element>
CUTLASS_DEVICE void leave(Reduced<Element> const& reduced, int result, int part, int each,
                          typename Reduce::State const& kept) {
  if (each == 1) {
    put<Reduce>(reduced.results, result, kept);
  } else {
    static_cast<typename Reduce::State*>(reduced.parts.values)[int64_t(result) * each + part] = kept;
  }
}

#endif

// Joins several results over the lanes that differ in bits kLane to 16 of their number. Two lanes share the work while the
// number of results is even: each sends the half that the other one goes on with. So eight results over eight lanes take
// seven exchanges instead of twenty-four. `kLeft` results are left for a lane, from the one with the number that `join`
// returns on; lanes that differ in bits of `kSame` alone have the same ones.
template <class Reduce, int kCount, int kLane>
struct Shared {
  static constexpr bool kHalves = kCount % 2 == 0;
  using Next = Shared<Reduce, kHalves ? kCount / 2 : kCount, kLane * 2>;
  static constexpr int kLeft = Next::kLeft, kSame = Next::kSame | (kHalves ? 0 : kLane);
  using State = typename Reduce::State;

  CUTLASS_DEVICE static int join(State* kept, int thread) {
    bool const upper = thread & kLane;
    if constexpr (kHalves) {
      constexpr int kHalf = kCount / 2;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kHalf; ++i) {
        State const sent = upper ? kept[i] : kept[i + kHalf], own = upper ? kept[i + kHalf] : kept[i];
        kept[i] = Reduce::combine(own, shuffle_xor(sent, kLane));
      }
      return (upper ? kHalf : 0) + Next::join(kept, thread);
    } else {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kCount; ++i) kept[i] = Reduce::combine(kept[i], shuffle_xor(kept[i], kLane));
      return Next::join(kept, thread);
    }
  }
};
template <class Reduce, int kCount>
struct Shared<Reduce, kCount, 32> {
  static constexpr int kLeft = kCount, kSame = 0;
  CUTLASS_DEVICE static int join(typename Reduce::State*, int) { return 0; }
};

// One value for each of the kernel's rows. A warp has rows of its own, sixteen in each part of the tile. Warpgroups side by
// side, `kSides` of them, each leave a part.
template <class Reduce, class Tile, class EpilogueTile, class Element, int kSides>
struct ColReduction : Input<Reduced<Element>> {
  static constexpr int kRows = cute::size<0>(Tile{}), kColumns = cute::size<1>(Tile{});
  static constexpr int kPartM = cute::size<0>(EpilogueTile{}), kPartN = cute::size<1>(EpilogueTile{});
  static constexpr int kParts = kRows / kPartM, kWarpRows = 16;
  using State = typename Reduce::State;
  struct SharedStorage {};

  // Results of a tile, warps that have some of them each, and parts of each result.
  static constexpr int kResults = kRows, kWarps = kPartM / kWarpRows;
  CUTLASS_HOST_DEVICE static int parts(int columns) { return (columns + kColumns - 1) / kColumns * kSides; }

  CUTLASS_HOST_DEVICE ColReduction() {}
  CUTLASS_HOST_DEVICE ColReduction(Reduced<Element> const& params, SharedStorage const&) : params_(&params) {}

  struct Callbacks : cutlass::epilogue::fusion::EmptyConsumerStoreCallbacks {
    Reduced<Element> const& reduced;
    int tile, part, each;
    int rows, columns;  // of D, from the tile's first ones on
    int extent;         // of D's columns
    int thread;         // of one side's
    State mine[kParts][2];

    CUTLASS_DEVICE Callbacks(Reduced<Element> const& reduced, int tile, int part, int each, int rows, int columns,
                             int extent, int thread)
        : reduced(reduced), tile(tile), part(part), each(each), rows(rows), columns(columns), extent(extent),
          thread(thread) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kParts; ++i) mine[i][0] = mine[i][1] = Reduce::identity();
    }

    template <class Accumulator, class Value, int kSize>
    CUTLASS_DEVICE auto visit(cutlass::Array<Accumulator, kSize> const&, int, int epi_m, int epi_n,
                              cutlass::Array<Value, kSize> const& values) {
      int const left = columns - epi_n * kPartN - Fragment(thread).column;
      CUTLASS_PRAGMA_UNROLL
      for (int row = 0; row < 2; ++row) {
        float x[kSize / 2];
        int at[kSize / 2];
        bool there[kSize / 2];
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kSize / 2; ++i) {
          int const column = i / 2 * 8 + i % 2;
          x[i] = float(values[i / 2 * 4 + row * 2 + i % 2]);
          at[i] = extent - left + column;
          there[i] = column < left;
        }
        mine[epi_m][row] = Reduce::combine(mine[epi_m][row], fold<Reduce>(x, at, there));
      }
      return values;
    }

    CUTLASS_DEVICE void end() {
#if defined(__CUDACC__)
      if (rows <= 0 || columns <= 0) return;  // a tile that only fills its cluster up
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 2 * kParts; ++i) {
        State value = mine[i / 2][i % 2];
        value = Reduce::combine(value, shuffle_xor(value, 1));
        value = Reduce::combine(value, shuffle_xor(value, 2));
        int const row = i / 2 * kPartM + i % 2 * 8 + Fragment(thread).row;
        if (thread % 4 == 0 && row < rows) leave<Reduce>(reduced, tile * kRows + row, part, each, value);
      }
      int const warp = thread / 32;
      if (each == 1 || !all_arrived(reduced.parts.arrived + tile * kWarps + warp, each)) return;
      CUTLASS_PRAGMA_NO_UNROLL
      for (int i = 0; i < kParts; ++i) {
        int const row = i * kPartM + warp * kWarpRows;
        join<Reduce>(reduced, tile * kRows + row, cute::min(int(kWarpRows), rows - row), each);
      }
#endif
    }
  };

  template <bool, class... Args>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(
      cutlass::epilogue::fusion::detail::ConsumerStoreArgs<Args...> const& args) {
    static_assert(kSides == kAcross<cute::remove_cvref_t<decltype(args.tiled_mma)>>);
    auto const [m, n, k, l] = args.tile_coord_mnkl;
    auto const [m_extent, n_extent, k_extent, l_extent] = args.problem_shape_mnkl;
    int const side = kSides == 1 ? 0 : args.thread_idx / 128;
    return Callbacks(*params_, m, n * kSides + side, parts(n_extent), m_extent - m * kRows, n_extent - n * kColumns,
                     n_extent, args.thread_idx - side * 128);
  }

 private:
  Reduced<Element> const* params_;
};

// One value for each of the kernel's columns: warps leave theirs in shared memory, and each finishes some columns.
template <class Reduce, class Tile, class EpilogueTile, class Element, int kSides>
struct RowReduction : Input<Reduced<Element>> {
  static constexpr int kRows = cute::size<0>(Tile{}), kColumns = cute::size<1>(Tile{});
  static constexpr int kPartM = cute::size<0>(EpilogueTile{}), kPartN = cute::size<1>(EpilogueTile{});
  static constexpr int kWarpsDown = kPartM / 16;
  using State = typename Reduce::State;
  struct SharedStorage {
    alignas(16) State values[kWarpsDown][kColumns];
  };

  // As above.
  static constexpr int kResults = kColumns, kWarps = kWarpsDown * kSides;
  CUTLASS_HOST_DEVICE static int parts(int rows) { return (rows + kRows - 1) / kRows; }

  CUTLASS_HOST_DEVICE RowReduction() {}
  CUTLASS_HOST_DEVICE RowReduction(Reduced<Element> const& params, SharedStorage const& storage)
      : params_(&params), values_(const_cast<State*>(&storage.values[0][0])) {}

  struct Callbacks : cutlass::epilogue::fusion::EmptyConsumerStoreCallbacks {
    Reduced<Element> const& reduced;
    State* values;
    int tile, part, each;
    int rows, columns;  // of D, from the tile's first ones on
    int extent;         // of D's rows
    int thread;

    CUTLASS_DEVICE Callbacks(Reduced<Element> const& reduced, State* values, int tile, int part, int each, int rows,
                             int columns, int extent, int thread)
        : reduced(reduced), values(values), tile(tile), part(part), each(each), rows(rows), columns(columns),
          extent(extent), thread(thread) {}

    // All warps have read what they left for the tile before.
    CUTLASS_DEVICE bool begin_sync_needed() const { return true; }

    template <class Accumulator, class Value, int kSize>
    CUTLASS_DEVICE auto visit(cutlass::Array<Accumulator, kSize> const&, int, int epi_m, int epi_n,
                              cutlass::Array<Value, kSize> const& seen) {
#if defined(__CUDACC__)
      static_assert(kSize == kPartN / 2);
      Fragment const first(thread % (kWarpsDown * 32));
      int const left = rows - epi_m * kPartM - first.row;
      State* const mine = values + first.row / 16 * kColumns + epi_n * kPartN + first.column;
      constexpr int kCount = kPartN / 4;
      State kept[kCount];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kCount; ++i) {
        int const of = i / 2 * 4 + i % 2;
        float const x[] = {float(seen[of]), float(seen[of + 2])};
        int const at[] = {extent - left, extent - left + 8};
        bool const there[] = {left > 0, left > 8};
        kept[i] = fold<Reduce>(x, at, there);
      }
      using Lanes = Shared<Reduce, kCount, 4>;
      int const own = Lanes::join(kept, thread);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Lanes::kLeft; ++i) {
        State& result = mine[(own + i) / 2 * 8 + (own + i) % 2];
        if ((thread & Lanes::kSame) == 0) result = epi_m == 0 ? kept[i] : Reduce::combine(result, kept[i]);
      }
#endif
      return seen;
    }

    CUTLASS_DEVICE void end() {
#if defined(__CUDACC__)
      if (rows <= 0 || columns <= 0) return;  // a tile that only fills its cluster up
      cutlass::arch::NamedBarrier::sync(kWarps * 32, cutlass::arch::ReservedNamedBarriers::EpilogueBarrier);
      constexpr int kOwn = (kColumns + kWarps - 1) / kWarps;
      int const warp = thread / 32, first = warp * kOwn, count = cute::min(int(kOwn), cute::min(int(kColumns), columns) - first);
      for (int column = thread % 32; column < count; column += 32) {
        State value = values[first + column];
        CUTLASS_PRAGMA_UNROLL
        for (int i = 1; i < kWarpsDown; ++i) value = Reduce::combine(value, values[i * kColumns + first + column]);
        leave<Reduce>(reduced, tile * kColumns + first + column, part, each, value);
      }
      if (count <= 0 || each == 1 || !all_arrived(reduced.parts.arrived + tile * kWarps + warp, each)) return;
      join<Reduce>(reduced, tile * kColumns + first, count, each);
#endif
    }
  };

  template <bool, class... Args>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(
      cutlass::epilogue::fusion::detail::ConsumerStoreArgs<Args...> const& args) {
    static_assert(kSides == kAcross<cute::remove_cvref_t<decltype(args.tiled_mma)>>);
    static_assert(kWarps * 32 == cute::size(decltype(args.tiled_mma){}));
    auto const [m, n, k, l] = args.tile_coord_mnkl;
    auto const [m_extent, n_extent, k_extent, l_extent] = args.problem_shape_mnkl;
    return Callbacks(*params_, values_, n, m, parts(m_extent), m_extent - m * kRows, n_extent - n * kColumns, m_extent,
                     args.thread_idx);
  }

 private:
  Reduced<Element> const* params_;
  State* values_;
};

}  // namespace cutlass_ops
