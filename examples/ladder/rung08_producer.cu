// Rung 8: wgmma m64n256k16. One warpgroup produces, two consume: 128x256 of D, four stages.
//
// - One thread of the first warpgroup asks TMA for tiles. It gives its registers to the other two warpgroups, which keep
//   64x256 sums each, 128 registers a thread. They wait for a stage to be full, and say when it is empty.
// - Blocks stay: each computes one tile after the other. The producer fills stages for the next tile while the consumers
//   write the results of the last.
// - Two blocks of a cluster compute two tiles, one above the other, of the same columns. Each asks for half the rows of B
//   and TMA delivers them to both, so L2 is asked for a third less.
// - Results go through shared memory, a warp's 16 rows at a time, so that rows are written in whole lines of 128 bytes.
//
// K is a multiple of eight.
#include "tma.cuh"
#include "wgmma.cuh"

constexpr int kTileM = 128, kTileN = 256;
constexpr int kStages = 4;
constexpr int kCluster = 2;
constexpr int kConsumers = 2;
constexpr int kThreads = (1 + kConsumers) * kWarpgroup;
constexpr int kBand = 8;  // rows of clusters' tiles
constexpr int kABytes = kTileM * kRowBytes, kBBytes = kTileN * kRowBytes;
constexpr int kStageBytes = kABytes + kBBytes;
constexpr int kBShare = kTileN / kCluster;  // rows of B that a block asks for

// Results of a warp: 16 rows of 64, and eight halves of padding, so that eight rows lie in different banks.
constexpr int kPiece = 64;
constexpr int kPitch = kPiece + 8;
constexpr int kWarps = kConsumers * 4;
constexpr int kResultBytes = kWarps * 16 * kPitch * int{sizeof(half)};
constexpr int kSharedBytes = kStages * kStageBytes + kResultBytes + kSwizzleBytes;

// A multiprocessor has 65536 registers: 128 x 40 + 256 x 232 are no more than what 384 threads get at launch, 168 each.
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;

