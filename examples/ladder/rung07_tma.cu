// Rung 7: wgmma m64n128k16 with TMA and barriers. Two warpgroups compute 128x128 of D, 64 rows each.
//
// One thread asks TMA for whole tiles, which costs the others no instruction and no register. Three stages are on their way;
// a stage's barrier tells when its bytes have come. Two blocks share a multiprocessor: one multiplies while the other waits
// or writes its results. K is a multiple of eight.
#include "tma.cuh"
#include "wgmma.cuh"

constexpr int kTile = 128;
constexpr int kStages = 3;
constexpr int kThreads = 2 * kWarpgroup;
constexpr int kBand = 8;
constexpr int kTileBytes = kTile * kRowBytes;
constexpr int kStageBytes = 2 * kTileBytes;
constexpr int kSharedBytes = kStages * kStageBytes + kSwizzleBytes;

__global__ __launch_bounds__(kThreads, 2) void by_tma(const __grid_constant__ CUtensorMap map_a,
                                                      const __grid_constant__ CUtensorMap map_b, half* d, int m, int n,
                                                      int k) {
  extern __shared__ uint8_t memory[];
  __shared__ uint64_t barriers[kStages];
  uint32_t stages = shared_address(aligned(memory));
  uint32_t full = shared_address(barriers);
  Tile tile = tile_at(blockIdx.x, ceil_div(m, kTile), ceil_div(n, kTile), kBand);
  int first_row = tile.m * kTile, first_column = tile.n * kTile;
  int steps = ceil_div(k, kStep);
  bool copies = threadIdx.x == 0;

  auto copy = [&](int step) {
    uint32_t stage = stages + step % kStages * kStageBytes;
    uint32_t barrier = full + step % kStages * 8;
    expect(barrier, kStageBytes);
    copy_box(stage, map_a, first_row, step * kStep, barrier);
    copy_box(stage + kTileBytes, map_b, first_column, step * kStep, barrier);
  };

  if (copies) {
    for (int stage = 0; stage < kStages; ++stage) make_barrier(full + stage * 8, 1);
    show_barriers();
  }
  __syncthreads();
  if (copies) {
    for (int step = 0; step < kStages && step < steps; ++step) copy(step);
  }
  int group = warpgroup();
  float sums[kTile / 2] = {};
  for (int step = 0; step < steps; ++step) {
    uint32_t stage = stages + step % kStages * kStageBytes;
    wait_for(full + step % kStages * 8, step / kStages % 2);
    begin_multiplying();
    multiply_step(sums, stage + group * 64 * kRowBytes, stage + kTileBytes);
    commit_products();
    // The last step's products are finished, for every warp after the barrier: its stage is free.
    wait_products<1>();
    __syncthreads();
    if (copies && step > 0 && step - 1 + kStages < steps) copy(step - 1 + kStages);
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
  CUtensorMap map_a, map_b;
  cudaError_t status = describe(&map_a, a, m, k, kTile);
  if (status == cudaSuccess) status = describe(&map_b, b, n, k, kTile);
  if (status == cudaSuccess) {
    status = cudaFuncSetAttribute(by_tma, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  }
  if (status != cudaSuccess) return status;
  by_tma<<<ceil_div(m, kTile) * ceil_div(n, kTile), kThreads, kSharedBytes, stream>>>(map_a, map_b, d, m, n, k);
  return cudaGetLastError();
}
