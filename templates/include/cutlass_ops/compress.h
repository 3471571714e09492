// Kernels that write a weight into the 2:4 sparse form of cutlass_ops/operand/sparsity.py, as after each step of a training. A
// thread has one word of metadata: in 16 bits, 16 elements of two rows, and in 8 bits, 32 elements of one. It reads and
// writes whole pieces of 16 bytes, each once, so that the kernel is about as fast as a copy.

#pragma once

#include "cutlass_ops/quantize_tensor.h"
#include "cutlass_ops/sparse.h"

namespace cutlass_ops {

template <class Element_, bool kPrune>
struct Compress {
  using Element = Element_;
  static constexpr int kThreads = 256;
  static constexpr bool kIn16Bits = sizeof(Element) == 2, kWhole = cute::is_same_v<Element, int8_t>;
  static constexpr int kLines = kIn16Bits ? 2 : 1;  // rows of a word, eight apart
  static constexpr int kRun = 32 / int(sizeof(Element)), kGroups = kRun / 4;
  using Bits = cute::conditional_t<kIn16Bits, uint16_t, uint8_t>;
  static constexpr int kSign = 1 << (8 * sizeof(Element) - 1);
  using Run = cutlass::AlignedArray<Bits, kRun, 16>;
  using Stored = cutlass::AlignedArray<Bits, kRun / 2, 16>;

  struct Params {
    Bits const* from = nullptr;
    Bits* to = nullptr;
    uint32_t* meta = nullptr;
    int64_t ld_from = 0, ld_to = 0;
    int rows = 0, columns = 0;
    int row_blocks = 0, k_blocks = 0;
  };

  // A number that grows with the magnitude. That of NaN is the largest, as an infinity's.
  CUTLASS_DEVICE static int magnitude(int bits) {
    if constexpr (kWhole) {
      int const value = int(int8_t(bits));
      return value < 0 ? -value : value;
    } else {
      constexpr int kLargest = cute::is_same_v<Element, cutlass::bfloat16_t>      ? 0x7f80
                               : cute::is_same_v<Element, cutlass::half_t>        ? 0x7c00
                               : cute::is_same_v<Element, cutlass::float_e5m2_t> ? 0x7c
                                                                                   : 0x7f;
      int const of = bits & (kSign - 1);
      return of < kLargest ? of : kLargest;
    }
  }

  // The places of the two largest of four, the earlier ones if equal: the first in bits 0 and 1, the second in 2 and 3.
  CUTLASS_DEVICE static uint32_t largest(Bits const* group) {
    int of[4];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 4; ++i) of[i] = 4 * magnitude(group[i]) + 3 - i;  // no two are equal
    uint32_t kept = 0;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 4; ++i) {
      int ahead = 0;
      CUTLASS_PRAGMA_UNROLL
      for (int other = 0; other < 4; ++other) ahead += of[other] > of[i];
      kept |= uint32_t(ahead < 2) << i;
    }
    uint32_t const first = kept & 1 ? 0 : kept & 2 ? 1 : 2;
    uint32_t const second = kept & 8 ? 3 : kept & 4 ? 2 : 1;
    return first | second << 2;
  }

  CUTLASS_DEVICE static Bits at(Bits const* group, uint32_t place) {
    Bits const low = place & 1 ? group[1] : group[0], high = place & 1 ? group[3] : group[2];
    Bits const found = place & 2 ? high : low;
    return !kWhole && found == kSign ? Bits(0) : found;  // no -0
  }

  CUTLASS_DEVICE static void run(Params const& params) {
    QuantizedPieces<float, float>::wait();
    int64_t const word = int64_t(blockIdx.x) * kThreads + threadIdx.x;
    int64_t const block = word / 128;
    if (block >= int64_t(params.row_blocks) * params.k_blocks) return;
    int const thread = int(word % 128), w = thread / 32, r = thread % 32 / 4, c = thread % 4;
    int const row = int(block / params.k_blocks) * kMetaBlock + 16 * w + r + (kIn16Bits ? 0 : 8 * (c % 2));
    int const k = int(block % params.k_blocks) * kMetaBlock + (kIn16Bits ? c : c / 2) * kRun;
    // Beyond the weight, the places of a group are 0 and 1.
    uint32_t meta = 0x44444444;
    Run runs[kLines];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kLines; ++i) {
      if (k < params.columns && row + 8 * i < params.rows) {
        runs[i] = *reinterpret_cast<Run const*>(params.from + (row + 8 * i) * params.ld_from + k);
      }
    }
    if constexpr (!kPrune) meta = params.meta[word];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kLines; ++i) {
      if (k >= params.columns || row + 8 * i >= params.rows) continue;
      Stored stored;
      CUTLASS_PRAGMA_UNROLL
      for (int group = 0; group < kGroups; ++group) {
        Bits const* const of = runs[i].data() + 4 * group;
        int const shift = 4 * (i * kGroups + group);
        if constexpr (kPrune) meta = (meta & ~(15u << shift)) | largest(of) << shift;
        stored[2 * group] = at(of, meta >> shift & 3);
        stored[2 * group + 1] = at(of, meta >> shift >> 2 & 3);
      }
      *reinterpret_cast<Stored*>(params.to + (row + 8 * i) * params.ld_to + k / 2) = stored;
    }
    if constexpr (kPrune) params.meta[word] = meta;
  }

#if CUTLASS_OPS_HOST
  static Params read(Call& call) {
    constexpr int kPiece = 16 / int(sizeof(Element));
    Matrix const from = call.input<Element, Major::kRow, kPiece, false>();
    Problem const problem = call.problem(from);
    Matrix const to = call.tile_output<Element, Major::kRow, kPiece, false>({problem.m, problem.n / 2, 0});
    Params params;
    params.from = from.ptr<Bits>(), params.to = to.ptr<Bits>();
    params.ld_from = from.ld, params.ld_to = to.ld;
    params.rows = problem.m, params.columns = problem.n;
    params.row_blocks = (problem.m + kMetaBlock - 1) / kMetaBlock;
    params.k_blocks = (problem.n + 2 * kMetaBlock - 1) / (2 * kMetaBlock) * 2;
    Problem const bytes{params.row_blocks * params.k_blocks * kMetaBytes, 0, 0};
    auto* const meta = kPrune ? call.col_output<uint8_t>(bytes) : call.col<uint8_t>(bytes);
    params.meta = reinterpret_cast<uint32_t*>(meta);
    return params;
  }
  static int64_t blocks(Params const& params) {
    return (int64_t(params.row_blocks) * params.k_blocks * 128 + kThreads - 1) / kThreads;
  }
#endif
};

}  // namespace cutlass_ops
