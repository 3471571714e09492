// D in FP8 with a scale for each 128 columns of a row, in the layout in which the next GEMM's main loop reads those of its A
// (block_scales.h): what the epilogue of epilogue.h needs for that besides.

#pragma once

#include "cutlass_ops/binding.h"
#include "cutlass_ops/quantize.h"

namespace cutlass_ops {

struct Quantized {
  static constexpr bool kAny = true;
  static constexpr int kColumns = kQuantizedBlock;

  // Arguments and parameters of an epilogue, with where the scales go.
  template <class Parameters>
  struct With : Parameters {
    WrittenScales scales;
  };

  // Finishes a row's block, of which four lanes have seen a part each. Stores the scale if the block is `there`, and returns
  // the scale's inverse.
  template <class Element>
  CUTLASS_DEVICE static float finish(WrittenScales const& scales, float most, int row, int block, bool there) {
#if defined(__CUDACC__)
    most = maximum(most, __shfl_xor_sync(0xffffffff, most, 1));
    most = maximum(most, __shfl_xor_sync(0xffffffff, most, 2));
    BlockScale const found = block_scale<Element>(most);
    if (there && threadIdx.x % 4 == 0) scales.data[row * scales.stride + block * scales.step_stride] = found.scale;
    return found.inverse;
#else
    return most;
#endif
  }
};

}  // namespace cutlass_ops
