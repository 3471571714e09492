// Operands of several GEMMs of the same extents: A (..., M, K), B (..., K, N) and D (..., M, N), with one or two leading
// dimensions. Each operand has its own stride along each of these, 0 if batches share it. So permuted views need no copy.
// Kernels count batches with one number, along the last leading dimension first.

#pragma once

#include <algorithm>
#include <utility>

#include "cutlass_ops/halves.h"

#include "cutlass_ops/binding.h"

namespace cutlass_ops {

// Strides in elements along the last leading dimension, and along the one before it.
struct Batches {
  int64_t inner = 0;
  int64_t outer = 0;

  // The offset of a batch from the first one. The last leading dimension has `extent` batches.
  CUTLASS_HOST_DEVICE int64_t offset(int batch, int extent) const {
    return batch / extent * outer + batch % extent * inner;
  }
};

struct BatchedMatrix : Matrix {
  Batches batches;
};

template <class Element>
struct BatchedVector {
  Element* values = nullptr;
  Batches batches;
};

#if CUTLASS_OPS_HOST

// Reads the arguments of one call, in their order, as `Call` does for one GEMM. What reads groups of rows (grouped.h) builds on
// it.
class BatchedOperands {
 public:
  // D's leading dimensions are those of the call.
  explicit BatchedOperands(Call& call) : call_(call) {
    DLTensor const* const d = given(kResult);
    rank_ = d == nullptr ? 0 : d->ndim - 2;
    bool legal = 1 <= rank_ && rank_ <= kMostLeading;
    for (int i = 0; legal && i < rank_; ++i) {
      int64_t const extent = d->shape[rank_ - 1 - i];
      legal = 1 <= extent && extent <= INT32_MAX / count();
      extents_[i] = legal ? extent : 1;
    }
    if (!legal) call.fail(kResult, d == nullptr ? Reason::kKind : Reason::kShape);
  }

  // A or B: it may have fewer leading dimensions than D, or 1 for some.
  template <class Element, Major kMajor, int kAlignment, bool kAlignedExtent>
  BatchedMatrix input() {
    return matrix<Element, kMajor, kAlignment, kAlignedExtent>(-1, -1, Use::kOperand);
  }

  template <class Element, Major kMajor, int kAlignment, bool kAlignedExtent>
  BatchedMatrix result() {
    return matrix<Element, kMajor, kAlignment, kAlignedExtent>(-1, -1, Use::kOutput);
  }

  // An input (M, N) that batches share, or one with D's leading dimensions.
  template <class Element, Major kMajor, int kAlignment, bool kAlignedExtent>
  BatchedMatrix tile(Problem p) {
    return matrix<Element, kMajor, kAlignment, kAlignedExtent>(p.m, p.n, Use::kTile);
  }

  template <class Element, Major kMajor, int kAlignment, bool kAlignedExtent>
  BatchedMatrix tile_output(Problem p) {
    return matrix<Element, kMajor, kAlignment, kAlignedExtent>(p.m, p.n, Use::kOutput);
  }

  template <class Element>
  BatchedVector<Element> row(Problem p) { return vector<Element>(p.n); }
  template <class Element>
  BatchedVector<Element> col(Problem p) { return vector<Element>(p.m); }

  Problem problem(BatchedMatrix const& a, BatchedMatrix const& b, BatchedMatrix const& d) {
    Problem p = call_.problem(a, b, d);
    if (call_.status_ != 0) return p;
    // Every leading dimension of D is A's or B's.
    for (int i = 0; i < rank_; ++i) {
      if ((found_ >> i & 1u) == 0) return fail_shape(kResult), p;
    }
    p.count = int(count());
    p.inner = int(extents_[0]);
    // Tiles of all batches are counted in 32 bits; the smallest has 8 rows and columns.
    if ((d.rows + 7) / 8 * ((d.cols + 7) / 8) > INT32_MAX / p.count) fail_shape(kResult);
    return p;
  }

  // Refuses an output that shares memory with another argument, or whose batches share memory. Called last.
  void check() {
    if (call_.status_ != 0) return;
    for (int at = 0; at < call_.next_ && at < call_.count_; ++at) {
      if (spans_[at].use != Use::kOutput) continue;
      if (!nested(spans_[at])) return call_.fail(at, Reason::kMajor);
      for (int other = 0; other < call_.next_ && other < call_.count_; ++other) {
        if (other == at || (other < at && spans_[other].use == Use::kOutput)) continue;
        bool const in_place = spans_[other].use == Use::kTile && same(spans_[other], spans_[at]);
        if (!in_place && meet(spans_[at], spans_[other])) return call_.fail(at, Reason::kOverlap);
      }
    }
  }

 protected:
  enum class Use { kNone, kOperand, kTile, kOutput };
  static constexpr int kMostLeading = 2, kResult = 2, kLevels = kMostLeading + 1;

