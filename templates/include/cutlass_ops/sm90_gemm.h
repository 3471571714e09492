// The device's side and reduction functors of the Sm90 kernels. A rendered file names types; what runs is here.

#pragma once

#include "cute/tensor.hpp"
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

#include "cutlass_ops/epilogue.h"
#include "cutlass_ops/epilogue_math.h"
#include "cutlass_ops/mainloop.h"
#include "cutlass_ops/sm90_launch.h"
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

// ---- Kernel ------------------------------------------------------------------------------------------------------

// `GemmKernel` with parameters that the host fills (sm90_launch.h): they lie as CUTLASS's own.
template <class GemmKernel, class Params_, int kThreads_>
struct Sm90Kernel : Launched<Params_, kThreads_> {
  using Own = typename GemmKernel::Params;
  template <class X, class Y>
  static constexpr bool kAlike = sizeof(X) == sizeof(Y) && alignof(X) == alignof(Y);
  static_assert(kThreads_ == GemmKernel::MaxThreadsPerBlock && kAlike<Params_, Own>);
  static_assert(kAlike<decltype(Params_::mainloop), decltype(Own::mainloop)>);
  static_assert(kAlike<decltype(Params_::epilogue), decltype(Own::epilogue)>);
  static_assert(kAlike<decltype(Params_::epilogue.thread), decltype(Own::epilogue.thread)>);
  static_assert(kAlike<decltype(Params_::epilogue.tma_store_d), decltype(Own::epilogue.tma_store_d)>);

  CUTLASS_DEVICE static void run(Params_ const& given) {
    extern __shared__ char shared_memory[];
    auto const& params = reinterpret_cast<Own const&>(given);
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

}  // namespace cutlass_ops
