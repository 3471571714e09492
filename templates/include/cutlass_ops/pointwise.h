// A kernel for an epilogue that reads no product, such as the part of a backward between two GEMMs: it reads (M, N) tensors,
// computes each element of D, and reduces rows and columns. A warp has 256 columns of its rows, a thread eight neighbours.
// While it computes a row, its next one is on its way. Reductions have two steps and always give the same bits, as those of
// sm80_reduction.h. It runs on Sm80 and everything later.

#pragma once

#include "cutlass_ops/halves.h"

#include "cutlass/array.h"

#include "cutlass_ops/binding.h"
#include "cutlass_ops/elements.h"
#include "cutlass_ops/epilogue_math.h"
#include "cutlass_ops/reduce.h"
#include "cutlass_ops/sm80_reduction.h"

namespace cutlass_ops {
namespace pointwise {

constexpr int kVector = 8;   // neighbours of a row that a thread has
constexpr int kWarps = 8;    // of a thread block; each has every eighth of its rows
constexpr int kColumns = 32 * kVector;

// Eight neighbours of a row of an (M, N) tensor, which is aligned to so many elements. In memory they lie beside each other
// if the tensor is row-major.
template <class Element_, Major kMajor, int kAlignment>
struct Piece {
  using Element = Element_;
  // Bytes of an access, if they are all there and lie at a multiple of it.
  static constexpr int kBytes = kVector * int(sizeof(Element)), kAccess = kBytes < 16 ? kBytes : 16;
  static constexpr bool kWhole = kMajor == Major::kRow && kAlignment * int(sizeof(Element)) >= kAccess;
  using Access = cutlass::AlignedArray<Element, kAccess / int(sizeof(Element)), kAccess>;

  alignas(kAccess) Element values[kVector];

  CUTLASS_DEVICE static Element* at(Matrix const& x, int row, int column) { return &element<Element, kMajor>(x, row, column); }

  // What lies beyond the last column is 0, and is not read.
  CUTLASS_DEVICE void load(Matrix const& x, int row, int column, int columns) {
    if (kWhole && column + kVector <= columns) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kBytes / kAccess; ++i) {
        reinterpret_cast<Access*>(values)[i] = reinterpret_cast<Access const*>(at(x, row, column))[i];
      }
    } else {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kVector; ++i) values[i] = column + i < columns ? *at(x, row, column + i) : Element(0.0f);
    }
  }

  CUTLASS_DEVICE void set(int i, float value) { values[i] = Element(value); }

  CUTLASS_DEVICE void store(Matrix const& x, int row, int column, int columns) const {
    if (kWhole && column + kVector <= columns) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kBytes / kAccess; ++i) {
        reinterpret_cast<Access*>(at(x, row, column))[i] = reinterpret_cast<Access const*>(values)[i];
      }
    } else {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kVector; ++i) {
        if (column + i < columns) *at(x, row, column + i) = values[i];
      }
    }
  }
};

CUTLASS_HOST_DEVICE int parts_of(int extent, int each) { return int((int64_t(extent) + each - 1) / each); }

// Joins the parts that the lanes of a warp have of a row, and leaves one for each 256 columns: partial[strip * M + row].
template <class Reduce>
CUTLASS_DEVICE void join_row(typename Reduce::State part, typename Reduce::State* partial, int row, int column,
                             Problem const& problem) {
#if defined(__CUDACC__) || defined(CUTLASS_OPS_ON_THE_HOST)
  CUTLASS_PRAGMA_UNROLL
  for (int lanes = 16; lanes > 0; lanes /= 2) part = Reduce::combine(part, shuffle_xor(part, lanes));
  if (threadIdx.x % 32 == 0) partial[int64_t(column / kColumns) * problem.m + row] = part;
#endif
}

template <class Pointwise>
struct Kernel {
  using Params = typename Pointwise::Operands;
  static constexpr int kThreads = 32 * kWarps, kTileRows = kWarps * Pointwise::kRows;

