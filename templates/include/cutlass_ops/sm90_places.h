// Values that depend on their place, in Sm90 kernels: leaves of CUTLASS's tree that read no memory.

#pragma once

#include "cutlass_ops/epilogue.h"
#include "cutlass_ops/places.h"

namespace cutlass_ops {

// `Functor` gives the value of a row and a column of D. Where the kernel computes the transposed problem, its own rows are
// D's columns.
template <class Functor, bool kSwapped>
struct PlaceInput : Input<PlaceArguments<Functor>> {
  using Arguments = PlaceArguments<Functor>;
  struct SharedStorage {};

  CUTLASS_HOST_DEVICE PlaceInput() {}
  CUTLASS_HOST_DEVICE PlaceInput(Arguments const& params, SharedStorage const&) : params_(&params) {}

  // `Place` says where value i of a step is, in the kernel's orientation.
  template <class Place>
  struct Callbacks : cutlass::epilogue::fusion::EmptyConsumerStoreCallbacks {
    Functor functor;
    Place place;

    CUTLASS_DEVICE Callbacks(Functor const& functor, Place const& place) : functor(functor), place(place) {}

    template <class Accumulator, int kSize>
    CUTLASS_DEVICE cutlass::Array<float, kSize> visit(cutlass::Array<Accumulator, kSize> const&, int epi_v, int epi_m,
                                                      int epi_n) {
      cutlass::Array<float, kSize> result;
      if constexpr (Place::kFragment) {
        // Value i + 2 is eight rows below value i, and value i + 4 eight columns beside it.
        constexpr int kColumns = Place::kSixteens ? 2 : 1;
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kSize; i += kColumns * 4) {
          CUTLASS_PRAGMA_UNROLL
          for (int next = 0; next < 2; ++next) {
            int2 const at = place(i + next, epi_m, epi_n);
            bool const second = !Place::kSixteens && (at.y & 8);
            int const column = Place::kSixteens ? at.y : at.y & ~8;
            Quad const quad = kSwapped ? functor.quad(column, at.x) : functor.quad(at.x, column);
            CUTLASS_PRAGMA_UNROLL
            for (int row = 0; row < 2; ++row) {
              CUTLASS_PRAGMA_UNROLL
              for (int beside = 0; beside < kColumns; ++beside) {
                float const found = kSwapped ? quad.at[beside][row] : quad.at[row][beside];
                float const other = kSwapped ? quad.at[1][row] : quad.at[row][1];
                result[i + beside * 4 + row * 2 + next] = second ? other : found;
              }
            }
          }
        }
      } else {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kSize; ++i) {
          int2 const at = place(epi_v * kSize + i, epi_m, epi_n);
          result[i] = kSwapped ? functor(at.y, at.x) : functor(at.x, at.y);
        }
      }
      return result;
    }
  };

  // In epilogue.h. `kSixteens`: whether a part of the tile begins at a multiple of sixteen columns, and has whole ones.
  template <int kPartM, int kPartN, bool kSixteens_>
  struct FragmentPlace {
    static constexpr bool kFragment = true, kSixteens = kSixteens_;
    int row, column;  // of the thread's first value

    CUTLASS_DEVICE int2 operator()(int i, int epi_m, int epi_n) const {
      return {row + epi_m * kPartM + i / 2 % 2 * 8, column + epi_n * kPartN + i / 4 * 8 + i % 2};
    }
  };

  // In CUTLASS's own epilogue, which lists the coordinates of a thread's values, relative to the first.
  template <class Coordinates>
  struct ListedPlace {
    static constexpr bool kFragment = false;
    int row, column;
    Coordinates coordinates;

    CUTLASS_DEVICE int2 operator()(int i, int epi_m, int epi_n) const {
      auto const at = coordinates(cute::_, cute::_, cute::_, epi_m, epi_n)(i);
      return {row + int(cute::get<0>(at)), column + int(cute::get<1>(at))};
    }
  };

  template <bool, class... Args>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(
      cutlass::epilogue::fusion::detail::ConsumerStoreArgs<Args...> const& args) {
    using Coordinates = cute::remove_cvref_t<decltype(args.tCcD)>;
    if constexpr (cute::is_same_v<Coordinates, int>) {
      using TiledMma = cute::remove_cvref_t<decltype(args.tiled_mma)>;
      using Tile = cute::remove_cvref_t<decltype(args.tile_shape_mnk)>;
      using Step = cute::remove_cvref_t<decltype(args.epi_tile)>;
      Fragment const first(kAcross<TiledMma> == 1 ? args.thread_idx : args.thread_idx % 128);
      constexpr int kPartN = cute::size<1>(Step{}), kColumns = cute::size<1>(Tile{});
      using Place = FragmentPlace<int(cute::size<0>(Step{})), kPartN, kPartN % 16 == 0 && kColumns % 16 == 0>;
      return Callbacks<Place>(params_->functor(),
                              Place{int(cute::get<0>(args.tile_coord_mnkl)) * int(cute::size<0>(Tile{})) + first.row,
                                    int(cute::get<1>(args.tile_coord_mnkl)) * int(cute::size<1>(Tile{})) + first.column});
    } else {
      using Place = ListedPlace<Coordinates>;
      // The thread's first value lies as far from D's end as this says.
      return Callbacks<Place>(
          params_->functor(),
          Place{int(cute::get<0>(args.problem_shape_mnkl)) - int(cute::get<0>(args.residue_tCcD)),
                int(cute::get<1>(args.problem_shape_mnkl)) - int(cute::get<1>(args.residue_tCcD)), args.tCcD});
    }
  }

 private:
  Arguments const* params_;
};

}  // namespace cutlass_ops
