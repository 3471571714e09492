// Nodes for CUTLASS's 2.x epilogue visitor tree: loads, stores and reductions.
//
// CUTLASS has nodes of the same names. They are not used for two reasons. They give every tensor D's vector length, so a
// bias at an odd address or a residual with an odd leading dimension faults. And their reductions are atomic additions, in
// no fixed order. Here each tensor has its own alignment, all addresses are computed in 64 bits, and a tensor may be
// column-major. How a node is called: cutlass/epilogue/threadblock/fusion/visitor_2x.hpp.

#pragma once

#include <cstdint>

#include "cutlass/arch/memory.h"
#include "cutlass/array.h"
#include "cutlass/gemm_coord.h"
#include "cutlass/layout/matrix.h"
#include "cutlass/numeric_conversion.h"

// visitor_2x.hpp does not include all that it names: this comes before it.
#include "cutlass/gemm/kernel/default_gemm_universal_with_visitor.h"

#include "cutlass/epilogue/threadblock/fusion/visitor_2x.hpp"

#include "cutlass_ops/binding.h"
#include "cutlass_ops/sm80_reduction.h"

namespace cutlass_ops {
namespace sm80 {

using cutlass::Array;
using cutlass::gemm::GemmCoord;
using cutlass::epilogue::threadblock::EmptyCallbacks;

// What the nodes need of a thread map. An output tile is visited in steps of some rows each; in a step a thread makes
// kRows x kColumns accesses; one access is kVector neighbours in a row.
template <class ThreadMap>
struct Accesses {
  static constexpr int kVector = ThreadMap::kElementsPerAccess;
  static constexpr int kRows = ThreadMap::Iterations::kRow;
  static constexpr int kColumns = ThreadMap::Iterations::kColumn;
  static constexpr int kLanesPerRow = ThreadMap::Detail::kAccessWidth;
  static constexpr int kWarps = ThreadMap::kThreads / 32;
  static constexpr int kTileM = ThreadMap::Shape::kRow * ThreadMap::Count::kRow * ThreadMap::Shape::kGroup;
  static constexpr int kTileN = ThreadMap::Shape::kColumn;

  static_assert(ThreadMap::Stages == 1, "nodes keep the values of one step");
  static_assert(ThreadMap::Iterations::kGroup == 1 && ThreadMap::Iterations::kCluster == 1, "one group a thread");
  static_assert(ThreadMap::Count::kGroup == 1 && ThreadMap::Count::kCluster == 1, "steps run along rows only");
  static_assert(ThreadMap::Detail::WarpPartitions::kColumn == 1, "a row belongs to one warp");
  static_assert(ThreadMap::Detail::kAccessRows * kLanesPerRow == 32, "every lane has accesses of its own");
  static_assert(kLanesPerRow * kVector * kColumns == kTileN, "a row is covered exactly");
  static_assert(ThreadMap::Detail::kAccessRows * kRows * ThreadMap::Detail::kWarpsRemainingForRows ==
                    ThreadMap::Shape::kRow,
                "the rows of a step are covered exactly");

  int row;     // of the thread's first access in the first step
  int column;

  CUTLASS_DEVICE Accesses(GemmCoord tile, int thread_idx) {
    cutlass::MatrixCoord const first = ThreadMap::initial_offset(thread_idx);
    row = tile.m() * kTileM + first.row();
    column = tile.n() * kTileN + first.column();
  }

  // Distance of an access from the thread's first one.
  CUTLASS_DEVICE static constexpr int row_offset(int step, int row_idx) {
    return step * ThreadMap::Shape::kRow + row_idx * ThreadMap::Delta::kRow;
  }
  CUTLASS_DEVICE static constexpr int column_offset(int column_idx) { return column_idx * ThreadMap::Delta::kColumn; }
};

// What all nodes share: parameters that go to the device as they are, and no shared memory.
template <class Params_>
struct Visitor {
  using Arguments = Params_;
  using Params = Params_;
  struct SharedStorage {};

