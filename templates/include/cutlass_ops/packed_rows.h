// A kernel for few rows of A and a packed weight (packed.h), by mma.sync. It takes as long as reading the weight. It runs on
// Sm80 and everything later.
//
// A thread block has some lines of the weight, 16 columns of B each. Its warps share K: each has every kWarps-th piece of all
// lines, 512 bytes that follow each other. What a lane reads of it, 16 bytes, is its share of four instructions. Rows of A come
// through shared memory, where each warp has memory of its own: it copies what its pieces need ahead, and no warp waits for
// another before all have ended.
//
// Instructions multiply the numbers exactly as they are. FP32 sums of a group are multiplied by its scale, and then added up: so
// nothing of the weight is rounded.

#pragma once

#include <utility>

#include "cutlass_ops/gemv.h"
#include "cutlass_ops/packed.h"

namespace cutlass_ops {
namespace packed_rows {

// Rows of A, warps and lines of a thread block, and pieces of each line that a lane has on their way.
template <class Numbers_, int kGroup_, int kRows_, int kWarps_, int kLines_, int kAhead_>
struct Shape {
  using Numbers = Numbers_;
  static constexpr int kGroup = kGroup_, kRows = kRows_, kWarps = kWarps_, kLines = kLines_, kAhead = kAhead_;
};

// `Gemv` is what a rendered file defines: see gemv.h. Its operands have a PackedWeight, `packed(Operands const&)`.
template <class Gemv>
struct Kernel {
  using Params = typename Gemv::Operands;
  using Shape = typename Gemv::Shape;
  using Element = typename Gemv::ElementA;
  using Numbers = typename Shape::Numbers;
  static constexpr int kRows = Shape::kRows, kWarps = Shape::kWarps, kLines = Shape::kLines, kAhead = Shape::kAhead;
  // The bound of nvcc: for 512 threads it leaves a thread 128 registers, so that sixteen warps fit on a multiprocessor.
  static constexpr int kBlock = 32 * kWarps, kThreads = kBlock > 512 ? kBlock : 512;
  static constexpr int kEights = kRows / 8, kColumns = kLine * kLines, kSides = Gemv::kSides;
  static constexpr int kOfPiece = Shape::kGroup >= kPiece ? 1 : kPiece / Shape::kGroup;  // groups
  static_assert(Gemv::kWeights == 1 && Gemv::WhichMeans::kCount == 0);
  static_assert((kAhead & (kAhead - 1)) == 0);

  CUTLASS_DEVICE static void run(Params const& params) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    // What wrote the operands has ended after this.
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;");
#endif
    for (int row = int(blockIdx.y) * kRows; row < params.problem.m; row += int(gridDim.y) * kRows) tile(params, row);
  }

 private:
  static constexpr int kElementsOfD = kRows * kColumns, kOutputs = (kElementsOfD + kBlock - 1) / kBlock;
  // A row's part of a piece in shared memory, with 16 bytes that keep rows in different banks.
  static constexpr int kPitch = kPiece * 2 + 16, kRowBytes = kRows * kPitch;
  static constexpr int kStaged = kWarps * kAhead * kRowBytes, kPartPitch = kColumns + 4;
  static constexpr int kParts = kWarps * kRows * kPartPitch * int(sizeof(float));

  // What a lane reads of a piece: numbers of each line, and what its groups have.
  struct Piece {
    uint4 numbers[kLines];
    uint32_t scales[kLines][kOfPiece][Numbers::kParts];
  };

  struct Place {
    int row, column;
    CUTLASS_DEVICE explicit Place(int number) : row(number / kColumns), column(number % kColumns) {}
  };

  // Reads pieces of a warp: of the weight into registers, of A into shared memory. A warp's pieces are as far from each other as
  // their groups are, so that places are known but for one address of each.
  struct Reader {
    char const *numbers, *scales, *x;    // of the warp's next piece, as this lane reads them
    uint32_t line, scales_of_line;       // bytes from one line to the next
    int64_t four_rows;                   // bytes from a row of A to the fourth one after it
    uint32_t to;
    int rows;

