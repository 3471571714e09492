// Operands of types that wgmma reads along K only, as TF32 and INT8: one small kernel copies those that lie across K to lines
// along K, ahead of the GEMM, and those whose lines along K do not begin at multiples of 16 bytes (realign.h has it for types of
// 16 bits, which wgmma reads in both directions). Bits are copied, whatever they mean. Lines of the copy end in zeros.
//
// A thread block copies a tile of 128 bytes in both directions, by way of shared memory if it has to be transposed. So reads
// and writes have at least 128 neighbouring bytes. A word of 4 bytes has several elements of 8 bits: they change places in
// registers, so that shared memory is accessed by words as well.

#pragma once

#include <type_traits>

#include "cutlass_ops/halves.h"

#include "cutlass_ops/binding.h"

namespace cutlass_ops {

// Of elements of so many bytes.
template <int kBytes>
struct AlongK {
  static constexpr int kMatrices = 2;  // A and B
  static constexpr int kThreads = 256, kWarps = kThreads / 32;
  static constexpr int kElements = 4 / kBytes;         // of a word
  static constexpr int kWords = 32;                    // of a line of the tile
  static constexpr int kLines = kWords * kElements;    // of the tile
  static constexpr int kPieces = kWords / 4;           // of 16 bytes, of a line
  static constexpr int kPerPiece = 4 * kElements;      // elements
  using Element = std::conditional_t<kBytes == 1, uint8_t, std::conditional_t<kBytes == 2, uint16_t, uint32_t>>;
  static_assert(kBytes == 1 || kBytes == 2 || kBytes == 4);

  // A matrix whose copy has so many lines of `length` elements.
  struct Lines {
    Element const* from;
    uint4* to;
    int64_t ld;      // of what is copied
    int64_t blocks;  // of all its tiles
    int lines;
    int length;
    int pieces;     // of a line of the copy
    int tiles;      // along a line
    bool across;    // whether it is to be transposed
    bool in_words;  // whether its lines begin at multiples of 4 bytes
  };
  struct Params {
    Lines matrices[kMatrices];
  };
  // A tile between its halves: lines of the copy, a word longer so that neighbours in a column lie in different banks.
  using Tile = uint32_t[kLines][kWords + 1];

  CUTLASS_DEVICE static void run(Params const& params) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    // What wrote the operands has ended then, and what still read the memory of the copies. The GEMM waits for all of this.
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;");
#endif
    __shared__ Tile tile;
    int64_t block = blockIdx.x;
    for (int i = 0; i < kMatrices; ++i) {
      Lines const& matrix = params.matrices[i];
      if (block < matrix.blocks) {
        if (matrix.across) {
          load(matrix, block, int(threadIdx.x), tile);
          __syncthreads();
        }
        store(matrix, block, int(threadIdx.x), tile);
        return;
      }
      block -= matrix.blocks;
    }
  }

