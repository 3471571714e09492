// Rung 4: WMMA from shared memory. Eight warps compute 128x128 of D, 64x32 each.
//
// Rows of a shared tile have 32 halves and eight of padding: without it, the eight rows of a fragment would begin in the
// same banks. Two buffers take turns. The next step's values come from global memory through registers meanwhile. K
// is a multiple of eight (the driver pads it).
#include <mma.h>

#include "common.cuh"

using namespace nvcuda;

constexpr int kTile = 128;
constexpr int kStep = 32;          // of K
constexpr int kPitch = kStep + 8;  // halves
constexpr int kThreads = 256;
constexpr int kDown = 4, kAcross = 2;                 // fragments of a warp
constexpr int kLoads = kTile * kStep / 8 / kThreads;  // vectors of eight that a thread loads of either operand
constexpr int kResultPitch = 16 + 4;                  // floats

struct Step {
  half a[kTile][kPitch];
  half b[kTile][kPitch];
};

union Shared {
  Step steps[2];
  float results[kThreads / kWarp][16 * kResultPitch];
};

__device__ void load(Eight (&into)[kLoads], const half* matrix, int rows, int k, int first, int start) {
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    int index = threadIdx.x + i * kThreads;
    into[i] = load_eight(matrix, rows, k, first + index / (kStep / 8), start + index % (kStep / 8) * 8);
  }
}

__device__ void put(half (*tile)[kPitch], const Eight (&from)[kLoads]) {
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    int index = threadIdx.x + i * kThreads;
    *reinterpret_cast<uint4*>(&tile[index / (kStep / 8)][index % (kStep / 8) * 8]) = from[i].bits();
  }
}

__global__ __launch_bounds__(kThreads) void eight_warps(const half* a, const half* b, half* d, int m, int n, int k) {
  __shared__ __align__(32) Shared shared;
  int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  int first_row = blockIdx.y * kTile, first_column = blockIdx.x * kTile;
  int row = warp / 4 * kDown * 16, column = warp % 4 * kAcross * 16;  // of the warp in the tile
  wmma::fragment<wmma::accumulator, 16, 16, 16, float> sums[kDown][kAcross];
#pragma unroll
  for (int y = 0; y < kDown; ++y) {
#pragma unroll
    for (int x = 0; x < kAcross; ++x) wmma::fill_fragment(sums[y][x], 0);
  }
  Eight next_a[kLoads], next_b[kLoads];
  load(next_a, a, m, k, first_row, 0);
  load(next_b, b, n, k, first_column, 0);
  for (int start = 0; start < k; start += kStep) {
    Step& step = shared.steps[start / kStep % 2];
    put(step.a, next_a);
    put(step.b, next_b);
    // One barrier a step: the other buffer is written after the next one, when all warps have read it.
    __syncthreads();
    load(next_a, a, m, k, first_row, start + kStep);
    load(next_b, b, n, k, first_column, start + kStep);
#pragma unroll
    for (int i = 0; i < kStep; i += 16) {
      wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> of_a[kDown];
      wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::col_major> of_b[kAcross];
#pragma unroll
      for (int y = 0; y < kDown; ++y) wmma::load_matrix_sync(of_a[y], &step.a[row + y * 16][i], kPitch);
#pragma unroll
      for (int x = 0; x < kAcross; ++x) wmma::load_matrix_sync(of_b[x], &step.b[column + x * 16][i], kPitch);
#pragma unroll
      for (int y = 0; y < kDown; ++y) {
#pragma unroll
        for (int x = 0; x < kAcross; ++x) wmma::mma_sync(sums[y][x], of_a[y], of_b[x], sums[y][x]);
      }
    }
  }
  __syncthreads();  // the results lie where the operands did
  float* results = shared.results[warp];
#pragma unroll
  for (int y = 0; y < kDown; ++y) {
#pragma unroll
    for (int x = 0; x < kAcross; ++x) {
      wmma::store_matrix_sync(results, sums[y][x], kResultPitch, wmma::mem_row_major);
      __syncwarp();
      const float* from = results + lane / 2 * kResultPitch + lane % 2 * 8;
      Eight eight;
#pragma unroll
      for (int i = 0; i < 8; ++i) eight.values[i] = __float2half(from[i]);
      int to_row = first_row + row + y * 16 + lane / 2;
      store_eight(d, m, n, to_row, first_column + column + x * 16 + lane % 2 * 8, eight);
      __syncwarp();
    }
  }
}

LADDER_LAUNCH {
  eight_warps<<<dim3(ceil_div(n, kTile), ceil_div(m, kTile)), kThreads, 0, stream>>>(a, b, d, m, n, k);
  return cudaGetLastError();
}
