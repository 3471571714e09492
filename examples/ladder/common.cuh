// What every rung shares: the function it exports, the order of tiles, and reads and writes at the edges of a matrix.
//
// D = A B^T. A is (M, K), B is (N, K) and D is (M, N), all FP16 and row-major: B is a weight as torch.nn.Linear has it.
// The sums are FP32.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>

// Returns a cudaError_t. A, B and D begin at multiples of 16 bytes.
#define LADDER_LAUNCH \
  extern "C" int launch(const half* a, const half* b, half* d, int m, int n, int k, cudaStream_t stream)

constexpr int kWarp = 32;

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

struct Tile {
  int m, n;
};

// Return the tile that a block computes. Blocks that run at the same time share rows and columns of tiles: they go through
// a band of `band` rows of tiles column by column, so that the L2 cache serves both A and B.
__host__ __device__ inline Tile tile_at(int index, int tiles_m, int tiles_n, int band) {
  int in_band = band * tiles_n;
  int first = index / in_band * band;
  int rows = tiles_m - first < band ? tiles_m - first : band;
  int rest = index % in_band;
  return {first + rest % rows, rest / rows};
}

// Eight halves, which are moved as one.
struct alignas(16) Eight {
  half values[8];

  __device__ uint4& bits() { return *reinterpret_cast<uint4*>(values); }
  __device__ const uint4& bits() const { return *reinterpret_cast<const uint4*>(values); }
};

// Read eight halves of a row, zeros beyond the matrix. Columns are a multiple of eight.
__device__ inline Eight load_eight(const half* matrix, int rows, int columns, int row, int column) {
  Eight eight;
  eight.bits() = make_uint4(0, 0, 0, 0);
  if (row < rows && column < columns) {
    eight.bits() = *reinterpret_cast<const uint4*>(matrix + static_cast<size_t>(row) * columns + column);
  }
  return eight;
}

// Write eight halves of a row, as far as they lie in the matrix: in one store if every row begins at a multiple of 16
// bytes.
__device__ inline void store_eight(half* matrix, int rows, int columns, int row, int column, const Eight& eight) {
  if (row >= rows) return;
  half* to = matrix + static_cast<size_t>(row) * columns + column;
  if (columns % 8 == 0) {
    if (column < columns) *reinterpret_cast<uint4*>(to) = eight.bits();
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (column + i < columns) to[i] = eight.values[i];
    }
  }
}

// Write two neighbours of a row, as far as they lie in the matrix. The column is even.
__device__ inline void store_pair(half* matrix, int rows, int columns, int row, int column, float x, float y) {
  if (row >= rows || column >= columns) return;
  half* to = matrix + static_cast<size_t>(row) * columns + column;
  if (columns % 2 == 0) {
    *reinterpret_cast<half2*>(to) = __floats2half2_rn(x, y);
  } else {
    to[0] = __float2half(x);
    if (column + 1 < columns) to[1] = __float2half(y);
  }
}