  // Joins the parts that the warps of a thread block have of each column, one reduction after the other in the same shared
  // memory, and leaves one for each tile: partial[tile * N + column].
  struct Join {
    int tile, strip, n;
    char* memory;
    template <class Reduce>
    CUTLASS_DEVICE void columns(typename Reduce::State const (&parts)[kVector], typename Reduce::State* partial) const {
#if defined(__CUDACC__) || defined(CUTLASS_OPS_ON_THE_HOST)
      using State = typename Reduce::State;
      static_assert(sizeof(State) <= Pointwise::kStateBytes);
      auto& shared = *reinterpret_cast<State(*)[kWarps][kColumns]>(memory);
      int const thread = int(threadIdx.x);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kVector; ++i) shared[thread / 32][thread % 32 * kVector + i] = parts[i];
      __syncthreads();
      static_assert(kThreads == kColumns, "a thread joins one column");
      State joined = shared[0][thread];
      CUTLASS_PRAGMA_UNROLL
      for (int warp = 1; warp < kWarps; ++warp) joined = Reduce::combine(joined, shared[warp][thread]);
      int const column = strip * kColumns + thread;
      if (column < n) partial[int64_t(tile) * n + column] = joined;
      __syncthreads();  // before the next reduction's parts come
#endif
    }
  };

  CUTLASS_DEVICE static void run(Params const& params) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    // What wrote the tensors has ended after this.
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;");
#endif
    int const m = params.problem.m, n = params.problem.n, strips = parts_of(n, kColumns);
    int const tile = int(blockIdx.x / strips), strip = int(blockIdx.x % strips);
    int const column = strip * kColumns + int(threadIdx.x) % 32 * kVector;
    int const first = tile * kTileRows + int(threadIdx.x) / 32;
    int const count = first < m ? least(Pointwise::kRows, parts_of(m - first, kWarps)) : 0;

    typename Pointwise::Fixed fixed;
    fixed.load(params, column);
    typename Pointwise::Columns columns;
    columns.begin();
    typename Pointwise::Pieces next;
    if (count > 0) next.load(params, first, column);
    for (int i = 0; i < count; ++i) {
      typename Pointwise::Pieces const now = next;
      if (i + 1 < count) next.load(params, first + (i + 1) * kWarps, column);
      Pointwise::row(params, now, fixed, first + i * kWarps, column, columns);
    }
    if constexpr (Pointwise::kStateBytes > 0) {
      alignas(16) __shared__ char memory[kWarps * kColumns * Pointwise::kStateBytes];
      columns.join(params, Join{tile, strip, n, memory});
    }
  }

  CUTLASS_HOST_DEVICE static int least(int x, int y) { return x < y ? x : y; }
};

#if CUTLASS_OPS_HOST

// How many values a reduction gives, and how many parts each has.
template <bool kByColumns, int kRows>
int64_t length_of(Problem const& p) {
  return kByColumns ? p.n : p.m;
}
template <bool kByColumns, int kRows>
int parts_of_each(Problem const& p) {
  return kByColumns ? parts_of(p.m, kWarps * kRows) : parts_of(p.n, kColumns);
}

// Takes a piece of the workspace for the parts of a reduction. Without a workspace, it only counts.
template <class Reduce, bool kByColumns, int kRows>
typename Reduce::State* take(char* workspace, int64_t& used, Problem const& p) {
  using State = typename Reduce::State;
  char* const piece = workspace == nullptr ? nullptr : workspace + used;
  int64_t const bytes = int64_t(sizeof(State)) * length_of<kByColumns, kRows>(p) * parts_of_each<kByColumns, kRows>(p);
  used += (bytes + 255) / 256 * 256;
  return reinterpret_cast<State*>(piece);
}

// Launches the second step of a reduction.
template <class Reduce, bool kByColumns, int kRows, class Element>
cudaError_t finish(void const* kernel, typename Reduce::State const* partial, Element* out, Problem const& p,
                   Queue const& queue) {
  using Params = typename sm80::Finish<Reduce, Element>::Params;
  return sm80::finish_reduction(
      kernel, Params{partial, out, length_of<kByColumns, kRows>(p), parts_of_each<kByColumns, kRows>(p)}, queue);
}

#endif  // CUTLASS_OPS_HOST

}  // namespace pointwise

#if CUTLASS_OPS_HOST

// Besides what the kernel needs, `Pointwise` has
//   static void const* kernel(); static Operands operands(Call&);
//   static int64_t assign(Operands&, char* workspace);          gives parts of reductions their place, and counts bytes
//   static cudaError_t finish(Operands const&, Queue const&);   runs each reduction's second step
//   static constexpr bool kOverlaps;  whether the machine code waits for the end of the kernel before it
template <class Pointwise>
struct PointwiseEntry {
  using Kernel = pointwise::Kernel<Pointwise>;
  using Operands = typename Pointwise::Operands;

  static cudaError_t launch(Call& call, int& status) {
    Operands operands = Pointwise::operands(call);
    call.integer();  // order and width of strips of tiles: there is one order
    call.integer();
    status = call.status();
    if (status != 0) return cudaSuccess;
    void* const workspace = call.workspace(size_t(workspace_size(operands.problem, 0, 0)));
    int64_t const blocks = blocks_of(operands.problem);
    status = blocks > 0x7fffffff ? int(Reason::kShape) : call.status();
    if (status != 0) return cudaSuccess;
    Pointwise::assign(operands, static_cast<char*>(workspace));
    DeviceGuard const guard(call.device());
    Queue const queue = call.queue();
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(unsigned(blocks));
    config.blockDim = dim3(Kernel::kThreads);
    config.attrs = &attribute;
    config.numAttrs = Pointwise::kOverlaps ? 1 : 0;
    cudaError_t const error = queue.launch(config, Pointwise::kernel(), operands);
    return error == cudaSuccess ? Pointwise::finish(operands, queue) : error;
  }

  static int64_t workspace_size(Problem problem, int, int) {
    Operands operands{};
    operands.problem = problem;
    return Pointwise::assign(operands, nullptr);
  }

  static cudaError_t load(int) { return cudaSuccess; }

  static Description describe() { return {1, Kernel::kThreads, 0}; }

 private:
  static int64_t blocks_of(Problem const& p) {
    return int64_t(pointwise::parts_of(p.m, Kernel::kTileRows)) * pointwise::parts_of(p.n, pointwise::kColumns);
  }
};

#endif  // CUTLASS_OPS_HOST

}  // namespace cutlass_ops
