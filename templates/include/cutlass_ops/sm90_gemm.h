// Host side and reduction functors of the Sm90 kernels. A rendered file names types; what runs is here.

#pragma once

#include <algorithm>
#include <atomic>

#include "cutlass_ops/tma.h"

#include "cutlass/cutlass.h"
#include "cutlass/gemm/kernel/gemm_universal_decl.h"
#include "cutlass/gemm/kernel/tile_scheduler.hpp"

// Of CUTLASS's kernels only the three that are used: gemm_universal.hpp, which has all and this trait, costs seconds.
namespace cutlass::gemm::kernel {
template <class ProblemShape, class = void>
struct IsCutlass3ArrayKernel : cute::false_type {};
}  // namespace cutlass::gemm::kernel
#include "cutlass/gemm/kernel/sm90_gemm_tma_warpspecialized.hpp"
#include "cutlass/gemm/kernel/sm90_gemm_tma_warpspecialized_cooperative.hpp"
#include "cutlass/gemm/kernel/sm90_gemm_tma_warpspecialized_pingpong.hpp"

#include "cutlass_ops/binding.h"
#include "cutlass_ops/epilogue.h"
#include "cutlass_ops/epilogue_math.h"
#include "cutlass_ops/mainloop.h"
#include "cutlass_ops/placement.h"
#include "cutlass_ops/tile_order.h"

namespace cutlass_ops {

// ---- Reductions --------------------------------------------------------------------------------------------------

// Element-wise on a scalar or on each element of an array, as CUTLASS's reduction visitors need both.
template <class T, class Op>
CUTLASS_DEVICE T elementwise(T const& x, T const& y, Op op) {
  if constexpr (cute::is_same_v<T, float>) {
    return op(x, y);
  } else {
    T result;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < int(T::kElements); ++i) result[i] = op(x[i], y[i]);
    return result;
  }
}

template <class T>
struct Sum {
  CUTLASS_DEVICE T operator()(T const& x, T const& y) const {
    return elementwise(x, y, [](float p, float q) { return p + q; });
  }
};

template <class T>
struct SumSquare {
  CUTLASS_DEVICE T operator()(T const& sum, T const& x) const {
    return elementwise(sum, x, [](float p, float q) { return p + q * q; });
  }
};

template <class T>
struct Max {
  CUTLASS_DEVICE T operator()(T const& x, T const& y) const {
    return elementwise(x, y, [](float p, float q) { return maximum(p, q); });
  }
};

// ---- Strides -----------------------------------------------------------------------------------------------------

// A CUTLASS 3 stride with one run-time leading dimension and no batch.
template <class Stride>
CUTLASS_HOST_DEVICE Stride stride(Matrix const& x) {
  Stride s{};
  if constexpr (cute::is_static_v<cute::remove_cvref_t<decltype(cute::get<0>(s))>>) {
    cute::get<1>(s) = x.ld;
  } else {
    cute::get<0>(s) = x.ld;
  }
  return s;
}

// ---- Kernel ------------------------------------------------------------------------------------------------------

template <class GemmKernel>
struct Sm90Kernel {
  using Params = typename GemmKernel::Params;
  static constexpr int kThreads = GemmKernel::MaxThreadsPerBlock;

  CUTLASS_DEVICE static void run(Params const& params) {
    extern __shared__ char shared_memory[];
    GemmKernel kernel;
    kernel(params, shared_memory);
    // CUTLASS's kernels leave the second and the fourth warp idle, and the third if no tile is read. If one is, the third
    // comes here once all tiles are read.
    using Rows = typename GemmKernel::CollectiveMainloop::RowsBeside;
    if constexpr (!cute::is_same_v<Rows, NoRows>) {
      int const warp = cutlass::canonical_warp_idx_sync();
      if (warp >= 1 && warp <= 3) Rows::template take<3, pieces_at_once()>(params.mainloop.rows);
    }
  }

 private:
  // Persistent kernels give most of these warps' registers away. What they read at once has to fit in the rest.
  static constexpr int pieces_at_once() {
    using Schedule = typename GemmKernel::DispatchPolicy::Schedule;
    if constexpr (cute::is_same_v<Schedule, cutlass::gemm::KernelTmaWarpSpecialized>) {
      return 16;
    } else {
      return GemmKernel::LoadRegisterRequirement < 40 ? 2 : 4;
    }
  }
};

// ---- Launch ------------------------------------------------------------------------------------------------------

#if CUTLASS_OPS_HOST

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

