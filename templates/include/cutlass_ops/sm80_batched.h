// Batches for Sm80 kernels: each thread block computes one tile of one batch, whose number is the third coordinate of its tile.

#pragma once

#include <algorithm>

#include "cutlass_ops/sm80_gemm.h"

#include "cutlass_ops/batched.h"

namespace cutlass_ops {
namespace sm80 {

template <class Element>
CUTLASS_DEVICE Element const* at_batch(BatchedVector<Element> const& x, int64_t offset) {
  return x.values + offset;
}
template <class Element>
CUTLASS_DEVICE Matrix at_batch(BatchedMatrix const& x, int64_t offset) {
  Matrix own = x;
  own.data = static_cast<Element*>(x.data) + offset;
  return own;
}

// A visitor whose tensor has batches: `Given` says where they are. Its callbacks keep what they need of the batch's own.
template <class Node, class Element, class Given>
struct Batched : Visitor<Given> {
  using Visitor<Given>::Visitor;

  template <class ProblemShape>
  CUTLASS_DEVICE auto get_callbacks(GemmCoord tile, int thread_idx, ProblemShape problem) {
    typename Node::Params const own =
        at_batch<Element>(*this->params_, this->params_->batches.offset(tile.k(), cute::get<2>(problem)));
    typename Node::SharedStorage const none{};
    return Node(own, none).get_callbacks(tile, thread_idx, problem);
  }
};

// CUTLASS's GemmWithEpilogueVisitor knows one stride between batches. This does the same for batches with two.
template <class GemmKernel>
struct BatchedKernel {
  static constexpr int kThreads = GemmKernel::kThreadCount;

  struct Params {
    typename GemmKernel::Params gemm;  // the third extent of its problem is the number of batches of the last dimension
    Batches a, b;                      // of the kernel's operands
    int first;                         // batch of this launch
  };

  CUTLASS_DEVICE static void run(Params const& all) {
    using Mma = typename GemmKernel::Mma;
    extern __shared__ char shared_memory[];
    auto& shared = *reinterpret_cast<typename GemmKernel::SharedStorage*>(shared_memory);
    auto const& params = all.gemm;
    int const log_tile = params.swizzle_log_tile, batch = all.first + int(blockIdx.z);
    GemmCoord const tile{int(blockIdx.x) >> log_tile,
                         (int(blockIdx.y) << log_tile) + (int(blockIdx.x) & ((1 << log_tile) - 1)), batch};
    if (params.grid_tiled_shape.m() <= tile.m() || params.grid_tiled_shape.n() <= tile.n()) return;

    int const extent = cute::get<2>(params.problem_shape), k = params.problem_size.k(), thread = int(threadIdx.x);
    auto* const a = static_cast<typename GemmKernel::ElementA*>(params.ptr_A) + all.a.offset(batch, extent);
    auto* const b = static_cast<typename GemmKernel::ElementB*>(params.ptr_B) + all.b.offset(batch, extent);
    typename Mma::IteratorA from_a(params.params_A, a, {params.problem_size.m(), k}, thread,
                                   {tile.m() * Mma::Shape::kM, 0}, nullptr);
    typename Mma::IteratorB from_b(params.params_B, b, {k, params.problem_size.n()}, thread,
                                   {0, tile.n() * Mma::Shape::kN}, nullptr);
    int const warp = cutlass::canonical_warp_idx_sync(), lane = thread % 32;

    typename Mma::FragmentC accumulators;
    accumulators.clear();
    Mma mma(shared.main_loop, thread, warp, lane);
    mma((k + Mma::Shape::kK - 1) / Mma::Shape::kK, accumulators, from_a, from_b, accumulators);

    typename GemmKernel::Epilogue epilogue(params.output_op, shared.epilogue, thread, warp, lane);
    epilogue(accumulators, tile, params.problem_shape, thread);
  }
};

}  // namespace sm80

#if CUTLASS_OPS_HOST

// `Gemm` is what a rendered file defines for `Sm80Entry`, and
//   static std::pair<Batches, Batches> batches(Operands const&);  of A and B in the kernel's orientation
template <class Gemm>
struct Sm80BatchedEntry {
  using GemmKernel = typename Gemm::GemmKernel;
  using Operands = typename Gemm::Operands;

  static cudaError_t launch(Call& call, int& status) {
    Operands const operands = Gemm::read(call);
    status = call.status();
    if (status == 0 && sm80::is_too_large(operands.problem)) status = int(Reason::kShape);
    if (status != 0) return cudaSuccess;
    DeviceGuard const guard(call.device());
    sm80::Device const device = sm80::prepared<GemmKernel>(Gemm::kernel(), call.device());
    if (device.error != cudaSuccess) return device.error;

    call.integer();  // the raster order: along M always
    int const swizzle = call.integer();
    call.workspace(0);
    status = call.status();
    if (status != 0) return cudaSuccess;

    auto const [a, b] = Gemm::batches(operands);
    typename sm80::BatchedKernel<GemmKernel>::Params params{
        typename GemmKernel::Params(Gemm::arguments(operands), device.multiprocessors, device.blocks_per_multiprocessor), a, b,
        0};
    cute::get<2>(params.gemm.problem_shape) = operands.problem.inner;
    auto const tiles = params.gemm.grid_tiled_shape;
    params.gemm.swizzle_log_tile = sm80::ThreadblockSwizzle::log_tile(tiles, std::max(swizzle, 1));
    cudaLaunchConfig_t config{};
    config.gridDim = sm80::ThreadblockSwizzle::grid(tiles, params.gemm.swizzle_log_tile);
    if (config.gridDim.z != 1) return status = 16 + int(Reason::kShape), cudaSuccess;  // the grid's third side counts batches
    config.blockDim = dim3(GemmKernel::kThreadCount);
    config.dynamicSmemBytes = sizeof(typename GemmKernel::SharedStorage);

    Queue const queue = call.queue();
    constexpr int kMost = sm80::ThreadblockSwizzle::kMaxGridY;
    cudaError_t error = cudaSuccess;
    for (int left = operands.problem.count; left > 0 && error == cudaSuccess; left -= kMost, params.first += kMost) {
      config.gridDim.z = unsigned(std::min(left, kMost));
      error = queue.launch(config, Gemm::kernel(), params);
    }
    return error;
  }

  static int64_t workspace_size(Problem, int, int) { return 0; }

  static cudaError_t load(int device) { return Sm80Entry<Gemm>::load(device); }

  static Description describe() { return Sm80Entry<Gemm>::describe(); }
};

#endif  // CUTLASS_OPS_HOST

}  // namespace cutlass_ops
