// Further scalar functions of the epilogue language, in FP32, for kernels that use one of them. They are accurate: within a
// few units in the last place of FP32. Names are those of the language; docs/epilogues.md has the formulas.

#pragma once

#include "cutlass_ops/epilogue_math.h"

namespace cutlass_ops {

CUTLASS_DEVICE float where(bool condition, float x, float y) { return condition ? x : y; }
CUTLASS_DEVICE int where(bool condition, int x, int y) { return condition ? x : y; }
CUTLASS_DEVICE bool isnan(float x) { return x != x; }

// NaN has no sign, and neither has zero.
CUTLASS_DEVICE float sign(float x) { return float(int(x > 0.0f) - int(x < 0.0f)); }
CUTLASS_DEVICE float floor(float x) { return floorf(x); }
CUTLASS_DEVICE float ceil(float x) { return ceilf(x); }
CUTLASS_DEVICE float round(float x) { return rintf(x); }
CUTLASS_DEVICE float trunc(float x) { return truncf(x); }
CUTLASS_DEVICE float reciprocal(float x) { return divide(1.0f, x); }

CUTLASS_DEVICE float pow(float x, float y) { return powf(x, y); }
CUTLASS_DEVICE float exp2(float x) { return exp2f(x); }
CUTLASS_DEVICE float expm1(float x) { return expm1f(x); }
CUTLASS_DEVICE float log(float x) { return logf(x); }
CUTLASS_DEVICE float log2(float x) { return log2f(x); }
CUTLASS_DEVICE float log1p(float x) { return log1pf(x); }
CUTLASS_DEVICE float erf(float x) { return erff(x); }

// Beyond 20, e^-x is less than half a unit in the last place of x.
CUTLASS_DEVICE float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }
CUTLASS_DEVICE float elu(float x, float alpha) { return x > 0.0f ? x : alpha * expm1f(x); }

// tanh(log(1 + e)) = n / (n + 2), n = e (e + 2). Beyond 20, that is 1.
CUTLASS_DEVICE float mish(float x) {
  float const power = expf(x < 20.0f ? x : 20.0f), n = power * (power + 2.0f);
  return x * divide(n, n + 2.0f);
}

}  // namespace cutlass_ops
