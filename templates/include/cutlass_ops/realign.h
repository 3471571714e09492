// Operands that TMA cannot read, since their address or leading dimension is no multiple of 16 bytes. One small kernel
// copies them to aligned lines, ahead of the GEMM. It reads and writes whole pieces of 16 bytes, except at the ends of
// lines.

#pragma once

#include "cutlass_ops/halves.h"

#include "cutlass_ops/binding.h"

namespace cutlass_ops {

struct Realign {
  static constexpr int kMatrices = 3;  // A, B and a second weight
  static constexpr int kThreads = 256, kWarps = kThreads / 32;
  static constexpr int kPiece = 8;   // elements of 16 bits, in 16 bytes
  static constexpr int kAtOnce = 4;  // pieces that a thread has on their way at a time
  static constexpr int kSegment = 32 * kAtOnce;  // pieces of a line that a warp copies

  // A matrix: so many lines of `length` elements.
  struct Lines {
    uint16_t const* from;
    uint16_t* to;
    int64_t ld;
    int64_t warps;  // of all its lines
    int length;
    int pieces;    // of a line of the copy
    int segments;  // of a line
  };
  struct Params {
    Lines matrices[kMatrices];
  };

  CUTLASS_DEVICE static void run(Params const& params) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    // What wrote the operands has ended then, and what still read the memory of the copies. The GEMM waits for all of this.
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;");
#endif
    int64_t warp = int64_t(blockIdx.x) * kWarps + int(threadIdx.x) / 32;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kMatrices; ++i) {
      Lines const& lines = params.matrices[i];
      if (warp < lines.warps) {
        copy(lines, warp / lines.segments, int(warp % lines.segments) * kSegment + int(threadIdx.x) % 32);
        return;
      }
      warp -= lines.warps;
    }
  }

 private:
  CUTLASS_DEVICE static void copy(Lines const& lines, int64_t line, int first) {
    uint16_t const* const from = lines.from + line * lines.ld;
    auto const off = unsigned(reinterpret_cast<uintptr_t>(from)) % 16;  // of all pieces of a line
    auto const* const words = reinterpret_cast<uint4 const*>(reinterpret_cast<uintptr_t>(from) - off);
    auto* const to = reinterpret_cast<uint4*>(lines.to) + line * lines.pieces;
    uint4 low[kAtOnce], high[kAtOnce];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      int const piece = first + i * 32;
      low[i] = high[i] = uint4{0, 0, 0, 0};
      if (is_inside(lines, piece, off)) {
        low[i] = words[piece];
        if (off != 0) high[i] = words[piece + 1];
      }
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      int const piece = first + i * 32;
      if (is_inside(lines, piece, off)) {
        to[piece] = joined(low[i], high[i], off);
      } else if (piece < lines.pieces) {
        to[piece] = end_of_line(lines, from, piece);
      }
    }
  }

  // Whether the aligned words around a piece hold only elements of its line.
  CUTLASS_DEVICE static bool is_inside(Lines const& lines, int piece, unsigned off) {
    int64_t const end = (int64_t(piece) + 1) * kPiece;
    return off == 0 ? end <= lines.length : piece > 0 && end + kPiece <= lines.length;
  }

  // Element by element, with zeros beyond the line.
  CUTLASS_DEVICE static uint4 end_of_line(Lines const& lines, uint16_t const* from, int piece) {
    uint32_t words[4] = {0, 0, 0, 0};
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kPiece; ++i) {
      int64_t const at = int64_t(piece) * kPiece + i;
      if (at < lines.length) words[i / 2] |= uint32_t(from[at]) << (i % 2 * 16);
    }
    return {words[0], words[1], words[2], words[3]};
  }

  // The 16 bytes that begin `off` bytes after the first of two words. All threads of a warp have the same `off`.
  CUTLASS_DEVICE static uint4 joined(uint4 low, uint4 high, unsigned off) {
    unsigned const bits = off % 4 * 8;
    switch (off / 4) {
      case 0: return shifted(low.x, low.y, low.z, low.w, high.x, bits);
      case 1: return shifted(low.y, low.z, low.w, high.x, high.y, bits);
      case 2: return shifted(low.z, low.w, high.x, high.y, high.z, bits);
      default: return shifted(low.w, high.x, high.y, high.z, high.w, bits);
    }
  }

  CUTLASS_DEVICE static uint4 shifted(uint32_t a, uint32_t b, uint32_t c, uint32_t d, uint32_t e, unsigned bits) {
    return {funnel(a, b, bits), funnel(b, c, bits), funnel(c, d, bits), funnel(d, e, bits)};
  }

  CUTLASS_DEVICE static uint32_t funnel(uint32_t low, uint32_t high, unsigned bits) {
    return uint32_t((uint64_t(high) << 32 | low) >> bits);
  }
};

#if CUTLASS_OPS_HOST

// Bytes of the copy of a matrix, rounded up so that what follows in a workspace is aligned.
template <Major kMajor>
int64_t realigned_bytes(int64_t rows, int64_t cols) {
  constexpr int64_t kAlignment = 256;
  int64_t const lines = kMajor == Major::kRow ? rows : cols, length = kMajor == Major::kRow ? cols : rows;
  int64_t const pieces = (length + Realign::kPiece - 1) / Realign::kPiece;
  return (lines * pieces * 16 + kAlignment - 1) / kAlignment * kAlignment;
}

// What one launch copies.
class Realigned {
 public:
  // Replaces a matrix by its copy, which is not there yet.
  template <class Element, Major kMajor, class Preparing>
  void add(Matrix& matrix, Preparing& preparing) {
    static_assert(sizeof(Element) == sizeof(*Realign::Lines::from));
    void* const to = preparing.take(realigned_bytes<kMajor>(matrix.rows, matrix.cols));
    int64_t const count = kMajor == Major::kRow ? matrix.rows : matrix.cols;
    Realign::Lines& lines = params_.matrices[count_++];
    lines.from = matrix.ptr<uint16_t>();
    lines.to = static_cast<uint16_t*>(to);
    lines.ld = matrix.ld;
    lines.length = int(kMajor == Major::kRow ? matrix.cols : matrix.rows);
    lines.pieces = (lines.length + Realign::kPiece - 1) / Realign::kPiece;
    lines.segments = (lines.pieces + Realign::kSegment - 1) / Realign::kSegment;
    lines.warps = count * lines.segments;
    warps_ += lines.warps;
    matrix.data = to;
    matrix.ld = int64_t(lines.pieces) * Realign::kPiece;
  }

  template <class Preparing>
  cudaError_t launch(void const* kernel, Preparing const& preparing) {
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(unsigned((warps_ + Realign::kWarps - 1) / Realign::kWarps));
    config.blockDim = dim3(Realign::kThreads);
    config.attrs = &attribute;
    config.numAttrs = preparing.overlap ? 1 : 0;
    return preparing.queue.launch(config, kernel, params_);
  }

 private:
  Realign::Params params_{};
  int count_ = 0;
  int64_t warps_ = 0;
};

#endif  // CUTLASS_OPS_HOST

}  // namespace cutlass_ops
