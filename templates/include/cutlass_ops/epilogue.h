// From accumulators to D: the epilogue of Sm90 kernels whose D is stored by TMA and whose inputs are rows, columns, scalars,
// at most one tile, and a second product. It takes the place of CUTLASS's collective, which serves any operation, and
// derives through a dozen tiled copies where every value lies. That is a large part of compilation. Here each thread
// computes where its own values lie. The tree of visitors, the loads and all types are still CUTLASS's.

#pragma once

#include "cutlass_ops/halves.h"

#include "cutlass_ops/epilogue_math.h"
#include "cutlass_ops/sm90_launch.h"

#include "cute/tensor.hpp"
#include "cutlass/epilogue/collective/collective_epilogue.hpp"
#include "cutlass/epilogue/dispatch_policy.hpp"
#include "cutlass/epilogue/fusion/sm90_callbacks_tma_warpspecialized.hpp"
#include "cutlass/gemm/collective/builders/sm90_common.inl"

namespace cutlass_ops {

// Where the values of one wgmma lie, whatever its number of columns: value i of a thread is in row `row + 8 * (i / 2 % 2)`
// and column `column + 8 * (i / 4) + i % 2` of the rows of all warpgroups, of which each has 64.
struct Fragment {
  int row;
  int column;

  CUTLASS_DEVICE explicit Fragment(int thread)
      : row(thread / 32 * 16 + thread % 32 / 4), column(thread % 4 * 2) {}
};

// Columns that go to memory at a time. If they do not divide the tile, its parts are narrower, and several go together.
constexpr int kStepColumns = 32;

// Warpgroups side by side: each has all rows of the tile and its own columns.
template <class TiledMma>
constexpr int kAcross = cute::size<2>(typename TiledMma::ThrLayoutVMNK{});

// ---- Inputs: visitors, leaves of CUTLASS's tree -------------------------------------------------------------------

// What CUTLASS asks of a visitor.
template <class Params_>
struct Input : cutlass::epilogue::fusion::Sm90VisitorImpl<> {
  using Params = Params_;
};

// Reading a value takes two steps, so that several can be on their way at once. Elements that may have to be waited for have
// overloads of their own (means_beside.h).
template <class Element>
CUTLASS_DEVICE Element peek(Element const* at) {
  return *at;
}
template <class Element>
CUTLASS_DEVICE void settle(Element&, Element const*) {}

// What follows when a tile has been read. Only means need something: this tile may have been their last reader.
template <class Element>
struct AfterReading {
  CUTLASS_DEVICE AfterReading(Vector<Element> const&, int, int, int) {}
  CUTLASS_DEVICE void operator()(int) const {}
};

// What a thread holds of one value for each column: those of a part of the tile.
template <int kPart>
struct PerColumn : cutlass::epilogue::fusion::EmptyConsumerStoreCallbacks {
  float part[kPart / 4];

  template <class Element>
  CUTLASS_DEVICE void load(Element const* first) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kPart / 4; ++i) part[i] = float(first[i / 2 * 8 + i % 2]);
  }
  template <class Accumulator, int kSize>
  CUTLASS_DEVICE cutlass::Array<float, kSize> visit(cutlass::Array<Accumulator, kSize> const&, int, int, int) {
    cutlass::Array<float, kSize> result;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kSize; ++i) result[i] = part[i / 4 * 2 + i % 2];
    return result;
  }
};

// And of one value for each row: two in every part of the tile.
template <int kParts>
struct PerRow : cutlass::epilogue::fusion::EmptyConsumerStoreCallbacks {
  float mine[kParts][2];

  template <class Accumulator, int kSize>
  CUTLASS_DEVICE cutlass::Array<float, kSize> visit(cutlass::Array<Accumulator, kSize> const&, int, int epi_m, int) {
    cutlass::Array<float, kSize> result;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kSize; ++i) result[i] = mine[epi_m][i / 2 % 2];
    return result;
  }
};

// One value for each column: the tile's go to shared memory first, since every thread needs a quarter of them. Where each of
// several warpgroups has a place of its own there, none waits for another.
template <class Tile, class EpilogueTile, class Element, int kGroups = 1>
struct RowInput : Input<Vector<Element>> {
  static constexpr int kColumns = cute::size<1>(Tile{}), kPart = cute::size<1>(EpilogueTile{});
  struct SharedStorage {
    alignas(16) Element values[kGroups * kColumns];
  };

  CUTLASS_HOST_DEVICE RowInput() {}
  CUTLASS_HOST_DEVICE RowInput(Vector<Element> const& params, SharedStorage const& storage)
      : params_(&params), shared_(const_cast<Element*>(storage.values)) {}

  struct Callbacks : PerColumn<kPart> {
    Element const* values;
    Element* shared;
    int count, thread, threads, loaded = -1;
    AfterReading<Element> after;

