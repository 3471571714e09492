// Rung 6: wgmma m64n64k16. A warpgroup computes 64x64 of D; cp.async fills swizzled tiles in shared memory.
//
// Copies run two steps ahead in four stages, so that products of the last step may go on while the next one's begin: the
// stage that is filled was read two steps ago. Three blocks share a multiprocessor. K is a multiple of eight.
#include "wgmma.cuh"

constexpr int kTile = 64;
constexpr int kStages = 4;
constexpr int kAhead = kStages - 2;  // steps
constexpr int kBand = 16;
constexpr int kTileBytes = kTile * kRowBytes;
constexpr int kStageBytes = 2 * kTileBytes;
constexpr int kSharedBytes = kStages * kStageBytes + kSwizzleBytes;

__global__ __launch_bounds__(kWarpgroup, 3) void by_warpgroups(const half* a, const half* b, half* d, int m, int n,
                                                               int k) {
  extern __shared__ uint8_t memory[];
  uint32_t stages = shared_address(aligned(memory));
  Tile tile = tile_at(blockIdx.x, ceil_div(m, kTile), ceil_div(n, kTile), kBand);
  int first_row = tile.m * kTile, first_column = tile.n * kTile;
  int steps = ceil_div(k, kStep);

  auto copy = [&](int step) {
    uint32_t stage = stages + step % kStages * kStageBytes;
    if (step < steps) {
      copy_tile<kTile, kWarpgroup>(stage, a, m, k, first_row, step * kStep);
      copy_tile<kTile, kWarpgroup>(stage + kTileBytes, b, n, k, first_column, step * kStep);
    }
    commit_copies();  // also an empty group, so that their number tells the step
  };

  float sums[kTile / 2] = {};
#pragma unroll
  for (int step = 0; step < kAhead; ++step) copy(step);
  for (int step = 0; step < steps; ++step) {
    wait_copies<kAhead - 1>();
    show_to_wgmma();
    // After the barrier, everyone's copies of this step are there, and all products of two steps ago are finished.
    __syncthreads();
    copy(step + kAhead);
    uint32_t stage = stages + step % kStages * kStageBytes;
    begin_multiplying();
    multiply_step(sums, stage, stage + kTileBytes);
    commit_products();
    wait_products<1>();
  }
  wait_products<0>();
  hold(sums);
  int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
#pragma unroll
  for (int j = 0; j < kTile / 8; ++j) {
    int to_row = first_row + warp * 16 + lane / 4;
    int to_column = first_column + j * 8 + lane % 4 * 2;
    store_pair(d, m, n, to_row, to_column, sums[j * 4], sums[j * 4 + 1]);
    store_pair(d, m, n, to_row + 8, to_column, sums[j * 4 + 2], sums[j * 4 + 3]);
  }
}

LADDER_LAUNCH {
  cudaError_t status = cudaFuncSetAttribute(by_warpgroups, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (status != cudaSuccess) return status;
  by_warpgroups<<<ceil_div(m, kTile) * ceil_div(n, kTile), kWarpgroup, kSharedBytes, stream>>>(a, b, d, m, n, k);
  return cudaGetLastError();
}
