// Kernels that quantise a tensor to FP8, for what no GEMM produces. Each 128 values of a row have a scale, or each row. They
// read each value once from global memory, and are as fast as a copy if they read and write whole pieces of 16 and 8 bytes.

#pragma once

#include "cutlass_ops/halves.h"

#include "cutlass_ops/binding.h"
#include "cutlass_ops/quantize.h"

namespace cutlass_ops {

// What both kernels have in common: rows of elements in pieces of 16 bytes, each a lane's.
template <class Element_, class Result_>
struct QuantizedPieces {
  using Element = Element_;
  using Result = Result_;
  static constexpr int kThreads = 256, kWarps = kThreads / 32;
  static constexpr int kPiece = 16 / int(sizeof(Element));  // elements
  using Piece = cutlass::AlignedArray<Element, kPiece, 16>;

  struct Params {
    Element const* from = nullptr;
    Result* to = nullptr;
    int64_t ld_from = 0, ld_to = 0;
    WrittenScales scales;
    int rows = 0, columns = 0;
    int groups = 0;      // warps that share a row
    bool whole = false;  // whether all lines begin and end with whole pieces
  };

  // A piece of a row, with zeros beyond its end. Zeros change no block's greatest absolute value.
  CUTLASS_DEVICE static Piece load(Params const& params, int64_t row, int64_t column) {
    Piece found;
    Element const* const at = params.from + row * params.ld_from + column;
    if (params.whole && column < params.columns) {
      found = *reinterpret_cast<Piece const*>(at);
    } else {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kPiece; ++i) found[i] = column + i < params.columns ? at[i] : Element(0.0f);
    }
    return found;
  }

  CUTLASS_DEVICE static void store(Params const& params, int64_t row, int64_t column, Piece const& piece, float inverse) {
    using Results = cutlass::AlignedArray<Result, kPiece>;
    cutlass::Array<float, kPiece> scaled;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kPiece; ++i) scaled[i] = float(piece[i]) * inverse;
    auto const results = cutlass::NumericArrayConverter<Result, float, kPiece>{}(scaled);
    Result* const at = params.to + row * params.ld_to + column;
    if (params.whole && column < params.columns) {
      Results whole;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kPiece; ++i) whole[i] = results[i];
      *reinterpret_cast<Results*>(at) = whole;
    } else {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kPiece; ++i) {
        if (column + i < params.columns) at[i] = results[i];
      }
    }
  }

  CUTLASS_DEVICE static float greatest(Piece const& piece) {
    float most = 0.0f;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kPiece; ++i) most = maximum(most, cutlass_ops::abs(float(piece[i])));
    return most;
  }

  // Joins the greatest values of lanes whose numbers differ in bits below `kLanes`.
  template <int kLanes>
  CUTLASS_DEVICE static float joined(float most) {
#if defined(__CUDACC__)
    CUTLASS_PRAGMA_UNROLL
    for (int other = kLanes / 2; other > 0; other /= 2) most = maximum(most, __shfl_xor_sync(0xffffffff, most, other));
#endif
    return most;
  }

  CUTLASS_DEVICE static void wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    // What wrote the tensor has ended then, and what still read the results' memory.
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;");
#endif
  }

#if CUTLASS_OPS_HOST
  // Reads what all launches have: the tensor and its results.
  static Params read(Call& call, Problem& problem) {
    Params params;
    Matrix const from = call.input<Element, Major::kRow, 1, false>();
    problem = call.problem(from);
    Matrix const to = call.tile_output<Result, Major::kRow, 1, false>(problem);
    params.from = from.ptr<Element>(), params.to = to.ptr<Result>();
    params.ld_from = from.ld, params.ld_to = to.ld;
    params.rows = problem.m, params.columns = problem.n;
    auto const are_whole = [&](void const* data, int64_t ld, size_t element) {
      size_t const bytes = kPiece * element;
      return reinterpret_cast<uintptr_t>(data) % bytes == 0 && (problem.m == 1 || ld * element % bytes == 0);
    };
    params.whole = problem.n % kPiece == 0 && are_whole(from.data, from.ld, sizeof(Element)) &&
                   are_whole(to.data, to.ld, sizeof(Result));
    return params;
  }
#endif
};

// A scale for each block of 128: a warp has a few rows of one or two blocks.
template <class Element, class Result>
struct QuantizeBlocks : QuantizedPieces<Element, Result> {
  using Base = QuantizedPieces<Element, Result>;
  using typename Base::Params;
  using typename Base::Piece;
  static constexpr int kLanes = kQuantizedBlock / Base::kPiece;  // of a block
  static constexpr int kColumns = 32 * Base::kPiece;             // of a warp
  static constexpr int kRows = 4;                                // whose pieces are on their way together
  static_assert(kLanes <= 32);

