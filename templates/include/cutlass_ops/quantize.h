// How values become FP8 in blocks that have a scale each: one rule for the results of GEMMs and for tensors.

#pragma once

#include "cutlass_ops/epilogue_math.h"

#include "cutlass/float8.h"

namespace cutlass_ops {

constexpr int kQuantizedBlock = 128;  // values of a row that share a scale: those of a step of the next GEMM along K

template <class Element>
constexpr float kLargest = 0.0f;
template <>
inline constexpr float kLargest<cutlass::float_e4m3_t> = 448.0f;
template <>
inline constexpr float kLargest<cutlass::float_e5m2_t> = 57344.0f;

// What a block's values are multiplied by, and what gives them back.
struct BlockScale {
  float inverse, scale;
};

// Of a block whose greatest absolute value is `most`. Both numbers are finite and normal for any finite one, 0 among them:
// 2^-110 / 57344 is at least 2^-126. NaN gives NaN, and infinity an infinite scale. The compiler's own division rounds to
// nearest, as PyTorch's does; that of epilogue_math.h may be one unit off.
template <class Element>
CUTLASS_DEVICE BlockScale block_scale(float most) {
  float const from = most < 0x1p-110f ? 0x1p-110f : most;  // NaN is less than nothing
  return {kLargest<Element> / from, from / kLargest<Element>};
}

}  // namespace cutlass_ops
