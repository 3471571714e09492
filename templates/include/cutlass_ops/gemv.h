// A kernel of ordinary loads for few rows of A. Such a GEMM takes as long as reading B. Many small thread blocks begin and
// end while others read. A pipeline would leave the memory idle while each multiprocessor fills and drains it. It runs on
// Sm80 and everything later.

#pragma once

#include "cutlass_ops/halves.h"

#include "cutlass_ops/binding.h"
#include "cutlass_ops/elements.h"
#include "cutlass_ops/epilogue_math.h"
#include "cutlass_ops/row_sums.h"

namespace cutlass_ops {
namespace gemv {

// Sixteen bytes that are read once, and so not kept in the L1 cache. They are no constants: the kernel before may write them
// after this one has begun.
CUTLASS_DEVICE uint4 read_once(uint4 const* at) {
  uint4 piece;
  asm volatile("ld.global.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(piece.x), "=r"(piece.y), "=r"(piece.z), "=r"(piece.w)
               : "l"(at));
  return piece;
}

// The means that an epilogue wants, of one row.
template <class What>
CUTLASS_DEVICE void means_of(RowSums<What> const& row, int k, float* means) {
  float const inverse = 1.0f / float(k);
  if constexpr (What::kMean) means[0] = row.sum * inverse;
  if constexpr (What::kMeanSquare) means[What::kCount - 1] = row.squares * inverse;
}

template <class Element>
CUTLASS_DEVICE void multiply(float& sum, uint4 const& x, uint4 const& w) {
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < 4; ++i) {
    float2 const a = unpack<Element>((&x.x)[i]), b = unpack<Element>((&w.x)[i]);
    sum += a.x * b.x;
    sum += a.y * b.y;
  }
}

// Rows of A that are multiplied at a time, warps of a thread block, and pieces of B that a lane has on their way.
template <int kRows_, int kWarps_, int kPieces_>
struct Shape {
  static constexpr int kRows = kRows_, kWarps = kWarps_, kPieces = kPieces_;
};

constexpr int kElements = 8;  // in a piece of 16 bytes

// A row of A, or a column of B: K lies along both.
template <class Element>
CUTLASS_DEVICE Element const* line(Matrix const& matrix, int number) {
  return static_cast<Element const*>(matrix.data) + number * matrix.ld;
}

CUTLASS_DEVICE int least(int x, int y) { return x < y ? x : y; }

// `Gemv` is what a rendered file defines:
//   ElementA; Shape; WhichMeans; kWeights: how many matrices B there are
//   kSides: 1, or 2 where the epilogue takes values of the column beside: then it computes both columns of a pair
//   struct Operands { Problem problem; Matrix a; ... };
//   static Matrix const& weight(Operands const&, int which);
//   struct Inputs;  what the epilogue reads for one element of D
//   static Inputs read(Operands const&, int row, int column);
//   static void store(Operands const&, int row, int column, Inputs const (&)[kSides],
//                     float const (&products)[kSides][kWeights], float const* means);
//
// Up to four rows: each warp has one column of B, lanes share its K, and FP32 arithmetic multiplies.
template <class Gemv>
struct ByColumn {
  using Params = typename Gemv::Operands;
  using Shape = typename Gemv::Shape;
  using Element = typename Gemv::ElementA;
  using What = typename Gemv::WhichMeans;
  static constexpr int kRows = Shape::kRows, kWarps = Shape::kWarps, kPieces = Shape::kPieces, kWeights = Gemv::kWeights;
  static constexpr int kColumns = kWarps, kSides = Gemv::kSides;

