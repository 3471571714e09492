// How Sm90 kernels are launched. The host compiler reads no CUTLASS, whose templates would take most of its time: it knows a
// kernel's parameters as the plain structures below, and the rest from numbers in the source. Both halves read this header.
// nvcc checks that the structures lie as CUTLASS's do (Sm90Kernel in sm90_gemm.h).
//
// "Row" and "column", M and N are the kernel's, as everywhere: one that computes the transposed problem has D's columns as rows.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "cutlass_ops/halves.h"

#include "cutlass_ops/batched.h"
#include "cutlass_ops/divisor.h"
#include "cutlass_ops/placement.h"
#include "cutlass_ops/tma.h"

// Element types, of which the host compiler only knows the size. Where the host computes with them, or launches as CUTLASS
// does, a source includes CUTLASS's own before this.
#if !defined(__CUDACC__) && !defined(CUTLASS_OPS_TYPES_OF_CUTLASS)
namespace cutlass {
struct half_t { uint16_t bits; };
struct bfloat16_t { uint16_t bits; };
struct tfloat32_t { uint32_t bits; };
struct float_e4m3_t { uint8_t bits; };
struct float_e5m2_t { uint8_t bits; };
}  // namespace cutlass
#else
#include "cutlass/numeric_types.h"
#endif

namespace cutlass_ops {

// ---- What a kernel takes -------------------------------------------------------------------------------------------

// In place of what a kernel has no need of.
struct Nothing {};

template <class Element>
struct Vector {
  Element const* values = nullptr;
};

// A matrix's descriptors: of whole boxes, and of boxes whose last rows are beyond it.
struct Descriptors {
  CUtensorMap whole, last;
};

template <bool kSecond = false, class Rows = Nothing, class Scales = Nothing>
struct MainloopParams {
  Descriptors a, b;
  std::conditional_t<kSecond, Descriptors, Nothing> second;
  int rows_a = 0, rows_b = 0;  // of each matrix
  uint32_t tma_transaction_bytes = 0;
  float inverse_k = 0.0f;
  Rows rows;
  Scales scales;
};

// Scales of blocks of the kernel's rows and columns (block_scales.h).
template <class Strided>
struct BlockScalesParams {
  Strided rows, columns;
};

// How a tile with so many bytes beside each other is swizzled in shared memory: over 16 << so many bytes.
constexpr int swizzle_of(int bytes) {
  int swizzle = 3;
  while (swizzle > 0 && bytes % (16 << swizzle) != 0) --swizzle;
  return swizzle;
}

// CuTe's copy by TMA: a descriptor, and strides that its type says.
struct TmaCopy {
  CUtensorMap descriptor;
  Nothing strides;
};

// Parameters of the epilogue's visitors. CUTLASS keeps up to four side by side, and more of them in a tuple, in which one that is
// empty takes no place.
template <class First, class... Rest>
class Tuple {
  static constexpr bool kNoFirst = std::is_empty_v<First>, kNoRest = (std::is_empty_v<Rest> && ...);
  struct Two { First first; Tuple<Rest...> rest; };
  struct OnlyFirst { First first; };
  struct OnlyRest { Tuple<Rest...> rest; };

 public:
  Tuple() = default;
  Tuple(First const& first, Rest const&... rest) {
    if constexpr (!kNoFirst) kept_.first = first;
    if constexpr (!kNoRest) kept_.rest = {rest...};
  }

