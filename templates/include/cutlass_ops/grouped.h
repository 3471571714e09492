// Groups of rows: A (T, K) has E groups of rows that follow each other, and each is multiplied by a matrix of its own of
// B (E, K, N). Where groups end is known on the device alone, when the kernel runs.
//
// Or A is (E, M, K), with room for M rows in each group, of which the first few are there: how many, the device knows. To a
// kernel that is A (E * M, K) with gaps between groups. The same kernel serves both: see RowGroups.
//
// What a kernel finds by its batch has two coordinates here, the group's first row and its number, and so two distances, in
// the places of those between batches (`Batches`): tensors with a row for each of A's have one from row to row, those of
// groups one from group to group.

#pragma once

#include "cutlass_ops/batched.h"

namespace cutlass_ops {

// Where groups end: in A if they follow each other, and else in the room of each, which is how many rows it has. Ends that
// fall, are negative or beyond the last row give other rows than meant, but rows of A, and of the group's own room.
struct RowGroups {
  int32_t const* ends = nullptr;  // on the device
  int count = 0;
  int rows = 0;  // of A, or those for which a group has room
  int room = 0;  // the same if groups have room, else 0: so a group's room begins at group * room, and else anywhere

  struct Rows {
    int first;
    int size;
  };

  // Rows of all groups together at most.
  int all() const { return room > 0 ? count * room : rows; }

  CUTLASS_DEVICE int end(int group) const {
    int const given = ends[group];
    return group * room + (given < 0 ? 0 : given < rows ? given : rows);
  }

  // The first row of a group, if those before it end there. Behind the last group, the product may wrap around.
  CUTLASS_DEVICE int begin(int group, int before) const {
    int const own = int(unsigned(group) * unsigned(room));
    return before < own ? own : before;
  }

  CUTLASS_DEVICE Rows of(int group) const {
    int const first = begin(group, group == 0 ? 0 : end(group - 1)), last = end(group);
    return {first, last > first ? last - first : 0};
  }
};

// Scales of blocks along K: of A's rows, or of the groups' matrices. Those of a group begin at its first row, or by its number.
struct GroupedScales : StridedScales {
  int64_t by_row = 0, by_group = 0;

  CUTLASS_DEVICE void move_to(int row, int group) { data += row * by_row + group * by_group; }
};

#if CUTLASS_OPS_HOST

// Reads the arguments of one call: A, B, D, where groups end, and what the epilogue reads and writes. If A has three dimensions,
// (E, M, K), all that has a row for each of its rows does as well.
class GroupedOperands : BatchedOperands {
 public:
  static constexpr int kMostRows = 1 << 30;  // see ragged.h

  explicit GroupedOperands(Call& call) : BatchedOperands(call, kWeights), count_(extents_[0]) {
    DLTensor const* const a = given(0);
    has_room_ = a != nullptr && a->ndim == 3;
    if (has_room_ && a->shape[0] != count_) fail_shape(0);
  }

  template <class Element, Major kMajor, int kAlignment, bool kAlignedExtent>
  BatchedMatrix rows() {
    BatchedMatrix x = of_rows<Element, kMajor, kAlignment, kAlignedExtent>(-1, -1, Use::kOperand);
    x.batches = {};
    return x;
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
    return of_rows<Element, kMajor, kAlignment, kAlignedExtent>(-1, -1, Use::kOutput);
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
    int const own = has_room_ ? int(p.m / count_) : p.m;
    return {vector<Element>(p.count).values, p.count, own, has_room_ ? own : 0};
  }

  template <class Element, Major kMajor, int kAlignment, bool kAlignedExtent>
  BatchedMatrix tile(Problem p) {
    return of_rows<Element, kMajor, kAlignment, kAlignedExtent>(p.m, p.n, Use::kTile);
  }

  template <class Element, Major kMajor, int kAlignment, bool kAlignedExtent>
  BatchedMatrix tile_output(Problem p) {
    return of_rows<Element, kMajor, kAlignment, kAlignedExtent>(p.m, p.n, Use::kOutput);
  }

  // A row of values for each group, or one for all.
  template <class Element>
  BatchedVector<Element> row(Problem p) {
    expect(count_);
    return by_group(vector<Element>(p.n));
  }

  template <class Element>
  BatchedVector<Element> col(Problem p) {
    expect_rows();
    int64_t const own = has_room_ ? p.m / count_ : p.m;
    BatchedVector<Element> x = vector<Element>(own);
    if (x.values != nullptr && has_room_ && count_ > 1 && x.batches.inner != own) fail_last(Reason::kMajor);
    x.batches = {1, 0};
    return x;
  }

  // Of A's rows, with any strides: (T, steps) or (E, M, steps).
  template <class Element>
  GroupedScales row_scales(Problem p, int64_t k_block) {
    int64_t const steps = (p.k + k_block - 1) / k_block;
    if (has_room_) return by_number(strided<Element, 3>({count_, p.m / count_, steps}));
    auto const x = strided<Element, 2>({p.m, steps});
    return {{x.values, x.strides[0], x.strides[1], p.m - 1}, x.strides[0], 0};
  }

  // Of the groups' matrices, with any strides: a line of steps for each `block` columns.
  template <class Element>
  GroupedScales weight_scales(Problem p, int64_t block, int64_t k_block) {
    int64_t const steps = (p.k + k_block - 1) / k_block, rows = (p.n + block - 1) / block;
    GroupedScales x = by_number(strided<Element, 3>({count_, rows, steps}));
    x.last = int(rows) - 1;
    return x;
  }

  using BatchedOperands::check;

 private:
  template <class Scales>
  static GroupedScales by_number(Scales const& x) {
    return {{x.values, x.strides[1], x.strides[2], 0}, 0, x.strides[0]};
  }

  static constexpr int kWeights = 1;

  void expect_rows() { has_room_ ? expect(count_) : expect_none(); }

  // A matrix with a row for each of A's. Where groups have room, one distance leads through the rows of all of them.
  template <class Element, Major kMajor, int kAlignment, bool kAlignedExtent>
  BatchedMatrix of_rows(int64_t rows, int64_t cols, Use use) {
    expect_rows();
    if (has_room_ && rows >= 0) rows /= count_;
    BatchedMatrix x = matrix<Element, kMajor, kAlignment, kAlignedExtent>(rows, cols, use);
    if (has_room_ && x.data != nullptr) {
      if (x.rows == 1 && count_ > 1) x.ld = x.batches.inner;
      if (x.ld < x.cols || (count_ > 1 && x.batches.inner != x.rows * x.ld)) fail_last(Reason::kMajor);
      x.rows *= count_;
    }
    x.batches = {x.ld, 0};
    return x;
  }

  template <class X>
  static X by_group(X x) {
    x.batches = {0, x.batches.inner};
    return x;
  }

  int64_t count_;
  bool has_room_ = false;  // groups of A (E, M, K)
};

#endif  // CUTLASS_OPS_HOST

}  // namespace cutlass_ops
