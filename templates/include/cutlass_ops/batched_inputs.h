// Inputs of batches for the epilogue of Sm90 kernels (epilogue.h).

#pragma once

#include "cutlass_ops/batched.h"
#include "cutlass_ops/epilogue.h"

namespace cutlass_ops {

// A visitor of epilogue.h that reads one vector for each batch.
template <class Node, class Element>
struct BatchedInput : Input<BatchedVector<Element>> {
  using SharedStorage = typename Node::SharedStorage;

  CUTLASS_HOST_DEVICE BatchedInput() {}
  CUTLASS_HOST_DEVICE BatchedInput(BatchedVector<Element> const& params, SharedStorage const& storage)
      : params_(&params), storage_(&storage) {}

  template <bool kReferenceSource, class... Args>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(
      cutlass::epilogue::fusion::detail::ConsumerStoreArgs<Args...> const& args) {
    auto const [inner, outer] = cute::get<3>(args.tile_coord_mnkl);
    Batches const& batches = params_->batches;
    Vector<Element> const own{params_->values + (inner * batches.inner + outer * batches.outer)};
    return Node(own, *storage_).template get_consumer_store_callbacks<kReferenceSource>(args);
  }

 private:
  BatchedVector<Element> const* params_;
  SharedStorage const* storage_;
};

}  // namespace cutlass_ops
