// What needs no GPU of a kernel's arithmetic, computed on the host: bits of random numbers, and which of two values a reduction
// keeps. tests/compile/test_on_the_host.py compares it with PyTorch.

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "cutlass_ops/functions.h"
#include "cutlass_ops/random.h"
#include "cutlass_ops/reductions.h"

float __int_as_float(int bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

int __float_as_int(float value) {
  int bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

using cutlass_ops::reduce::ArgMax;
using cutlass_ops::reduce::ArgMin;
using cutlass_ops::reduce::LogSumExp;

template <class Reduce>
int joined(float x, float y) {
  auto const both = Reduce::combine(Reduce::lift(x, 5), Reduce::lift(y, 2));
  // Nothing changes what it joins, on either side.
  auto const again = Reduce::combine(Reduce::combine(Reduce::identity(), both), Reduce::identity());
  return Reduce::result(both) == Reduce::result(again) ? Reduce::result(both) : -1;
}

int main(int count, char** arguments) {
  for (int i = 1; i + 1 < count; i += 2) {
    int64_t const seed = std::strtoll(arguments[i], nullptr, 10), offset = std::strtoll(arguments[i + 1], nullptr, 10);
    auto const uniform = cutlass_ops::PlaceArguments<cutlass_ops::Uniform>{{seed, nullptr}, {offset, nullptr}}.functor();
    for (int row = 0; row < 3; ++row) {
      for (int column = 0; column < 10; column += 2) {
        float2 const both = uniform.pair(row, column);
        std::printf("uniform %d %d %d %d\n", __float_as_int(both.x), __float_as_int(both.y),
                    __float_as_int(uniform(row, column)), __float_as_int(uniform(row, column + 1)));
      }
    }
  }
  float const values[] = {1, 3, 3, NAN, NAN, -INFINITY, INFINITY, 0.0f, -0.0f};
  for (float x : values) {
    for (float y : values) {
      std::printf("joined %d %d\n", joined<ArgMax>(x, y), joined<ArgMin>(x, y));
      for (float z : {0.5f, NAN, -INFINITY}) {
        auto both = LogSumExp::combine(LogSumExp::lift(x, 0), LogSumExp::lift(y, 1));
        both = LogSumExp::combine(both, LogSumExp::combine(LogSumExp::identity(), LogSumExp::lift(z, 2)));
        std::printf("summed %d\n", __float_as_int(LogSumExp::result(both)));
      }
    }
    std::printf("functions %d %d %d\n", __float_as_int(cutlass_ops::sign(x)), __float_as_int(cutlass_ops::round(x / 2)),
                int(cutlass_ops::isnan(x)));
  }
}
