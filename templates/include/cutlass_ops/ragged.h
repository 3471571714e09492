// Matrices that end where a group of rows does, for the epilogue of Sm90 kernels (epilogue.h): what TMA stores of a tile, or
// loads for one, ends there too, although one descriptor serves all groups.
//
// The descriptor has the rows twice, and one dimension more, along which it wraps around: an element's address is
//
//   base + x * row + y * row + z * (2^34 elements - row).
//
// With z = 2^30 the last term is -2^30 rows modulo 2^64, whatever the element's size. A group's row i is at
// x = 2^30 - size + i and y = first + size, and so at its place: and as the descriptor has 2^30 rows along x, the hardware
// leaves out all rows from `size` on. Triton's descriptors of ragged tensors do the same.

#pragma once

#include "cutlass_ops/epilogue.h"
#include "cutlass_ops/sm90_batched.h"
#include "cutlass_ops/sm90_grouped_launch.h"

namespace cutlass_ops {

// A copy by TMA with such a descriptor. Its coordinates are those of one group: rows and columns as they are there, and in the
// batch's place the group's first row and its number. A group's rows are the kernel's columns if it computes the transposed
// problem, `kSwapped`.
template <class Copy, bool kSwapped>
struct RaggedCopy : Copy {
  template <class Shape>
  CUTLASS_DEVICE auto get_tma_tensor(Shape const& shape) const {
    using namespace cute;
    auto const all = Copy::get_tma_tensor(shape);
    int const size = get<kSwapped ? 1 : 0>(shape), x = kRaggedRows - size;
    auto const first = make_coord(kSwapped ? 0 : x, kSwapped ? x : 0, make_coord(size, Int<kRaggedRows>{}));
    auto const strides = all.stride();
    return make_tensor(all.data() + all.layout()(first),
                       make_layout(shape, make_stride(get<0>(strides), get<1>(strides),
                                                      make_stride(get<2, 0>(strides), Int<0>{}))));
  }

  // CuTe's own overloads do not take a class that is derived.
  template <class SourceEngine, class SourceLayout, class Engine, class Layout>
  CUTLASS_DEVICE friend void copy(RaggedCopy const& by, cute::Tensor<SourceEngine, SourceLayout> const& from,
                                  cute::Tensor<Engine, Layout>&& to) {
    cute::copy(static_cast<Copy const&>(by), from, to);
  }
};

// A collective of epilogue.h whose D and C are such matrices: `Collective::Type` with other descriptors, and with a load that
// uses them.
template <class Collective, bool kSwapped>
struct RaggedCollective {
  class Type : public Collective::Type {
    using Base = typename Collective::Type;

   public:
    using typename Base::LoadPipeline;
    using typename Base::LoadPipelineState;
    using typename Base::TensorStorage;

    struct Params : Base::Params {
      RaggedCopy<typename Base::Params::TMA_C, kSwapped> tma_load_c;
      RaggedCopy<typename Base::Params::TMA_D, kSwapped> tma_store_d;
    };

    CUTLASS_DEVICE static void prefetch_tma_descriptors(Params const& params) {
      if constexpr (kHasSource) cute::prefetch_tma_descriptor(params.tma_load_c.get_tma_descriptor());
      cute::prefetch_tma_descriptor(params.tma_store_d.get_tma_descriptor());
    }

    CUTLASS_DEVICE Type(Params const& params, TensorStorage& storage) : Base(params, storage), ragged_(params) {}

    // Parts of C's tile in the order in which epilogue.h takes them. No visitor of that header loads anything here.
    template <class Problem, class Tile, class Coord, class TiledMma>
    CUTLASS_DEVICE auto load(LoadPipeline pipeline, LoadPipelineState state, Problem problem, Tile, Coord coord, TiledMma, int,
                             TensorStorage& storage, int = -1) {
      using namespace cute;
      if constexpr (kHasSource) {
        auto const [m_extent, n_extent, k_extent, l_extent] = problem;
        auto const [m, n, k, l] = coord;
        using Parts = typename Base::EpilogueTile;
        auto const& copy_c = ragged_.tma_load_c;
        Tensor const whole = copy_c.get_tma_tensor(make_shape(m_extent, n_extent, l_extent));
        Tensor const tile = local_tile(whole, take<0, 2>(typename Base::CtaTileMNK{}), make_coord(m, n, l));
        auto const block = copy_c.get_slice(Int<0>{});
        Tensor const from = block.partition_S(flat_divide(tile, Parts{}));
        Tensor const to = block.partition_D(make_tensor(make_smem_ptr(storage.collective.smem_C.begin()), SharedC{}));
        bool const issues = elect_one_sync();
        CUTLASS_PRAGMA_UNROLL
        for (int epi_n = 0; epi_n < size<4>(from); ++epi_n) {
          CUTLASS_PRAGMA_UNROLL
          for (int epi_m = 0; epi_m < size<3>(from); ++epi_m) {
            pipeline.producer_acquire(state);
            if (issues) {
              constexpr uint16_t kNoMulticast = 0;
              cute::copy(copy_c.with(*pipeline.producer_get_barrier(state), kNoMulticast), from(_, _, _, epi_m, epi_n),
                         to(_, _, _, state.index()));
              pipeline.producer_expect_transaction(state);
            }
            pipeline.producer_commit(state);
            ++state;
          }
        }
      }
      return state;
    }

   private:
    static constexpr bool kHasSource = !cute::is_void_v<typename Base::ElementC>;
    static constexpr bool kColumnMajorC = cutlass::epilogue::collective::detail::is_m_major<typename Base::StrideC>();
    using SharedC = decltype(cute::tile_to_shape(
        typename Base::SmemLayoutAtomC{},
        cute::append(cute::shape(typename Base::EpilogueTile{}), cute::Int<Base::DispatchPolicy::StagesC>{}),
        cute::conditional_t<kColumnMajorC, cute::Step<cute::_2, cute::_1, cute::_3>,
                            cute::Step<cute::_1, cute::_2, cute::_3>>{}));

    Params const& ragged_;
  };
};

}  // namespace cutlass_ops
