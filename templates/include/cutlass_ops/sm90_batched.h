// Batches for Sm90 kernels. CuTe counts them with one number and addresses them in two dimensions: the last mode of a
// problem's shape and of each stride has two parts, the last leading dimension first. TMA descriptors have them both.

#pragma once

#include "cutlass_ops/sm90_gemm.h"

#include "cutlass_ops/batched.h"

namespace cutlass_ops {

// A stride of CUTLASS's with batches in two dimensions. It takes a layout's place wherever CUTLASS makes a stride of one.
template <class Stride>
using WithBatches = cute::Stride<cute::remove_cvref_t<decltype(cute::get<0>(Stride{}))>,
                                 cute::remove_cvref_t<decltype(cute::get<1>(Stride{}))>, cute::Stride<int64_t, int64_t>>;
template <class Layout>
using BatchedA = WithBatches<cutlass::gemm::TagToStrideA_t<Layout>>;
template <class Layout>
using BatchedB = WithBatches<cutlass::gemm::TagToStrideB_t<Layout>>;
template <class Layout>
using BatchedC = WithBatches<cutlass::gemm::TagToStrideC_t<Layout>>;

}  // namespace cutlass_ops