// Order of tiles as the caller numbers it: 0 heuristic, 1 along M, 2 along N; 4 more where runs of tiles go to one GPC
// each.
constexpr int kByGpc = 4;

template <class Arguments>
Arguments scheduler_arguments(int raster, int swizzle) {
  using Order = cute::remove_cvref_t<decltype(Arguments{}.raster_order)>;
  Arguments scheduler{};
  scheduler.max_swizzle_size = swizzle;
  raster &= kByGpc - 1;
  scheduler.raster_order = raster == 1 ? Order::AlongM : raster == 2 ? Order::AlongN : Order::Heuristic;
  return scheduler;
}

// Whether a kernel has a thread block for each tile, and so counts batches by the grid's third side. CUTLASS's kernel
// without persistence does.
template <class DispatchPolicy, class = void>
struct CountsInGrid : cute::false_type {};
template <class DispatchPolicy>
struct CountsInGrid<DispatchPolicy, cute::enable_if_t<cute::is_same_v<typename DispatchPolicy::Schedule,
                                                                      cutlass::gemm::KernelTmaWarpSpecialized>>>
    : cute::true_type {};

// `Gemm` is what a rendered file defines:
//   GemmKernel; static void const* kernel();
//   static constexpr bool kOverlaps;                    whether the machine code waits for the end of the kernel before it
//   struct Operands { Problem problem; ... }; static Operands read(Call&);
//   static typename GemmKernel::Arguments arguments(Operands const&);
//   static int64_t scratch_bytes(Problem);              of workspace, before the kernel's own: for what blocks share
//   static constexpr bool kPrepares;                    whether anything is done before a launch
//   static cudaError_t prepare(Operands&, typename GemmKernel::Arguments const&, Preparing&);
template <class Gemm>
struct Sm90Entry {
  using GemmKernel = typename Gemm::GemmKernel;
  using Operands = typename Gemm::Operands;
  using Scheduler = typename GemmKernel::TileScheduler;
  using ClusterShape = typename GemmKernel::DispatchPolicy::ClusterShape;
  static constexpr bool kBatched = cute::is_same_v<Scheduler, BatchedTileScheduler>;
  static constexpr bool kOrdered = cute::is_same_v<Scheduler, OrderedTileScheduler> || kBatched;
  static constexpr int kCluster = cute::size(ClusterShape{});
  static constexpr int kMaxGridZ = 65535;

  static cudaError_t launch(Call& call, int& status) {
    Operands operands = Gemm::read(call);
    status = call.status();
    if constexpr (CountsInGrid<typename GemmKernel::DispatchPolicy>::value) {
      if (status == 0 && operands.problem.count > kMaxGridZ) status = int(Reason::kShape);
    }
    if (status != 0) return cudaSuccess;
    int const device = call.device();
    DeviceGuard const guard(device);
    auto arguments = Gemm::arguments(operands);
    if (cudaError_t const error = prepare(device, arguments.hw_info); error != cudaSuccess) return error;

    int const raster = call.integer();
    int const swizzle = call.integer();
    arguments.scheduler = scheduler_arguments<typename GemmKernel::TileSchedulerArguments>(raster, swizzle);
    int64_t const scratch_bytes = Gemm::scratch_bytes(operands.problem);
    size_t const workspace_size = GemmKernel::get_workspace_size(arguments);
    char* const workspace = static_cast<char*>(call.workspace(size_t(scratch_bytes) + workspace_size));
    void* const own_workspace = workspace_size == 0 ? nullptr : workspace + scratch_bytes;
    status = call.status();
    if (status != 0) return cudaSuccess;

    bool const by_gpc = kOrdered && (raster & kByGpc) != 0;
    if constexpr (kOrdered) {
      if (by_gpc) arguments.scheduler.groups = placement::of<kCluster>(device);
    }
    Queue const queue = call.queue();
    if (workspace_size != 0) {
      if (queue.gives_up()) return cudaSuccess;  // it is cleared before each launch
      if (GemmKernel::initialize_workspace(arguments, own_workspace, queue.stream()) != cutlass::Status::kSuccess) {
        return cudaGetLastError();
      }
    }
    // Blocks that start as others end land anywhere, so an order by GPC wants the device empty.
    bool const follows = workspace_size == 0;
    bool const overlap = Gemm::kOverlaps && !by_gpc && follows;
    if constexpr (Gemm::kPrepares) {
      Preparing preparing{device, queue, workspace, follows};
      if (cudaError_t const error = Gemm::prepare(operands, arguments, preparing); error != cudaSuccess) return error;
      auto const complete = Gemm::arguments(operands);
      arguments.mainloop = complete.mainloop;
      arguments.epilogue = complete.epilogue;
    }
    descriptor_error() = CUDA_SUCCESS;
    auto params = GemmKernel::to_underlying_arguments(arguments, own_workspace);
    // The runtime numbers the driver's errors as the driver does.
    if (descriptor_error() != CUDA_SUCCESS) return cudaError_t(descriptor_error());
    return enqueue(params, queue, overlap);
  }

