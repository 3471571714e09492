// Weights with 4 bits for a number, in the order of cutlass_ops/operand/packing.py: how threads read and convert them.

#pragma once

#include <cstdint>
#include <type_traits>

#include "cutlass_ops/binding.h"

namespace cutlass_ops {

// ---- Pairs of 16 bits --------------------------------------------------------------------------------------------

// What depends on A's type: a pair of ones; a pair whose last four bits count up from kAdded by one; the power of two by which
// bits of FP4 in this type's fields are too small.
template <class Element>
struct PairOf;

template <>
struct PairOf<cutlass::bfloat16_t> {
  static constexpr uint32_t kOnes = 0x3f803f80, kCounts = 0x43004300, kMinusBias = 0xc308c308;  // -(128 + 8)
  static constexpr uint32_t kFP4 = 0x7e807e80;                                                  // 2^126
  static constexpr int kFP4Shift = 6;  // from bits 14 to 12, exponent and fraction of FP4, to the end of the exponent
};

template <>
struct PairOf<cutlass::half_t> {
  static constexpr uint32_t kOnes = 0x3c003c00, kCounts = 0x64006400, kMinusBias = 0xe408e408;  // -(1024 + 8)
  static constexpr uint32_t kFP4 = 0x74007400;                                                  // 2^14
  static constexpr int kFP4Shift = 3;
};

constexpr uint32_t kMinusZeros = 0x80008000;

// a * b + c, each rounded once.
template <class Element>
CUTLASS_DEVICE uint32_t multiply_add(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  if constexpr (std::is_same_v<Element, cutlass::half_t>) {
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  } else {
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  }
  return d;
}

// (x & mask) | bits
template <uint32_t kMask>
CUTLASS_DEVICE uint32_t masked_or(uint32_t x, uint32_t bits) {
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(x), "n"(kMask), "r"(bits));
  return d;
}

// The lower or the upper half of a word, twice.
template <int kHalf>
CUTLASS_DEVICE uint32_t both(uint32_t word) { return __byte_perm(word, 0, kHalf == 0 ? 0x1010 : 0x3232); }

// ---- Numbers -----------------------------------------------------------------------------------------------------

// The types of numbers. kParts: 16-bit values of each group for a row. `pair` returns the kP-th pair of a word in Element,
// exactly. `minus` is what a zero point's number adds.
struct Int4 {
  static constexpr int kParts = 1;
  template <class Element, int kP>
  CUTLASS_DEVICE static uint32_t pair(uint32_t word, uint32_t) {
    using Of = PairOf<Element>;
    uint32_t const counted = masked_or<0x000f000f>(word >> 4 * kP, Of::kCounts);
    return multiply_add<Element>(counted, Of::kOnes, Of::kMinusBias);
  }
};

struct Uint4 {
  static constexpr int kParts = 2;
  template <class Element, int kP>
  CUTLASS_DEVICE static uint32_t pair(uint32_t word, uint32_t minus) {
    using Of = PairOf<Element>;
    return multiply_add<Element>(masked_or<0x000f000f>(word >> 4 * kP, Of::kCounts), Of::kOnes, minus);
  }
};

// FP4: its exponent and fraction become the last bit of the fraction and the last ones of the exponent of a number that is too
// small by a power of two. A product by that is exact: subnormal numbers count.
struct E2M1 {
  static constexpr int kParts = 1;
  template <class Element, int kP>
  CUTLASS_DEVICE static uint32_t pair(uint32_t word, uint32_t) {
    using Of = PairOf<Element>;
    constexpr uint32_t kMagnitude = 0x70007000 >> Of::kFP4Shift;
    uint32_t const first = word << (12 - 4 * kP);
    uint32_t const small = masked_or<kMagnitude>(first >> Of::kFP4Shift, first & 0x80008000);
    return multiply_add<Element>(small, Of::kFP4, kMinusZeros);
  }
};

