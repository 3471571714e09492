// A tile of FP64 as threads write it to shared memory and as warps read it, by the host's compiler: what reaches the
// instructions of sm80_doubles.h must multiply to A B. The instructions are done by the numbering of registers that the PTX
// ISA gives them (mma.m16n8k4, mma.m16n8k8 and mma.m16n8k16 with .f64).

#include <cstdint>
#include <cstdio>
#include <vector>

namespace cutlass {
namespace arch {
int LaneId();  // which CUTLASS declares for nvcc alone, and names in what is not called here
}
}  // namespace cutlass

#include "cutlass/gemm/threadblock/default_mma_core_sm80.h"
#include "cutlass_ops/sm80_doubles.h"

namespace {

using cutlass::gemm::GemmShape;
using cutlass::layout::ColumnMajor;
using cutlass::layout::RowMajor;

// One warp's instruction. Lane l has rows l / 4 and l / 4 + 8 of A, column l / 4 of B, and l % 4 of each four of K.
template <class Product>
void multiply(std::vector<typename Product::FragmentC*> const& c, std::vector<typename Product::FragmentA> const& a,
              std::vector<typename Product::FragmentB> const& b) {
  constexpr int kK = Product::Shape::kK;
  double rows[16][kK], columns[kK][8];
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < kK / 2; ++i) rows[lane / 4 + i % 2 * 8][i / 2 * 4 + lane % 4] = a[lane][i];
    for (int i = 0; i < kK / 4; ++i) columns[i * 4 + lane % 4][lane / 4] = b[lane][i];
  }
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 4; ++i) {
      for (int k = 0; k < kK; ++k) (*c[lane])[i] += rows[lane / 4 + i / 2 * 8][k] * columns[k][lane % 4 * 2 + i % 2];
    }
  }
}

// Writes a matrix of shared memory as the threads of a block do.
template <class Smem, class Map, class Value>
void write(double* memory, typename Smem::TensorRef ref, bool k_along_contiguous, Value value) {
  for (int thread = 0; thread < Map::kThreads; ++thread) {
    Smem to(ref, thread);
    auto const first = Map::initial_offset(thread);
    for (int s = 0; s < Map::Iterations::kStrided; ++s) {
      for (int c = 0; c < Map::Iterations::kContiguous; ++c) {
        int const contiguous = first.contiguous() + c * Map::Delta::kContiguous;
        int const strided = first.strided() + s * Map::Delta::kStrided;
        (*to.get())[0] = k_along_contiguous ? value(strided, contiguous) : value(contiguous, strided);
        ++to;
      }
    }
  }
}

double of_a(int m, int k) { return (m * 31 + k * 7) % 64 - 32; }
double of_b(int n, int k) { return (n * 13 + k * 5 + n * k) % 64 - 32; }

