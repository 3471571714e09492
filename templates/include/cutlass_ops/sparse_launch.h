// What the main loop of 2:4 sparse weights takes (sparse_mainloop.h), and how a launch gives it.

#pragma once

#include "cutlass_ops/sm90_launch.h"

#include "cutlass_ops/sparse.h"

namespace cutlass_ops {

struct SparseParams {
  Descriptors a, b;
  CUtensorMap meta;
  int rows_a = 0, rows_b = 0;
  uint32_t tma_transaction_bytes = 0;
};

#if CUTLASS_OPS_HOST

// Metadata of a stage: in units of 8 bytes, a row of blocks has as many of these as K.
inline void encode_meta(CUtensorMap& descriptor, SparseMeta const& meta, int k, int blocks_down) {
  uint64_t const extents[] = {uint64_t(meta.k_blocks) * kMetaBlock, uint64_t(meta.row_blocks)};
  uint64_t const apart[] = {uint64_t(meta.k_blocks) * kMetaBytes};
  uint32_t const box[] = {uint32_t(k), uint32_t(blocks_down)};
  encode(descriptor, CU_TENSOR_MAP_DATA_TYPE_FLOAT64, 2, meta.data, extents, apart, box, CU_TENSOR_MAP_SWIZZLE_NONE);
}

#endif

}  // namespace cutlass_ops
