// What every Sm80 kernel shares: block order, preparation of a device, launch. Multistage mma.sync kernels of CUTLASS
// 2.x with an epilogue visitor tree; they run on Sm80 and everything later.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <mutex>
#include <type_traits>

#include "cutlass_ops/halves.h"

#include "cutlass_ops/binding.h"
#include "cutlass_ops/epilogue_math.h"
#include "cutlass_ops/sm80_visitors.h"

#include "cutlass/epilogue/threadblock/fusion/visitor_compute.hpp"
#include "cutlass/epilogue/threadblock/fusion/visitor_load.hpp"
#include "cutlass/gemm/kernel/default_gemm_universal_with_visitor.h"
#include "cutlass/gemm/threadblock/threadblock_swizzle_streamk.h"

namespace cutlass_ops {
namespace sm80 {

// The output type by which CUTLASS chooses how accumulators pass through shared memory; the visitors convert and store. For
// half_t there is a way without bank conflicts, which serves every 16-bit type. But it mixes columns up if a warp is wider
// than 64: there TileIteratorTensorOpMixed picks one pointer for the whole warp.
template <class Element, class WarpShape>
using ExchangeElement =
    std::conditional_t<sizeof(Element) == 2,
                       std::conditional_t<WarpShape::kN <= 64, cutlass::half_t, cutlass::bfloat16_t>, Element>;

// Order of thread blocks: columns of `1 << log_tile` tiles along N are finished before the next ones, so that neighbouring
// blocks share operand tiles in cache. CUTLASS's identity swizzle does the same, but its width is fixed at compile time, and
// its N is on grid.y, which ends at 65535 tiles. Here the width is a launch argument, and N continues on grid.z.
struct ThreadblockSwizzle {
  static constexpr int kMaxGridY = 65535;

  CUTLASS_HOST_DEVICE static GemmCoord get_tiled_shape(GemmCoord problem, GemmCoord tile, int) {
    return {(problem.m() + tile.m() - 1) / tile.m(), (problem.n() + tile.n() - 1) / tile.n(), 1};
  }

  CUTLASS_HOST_DEVICE static int get_log_tile(GemmCoord) { return 0; }  // set at launch

  // The widest order up to `swizzle` that leaves at most a quarter of a column's blocks without a tile.
  static int log_tile(GemmCoord tiles, int swizzle) {
    int log = 0;
    while (log < 3 && (2 << log) <= swizzle && 4 * int64_t(tiles.n()) >= 3 * (int64_t(2) << log)) ++log;
    return log;
  }

  static dim3 grid(GemmCoord tiles, int log_tile) {
    int const columns = (tiles.n() + (1 << log_tile) - 1) >> log_tile;
    int const y = columns < kMaxGridY ? columns : kMaxGridY;
    return dim3(unsigned(tiles.m()) << log_tile, y, (columns + y - 1) / y);
  }

  CUTLASS_DEVICE static GemmCoord get_tile_offset(int log_tile) {
    int const x = int(blockIdx.x), column = int(blockIdx.y + blockIdx.z * gridDim.y);
    return {x >> log_tile, (column << log_tile) + (x & ((1 << log_tile) - 1)), 0};
  }
};

// CUTLASS's stream-K order. Where many blocks share a tile, each of several blocks may finish some rows of it: the
// separate reduction. An epilogue with a RowReduction needs whole tiles, so there the peers add up in turn instead.
// Either way the order of additions is fixed.
template <bool SeparateReduction>
struct StreamKSwizzle : cutlass::gemm::threadblock::ThreadblockSwizzleStreamK {
  StreamKSwizzle() = default;

  template <class... Args>
  StreamKSwizzle(cutlass::gemm::GemmUniversalMode mode, GemmCoord problem, GemmCoord tile, Args... args)
      : ThreadblockSwizzleStreamK(mode, problem, tile, args...) {
    if (!SeparateReduction) reduction_blocks = 0;
  }
};

template <class GemmKernel>
inline constexpr bool is_stream_k = std::is_base_of<cutlass::gemm::threadblock::ThreadblockSwizzleStreamK,
                                                    typename GemmKernel::ThreadblockSwizzle>::value;

// CUTLASS's own entry for 2.x kernels states no launch bounds, and passes parameters so that taking their address, as
// visitors do, may copy them to every thread's stack.
template <class GemmKernel>
struct Kernel {
  using Params = typename GemmKernel::Params;
  static constexpr int kThreads = GemmKernel::kThreadCount;