  template <class ProblemShape>
  static constexpr Params to_underlying_arguments(ProblemShape const&, Arguments const& args, void*) {
    return args;
  }
  template <class ProblemShape>
  static size_t get_workspace_size(ProblemShape const&, Arguments const&) {
    return 0;
  }

  CUTLASS_HOST_DEVICE Visitor() {}
  template <class Storage>
  CUTLASS_HOST_DEVICE Visitor(Params const& params, Storage const&) : params_(&params) {}

 protected:
  Params const* params_ = nullptr;
};

// Memory accesses for one vector of a tensor whose alignment is `Alignment` elements: as wide as that allows.
template <class Element, int Vector, int Alignment>
struct VectorAccess {
  static constexpr int kWidest = 16 / int(sizeof(Element));
  static constexpr int kElements = cutlass::const_min(cutlass::const_min(Vector, Alignment), kWidest);
  using Type = cutlass::AlignedArray<Element, kElements>;

  CUTLASS_DEVICE static void load(Array<Element, Vector>& to, Element const* from, bool guard) {
    Type* parts = reinterpret_cast<Type*>(&to);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Vector / kElements; ++i) {
      cutlass::arch::global_load<Type, sizeof(Type)>(parts[i], from + i * kElements, guard);
    }
  }
  CUTLASS_DEVICE static void store(Element* to, Array<Element, Vector> const& from, bool guard) {
    Type const* parts = reinterpret_cast<Type const*>(&from);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Vector / kElements; ++i) {
      cutlass::arch::global_store<Type, sizeof(Type)>(parts[i], to + i * kElements, guard);
    }
  }
};

// A single value, from the host or from device memory.
template <class Element>
struct ScalarBroadcast : Visitor<Scalar<Element>> {
  using Visitor<Scalar<Element>>::Visitor;

  struct Callbacks : EmptyCallbacks {
    Element value;

    CUTLASS_DEVICE explicit Callbacks(Element value) : value(value) {}

    template <class Accumulator, int Vector>
    CUTLASS_DEVICE Array<Element, Vector> visit(int, int, int, int, Array<Accumulator, Vector> const&) {
      Array<Element, Vector> fragment;
      fragment.fill(value);
      return fragment;
    }
  };

  template <class ProblemShape>
  CUTLASS_DEVICE auto get_callbacks(GemmCoord, int, ProblemShape) {
    return Callbacks(this->params_->ptr != nullptr ? *this->params_->ptr : this->params_->value);
  }
};

// A vector (N,): one value for each column. Read once for a tile, in vectors where the address allows it.
template <class ThreadMap, class Element>
struct RowBroadcast : Visitor<Element const*> {
  using Visitor<Element const*>::Visitor;
  using At = Accesses<ThreadMap>;
  static constexpr int kVector = At::kVector;

  struct Callbacks : EmptyCallbacks {
    Element const* ptr;
    int columns;  // left from the thread's first access on
    bool aligned;
    Array<Element, kVector> fragments[At::kColumns];

    CUTLASS_DEVICE Callbacks(Element const* row, At at, int n) : ptr(row + at.column), columns(n - at.column) {
      using Access = typename VectorAccess<Element, kVector, kVector>::Type;
      aligned = reinterpret_cast<uintptr_t>(row) % sizeof(Access) == 0;
    }

    CUTLASS_DEVICE void begin_epilogue() {
      CUTLASS_PRAGMA_UNROLL
      for (int c = 0; c < At::kColumns; ++c) {
        int const offset = At::column_offset(c);
        fragments[c].clear();
        if (aligned) {
          VectorAccess<Element, kVector, kVector>::load(fragments[c], ptr + offset, offset < columns);
        } else {
          VectorAccess<Element, kVector, 1>::load(fragments[c], ptr + offset, offset < columns);
        }
      }
    }

    template <class Accumulator>
    CUTLASS_DEVICE Array<Element, kVector> visit(int, int, int column_idx, int, Array<Accumulator, kVector> const&) {
      return fragments[column_idx];
    }
  };

  template <class ProblemShape>
  CUTLASS_DEVICE auto get_callbacks(GemmCoord tile, int thread_idx, ProblemShape problem) {
    return Callbacks(*this->params_, At(tile, thread_idx), cute::get<1>(problem));
  }
};

