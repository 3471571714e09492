// Rung 5: mma.sync m16n8k16 by inline PTX, with ldmatrix and cp.async.
//
// Four warps compute 128x128 of D, 64x64 each: a warp reads 128 rows from shared memory for 64x64 products, so the Tensor
// Cores do not wait for it. Copies run two steps ahead, in three stages, and two blocks share a multiprocessor. K is a
// multiple of eight (the driver pads it).
#include "swizzled.cuh"

constexpr int kTile = 128;
constexpr int kStages = 3;
constexpr int kThreads = 128;
constexpr int kBand = 8;
constexpr int kTileBytes = kTile * kRowBytes;
constexpr int kStageBytes = 2 * kTileBytes;
constexpr int kSharedBytes = kStages * kStageBytes + kSwizzleBytes;
constexpr int kDown = 4, kAcross = 8;  // instructions of a warp: 16 rows and 8 columns each

// Load four 8x8 matrices. Lanes 0 to 7 give the rows of the first, 8 to 15 those of the second, and so on.
__device__ inline void load_matrices(uint32_t& r0, uint32_t& r1, uint32_t& r2, uint32_t& r3, uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r0), "=r"(r1), "=r"(r2), "=r"(r3)
               : "r"(row)
               : "memory");
}

__device__ inline void multiply(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// The operands of a warp for 16 of K.
struct Fragments {
  uint32_t a[kDown][4];
  uint32_t b[kAcross][2];

  __device__ void load(uint32_t stage, int row, int column, int part, int lane) {
#pragma unroll
    for (int y = 0; y < kDown; ++y) {
      // Rows 0 to 15 at the first eight of K, then again at the second.
      uint32_t at = stage + swizzled(row + y * 16 + lane % 16, part * 2 + lane / 16);
      load_matrices(a[y][0], a[y][1], a[y][2], a[y][3], at);
    }
#pragma unroll
    for (int x = 0; x < kAcross; x += 2) {
      // Eight of N at both parts of K, then the next eight of N.
      uint32_t at = stage + kTileBytes + swizzled(column + x * 8 + lane / 16 * 8 + lane % 8, part * 2 + lane / 8 % 2);
      load_matrices(b[x][0], b[x][1], b[x + 1][0], b[x + 1][1], at);
    }
  }
};

__global__ __launch_bounds__(kThreads, 2) void by_warps(const half* a, const half* b, half* d, int m, int n, int k) {
  extern __shared__ uint8_t memory[];
  uint32_t stages = shared_address(aligned(memory));
  int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  Tile tile = tile_at(blockIdx.x, ceil_div(m, kTile), ceil_div(n, kTile), kBand);
  int first_row = tile.m * kTile, first_column = tile.n * kTile;
  int row = warp / 2 * 64, column = warp % 2 * 64;  // of the warp in the tile
  int steps = ceil_div(k, kStep);

  auto copy = [&](int step) {
    uint32_t stage = stages + step % kStages * kStageBytes;
    if (step < steps) {
      copy_tile<kTile, kThreads>(stage, a, m, k, first_row, step * kStep);
      copy_tile<kTile, kThreads>(stage + kTileBytes, b, n, k, first_column, step * kStep);
    }
    commit_copies();  // also an empty group, so that their number tells the step
  };

  float sums[kDown][kAcross][4] = {};
#pragma unroll
  for (int step = 0; step < kStages - 1; ++step) copy(step);
  for (int step = 0; step < steps; ++step) {
    wait_copies<kStages - 2>();
    // After the barrier, everyone's copies of this step are there, and nobody reads the stage of the last step.
    __syncthreads();
    copy(step + kStages - 1);
    uint32_t stage = stages + step % kStages * kStageBytes;
    Fragments fragments[2];
    fragments[0].load(stage, row, column, 0, lane);
#pragma unroll
    for (int part = 0; part < kStep / 16; ++part) {
      if (part + 1 < kStep / 16) fragments[(part + 1) % 2].load(stage, row, column, part + 1, lane);
      const Fragments& now = fragments[part % 2];
#pragma unroll
      for (int y = 0; y < kDown; ++y) {
#pragma unroll
        for (int x = 0; x < kAcross; ++x) multiply(sums[y][x], now.a[y], now.b[x]);
      }
    }
  }
#pragma unroll
  for (int y = 0; y < kDown; ++y) {
#pragma unroll
    for (int x = 0; x < kAcross; ++x) {
      int to_row = first_row + row + y * 16 + lane / 4;
      int to_column = first_column + column + x * 8 + lane % 4 * 2;
      store_pair(d, m, n, to_row, to_column, sums[y][x][0], sums[y][x][1]);
      store_pair(d, m, n, to_row + 8, to_column, sums[y][x][2], sums[y][x][3]);
    }
  }
}

LADDER_LAUNCH {
  cudaError_t status = cudaFuncSetAttribute(by_warps, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (status != cudaSuccess) return status;
  by_warps<<<ceil_div(m, kTile) * ceil_div(n, kTile), kThreads, kSharedBytes, stream>>>(a, b, d, m, n, k);
  return cudaGetLastError();
}
