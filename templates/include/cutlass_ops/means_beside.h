// Means of A's rows, taken beside the main loop of Sm90 kernels by warps that would be idle: each row once in the whole
// grid. An epilogue waits for the rows of its tile.

#pragma once

#include "cutlass_ops/epilogue.h"
#include "cutlass_ops/row_means.h"
#include "cutlass_ops/rows_beside.h"
#include "cutlass_ops/sm90_gemm.h"

namespace cutlass_ops {

// A mean, or nothing yet: zero. Means are whole words, so nobody sees a part of one, and no other memory depends on them.
struct Awaited {
  uint32_t bits;

  Awaited() = default;
  CUTLASS_HOST_DEVICE explicit Awaited(float mean) : bits(~__builtin_bit_cast(uint32_t, mean)) {}
  CUTLASS_HOST_DEVICE explicit operator float() const { return __builtin_bit_cast(float, ~bits); }

  // The NaN of arithmetic has other bits than those that mean nothing. This makes sure of it.
  CUTLASS_DEVICE static void store(float* at, float mean) {
    uint32_t const bits = Awaited(mean).bits;
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(at), "r"(bits == 0 ? 0x80000000u : bits) : "memory");
  }
};

CUTLASS_DEVICE Awaited peek(Awaited const* at) {
  Awaited found;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(found.bits) : "l"(at) : "memory");
  return found;
}
// The warp that claimed the row is running, and waits for nobody.
CUTLASS_DEVICE void settle(Awaited& found, Awaited const* at) {
  while (found.bits == 0) {
    asm volatile("nanosleep.u32 20;");
    found = peek(at);
  }
}

// Called when a tile has been read, by a warp: the last reader leaves all as it was found.
CUTLASS_DEVICE void Vector<Awaited>::forget(int tile, int first, int rows, int lane) const {
#if defined(__CUDACC__)
  unsigned before = 0;
  if (lane == 0) before = atomicAdd(seen + tile, 1u);
  if (__shfl_sync(0xffffffff, before, 0) != unsigned(readers) - 1) return;
  for (int i = lane; i < rows; i += 32) values[first + i].bits = 0;
  if (lane == 0) seen[tile] = 0;
#endif
}

template <>
struct AfterReading<Awaited> {
  Vector<Awaited> const& means;
  int tile, rows, left;

  CUTLASS_DEVICE AfterReading(Vector<Awaited> const& means, int tile, int rows, int extent)
      : means(means), tile(tile), rows(rows), left(extent - tile * rows) {}
  CUTLASS_DEVICE void operator()(int thread) const {
    if (thread < 32) means.forget(tile, tile * rows, cute::min(rows, left), thread);
  }
};

// A warp's rows read into registers, so many pieces at a time.
template <class Reader, int kAtOnce>
struct DirectRows {
  typename Reader::Params const& params;

  CUTLASS_DEVICE void start(unsigned) const {}
  CUTLASS_DEVICE auto sums(unsigned row, unsigned) const { return Reader::template sums<kAtOnce>(params, row); }
  CUTLASS_DEVICE void end() const {}
};

// A warp's rows read by way of shared memory, where pieces that are on their way take no registers. A lane reads back what
// it copied itself, so none waits for another. The first pieces of the next row follow the last of this one.
template <class Reader, int kWarps>
class StagedRows {
  using Params = typename Reader::Params;
  using Sums = RowSums<typename Reader::What>;
  static constexpr int kDepth = 8;  // pieces of a lane that are on their way
  static constexpr int kSteps = kSegment / Reader::kStep, kRound = Reader::kSegments * kSegment;

 public:
  // Called by warps 1 to kWarps of a thread block.
  CUTLASS_DEVICE explicit StagedRows(Params const& params) : params_(params) {
    __shared__ uint4 pieces[kWarps * kDepth * 32];
    unsigned const warp = threadIdx.x / 32 - 1, lane = threadIdx.x % 32;
    slots_ = cute::cast_smem_ptr_to_uint(pieces + warp * (kDepth * 32) + lane);
    begin_ = lane / kRowLanes * kSegment + lane % kRowLanes * kRowPiece;
    unsigned const k = unsigned(params.k), last = cute::min(k % kRound, unsigned(kSegment));
    steps_ = cute::max(k / kRound * kSteps + cute::ceil_div(last, unsigned(Reader::kStep)), unsigned(kDepth));
  }