    static constexpr int kBetween = Shape::kGroup == kWholeK ? 0 : kWarps * kPiece / Shape::kGroup;  // groups
    static constexpr int kGroupBytes = Numbers::kParts * kLine * 2, kPieceBytes = kLine * kPiece / 2;
    static_assert(Shape::kGroup == kWholeK || kWarps * kPiece % Shape::kGroup == 0);

    CUTLASS_DEVICE Reader(Params const& params, int first_row, int first_line, uint32_t staged) : to(staged) {
      int const lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
      PackedWeight const weight = Gemv::packed(params);
      rows = gemv::least(params.problem.m - first_row, kRows);
      line = uint32_t(weight.k) * (kLine / 2), scales_of_line = uint32_t(weight.groups) * kGroupBytes;
      int const group = Shape::kGroup == kWholeK ? 0 : warp * kPiece / Shape::kGroup;
      numbers = static_cast<char const*>(weight.values) + int64_t(first_line) * line + warp * kPieceBytes + lane * 16;
      scales = static_cast<char const*>(weight.scales) + int64_t(first_line) * scales_of_line + group * kGroupBytes + lane / 4 * 4;
      auto const* const a = gemv::line<Element>(params.a, first_row) + lane / 8 * params.a.ld;
      x = reinterpret_cast<char const*>(a + warp * kPiece + lane % 8 * 8);
      four_rows = 4 * params.a.ld * int64_t(sizeof(Element));
    }

    // Reads the weight's piece that comes kIndex turns after the next one.
    template <int kIndex>
    CUTLASS_DEVICE void weight(Piece& piece) const {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kLines; ++i) {
        auto const* const at = numbers + uint32_t(i) * line + kIndex * kWarps * kPieceBytes;
        piece.numbers[i] = gemv::read_once(reinterpret_cast<uint4 const*>(at));
        CUTLASS_PRAGMA_UNROLL
        for (int g = 0; g < kOfPiece; ++g) {
          CUTLASS_PRAGMA_UNROLL
          for (int part = 0; part < Numbers::kParts; ++part) {
            int const bytes = (kIndex * kBetween + g) * kGroupBytes + part * kLine * 2;
            piece.scales[i][g][part] = *reinterpret_cast<uint32_t const*>(scales + uint32_t(i) * scales_of_line + bytes);
          }
        }
      }
    }