 private:
  std::conditional_t<kNoFirst, std::conditional_t<kNoRest, Nothing, OnlyRest>, std::conditional_t<kNoRest, OnlyFirst, Two>>
      kept_{};
};

template <class... Each>
struct Nodes : Tuple<Each...> {
  using Tuple<Each...>::Tuple;
};
template <class A>
struct Nodes<A> { A a; };
template <class A, class B>
struct Nodes<A, B> { A a; B b; };
template <class A, class B, class C>
struct Nodes<A, B, C> { A a; B b; C c; };
template <class A, class B, class C, class D>
struct Nodes<A, B, C, D> { A a; B b; C c; D d; };

template <class Nodes>
struct EpilogueParams {
  Nodes thread{};
  TmaCopy tma_load_c{}, tma_store_d{};
  uint32_t tma_transaction_bytes = 0;
};

// What CUTLASS's visitors take: a vector, a tile by TMA, a tile without, and a reduction.
template <class Element, class Distances>
struct Broadcast {
  Element const* values = nullptr;
  Element otherwise{};
  Distances distances{};
};
template <class Element>
struct LoadedTile {
  TmaCopy copy{};
  Element otherwise{};
  bool is_null = false;
};
struct StoredTile {
  TmaCopy copy{};
  bool is_null = false;
};
template <class Distances>
struct Lines {
  int64_t ld = 0;
  Distances distances{};
};
template <class Element, class Lines>
struct ReadTile {
  Element const* values = nullptr;
  Element otherwise{};
  Lines lines{};
};
template <class Element, class Lines>
struct WrittenTile {
  Element* values = nullptr;
  Lines lines{};
};
struct WorkspaceReduction {
  void* results = nullptr;
  float identity = 0.0f;
  Nothing distances{};
  float* parts = nullptr;
  int* arrived = nullptr;
};

// A problem's extents: M, N, K, and numbers of batches.
template <int kBatchModes>
struct Extents {
  int m, n, k, batches[kBatchModes];
};

struct Hardware {
  int device = 0, multiprocessors = 0, clusters = 0;
  int shapes[6] = {};  // of clusters, which no kernel here asks for
};

// Of an epilogue that quantises D (quantized.h), and of one in which each warp stores its own rows.
template <class Base>
struct QuantizedParams : Base {
  WrittenScales scales;
};
template <class Base>
struct QuantizedByWarpsParams : QuantizedParams<Base> {
  void* d;
  int64_t lines;  // from one of its lines to the next, in bytes
};

// Of CUTLASS's kernels: one without persistence, or of split_k.h, one with a pingpong schedule, and a cooperative one.
template <class Problem, class Mainloop, class Epilogue>
struct TileParams {
  Problem problem_shape{};
  Mainloop mainloop{};
  Epilogue epilogue{};
};
template <class Problem, class Mainloop, class Epilogue, class Scheduler>
struct PingpongParams {
  int mode = 0;
  Problem problem_shape{};
  Mainloop mainloop{};
  Epilogue epilogue{};
  Hardware hw_info{};
  Scheduler scheduler{};
};
template <class Problem, class Mainloop, class Epilogue, class Scheduler>
struct CooperativeParams {
  int mode = 0;
  Problem problem_shape{};
  Mainloop mainloop{};
  Epilogue epilogue{};
  Hardware hw_info{};
  Scheduler scheduler{};
  void* workspace = nullptr;  // which the kernel does not read
};

// A kernel as the host knows it.
template <class Params_, int kThreads_>
struct Launched {
  using Params = Params_;
  static constexpr int kThreads = kThreads_;
};

// ---- The order of tiles (tile_order.h) -----------------------------------------------------------------------------

constexpr int kMaxPlaces = 192;  // clusters of one wave, at most, that can be told apart

struct OneGemm {};
struct SeveralGemms {
  Divisor gemm;  // clusters of one
};

// The order itself: all that a thread keeps.
template <bool kBatched>
struct TileOrder : std::conditional_t<kBatched, SeveralGemms, OneGemm> {
  Divisor strip;  // clusters of a whole strip
  Divisor width;  // clusters across a whole strip
  Divisor last;   // and across the last one
  int whole_strips = 0;
  int clusters = 0;
  int active = 0;
  bool along_n = false;
};

#if CUTLASS_OPS_HOST

// What a launch's order of tiles depends on.
struct Order {
  int raster;     // 0 heuristic, 1 along M, 2 along N
  int swizzle;    // rows or columns of clusters that a strip has at most
  Groups groups;  // on the host; where fewer clusters are known than run, they keep their own numbers
};

// What a source says of a kernel: its tile, its cluster, and what a thread block has.
struct Geometry {
  int m, n, k, cluster_m, cluster_n, threads, stages, shared_memory;

  constexpr int cluster() const { return cluster_m * cluster_n; }
  int clusters_down(int rows) const { return clusters(rows, m, cluster_m); }
  int clusters_across(int columns) const { return clusters(columns, n, cluster_n); }

