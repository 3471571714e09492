// Sine and cosine of the epilogue language.

#pragma once

#include "cutlass/cutlass.h"

namespace cutlass_ops {

// x without whole turns, within half a turn of zero. 2 pi is a sum of two FP32 numbers, by Cody and Waite. The rest of x is
// rounded once, to half a unit in the last place of pi.
CUTLASS_DEVICE float within_a_turn(float x) {
  float const turns = rintf(x * 0.15915494309189535f);
  return fmaf(turns, 1.7484555e-7f, fmaf(turns, -6.28318548202514648f, x));
}

// By the special function unit, whose error within half a turn is absolute, below 2^-21; infinities give NaN.
CUTLASS_DEVICE float sin(float x) { return __sinf(within_a_turn(x)); }
CUTLASS_DEVICE float cos(float x) { return __cosf(within_a_turn(x)); }

}  // namespace cutlass_ops
