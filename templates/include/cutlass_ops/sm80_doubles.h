// The larger FP64 instructions of sm_90, m16n8k8 and m16n8k16, for CUTLASS's 2.x main loop.
//
// Its iterators bring the operands of m16n8k4, and their order in shared memory alternates with each four of K. So an
// operand of a larger instruction is that of two or four smaller ones, one after the other: this is how the instruction
// numbers its registers, too (PTX ISA, mma.m16n8k8 and mma.m16n8k16 with .f64).

#pragma once

#include "cutlass/arch/mma_sm90.h"
#include "cutlass/gemm/warp/default_mma_tensor_op.h"
#include "cutlass/matrix_shape.h"

namespace cutlass_ops {
namespace sm80 {

template <int K>
using DoubleInstruction =
    cutlass::arch::Mma<cutlass::gemm::GemmShape<16, 8, K>, 32, double, cutlass::layout::RowMajor, double,
                       cutlass::layout::ColumnMajor, double, cutlass::layout::RowMajor, cutlass::arch::OpMultiplyAdd>;

// c += a b. CUTLASS's own call of m16n8k16 passes a register twice.
template <int K>
struct DoubleProduct : DoubleInstruction<K> {
  using Base = DoubleInstruction<K>;

  CUTLASS_DEVICE void operator()(typename Base::FragmentC& c, typename Base::FragmentA const& a,
                                 typename Base::FragmentB const& b) const {
#if defined(CUTLASS_ARCH_MMA_SM90_F64_MMA_ENABLED)
    if constexpr (K == 8) {
      asm volatile(
          "mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
          "{%0, %1, %2, %3};\n"
          : "+d"(c[0]), "+d"(c[1]), "+d"(c[2]), "+d"(c[3])
          : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(b[0]), "d"(b[1]));
    } else {
      asm volatile(
          "mma.sync.aligned.m16n8k16.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5, %6, %7, %8, %9, %10, %11}, "
          "{%12, %13, %14, %15}, {%0, %1, %2, %3};\n"
          : "+d"(c[0]), "+d"(c[1]), "+d"(c[2]), "+d"(c[3])
          : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(a[4]), "d"(a[5]), "d"(a[6]), "d"(a[7]), "d"(b[0]),
            "d"(b[1]), "d"(b[2]), "d"(b[3]));
    }
#endif
  }
};

// Reads as many fragments as a larger instruction has fours of K, and moves on by as many.
template <class Iterator, int Fours, bool KIsColumn>
class SeveralFours {
 public:
  using TensorRef = typename Iterator::TensorRef;
  using TensorCoord = typename Iterator::TensorCoord;
  using Part = typename Iterator::Fragment;
  using Fragment = cutlass::Array<double, Part::kElements * Fours>;

  CUTLASS_DEVICE SeveralFours(TensorRef const& ref, int lane) : iterator_(ref, lane) {}

  CUTLASS_DEVICE SeveralFours& add_tile_offset(TensorCoord const& tile) {
    iterator_.add_tile_offset(KIsColumn ? TensorCoord{tile.row(), tile.column() * Fours}
                                        : TensorCoord{tile.row() * Fours, tile.column()});
    return *this;
  }

  CUTLASS_DEVICE void set_kgroup_index(int step) { first_ = step * Fours; }

  CUTLASS_DEVICE void load(Fragment& fragment) const {
    Iterator at = iterator_;
    Part* const parts = reinterpret_cast<Part*>(&fragment);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Fours; ++i) {
      at.set_kgroup_index(first_ + i);
      at.load(parts[i]);
      ++at;
    }
  }

  CUTLASS_DEVICE SeveralFours& operator++() {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Fours; ++i) {
      iterator_.set_kgroup_index(first_ + i);
      ++iterator_;
    }
    return *this;
  }

 private:
  Iterator iterator_;
  int first_ = 0;
};