  CUTLASS_DEVICE void start(unsigned row) const {
    CUTLASS_PRAGMA_NO_UNROLL
    for (unsigned step = 0; step < kDepth; ++step) copy(row, step, step);
  }

  // The sums of a row that was started; starts the next one, which may be beyond the last.
  CUTLASS_DEVICE Sums sums(unsigned row, unsigned next) {
    Sums result, segment;
    CUTLASS_PRAGMA_NO_UNROLL
    for (unsigned step = 0; step < steps_; ++step, ++taken_) {
      segment.template add<typename Reader::Element>(oldest());
      unsigned const ahead = step + kDepth;
      bool const here = ahead < steps_;
      copy(here ? row : next, here ? ahead : ahead - steps_, taken_);
      if ((step + 1) % kSteps != 0 && step + 1 != steps_) continue;
      Reader::close(params_, row, step / kSteps * kRound, segment, result);
      segment = {};
    }
    result.share();
    return result;
  }

  // To be called before the warp ends.
  CUTLASS_DEVICE void end() const { asm volatile("cp.async.wait_all;" ::: "memory"); }

 private:
  // The element at which a lane's piece of a step begins.
  CUTLASS_DEVICE unsigned first(unsigned step) const {
    return step / kSteps * kRound + step % kSteps * Reader::kStep + begin_;
  }

  // Copies a step's piece into a slot, or zeros where the row has ended or is none.
  CUTLASS_DEVICE void copy(unsigned row, unsigned step, unsigned slot) const {
    unsigned const k = first(step);
    bool const any = row < unsigned(params_.rows) && k + kRowPiece <= unsigned(params_.k);
    auto* const from = params_.a + (any ? int64_t(row) * params_.ld + k : 0);
    asm volatile(
        "cp.async.cg.shared.global [%0], [%1], 16, %2;\n"
        "cp.async.commit_group;" ::"r"(at(slot)),
        "l"(from), "r"(any ? 16 : 0)
        : "memory");
  }

  CUTLASS_DEVICE uint4 oldest() const {
    uint4 piece;
    asm volatile(
        "cp.async.wait_group %5;\n"
        "ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
        : "=r"(piece.x), "=r"(piece.y), "=r"(piece.z), "=r"(piece.w)
        : "r"(at(taken_)), "n"(kDepth - 1)
        : "memory");
    return piece;
  }

  CUTLASS_DEVICE uint32_t at(unsigned slot) const { return slots_ + slot % kDepth * (32 * sizeof(uint4)); }

  Params const& params_;
  uint32_t slots_;
  unsigned begin_, steps_, taken_ = 0;
};

// What a main loop has beside it.
template <class Reader_>
struct SharedRows {
  using Reader = Reader_;
  using Params = RowsToShare<typename Reader::Element>;

  // The work of idle warps, `kWarps` of each thread block. They claim row after row, as do the warps of blocks that start
  // later. None waits for another, so all rows are taken even if parts of the grid have yet to start. While a warp adds up
  // one row, its next one is on its way to the L2 cache. Where registers do not hold a segment's pieces, shared memory does.
  template <int kWarps, int kAtOnce>
  CUTLASS_DEVICE static void take(Params const& params) {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    constexpr bool kStaged = Reader::kWhole && kAtOnce < kSegment / Reader::kStep;
    using Reading = cute::conditional_t<kStaged, StagedRows<Reader, kWarps>, DirectRows<Reader, kAtOnce>>;
    Reading reading{params};
    auto const rows = unsigned(params.rows);
    int const lane = int(threadIdx.x) % 32;
    auto const claim = [&] { return lane == 0 ? atomicAdd(params.beside.claimed, 1u) : 0; };
    auto const known = [](unsigned claimed) { return __shfl_sync(0xffffffff, claimed, 0); };
    unsigned row = known(claim());
    unsigned claimed = row < rows ? claim() : 0;
    reading.start(row);
    while (row < rows) {
      unsigned const next = known(claimed);
      if (next < rows) {
        claimed = claim();
        if (lane == 0) Reader::prefetch(params, next);
      }
      auto const sums = reading.sums(row, next);
      if (lane == 0) Reader::publish(params, row, sums, Awaited::store);
      row = next;
    }
    reading.end();
    // In the end each warp of the grid claims one row beyond the last. The last of these claims resets the counter.
    if (lane == 0 && row == rows + kWarps * gridDim.x * gridDim.y - 1) *params.beside.claimed = 0;
  }
};

}  // namespace cutlass_ops