  CUTLASS_DEVICE static void tile(Params const& params, int first) {
    int const lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32, column = int(blockIdx.x) * kColumns + warp;
    int const rows = least(params.problem.m - first, kRows), k = params.problem.k;
    bool const stores = lane < rows && column < params.problem.n;
    // A warp without a column repeats another's, since the others wait for it below.
    int const read = least(column, params.problem.n - 1);
    typename Gemv::Inputs inputs[kSides];
    CUTLASS_PRAGMA_UNROLL
    for (int side = 0; side < kSides; ++side) {
      inputs[side] = Gemv::read(params, first + least(lane, rows - 1), read ^ side);
    }

    Element const *x[kRows], *w[kWeights];
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < kRows; ++r) x[r] = line<Element>(params.a, first + least(r, rows - 1));
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kWeights; ++i) w[i] = line<Element>(Gemv::weight(params, i), read);

    Sums sums;
    int const whole = k / kElements;  // pieces, of which a lane has every 32nd
    int at = lane;
    for (; at + 32 * (kPieces - 1) < whole; at += 32 * kPieces) step<true>(sums, x, w, at, whole, warp);
    if (at < whole) step<false>(sums, x, w, at, whole, warp);
    // The rest, which fills no piece, one element a lane. Nothing is read beyond a line's end.
    if (int const rest = whole * kElements + lane; rest < k) last(sums, x, w, rest, warp);
    finish(params, first, column, stores, inputs, sums);
  }

 private:
  // What a lane has added up.
  struct Sums {
    float products[kRows][kWeights] = {};
    RowSums<What> rows[kRows];
  };

  template <bool kWhole>
  CUTLASS_DEVICE static void step(Sums& sums, Element const* const (&x)[kRows], Element const* const (&w)[kWeights], int at,
                                  int whole, int warp) {
    uint4 weights[kPieces][kWeights];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kPieces; ++i) {
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kWeights; ++j) {
        weights[i][j] = kWhole || at + 32 * i < whole ? read_once(pieces(w[j]) + at + 32 * i) : uint4{0, 0, 0, 0};
      }
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kPieces; ++i) {
      if (!kWhole && at + 32 * i >= whole) break;
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < kRows; ++r) {
        uint4 const piece = pieces(x[r])[at + 32 * i];
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < kWeights; ++j) multiply<Element>(sums.products[r][j], piece, weights[i][j]);
        // The warps of a block share what is the same for all of its columns.
        if (What::kCount > 0 && i % kWarps == warp) sums.rows[r].template add<Element>(piece);
      }
    }
  }

  CUTLASS_DEVICE static uint4 const* pieces(Element const* line) { return reinterpret_cast<uint4 const*>(line); }

  CUTLASS_DEVICE static void last(Sums& sums, Element const* const (&x)[kRows], Element const* const (&w)[kWeights], int at,
                                  int warp) {
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < kRows; ++r) {
      float const value = float(x[r][at]);
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kWeights; ++j) sums.products[r][j] += value * float(w[j][at]);
      if (What::kCount > 0 && warp == 0) sums.rows[r].add(value);
    }
  }

  CUTLASS_DEVICE static void finish(Params const& params, int first, int column, bool stores,
                                    typename Gemv::Inputs const (&inputs)[kSides], Sums& sums) {
    int const lane = int(threadIdx.x) % 32;
    float products[kSides][kWeights], means[What::kCount > 0 ? What::kCount : 1] = {};
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < kRows; ++r) {
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kWeights; ++j) {
        float const sum = over_lanes(sums.products[r][j]);
        if (r == 0 || lane == r) products[0][j] = sum;
      }
    }
    if constexpr (kSides == 2) take_beside(products);
    if constexpr (What::kCount > 0) means_of(over_warps(sums.rows), params.problem.k, means);
    if (stores) Gemv::store(params, first + lane, column, inputs, products, means);
  }

  CUTLASS_DEVICE static float over_lanes(float sum) {
    CUTLASS_PRAGMA_UNROLL
    for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(0xffffffff, sum, other);
    return sum;
  }

  // Neighbouring warps have the columns of a pair.
  CUTLASS_DEVICE static void take_beside(float (&products)[kSides][kWeights]) {
    static_assert(kWarps % kSides == 0);
    __shared__ float columns[kWarps][kRows][kWeights];
    int const lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32, row = lane < kRows ? lane : 0;
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < kWeights; ++j) {
      if (lane < kRows) columns[warp][row][j] = products[0][j];
    }
    __syncthreads();
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < kWeights; ++j) products[kSides - 1][j] = columns[warp ^ 1][row][j];
    __syncthreads();  // before the next rows' sums come
  }

  // The sums of the lane's row, of which each warp has added up a part.
  CUTLASS_DEVICE static RowSums<What> over_warps(RowSums<What> const (&rows)[kRows]) {
    __shared__ float parts[kWarps][kRows][2];
    int const lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < kRows; ++r) {
      float const sum = over_lanes(rows[r].sum), squares = over_lanes(rows[r].squares);
      if (lane == 0) parts[warp][r][0] = sum, parts[warp][r][1] = squares;
    }
    __syncthreads();
    RowSums<What> result;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kWarps; ++i) {
      float const* const part = parts[i][lane < kRows ? lane : 0];
      result.add(RowSums<What>{part[0], part[1]});
    }
    __syncthreads();  // before the next rows' parts come
    return result;
  }
};

