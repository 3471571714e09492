// D in FP8 with a scale for each 128 columns of a row, in the layout in which the next GEMM's main loop reads those of its A
// (block_scales.h): what the epilogue of epilogue.h needs for that besides.

#pragma once

#include "cutlass_ops/binding.h"
#include "cutlass_ops/quantize.h"

namespace cutlass_ops {

struct Quantized {
  static constexpr bool kAny = true, kByWarps = false;
  static constexpr int kColumns = kQuantizedBlock;

  // Arguments of an epilogue with where the scales go, and its parameters with that.
  template <class Arguments>
  struct With : Arguments {
    WrittenScales scales;
  };
  template <class Params>
  using Kept = With<Params>;

  // Finishes a row's block, of which four lanes have seen a part each. Stores the scale if the block is `there`, and returns
  // the scale's inverse.
  template <class Element>
  CUTLASS_DEVICE static float finish(WrittenScales const& scales, float most, int row, int block, bool there) {
#if defined(__CUDACC__)
    most = maximum(most, __shfl_xor_sync(0xffffffff, most, 1));
    most = maximum(most, __shfl_xor_sync(0xffffffff, most, 2));
    BlockScale const found = block_scale<Element>(most);
    if (there && threadIdx.x % 4 == 0) scales.data[row * scales.stride + block * scales.step_stride] = found.scale;
    return found.inverse;
#else
    return most;
#endif
  }
};

// The same where each warp stores its own rows, and waits for no other: then the warpgroups of a cooperative kernel drift apart,
// and one multiplies while the other is here. D is row-major, and its lines are whole pieces of 16 bytes.
struct QuantizedByWarps : Quantized {
  static constexpr bool kByWarps = true;
  static constexpr int kRows = 16, kPieces = kColumns / 16;  // of a warp, and of a line

  // D besides.
  template <class Params>
  struct Kept : With<Params> {
    void* d;
    int64_t lines;  // from one of its lines to the next, in bytes
  };

  // Stores a warp's rows of a block from `d` on, where `rows` and `columns` are left. A word has two columns of a row and of the
  // row eight below, of the thread's place among eight columns (Fragment in epilogue.h). `shared` has room for the rows of the
  // warp. There, a piece has its 16 columns in the order in which stmatrix brings two words together, and pieces of a column
  // lie in different banks.
  CUTLASS_DEVICE static void store(uint32_t const (&words)[kColumns / 8], uint32_t shared, int lane, uint8_t* d, int64_t lines,
                                   int rows, int columns) {
#if defined(__CUDACC__)
    auto const place = [&](int row, int piece) { return shared + row * kColumns + (piece ^ row % 8) * 16; };
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

}  // namespace cutlass_ops