// A vector (M,): one value for each row. Read step by step, which costs fewer registers than the whole tile's.
template <class ThreadMap, class Element>
struct ColBroadcast : Visitor<Element const*> {
  using Visitor<Element const*>::Visitor;
  using At = Accesses<ThreadMap>;

  struct Callbacks : EmptyCallbacks {
    Element const* ptr;
    int rows;  // left from the thread's first access on
    Element values[At::kRows];

    CUTLASS_DEVICE Callbacks(Element const* col, At at, int m) : ptr(col + at.row), rows(m - at.row) {}

    CUTLASS_DEVICE void begin_step(int step) {
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < At::kRows; ++r) {
        int const offset = At::row_offset(step, r);
        values[r] = offset < rows ? ptr[offset] : Element(0);
      }
    }

    template <class Accumulator, int Vector>
    CUTLASS_DEVICE Array<Element, Vector> visit(int, int row_idx, int, int, Array<Accumulator, Vector> const&) {
      Array<Element, Vector> fragment;
      fragment.fill(values[row_idx]);
      return fragment;
    }
  };

  template <class ProblemShape>
  CUTLASS_DEVICE auto get_callbacks(GemmCoord tile, int thread_idx, ProblemShape problem) {
    return Callbacks(*this->params_, At(tile, thread_idx), cute::get<0>(problem));
  }
};

// A thread's view of an (M, N) tensor of any leading dimension. Vectors of a row-major one are contiguous; a
// column-major one is accessed element by element, and only the cache brings the accesses to neighbours together.
template <class ThreadMap, class Element, class Layout, int Alignment>
struct TileView {
  using At = Accesses<ThreadMap>;
  using Vector = Array<Element, At::kVector>;
  static constexpr bool kRowMajor = cutlass::platform::is_same<Layout, cutlass::layout::RowMajor>::value;
  using Access = VectorAccess<Element, At::kVector, Alignment>;

  Element* ptr;  // at the thread's first access
  int64_t ld;
  int rows;  // left from the thread's first access on
  int columns;

  CUTLASS_DEVICE TileView(Matrix const& matrix, At at, int m, int n)
      : ptr(static_cast<Element*>(matrix.data) +
            (kRowMajor ? at.row * matrix.ld + at.column : at.column * matrix.ld + at.row)),
        ld(matrix.ld),
        rows(m - at.row),
        columns(n - at.column) {}

  CUTLASS_DEVICE bool inside(int row, int column) const { return row < rows && column < columns; }

  // What lies outside the tensor reads as zero.
  CUTLASS_DEVICE void load(Vector& to, int row, int column) const {
    to.clear();
    if constexpr (kRowMajor) {
      Access::load(to, ptr + row * ld + column, inside(row, column));
    } else {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < At::kVector; ++i) {
        if (inside(row, column + i)) to[i] = ptr[(column + i) * ld + row];
      }
    }
  }

  CUTLASS_DEVICE void store(Vector const& from, int row, int column) const {
    if constexpr (kRowMajor) {
      Access::store(ptr + row * ld + column, from, inside(row, column));
    } else {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < At::kVector; ++i) {
        if (inside(row, column + i)) ptr[(column + i) * ld + row] = from[i];
      }
    }
  }
};

// An (M, N) input. A step's values are requested before its accumulators are exchanged, which hides some latency. Each
// thread reads an element before it alone may write it, so that an output may overwrite the input in place.
template <class ThreadMap, class Element, class Layout, int Alignment>
struct AuxLoad : Visitor<Matrix> {
  using Visitor<Matrix>::Visitor;
  using At = Accesses<ThreadMap>;
  using View = TileView<ThreadMap, Element, Layout, Alignment>;

  struct Callbacks : EmptyCallbacks {
    View view;
    typename View::Vector fragments[At::kRows * At::kColumns];

    CUTLASS_DEVICE explicit Callbacks(View view) : view(view) {}