    CUTLASS_DEVICE Callbacks(Element const* values, Element* shared, int count, int thread, int threads,
                             AfterReading<Element> const& after)
        : values(values), shared(shared), count(count), thread(thread), threads(threads), after(after) {}

    CUTLASS_DEVICE void begin() {
      constexpr int kEach = (kColumns + 127) / 128;
      Element found[kEach];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kEach; ++i) {
        int const column = thread + i * threads;
        found[i] = column < kColumns && column < count ? peek(values + column) : Element(0.0f);
      }
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kEach; ++i) {
        int const column = thread + i * threads;
        if (column >= kColumns) break;
        if (column < count) settle(found[i], values + column);
        shared[column] = found[i];
      }
    }
    CUTLASS_DEVICE bool begin_sync_needed() const { return true; }
    CUTLASS_DEVICE void begin_loop(int, int epi_n) {
      if (epi_n == loaded) return;  // the same columns as just before
      loaded = epi_n;
      this->load(shared + epi_n * kPart + Fragment(thread).column);
    }
    CUTLASS_DEVICE void end() { after(thread); }
  };

  template <bool, class... Args>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(
      cutlass::epilogue::fusion::detail::ConsumerStoreArgs<Args...> const& args) {
    int const tile = cute::get<1>(args.tile_coord_mnkl), extent = cute::get<1>(args.problem_shape_mnkl);
    int const first = tile * kColumns, group = kGroups == 1 ? 0 : args.thread_idx / 128;
    int const thread = kGroups == 1 ? args.thread_idx : args.thread_idx % 128;
    return Callbacks(params_->values + first, shared_ + group * kColumns, extent - first, thread,
                     cute::size(args.tiled_mma) / kGroups, AfterReading<Element>(*params_, tile, kColumns, extent));
  }

 private:
  Vector<Element> const* params_;
  Element* shared_;
};

// One value for each row: a thread has two in every part of the tile.
template <class Tile, class EpilogueTile, class Element>
struct ColInput : Input<Vector<Element>> {
  static constexpr int kRows = cute::size<0>(Tile{}), kPart = cute::size<0>(EpilogueTile{});
  struct SharedStorage {};

  CUTLASS_HOST_DEVICE ColInput() {}
  CUTLASS_HOST_DEVICE ColInput(Vector<Element> const& params, SharedStorage const&) : params_(&params) {}

  struct Callbacks : PerRow<kRows / kPart> {
    Element const* values;
    int count, thread;
    AfterReading<Element> after;

    CUTLASS_DEVICE Callbacks(Element const* values, int count, int thread, AfterReading<Element> const& after)
        : values(values), count(count), thread(thread), after(after) {}

    CUTLASS_DEVICE void begin() {
      constexpr int kEach = kRows / kPart * 2;
      Element found[kEach];
      auto const row = [](int i) { return i / 2 * kPart + i % 2 * 8; };
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kEach; ++i) found[i] = row(i) < count ? peek(values + row(i)) : Element(0.0f);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kEach; ++i) {
        if (row(i) < count) settle(found[i], values + row(i));
        this->mine[i / 2][i % 2] = float(found[i]);
      }
    }
    CUTLASS_DEVICE void end() { after(thread); }
  };

  template <bool, class... Args>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(
      cutlass::epilogue::fusion::detail::ConsumerStoreArgs<Args...> const& args) {
    constexpr int kSide = kAcross<cute::remove_cvref_t<decltype(args.tiled_mma)>>;
    int const thread = kSide == 1 ? args.thread_idx : args.thread_idx % 128;
    int const tile = cute::get<0>(args.tile_coord_mnkl), extent = cute::get<0>(args.problem_shape_mnkl);
    int const first = tile * kRows + Fragment(thread).row;
    return Callbacks(params_->values + first, extent - first, args.thread_idx,
                     AfterReading<Element>(*params_, tile, kRows, extent));
  }

 private:
  Vector<Element> const* params_;
};

// What the main loop gathered of the problem's rows: one value for each of the kernel's rows. `Values` says where they lie.
// They are there once the threads that work on the tile have met.
template <class Tile, class EpilogueTile, class Values>
struct ColGathered : Input<Nothing> {
  static constexpr int kPart = cute::size<0>(EpilogueTile{}), kParts = cute::size<0>(Tile{}) / kPart;
  struct SharedStorage {};

  CUTLASS_HOST_DEVICE ColGathered() {}
  CUTLASS_HOST_DEVICE ColGathered(Nothing const&, SharedStorage const&) {}

  struct Callbacks : PerRow<kParts> {
    float const* values;

    CUTLASS_DEVICE explicit Callbacks(float const* values) : values(values) {}

    CUTLASS_DEVICE bool begin_sync_needed() const { return true; }
    CUTLASS_DEVICE void begin_loop(int epi_m, int) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 2; ++i) this->mine[epi_m][i] = values[epi_m * kPart + i * 8];
    }
  };

  template <bool, class... Args>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(
      cutlass::epilogue::fusion::detail::ConsumerStoreArgs<Args...> const& args) {
    constexpr int kSide = kAcross<cute::remove_cvref_t<decltype(args.tiled_mma)>>;
    int const thread = kSide == 1 ? args.thread_idx : args.thread_idx % 128;
    return Callbacks(Values::values() + Fragment(thread).row);
  }
};