  CUTLASS_DEVICE static void run(Params const& params) {
    extern __shared__ char shared_memory[];
    GemmKernel::invoke(params, *reinterpret_cast<typename GemmKernel::SharedStorage*>(shared_memory));
  }
};

}  // namespace sm80

#if CUTLASS_OPS_HOST
namespace sm80 {

// What a launch needs to know of a device; asked for once, since each question costs microseconds.
struct Device {
  cudaError_t error = cudaErrorInvalidDevice;
  int multiprocessors = 0;
  int blocks_per_multiprocessor = 0;
};

template <class GemmKernel>
Device prepare(void const* kernel, int ordinal) {
  Device device{cudaSuccess};
  constexpr int kSharedMemory = int(sizeof(typename GemmKernel::SharedStorage));
  if (kSharedMemory > 48 * 1024) {
    device.error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedMemory);
  }
  if (device.error == cudaSuccess) {
    device.error = cudaDeviceGetAttribute(&device.multiprocessors, cudaDevAttrMultiProcessorCount, ordinal);
  }
  if (device.error == cudaSuccess) {
    device.error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&device.blocks_per_multiprocessor, kernel,
                                                                 GemmKernel::kThreadCount, kSharedMemory);
  }
  return device;
}

// The current device, which must be number `ordinal`, prepared for the kernel by whichever thread comes first.
template <class GemmKernel>
Device prepared(void const* kernel, int ordinal) {
  static std::mutex mutex;
  static std::atomic<bool> ready[kMaxDevices] = {};
  static Device devices[kMaxDevices];
  if (ordinal < 0 || ordinal >= kMaxDevices) return {};
  if (!ready[ordinal].load(std::memory_order_acquire)) {
    std::lock_guard<std::mutex> const lock(mutex);
    if (!ready[ordinal].load(std::memory_order_relaxed)) {
      devices[ordinal] = prepare<GemmKernel>(kernel, ordinal);
      if (devices[ordinal].error != cudaSuccess) return devices[ordinal];
      ready[ordinal].store(true, std::memory_order_release);
    }
  }
  return devices[ordinal];
}

// Coordinates are 32-bit, and those of the last tile's rows and columns reach past the problem's end.
inline bool is_too_large(Problem p) {
  constexpr int kMax = std::numeric_limits<int>::max() - 1024;
  return p.m > kMax || p.n > kMax || p.k > kMax;
}

// The epilogue stores D itself, so the kernel's own C and D stay empty.
template <class GemmKernel>
typename GemmKernel::Arguments arguments(GemmCoord problem, Matrix const& a, Matrix const& b,
                                         typename GemmKernel::FusionCallbacks::Arguments const& epilogue) {
  return {cutlass::gemm::GemmUniversalMode::kGemm, problem, 1, epilogue, a.data, b.data, nullptr, nullptr, 0, 0, 0, 0,
          a.ld, b.ld, int64_t(0), int64_t(0)};
}

// Hands out the declared workspace piece by piece, or, without one, measures how much is needed.
class Workspace {
 public:
  explicit Workspace(void* base = nullptr) : base_(static_cast<char*>(base)) {}

  void* take(int64_t bytes) {
    void* const piece = base_ == nullptr ? nullptr : base_ + used_;
    used_ += (bytes + 255) / 256 * 256;
    return piece;
  }

  template <class Reduction>
  typename Reduction::State* partial(GemmCoord problem) {
    using State = typename Reduction::State;
    return static_cast<State*>(take(int64_t(sizeof(State)) * Reduction::length(problem) * Reduction::parts(problem)));
  }

  int64_t used() const { return used_; }

 private:
  char* base_;
  int64_t used_ = 0;
};

// Combines what the thread blocks left of one reduction.
template <class Reduction, class Element>
cudaError_t finish(void const* kernel, typename Reduction::State const* partial, Element* out, GemmCoord problem,
                   Queue const& queue) {
  using Params = typename Finish<typename Reduction::Reduce, Element>::Params;
  return finish_reduction(kernel, Params{partial, out, Reduction::length(problem), Reduction::parts(problem)}, queue);
}

}  // namespace sm80