// Eight rows or sixteen: a thread block has sixteen columns of B, its warps share K, and mma.sync multiplies what lanes have
// read. The order of K within a step does not matter, as it is the same for both operands. So a lane's piece of eight
// neighbours is its share of two instructions, four each.
template <class Gemv>
struct ByTile {
  using Params = typename Gemv::Operands;
  using Shape = typename Gemv::Shape;
  using Element = typename Gemv::ElementA;
  using What = typename Gemv::WhichMeans;
  static constexpr int kRows = Shape::kRows, kWarps = Shape::kWarps, kPieces = Shape::kPieces, kWeights = Gemv::kWeights;
  static constexpr int kColumns = 16, kEights = kRows / 8, kSides = Gemv::kSides;
  static constexpr int kLanes = 4;  // that share a row or a column

  CUTLASS_DEVICE static void tile(Params const& params, int first) {
    int const thread = int(threadIdx.x), lane = thread % 32, warp = thread / 32;
    int const last_row = params.problem.m - 1, last_column = params.problem.n - 1;
    int const column = int(blockIdx.x) * kColumns;
    typename Gemv::Inputs inputs[kOutputs][kSides];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kOutputs * kSides; ++i) {
      Place const place(thread + i / kSides * kThreads);
      int const read = least(column + place.column, last_column) ^ i % kSides;
      inputs[i / kSides][i % kSides] = Gemv::read(params, least(first + place.row, last_row), read);
    }