 private:
  static int clusters(int extent, int tile, int blocks) { return ((extent + tile - 1) / tile + blocks - 1) / blocks; }
};

// What a launch asks of a scheduler, for one that splits no tile along K.
template <bool kOrdered_>
struct WholeTiles {
  static constexpr bool kOrdered = kOrdered_;  // whether it takes an order by GPC

  template <class... Given>
  static int64_t workspace_bytes(Given const&...) { return 0; }
  template <class... Given>
  static cudaError_t clear(Given const&...) { return cudaSuccess; }
  template <class... Given>
  void fill(Given const&...) {}
};

#else

template <bool>
struct WholeTiles {};

#endif

template <bool kBatched>
struct OrderedParams : WholeTiles<true> {
  TileOrder<kBatched> order;
  bool placed = false;
  uint8_t places[kMaxPlaces] = {};

#if CUTLASS_OPS_HOST
  template <class Problem>
  void fill(Problem const& problem, Geometry const& shape, Hardware const& hardware, Order const& wanted, void*) {
    int const rows = shape.clusters_down(problem.m), columns = shape.clusters_across(problem.n);
    bool const along_n = wanted.raster == 0 ? columns <= rows : wanted.raster == 2;
    int const across = along_n ? rows : columns, along = along_n ? columns : rows;
    int const width = std::max(1, std::min(wanted.swizzle, across));
    order.strip = Divisor(std::max(1, width * along));
    order.width = Divisor(width);
    order.last = Divisor(std::max(1, across % width));
    order.whole_strips = across / width;
    order.clusters = rows * columns;
    if constexpr (kBatched) {
      order.gemm = Divisor(std::max(1, order.clusters));
      order.clusters *= problem.batches[0] * problem.batches[1];
    }
    order.active = std::min(order.clusters, std::max(1, hardware.clusters));
    order.along_n = along_n;
    if (order.active <= std::min(wanted.groups.count, kMaxPlaces)) {
      placed = true;
      place(wanted.groups.of, order.active);
    }
  }

  // One row of clusters: hardware numbers clusters along x.
  template <class Problem>
  dim3 grid(Problem const&, Geometry const& shape, Hardware const&) const {
    return {unsigned(order.active * shape.cluster_m), unsigned(shape.cluster_n), 1};
  }

 private:
  // `groups` says to which group each cluster belongs: number them group by group.
  void place(uint8_t const* groups, int count) {
    int next = 0;
    for (int group = 0, left = count; left > 0; ++group) {
      for (int i = 0; i < count; ++i) {
        if (groups[i] != group) continue;
        places[i] = uint8_t(next++);
        --left;
      }
    }
  }
#endif
};

#if CUTLASS_OPS_HOST

// ---- Descriptors ---------------------------------------------------------------------------------------------------

// What a descriptor says of batches: so many, so many elements apart, along one or two modes.
struct Batching {
  int modes = 1;
  int64_t extents[2] = {1, 1}, apart[2] = {0, 0};
};
inline Batching batching(Problem const&, Matrix const&) { return {}; }
inline Batching batching(Problem const& problem, BatchedMatrix const& x) {
  return {2, {problem.inner, problem.count / problem.inner}, {x.batches.inner, x.batches.outer}};
}

// The types by which TMA copies: those of bits, where it is told no other, and those of values.
template <class Element>
constexpr CUtensorMapDataType kTypeOfBits = sizeof(Element) == 1   ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                                            : sizeof(Element) == 2 ? CU_TENSOR_MAP_DATA_TYPE_UINT16
                                                                   : CU_TENSOR_MAP_DATA_TYPE_UINT32;
template <>
inline constexpr CUtensorMapDataType kTypeOfBits<cutlass::tfloat32_t> = CU_TENSOR_MAP_DATA_TYPE_TFLOAT32;
template <class Element>
constexpr CUtensorMapDataType kTypeOfValues = kTypeOfBits<Element>;
template <>
inline constexpr CUtensorMapDataType kTypeOfValues<float> = CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
template <>
inline constexpr CUtensorMapDataType kTypeOfValues<int32_t> = CU_TENSOR_MAP_DATA_TYPE_INT32;
template <>
inline constexpr CUtensorMapDataType kTypeOfValues<cutlass::half_t> = CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
template <>
inline constexpr CUtensorMapDataType kTypeOfValues<cutlass::bfloat16_t> = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;

// Boxes of shared memory, of so many lines. `length` elements lie beside each other, of which a box has as many as swizzling
// reaches.
struct Boxes {
  CUtensorMapDataType type;
  int bytes;  // of an element
  int length, lines;