  CUTLASS_DEVICE static void run(Params const& params) {
    Base::wait();
    int64_t const warp = int64_t(blockIdx.x) * Base::kWarps + int(threadIdx.x) / 32;
    int64_t const first = warp / params.groups * kRows;
    int64_t const column = warp % params.groups * kColumns + int(threadIdx.x) % 32 * Base::kPiece;
    if (first >= params.rows) return;
    Piece pieces[kRows];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRows; ++i) {
      // The last row again where there are no more: its results are stored once.
      pieces[i] = Base::load(params, first + i < params.rows ? first + i : params.rows - 1, column);
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRows; ++i) {
      BlockScale const scale = block_scale<Result>(Base::template joined<kLanes>(Base::greatest(pieces[i])));
      int64_t const row = first + i;
      if (row >= params.rows) break;
      Base::store(params, row, column, pieces[i], scale.inverse);
      if (threadIdx.x % kLanes == 0 && column < params.columns) {
        params.scales.data[row * params.scales.stride + column / kQuantizedBlock * params.scales.step_stride] = scale.scale;
      }
    }
  }

#if CUTLASS_OPS_HOST
  static Params read(Call& call) {
    Problem problem;
    Params params = Base::read(call, problem);
    params.scales = call.blocks_output<float>(problem.m, 1, problem.n, kQuantizedBlock);
    params.groups = (params.columns + kColumns - 1) / kColumns;
    return params;
  }
  static int64_t blocks(Params const& params) {
    int64_t const warps = (int64_t(params.rows) + kRows - 1) / kRows * params.groups;
    return (warps + Base::kWarps - 1) / Base::kWarps;
  }
#endif
};

// A scale for each row, which a thread block reads twice: the second time most of it comes from a cache.
template <class Element, class Result>
struct QuantizeRows : QuantizedPieces<Element, Result> {
  using Base = QuantizedPieces<Element, Result>;
  using typename Base::Params;
  static constexpr int kStep = Base::kThreads * Base::kPiece;  // columns

  CUTLASS_DEVICE static void run(Params const& params) {
    Base::wait();
    int64_t const row = blockIdx.x;
    int64_t const first = int64_t(threadIdx.x) * Base::kPiece;
    float most = 0.0f;
    for (int64_t column = first; column < params.columns; column += kStep) {
      most = maximum(most, Base::greatest(Base::load(params, row, column)));
    }
    BlockScale const scale = block_scale<Result>(over_block(Base::template joined<32>(most)));
    for (int64_t column = first; column < params.columns; column += kStep) {
      Base::store(params, row, column, Base::load(params, row, column), scale.inverse);
    }
    if (threadIdx.x == 0) params.scales.data[row] = scale.scale;
  }

#if CUTLASS_OPS_HOST
  static Params read(Call& call) {
    Problem problem;
    Params params = Base::read(call, problem);
    params.scales.data = call.col_output<float>(problem);
    return params;
  }
  static int64_t blocks(Params const& params) { return params.rows; }
#endif

 private:
  CUTLASS_DEVICE static float over_block(float most) {
#if defined(__CUDACC__)
    __shared__ float of_warps[Base::kWarps];
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = most;
    __syncthreads();
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Base::kWarps; ++i) most = maximum(most, of_warps[i]);
#endif
    return most;
  }
};

#if CUTLASS_OPS_HOST

// A launch takes the tensor, its results and their scales. `Quantize` has
//   using Kernel; static void const* kernel();
template <class Quantize>
struct QuantizeEntry {
  using Kernel = typename Quantize::Kernel;

  static cudaError_t launch(Call& call, int& status) {
    auto const params = Kernel::read(call);
    status = call.status();
    if (status != 0) return cudaSuccess;
    DeviceGuard const guard(call.device());
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(unsigned(Kernel::blocks(params)));
    config.blockDim = dim3(Kernel::kThreads);
    config.attrs = &attribute;
    config.numAttrs = 1;
    return call.queue().launch(config, Quantize::kernel(), params);
  }

  static int64_t workspace_size(Problem, int, int) { return 0; }

  static cudaError_t load(int) { return cudaSuccess; }

  static Description describe() { return {1, Kernel::kThreads, 0}; }
};

#endif  // CUTLASS_OPS_HOST

}  // namespace cutlass_ops
