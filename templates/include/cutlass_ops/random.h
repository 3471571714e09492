// Random numbers that depend on a seed, an offset and a place alone, whichever kernel computes them.

#pragma once

#include <cstdint>

#include "cutlass_ops/binding.h"
#include "cutlass_ops/places.h"

CUTLASS_OPS_TYPE(int64_t, kDLInt)

namespace cutlass_ops {

// ---- Whole numbers of 64 bits as launch arguments ----

// FP32, by way of which other scalars go, would not hold one.
template <>
inline Scalar<int64_t> Call::scalar<int64_t>() {
  int const at = next_++;
  if (at >= count_) return fail(at, Reason::kCount), Scalar<int64_t>{};
  if (args_[at].type_index == kTVMFFIInt) return {args_[at].v_int64, nullptr};
  DLTensor const* t = tensor<int64_t>(at);
  if (t == nullptr) return {};
  if (t->ndim != 0) return fail(at, Reason::kShape), Scalar<int64_t>{};
  if (is_null(t)) return fail(at, Reason::kNull), Scalar<int64_t>{};
  add({address(t), sizeof(int64_t), sizeof(int64_t), 1, false}, at, false);
  return {0, reinterpret_cast<int64_t const*>(address(t))};
}

CUTLASS_DEVICE int64_t whole(Scalar<int64_t> const& scalar) {
  return scalar.ptr == nullptr ? scalar.value : *scalar.ptr;
}

// ---- Philox 4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers, as easy as 1, 2, 3) ----

struct Words {
  uint32_t at[4];
};

CUTLASS_DEVICE Words philox(Words counter, uint32_t key, uint32_t other_key) {
  CUTLASS_PRAGMA_UNROLL
  for (int round = 0; round < 10; ++round) {
    uint64_t const first = uint64_t(0xD2511F53u) * counter.at[0], second = uint64_t(0xCD9E8D57u) * counter.at[2];
    counter = {{uint32_t(second >> 32) ^ counter.at[1] ^ key, uint32_t(second),
                uint32_t(first >> 32) ^ counter.at[3] ^ other_key, uint32_t(first)}};
    key += 0x9E3779B9u;
    other_key += 0xBB67AE85u;
  }
  return counter;
}

// From 0 up to 1, without 1: the upper 24 bits, as many as FP32 holds.
CUTLASS_DEVICE float uniform_of(uint32_t word) { return float(word >> 8) * 5.9604644775390625e-8f; }

// The numbers of a seed and an offset. The four places of a quad share a counter, and each has a word of its own.
class Uniform {
 public:
  CUTLASS_DEVICE Uniform(int64_t seed, int64_t offset) : seed_(uint64_t(seed)), offset_(uint64_t(offset)) {}

  CUTLASS_DEVICE float operator()(int row, int column) const {
    Words const found = words(row & ~8, column & ~8);
    uint32_t const left = row & 8 ? found.at[2] : found.at[0], right = row & 8 ? found.at[3] : found.at[1];
    return uniform_of(column & 8 ? right : left);
  }

  CUTLASS_DEVICE Quad quad(int row, int column) const {
    Words const found = words(row, column);
    return {{{uniform_of(found.at[0]), uniform_of(found.at[1])}, {uniform_of(found.at[2]), uniform_of(found.at[3])}}};
  }

 private:
  CUTLASS_DEVICE Words words(int row, int column) const {
    return philox({{uint32_t(column), uint32_t(row), uint32_t(offset_), uint32_t(offset_ >> 32)}}, uint32_t(seed_),
                  uint32_t(seed_ >> 32));
  }

  uint64_t seed_, offset_;
};

template <>
struct PlaceArguments<Uniform> {
  Scalar<int64_t> seed, offset;
  CUTLASS_DEVICE Uniform functor() const { return {whole(seed), whole(offset)}; }
};

}  // namespace cutlass_ops