  // Of a matrix's `along` elements beside each other, and `across` lines of these.
  void encode(CUtensorMap& descriptor, void const* data, int64_t along, int64_t across, int64_t ld, Batching const& batching,
              int box_lines) const {
    int const swizzle = swizzle_of(length * bytes);
    uint32_t const box[] = {uint32_t(std::min(length, (16 << swizzle) / bytes)), uint32_t(box_lines), 1, 1};
    uint64_t const extents[] = {uint64_t(along), uint64_t(across), uint64_t(batching.extents[0]),
                                uint64_t(batching.extents[1])};
    auto const apart = [&](int64_t elements) { return uint64_t(elements) * uint64_t(bytes); };
    uint64_t const strides[] = {apart(ld), apart(batching.apart[0]), apart(batching.apart[1])};
    cutlass_ops::encode(descriptor, type, uint32_t(2 + batching.modes), data, extents, strides, box, CUtensorMapSwizzle(swizzle));
  }
};

// One operand of the main loop: what a thread block loads of it for a stage.
template <class Element, bool kAlongK>
struct Side {
  int rows, columns;     // of a stage's tile, along M or N and along K
  int matrices, blocks;  // that share the rows; and blocks of a cluster that load a part each of what all of them need

  uint32_t stage_bytes() const { return uint32_t(rows * columns) * uint32_t(sizeof(Element)); }

  // `extent` rows, of so many along K.
  Descriptors encoded(Matrix const& x, int extent, int64_t k, Batching const& batching) const {
    int const slice = (kAlongK ? rows / matrices : columns) / blocks;
    Boxes const boxes{kTypeOfBits<Element>, int(sizeof(Element)), kAlongK ? columns : rows, slice};
    int64_t const along = kAlongK ? k : extent, across = kAlongK ? extent : k;
    Descriptors found;
    boxes.encode(found.whole, x.data, along, across, x.ld, batching, slice);
    found.last = found.whole;
    if (int const left = extent % slice; kAlongK && left != 0) {
      boxes.encode(found.last, x.data, along, across, x.ld, batching, left);
    }
    return found;
  }
};

// How TMA copies a tile of a matrix, a part with lines of some length at a time.
template <class Element, Major kMajor, class Matrix>
TmaCopy tile_copy(Matrix const& x, Batching const& batching, int length, int lines) {
  constexpr bool kByRows = kMajor == Major::kRow;
  TmaCopy copy{};
  Boxes const boxes{kTypeOfValues<Element>, int(sizeof(Element)), length, lines};
  boxes.encode(copy.descriptor, x.data, kByRows ? x.cols : x.rows, kByRows ? x.rows : x.cols, x.ld, batching, lines);
  return copy;
}

// ---- Launch --------------------------------------------------------------------------------------------------------

// What a launch is prepared with, where its blocks share more than operands.
struct Preparing {
  int device;
  Queue const& queue;
  char* scratch;  // what is left of it
  bool overlap;   // whether a kernel ahead of this one may start while the one before it in the stream is still ending

  static constexpr int64_t kAlignment = 256;
  static int64_t rounded(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

  void* take(int64_t bytes) {
    char* const start = scratch;
    scratch += rounded(bytes);
    return start;
  }
};

inline int multiprocessors(int device) {
  static std::atomic<int> counts[kMaxDevices] = {};
  int count = counts[device].load(std::memory_order_relaxed);
  if (count == 0) {
    cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
    counts[device].store(count, std::memory_order_relaxed);
  }
  return count;
}

// Order of tiles as the caller numbers it: as above, and 4 more where runs of tiles go to one GPC each.
constexpr int kByGpc = 4;

// Schedulers of kernels that take none as a parameter: a thread block for each tile, or several of a cluster.
struct EachTile : WholeTiles<false> {
  template <class Problem>
  dim3 grid(Problem const& problem, Geometry const& shape, Hardware const&) const {
    int batches = 1;
    for (int each : problem.batches) batches *= each;
    return {unsigned(shape.clusters_down(problem.m) * shape.cluster_m),
            unsigned(shape.clusters_across(problem.n) * shape.cluster_n), unsigned(batches)};
  }
};
struct SplitTile : WholeTiles<false> {
  template <class Problem>
  dim3 grid(Problem const& problem, Geometry const& shape, Hardware const&) const {
    return {unsigned(shape.cluster_m), unsigned((problem.m + shape.m - 1) / shape.m),
            unsigned((problem.n + shape.n - 1) / shape.n)};
  }
};

// What CUTLASS's reductions of D's columns or rows need: memory for what tiles keep, and cleared counters of tiles that have
// arrived.
struct InWorkspace {
  bool of_columns;
  int64_t each, tiles, results;  // results of a tile, tiles of D, and tiles with results of their own