    CUTLASS_DEVICE void begin_step(int step) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < At::kRows * At::kColumns; ++i) {
        view.load(fragments[i], At::row_offset(step, i / At::kColumns), At::column_offset(i % At::kColumns));
      }
    }

    template <class Accumulator, int Vector>
    CUTLASS_DEVICE auto visit(int, int, int, int fragment_idx, Array<Accumulator, Vector> const&) {
      return fragments[fragment_idx];
    }
  };

  template <class ProblemShape>
  CUTLASS_DEVICE auto get_callbacks(GemmCoord tile, int thread_idx, ProblemShape problem) {
    return Callbacks(View(*this->params_, At(tile, thread_idx), cute::get<0>(problem), cute::get<1>(problem)));
  }
};

// An (M, N) output, D among them: rounded to nearest once.
template <class ThreadMap, class Element, class Layout, int Alignment>
struct AuxStore : Visitor<Matrix> {
  using Visitor<Matrix>::Visitor;
  using At = Accesses<ThreadMap>;
  using View = TileView<ThreadMap, Element, Layout, Alignment>;

  struct Callbacks : EmptyCallbacks {
    View view;

    CUTLASS_DEVICE explicit Callbacks(View view) : view(view) {}

    template <class Accumulator, class Input, int Vector>
    CUTLASS_DEVICE auto visit(int step, int row_idx, int column_idx, int, Array<Accumulator, Vector> const&,
                              Array<Input, Vector> const& input) {
      cutlass::NumericArrayConverter<Element, Input, Vector> const convert{};
      view.store(convert(input), At::row_offset(step, row_idx), At::column_offset(column_idx));
      return input;
    }
  };

  template <class ProblemShape>
  CUTLASS_DEVICE auto get_callbacks(GemmCoord tile, int thread_idx, ProblemShape problem) {
    return Callbacks(View(*this->params_, At(tile, thread_idx), cute::get<0>(problem), cute::get<1>(problem)));
  }
};

// Reduces each row of the tile to one value: partial[tile_n * M + row], for an output (M,).
template <class Reduce_, class ThreadMap>
struct ColReduction : Visitor<typename Reduce_::State*> {
  using Visitor<typename Reduce_::State*>::Visitor;
  using Reduce = Reduce_;
  using State = typename Reduce::State;
  using At = Accesses<ThreadMap>;

  static int64_t length(GemmCoord problem) { return problem.m(); }
  static int parts(GemmCoord problem) { return (problem.n() + At::kTileN - 1) / At::kTileN; }

  struct Callbacks : EmptyCallbacks {
    State* ptr;  // at the thread's first row
    int rows;    // left from the thread's first access on
    int columns;
    bool writes;
    int extent;  // of the problem's columns
    int step = 0;
    State value{};

    CUTLASS_DEVICE Callbacks(State* partial, At at, int tile_n, int m, int n, int thread_idx)
        : ptr(partial + int64_t(tile_n) * m + at.row),
          rows(m - at.row),
          columns(n - at.column),
          writes(thread_idx % At::kLanesPerRow == 0),
          extent(n) {}

    CUTLASS_DEVICE void begin_step(int step_idx) { step = step_idx; }
    CUTLASS_DEVICE void begin_row(int) { value = Reduce::identity(); }

    template <class Accumulator, int Vector>
    CUTLASS_DEVICE auto visit(int, int, int column_idx, int, Array<Accumulator, Vector> const&,
                              Array<float, Vector> const& input) {
      if (At::column_offset(column_idx) < columns) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < Vector; ++i) {
          value = Reduce::combine(value, Reduce::lift(input[i], extent - columns + At::column_offset(column_idx) + i));
        }
      }
      return input;
    }

    CUTLASS_DEVICE void end_row(int row_idx) {
      CUTLASS_PRAGMA_UNROLL
      for (int lanes = At::kLanesPerRow / 2; lanes > 0; lanes /= 2) {
        value = Reduce::combine(value, shuffle_xor(value, lanes));
      }
      int const offset = At::row_offset(step, row_idx);
      if (writes && offset < rows) ptr[offset] = value;
    }
  };

  template <class ProblemShape>
  CUTLASS_DEVICE auto get_callbacks(GemmCoord tile, int thread_idx, ProblemShape problem) {
    return Callbacks(*this->params_, At(tile, thread_idx), tile.n(), cute::get<0>(problem), cute::get<1>(problem),
                     thread_idx);
  }
};

