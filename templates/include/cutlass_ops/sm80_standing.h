// Stream-K without a memset before each launch: the flags by which blocks wait for each other are in memory that is found and
// left full of zeros. Whoever waits for the last block of a tile resets the tile's flag (cutlass/barrier.h, wait_eq_reset).

#pragma once

#include "cutlass_ops/sm80_gemm.h"
#include "cutlass_ops/standing.h"

namespace cutlass_ops {
namespace sm80 {

template <class Base>
struct StandingFlags : Base {
  struct Params : Base::Params {
    using Base::Params::Params;

#if CUTLASS_OPS_HOST
    // Of what sums are shared in. The flags are not a part of the workspace.
    size_t get_workspace_size() const { return this->get_partials_workspace_size(); }

    cutlass::Status init_workspace(void* sums, cudaStream_t stream) {
      int device = 0;
      this->partials_workspace = sums;
      cudaError_t error = cudaGetDevice(&device);
      if (error == cudaSuccess) {
        int64_t const bytes = int64_t(this->get_barrier_workspace_size());
        error = Standing::of<Base>(device, stream, bytes, &this->barrier_workspace);
      }
      return error == cudaSuccess ? cutlass::Status::kSuccess : cutlass::Status::kErrorInternal;
    }
#endif
  };
};

}  // namespace sm80
}  // namespace cutlass_ops
