// D in FP8 with a scale for each 128 columns of a row, in the layout in which the next GEMM's main loop reads those of its A
// (block_scales.h): what the epilogue of epilogue.h needs for that besides.

#pragma once

#include "cutlass/arch/barrier.h"
#include "cutlass_ops/binding.h"
#include "cutlass_ops/quantize.h"
#include "cutlass_ops/sm90_launch.h"

namespace cutlass_ops {

struct Quantized {
  static constexpr bool kAny = true, kByWarps = false, kSharedByTwo = false;
  static constexpr int kColumns = kQuantizedBlock;  // of a warpgroup, which share a scale

  template <class Params>
  using Kept = QuantizedParams<Params>;
  template <class Pipeline>
  using Loading = Pipeline;
  template <class Storage, int kRows>
  using Stored = Storage;

  // The greatest of a row's values, of which four lanes have seen a part each.
  CUTLASS_DEVICE static float of_row(float most) {
#if defined(__CUDACC__)
    most = maximum(most, __shfl_xor_sync(0xffffffff, most, 1));
    most = maximum(most, __shfl_xor_sync(0xffffffff, most, 2));
#endif
    return most;
  }

  // Stores the scale of the row's block at a column, if it is `there`, and returns the scale's inverse.
  template <class Element>
  CUTLASS_DEVICE static float finish(WrittenScales const& scales, float most, int row, int column, bool there) {
    BlockScale const found = block_scale<Element>(most);
#if defined(__CUDACC__)
    if (there && column % kQuantizedBlock == 0 && threadIdx.x % 4 == 0) {
      scales.data[row * scales.stride + column / kQuantizedBlock * scales.step_stride] = found.scale;
    }
#endif
    return found.inverse;
  }
};

// The same where each warp stores its own rows, and waits for no other: then the warpgroups of a cooperative kernel drift apart,
// and one multiplies while the other is here. D is row-major, and its lines are whole pieces of 16 bytes. A warp has the columns
// of a scale, or half of them.
template <int kColumns_>
struct QuantizedByWarps : Quantized {
  static constexpr bool kByWarps = true;
  static constexpr int kColumns = kColumns_, kRows = 16, kPieces = kColumns / 16;  // of a warp, and of a line

  template <class Params>
  using Kept = QuantizedByWarpsParams<Params>;

  // Stores a warp's rows of a block from `d` on, where `rows` and `columns` are left. A word has two columns of a row and of the
  // row eight below, of the thread's place among eight columns (Fragment in epilogue.h). `shared` has room for the rows of the
  // warp. There, a piece has its 16 columns in the order in which stmatrix brings two words together, and pieces of a column
  // lie in different banks.
  CUTLASS_DEVICE static void store(uint32_t const (&words)[kColumns / 8], uint32_t shared, int lane, uint8_t* d, int64_t lines,
                                   int rows, int columns) {
#if defined(__CUDACC__)
    auto const place = [&](int row, int piece) { return shared + row * kColumns + (piece ^ row * kPieces / 8 % kPieces) * 16; };
    __syncwarp();  // the block before has been read
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kPieces / 2; ++i) {
      uint32_t const at = place(lane % 16, i * 2 + lane / 16);
      uint32_t const upper = __byte_perm(words[i * 4], words[i * 4 + 1], 0x5410);
      uint32_t const lower = __byte_perm(words[i * 4], words[i * 4 + 1], 0x7632);
      uint32_t const next_upper = __byte_perm(words[i * 4 + 2], words[i * 4 + 3], 0x5410);
      uint32_t const next_lower = __byte_perm(words[i * 4 + 2], words[i * 4 + 3], 0x7632);
      asm volatile("stmatrix.sync.aligned.x4.m8n8.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(upper), "r"(lower),
                   "r"(next_upper), "r"(next_lower) : "memory");
    }
    __syncwarp();
    constexpr int kTurns = kRows * kPieces / 32;
    int const first = lane / kPieces, piece = lane % kPieces;
    uint4 found[kTurns];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kTurns; ++i) {
      uint32_t const at = place(first + i * (32 / kPieces), piece);
      uint4& x = found[i];
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(at) : "memory");
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kTurns; ++i) {
      int const row = first + i * (32 / kPieces);
      uint4 const& x = found[i];
      uint4 const line{__byte_perm(x.x, x.y, 0x5410), __byte_perm(x.z, x.w, 0x5410), __byte_perm(x.x, x.y, 0x7632),
                       __byte_perm(x.z, x.w, 0x7632)};
      if (row < rows && piece * 16 < columns) *reinterpret_cast<uint4*>(d + row * lines + piece * 16) = line;
    }