  InWorkspace(bool of_columns, Problem const& problem, int m, int n, Geometry const& shape) : of_columns(of_columns) {
    int64_t const down = (m + shape.m - 1) / shape.m, across = (n + shape.n - 1) / shape.n;
    each = of_columns ? shape.n : shape.m;
    tiles = down * across * problem.count;
    results = of_columns ? across : down;
  }

  int64_t parts_bytes() const { return Preparing::rounded(tiles * each * int64_t(sizeof(float))); }
  int64_t arrived_bytes() const { return Preparing::rounded(results * int64_t(sizeof(int))); }

  cudaError_t take(WorkspaceReduction& reduction, Preparing& preparing) const {
    if (preparing.queue.gives_up()) return cudaSuccess;  // counters are cleared before each launch
    reduction.parts = static_cast<float*>(preparing.take(parts_bytes()));
    reduction.arrived = static_cast<int*>(preparing.take(arrived_bytes()));
    return cudaMemsetAsync(reduction.arrived, 0, size_t(results) * sizeof(int), preparing.queue.stream());
  }
};

// `Gemm` is what a rendered file defines:
//   Params; static void const* kernel(); static constexpr Geometry kShape;
//   static constexpr bool kOverlaps;                    whether thread blocks may start before the kernel before has ended
//   struct Operands { Problem problem; ... }; static Operands read(Call&);
//   static auto extents(Problem const&);                in the kernel's orientation
//   static Scheduler scheduler(Operands const&);
//   static void fill(Params&, Operands const&);         what main loop and epilogue take
//   static int64_t scratch_bytes(Problem);              of workspace, before the kernel's own: for what blocks share
//   static constexpr bool kPrepares;                    whether anything is done before a launch
//   static cudaError_t prepare(Operands&, Preparing&);
template <class Gemm>
struct Sm90Entry {
  using Operands = typename Gemm::Operands;
  using Scheduler = typename Gemm::Scheduler;
  static constexpr Geometry kShape = Gemm::kShape;
  static constexpr int kMaxGridZ = 65535;

