// Sums of a row's elements, and of their squares.
//
// A row's elements are added up in one order, wherever the row is read. kRowLanes lanes share a row. Each takes every
// kRowLanes-th piece of kRowPiece elements, segment after segment. The lanes' sums are added up in a tree.

#pragma once

#include "cutlass_ops/halves.h"

#include "cutlass/bfloat16.h"
#include "cutlass/cutlass.h"
#include "cutlass/half.h"

#include "cutlass_ops/rows.h"

namespace cutlass_ops {

// Two neighbouring elements as FP32.
template <class Element>
CUTLASS_DEVICE float2 unpack(uint32_t pair) {
  static_assert(sizeof(Element) == 2);
  return {float(Element::bitcast(uint16_t(pair))), float(Element::bitcast(uint16_t(pair >> 16)))};
}

// What the order of additions depends on, beside the main loop and in it.
constexpr int kRowLanes = 8;    // threads that share a row, or a segment of it
constexpr int kRowPiece = 8;    // elements that one of them reads at once: 16 bytes
constexpr int kSegment = 1024;  // elements of a row that are added up by themselves

// Sums of one row, or of a part of it.
template <class What>
struct RowSums {
  float sum = 0.0f, squares = 0.0f;

  CUTLASS_DEVICE void add(float x) {
    if constexpr (What::kMean) sum += x;
    if constexpr (What::kMeanSquare) squares += x * x;
  }

  template <class Element>
  CUTLASS_DEVICE void add(uint4 const& piece) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 4; ++i) {
      float2 const x = unpack<Element>((&piece.x)[i]);
      add(x.x);
      add(x.y);
    }
  }

  CUTLASS_DEVICE void add(RowSums const& other) {
    if constexpr (What::kMean) sum += other.sum;
    if constexpr (What::kMeanSquare) squares += other.squares;
  }

  // Another lane's.
  CUTLASS_DEVICE RowSums of_lane(int lane) const {
    RowSums result;
    if constexpr (What::kMean) result.sum = __shfl_sync(0xffffffff, sum, lane);
    if constexpr (What::kMeanSquare) result.squares = __shfl_sync(0xffffffff, squares, lane);
    return result;
  }

  // The sums of a row's lanes, which are neighbours, in each of them.
  CUTLASS_DEVICE void share() {
    CUTLASS_PRAGMA_UNROLL
    for (int distance = 1; distance < kRowLanes; distance *= 2) {
      if constexpr (What::kMean) sum += __shfl_xor_sync(0xffffffff, sum, distance);
      if constexpr (What::kMeanSquare) squares += __shfl_xor_sync(0xffffffff, squares, distance);
    }
  }
};

}  // namespace cutlass_ops
