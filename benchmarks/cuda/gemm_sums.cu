// One GEMM of CUTLASS on FP16 for Hopper, with sums in FP32 and in FP16: D (M, N) = A (M, K) B (K, N), both along K.
// benchmarks/bench_instructions.py compiles this file and times the two against each other.

#include <cstdint>

#include <cuda_runtime.h>

#include "cutlass/cutlass.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "cutlass/util/packed_stride.hpp"

namespace {

using cutlass::half_t;
using namespace cute;

template <class Sum>
struct Gemm {
  using Tile = Shape<_128, _256, _64>;
  using Cluster = Shape<_2, _1, _1>;
  using Row = cutlass::layout::RowMajor;
  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster, cutlass::epilogue::collective::EpilogueTileAuto,
      Sum, float, void, Row, 8, half_t, Row, 8, cutlass::epilogue::TmaWarpSpecializedCooperative>::CollectiveOp;
  using MainLoop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, half_t, Row, 8, half_t, cutlass::layout::ColumnMajor, 8, Sum, Tile,
      Cluster, cutlass::gemm::collective::StageCountAutoCarveout<int(sizeof(typename Epilogue::SharedStorage))>,
      cutlass::gemm::KernelTmaWarpSpecializedCooperative>::CollectiveOp;
  using Kernel = cutlass::gemm::kernel::GemmUniversal<Shape<int, int, int, int>, MainLoop, Epilogue>;
  using Device = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

  static int run(void const* a, void const* b, void* d, int m, int n, int k, void* workspace, int64_t bytes,
                 cudaStream_t stream) {
    auto const stride_a = cutlass::make_cute_packed_stride(typename Kernel::StrideA{}, make_shape(m, k, 1));
    auto const stride_b = cutlass::make_cute_packed_stride(typename Kernel::StrideB{}, make_shape(n, k, 1));
    auto const stride_d = cutlass::make_cute_packed_stride(typename Kernel::StrideD{}, make_shape(m, n, 1));
    typename Kernel::Arguments const arguments{
        cutlass::gemm::GemmUniversalMode::kGemm,
        {m, n, k, 1},
        {static_cast<half_t const*>(a), stride_a, static_cast<half_t const*>(b), stride_b},
        {{1.0f, 0.0f}, nullptr, {}, static_cast<half_t*>(d), stride_d}};
    if (int64_t(Device::get_workspace_size(arguments)) > bytes) return -1;
    Device device;
    cutlass::Status status = device.initialize(arguments, workspace, stream);
    if (status == cutlass::Status::kSuccess) status = device.run(stream);
    return int(status);
  }
};

}  // namespace

extern "C" {

#define GEMM_OF(name, Sum)                                                                                            \
  int name(void const* a, void const* b, void* d, int m, int n, int k, void* workspace, int64_t bytes, void* stream) { \
    return Gemm<Sum>::run(a, b, d, m, n, k, workspace, bytes, static_cast<cudaStream_t>(stream));                      \
  }
GEMM_OF(gemm_f32, float)
GEMM_OF(gemm_f16, half_t)
}
