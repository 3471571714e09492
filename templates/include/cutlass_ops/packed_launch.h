// What the main loop of packed weights takes (packed_mainloop.h), and how a launch gives it.

#pragma once

#include "cutlass_ops/sm90_launch.h"

#include "cutlass_ops/packed.h"

namespace cutlass_ops {

struct PackedParams {
  CUtensorMap values, scales;
  Descriptors b;
  int rows_b = 0;
  uint32_t tma_transaction_bytes = 0;
};

#if CUTLASS_OPS_HOST

// A stage brings lines of the weight, each with some numbers along K and some scales.
struct PackedStage {
  int lines, numbers, scales;

  void fill(PackedParams& params, PackedWeight const& weight, int parts) const {
    // Numbers in units of 8 bytes: a line has as many of these as K.
    encode(params.values, CU_TENSOR_MAP_DATA_TYPE_FLOAT64, 8, weight.values, weight.k, weight.lines, numbers);
    encode(params.scales, CU_TENSOR_MAP_DATA_TYPE_UINT16, 2, weight.scales, weight.groups * parts * kLine, weight.lines,
           scales);
    params.tma_transaction_bytes = uint32_t(lines * (numbers * 8 + scales * 2));
  }

 private:
  // Lines follow each other: boxes of `across` units of all lines of a stage.
  void encode(CUtensorMap& descriptor, CUtensorMapDataType type, int bytes, void const* data, int length, int count,
              int across) const {
    uint64_t const extents[] = {uint64_t(length), uint64_t(count)}, apart[] = {uint64_t(length) * uint64_t(bytes)};
    uint32_t const box[] = {uint32_t(across), uint32_t(lines)};
    cutlass_ops::encode(descriptor, type, 2, data, extents, apart, box, CU_TENSOR_MAP_SWIZZLE_NONE);
  }
};

#endif

}  // namespace cutlass_ops