  static int64_t workspace_size(Problem problem, int raster, int swizzle) {
    Operands operands{};
    operands.problem = problem;
    auto arguments = Gemm::arguments(operands);
    int device = 0;
    cudaGetDevice(&device);
    (void)prepare(device, arguments.hw_info);  // a launch reports what fails here
    arguments.scheduler = scheduler_arguments<typename GemmKernel::TileSchedulerArguments>(raster, swizzle);
    return Gemm::scratch_bytes(problem) + int64_t(GemmKernel::get_workspace_size(arguments));
  }

  static cudaError_t load(int device) {
    cutlass::KernelHardwareInfo hardware;
    return prepare(device, hardware);
  }

  static Description describe() {
    return {GemmKernel::CollectiveMainloop::DispatchPolicy::Stages, int(GemmKernel::MaxThreadsPerBlock),
            int(GemmKernel::SharedStorageSize)};
  }

 private:
  // Attributes: the cluster, and whether thread blocks start while the kernel before in the stream is still ending.
  struct Launch {
    cudaLaunchConfig_t config{};
    cudaLaunchAttribute attributes[2];

    Launch(dim3 grid, bool overlap) {
      attributes[0].id = cudaLaunchAttributeClusterDimension;
      attributes[0].val.clusterDim.x = cute::size<0>(ClusterShape{});
      attributes[0].val.clusterDim.y = cute::size<1>(ClusterShape{});
      attributes[0].val.clusterDim.z = 1;
      attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attributes[1].val.programmaticStreamSerializationAllowed = 1;
      config.gridDim = grid;
      config.blockDim = GemmKernel::get_block_shape();
      config.dynamicSmemBytes = GemmKernel::SharedStorageSize;
      config.attrs = attributes;
      config.numAttrs = overlap ? 2 : 1;
    }
    Launch(Launch const&) = delete;
  };

  // Done once a device: large shared memory has to be asked for, and only the driver knows how many clusters fit.
  static cudaError_t prepare(int device, cutlass::KernelHardwareInfo& hardware) {
    static std::atomic<int> clusters[kMaxDevices] = {};
    int active = clusters[device].load(std::memory_order_acquire);
    hardware.device_id = device;
    hardware.sm_count = multiprocessors(device);
    if (active == 0) {
      cudaError_t error =
          cudaFuncSetAttribute(Gemm::kernel(), cudaFuncAttributeMaxDynamicSharedMemorySize, GemmKernel::SharedStorageSize);
      if (error != cudaSuccess) return error;
      Launch launch(dim3(cute::size<0>(ClusterShape{}), cute::size<1>(ClusterShape{})), false);
      error = cudaOccupancyMaxActiveClusters(&active, Gemm::kernel(), &launch.config);
      if (error != cudaSuccess) return error;
      // One block on a multiprocessor, even where two would fit.
      active = std::max(1, std::min(active, hardware.sm_count / kCluster));
      clusters[device].store(active, std::memory_order_release);
    }
    hardware.max_active_clusters = active;
    return cudaSuccess;
  }

  // With `overlap`, thread blocks start while the kernel before in the stream is still ending (programmatic dependent
  // launch). Each waits for the end of that kernel before its first load, and every write depends on a load. CUTLASS's own
  // workspace is cleared by a memset, which this launch has to follow.
  static cudaError_t enqueue(typename GemmKernel::Params& params, Queue const& queue, bool overlap) {
    Launch const launch(grid(params), overlap);
    return queue.launch(launch.config, Gemm::kernel(), params);
  }

  static dim3 grid(typename GemmKernel::Params const& params) {
    if constexpr (kOrdered) {
      return Scheduler::grid(params.scheduler, ClusterShape{});
    } else {
      return GemmKernel::get_grid_shape(params);
    }
  }
};

#endif  // CUTLASS_OPS_HOST

}  // namespace cutlass_ops