// The same for each of the kernel's columns. In a kernel that computes the transposed problem these are the problem's rows.
template <class Tile, class EpilogueTile, class Values>
struct RowGathered : Input<Nothing> {
  static constexpr int kPart = cute::size<1>(EpilogueTile{});
  struct SharedStorage {};

  CUTLASS_HOST_DEVICE RowGathered() {}
  CUTLASS_HOST_DEVICE RowGathered(Nothing const&, SharedStorage const&) {}

  struct Callbacks : PerColumn<kPart> {
    float const* values;

    CUTLASS_DEVICE explicit Callbacks(float const* values) : values(values) {}

    CUTLASS_DEVICE bool begin_sync_needed() const { return true; }
    CUTLASS_DEVICE void begin_loop(int, int epi_n) { this->load(values + epi_n * kPart); }
  };

  template <bool, class... Args>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(
      cutlass::epilogue::fusion::detail::ConsumerStoreArgs<Args...> const& args) {
    return Callbacks(Values::values() + Fragment(args.thread_idx).column);
  }
};

// The second product: the epilogue below puts it where CUTLASS's own has a part of C.
struct ProductInput : Input<Nothing> {
  struct SharedStorage {};

  CUTLASS_HOST_DEVICE ProductInput() {}
  CUTLASS_HOST_DEVICE ProductInput(Nothing const&, SharedStorage const&) {}

  template <class Product>
  struct Callbacks : cutlass::epilogue::fusion::EmptyConsumerStoreCallbacks {
    Product const& product;

    CUTLASS_DEVICE explicit Callbacks(Product const& product) : product(product) {}

    template <class Accumulator, int kSize>
    CUTLASS_DEVICE cutlass::Array<float, kSize> visit(cutlass::Array<Accumulator, kSize> const&, int, int, int) {
      cutlass::Array<float, kSize> result;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kSize; ++i) result[i] = product(i);
      return result;
    }
  };

  template <bool, class... Args>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(
      cutlass::epilogue::fusion::detail::ConsumerStoreArgs<Args...> const& args) {
    return Callbacks<cute::remove_cvref_t<decltype(args.tCrC)>>(args.tCrC);
  }
};

// ---- Shared memory -----------------------------------------------------------------------------------------------

// A part of the tile in shared memory: `Shared` is a tensor of its rows and columns.
template <class Element, bool kColumnMajor, class Shared>
struct Part {
  static constexpr bool kMatrices = sizeof(Element) == 2;  // 8 by 8 values at a time, by a quarter of a warp each

  Shared const& shared;
  int thread;

