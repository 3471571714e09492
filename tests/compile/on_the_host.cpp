// What needs no GPU of a kernel's arithmetic, computed on the host: bits of random numbers, which of two values a reduction
// keeps, GELU, what FP8 rounds to where a target has no instruction for it, and the scales of blocks. tests/compile/test_on_the_host.py compares it with PyTorch.

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "cutlass_ops/random.h"  // first: it declares what the others call

#include "cutlass_ops/epilogue_math.h"
#include "cutlass_ops/functions.h"
#include "cutlass_ops/normal.h"
#include "cutlass_ops/quantize.h"
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

// What three elements of a row keep together, of which the last may lie beyond its end.
template <class Reduce>
auto folded(float x, float y, float z, bool third) {
  float const values[] = {x, y, z};
  int const at[] = {0, 1, 2};
  bool const there[] = {true, true, third};
  return Reduce::result(cutlass_ops::fold<Reduce>(values, at, there));
}

int main(int count, char** arguments) {
  for (int i = 1; i + 1 < count; i += 2) {
    int64_t const seed = std::strtoll(arguments[i], nullptr, 10), offset = std::strtoll(arguments[i + 1], nullptr, 10);
    auto const uniform = cutlass_ops::PlaceArguments<cutlass_ops::Uniform>{{seed, nullptr}, {offset, nullptr}}.functor();
    for (int row = 0; row < 20; ++row) {
      for (int column = 0; column < 20; ++column) {
        auto const quad = uniform.quad(row & ~8, column & ~8);
        std::printf("uniform %d %d\n", __float_as_int(quad.at[row / 8 % 2][column / 8 % 2]),
                    __float_as_int(uniform(row, column)));
      }
    }
  }
  // Bits of all kinds of numbers, by a generator whose numbers the test has as well.
  uint32_t state = 1;
  for (int i = 0; i < 20000; ++i) {
    float const x = __int_as_float(int(state = state * 1664525u + 1013904223u));
    float const y = __int_as_float(int(state = state * 1664525u + 1013904223u));
    std::printf("divided %d %d\n", __float_as_int(cutlass_ops::divide(x, y)), __float_as_int(cutlass_ops::sqrt(x)));
  }
  float const special[] = {0.0f, -0.0f, INFINITY, -INFINITY, NAN, 1.0f, -3.0f, 1e-45f, -1e-40f, 3e38f, 0x1p-64f, 0x1p64f};
  for (float x : special) {
    for (float y : special) {
      std::printf("divided %d %d\n", __float_as_int(cutlass_ops::divide(x, y)), __float_as_int(cutlass_ops::sqrt(x)));
    }
  }
  for (uint32_t upper = 0; upper < 0x10000; ++upper) {
    float const x = __int_as_float(int(upper << 16));
    std::printf("gelu %d %d\n", __float_as_int(x), __float_as_int(cutlass_ops::normal::gelu(x)));
  }
  for (uint32_t upper = 0; upper < 0x10000; ++upper) {
    for (uint32_t lower : {0u, 1u, 0x8000u, 0xffffu}) {
      float const x = __int_as_float(int(upper << 16 | lower));
      std::printf("cast %d %d %d\n", __float_as_int(x), __float_as_int(cutlass_ops::cast<cutlass::float_e4m3_t>(x)),
                  __float_as_int(cutlass_ops::cast<cutlass::float_e5m2_t>(x)));
    }
  }
  for (uint32_t upper = 0; upper < 0x8000; ++upper) {
    for (uint32_t lower : {0u, 1u, 0x5a5au, 0xffffu}) {
      float const x = __int_as_float(int(upper << 16 | lower));
      auto const e4m3 = cutlass_ops::block_scale<cutlass::float_e4m3_t>(x);
      auto const e5m2 = cutlass_ops::block_scale<cutlass::float_e5m2_t>(x);
      std::printf("scale %d %d %d %d %d\n", __float_as_int(x), __float_as_int(e4m3.inverse), __float_as_int(e4m3.scale),
                  __float_as_int(e5m2.inverse), __float_as_int(e5m2.scale));
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
      for (float z : values) {
        for (bool third : {true, false}) {
          std::printf("folded %d %d %d\n", folded<ArgMax>(x, y, z, third), folded<ArgMin>(x, y, z, third),
                      __float_as_int(folded<LogSumExp>(x, y, z, third)));
        }
      }
    }
    std::printf("functions %d %d %d\n", __float_as_int(cutlass_ops::sign(x)), __float_as_int(cutlass_ops::round(x / 2)),
                int(cutlass_ops::isnan(x)));
  }
}
