// Weights with two of each four elements along K, in the form of cutlass_ops/operand/sparsity.py: how a launch takes them.

#pragma once

#include <cstdint>
#include <type_traits>

#include "cutlass_ops/binding.h"

namespace cutlass_ops {

// The type of B in a kernel's source: one of two stored elements of four.
template <class Element>
struct TwoOfFour {
  Element value;
};

template <class Element>
struct StoredOf {
  using Type = void;  // all elements are stored
};

template <class Element>
struct StoredOf<TwoOfFour<Element>> {
  using Type = Element;
};

constexpr int kMetaBlock = 64;  // rows, and elements along K, whose metadata lie together
constexpr int kMetaBytes = 512;

// A sparse weight's metadata, as a launch takes them.
struct SparseMeta {
  void const* data = nullptr;
  int row_blocks = 0, k_blocks = 0;
};

// Reads A as it is, and B with four elements along K for each two that are stored.
class SparseOperands {
 public:
  explicit SparseOperands(Call& call) : call_(call) {}

  template <class Element, Major kMajor, int kAlignment, bool kAlignedExtent>
  Matrix input() {
    if constexpr (std::is_void_v<typename StoredOf<Element>::Type>) {
      return call_.input<Element, kMajor, kAlignment, kAlignedExtent>();
    } else {
      static_assert(kMajor == Major::kCol, "stored elements lie along K");
      Matrix found = call_.input<Element, kMajor, kAlignment / 2, kAlignedExtent>();
      found.rows *= 2;
      return found;
    }
  }

  template <class Element, Major kMajor, int kAlignment, bool kAlignedExtent>
  Matrix result() { return call_.result<Element, kMajor, kAlignment, kAlignedExtent>(); }

  Problem problem(Matrix const& a, Matrix const& b, Matrix const& d) { return call_.problem(a, b, d); }

  // Bytes in whole blocks, along K in whole pairs of these.
  SparseMeta meta(Problem const& p) {
    int const row_blocks = (p.n + kMetaBlock - 1) / kMetaBlock;
    int const k_blocks = (p.k + 2 * kMetaBlock - 1) / (2 * kMetaBlock) * 2;
    Problem const bytes{row_blocks * k_blocks * kMetaBytes, 0, 0};
    return {call_.col<uint8_t>(bytes), row_blocks, k_blocks};
  }

  void check() {}

 private:
  Call& call_;
};

}  // namespace cutlass_ops