  // The number of batches is the first extent of argument `at`, which has three.
  BatchedOperands(Call& call, int at) : call_(call), rank_(1) {
    DLTensor const* const t = given(at);
    bool const legal = t != nullptr && t->ndim == 3 && 1 <= t->shape[0] && t->shape[0] <= INT32_MAX;
    if (legal) extents_[0] = t->shape[0];
    if (!legal) call.fail(at, t == nullptr ? Reason::kKind : Reason::kShape);
  }

  // From here on, tensors have so many batches in one leading dimension; or none.
  void expect(int64_t batches) {
    rank_ = 1;
    extents_[0] = batches;
  }
  void expect_none() {
    rank_ = 0;
    extents_[0] = 1;
  }

  // Runs of `width` bytes. Each level repeats what is before it, `pitch` bytes apart.
  struct Level {
    uintptr_t pitch = 0, count = 1;
  };
  struct Span {
    Use use = Use::kNone;
    uintptr_t begin = 0, width = 0;
    Level levels[kLevels];

    uintptr_t bytes() const {
      uintptr_t sum = width;
      for (Level const& level : levels) sum += (level.count - 1) * level.pitch;
      return sum;
    }
  };

  // An argument as it is; nullptr if it is no tensor.
  DLTensor const* given(int at) const { return at < call_.count_ ? Call::as_tensor(call_.args_[at]) : nullptr; }

  void fail_shape(int at) { call_.fail(at, Reason::kShape); }
  void fail_last(Reason reason) { call_.fail(call_.next_ - 1, reason); }

  int64_t count() const { return extents_[0] * extents_[1]; }

  // The strides between batches of a tensor whose last dimensions are `own`. False if the tensor breaks the contract.
  bool read_batches(int at, DLTensor const* t, int own, Use use, int alignment, Batches& batches) {
    int const leading = t->ndim - own;
    bool const broadcasts = use == Use::kOperand, shared = use != Use::kOutput && leading == 0;
    if (leading < 0 || leading > rank_ || (leading != rank_ && !broadcasts && !shared)) return fail_shape(at), false;
    for (int i = 0; i < leading; ++i) {
      int64_t const extent = t->shape[leading - 1 - i], stride = t->strides[leading - 1 - i];
      if (extent != extents_[i] && !(broadcasts && extent == 1)) return fail_shape(at), false;
      if (broadcasts && extent == extents_[i]) found_ |= 1u << i;
      if (extent == 1) continue;
      if (stride < 0) return call_.fail(at, Reason::kMajor), false;
      if (stride % alignment != 0) return call_.fail(at, Reason::kAlignment), false;
      (i == 0 ? batches.inner : batches.outer) = stride;
    }
    return true;
  }

  template <class Element, Major kMajor, int kAlignment, bool kAlignedExtent>
  BatchedMatrix matrix(int64_t rows, int64_t cols, Use use) {
    return matrix(Call::expected<Element, kMajor, kAlignment, kAlignedExtent>(), rows, cols, use);
  }

  BatchedMatrix matrix(Call::Expected const& type, int64_t rows, int64_t cols, Use use) {
    int const at = call_.next_++;
    DLTensor const* const t = call_.tensor(at, type);
    BatchedMatrix x;
    if (t == nullptr || !read_batches(at, t, 2, use, type.alignment, x.batches)) return {};
    int const last = t->ndim - 1;
    Call::Dimension const row{t->shape[last - 1], t->strides[last - 1], true}, col{t->shape[last], t->strides[last], true};
    static_cast<Matrix&>(x) = call_.lines(at, type, t, row, col, rows, cols);
    if (x.data == nullptr) return {};
    bool const by_rows = type.major == Major::kRow;
    note(at, use, x.data, type.bytes(), by_rows ? x.cols : x.rows, x.ld, by_rows ? x.rows : x.cols, x.batches);
    return x;
  }

  template <class Element>
  BatchedVector<Element> vector(int64_t length) {
    int const at = call_.next_++;
    DLTensor const* const t = call_.tensor<Element>(at);
    BatchedVector<Element> x;
    if (t == nullptr || !read_batches(at, t, 1, Use::kNone, 1, x.batches)) return {};
    int const last = t->ndim - 1;
    if (t->shape[last] != length) return fail_shape(at), BatchedVector<Element>{};
    if (Call::is_null(t)) return call_.fail(at, Reason::kNull), BatchedVector<Element>{};
    if (length > 1 && t->strides[last] != 1) return call_.fail(at, Reason::kMajor), BatchedVector<Element>{};
    if (Call::address(t) % sizeof(Element) != 0) return call_.fail(at, Reason::kAlignment), BatchedVector<Element>{};
    x.values = reinterpret_cast<Element*>(Call::address(t));
    note(at, Use::kNone, x.values, sizeof(Element), length, 0, 1, x.batches);
    return x;
  }

  template <class Element, int kRank>
  struct Strided {
    Element* values = nullptr;
    int64_t strides[kRank] = {};
  };