  // Brings a tile that lies across K to shared memory, along K.
  CUTLASS_HOST_DEVICE static void load(Lines const& matrix, int64_t block, int thread, Tile& tile) {
    constexpr int kEach = kWords / kWarps;
    int const lane = thread % 32, warp = thread / 32;
    int64_t const line = block / matrix.tiles * kLines + lane * kElements;
    int64_t const first = block % matrix.tiles * (kWords * kElements);
    uint32_t words[kEach][kElements];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kEach; ++i) {
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kElements; ++j) {
        int64_t const k = first + (warp + i * kWarps) * kElements + j;
        words[i][j] = k < matrix.length ? word(matrix.from + k * matrix.ld, line, matrix.lines, matrix.in_words) : 0;
      }
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kEach; ++i) {
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kElements; ++j) tile[lane * kElements + j][warp + i * kWarps] = column(words[i], j);
    }
  }

  // Writes a tile, from shared memory or as it lies along K.
  CUTLASS_HOST_DEVICE static void store(Lines const& matrix, int64_t block, int thread, Tile const& tile) {
    constexpr int kEach = kLines * kPieces / kThreads;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kEach; ++i) {
      int const at = thread + i * kThreads, own = at / kPieces;
      int64_t const line = block / matrix.tiles * kLines + own, piece = block % matrix.tiles * kPieces + at % kPieces;
      if (line >= matrix.lines || piece >= matrix.pieces) continue;
      uint32_t words[4];
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < 4; ++j) {
        if (matrix.across) {
          words[j] = tile[own][at % kPieces * 4 + j];
        } else {
          Element const* const from = matrix.from + line * matrix.ld;
          words[j] = word(from, piece * kPerPiece + j * kElements, matrix.length, matrix.in_words);
        }
      }
      matrix.to[line * matrix.pieces + piece] = uint4{words[0], words[1], words[2], words[3]};
    }
  }

 private:
  // A word of a line of `length` elements, from its element `at` on, with zeros beyond the line.
  CUTLASS_HOST_DEVICE static uint32_t word(Element const* line, int64_t at, int64_t length, bool in_words) {
    if (in_words && at + kElements <= length) return *reinterpret_cast<uint32_t const*>(line + at);
    uint32_t result = 0;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kElements; ++i) {
      if (at + i < length) result |= uint32_t(line[at + i]) << 8 * kBytes * i;
    }
    return result;
  }

  // The elements at one place of several words.
  CUTLASS_HOST_DEVICE static uint32_t column(uint32_t const (&words)[kElements], int at) {
    uint32_t result = 0;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kElements; ++i) result |= uint32_t(Element(words[i] >> 8 * kBytes * at)) << 8 * kBytes * i;
    return result;
  }
};

#if CUTLASS_OPS_HOST

// Bytes of a copy of so many lines along K, rounded up so that what follows in a workspace is aligned.
template <int kBytes>
int64_t along_k_bytes(int64_t lines, int64_t k) {
  constexpr int64_t kAlignment = 256;
  int64_t const pieces = (k + AlongK<kBytes>::kPerPiece - 1) / AlongK<kBytes>::kPerPiece;
  return (lines * pieces * 16 + kAlignment - 1) / kAlignment * kAlignment;
}

// What one launch copies.
template <int kBytes>
class CopiedAlongK {
 public:
  using Kernel = AlongK<kBytes>;

  // Replaces a matrix by its copy, which is not there yet. Lines along K make it `kAlongK`.
  template <Major kMajor, Major kAlongK, class Preparing>
  void add(Matrix& matrix, Preparing& preparing) {
    int64_t const lines = kAlongK == Major::kRow ? matrix.rows : matrix.cols;
    int64_t const k = kAlongK == Major::kRow ? matrix.cols : matrix.rows;
    void* const to = preparing.take(along_k_bytes<kBytes>(lines, k));
    auto& copied = params_.matrices[count_++];
    copied.from = matrix.ptr<typename Kernel::Element>();
    copied.to = static_cast<uint4*>(to);
    copied.ld = matrix.ld;
    copied.lines = int(lines);
    copied.length = int(k);
    copied.pieces = int((k + Kernel::kPerPiece - 1) / Kernel::kPerPiece);
    copied.tiles = (copied.pieces + Kernel::kPieces - 1) / Kernel::kPieces;
    copied.blocks = (lines + Kernel::kLines - 1) / Kernel::kLines * copied.tiles;
    copied.across = kMajor != kAlongK;
    copied.in_words = reinterpret_cast<uintptr_t>(matrix.data) % 4 == 0 && matrix.ld * kBytes % 4 == 0;
    blocks_ += copied.blocks;
    matrix.data = to;
    matrix.ld = int64_t(copied.pieces) * Kernel::kPerPiece;
  }

  template <class Preparing>
  cudaError_t launch(void const* kernel, Preparing const& preparing) {
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(unsigned(blocks_));
    config.blockDim = dim3(Kernel::kThreads);
    config.attrs = &attribute;
    config.numAttrs = preparing.overlap ? 1 : 0;
    return preparing.queue.launch(config, kernel, params_);
  }

 private:
  typename Kernel::Params params_{};
  int count_ = 0;
  int64_t blocks_ = 0;
};

#endif  // CUTLASS_OPS_HOST

}  // namespace cutlass_ops