  // Values 8 * i to 8 * i + 7 of each thread: 16 rows of a warp, and 16 columns, or 8 where no more are left.
  template <int kValues>
  CUTLASS_DEVICE void put(cutlass::Array<Element, kValues> const& values) const {
    if constexpr (kMatrices) {
      auto const* const words = reinterpret_cast<uint32_t const*>(&values);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i + 3 < kValues / 2; i += 4) {
        uint32_t const at = matrix(i * 4);
        if constexpr (kColumnMajor) {
          asm volatile("stmatrix.sync.aligned.x4.trans.m8n8.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(words[i]),
                       "r"(words[i + 1]), "r"(words[i + 2]), "r"(words[i + 3]) : "memory");
        } else {
          asm volatile("stmatrix.sync.aligned.x4.m8n8.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(words[i]),
                       "r"(words[i + 1]), "r"(words[i + 2]), "r"(words[i + 3]) : "memory");
        }
      }
      if constexpr (kValues % 8 != 0) {
        constexpr int i = kValues / 2 - 2;
        uint32_t const at = matrix(i * 4);
        if constexpr (kColumnMajor) {
          asm volatile("stmatrix.sync.aligned.x2.trans.m8n8.shared.b16 [%0], {%1, %2};" ::"r"(at), "r"(words[i]),
                       "r"(words[i + 1]) : "memory");
        } else {
          asm volatile("stmatrix.sync.aligned.x2.m8n8.shared.b16 [%0], {%1, %2};" ::"r"(at), "r"(words[i]),
                       "r"(words[i + 1]) : "memory");
        }
      }
    } else if constexpr (sizeof(Element) == 1) {
      put_pairs(values);
    } else {
      each<kValues>([&](int i, Element* at) { *at = values[i]; });
    }
  }

  template <int kValues>
  CUTLASS_DEVICE void get(cutlass::Array<Element, kValues>& values) const {
    if constexpr (kMatrices) {
      auto* const words = reinterpret_cast<uint32_t*>(&values);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i + 3 < kValues / 2; i += 4) {
        uint32_t const at = matrix(i * 4);
        if constexpr (kColumnMajor) {
          asm volatile("ldmatrix.sync.aligned.x4.trans.m8n8.shared.b16 {%0, %1, %2, %3}, [%4];"
                       : "=r"(words[i]), "=r"(words[i + 1]), "=r"(words[i + 2]), "=r"(words[i + 3]) : "r"(at) : "memory");
        } else {
          asm volatile("ldmatrix.sync.aligned.x4.m8n8.shared.b16 {%0, %1, %2, %3}, [%4];"
                       : "=r"(words[i]), "=r"(words[i + 1]), "=r"(words[i + 2]), "=r"(words[i + 3]) : "r"(at) : "memory");
        }
      }
      if constexpr (kValues % 8 != 0) {
        constexpr int i = kValues / 2 - 2;
        uint32_t const at = matrix(i * 4);
        if constexpr (kColumnMajor) {
          asm volatile("ldmatrix.sync.aligned.x2.trans.m8n8.shared.b16 {%0, %1}, [%2];"
                       : "=r"(words[i]), "=r"(words[i + 1]) : "r"(at) : "memory");
        } else {
          asm volatile("ldmatrix.sync.aligned.x2.m8n8.shared.b16 {%0, %1}, [%2];"
                       : "=r"(words[i]), "=r"(words[i + 1]) : "r"(at) : "memory");
        }
      }
    } else {
      each<kValues>([&](int i, Element* at) { values[i] = *at; });
    }
  }

 private:
  // Where this lane's eight values of a matrix begin, for the matrices whose first column is `column`. The matrices are rows
  // 0 to 7, rows 8 to 15, and the same rows of the next eight columns.
  CUTLASS_DEVICE uint32_t matrix(int column) const {
    int const lane = thread % 32, rows = thread / 32 * 16;
    int const row = rows + (kColumnMajor ? lane / 8 % 2 * 8 : lane % 16);
    int const first = lane / 16 * 8 + (kColumnMajor ? lane % 8 : 0);
    return cute::cast_smem_ptr_to_uint(cute::raw_pointer_cast(&shared(row, column + first)));
  }

  // Values of 8 bits, two neighbours in memory at a time. A thread has neighbours in a row. Neighbours in a column belong to
  // two threads of adjacent rows. Of two columns, the thread of the even row stores the first.
  template <int kValues>
  CUTLASS_DEVICE void put_pairs(cutlass::Array<Element, kValues> const& values) const {
    Fragment const mine(thread);
    auto const* const words = reinterpret_cast<uint32_t const*>(&values);  // two columns of a row, and of that 8 below
    bool const odd = mine.row % 2 != 0;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kValues / 4; ++i) {
      uint32_t word = words[i];
      int row = mine.row, column = mine.column + i * 8;
      if constexpr (kColumnMajor) {
        uint32_t const other = __shfl_xor_sync(0xffffffff, word, 4);
        word = odd ? __byte_perm(other, word, 0x7351) : __byte_perm(word, other, 0x6240);
        row -= odd;
        column += odd;
      }
      CUTLASS_PRAGMA_UNROLL
      for (int below = 0; below < 2; ++below) {
        uint32_t const at = cute::cast_smem_ptr_to_uint(cute::raw_pointer_cast(&shared(row + below * 8, column)));
        asm volatile("st.shared.b16 [%0], %1;" ::"r"(at), "h"(uint16_t(word >> below * 16)) : "memory");
      }
    }
  }

  template <int kValues, class Use>
  CUTLASS_DEVICE void each(Use const& use) const {
    Fragment const mine(thread);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kValues; ++i) {
      use(i, cute::raw_pointer_cast(&shared(mine.row + i / 2 % 2 * 8, mine.column + i / 4 * 8 + i % 2)));
    }
  }
};

// ---- Collective --------------------------------------------------------------------------------------------------

// What CUTLASS's builder would assemble, for parts of the tile and numbers of stages of our choice. The copies that it
// names are those of its own stores.
template <class Tile, class EpilogueTile, class ElementC, class LayoutC, class ElementD, class LayoutD, int kStagesC,
          int kStagesD, class Callbacks>
struct Collective {
  static constexpr bool kHasSource = !cute::is_void_v<ElementC>;
  static constexpr bool kReuse = kHasSource && cutlass::sizeof_bits_v<ElementC> == cutlass::sizeof_bits_v<ElementD>;
  using StrideC = cutlass::detail::TagToStrideC_t<cute::conditional_t<kHasSource, LayoutC, LayoutD>>;
  using StrideD = cutlass::detail::TagToStrideC_t<LayoutD>;
  template <class Element, class Stride>
  using Atom = decltype(cutlass::gemm::collective::detail::ss_smem_selector<
                        cutlass::gemm::detail::is_major<0, Stride>() ? cute::GMMA::Major::MN : cute::GMMA::Major::K,
                        Element, cute::remove_cvref_t<decltype(cute::get<0>(EpilogueTile{}))>,
                        cute::remove_cvref_t<decltype(cute::get<1>(EpilogueTile{}))>>());
  using Type = cutlass::epilogue::collective::CollectiveEpilogue<
      cutlass::epilogue::Sm90TmaWarpSpecialized<kStagesC, kStagesD, 1, kReuse, !kHasSource>, Tile, EpilogueTile, ElementC,
      StrideC, ElementD, StrideD, Callbacks, cute::SM90_TMA_LOAD,
      Atom<cute::conditional_t<kHasSource, ElementC, ElementD>, StrideC>, void, cute::SM90_TMA_STORE,
      Atom<ElementD, StrideD>, void, void, void>;
};