    // The same of A. Rows that there are not become zeros.
    template <int kIndex>
    CUTLASS_DEVICE void of_a(int stage) const {
      int const lane = int(threadIdx.x) % 32;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kRows / 4; ++i) {
        int const row = i * 4 + lane / 8, bytes = row < rows ? 16 : 0;
        // Where nothing is read, an address that there is.
        char const* const from = row < rows ? x + i * four_rows + kIndex * kWarps * kPiece * 2 : scales;
        asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(to + stage * kRowBytes + row * kPitch +
                                                                           lane % 8 * 16),
                     "l"(from), "r"(bytes)
                     : "memory");
      }
    }

    CUTLASS_DEVICE void advance() {
      numbers += kAhead * kWarps * kPieceBytes;
      scales += kAhead * kBetween * kGroupBytes;
      x += kAhead * kWarps * kPiece * 2;
    }
  };

  CUTLASS_DEVICE static void tile(Params const& params, int first) {
    __shared__ alignas(16) char memory[kStaged > kParts ? kStaged : kParts];
    int const thread = int(threadIdx.x), warp = thread / 32, lines = Gemv::packed(params).lines;
    // The last block has as many lines as the others: it repeats some, and stores its own columns.
    int const first_line = gemv::least(int(blockIdx.x) * kLines, lines - kLines), column = first_line * kLine;
    typename Gemv::Inputs inputs[kOutputs][kSides];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kOutputs * kSides; ++i) {
      Place const place(thread + i / kSides * kBlock);
      inputs[i / kSides][i % kSides] = Gemv::read(params, gemv::least(first + place.row, params.problem.m - 1),
                                                  (column + place.column) ^ i % kSides);
    }

    uint32_t const staged = uint32_t(__cvta_generic_to_shared(memory)) + warp * kAhead * kRowBytes;
    Reader reader(params, first, first_line, staged);
    int const pieces = params.problem.k / kPiece;
    float sums[kLines][kEights][4] = {};
    Piece ahead[kAhead];
    begin_all(reader, ahead, pieces - warp, std::make_integer_sequence<int, kAhead>{});
    for (int left = pieces - warp; left > 0; left -= kWarps * kAhead) {
      turn(reader, ahead, sums, left, std::make_integer_sequence<int, kAhead>{});
      reader.advance();
    }
    finish(params, first, column, inputs, sums, reinterpret_cast<float*>(memory));
  }

  template <int... kIndex>
  CUTLASS_DEVICE static void begin_all(Reader const& reader, Piece (&ahead)[kAhead], int left,
                                       std::integer_sequence<int, kIndex...>) {
    (begin<kIndex>(reader, ahead[kIndex], kIndex, left), ...);
  }

  // Multiplies the pieces that were begun, and begins as many. `left` counts pieces from the warp's next one on, also others'.
  template <int... kIndex>
  CUTLASS_DEVICE static void turn(Reader const& reader, Piece (&ahead)[kAhead], float (&sums)[kLines][kEights][4], int left,
                                  std::integer_sequence<int, kIndex...>) {
    (
        [&] {
          asm volatile("cp.async.wait_group %0;" ::"n"(kAhead - 1) : "memory");
          __syncwarp();
          if (kIndex * kWarps < left) multiply(sums, ahead[kIndex], reader.to + kIndex * kRowBytes);
          __syncwarp();  // before the copies for the next piece come
          begin<kIndex + kAhead>(reader, ahead[kIndex], kIndex, left);
        }(),
        ...);
  }

  template <int kIndex>
  CUTLASS_DEVICE static void begin(Reader const& reader, Piece& piece, int stage, int left) {
    if (kIndex * kWarps < left) {
      reader.template weight<kIndex>(piece);
      reader.template of_a<kIndex>(stage);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  }

  // Adds the products of a piece.
  CUTLASS_DEVICE static void multiply(float (&sums)[kLines][kEights][4], Piece const& piece, uint32_t staged) {
    int const lane = int(threadIdx.x) % 32;
    uint32_t x[kEights][8];  // for each of four instructions two registers
    CUTLASS_PRAGMA_UNROLL
    for (int e = 0; e < kEights; ++e) {
      CUTLASS_PRAGMA_UNROLL
      for (int half = 0; half < 2; ++half) {
        uint32_t const at = staged + (e * 8 + lane % 8) * kPitch + (half * 4 + lane / 8) * 16;
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x[e][half * 4]), "=r"(x[e][half * 4 + 1]), "=r"(x[e][half * 4 + 2]), "=r"(x[e][half * 4 + 3])
                     : "r"(at)
                     : "memory");
      }
    }
    constexpr int kOfGroup = 4 / kOfPiece;  // instructions
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kLines; ++i) {
      CUTLASS_PRAGMA_UNROLL
      for (int g = 0; g < kOfPiece; ++g) {
        GroupOfRows<Numbers> group{};
        if constexpr (Numbers::kParts == 2) {
          group.minus[0] = both<0>(piece.scales[i][g][1]), group.minus[1] = both<1>(piece.scales[i][g][1]);
        }
        float products[kEights][4] = {};
        CUTLASS_PRAGMA_UNROLL
        for (int j = g * kOfGroup; j < (g + 1) * kOfGroup; ++j) {
          uint32_t numbers[4];
          convert<Numbers, Element>(numbers, (&piece.numbers[i].x)[j], group);
          CUTLASS_PRAGMA_UNROLL
          for (int e = 0; e < kEights; ++e) mma(products[e], numbers, x[e][2 * j], x[e][2 * j + 1]);
        }
        float2 const scales = unpack<Element>(piece.scales[i][g][0]);
        CUTLASS_PRAGMA_UNROLL
        for (int e = 0; e < kEights; ++e) {
          CUTLASS_PRAGMA_UNROLL
          for (int v = 0; v < 4; ++v) {
            sums[i][e][v] = fmaf(products[e][v], v < 2 ? scales.x : scales.y, sums[i][e][v]);
          }
        }
      }
    }
  }

  CUTLASS_DEVICE static void mma(float (&sums)[4], uint32_t const (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (cutlass::platform::is_same<Element, cutlass::half_t>::value) {
      asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                   : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
      asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                   : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
  }

  // Adds up what warps have, and computes the epilogue.
  CUTLASS_DEVICE static void finish(Params const& params, int first, int column,
                                    typename Gemv::Inputs const (&inputs)[kOutputs][kSides],
                                    float const (&sums)[kLines][kEights][4], float* parts) {
    int const thread = int(threadIdx.x), lane = thread % 32, warp = thread / 32;
    int const own = int(blockIdx.x) * kColumns - column;  // the first column that no other block stores
    __syncthreads();  // no warp reads its part of A any more
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kLines; ++i) {
      CUTLASS_PRAGMA_UNROLL
      for (int e = 0; e < kEights; ++e) {
        CUTLASS_PRAGMA_UNROLL
        for (int v = 0; v < 4; ++v) {
          int const row = e * 8 + lane % 4 * 2 + v % 2, across = i * kLine + lane / 4 + v / 2 * 8;
          parts[(warp * kRows + row) * kPartPitch + across] = sums[i][e][v];
        }
      }
    }
    __syncthreads();
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kOutputs; ++i) {
      Place const place(thread + i * kBlock);
      if (place.row >= gemv::least(kRows, params.problem.m - first) || place.column < own) continue;
      float products[kSides][1] = {};
      CUTLASS_PRAGMA_UNROLL
      for (int w = 0; w < kWarps; ++w) {
        CUTLASS_PRAGMA_UNROLL
        for (int side = 0; side < kSides; ++side) {
          products[side][0] += parts[(w * kRows + place.row) * kPartPitch + (place.column ^ side)];
        }
      }
      Gemv::store(params, first + place.row, column + place.column, inputs[i], products, nullptr);
    }
    __syncthreads();  // before the next rows' parts come
  }
};

}  // namespace packed_rows

