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

CUTLASS_DEVICE float clamp(float x, float low, float high) { return minimum(maximum(x, low), high); }
CUTLASS_DEVICE float abs(float x) { return fabsf(x); }
CUTLASS_DEVICE float square(float x) { return x * x; }
CUTLASS_DEVICE float sqrt(float x) { return sqrtf(x); }
CUTLASS_DEVICE float rsqrt(float x) { return rsqrtf(x); }
CUTLASS_DEVICE float exp(float x) { return expf(x); }
CUTLASS_DEVICE float tanh(float x) { return tanhf(x); }

// 1 / (1 + e^-x). The fast exponential and division are within a few units in the last place of FP32, far below the
// rounding of a 16-bit result; e^-x = inf gives 0, as it should.
CUTLASS_DEVICE float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

CUTLASS_DEVICE float relu(float x) { return maximum(x, 0.0f); }
CUTLASS_DEVICE float leaky_relu(float x, float negative_slope) { return x > 0.0f ? x : x * negative_slope; }
CUTLASS_DEVICE float silu(float x) { return x * sigmoid(x); }
CUTLASS_DEVICE float hardswish(float x) { return x * clamp(x + 3.0f, 0.0f, 6.0f) * (1.0f / 6.0f); }

CUTLASS_DEVICE float gelu(float x) { return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f)); }

// 0.5 x (1 + tanh(u)) = x sigmoid(2u): the same function without the cancellation at negative x.
CUTLASS_DEVICE float gelu_tanh(float x) {
  float const u = 0.79788456080286536f * (x + 0.044715f * x * x * x);
  return x * sigmoid(2.0f * u);
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
