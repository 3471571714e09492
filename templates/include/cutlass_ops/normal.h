// The normal distribution, and GELU by it, for kernels that use one of them. The other formula of GELU, by tanh, is in epilogue_math.h.

#pragma once

#include "cutlass_ops/epilogue_math.h"

namespace cutlass_ops {
namespace normal {

// The distribution beyond z >= 0: t 2^(P(t) - z^2 log2(e) / 2) with t = 1 / (1 + 0.4 z). benchmarks/fit_normal.py fits P. Unlike
// (1 + erff(-z / sqrt(2))) / 2, it does not cancel where little is left, and has one polynomial, where erff selects the factors of two.
CUTLASS_DEVICE float beyond(float z) {
  constexpr float kFactors[] = {-2.64752379f, 1.43862682f, 0.535929237f, -0.258054375f, 0.773322941f,
                                -2.51394962f, 2.80016182f, -1.40235799f, 0.273845091f};
  constexpr int kDegree = 8;
  float const t = near_inverse(0.4f * z + 1.0f);
  float power = kFactors[kDegree];
  CUTLASS_PRAGMA_UNROLL
  for (int i = kDegree - 1; i >= 0; --i) power = power * t + kFactors[i];
  return t * power_of_two(z * (-0.5f * kLog2E) * z + power);
}

CUTLASS_DEVICE float cdf(float x) {
  float const rest = beyond(fabsf(x));
  return x < 0.0f ? rest : 1.0f - rest;
}

CUTLASS_DEVICE float gelu(float x) { return x * cdf(x); }

CUTLASS_DEVICE double cdf(double x) { return 0.5 * ::erfc(-0.70710678118654752440 * x); }
CUTLASS_DEVICE double gelu(double x) { return x * cdf(x); }

}  // namespace normal
}  // namespace cutlass_ops
