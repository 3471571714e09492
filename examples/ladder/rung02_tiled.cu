// Rung 2: tiles in shared memory, still on the CUDA cores.
//
// A block of 256 threads computes 128x128 of D. Each value of A and B is read once a block from global memory, and kept in
// FP32 in shared memory. A thread keeps 8x8 sums in registers, so that 16 values from shared memory serve 64 products. K is a multiple of eight (the driver pads it).
#include "common.cuh"

constexpr int kTile = 128;
constexpr int kStep = 16;               // of K
constexpr int kPitch = kTile + 4;       // floats; the four of padding spread the columns' stores over the banks
constexpr int kThreads = 256;
constexpr int kHalf = kTile / 2;

// Shared tiles are (K, rows): the eight values that a thread needs at one K are then two vectors of four.
__device__ void put(float (*tile)[kPitch], int row, int column, const Eight& eight) {
#pragma unroll
  for (int i = 0; i < 8; ++i) tile[column + i][row] = __half2float(eight.values[i]);
}

// A thread's eight rows or columns are four and four, half a tile apart: neighbouring threads read neighbouring vectors.
__device__ void get(float (&values)[8], const float (*tile)[kPitch], int i, int which) {
  float4 low = *reinterpret_cast<const float4*>(&tile[i][which * 4]);
  float4 high = *reinterpret_cast<const float4*>(&tile[i][kHalf + which * 4]);
  values[0] = low.x, values[1] = low.y, values[2] = low.z, values[3] = low.w;
  values[4] = high.x, values[5] = high.y, values[6] = high.z, values[7] = high.w;
}

__global__ __launch_bounds__(kThreads) void tiled(const half* a, const half* b, half* d, int m, int n, int k) {
  __shared__ __align__(16) float tile_a[kStep][kPitch];
  __shared__ __align__(16) float tile_b[kStep][kPitch];
  int first_row = blockIdx.y * kTile, first_column = blockIdx.x * kTile;
  int down = threadIdx.x / 16, across = threadIdx.x % 16;        // the thread's place in the tile of D
  int row = threadIdx.x / 2, column = threadIdx.x % 2 * 8;       // the eight values that it loads
  float sums[8][8] = {};
  Eight next_a = load_eight(a, m, k, first_row + row, column);
  Eight next_b = load_eight(b, n, k, first_column + row, column);
  for (int start = 0; start < k; start += kStep) {
    put(tile_a, row, column, next_a);
    put(tile_b, row, column, next_b);
    __syncthreads();
    // The next step's loads are on their way while this one computes.
    next_a = load_eight(a, m, k, first_row + row, start + kStep + column);
    next_b = load_eight(b, n, k, first_column + row, start + kStep + column);
#pragma unroll
    for (int i = 0; i < kStep; ++i) {
      float of_a[8], of_b[8];
      get(of_a, tile_a, i, down);
      get(of_b, tile_b, i, across);
#pragma unroll
      for (int y = 0; y < 8; ++y) {
#pragma unroll
        for (int x = 0; x < 8; ++x) sums[y][x] += of_a[y] * of_b[x];
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int y = 0; y < 8; ++y) {
#pragma unroll
    for (int x = 0; x < 8; x += 2) {
      int to_row = first_row + y / 4 * kHalf + down * 4 + y % 4;
      int to_column = first_column + x / 4 * kHalf + across * 4 + x % 4;
      store_pair(d, m, n, to_row, to_column, sums[y][x], sums[y][x + 1]);
    }
  }
}

LADDER_LAUNCH {
  tiled<<<dim3(ceil_div(n, kTile), ceil_div(m, kTile)), kThreads, 0, stream>>>(a, b, d, m, n, k);
  return cudaGetLastError();
}
