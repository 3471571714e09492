// What an epilogue in FP64 needs: the functions of the epilogue language on double values, by the names and with the formulas of those
// on FP32 ones (epilogue_math.h, functions.h, trigonometry.h), and scalars that are not rounded to FP32.

#pragma once

#include "cutlass_ops/binding.h"
#include "cutlass_ops/functions.h"

namespace cutlass_ops {

CUTLASS_DEVICE bool isnan(double x) { return x != x; }
CUTLASS_DEVICE double where(bool condition, double x, double y) { return condition ? x : y; }

// NaN goes through, as in PyTorch.
CUTLASS_DEVICE double maximum(double x, double y) { return x > y || x != x ? x : y; }
CUTLASS_DEVICE double minimum(double x, double y) { return x < y || x != x ? x : y; }
CUTLASS_DEVICE double clamp(double x, double low, double high) { return minimum(maximum(x, low), high); }

CUTLASS_DEVICE double divide(double x, double y) { return x / y; }
CUTLASS_DEVICE double reciprocal(double x) { return 1.0 / x; }
CUTLASS_DEVICE double abs(double x) { return ::fabs(x); }
CUTLASS_DEVICE double sign(double x) { return double(int(x > 0.0) - int(x < 0.0)); }
CUTLASS_DEVICE double floor(double x) { return ::floor(x); }
CUTLASS_DEVICE double ceil(double x) { return ::ceil(x); }
CUTLASS_DEVICE double round(double x) { return ::rint(x); }
CUTLASS_DEVICE double trunc(double x) { return ::trunc(x); }
CUTLASS_DEVICE double square(double x) { return x * x; }
CUTLASS_DEVICE double sqrt(double x) { return ::sqrt(x); }
CUTLASS_DEVICE double rsqrt(double x) { return 1.0 / ::sqrt(x); }
CUTLASS_DEVICE double pow(double x, double y) { return ::pow(x, y); }
CUTLASS_DEVICE double exp(double x) { return ::exp(x); }
CUTLASS_DEVICE double exp2(double x) { return ::exp2(x); }
CUTLASS_DEVICE double expm1(double x) { return ::expm1(x); }
CUTLASS_DEVICE double log(double x) { return ::log(x); }
CUTLASS_DEVICE double log2(double x) { return ::log2(x); }
CUTLASS_DEVICE double log1p(double x) { return ::log1p(x); }
CUTLASS_DEVICE double erf(double x) { return ::erf(x); }
CUTLASS_DEVICE double sin(double x) { return ::sin(x); }
CUTLASS_DEVICE double cos(double x) { return ::cos(x); }
CUTLASS_DEVICE double tanh(double x) { return ::tanh(x); }

CUTLASS_DEVICE double sigmoid(double x) { return 1.0 / (1.0 + ::exp(-x)); }
CUTLASS_DEVICE double relu(double x) { return maximum(x, 0.0); }
CUTLASS_DEVICE double leaky_relu(double x, double negative_slope) { return x > 0.0 ? x : x * negative_slope; }
CUTLASS_DEVICE double elu(double x, double alpha) { return x > 0.0 ? x : alpha * ::expm1(x); }
CUTLASS_DEVICE double silu(double x) { return x * sigmoid(x); }
CUTLASS_DEVICE double softplus(double x) { return x > 20.0 ? x : ::log1p(::exp(x)); }
CUTLASS_DEVICE double mish(double x) { return x * ::tanh(softplus(x)); }
CUTLASS_DEVICE double hardswish(double x) { return x * clamp(x + 3.0, 0.0, 6.0) / 6.0; }
// 0.5 x (1 + tanh(u)) = x sigmoid(2u).
CUTLASS_DEVICE double gelu_tanh(double x) {
  return x * sigmoid(2.0 * 0.79788456080286535588 * (x + 0.044715 * (x * x * x)));
}

#if CUTLASS_OPS_HOST
// A number from the host. binding.h rounds every number to FP32 first. One on the device would have lost digits before.
template <>
inline Scalar<double> Call::scalar<double>() {
  int const at = next_++;
  if (at >= count_) return fail(at, Reason::kCount), Scalar<double>{};
  TVMFFIAny const& arg = args_[at];
  if (arg.type_index == kTVMFFIFloat) return {arg.v_float64, nullptr};
  if (arg.type_index == kTVMFFIInt) return {double(arg.v_int64), nullptr};
  return fail(at, Reason::kKind), Scalar<double>{};
}
#endif

}  // namespace cutlass_ops
