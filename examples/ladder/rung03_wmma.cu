// Rung 3: the Tensor Cores through WMMA. A warp computes a 16x16 tile of D and reads its operands from global memory.
//
// WMMA reads whole tiles: M, N and K of the operands are multiples of 16 (the driver pads them). D has its own M and N.
#include <mma.h>

#include "common.cuh"

using namespace nvcuda;

constexpr int kTile = 16;
constexpr int kSide = 2;          // warps along either side of a block
constexpr int kPitch = kTile + 4;  // floats

__global__ void one_warp(const half* a, const half* b, half* d, int m, int n, int k) {
  __shared__ __align__(32) float results[kSide * kSide][kTile * kPitch];
  int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  int row = (blockIdx.y * kSide + warp / kSide) * kTile;
  int column = (blockIdx.x * kSide + warp % kSide) * kTile;
  if (row >= m || column >= n) return;
  wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> of_a;
  wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::col_major> of_b;
  wmma::fragment<wmma::accumulator, 16, 16, 16, float> sum;
  wmma::fill_fragment(sum, 0);
  for (int start = 0; start < k; start += kTile) {
    wmma::load_matrix_sync(of_a, a + static_cast<size_t>(row) * k + start, k);
    wmma::load_matrix_sync(of_b, b + static_cast<size_t>(column) * k + start, k);
    wmma::mma_sync(sum, of_a, of_b, sum);
  }
  // Which element a thread holds is not specified, so the sums go through shared memory to become FP16.
  wmma::store_matrix_sync(results[warp], sum, kPitch, wmma::mem_row_major);
  __syncwarp();
  const float* from = results[warp] + lane / 2 * kPitch + lane % 2 * 8;
  Eight eight;
#pragma unroll
  for (int i = 0; i < 8; ++i) eight.values[i] = __float2half(from[i]);
  store_eight(d, m, n, row + lane / 2, column + lane % 2 * 8, eight);
}

LADDER_LAUNCH {
  dim3 grid(ceil_div(n, kTile * kSide), ceil_div(m, kTile * kSide));
  one_warp<<<grid, kSide * kSide * kWarp, 0, stream>>>(a, b, d, m, n, k);
  return cudaGetLastError();
}