// The scales, and what zero points add, of a thread's two rows in one group.
template <class Numbers>
struct GroupOfRows {
  uint32_t scale[2], minus[2];

  // `at` has the line's values of the group, in shared or global memory; `thread` is a lane.
  CUTLASS_DEVICE static GroupOfRows read(uint32_t const* at, int thread) {
    GroupOfRows found;
    uint32_t const scales = at[thread / 4];
    found.scale[0] = both<0>(scales), found.scale[1] = both<1>(scales);
    if constexpr (Numbers::kParts == 2) {
      uint32_t const zeros = at[8 + thread / 4];
      found.minus[0] = both<0>(zeros), found.minus[1] = both<1>(zeros);
    } else {
      found.minus[0] = found.minus[1] = 0;
    }
    return found;
  }
};

// What one word is for an instruction of the Tensor Cores: numbers, exactly.
template <class Numbers, class Element>
CUTLASS_DEVICE void convert(uint32_t (&to)[4], uint32_t word, GroupOfRows<Numbers> const& of) {
  to[0] = Numbers::template pair<Element, 0>(word, of.minus[0]);
  to[1] = Numbers::template pair<Element, 1>(word, of.minus[1]);
  to[2] = Numbers::template pair<Element, 2>(word, of.minus[0]);
  to[3] = Numbers::template pair<Element, 3>(word, of.minus[1]);
}

// Times the scales, each product rounded once to Element. The rounding is that of a weight that is dequantised in A's type.
template <class Element, class Numbers>
CUTLASS_DEVICE void scale(uint32_t (&numbers)[4], GroupOfRows<Numbers> const& of) {
  CUTLASS_PRAGMA_UNROLL
  for (int p = 0; p < 4; ++p) numbers[p] = multiply_add<Element>(numbers[p], of.scale[p % 2], kMinusZeros);
}

// ---- Launch arguments --------------------------------------------------------------------------------------------

constexpr int kLine = 16, kPiece = 64;  // rows of a line, and numbers along K of a piece
constexpr int kWholeK = 1 << 16;        // stands for a group of all of K

// A packed weight, as a launch takes it.
struct PackedWeight {
  void const* values = nullptr;
  void const* scales = nullptr;
  int lines = 0, k = 0, groups = 0;
};

// Reads A as it is, and B with two of its numbers along K for each of the tensor's bytes.
class PackedOperands {
 public:
  explicit PackedOperands(Call& call) : call_(call) {}

  template <class Element, Major kMajor, int kAlignment, bool kAlignedExtent>
  Matrix input() {
    Matrix found = call_.input<Element, kMajor, alignment<Element>(kAlignment), kAlignedExtent>();
    if constexpr (sizeof(Element) == 1) {
      static_assert(kMajor == Major::kCol, "packed numbers lie along K");
      // Rows that no problem has where lines do not follow each other, or are not whole pieces or lines.
      bool const whole = found.ld == found.rows && found.rows % (kPiece / 2) == 0 && found.cols % kLine == 0;
      found.rows = whole ? 2 * found.rows : -1;
    }
    return found;
  }

  template <class Element, Major kMajor, int kAlignment, bool kAlignedExtent>
  Matrix result() { return call_.result<Element, kMajor, kAlignment, kAlignedExtent>(); }

  Problem problem(Matrix const& a, Matrix const& b, Matrix const& d) { return call_.problem(a, b, d); }

  // The weight with its scales, of which each group of `group` along K has `parts` for a row.
  template <class Element>
  PackedWeight weight(Matrix const& b, Problem const& p, int group, int parts) {
    int const groups = group == kWholeK ? 1 : p.k / group;
    Problem const values{p.n * groups * parts, 0, 0};
    return {b.data, call_.col<Element>(values), p.n / kLine, p.k, groups};
  }

  void check() {}

 private:
  template <class Element>
  static constexpr int alignment(int elements) { return sizeof(Element) == 1 ? elements / 2 : elements; }

  Call& call_;
};

}  // namespace cutlass_ops
