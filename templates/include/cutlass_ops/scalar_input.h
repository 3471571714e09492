// One value for all elements of D, in Sm90 kernels: a leaf of CUTLASS's tree.

#pragma once

#include "cutlass/arch/memory.h"
#include "cutlass_ops/epilogue.h"

namespace cutlass_ops {

// CUTLASS's own visitor reads a value on the device when the kernel starts, so the kernel may not start before what writes
// the value has ended. This one reads it after a tile's products, which the kernel's loads waited for, and only asks for
// its cache line when it starts.
template <class Element>
struct ScalarInput : Input<Scalar<Element>> {
  using Arguments = Scalar<Element>;
  struct SharedStorage {};

  CUTLASS_HOST_DEVICE ScalarInput() {}
  CUTLASS_HOST_DEVICE ScalarInput(Arguments const& params, SharedStorage const&) : params_(&params) {
#if defined(__CUDA_ARCH__)
    if (params.ptr != nullptr && threadIdx.x == 0) asm volatile("prefetch.global.L2 [%0];" ::"l"(params.ptr));
#endif
  }

  struct Callbacks : cutlass::epilogue::fusion::EmptyConsumerStoreCallbacks {
    float value;

    CUTLASS_DEVICE explicit Callbacks(float value) : value(value) {}

    template <class Accumulator, int kSize>
    CUTLASS_DEVICE cutlass::Array<float, kSize> visit(cutlass::Array<Accumulator, kSize> const&, int, int, int) {
      cutlass::Array<float, kSize> result;
      result.fill(value);
      return result;
    }
  };

  template <bool, class... Args>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(cutlass::epilogue::fusion::detail::ConsumerStoreArgs<Args...> const&) {
    Element value = params_->value;
    // Volatile, so that the compiler cannot move it before the wait for the products.
    if (params_->ptr != nullptr) cutlass::arch::global_load<Element, sizeof(Element)>(value, params_->ptr, true);
    return Callbacks(float(value));
  }

 private:
  Arguments const* params_;
};

}  // namespace cutlass_ops