#endif
  }
};

// The same where two neighbouring thread blocks of a cluster have half of a scale's columns each, in all of their rows. Then two
// products take no more registers than one: a pingpong kernel has tiles as large as those of a plain GEMM, and promoted sums fit.
// Warpgroups of the same number have tiles of the same rows, and tell each other the greatest value of each row.
struct QuantizedByTwo : QuantizedByWarps<kQuantizedBlock / 2> {
  static constexpr bool kSharedByTwo = true;
  // Of a thread block: warpgroups that consume, and each one's turns, which it takes alternately. The other block may be a turn
  // ahead and no more: it then waits for this one.
  static constexpr int kGroups = 2, kTurns = 2;

  // With barriers, each of which ends a turn when all of the other block's values are there. CUTLASS's kernels make this pipeline
  // before all blocks of the cluster meet, so the barriers are ready when the other block uses them.
  template <class Pipeline>
  struct Loading : Pipeline {
    using Barriers = uint64_t[kGroups][kTurns];
    struct SharedStorage : Pipeline::SharedStorage {
      alignas(16) Barriers meeting;
    };
    Barriers& meeting;

    CUTLASS_DEVICE Loading(SharedStorage& storage, typename Pipeline::Params const& params)
        : Pipeline(storage, params), meeting(storage.meeting) {
      if (threadIdx.x == 0) {
        CUTLASS_PRAGMA_UNROLL
        for (auto& turns : storage.meeting) {
          CUTLASS_PRAGMA_UNROLL
          for (uint64_t& each : turns) cutlass::arch::ClusterBarrier::init(&each, 1);
        }
      }
      cutlass::arch::fence_barrier_init();
    }
  };

  // With the other block's values.
  template <class Base, int kRows>
  struct Stored : Base {
    alignas(128) float halves[kGroups][kTurns][kRows];
  };

  // Makes the greatest values of a row's half, which all four lanes of the row have, those of the row. All warps of a warpgroup
  // come here once a tile.
  template <int kParts, int kTileRows>
  CUTLASS_DEVICE static void meet(float (&most)[kParts][2], uint64_t (&meeting)[kGroups][kTurns],
                                  float (&halves)[kGroups][kTurns][kTileRows], int turn) {
#if defined(__CUDACC__)
    int const group = int(threadIdx.x) / 128 - 1, warp = int(threadIdx.x) / 32 % 4, lane = int(threadIdx.x) % 32;
    uint64_t* const barrier = &meeting[group][turn % kTurns];
    uint32_t const own = cute::cast_smem_ptr_to_uint(halves[group][turn % kTurns]);
    auto const place = [&](int part, int i) { return uint32_t((part * 64 + warp * 16 + lane / 4 + i * 8) * sizeof(float)); };
    // Told before this warp's own values go: the other block sends none of the next turn without them.
    if (threadIdx.x % 128 == 0) {
      cutlass::arch::ClusterTransactionBarrier::arrive_and_expect_tx(barrier, kParts * 64 * sizeof(float));
    }
    __syncwarp();
    dim3 const at = cute::block_id_in_cluster(), shape = cute::cluster_shape();
    uint32_t const other = at.x + (at.y ^ 1) * shape.x;
    if (lane % 4 == 0) {
      CUTLASS_PRAGMA_UNROLL
      for (int part = 0; part < kParts; ++part) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 2; ++i) {
          cute::store_shared_remote(__float_as_uint(most[part][i]), own + place(part, i), cute::cast_smem_ptr_to_uint(barrier),
                                    other);
        }
      }
    }
    cutlass::arch::ClusterBarrier::wait(barrier, turn / kTurns % 2);
    CUTLASS_PRAGMA_UNROLL
    for (int part = 0; part < kParts; ++part) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 2; ++i) {
        float found;
        asm volatile("ld.shared.f32 %0, [%1];" : "=f"(found) : "r"(own + place(part, i)) : "memory");
        most[part][i] = maximum(most[part][i], found);
      }
    }
#endif
  }
};

}  // namespace cutlass_ops