    // Rows and columns that there are not repeat the last one, and are not stored.
    Element const *x[kEights], *w[kWeights][2];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kEights; ++i) x[i] = line<Element>(params.a, least(first + i * 8 + lane / kLanes, last_row));
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 2 * kWeights; ++i) {
      w[i / 2][i % 2] = line<Element>(Gemv::weight(params, i / 2), least(column + i % 2 * 8 + lane / kLanes, last_column));
    }

    Sums sums;
    constexpr int kStep = kLanes * kWarps;  // pieces from one of a lane's to its next
    int const k = params.problem.k, pieces = (k + kElements - 1) / kElements;
    int at = kLanes * warp;  // the first lane's piece, so that a warp stays together
    for (; (at + kStep * (kPieces - 1) + kLanes) * kElements <= k; at += kStep * kPieces) {
      step<true>(sums, x, w, at + lane % kLanes, k);
    }
    for (; at < pieces; at += kStep * kPieces) step<false>(sums, x, w, at + lane % kLanes, k);
    finish(params, first, column, inputs, sums);
  }

 private:
  static constexpr int kThreads = 32 * kWarps, kElementsOfD = kRows * kColumns;
  static constexpr int kOutputs = (kElementsOfD + kThreads - 1) / kThreads;

  // Of the number-th element of D.
  struct Place {
    int row, column;
    CUTLASS_DEVICE explicit Place(int number) : row(number / kColumns), column(number % kColumns) {}
  };

  // What a lane has added up: products of two columns and two rows, as mma.sync has them, and sums of the rows that it read.
  struct Sums {
    float products[kWeights][kEights][4] = {};
    RowSums<What> rows[kEights];
  };

  template <bool kWhole>
  CUTLASS_DEVICE static void step(Sums& sums, Element const* const (&x)[kEights], Element const* const (&w)[kWeights][2],
                                  int at, int k) {
    uint4 weights[kPieces][kWeights][2], rows[kPieces][kEights];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kPieces; ++i) {
      int const here = at + kLanes * kWarps * i;
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < 2 * kWeights; ++j) weights[i][j / 2][j % 2] = piece<kWhole, true>(w[j / 2][j % 2], here, k);
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kEights; ++j) rows[i][j] = piece<kWhole, false>(x[j], here, k);
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kPieces; ++i) {
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kEights; ++j) {
        CUTLASS_PRAGMA_UNROLL
        for (int v = 0; v < kWeights; ++v) {
          uint4 const &upper = weights[i][v][0], &lower = weights[i][v][1];
          mma(sums.products[v][j], upper.x, lower.x, upper.y, lower.y, rows[i][j].x, rows[i][j].y);
          mma(sums.products[v][j], upper.z, lower.z, upper.w, lower.w, rows[i][j].z, rows[i][j].w);
        }
        if constexpr (What::kCount > 0) sums.rows[j].template add<Element>(rows[i][j]);
      }
    }
  }

  // With zeros beyond K, where nothing is read.
  template <bool kWhole, bool kOnce>
  CUTLASS_DEVICE static uint4 piece(Element const* line, int at, int k) {
    if (kWhole || (at + 1) * kElements <= k) {
      uint4 const* const pieces = reinterpret_cast<uint4 const*>(line) + at;
      return kOnce ? read_once(pieces) : *pieces;
    }
    uint4 result{0, 0, 0, 0};
    auto* const elements = reinterpret_cast<Element*>(&result);
    for (int i = 0; i < kElements && at * kElements + i < k; ++i) elements[i] = line[at * kElements + i];
    return result;
  }

  // Sixteen columns of B by sixteen of K, times these by eight rows of A.
  CUTLASS_DEVICE static void mma(float (&sums)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                 uint32_t b1) {
    if constexpr (cutlass::platform::is_same<Element, cutlass::half_t>::value) {
      asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                   : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                   : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    } else {
      static_assert(cutlass::platform::is_same<Element, cutlass::bfloat16_t>::value, "operands are FP16 or BF16");
      asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                   : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                   : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    }
  }

  // Warps leave their parts in shared memory, and each thread joins those of an element of D.
  CUTLASS_DEVICE static void finish(Params const& params, int first, int column,
                                    typename Gemv::Inputs const (&inputs)[kOutputs][kSides], Sums& sums) {
    __shared__ float parts[kWarps][kWeights][kRows][kColumns];
    __shared__ float means_parts[What::kCount > 0 ? kWarps : 1][kRows][2];
    int const thread = int(threadIdx.x), lane = thread % 32, warp = thread / 32;
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < kEights; ++j) {
      CUTLASS_PRAGMA_UNROLL
      for (int v = 0; v < kWeights; ++v) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 4; ++i) {
          parts[warp][v][j * 8 + lane % kLanes * 2 + i % 2][lane / kLanes + i / 2 * 8] = sums.products[v][j][i];
        }
      }
      if constexpr (What::kCount > 0) {
        float sum = sums.rows[j].sum, squares = sums.rows[j].squares;
        CUTLASS_PRAGMA_UNROLL
        for (int other = 1; other < kLanes; other *= 2) {
          sum += __shfl_xor_sync(0xffffffff, sum, other);
          squares += __shfl_xor_sync(0xffffffff, squares, other);
        }
        if (lane % kLanes == 0) {
          means_parts[warp][j * 8 + lane / kLanes][0] = sum;
          means_parts[warp][j * 8 + lane / kLanes][1] = squares;
        }
      }
    }
    __syncthreads();
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kOutputs; ++i) {
      Place const place(thread + i * kThreads);
      if (place.row >= least(kRows, params.problem.m - first) || column + place.column >= params.problem.n) continue;
      float products[kSides][kWeights] = {}, means[What::kCount > 0 ? What::kCount : 1] = {};
      CUTLASS_PRAGMA_UNROLL
      for (int w = 0; w < kWarps; ++w) {
        CUTLASS_PRAGMA_UNROLL
        for (int v = 0; v < kWeights * kSides; ++v) {
          products[v % kSides][v / kSides] += parts[w][v / kSides][place.row][place.column ^ v % kSides];
        }
      }
      if constexpr (What::kCount > 0) {
        RowSums<What> row;
        CUTLASS_PRAGMA_UNROLL
        for (int w = 0; w < kWarps; ++w) {
          row.add(RowSums<What>{means_parts[w][place.row][0], means_parts[w][place.row][1]});
        }
        means_of(row, params.problem.k, means);
      }
      Gemv::store(params, first + place.row, column + place.column, inputs[i], products, means);
    }
    __syncthreads();  // before the next rows' parts come
  }
};

