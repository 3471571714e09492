// CUTLASS's stream-K scheduler for Sm90 kernels, whose parameters CUTLASS computes.

#pragma once

#include "cutlass_ops/types_of_cutlass.h"

#include "cutlass/gemm/kernel/tile_scheduler_params.h"

#include "cutlass_ops/sm90_launch.h"

namespace cutlass_ops {

// Of a tile whose epilogue takes so many steps.
template <int kSteps>
struct StreamKOrder : cutlass::gemm::kernel::detail::PersistentTileSchedulerSm90StreamKParams {
  static constexpr bool kOrdered = false;

#if CUTLASS_OPS_HOST
  template <class Problem>
  static int64_t workspace_bytes(Problem const& problem, Geometry const& shape, Hardware const& hardware, Order const& order) {
    size_t const bytes = get_workspace_size(coord(problem), tile(shape), cluster(shape), known(hardware), kSplits, order.swizzle,
                                            raster(order), DecompositionMode::Heuristic, ReductionMode::Deterministic,
                                            kWarpgroups, kBits, kBits, kSteps, 1);
    return int64_t((bytes + 15) / 16 * 16);
  }

  template <class Problem>
  static cudaError_t clear(void* workspace, Problem const& problem, Geometry const& shape, Hardware const& hardware,
                           Order const& order, cudaStream_t stream) {
    auto const status = initialize_workspace(workspace, stream, coord(problem), tile(shape), cluster(shape), known(hardware),
                                             kSplits, order.swizzle, raster(order), DecompositionMode::Heuristic,
                                             ReductionMode::Deterministic, kWarpgroups, kBits, kBits, kSteps, 1);
    return status == cutlass::Status::kSuccess ? cudaSuccess : cudaGetLastError();
  }

  template <class Problem>
  void fill(Problem const& problem, Geometry const& shape, Hardware const& hardware, Order const& order, void* workspace) {
    initialize(coord(problem), tile(shape), cluster(shape), known(hardware), kSplits, order.swizzle, raster(order),
               ReductionMode::Deterministic, DecompositionMode::Heuristic, workspace, kSteps);
  }

  template <class Problem>
  dim3 grid(Problem const& problem, Geometry const& shape, Hardware const& hardware) const {
    auto const order = raster_order_ == RasterOrder::AlongN ? RasterOrderOptions::AlongN : RasterOrderOptions::AlongM;
    return get_grid_shape(coord(problem), tile(shape), cluster(shape), known(hardware), 1 << log_swizzle_size_, order);
  }

 private:
  using Coord = cutlass::gemm::GemmCoord;
  static constexpr int kSplits = 1, kWarpgroups = 2, kBits = 32;  // of a tile, of a thread block, and of sums and flags

  template <class Problem>
  static cutlass::gemm::BatchedGemmCoord coord(Problem const& problem) { return {problem.m, problem.n, problem.k, 1}; }
  static Coord tile(Geometry const& shape) { return {shape.m, shape.n, shape.k}; }
  static Coord cluster(Geometry const& shape) { return {shape.cluster_m, shape.cluster_n, 1}; }
  static cutlass::KernelHardwareInfo known(Hardware const& hardware) {
    return {hardware.device, hardware.multiprocessors, hardware.clusters};
  }
  static RasterOrderOptions raster(Order const& order) {
    return order.raster == 1   ? RasterOrderOptions::AlongM
           : order.raster == 2 ? RasterOrderOptions::AlongN
                               : RasterOrderOptions::Heuristic;
  }
#endif
};

}  // namespace cutlass_ops
