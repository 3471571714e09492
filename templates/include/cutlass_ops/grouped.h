// Groups of rows: A (T, K) has E groups of rows that follow each other, and each is multiplied by a matrix of its own of
// B (E, K, N). Where groups end is known on the device alone, when the kernel runs.
//
// What a kernel finds by its batch has two coordinates here, the group's first row and its number, and so two distances, in
// the places of those between batches (`Batches`): tensors with a row for each of A's have one from row to row, those of
// groups one from group to group.

#pragma once

#include "cutlass_ops/batched.h"

namespace cutlass_ops {

// Where groups end. Ends that fall, are negative or beyond the last row give other rows than meant, but rows of A.
struct RowGroups {
  int32_t const* ends = nullptr;  // on the device
  int count = 0;
  int rows = 0;  // of A

  struct Rows {
    int first;
    int size;
  };

  CUTLASS_DEVICE int end(int group) const {
    int const given = ends[group];
    return given < 0 ? 0 : given < rows ? given : rows;
  }

  CUTLASS_DEVICE Rows of(int group) const {
    int const first = group == 0 ? 0 : end(group - 1), last = end(group);
    return {first, last > first ? last - first : 0};
  }
};

#if CUTLASS_OPS_HOST

// Reads the arguments of one call: A, B, D, where groups end, and what the epilogue reads and writes.
class GroupedOperands : BatchedOperands {
 public:
  static constexpr int kMostRows = 1 << 30;  // see ragged.h

  explicit GroupedOperands(Call& call) : BatchedOperands(call, kWeights), count_(extents_[0]) {}

  template <class Element, Major kMajor, int kAlignment, bool kAlignedExtent>
  BatchedMatrix rows() {
    expect_none();
    return matrix<Element, kMajor, kAlignment, kAlignedExtent>(-1, -1, Use::kOperand);
  }

  // A matrix for each group.
  template <class Element, Major kMajor, int kAlignment, bool kAlignedExtent>
  BatchedMatrix weights() {
    expect(count_);
    return by_group(matrix<Element, kMajor, kAlignment, kAlignedExtent>(-1, -1, Use::kOperand));
  }

  // Further ones, of the first ones' shape.
  template <class Element, Major kMajor, int kAlignment>
  BatchedMatrix second(Problem p) {
    if (p.n > INT32_MAX / 2) fail_shape(kWeights);  // both together are counted in 32 bits
    expect(count_);
    return by_group(matrix<Element, kMajor, kAlignment, false>(p.k, p.n, Use::kOperand));
  }

  template <class Element, Major kMajor, int kAlignment, bool kAlignedExtent>
  BatchedMatrix result() {
    expect_none();
    return by_row(matrix<Element, kMajor, kAlignment, kAlignedExtent>(-1, -1, Use::kOutput));
  }

  Problem problem(BatchedMatrix const& a, BatchedMatrix const& b, BatchedMatrix const& d) {
    Problem p = call_.problem(a, b, d);
    p.count = int(count_);
    p.inner = 1;
    // Tiles are counted in 32 bits: the smallest has 8 rows and columns, and each group may end within one.
    bool const few = (d.rows / 8 + count_) <= INT32_MAX / ((d.cols + 7) / 8 + 1);
    if (a.rows > kMostRows || !few) fail_shape(0);
    return p;
  }

  template <class Element = int32_t>  // of which a kernel's source says what DLPack calls it
  RowGroups groups(Problem p) {
    expect_none();
    return {vector<Element>(p.count).values, p.count, p.m};
  }

  template <class Element, Major kMajor, int kAlignment, bool kAlignedExtent>
  BatchedMatrix tile(Problem p) {
    expect_none();
    return by_row(matrix<Element, kMajor, kAlignment, kAlignedExtent>(p.m, p.n, Use::kTile));
  }

  template <class Element, Major kMajor, int kAlignment, bool kAlignedExtent>
  BatchedMatrix tile_output(Problem p) {
    expect_none();
    return by_row(matrix<Element, kMajor, kAlignment, kAlignedExtent>(p.m, p.n, Use::kOutput));
  }

  // A row of values for each group, or one for all.
  template <class Element>
  BatchedVector<Element> row(Problem p) {
    expect(count_);
    return by_group(vector<Element>(p.n));
  }

  template <class Element>
  BatchedVector<Element> col(Problem p) {
    expect_none();
    BatchedVector<Element> x = vector<Element>(p.m);
    x.batches = {1, 0};
    return x;
  }

  using BatchedOperands::check;

 private:
  static constexpr int kWeights = 1;

  static BatchedMatrix by_row(BatchedMatrix x) {
    x.batches = {x.ld, 0};
    return x;
  }

  template <class X>
  static X by_group(X x) {
    x.batches = {0, x.batches.inner};
    return x;
  }

  int64_t count_;
};

#endif  // CUTLASS_OPS_HOST

}  // namespace cutlass_ops