// `Gemm` is what a rendered file defines:
//   GemmKernel; static void const* kernel(); struct Operands { Problem problem; ... }; static Operands read(Call&);
//   static GemmCoord problem(Operands const&);            in the kernel's orientation
//   static void assign(Operands&, Workspace&);            gives partial values of reductions, and means, their place
//   static cudaError_t begin(Operands const&, Queue const&);   takes means of A's rows
//   static GemmKernel::Arguments arguments(Operands const&);
//   static cudaError_t finish(Operands const&, Queue const&);  runs each reduction's second step
template <class Gemm>
struct Sm80Entry {
  using GemmKernel = typename Gemm::GemmKernel;
  using Operands = typename Gemm::Operands;
  using Params = typename GemmKernel::Params;

  static cudaError_t launch(Call& call, int& status) {
    Operands operands = Gemm::read(call);
    status = call.status();
    if (status == 0 && sm80::is_too_large(operands.problem)) status = int(Reason::kShape);
    if (status != 0) return cudaSuccess;
    DeviceGuard const guard(call.device());
    sm80::Device const device = sm80::prepared<GemmKernel>(Gemm::kernel(), call.device());
    if (device.error != cudaSuccess) return device.error;

    call.integer();  // the raster order: along M always
    int const swizzle = call.integer();
    sm80::Workspace workspace(call.workspace(size_t(workspace_size(operands, device))));
    status = call.status();
    if (status != 0) return cudaSuccess;

    Gemm::assign(operands, workspace);
    Queue const queue = call.queue();
    cudaError_t error = Gemm::begin(operands, queue);
    if (error == cudaSuccess) error = enqueue(operands, device, workspace, swizzle, queue);
    return error == cudaSuccess ? Gemm::finish(operands, queue) : error;
  }

  // Stream-K's share depends on how many thread blocks the current device holds. The rest needs no device.
  static int64_t workspace_size(Problem problem, int, int) {
    if (problem.m < 1 || problem.n < 1 || problem.k < 1) return 0;
    Operands operands{};
    operands.problem = problem;
    sm80::Device device;
    if constexpr (sm80::is_stream_k<GemmKernel>) {
      int ordinal = 0;
      device.error = cudaGetDevice(&ordinal);
      if (device.error == cudaSuccess) device = sm80::prepared<GemmKernel>(Gemm::kernel(), ordinal);
    }
    return workspace_size(operands, device);
  }

  static cudaError_t load(int device) { return sm80::prepared<GemmKernel>(Gemm::kernel(), device).error; }

  static Description describe() {
    return {GemmKernel::kStages, GemmKernel::kThreadCount, int(sizeof(typename GemmKernel::SharedStorage))};
  }

 private:
  static cudaError_t enqueue(Operands const& operands, sm80::Device const& device, sm80::Workspace& workspace,
                             int swizzle, Queue const& queue) {
    Params params = make_params(operands, device);
    cudaLaunchConfig_t config{};
    if constexpr (sm80::is_stream_k<GemmKernel>) {
      if (queue.gives_up()) return cudaSuccess;  // its flags are cleared before each launch
      void* const partial_tiles = workspace.take(int64_t(params.get_workspace_size()));
      if (params.init_workspace(partial_tiles, queue.stream()) != cutlass::Status::kSuccess) return cudaErrorInvalidValue;
      config.gridDim = params.get_grid_dims();
    } else {
      params.swizzle_log_tile =
          sm80::ThreadblockSwizzle::log_tile(params.grid_tiled_shape, std::max(swizzle, 1));
      config.gridDim = sm80::ThreadblockSwizzle::grid(params.grid_tiled_shape, params.swizzle_log_tile);
    }
    config.blockDim = dim3(GemmKernel::kThreadCount);
    config.dynamicSmemBytes = sizeof(typename GemmKernel::SharedStorage);
    return queue.launch(config, Gemm::kernel(), params);
  }

  static Params make_params(Operands const& operands, sm80::Device const& device) {
    return Params(Gemm::arguments(operands), device.multiprocessors, device.blocks_per_multiprocessor);
  }

  static int64_t workspace_size(Operands operands, sm80::Device const& device) {
    sm80::Workspace workspace;
    Gemm::assign(operands, workspace);
    if constexpr (sm80::is_stream_k<GemmKernel>) {
      if (device.error == cudaSuccess) workspace.take(int64_t(make_params(operands, device).get_workspace_size()));
    }
    return workspace.used();
  }
};

#endif  // CUTLASS_OPS_HOST

}  // namespace cutlass_ops