// What an epilogue needs for scales of D: nothing, if D has none. quantized.h has the other case.
struct Unscaled {
  static constexpr bool kAny = false, kByWarps = false;
  template <class Params>
  using Kept = Params;
  template <class Pipeline>
  using Loading = Pipeline;
  template <class Storage, int kRows>
  using Stored = Storage;
};

// Whether the kernel waits for the one before it only here, in the epilogue: that one takes means of rows (row_means.h).
#if defined(CUTLASS_OPS_WAITS_LATE)
constexpr bool kWaitsLate = true;
#else
constexpr bool kWaitsLate = false;
#endif

// CUTLASS's collective epilogue with other stores. With two products, the accumulators have twice D's columns, first one
// product's, then the other's. In a kernel that computes the transposed problem they have twice D's rows. `Scales` says
// whether and how D is stored in FP8 with scales of blocks.
template <class Collective, int kProducts = 1, bool kSwapped = false, class Scales = Unscaled>
class Epilogue : public Collective::Type {
  using Base = typename Collective::Type;

  // The problem as D has it.
  template <class Problem>
  CUTLASS_HOST_DEVICE static Problem of_output(Problem problem) {
    cute::get<kSwapped ? 0 : 1>(problem) /= kProducts;
    return problem;
  }

 public:
  using LoadPipeline = typename Scales::template Loading<typename Base::LoadPipeline>;
  using PipelineStorage = typename LoadPipeline::SharedStorage;
  using typename Base::LoadPipelineState;
  using Params = typename Scales::template Kept<typename Base::Params>;
  using typename Base::StorePipeline;
  using typename Base::StorePipelineState;
  using TensorStorage = typename Scales::template Stored<typename Base::TensorStorage, int(cute::size<0>(typename Base::CtaTileMNK{}))>;

  CUTLASS_DEVICE Epilogue(Params const& params, TensorStorage& storage)
      : Base(params, storage), params_(params), fusion_(params.thread, storage.thread) {}

  // No visitor of this header loads anything here: without C, CUTLASS's loads would be compiled for nothing.
  template <class... Arguments>
  CUTLASS_DEVICE auto load(LoadPipeline pipeline, LoadPipelineState state, Arguments&&... arguments) {
    if constexpr (kHasSource) {
      return Base::load(pipeline, state, arguments...);
    } else {
      return state;
    }
  }