  static cudaError_t launch(Call& call, int& status) {
    Operands operands = Gemm::read(call);
    status = call.status();
    if (status == 0 && std::is_same_v<Scheduler, EachTile> && operands.problem.count > kMaxGridZ) {
      status = int(Reason::kShape);
    }
    if (status != 0) return cudaSuccess;
    int const device = call.device();
    DeviceGuard const guard(device);
    Hardware hardware;
    if (cudaError_t const error = prepare(device, hardware); error != cudaSuccess) return error;

    int const raster = call.integer();
    Order order{raster & (kByGpc - 1), call.integer(), {}};
    auto const extents = Gemm::extents(operands.problem);
    int64_t const scratch_bytes = Gemm::scratch_bytes(operands.problem);
    int64_t const own_bytes = Scheduler::workspace_bytes(extents, kShape, hardware, order);
    char* const workspace = static_cast<char*>(call.workspace(size_t(scratch_bytes + own_bytes)));
    status = call.status();
    if (status != 0) return cudaSuccess;
    bool const by_gpc = Scheduler::kOrdered && (raster & kByGpc) != 0;
    if constexpr (Scheduler::kOrdered) {
      if (by_gpc) order.groups = placement::of<kShape.cluster()>(device);
    }
    Queue const queue = call.queue();
    void* const own = own_bytes == 0 ? nullptr : workspace + scratch_bytes;
    Scheduler scheduler = Gemm::scheduler(operands);
    if (own_bytes != 0) {
      if (queue.gives_up()) return cudaSuccess;  // it is cleared before each launch
      cudaError_t const error = Scheduler::clear(own, extents, kShape, hardware, order, queue.stream());
      if (error != cudaSuccess) return error;
    }
    scheduler.fill(extents, kShape, hardware, order, own);
    // Blocks that start as others end land anywhere, so an order by GPC wants the device empty.
    bool const follows = own_bytes == 0;
    bool const overlap = Gemm::kOverlaps && !by_gpc && follows;
    if constexpr (Gemm::kPrepares) {
      Preparing preparing{device, queue, workspace, follows};
      if (cudaError_t const error = Gemm::prepare(operands, preparing); error != cudaSuccess) return error;
    }
    descriptor_error() = CUDA_SUCCESS;
    typename Gemm::Params params{};
    params.problem_shape = extents;
    if constexpr (!std::is_empty_v<Scheduler>) {
      params.hw_info = hardware;
      params.scheduler = scheduler;
    }
    Gemm::fill(params, operands);
    // The runtime numbers the driver's errors as the driver does.
    if (descriptor_error() != CUDA_SUCCESS) return cudaError_t(descriptor_error());
    // With `overlap`, thread blocks start while the kernel before in the stream is still ending (programmatic dependent
    // launch). Each waits for the end of that kernel before its first load, and every write depends on a load. What a memset
    // clears, this launch has to follow.
    Launch const launch(scheduler.grid(extents, kShape, hardware), overlap);
    return queue.launch(launch.config, Gemm::kernel(), params);
  }

  static int64_t workspace_size(Problem problem, int raster, int swizzle) {
    int device = 0;
    cudaGetDevice(&device);
    Hardware hardware;
    (void)prepare(device, hardware);  // a launch reports what fails here
    Order const order{raster & (kByGpc - 1), swizzle, {}};
    return Gemm::scratch_bytes(problem) + Scheduler::workspace_bytes(Gemm::extents(problem), kShape, hardware, order);
  }

  static cudaError_t load(int device) {
    Hardware hardware;
    return prepare(device, hardware);
  }

  static Description describe() { return {kShape.stages, kShape.threads, kShape.shared_memory}; }

 private:
  // Attributes: the cluster, and whether thread blocks start while the kernel before in the stream is still ending.
  struct Launch {
    cudaLaunchConfig_t config{};
    cudaLaunchAttribute attributes[2];

    Launch(dim3 grid, bool overlap) {
      attributes[0].id = cudaLaunchAttributeClusterDimension;
      attributes[0].val.clusterDim = {unsigned(kShape.cluster_m), unsigned(kShape.cluster_n), 1};
      attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attributes[1].val.programmaticStreamSerializationAllowed = 1;
      config.gridDim = grid;
      config.blockDim = dim3(kShape.threads);
      config.dynamicSmemBytes = kShape.shared_memory;
      config.attrs = attributes;
      config.numAttrs = overlap ? 2 : 1;
    }
    Launch(Launch const&) = delete;
  };

  // Done once a device: large shared memory has to be asked for, and only the driver knows how many clusters fit.
  static cudaError_t prepare(int device, Hardware& hardware) {
    static std::atomic<int> clusters[kMaxDevices] = {};
    int active = clusters[device].load(std::memory_order_acquire);
    hardware.device = device;
    hardware.multiprocessors = multiprocessors(device);
    if (active == 0) {
      cudaError_t error =
          cudaFuncSetAttribute(Gemm::kernel(), cudaFuncAttributeMaxDynamicSharedMemorySize, kShape.shared_memory);
      if (error != cudaSuccess) return error;
      Launch launch(dim3(kShape.cluster_m, kShape.cluster_n), false);
      error = cudaOccupancyMaxActiveClusters(&active, Gemm::kernel(), &launch.config);
      if (error != cudaSuccess) return error;
      // One block on a multiprocessor, even where two would fit.
      active = std::max(1, std::min(active, hardware.multiprocessors / kShape.cluster()));
      clusters[device].store(active, std::memory_order_release);
    }
    hardware.clusters = active;
    return cudaSuccess;
  }
};

#endif  // CUTLASS_OPS_HOST

}  // namespace cutlass_ops
