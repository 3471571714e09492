// Further reductions, for kernels that have one of them: the minimum, where the greatest and the least value are, and the
// logarithm of a sum of exponentials. States of several tiles may join in any order and give the same bits.

#pragma once

#include <climits>
#include <cstdint>

#include "cutlass_ops/binding.h"
#include "cutlass_ops/reduce.h"

namespace cutlass_ops {

// What a reduction keeps that needs more than one number.
template <class Second>
struct alignas(8) Pair {
  float first;
  Second second;
};

#if defined(__CUDACC__)

template <class Second>
CUTLASS_DEVICE Pair<Second> shuffle_xor(Pair<Second> const& x, int lanes) {
  return {__shfl_xor_sync(0xffffffff, x.first, lanes), __shfl_xor_sync(0xffffffff, x.second, lanes)};
}

template <class Second>
CUTLASS_DEVICE Pair<Second> load_part(Pair<Second> const* at) {
  static_assert(sizeof(Second) == 4);
  int2 const words = __ldcg(reinterpret_cast<int2 const*>(at));
  if constexpr (cutlass::platform::is_same<Second, int>::value) {
    return {__int_as_float(words.x), words.y};
  } else {
    return {__int_as_float(words.x), __int_as_float(words.y)};
  }
}

#endif

namespace reduce {

// NaN wins, as in torch.amin.
struct Min {
  using State = float;
  CUTLASS_DEVICE static float identity() { return infinity(); }
  CUTLASS_DEVICE static float lift(float x, int) { return x; }
  CUTLASS_DEVICE static float combine(float x, float y) { return minimum(x, y); }
};

// A value and its index. `kSign` is 1 for the greatest value and -1 for the least one; NaN is before either, and of equal
// values the first.
template <int kSign>
struct Extreme {
  using State = Pair<int>;
  CUTLASS_DEVICE static State identity() { return {kSign > 0 ? -infinity() : infinity(), INT_MAX}; }
  CUTLASS_DEVICE static State lift(float x, int at) { return {x, at}; }
  CUTLASS_DEVICE static State combine(State const& x, State const& y) {
    bool const nan_x = x.first != x.first, nan_y = y.first != y.first;
    bool const before = kSign > 0 ? y.first > x.first : y.first < x.first;
    bool const level = y.first == x.first || (nan_x && nan_y);
    // Each operator without a branch, as in the rest of an epilogue.
    bool const takes = before | (nan_y & !nan_x) | (level & (y.second < x.second));
    return {takes ? y.first : x.first, takes ? y.second : x.second};
  }
  // A later element only counts if it is beyond the others, or the first NaN.
  template <int kCount>
  CUTLASS_DEVICE static State fold(float const (&x)[kCount], int const (&at)[kCount], bool const (&there)[kCount]) {
    float const nothing = identity().first;
    State kept{there[0] ? x[0] : nothing, there[0] ? at[0] : INT_MAX};
    CUTLASS_PRAGMA_UNROLL
    for (int i = 1; i < kCount; ++i) {
      float const value = there[i] ? x[i] : nothing;
      bool const not_before = kSign > 0 ? value <= kept.first : value >= kept.first;
      bool const takes = !not_before & (kept.first == kept.first);
      kept = {takes ? value : kept.first, takes ? at[i] : kept.second};
    }
    return kept;
  }
  CUTLASS_DEVICE static int result(State const& x) { return x.second; }
};
using ArgMax = Extreme<1>;
using ArgMin = Extreme<-1>;

// The greatest value, and the sum of e^(x - it): at least 1 where there is any value, so that nothing overflows.
struct LogSumExp {
  using State = Pair<float>;
  CUTLASS_DEVICE static State identity() { return {-infinity(), 0.0f}; }
  CUTLASS_DEVICE static State lift(float x, int) { return {x, 1.0f}; }
  CUTLASS_DEVICE static State combine(State const& x, State const& y) {
    // Two infinities of one sign are level, though their difference is NaN. NaN stays in the sum.
    float const lesser = power_of_two(x.first == y.first ? 0.0f : -kLog2E * fabsf(x.first - y.first));
    bool const leads = x.first >= y.first;
    return {leads ? x.first : y.first, (leads ? y.second : x.second) * lesser + (leads ? x.second : y.second)};
  }
  // The greatest first, then the sum, so that each element takes one power. NaN is not the greatest, and stays in the sum.
  template <int kCount>
  CUTLASS_DEVICE static State fold(float const (&x)[kCount], int const (&)[kCount], bool const (&there)[kCount]) {
    float value[kCount], most = -infinity(), sum = 0.0f;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount; ++i) {
      value[i] = there[i] ? x[i] : -infinity();
      most = fmaxf(most, value[i]);
    }
    float const from = fabsf(most) <= 0x1.fffffep127f ? most : 0.0f;  // an infinity less itself would be NaN
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount; ++i) sum += power_of_two(kLog2E * (value[i] - from));
    return {most, sum};
  }
  CUTLASS_DEVICE static float result(State const& x) { return x.first + logf(x.second); }
};

}  // namespace reduce

// For CUTLASS's own reductions: a functor on values and on arrays of them.
template <class T>
struct Min {
  CUTLASS_DEVICE T operator()(T const& x, T const& y) const {
    if constexpr (cutlass::platform::is_same<T, float>::value) {
      return minimum(x, y);
    } else {
      T result;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < int(T::kElements); ++i) result[i] = minimum(x[i], y[i]);
      return result;
    }
  }
};

}  // namespace cutlass_ops