__device__ inline uint32_t rank_in_cluster() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// All threads of all blocks in the cluster meet.
__device__ inline void meet_cluster() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// Arrive at a barrier of another block in the cluster, or of this one. Nothing that was written needs to be seen there, so
// this does not say `.release.cluster`, for which the compiler adds a fence of the whole GPU to every step.
__device__ inline void arrive_at(uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{\n"
      ".reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
      "}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

// Store four 8x8 matrices. Lanes 0 to 7 give the rows of the first, 8 to 15 those of the second, and so on.
__device__ inline void store_matrices(uint32_t row, half2 r0, half2 r1, half2 r2, half2 r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
               "r"(*reinterpret_cast<uint32_t*>(&r0)), "r"(*reinterpret_cast<uint32_t*>(&r1)),
               "r"(*reinterpret_cast<uint32_t*>(&r2)), "r"(*reinterpret_cast<uint32_t*>(&r3))
               : "memory");
}

// Write a warp's 16x256 results.
__device__ inline void write_results(half* d, int m, int n, int row, int column, const float (&sums)[kTileN / 2],
                                     half* results) {
  int lane = threadIdx.x % kWarp;
  uint32_t to = shared_address(results + lane % 16 * kPitch + lane / 16 * 8);
#pragma unroll
  for (int piece = 0; piece < kTileN / kPiece; ++piece) {
#pragma unroll
    for (int j = 0; j < kPiece / 8; j += 2) {
      const float* s = sums + (piece * kPiece / 8 + j) * 4;
      // Rows 0 to 7 and 8 to 15 of eight columns, then of the next eight.
      store_matrices(to + j * 8 * int{sizeof(half)}, __floats2half2_rn(s[0], s[1]), __floats2half2_rn(s[2], s[3]),
                     __floats2half2_rn(s[4], s[5]), __floats2half2_rn(s[6], s[7]));
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 16; i += 4) {
      int r = i + lane / 8, c = lane % 8 * 8;
      Eight eight;
      eight.bits() = *reinterpret_cast<const uint4*>(results + r * kPitch + c);
      store_eight(d, m, n, row + r, column + piece * kPiece + c, eight);
    }
    __syncwarp();
  }
}

__global__ __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1) void specialised(
    const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b, half* d, int m, int n, int k) {
  extern __shared__ uint8_t memory[];
  __shared__ uint64_t barriers[2 * kStages];
  uint8_t* base = aligned(memory);
  uint32_t stages = shared_address(base);
  uint32_t full = shared_address(barriers), empty = full + kStages * 8;
  uint32_t rank = rank_in_cluster();
  int tiles_m = ceil_div(m, kTileM * kCluster), tiles_n = ceil_div(n, kTileN);
  int first_tile = blockIdx.x / kCluster, clusters = gridDim.x / kCluster;
  int steps = ceil_div(k, kStep);
  int group = warpgroup();

  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      make_barrier(full + stage * 8, 1);
      make_barrier(empty + stage * 8, kCluster * kWarps);  // every consumer warp of either block
    }
    show_barriers();
  }
  meet_cluster();

  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kProducerRegisters));
    if (threadIdx.x == 0) {
      int stage = 0, phase = 0;
      for (int index = first_tile; index < tiles_m * tiles_n; index += clusters) {
        Tile tile = tile_at(index, tiles_m, tiles_n, kBand);
        int row = (tile.m * kCluster + rank) * kTileM, column = tile.n * kTileN + rank * kBShare;
        for (int step = 0; step < steps; ++step) {
          // The first time round, a stage is empty: the phase before a new barrier's first has ended.
          wait_for(empty + stage * 8, phase ^ 1);
          uint32_t to = stages + stage * kStageBytes;
          // Of the bytes, half of B come from the other block's request.
          expect(full + stage * 8, kStageBytes);
          copy_box(to, map_a, row, step * kStep, full + stage * 8);
          copy_box_to(to + kABytes + rank * kBShare * kRowBytes, map_b, column, step * kStep, full + stage * 8,
                      (1 << kCluster) - 1);
          if (++stage == kStages) stage = 0, phase ^= 1;
        }
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kConsumerRegisters));
    int consumer = group - 1;
    int warp = threadIdx.x / kWarp - 4, lane = threadIdx.x % kWarp;
    half* results = reinterpret_cast<half*>(base + kStages * kStageBytes) + warp * 16 * kPitch;
    auto release = [&](int stage) {
      if (lane < kCluster) arrive_at(empty + stage * 8, lane);
    };
    int stage = 0, phase = 0;
    for (int index = first_tile; index < tiles_m * tiles_n; index += clusters) {
      Tile tile = tile_at(index, tiles_m, tiles_n, kBand);
      float sums[kTileN / 2] = {};
      int last = 0;  // the stage of the last step
      for (int step = 0; step < steps; ++step) {
        wait_for(full + stage * 8, phase);
        uint32_t from = stages + stage * kStageBytes;
        begin_multiplying();
        multiply_step(sums, from + consumer * 64 * kRowBytes, from + kABytes);
        commit_products();
        // This step's products go on while the next stage is waited for; the last step's are finished.
        wait_products<1>();
        if (step > 0) release(last);
        last = stage;
        if (++stage == kStages) stage = 0, phase ^= 1;
      }
      wait_products<0>();
      hold(sums);
      release(last);
      int row = (tile.m * kCluster + rank) * kTileM + warp * 16;
      write_results(d, m, n, row, tile.n * kTileN, sums, results);
    }
  }
  // Shared memory lives until nobody in the cluster writes to it or arrives at its barriers.
  meet_cluster();
}

LADDER_LAUNCH {
  CUtensorMap map_a, map_b;
  int device, multiprocessors;
  cudaError_t status = describe(&map_a, a, m, k, kTileM);
  if (status == cudaSuccess) status = describe(&map_b, b, n, k, kBShare);
  if (status == cudaSuccess) status = cudaGetDevice(&device);
  if (status == cudaSuccess) {
    status = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  }
  if (status == cudaSuccess) {
    status = cudaFuncSetAttribute(specialised, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  }
  if (status != cudaSuccess) return status;
  int tiles = ceil_div(m, kTileM * kCluster) * ceil_div(n, kTileN);
  int clusters = multiprocessors / kCluster < tiles ? multiprocessors / kCluster : tiles;
  specialised<<<clusters * kCluster, kThreads, kSharedBytes, stream>>>(map_a, map_b, d, m, n, k);
  return cudaGetLastError();
}
