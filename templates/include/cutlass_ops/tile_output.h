// A further (M, N) output of 8 bits for the epilogue of epilogue.h: a visitor that stores what it sees, and passes it on. It goes
// from registers to memory, so D's buffer, and the waits for it, are D's alone.

#pragma once

#include "cutlass_ops/epilogue.h"

namespace cutlass_ops {

// Its lines are whole pieces of 16 bytes, along the kernel's rows or columns. `kSides` warpgroups share the tile's columns.
template <class Tile, class EpilogueTile, class Element, bool kColumnMajor, int kSides>
struct TileOutput : Input<Matrix> {
  static_assert(sizeof(Element) == 1, "four values of a thread are a word");
  static constexpr int kRows = cute::size<0>(Tile{}), kColumns = cute::size<1>(Tile{});
  static constexpr int kPartM = cute::size<0>(EpilogueTile{}), kPartN = cute::size<1>(EpilogueTile{});
  struct SharedStorage {};

  CUTLASS_HOST_DEVICE TileOutput() {}
  CUTLASS_HOST_DEVICE TileOutput(Matrix const& params, SharedStorage const&) : params_(&params) {}

  struct Callbacks : cutlass::epilogue::fusion::EmptyConsumerStoreCallbacks {
    uint8_t* first;  // of the tile
    int64_t line;    // bytes from one to the next
    int rows, columns;  // of the output, from the tile's first ones on
    int thread;      // of one side's

    CUTLASS_DEVICE Callbacks(uint8_t* first, int64_t line, int rows, int columns, int thread)
        : first(first), line(line), rows(rows), columns(columns), thread(thread) {}

    template <class Accumulator, class Value, int kSize>
    CUTLASS_DEVICE auto visit(cutlass::Array<Accumulator, kSize> const&, int, int epi_m, int epi_n,
                              cutlass::Array<Value, kSize> const& values) {
#if defined(__CUDACC__)
      auto const results = cutlass::NumericArrayConverter<Element, Value, kSize>{}(values);
      auto const* const words = reinterpret_cast<uint32_t const*>(&results);  // two columns of a row, and of that 8 below
      Fragment const mine(thread);
      int const row = epi_m * kPartM + mine.row, column = epi_n * kPartN + mine.column;
      constexpr int kGroups = kSize / 4;  // of eight columns, of which a word has two
      constexpr int kAtOnce = !kColumnMajor && kGroups % 4 == 0 ? 4 : 1;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kGroups; i += kAtOnce) {
        if constexpr (kColumnMajor) {
          along_rows(words[i], row, column + i * 8);
        } else if constexpr (kAtOnce == 1) {
          along_columns(words[i], row, column + i * 8);
        } else {
          along_columns(words + i, row, column + i * 8);
        }
      }
#endif
      return values;
    }

   private:
#if defined(__CUDACC__)
    // Four threads of adjacent rows have four rows of two columns, and of those 8 below. Each stores four rows of one column.
    CUTLASS_DEVICE void along_rows(uint32_t word, int row, int column) const {
      bool const odd = row & 1, upper = row & 2;
      uint32_t const next = __shfl_xor_sync(0xffffffff, word, 4);
      word = odd ? __byte_perm(next, word, 0x7351) : __byte_perm(word, next, 0x6240);
      uint32_t const second = __shfl_xor_sync(0xffffffff, word, 8);
      word = upper ? __byte_perm(second, word, 0x7632) : __byte_perm(word, second, 0x5410);
      int const from = (row & ~3) + (upper ? 8 : 0), at = column + odd;
      if (from < rows && at < columns) *reinterpret_cast<uint32_t*>(first + at * line + from) = word;
    }

    // Two threads have four columns of a row, and of that 8 below. Each stores one of these.
    CUTLASS_DEVICE void along_columns(uint32_t word, int row, int column) const {
      bool const odd = column & 2;
      uint32_t const other = __shfl_xor_sync(0xffffffff, word, 1);
      word = odd ? __byte_perm(other, word, 0x7632) : __byte_perm(word, other, 0x5410);
      int const at = row + (odd ? 8 : 0), from = column & ~3;
      if (at < rows && from < columns) *reinterpret_cast<uint32_t*>(first + at * line + from) = word;
    }

    // Four threads have two of eight columns each, of four groups of eight. Each gets one group, so that they store 32 bytes of a
    // row together: memory is written in pieces of that size.
    CUTLASS_DEVICE void along_columns(uint32_t const* groups, int row, int column) const {
      int const own = thread % 4;
      bool const odd = own & 1, upper = own & 2;
      uint32_t pairs[4];  // those of two threads, of one group of the first two and of one of the others
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 4; i += 2) {
        uint32_t const got = __shfl_xor_sync(0xffffffff, odd ? groups[i] : groups[i + 1], 1);
        pairs[i] = odd ? got : groups[i];
        pairs[i + 1] = odd ? groups[i + 1] : got;
      }
      uint32_t mine[4];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 2; ++i) {
        uint32_t const got = __shfl_xor_sync(0xffffffff, upper ? pairs[i] : pairs[i + 2], 2);
        mine[i] = upper ? got : pairs[i];
        mine[i + 2] = upper ? pairs[i + 2] : got;
      }
      int const from = column - own * 2 + own * 8;
      if (from >= columns) return;
      uint2 const here{__byte_perm(mine[0], mine[1], 0x5410), __byte_perm(mine[2], mine[3], 0x5410)};
      uint2 const below{__byte_perm(mine[0], mine[1], 0x7632), __byte_perm(mine[2], mine[3], 0x7632)};
      if (row < rows) *reinterpret_cast<uint2*>(first + row * line + from) = here;
      if (row + 8 < rows) *reinterpret_cast<uint2*>(first + (row + 8) * line + from) = below;
    }
#endif
  };

  template <bool, class... Args>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(
      cutlass::epilogue::fusion::detail::ConsumerStoreArgs<Args...> const& args) {
    static_assert(kSides == kAcross<cute::remove_cvref_t<decltype(args.tiled_mma)>>);
    auto const [m, n, k, l] = args.tile_coord_mnkl;
    auto const [m_extent, n_extent, k_extent, l_extent] = args.problem_shape_mnkl;
    int64_t const row = int64_t(m) * kRows, column = int64_t(n) * kColumns, line = params_->ld;
    auto* const first = params_->ptr<uint8_t>() + (kColumnMajor ? column * line + row : row * line + column);
    return Callbacks(first, line, int(m_extent - row), int(n_extent - column), args.thread_idx % (kSides == 1 ? 256 : 128));
  }

 private:
  Matrix const* params_;
};

}  // namespace cutlass_ops