#if CUTLASS_OPS_HOST

// As GemvEntry, with thread blocks of several lines.
template <class Gemv>
struct PackedRowsEntry {
  using Kernel = packed_rows::Kernel<Gemv>;
  using Operands = typename Gemv::Operands;

  static cudaError_t launch(Call& call, int& status) {
    Operands const operands = Gemv::operands(call);
    call.integer();  // order and width of strips of tiles: there is one order
    call.integer();
    call.workspace(0);
    status = call.status();
    if (status == 0 && Gemv::packed(operands).lines < Gemv::Shape::kLines) status = int(Reason::kShape);
    if (status != 0) return cudaSuccess;
    DeviceGuard const guard(call.device());
    constexpr int kMaxGridY = 65535;
    auto const blocks = [](int extent, int each) { return unsigned((int64_t(extent) + each - 1) / each); };
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    unsigned const rows = blocks(operands.problem.m, Kernel::kRows);
    config.gridDim = dim3(blocks(operands.problem.n, Kernel::kColumns), rows < kMaxGridY ? rows : kMaxGridY);
    config.blockDim = dim3(Kernel::kBlock);
    config.attrs = &attribute;
    config.numAttrs = Gemv::kOverlaps ? 1 : 0;
    return call.queue().launch(config, Gemv::kernel(), operands);
  }

  static int64_t workspace_size(Problem, int, int) { return 0; }

  static cudaError_t load(int) { return cudaSuccess; }

  static Description describe() { return {1, Kernel::kBlock, 0}; }
};

#endif  // CUTLASS_OPS_HOST

}  // namespace cutlass_ops
