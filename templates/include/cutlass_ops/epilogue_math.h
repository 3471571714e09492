// Scalar functions of the epilogue language, in FP32, and the adapter that lets CUTLASS's visitors call a rendered
// scalar expression on fragments. Names are those of the language; docs/epilogues.md has the formulas.

#pragma once

#include "cutlass/array.h"
#include "cutlass/cutlass.h"
#include "cutlass/numeric_conversion.h"

namespace cutlass_ops {

// PyTorch's minimum, maximum, clamp and relu pass NaN on; fminf and fmaxf would drop it.
CUTLASS_DEVICE float maximum(float x, float y) {
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(x), "f"(y));
  return r;
}

CUTLASS_DEVICE float minimum(float x, float y) {
  float r;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(x), "f"(y));
  return r;
}

// 2^x, by the special function unit.
CUTLASS_DEVICE float power_of_two(float x) {
#if defined(__CUDACC__)
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
#else
  return exp2f(x);
#endif
}

// 1 / x and 1 / sqrt(x), within a few units in the last place.
CUTLASS_DEVICE float near_inverse(float x) {
#if defined(__CUDACC__)
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
#else
  return 1.0f / x;
#endif
}

CUTLASS_DEVICE float near_inverse_root(float x) {
#if defined(__CUDACC__)
  float r;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
#else
  return 1.0f / sqrtf(x);
#endif
}

// The compiler's own division and square root branch for very large and very small operands. Instructions of two elements do
// not overlap across a branch, and one warp alone cannot fill the gaps. That takes ten times as long. These have no branch.
// Operands far from 1 are scaled by powers of two, and the remainder corrects the approximation.
CUTLASS_DEVICE float divide(float x, float y) {
  // What depends on y alone is computed once where y is a scalar. Such a y is scaled that its inverse or a quotient would be below
  // 2^-126 without need.
  bool const tiny = fabsf(y) < 0x1p-100f, huge = fabsf(y) > 0x1p100f;
  float const scale = tiny ? 0x1p32f : huge ? 0x1p-32f : 1.0f, by = y * scale, inverse = near_inverse(by);
  float const near = x * inverse, rest = fmaf(-near, by, x);
  // The remainder is not finite where x or the result is infinite, y is zero or infinite, or one is NaN. Where it is zero, a
  // correction would take the sign from a zero. It is below 2^-149, and lost, where x is below 2^-102: there the quotient is
  // within two units in the last place.
  bool const corrects = (rest != 0.0f) & (fabsf(rest) <= 0x1.fffffep127f);
  return (corrects ? fmaf(rest, inverse, near) : near) * scale;
}

CUTLASS_DEVICE float sqrt(float x) {
  bool const small = x < 0x1p-64f;
  float const of = small ? x * 0x1p64f : x;
  float const inverse = near_inverse_root(of), near = of * inverse, rest = fmaf(-near, near, of);
  bool const whole = of == 0.0f || of > 0x1.fffffep127f;  // these are their own roots
  return (whole ? of : fmaf(0.5f * inverse, rest, near)) * (small ? 0x1p-32f : 1.0f);
}

CUTLASS_DEVICE float clamp(float x, float low, float high) { return minimum(maximum(x, low), high); }
CUTLASS_DEVICE float abs(float x) { return fabsf(x); }
CUTLASS_DEVICE float square(float x) { return x * x; }
CUTLASS_DEVICE float rsqrt(float x) { return rsqrtf(x); }
CUTLASS_DEVICE float exp(float x) { return expf(x); }
CUTLASS_DEVICE float tanh(float x) { return tanhf(x); }

// 1 / (1 + 2^x), by the special function unit: within a few units in the last place of FP32, far below the rounding of a
// 16-bit result. 2^x = inf gives 0, as it should, and so do results too small for a normal number, whose handling takes
// a third of the instructions.
CUTLASS_DEVICE float sigmoid_of_power(float x) {
  float power, r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(1.0f + power));
  return r;
}

constexpr float kLog2E = 1.4426950408889634f;

CUTLASS_DEVICE float sigmoid(float x) { return sigmoid_of_power(-kLog2E * x); }

CUTLASS_DEVICE float relu(float x) { return maximum(x, 0.0f); }
CUTLASS_DEVICE float leaky_relu(float x, float negative_slope) { return x > 0.0f ? x : x * negative_slope; }
CUTLASS_DEVICE float silu(float x) { return x * sigmoid(x); }
CUTLASS_DEVICE float hardswish(float x) { return x * clamp(x + 3.0f, 0.0f, 6.0f) * (1.0f / 6.0f); }

// 0.5 x (1 + tanh(u)) = x sigmoid(2u), u = sqrt(2 / pi) (x + 0.044715 x^3): the same function without the cancellation at
// negative x. The factors of x and x^3 in the exponent are constants.
CUTLASS_DEVICE float gelu_tanh(float x) {
  constexpr float kLinear = -2.0f * kLog2E * 0.79788456080286536f, kCubic = kLinear * 0.044715f;
  return x * sigmoid_of_power(x * (kCubic * (x * x) + kLinear));
}

CUTLASS_DEVICE float infinity() { return __int_as_float(0x7f800000); }
CUTLASS_DEVICE float nan() { return __int_as_float(0x7fc00000); }

// Rounds to another element type and back.
template <class Element>
CUTLASS_DEVICE float cast(float x) {
  return float(Element(x));
}

// Scalar::apply, element by element, in the form that VisitorCompute and Sm90Compute instantiate: with an array of
// FP32 values. They also name Fn<float>, to look for run-time arguments, of which there are none.
template <class Scalar>
struct Elementwise {
  template <class T>
  struct Fn {
    template <class... Inputs>
    CUTLASS_DEVICE T operator()(Inputs const&... inputs) const {
      T result;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < int(T::kElements); ++i) {
        result[i] = Scalar::apply(inputs[i]...);
      }
      return result;
    }
  };
};

}  // namespace cutlass_ops
