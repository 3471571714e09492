// TMA, the engine that copies tiles, and the barriers in shared memory that it reports to.
//
// Source: PTX ISA, "cp.async.bulk.tensor" and "mbarrier"; CUDA driver API, cuTensorMapEncodeTiled.
#pragma once

#include <cuda.h>

#include "swizzled.cuh"

// A barrier's phase ends when all arrivals and all announced bytes have come. Phases are told apart by their parity.
__device__ inline void make_barrier(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// TMA and the other blocks of a cluster see the barriers that were made, after this and a barrier of theirs.
__device__ inline void show_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Arrive, and announce bytes that TMA will bring.
__device__ inline void expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Wait until the phase of a parity has ended. A new barrier is in phase 0, so phase -1, whose parity is 1, has ended.
__device__ inline void wait_for(uint32_t barrier, int parity) {
  uint32_t done;
  do {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n"
        "}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  } while (!done);
}

// Copy the box of a matrix that begins at a row and a column, zeros beyond the matrix, and count its bytes at a barrier.
__device__ inline void copy_box(uint32_t to, const CUtensorMap& map, int row, int column, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(column), "r"(row)
      : "memory");
}

// The same into several blocks of a cluster, one for each bit of `blocks`: at the same place of each one's shared memory,
// and counted at each one's barrier.
__device__ inline void copy_box_to(uint32_t to, const CUtensorMap& map, int row, int column, uint32_t barrier,
                                   uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(column), "r"(row), "h"(blocks)
      : "memory");
}

// Describe a row-major matrix for copies of boxes of 64 columns. Its columns are a multiple of eight: TMA wants rows at
// multiples of 16 bytes. The driver's function is looked up, so that a library needs no link with the driver.
inline cudaError_t describe(CUtensorMap* map, const half* matrix, int rows, int columns, int box_rows) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
  cudaError_t status =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
#else
  cudaError_t status = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &result);
#endif
  if (status != cudaSuccess) return status;
  if (result != cudaDriverEntryPointSuccess) return cudaErrorNotSupported;
  cuuint64_t size[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  cuuint64_t stride[] = {static_cast<cuuint64_t>(columns) * sizeof(half)};
  cuuint32_t box[] = {kStep, static_cast<cuuint32_t>(box_rows)};
  cuuint32_t steps[] = {1, 1};
  CUresult encoded = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found)(
      map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2, const_cast<half*>(matrix), size, stride, box, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return encoded == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}
