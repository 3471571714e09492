// Where TMA would store the elements of groups of rows: the descriptors of ragged.h, encoded by a driver that keeps what it is
// asked for, and coordinates computed by the host. tests/compile/test_ragged.py compiles it. It says "ok", or what is wrong.

#include <cstdio>
#include <cstring>

#include "cutlass_ops/sm90_gemm.h"  // first: it has the driver's place in CuTe

#include "cutlass_ops/epilogue.h"
#include "cutlass_ops/ragged.h"
#include "cutlass_ops/sm90_grouped.h"

namespace {

struct Encoded {
  unsigned rank;
  uintptr_t base;
  uint64_t extents[5], strides[5];  // bytes
};
Encoded encoded;

CUresult encode(CUtensorMap*, CUtensorMapDataType type, cuuint32_t rank, void* base, cuuint64_t const* extents,
                cuuint64_t const* strides, cuuint32_t const*, cuuint32_t const*, CUtensorMapInterleave, CUtensorMapSwizzle,
                CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  encoded = {rank, reinterpret_cast<uintptr_t>(base), {}, {}};
  encoded.strides[0] = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4 : 2;
  std::memcpy(encoded.extents, extents, rank * sizeof(*extents));
  std::memcpy(encoded.strides + 1, strides, (rank - 1) * sizeof(*strides));
  bool legal = true;  // what the driver asks of strides and extents
  for (unsigned i = 0; i < rank; ++i) {
    legal = legal && extents[i] >= 1 && extents[i] <= 1ull << 32;
    if (i > 0) legal = legal && encoded.strides[i] % 16 == 0 && encoded.strides[i] < 1ull << 40;
  }
  return legal ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

}  // namespace

// No machine code is made known to a runtime, and of the runtime only one function is called.
extern "C" {
char const cutlass_ops_image[] = "";
void** __cudaRegisterFatBinary(void*) { return nullptr; }
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, char const*, char*, char const*, int, uint3*, uint3*, dim3*, dim3*, int*) {}

cudaError_t cudaGetDriverEntryPointByVersion(char const*, void** entry, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  *entry = reinterpret_cast<void*>(&encode);
  *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
}

namespace {

using namespace cute;
namespace fusion = cutlass::epilogue::fusion;
using Identity = fusion::Sm90EVT<fusion::Sm90Compute<cutlass::epilogue::thread::Identity, cutlass::bfloat16_t, float,
                                                     cutlass::FloatRoundStyle::round_to_nearest>,
                                 fusion::Sm90AccFetch>;

// Every element of every tile of some groups, of which the last rows lie beyond the group.
template <class Element, bool kSwapped>
bool stores_each_group() {
  using Layout = conditional_t<kSwapped, cutlass::layout::ColumnMajor, cutlass::layout::RowMajor>;
  using Stride = cutlass_ops::BatchedC<Layout>;
  using Tile = cute::Shape<_64, _32, _64>;
  using Collective = cutlass_ops::RaggedCollective<
      cutlass_ops::Collective<Tile, cute::Shape<_64, _32>, void, Stride, Element, Stride, 4, 2, Identity>, kSwapped>;
  using Type = typename Collective::Type;
  constexpr int kRows = kSwapped ? 32 : 64, kColumns = kSwapped ? 64 : 32;
  int64_t const ld = 1096;
  int const n = 1000, rows = 100'000;
  uintptr_t const base = 1ull << 40;

  typename Type::Arguments arguments{};
  arguments.ptr_D = reinterpret_cast<Element*>(base);
  cute::get<kSwapped ? 1 : 0>(arguments.dD) = ld;
  cute::get<2>(arguments.dD) = cute::make_stride(ld, int64_t(0));
  int const m_extent = kSwapped ? n : rows, n_extent = kSwapped ? rows : n;
  cutlass_ops::descriptor_error() = CUDA_SUCCESS;
  auto const params = Type::to_underlying_arguments(make_shape(m_extent, n_extent, 64, make_shape(1, 5)), arguments, nullptr);
  if (cutlass_ops::descriptor_error() != CUDA_SUCCESS || encoded.base != base) return std::puts("the descriptor is refused"), false;

  int const groups[][2] = {{0, 1}, {1, 63}, {64, 200}, {99'000, 1000}, {99'999, 1}};  // first row and size
  for (int group = 0; group < 5; ++group) {
    int const first = groups[group][0], size = groups[group][1];
    auto const whole = params.tma_store_d.get_tma_tensor(
        make_shape(kSwapped ? n : size, kSwapped ? size : n, make_shape(1, 5)));
    for (int at = 0; at <= (size + kRows - 1) / kRows; ++at) {  // one tile more than there are, as a cluster may have
      for (int across : {0, (n + kColumns - 1) / kColumns - 1}) {
        auto const tile = local_tile(whole, take<0, 2>(Tile{}),
                                     make_coord(kSwapped ? across : at, kSwapped ? at : across, make_coord(first, group)));
        for (int i = 0; i < 64; ++i) {
          for (int j = 0; j < 32; ++j) {
            int64_t const place[] = {int64_t(get<0>(tile(i, j))), int64_t(get<1>(tile(i, j))), int64_t(get<2>(tile(i, j))),
                                     int64_t(get<3>(tile(i, j)))};
            bool inside = true;
            uint64_t address = base;
            for (int d = 0; d < 4; ++d) {
              inside = inside && place[d] >= 0 && uint64_t(place[d]) < encoded.extents[d];
              if (place[d] != int32_t(place[d])) return std::puts("a coordinate has more than 32 bits"), false;
              address += uint64_t(place[d]) * encoded.strides[d];
            }
            int const row = at * kRows + (kSwapped ? j : i), column = across * kColumns + (kSwapped ? i : j);
            if (inside != (row < size && column < n)) return std::printf("group %d: row %d\n", group, row), false;
            uint64_t const wanted = base + sizeof(Element) * (uint64_t(first + row) * ld + column);
            if (inside && address != wanted) return std::printf("group %d: row %d is elsewhere\n", group, row), false;
          }
        }
      }
    }
  }
  return encoded.rank == 4;
}

}  // namespace

int main() {
  bool const right = stores_each_group<cutlass::bfloat16_t, false>() && stores_each_group<cutlass::bfloat16_t, true>() &&
                     stores_each_group<float, false>() && stores_each_group<float, true>();
  std::puts(right ? "ok" : "wrong");
}