  template <class Problem, class Tile, class Coord, class Engine, class Layout, class TiledMma>
  CUTLASS_DEVICE auto store(LoadPipeline load_pipeline, LoadPipelineState loaded, StorePipeline store_pipeline,
                            StorePipelineState stored, Problem whole_problem, Tile, Coord coord,
                            cute::Tensor<Engine, Layout> const& accumulators, TiledMma mma, int thread,
                            TensorStorage& storage, int = -1) {
    using namespace cute;
    constexpr int kThreads = size(TiledMma{}), kSide = kAcross<TiledMma>, kValues = kPartM * kPartN / (kThreads / kSide);
    constexpr int kParts = kPartsN / kSide;  // of a warpgroup's columns
    static_assert(size(Layout{}) == kProducts * kPartsM * kParts * kValues && kPartsN % kSide == 0);
    static_assert(kSide == 1 || !kHasSource, "the producer loads parts for all warpgroups in turn");
    static_assert(kProducts == 1 || (kSide == 1 && !kHasSource), "products are halves of all columns, and C's place is taken");
    auto const problem = of_output(whole_problem);
    int const side = kSide == 1 ? 0 : thread / 128, own_thread = kSide == 1 ? thread : thread % 128;
    auto const synchronize = [&] {
      if constexpr (Scales::kByWarps) {
        cutlass::arch::NamedBarrier::sync(128, uint32_t(kMeeting + thread / 128));
      } else {
        cutlass::arch::NamedBarrier::sync(kThreads, cutlass::arch::ReservedNamedBarriers::EpilogueBarrier);
      }
    };
    auto const [m_extent, n_extent, k_extent, l_extent] = problem;
    auto const [m, n, k, l] = coord;
    Tensor const whole = params_.tma_store_d.get_tma_tensor(make_shape(m_extent, n_extent, l_extent));
    Tensor const tile = local_tile(whole, take<0, 2>(CtaTile{}), make_coord(m, n, l));
    auto const block = params_.tma_store_d.get_slice(Int<0>{});
    Tensor const to = block.partition_D(flat_divide(tile, EpilogueTile_{}));
    Tensor const shared_d = make_tensor(make_smem_ptr(storage.collective.smem_D.begin()), SharedD{});
    Tensor const from = block.partition_S(shared_d);
    bool const issues = own_thread / 32 == 0;

    // The tile that the producer loads, if there is one, where D will lie then; or the second product.
    cutlass::Array<cute::conditional_t<kProducts == 1, ElementC_, float>, kValues> source;
    Tensor source_tensor = make_tensor(make_rmem_ptr(source.data()), Shape<Int<kValues>>{});
    int const unused = 0;
    auto callbacks = fusion_.template get_consumer_store_callbacks<true>(
        cutlass::epilogue::fusion::detail::ConsumerStoreArgs(problem, CtaTile{}, coord, mma, EpilogueTile_{}, unused, unused,
                                                             unused, unused, unused, source_tensor, thread));
    auto const computed = [&](int epi_m, int own_n) {
      // Accumulators come 64 rows after 64 rows, each with all columns of the kernel's tile.
      constexpr int kAcrossTile = kSwapped ? kParts : kProducts * kParts;
      constexpr int kNext = (kSwapped ? kPartsM * kParts : kParts) * kValues;
      int const first = (epi_m * kAcrossTile + own_n) * kValues;
      cutlass::Array<float, kValues> values;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kValues; ++i) {
        values[i] = accumulators(first + i);
        if constexpr (kProducts == 2) source[i] = accumulators(first + kNext + i);
      }
      return callbacks.visit(values, 0, epi_m, side * kParts + own_n);
    };
    auto const results = [&](int epi_m, int own_n) {
      auto const result = computed(epi_m, own_n);
      return cutlass::NumericArrayConverter<ElementD_, typename decltype(result)::Element, kValues>{}(result);
    };
    auto const put = [&](auto const& result, int at) {
      auto const place = shared_d(_, _, at);
      Part<ElementD_, kColumnMajorD, decltype(place)>{place, own_thread}.put(result);
    };

