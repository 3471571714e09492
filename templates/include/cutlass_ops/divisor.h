// Division by a number that is known before a kernel starts: a multiplication and a shift.

#pragma once

#include <cstdint>

#include "cutlass_ops/halves.h"

namespace cutlass_ops {

// Of dividends from 0 to 2^31 - 1. It lies as CUTLASS's does, and its instructions are the same.
struct Divisor {
  int divisor = 1;
  unsigned multiplier = 0, shift = 0;

  Divisor() = default;
  explicit Divisor(int divisor) : divisor(divisor) {
    if (divisor == 1) return;
    unsigned bits = 0;  // so many that 2^bits is no less
    while (1u << bits < unsigned(divisor)) ++bits;
    multiplier = unsigned(((uint64_t(1) << (31 + bits)) + unsigned(divisor) - 1) / unsigned(divisor));
    shift = bits - 1;
  }

  __host__ __device__ void operator()(int& quotient, int& remainder, int dividend) const {
#if defined(__CUDA_ARCH__)
    quotient = divisor != 1 ? __umulhi(dividend, multiplier) >> shift : dividend;
#else
    quotient = divisor != 1 ? int(uint64_t(dividend) * multiplier >> 32) >> shift : dividend;
#endif
    remainder = dividend - quotient * divisor;
  }
  __host__ __device__ int div(int dividend) const {
    int quotient, remainder;
    (*this)(quotient, remainder, dividend);
    return quotient;
  }
};

}  // namespace cutlass_ops