template <class Gemv>
struct Kernel {
  using Params = typename Gemv::Operands;
  static constexpr int kRows = Gemv::Shape::kRows, kThreads = 32 * Gemv::Shape::kWarps;
  using Work = cutlass::platform::conditional_t<(kRows < 8), ByColumn<Gemv>, ByTile<Gemv>>;
  static constexpr int kColumns = Work::kColumns;

  CUTLASS_DEVICE static void run(Params const& params) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    // What wrote the operands has ended after this.
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;");
#endif
    for (int row = int(blockIdx.y) * kRows; row < params.problem.m; row += int(gridDim.y) * kRows) Work::tile(params, row);
  }
};

}  // namespace gemv

#if CUTLASS_OPS_HOST

// Besides what the kernel needs, `Gemv` has
//   static void const* kernel(); static Operands operands(Call&);
//   static constexpr bool kOverlaps;  whether the machine code waits for the end of the kernel before it
template <class Gemv>
struct GemvEntry {
  using Kernel = gemv::Kernel<Gemv>;
  using Operands = typename Gemv::Operands;

  static cudaError_t launch(Call& call, int& status) {
    Operands const operands = Gemv::operands(call);
    call.integer();  // order and width of strips of tiles: there is one order
    call.integer();
    call.workspace(0);
    status = call.status();
    if (status != 0) return cudaSuccess;
    DeviceGuard const guard(call.device());
    return enqueue(operands, call.queue(), Gemv::kOverlaps);
  }

  static int64_t workspace_size(Problem, int, int) { return 0; }

  static cudaError_t load(int) { return cudaSuccess; }

  static Description describe() { return {1, Kernel::kThreads, 0}; }

 private:
  static cudaError_t enqueue(Operands const& operands, Queue const& queue, bool overlap) {
    constexpr int kMaxGridY = 65535;
    auto const blocks = [](int extent, int each) { return unsigned((int64_t(extent) + each - 1) / each); };
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    unsigned const rows = blocks(operands.problem.m, Kernel::kRows);
    config.gridDim = dim3(blocks(operands.problem.n, Kernel::kColumns), rows < kMaxGridY ? rows : kMaxGridY);
    config.blockDim = dim3(Kernel::kThreads);
    config.attrs = &attribute;
    config.numAttrs = overlap ? 1 : 0;
    return queue.launch(config, Gemv::kernel(), operands);
  }
};

#endif  // CUTLASS_OPS_HOST

}  // namespace cutlass_ops