// How many elements of a block's D are wrong.
// With `moved`, warps read B's other fours of K, which must be found.
template <class Block, class Warp, int InstructionK, class MajorA, class MajorB>
int wrong(int moved = 0) {
  using Core = cutlass::gemm::threadblock::DefaultMmaCore<Block, Warp, GemmShape<16, 8, InstructionK>, double, MajorA, double,
                                                          MajorB, double, RowMajor, cutlass::arch::OpClassTensorOp, 3,
                                                          cutlass::arch::OpMultiplyAdd>;
  using Op = typename Core::MmaTensorOp;
  using Product = typename Op::ArchMmaOperator;
  constexpr int kSteps = Warp::kK / Op::Policy::MmaShape::kK;
  constexpr int kRows = Warp::kM / 16, kColumns = Warp::kN / 8;
  std::vector<double> a(Block::kM * Block::kK), b(Block::kN * Block::kK);
  typename Core::SmemIteratorA::TensorRef const at_a(a.data(), Core::SmemLayoutA::packed({Block::kM, Block::kK}));
  typename Core::SmemIteratorB::TensorRef const at_b(b.data(), Core::SmemLayoutB::packed({Block::kK, Block::kN}));
  write<typename Core::SmemIteratorA, typename Core::IteratorThreadMapA>(a.data(), at_a,
                                                                         std::is_same<MajorA, RowMajor>::value, of_a);
  write<typename Core::SmemIteratorB, typename Core::IteratorThreadMapB>(b.data(), at_b,
                                                                         std::is_same<MajorB, ColumnMajor>::value, of_b);
  int wrong = 0;
  for (int warp_m = 0; warp_m < Block::kM / Warp::kM; ++warp_m) {
    for (int warp_n = 0; warp_n < Block::kN / Warp::kN; ++warp_n) {
      std::vector<typename Op::FragmentC> sums(32);
      for (auto& each : sums) each.clear();
      std::vector<typename Op::IteratorA> from_a;
      std::vector<typename Op::IteratorB> from_b;
      for (int lane = 0; lane < 32; ++lane) {
        from_a.emplace_back(at_a, lane);
        from_b.emplace_back(at_b, lane);
        from_a.back().add_tile_offset({warp_m, 0});
        from_b.back().add_tile_offset({0, warp_n});
      }
      for (int step = 0; step < kSteps; ++step) {
        std::vector<typename Op::FragmentA> parts_a(32);
        std::vector<typename Op::FragmentB> parts_b(32);
        for (int lane = 0; lane < 32; ++lane) {
          from_a[lane].set_kgroup_index(step);
          from_a[lane].load(parts_a[lane]);
          ++from_a[lane];
          from_b[lane].set_kgroup_index(step + moved);
          from_b[lane].load(parts_b[lane]);
          ++from_b[lane];
        }
        for (int m = 0; m < kRows; ++m) {
          for (int n = 0; n < kColumns; ++n) {
            std::vector<typename Product::FragmentA> x(32);
            std::vector<typename Product::FragmentB> y(32);
            std::vector<typename Product::FragmentC*> d(32);
            for (int lane = 0; lane < 32; ++lane) {
              if constexpr (InstructionK == 4) {
                x[lane] = reinterpret_cast<typename Product::FragmentA const*>(&parts_a[lane])[m];
                y[lane] = reinterpret_cast<typename Product::FragmentB const*>(&parts_b[lane])[n];
              } else {
                x[lane] = Op::rows_of(parts_a[lane], m);
                y[lane] = Op::columns_of(parts_b[lane], n);
              }
              d[lane] = reinterpret_cast<typename Product::FragmentC*>(&sums[lane]) + (m + n * kRows);
            }
            multiply<Product>(d, x, y);
          }
        }
      }
      for (int lane = 0; lane < 32; ++lane) {
        for (int m = 0; m < kRows; ++m) {
          for (int n = 0; n < kColumns; ++n) {
            for (int i = 0; i < 4; ++i) {
              int const row = warp_m * Warp::kM + m * 16 + lane / 4 + i / 2 * 8;
              int const column = warp_n * Warp::kN + n * 8 + lane % 4 * 2 + i % 2;
              double exact = 0;
              for (int k = 0; k < Block::kK; ++k) exact += of_a(row, k) * of_b(column, k);
              wrong += sums[lane][(m + n * kRows) * 4 + i] != exact;
            }
          }
        }
      }
    }
  }
  return wrong;
}

template <class Block, class Warp, int K>
void say() {
  std::printf("%dx%dx%d_%dx%d_%d row-col %d row-row %d col-col %d col-row %d\n", Block::kM, Block::kN, Block::kK,
              Warp::kM, Warp::kN, K, wrong<Block, Warp, K, RowMajor, ColumnMajor>(),
              wrong<Block, Warp, K, RowMajor, RowMajor>(), wrong<Block, Warp, K, ColumnMajor, ColumnMajor>(),
              wrong<Block, Warp, K, ColumnMajor, RowMajor>());
}

}  // namespace

int main() {
  say<GemmShape<64, 128, 16>, GemmShape<32, 64, 16>, 4>();
  say<GemmShape<32, 128, 16>, GemmShape<32, 32, 16>, 4>();
  say<GemmShape<128, 128, 32>, GemmShape<32, 64, 32>, 4>();
  say<GemmShape<64, 64, 16>, GemmShape<32, 32, 16>, 8>();
  say<GemmShape<128, 64, 32>, GemmShape<32, 32, 32>, 8>();
  say<GemmShape<128, 64, 32>, GemmShape<32, 32, 32>, 16>();
  say<GemmShape<64, 128, 32>, GemmShape<32, 32, 32>, 16>();
  say<GemmShape<32, 128, 32>, GemmShape<32, 32, 32>, 16>();
  say<GemmShape<64, 64, 32>, GemmShape<32, 32, 32>, 16>();
  std::printf("wrong row-col %d\n", wrong<GemmShape<64, 64, 16>, GemmShape<32, 32, 16>, 4, RowMajor, ColumnMajor>(1));
}