    if constexpr (kWaitsLate) {
      asm volatile("griddepcontrol.wait;" ::: "memory");
      asm volatile("griddepcontrol.launch_dependents;");
    }
    // Other warps of the group may still read what lies where the epilogue writes: inputs of the tile before, or operands.
    if constexpr (Scales::kByWarps) synchronize();
    callbacks.begin();
    if (callbacks.begin_sync_needed()) synchronize();
    if constexpr (Scales::kAny) {
      // The values of a block are computed before any is stored: they take the place of the accumulators that they come from.
      constexpr int kBlock = Scales::kColumns / kPartN;  // parts
      static_assert(kPartN * kBlock == Scales::kColumns && kParts % kBlock == 0 && Policy::StagesD == kSide * kBlock);
      static_assert(!kReuse && !kSwapped && kProducts * kSide <= 2);
      // The producer loads parts from top to bottom first, so with it all of them are computed together, as where blocks of
      // threads wait for each other. Otherwise one part at a time: values that are stored free their registers.
      constexpr int kAtOnce = kHasSource || Scales::kSharedByTwo ? kPartsM : 1;
      bool const waits = kHasSource && fusion_.is_producer_load_needed();
      CUTLASS_PRAGMA_UNROLL
      for (int step = 0; step < kParts / kBlock * (kPartsM / kAtOnce); ++step) {
        int const first = step / (kPartsM / kAtOnce) * kBlock, first_m = step % (kPartsM / kAtOnce);
        float values[kAtOnce][kBlock][kValues], most[kAtOnce][2] = {};
        int const left = int(n_extent) - (int(n) * kPartsN + side * kParts + first) * kPartN;  // columns from here on
        CUTLASS_PRAGMA_UNROLL
        for (int at = 0; at < kBlock * kAtOnce; ++at) {
          int const below = at % kAtOnce, part = at / kAtOnce, epi_m = first_m + below, epi_n = side * kParts + first + part;
          callbacks.begin_loop(epi_m, epi_n);
          if constexpr (kHasSource) {
            if (waits) {
              Tensor const shared_c = make_tensor(make_smem_ptr(storage.collective.smem_C.begin()), SharedC{});
              load_pipeline.consumer_wait(loaded);
              auto const place = shared_c(_, _, loaded.index());
              Part<ElementC_, kColumnMajorC, decltype(place)>{place, thread}.get(source);
            }
          }
          callbacks.previsit(epi_m, epi_n, loaded.count(), waits);
          if (waits) {
            cutlass::arch::fence_view_async_shared();
            load_pipeline.consumer_release(loaded);
            ++loaded;
          }
          auto const result = computed(epi_m, first + part);
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < kValues; ++i) {
            values[below][part][i] = result[i];
            // Lines of D are whole pieces of 16 bytes, so a group of eight columns is all inside D or all outside.
            if (part * kPartN + i / 4 * 8 < left) {
              most[below][i / 2 % 2] = maximum(most[below][i / 2 % 2], cutlass_ops::abs(result[i]));
            }
          }
          callbacks.end_loop(epi_m, epi_n);
        }
        CUTLASS_PRAGMA_UNROLL
        for (int below = 0; below < kAtOnce; ++below) {
          CUTLASS_PRAGMA_UNROLL
          for (float& each : most[below]) each = Scales::of_row(each);
        }
        if constexpr (Scales::kSharedByTwo) {
          static_assert(kParts == kBlock && kAtOnce == kPartsM);
          Scales::meet(most, load_pipeline.meeting, storage.halves, turn_++);
        }
        CUTLASS_PRAGMA_UNROLL
        for (int below = 0; below < kAtOnce; ++below) {
          int const epi_m = first_m + below;
          float inverse[2];
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < 2; ++i) {
            int const row = (int(m) * kPartsM + epi_m) * kPartM + Fragment(own_thread).row + i * 8;
            int const column = (int(n) * kPartsN + side * kParts + first) * kPartN;
            inverse[i] = Scales::template finish<ElementD_>(params_.scales, most[below][i], row, column,
                                                            row < int(m_extent) && left > 0);
          }
          auto const narrow = [&](int part) {
            cutlass::Array<float, kValues> scaled;
            CUTLASS_PRAGMA_UNROLL
            for (int i = 0; i < kValues; ++i) scaled[i] = values[below][part][i] * inverse[i / 2 % 2];
            return cutlass::NumericArrayConverter<ElementD_, float, kValues>{}(scaled);
          };
          if constexpr (Scales::kByWarps) {
            static_assert(kPartM == kThreads / 32 * Scales::kRows && kSide == 1);
            uint32_t words[Scales::kColumns / 8];
            CUTLASS_PRAGMA_UNROLL
            for (int part = 0; part < kBlock; ++part) {
              auto const result = narrow(part);
              CUTLASS_PRAGMA_UNROLL
              for (int i = 0; i < kValues / 4; ++i) {
                words[part * (kValues / 4) + i] = reinterpret_cast<uint32_t const*>(&result)[i];
              }
            }
            int const warp = own_thread / 32, row = (int(m) * kPartsM + epi_m) * kPartM + warp * Scales::kRows;
            int const column = (int(n) * kPartsN + first) * kPartN;
            uint32_t const shared = cute::cast_smem_ptr_to_uint(cute::raw_pointer_cast(storage.collective.smem_D.begin()));
            Scales::store(words, shared + warp * (Scales::kRows * Scales::kColumns), own_thread % 32,
                          static_cast<uint8_t*>(params_.d) + row * params_.lines + column, params_.lines,
                          int(m_extent) - row, left);
          } else {
            if (issues) tma_store_wait<0>();  // D's memory is free again
            synchronize();
            CUTLASS_PRAGMA_UNROLL
            for (int part = 0; part < kBlock; ++part) put(narrow(part), side * kBlock + part);
            cutlass::arch::fence_view_async_shared();
            synchronize();
            if (issues) {
              CUTLASS_PRAGMA_UNROLL
              for (int part = 0; part < kBlock; ++part) {
                copy(params_.tma_store_d, from(_, _, _, side * kBlock + part), to(_, _, _, epi_m, side * kParts + first + part));
              }
              tma_store_arrive();
            }
          }
        }
      }
    } else if constexpr (kHasSource) {
      bool const waits = fusion_.is_producer_load_needed();
      LoadPipelineState waited = loaded;
      if constexpr (kReuse) {
        waited = stored;
        waited.phase_ ^= 1;
      }
      Tensor const shared_c = make_tensor(make_smem_ptr(storage.collective.smem_C.begin()), SharedC{});
      CUTLASS_PRAGMA_UNROLL
      for (int part = 0; part < kPartsM * kPartsN; ++part) {
        int const epi_m = part % kPartsM, epi_n = part / kPartsM;
        callbacks.begin_loop(epi_m, epi_n);
        if (waits) {
          load_pipeline.consumer_wait(waited);
          auto const place = shared_c(_, _, waited.index());
          Part<ElementC_, kColumnMajorC, decltype(place)>{place, thread}.get(source);
          if constexpr (kReuse && !is_same_v<SharedC, SharedD>) synchronize();
        }
        callbacks.previsit(epi_m, epi_n, waited.count(), waits);
        if (waits) {
          if constexpr (!kReuse) {
            cutlass::arch::fence_view_async_shared();
            load_pipeline.consumer_release(loaded);
            ++loaded;
          }
          ++waited;
        }
        put(results(epi_m, epi_n), stored.index());
        cutlass::arch::fence_view_async_shared();
        synchronize();
        if (issues) {
          copy(params_.tma_store_d, from(_, _, _, stored.index()), to(_, _, _, epi_m, epi_n));
          store_pipeline.producer_commit(stored);
        }
        ++stored;
        ++issued_;
        if (issues) store_pipeline.producer_acquire(stored);
        synchronize();
        if constexpr (kReuse) {
          // The memory of the store before the last ones is free again.
          if (issued_ > int(StorePipeline::UnacquiredStages)) {
            if (waits) load_pipeline.consumer_release(loaded);
            ++loaded;
          }
        }
        callbacks.end_loop(epi_m, epi_n);
      }
    } else {
      // Steps of several parts go to the halves of D's memory in turn, each as late as the next one allows.
      constexpr int kGroup = Policy::StagesD / 2 / kSide;  // parts of a warpgroup's step
      constexpr int kSteps = kPartsM * ((kParts + kGroup - 1) / kGroup);
      auto const place_of = [&](int i) { return (half_ * kSide + side) * kGroup + i; };
      auto const send = [&](int step) {
        cutlass::arch::fence_view_async_shared();
        synchronize();
        if (issues) {
          int const first = step / kPartsM * kGroup;
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < kGroup; ++i) {
            if (first + i >= kParts) break;
            copy(params_.tma_store_d, from(_, _, _, place_of(i)), to(_, _, _, step % kPartsM, side * kParts + first + i));
          }
          tma_store_arrive();
          tma_store_wait<1>();
        }
        half_ ^= 1;
        synchronize();
      };
      CUTLASS_PRAGMA_UNROLL
      for (int step = 0; step < kSteps; ++step) {
        int const epi_m = step % kPartsM, first = step / kPartsM * kGroup;
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kGroup; ++i) {
          if (first + i >= kParts) break;
          callbacks.begin_loop(epi_m, side * kParts + first + i);
          callbacks.previsit(epi_m, side * kParts + first + i, 0, false);
          auto const result = results(epi_m, first + i);
          if (i == 0 && step > 0) send(step - 1);
          put(result, place_of(i));
          callbacks.end_loop(epi_m, side * kParts + first + i);
        }
      }
      send(kSteps - 1);
    }
    callbacks.end();
    return make_tuple(loaded, stored);
  }

  CUTLASS_DEVICE auto store_tail(LoadPipeline load_pipeline, LoadPipelineState loaded, StorePipeline store_pipeline,
                                 StorePipelineState stored) {
    issued_ = 0;
    return Base::store_tail(load_pipeline, loaded, store_pipeline, stored);
  }

 private:
  using Fusion = typename Base::FusionCallbacks;
  using Policy = typename Base::DispatchPolicy;
  using CtaTile = typename Base::CtaTileMNK;
  using EpilogueTile_ = typename Base::EpilogueTile;
  using ElementD_ = typename Base::ElementD;
  static constexpr bool kHasSource = !cute::is_void_v<typename Base::ElementC>;
  using ElementC_ = cute::conditional_t<kHasSource, typename Base::ElementC, ElementD_>;
  static constexpr bool kReuse = Policy::ReuseSmemC;
  static_assert(kHasSource != Policy::DelayTmaStore);
  static constexpr bool kColumnMajorC = cutlass::epilogue::collective::detail::is_m_major<typename Base::StrideC>();
  static constexpr bool kColumnMajorD = cutlass::epilogue::collective::detail::is_m_major<typename Base::StrideD>();
  static constexpr int kPartM = cute::size<0>(EpilogueTile_{}), kPartN = cute::size<1>(EpilogueTile_{});
  static_assert(decltype(typename Base::SmemLayoutAtomD{}.layout_a())::num_bits ==
                swizzle_of((kColumnMajorD ? kPartM : kPartN) * int(sizeof(ElementD_))));
  static constexpr int kPartsM = cute::size<0>(CtaTile{}) / kPartM, kPartsN = cute::size<1>(CtaTile{}) / kPartN;

  template <class Atom, int kStages, bool kColumnMajor>
  using SharedLayout = decltype(cute::tile_to_shape(
      Atom{}, cute::Shape<cute::Int<kPartM>, cute::Int<kPartN>, cute::Int<kStages>>{},
      cute::conditional_t<kColumnMajor, cute::Step<cute::_2, cute::_1, cute::_3>,
                          cute::Step<cute::_1, cute::_2, cute::_3>>{}));
  using SharedC = SharedLayout<typename Base::SmemLayoutAtomC, Policy::StagesC, kColumnMajorC>;
  using SharedD = SharedLayout<typename Base::SmemLayoutAtomD, kReuse ? Policy::StagesC : Policy::StagesD, kColumnMajorD>;

  // Barriers of one warpgroup each: what CUTLASS and the main loop leave to others.
  static constexpr int kMeeting = 6;

  Params const& params_;
  Fusion fusion_;
  int issued_ = 0;
  int half_ = 0;
  int turn_ = 0;  // tiles whose scales were shared with another thread block
};

}  // namespace cutlass_ops