// A warp's tile, by an instruction of K products. `Small` multiplies it by m16n8k4.
template <class Small, int K>
struct DoubleTensorOp : Small {
  static constexpr int kFours = K / 4;
  using Product = DoubleProduct<K>;
  using Policy = cutlass::gemm::warp::MmaTensorOpPolicy<Product, cutlass::MatrixShape<1, 1>>;
  using ArchMmaOperator = Product;
  using InstructionShape = typename Product::Shape;
  using IteratorA = SeveralFours<typename Small::IteratorA, kFours, true>;
  using IteratorB = SeveralFours<typename Small::IteratorB, kFours, false>;
  using FragmentA = typename IteratorA::Fragment;
  using FragmentB = typename IteratorB::Fragment;
  using FragmentC = typename Small::FragmentC;
  using TransformedFragmentA = FragmentA;
  using TransformedFragmentB = FragmentB;
  static constexpr int kRows = Small::MmaIterations::kRow, kColumns = Small::MmaIterations::kColumn;

  // The operands of one instruction: the m-th 16 rows, and the n-th 8 columns.
  CUTLASS_HOST_DEVICE static typename Product::FragmentA rows_of(FragmentA const& a, int m) {
    typename Product::FragmentA rows;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 2 * kFours; ++i) rows[i] = a[(i / 2 * kRows + m) * 2 + i % 2];
    return rows;
  }
  CUTLASS_HOST_DEVICE static typename Product::FragmentB columns_of(FragmentB const& b, int n) {
    typename Product::FragmentB columns;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kFours; ++i) columns[i] = b[i * kColumns + n];
    return columns;
  }

  CUTLASS_DEVICE void operator()(FragmentC& d, FragmentA const& a, FragmentB const& b, FragmentC const& c) const {
    d = c;
    auto* const sums = reinterpret_cast<typename Product::FragmentC*>(&d);
    CUTLASS_PRAGMA_UNROLL
    for (int m = 0; m < kRows; ++m) {
      CUTLASS_PRAGMA_UNROLL
      for (int each = 0; each < kColumns; ++each) {
        int const n = m % 2 ? kColumns - 1 - each : each;  // there and back, which reuses registers
        Product()(sums[m + n * kRows], rows_of(a, m), columns_of(b, n));
      }
    }
  }

  CUTLASS_DEVICE void transform(FragmentA& to_a, FragmentB& to_b, FragmentA const& a, FragmentB const& b) const {
    to_a = a;
    to_b = b;
  }
};

template <class WarpShape, class LayoutA, class LayoutB, class LayoutC, int PartitionsK, bool InRowMajor, int K>
struct DefaultDoubleTensorOp {
  using Small =
      typename cutlass::gemm::warp::DefaultMmaTensorOp<WarpShape, cutlass::gemm::GemmShape<16, 8, 4>, double, LayoutA,
                                                       double, LayoutB, double, LayoutC, cutlass::arch::OpMultiplyAdd,
                                                       PartitionsK, InRowMajor>::Type;
  static_assert(!InRowMajor, "accumulators are numbered by columns");
  using Type = DoubleTensorOp<Small, K>;
  using Policy = typename Type::Policy;
};

}  // namespace sm80
}  // namespace cutlass_ops

template <class WarpShape, class LayoutA, class LayoutB, class LayoutC, int PartitionsK, bool InRowMajor>
struct cutlass::gemm::warp::DefaultMmaTensorOp<WarpShape, cutlass::gemm::GemmShape<16, 8, 8>, double, LayoutA, double,
                                               LayoutB, double, LayoutC, cutlass::arch::OpMultiplyAdd, PartitionsK,
                                               InRowMajor>
    : cutlass_ops::sm80::DefaultDoubleTensorOp<WarpShape, LayoutA, LayoutB, LayoutC, PartitionsK, InRowMajor, 8> {};

template <class WarpShape, class LayoutA, class LayoutB, class LayoutC, int PartitionsK, bool InRowMajor>
struct cutlass::gemm::warp::DefaultMmaTensorOp<WarpShape, cutlass::gemm::GemmShape<16, 8, 16>, double, LayoutA, double,
                                               LayoutB, double, LayoutC, cutlass::arch::OpMultiplyAdd, PartitionsK,
                                               InRowMajor>
    : cutlass_ops::sm80::DefaultDoubleTensorOp<WarpShape, LayoutA, LayoutB, LayoutC, PartitionsK, InRowMajor, 16> {};