  // A tensor that is only read, of these extents and any strides. Several of its elements may share memory.
  template <class Element, int kRank>
  Strided<Element, kRank> strided(int64_t const (&extents)[kRank]) {
    int const at = call_.next_++;
    DLTensor const* const t = call_.tensor<Element>(at);
    if (t == nullptr) return {};
    Strided<Element, kRank> x;
    bool fits = t->ndim == kRank, ahead = true;
    int64_t length = 1;
    for (int i = 0; fits && i < kRank; ++i) {
      fits = t->shape[i] == extents[i];
      ahead = ahead && t->strides[i] >= 0;
      x.strides[i] = t->strides[i];
      length += (extents[i] - 1) * t->strides[i];
    }
    if (!fits) return fail_shape(at), Strided<Element, kRank>{};
    if (Call::is_null(t)) return call_.fail(at, Reason::kNull), Strided<Element, kRank>{};
    if (!ahead) return call_.fail(at, Reason::kMajor), Strided<Element, kRank>{};
    if (Call::address(t) % sizeof(Element) != 0) return call_.fail(at, Reason::kAlignment), Strided<Element, kRank>{};
    x.values = reinterpret_cast<Element*>(Call::address(t));
    note(at, Use::kNone, x.values, sizeof(Element), length, 0, 1, {});
    return x;
  }

  void note(int at, Use use, void const* data, int64_t bytes, int64_t length, int64_t ld, int64_t runs,
            Batches const& batches) {
    Span& span = spans_[at];
    span = {use, reinterpret_cast<uintptr_t>(data), uintptr_t(length * bytes), {}};
    auto const level = [&](int64_t distance, int64_t count) {
      return distance == 0 ? Level{} : Level{uintptr_t(distance * bytes), uintptr_t(count)};
    };
    // An output keeps a stride of 0, so that it is refused: its batches share memory.
    auto const batch_level = [&](int64_t distance, int64_t count) {
      return use == Use::kOutput ? Level{uintptr_t(distance * bytes), uintptr_t(count)} : level(distance, count);
    };
    Level all[kLevels] = {level(runs > 1 ? ld : 0, runs), batch_level(batches.inner, extents_[0]),
                          batch_level(batches.outer, extents_[1])};
    for (int i = 1; i < kLevels; ++i) {  // the nearest first
      for (int j = i; j > 0 && all[j].pitch < all[j - 1].pitch; --j) std::swap(all[j], all[j - 1]);
    }
    for (int i = 0; i < kLevels; ++i) span.levels[i] = all[i];
  }

  // Whether each repetition of a level ends before the next one begins. Then no two elements share memory.
  static bool nested(Span const& x) {
    uintptr_t below = x.width;
    for (Level const& level : x.levels) {
      if (level.count > 1 && level.pitch < below) return false;
      below += (level.count - 1) * level.pitch;
    }
    return true;
  }

  static bool same_pitches(Span const& x, Span const& y) {
    for (int i = 0; i < kLevels; ++i) {
      if (x.levels[i].pitch != y.levels[i].pitch) return false;
    }
    return true;
  }

  static bool same(Span const& x, Span const& y) {
    bool equal = x.begin == y.begin && x.width == y.width && same_pitches(x, y);
    for (int i = 0; i < kLevels; ++i) equal = equal && x.levels[i].count == y.levels[i].count;
    return equal;
  }

  static bool meet(Span const& x, Span const& y) {
    if (x.width == 0 || y.width == 0) return false;
    if (x.begin + x.bytes() <= y.begin || y.begin + y.bytes() <= x.begin) return false;
    Span both = x;  // with the extents of the larger one, at each level
    both.width = std::max(x.width, y.width);
    for (int i = 0; i < kLevels; ++i) both.levels[i].count = std::max(x.levels[i].count, y.levels[i].count);
    if (!same_pitches(x, y) || !nested(both)) return true;
    return meet_within(x, y, int64_t(y.begin) - int64_t(x.begin), kLevels - 1);
  }

  // Whether runs of x and y meet, if a run of y begins `offset` bytes after one of x, with all repetitions of the levels up
  // to this one. Bounds are not enough: heads of one tensor interleave without sharing a byte.
  static bool meet_within(Span const& x, Span const& y, int64_t offset, int level) {
    if (level < 0) return offset < int64_t(x.width) && -offset < int64_t(y.width);
    int64_t const pitch = int64_t(x.levels[level].pitch);
    if (pitch == 0) return meet_within(x, y, offset, level - 1);
    int64_t const below = offset >= 0 ? offset / pitch : -((-offset + pitch - 1) / pitch);
    for (int64_t steps : {below, below + 1}) {  // of x beyond those of y
      bool const there = steps < int64_t(x.levels[level].count) && -steps < int64_t(y.levels[level].count);
      if (there && meet_within(x, y, offset - steps * pitch, level - 1)) return true;
    }
    return false;
  }

  Call& call_;
  int rank_ = 0;
  int64_t extents_[kMostLeading] = {1, 1};  // the last leading dimension first
  uint32_t found_ = 0;                      // leading dimensions that A or B has
  Span spans_[Call::kMaxArguments];
};

#endif  // CUTLASS_OPS_HOST

}  // namespace cutlass_ops
