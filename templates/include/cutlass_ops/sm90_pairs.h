// Values of the column beside, in Sm90 kernels: a visitor of CUTLASS's tree between two others.

#pragma once

#include "cutlass_ops/epilogue.h"

namespace cutlass_ops {

// Columns 2 n and 2 n + 1 of D are neighbours in a fragment; where the kernel computes the transposed problem they are
// rows, of lanes that are four apart.
template <bool kSwapped>
struct SwapPairs : Input<Nothing> {
  struct SharedStorage {};

  CUTLASS_HOST_DEVICE SwapPairs() {}
  CUTLASS_HOST_DEVICE SwapPairs(Nothing const&, SharedStorage const&) {}

  struct Callbacks : cutlass::epilogue::fusion::EmptyConsumerStoreCallbacks {
    template <class Accumulator, class Value, int kSize>
    CUTLASS_DEVICE cutlass::Array<float, kSize> visit(cutlass::Array<Accumulator, kSize> const&, int, int, int,
                                                      cutlass::Array<Value, kSize> const& values) {
      static_assert(kSize % 2 == 0);
      cutlass::Array<float, kSize> result;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kSize; ++i) {
        if constexpr (kSwapped) {
          result[i] = __shfl_xor_sync(0xffffffff, float(values[i]), 4);
        } else {
          result[i] = float(values[i ^ 1]);
        }
      }
      return result;
    }
  };

  template <bool, class... Args>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(
      cutlass::epilogue::fusion::detail::ConsumerStoreArgs<Args...> const&) {
    return Callbacks{};
  }
};

}  // namespace cutlass_ops