// Reduces each column of the tile to one value: partial[tile_m * N + column], for an output (N,). It needs the whole
// tile in one thread block: stream-K's separate reduction, where each block has some rows of it, must be off.
template <class Reduce_, class ThreadMap>
struct RowReduction : Visitor<typename Reduce_::State*> {
  using Reduce = Reduce_;
  using State = typename Reduce::State;
  using At = Accesses<ThreadMap>;

  struct SharedStorage {
    State values[At::kWarps][At::kTileN];
  };

  static int64_t length(GemmCoord problem) { return problem.n(); }
  static int parts(GemmCoord problem) { return (problem.m() + At::kTileM - 1) / At::kTileM; }

  CUTLASS_HOST_DEVICE RowReduction() {}
  CUTLASS_HOST_DEVICE RowReduction(State* const& params, SharedStorage const& storage)
      : Visitor<State*>(params, storage), storage_(const_cast<SharedStorage*>(&storage)) {}

  struct Callbacks : EmptyCallbacks {
    SharedStorage* storage;
    State* ptr;        // at the tile's first column
    int rows;          // left from the thread's first access on
    int columns;       // left from the tile's first column on
    int first_column;  // of the thread, in the tile
    int thread_idx;
    int extent;  // of the problem's rows
    Array<State, At::kVector> values[At::kColumns];

    CUTLASS_DEVICE Callbacks(SharedStorage* storage, State* partial, At at, GemmCoord tile, int m, int n,
                             int thread_idx)
        : storage(storage),
          ptr(partial + int64_t(tile.m()) * n + tile.n() * At::kTileN),
          rows(m - at.row),
          columns(n - tile.n() * At::kTileN),
          first_column(at.column - tile.n() * At::kTileN),
          thread_idx(thread_idx),
          extent(m) {}

    CUTLASS_DEVICE void begin_epilogue() {
      CUTLASS_PRAGMA_UNROLL
      for (int c = 0; c < At::kColumns; ++c) values[c].fill(Reduce::identity());
    }

    template <class Accumulator, int Vector>
    CUTLASS_DEVICE auto visit(int step, int row_idx, int column_idx, int, Array<Accumulator, Vector> const&,
                              Array<float, Vector> const& input) {
      if (At::row_offset(step, row_idx) < rows) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < Vector; ++i) {
          int const row = extent - rows + At::row_offset(step, row_idx);
          values[column_idx][i] = Reduce::combine(values[column_idx][i], Reduce::lift(input[i], row));
        }
      }
      return input;
    }

    CUTLASS_DEVICE void end_epilogue() {
      CUTLASS_PRAGMA_UNROLL
      for (int c = 0; c < At::kColumns; ++c) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < At::kVector; ++i) {
          State value = values[c][i];
          CUTLASS_PRAGMA_UNROLL
          for (int lanes = At::kLanesPerRow; lanes < 32; lanes *= 2) {
            value = Reduce::combine(value, shuffle_xor(value, lanes));
          }
          if (thread_idx % 32 < At::kLanesPerRow) {
            storage->values[thread_idx / 32][first_column + At::column_offset(c) + i] = value;
          }
        }
      }
      __syncthreads();
      for (int column = thread_idx; column < At::kTileN && column < columns; column += ThreadMap::kThreads) {
        State value = storage->values[0][column];
        for (int warp = 1; warp < At::kWarps; ++warp) value = Reduce::combine(value, storage->values[warp][column]);
        ptr[column] = value;
      }
    }
  };

  template <class ProblemShape>
  CUTLASS_DEVICE auto get_callbacks(GemmCoord tile, int thread_idx, ProblemShape problem) {
    return Callbacks(storage_, *this->params_, At(tile, thread_idx), tile, cute::get<0>(problem),
                     cute::get<1>(problem), thread_idx);
  }

 private:
  SharedStorage* storage_ = nullptr;
};

}  // namespace sm80
}  // namespace cutlass_ops
