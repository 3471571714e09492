// What needs no GPU of kernels for groups of rows. Where TMA would store elements: the descriptors of ragged.h, encoded by a
// driver that keeps what it is asked for, with coordinates computed by the host. And which tiles the scheduler of
// sm90_grouped.h hands out, to a warp of 32 contexts that take turns. tests/compile/test_programs_on_the_host.py compiles it. It
// says "ok", or what is wrong.

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <set>
#include <tuple>
#include <vector>

// ---- A warp, whose lanes run until they exchange something ---------------------------------------------------------

namespace warp {

constexpr int kLanes = 32;
ucontext_t starts[kLanes];
// Where each lane goes on, and the program. To change contexts asks the system each time, which takes ten times as long.
jmp_buf program, lanes[kLanes];
bool begun[kLanes];
int lane, left;
int said[2][kLanes], phase[kLanes];  // what lanes said last, and before
void (*task)();

void set_index();

[[noreturn]] void enter(int to) {
  lane = to;
  set_index();
  if (begun[to]) _longjmp(lanes[to], 1);
  begun[to] = true;
  setcontext(&starts[to]);
  __builtin_unreachable();
}

void go_on(int to) {
  if (_setjmp(lanes[lane]) == 0) enter(to);
}

// Says a value, and returns what all lanes have said.
int const* meet(int value) {
  int const at = phase[lane]++ % 2;
  said[at][lane] = value;
  go_on((lane + 1) % kLanes);
  return said[at];
}

void run_lane() {
  task();
  // All end in turn: the last one goes back to the program.
  if (--left > 0) go_on((lane + 1) % kLanes);
  _longjmp(program, 1);
}

void run(void (*each)()) {
  constexpr size_t kStack = 1 << 18;
  static auto const stacks = std::make_unique<char[]>(kLanes * kStack);
  task = each, left = kLanes;
  for (int i = 0; i < kLanes; ++i) {
    getcontext(&starts[i]);
    starts[i].uc_stack.ss_sp = stacks.get() + i * kStack, starts[i].uc_stack.ss_size = kStack, starts[i].uc_link = nullptr;
    phase[i] = 0, begun[i] = false;
    makecontext(&starts[i], run_lane, 0);
  }
  if (_setjmp(program) == 0) enter(0);
}

}  // namespace warp

int __shfl_sync(unsigned, int value, int from) { return warp::meet(value)[from]; }
int __shfl_up_sync(unsigned, int value, int by) {
  int const lane = warp::lane, *const all = warp::meet(value);
  return all[lane < by ? lane : lane - by];
}
unsigned __ballot_sync(unsigned, int value) {
  int const* const all = warp::meet(value != 0);
  unsigned found = 0;
  for (int i = 0; i < warp::kLanes; ++i) found |= unsigned(all[i]) << i;
  return found;
}
int __ffs(int value) { return __builtin_ffs(value); }

#include "cutlass_ops/types_of_cutlass.h"  // before what knows a kernel without CUTLASS

#include "cutlass_ops/block_scales.h"
#include "cutlass_ops/epilogue.h"
#include "cutlass_ops/ragged.h"
#include "cutlass_ops/sm90_gemm.h"
#include "cutlass_ops/sm90_grouped.h"
#include "cutlass_ops/sm90_ragged_k.h"

uint3 index_of_lane asm("threadIdx");  // as the lane that runs has it; to the headers it is a constant
void warp::set_index() { index_of_lane.x = unsigned(lane); }

namespace {

struct Encoded {
  unsigned rank;
  uintptr_t base;
  uint64_t extents[5], strides[5];  // bytes
};
Encoded encoded;
std::vector<Encoded> every;

CUresult encode(CUtensorMap*, CUtensorMapDataType type, cuuint32_t rank, void* base, cuuint64_t const* extents,
                cuuint64_t const* strides, cuuint32_t const*, cuuint32_t const*, CUtensorMapInterleave, CUtensorMapSwizzle,
                CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  encoded = {rank, reinterpret_cast<uintptr_t>(base), {}, {}};
  encoded.strides[0] = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4 : 2;
  std::memcpy(encoded.extents, extents, rank * sizeof(*extents));
  std::memcpy(encoded.strides + 1, strides, (rank - 1) * sizeof(*strides));
  every.push_back(encoded);
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

  cutlass_ops::BatchedMatrix const d{{reinterpret_cast<Element*>(base), rows, n, ld}, {ld, 0}};
  cutlass_ops::descriptor_error() = CUDA_SUCCESS;
  cutlass_ops::ragged_copy<Element, cutlass_ops::Major::kRow>(d, kColumns, kRows);
  typename Type::Params const params{};
  if (cutlass_ops::descriptor_error() != CUDA_SUCCESS || encoded.base != base) return std::puts("it is refused"), false;

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

// Where a descriptor and coordinates lead to; 0 where that is outside of it.
template <class Place>
uint64_t address_of(Encoded const& descriptor, Place const& place) {
  int64_t const at[] = {int64_t(get<0>(place)), int64_t(get<1>(place)), int64_t(get<2>(place)), int64_t(get<3>(place))};
  uint64_t address = descriptor.base;
  for (int d = 0; d < 4; ++d) {
    if (at[d] < 0 || uint64_t(at[d]) >= descriptor.extents[d]) return 0;
    address += uint64_t(at[d]) * descriptor.strides[d];
  }
  return address;
}

// The rows of A from a group's first one on, and the group's B: both may have any distances.
template <bool kSwapped>
bool loads_each_group() {
  using Element = cutlass::bfloat16_t;
  using Row = cutlass::layout::RowMajor;
  using Column = cutlass::layout::ColumnMajor;
  using Tile = cute::Shape<_64, _64, _64>;
  // A is row-major and B column-major. Swapped, the kernel's first operand is B^T, and the second A^T.
  using Grouped = cutlass_ops::GroupedMainloop<
      cutlass_ops::Mainloop<Element, cutlass_ops::BatchedA<Row>, Element, cutlass_ops::BatchedB<Column>, Tile,
                            cute::Shape<_1, _1, _1>, 2, cutlass::gemm::KernelTmaWarpSpecializedPingpong>,
      kSwapped>;
  int const rows = 1000, n = 200, k = 136, experts = 5;
  int64_t const ld = 144, line = 152, apart = 200 * 152 + 8;
  auto* const x = reinterpret_cast<Element*>(1ull << 40);
  auto* const w = reinterpret_cast<Element*>(1ull << 41);
  cutlass_ops::Problem const problem{rows, n, k, experts, 1};
  cutlass_ops::BatchedMatrix const a{{x, rows, k, ld}, {}}, b{{w, k, n, line}, {0, apart}};
  cutlass_ops::Side<Element, true> const side{64, 64, 1, 1};
  every.clear();
  cutlass_ops::descriptor_error() = CUDA_SUCCESS;
  side.encoded(a, rows, k, cutlass_ops::batching(problem, a));
  side.encoded(b, n, k, cutlass_ops::batching(problem, b));
  auto const of = [](void const* data) {
    return *std::find_if(every.begin(), every.end(), [&](Encoded const& e) { return e.base == uintptr_t(data); });
  };
  Encoded const of_x = of(x), of_w = of(w);
  if (cutlass_ops::descriptor_error() != CUDA_SUCCESS) return std::puts("operands are refused"), false;
  for (int group = 0; group < experts; ++group) {
    int const first = group * 137;
    auto const origin = Grouped::origin_of({first, 1});
    for (int tile = 0; tile < 4; ++tile) {
      for (int step = 0; step < 3; ++step) {
        for (int i = 0; i < 64; ++i) {
          for (int j = 0; j < 64; ++j) {
            auto const at = [&](int row) { return make_coord(origin.k + step * 64 + j, row + tile * 64 + i, 0, group); };
            auto const of_rows = address_of(of_x, at(kSwapped ? origin.row_b : origin.row_a));
            auto const of_b = address_of(of_w, at(kSwapped ? origin.row_a : origin.row_b));
            int const row = first + tile * 64 + i, column = tile * 64 + i, along = step * 64 + j;
            uint64_t const wanted_x = row < rows && along < k ? uint64_t(x + row * ld + along) : 0;
            uint64_t const wanted_w = column < n && along < k ? uint64_t(w + group * apart + column * line + along) : 0;
            if (of_rows != wanted_x || of_b != wanted_w) return std::printf("operands of group %d\n", group), false;
          }
        }
      }
    }
  }
  return true;
}

// What a tile copies of the scales of blocks: those of its group's rows, and of its group's matrix. Groups follow each other,
// or have room for `room` rows, of which scales may lie by columns.
template <bool kSwapped>
bool scales_each_group(int room) {
  using Element = cutlass::float_e4m3_t;
  using Grouped = cutlass_ops::GroupedMainloop<
      cutlass_ops::Mainloop<Element, cutlass_ops::BatchedA<cutlass::layout::RowMajor>, Element,
                            cutlass_ops::BatchedB<cutlass::layout::ColumnMajor>, cute::Shape<_64, _64, _128>,
                            cute::Shape<_1, _1, _1>, 2, cutlass::gemm::KernelTmaWarpSpecializedPingpong, kSwapped, 1, void,
                            cutlass_ops::NoRows, true,
                            cutlass_ops::BlockScales<kSwapped ? 128 : 1, kSwapped ? 1 : 128, cutlass_ops::GroupedScales>>,
      kSwapped>;
  int const steps = 5, blocks = 3;
  // Numbers that say where they lie. With room, those of a group's rows follow each other, and each step comes after them.
  std::vector<float> rows(4000 * steps), weights(8 * blocks * steps);
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = float(i);
  for (size_t i = 0; i < weights.size(); ++i) weights[i] = float(i);
  typename Grouped::Scales::Params params{};
  auto& of_rows = kSwapped ? params.columns : params.rows;
  auto& of_weights = kSwapped ? params.rows : params.columns;
  of_rows = room > 0 ? cutlass_ops::GroupedScales{{rows.data(), 1, room, 0}, 0, int64_t(room) * steps}
                     : cutlass_ops::GroupedScales{{rows.data(), steps, 1, 0}, steps, 0};
  of_weights = {{weights.data(), steps, 1, blocks - 1}, 0, blocks * steps};
  int32_t const ends[] = {3, 100, 100, 250, 251};
  cutlass_ops::RowGroups const groups{ends, 5, room > 0 ? room : 400, room};
  for (int group = 0; group < 5; ++group) {
    auto const own = groups.of(group);
    auto const scales = Grouped::scales_of(params, own, group);
    auto const& found = kSwapped ? scales.columns : scales.rows;
    auto const& weight = kSwapped ? scales.rows : scales.columns;
    if (found.last != own.size - 1 || weight.last != blocks - 1) return std::puts("the last scales"), false;
    for (int step = 0; step < steps; ++step) {
      for (int row = 0; row < own.size; ++row) {
        int const wanted = room > 0 ? (group * steps + step) * room + row : (own.first + row) * steps + step;
        if (found.data[row * found.stride + step * found.step_stride] != float(wanted)) return std::puts("scales of rows"), false;
      }
      for (int block = 0; block < blocks; ++block) {
        int const wanted = (group * blocks + block) * steps + step;
        if (weight.data[block * weight.stride + step * weight.step_stride] != float(wanted)) {
          return std::puts("scales of matrices"), false;
        }
      }
    }
  }
  return true;
}

// Both operands from a group's first row on, and nothing behind its last one: zeros.
template <class LayoutA, class LayoutB>
bool loads_each_group_of_k() {
  using Element = cutlass::half_t;
  using Ragged = cutlass_ops::RaggedKMainloop<
      cutlass_ops::Mainloop<Element, cutlass_ops::BatchedA<LayoutA>, Element, cutlass_ops::BatchedB<LayoutB>,
                            cute::Shape<_64, _32, _64>, cute::Shape<_1, _1, _1>, 2,
                            cutlass::gemm::KernelTmaWarpSpecializedPingpong>>;
  int const m = 200, n = 136, rows = 100'000;
  int64_t const ld_a = 208, ld_b = 144;
  auto* const x = reinterpret_cast<Element*>(1ull << 40);
  auto* const y = reinterpret_cast<Element*>(1ull << 41);
  every.clear();
  cutlass_ops::descriptor_error() = CUDA_SUCCESS;
  auto const problem = make_shape(m, n, rows, make_shape(5, 1));
  typename Ragged::Params const params{};
  cutlass_ops::Side<Element, false> const side_a{64, 64, 1, 1}, side_b{32, 64, 1, 1};
  side_a.encoded({x, m, rows, ld_a}, m, cutlass_ops::kRaggedRows, cutlass_ops::twice(ld_a));
  side_b.encoded({y, rows, n, ld_b}, n, cutlass_ops::kRaggedRows, cutlass_ops::twice(ld_b));
  auto const of = [](void const* data) {
    return *std::find_if(every.begin(), every.end(), [&](Encoded const& e) { return e.base == uintptr_t(data); });
  };
  Encoded const of_x = of(x), of_y = of(y);
  if (cutlass_ops::descriptor_error() != CUDA_SUCCESS) return std::puts("operands of K are refused"), false;
  if (size<3>(get<0>(Ragged{}.load_init(problem, params))) != 1) return std::puts("tiles have more than one step"), false;
  cutlass_ops::RowGroups::Rows const groups[] = {{0, 0}, {0, 1}, {1, 63}, {64, 200}, {99'000, 1000}, {100'000, 0}};
  for (auto const& group : groups) {
    auto const origin = Ragged::origin_of(group);
    auto const batch = Ragged::batch_of(group);
    int const steps = Ragged::steps_of(group);
    if (steps != (group.size + 63) / 64) return std::puts("steps"), false;
    for (int step = 0; step < steps; ++step) {
      for (int tile = 0; tile < 5; ++tile) {
        for (int i = 0; i < 64; ++i) {
          for (int j = 0; j < 64; ++j) {
            int const along = step * 64 + j, row = tile * 64 + i, column = tile * 32 + i;
            uint64_t const first = group.first + along;
            bool const inside = along < group.size;
            auto const at = [&](int row) { return make_coord(row, origin.k + along, get<0>(batch), get<1>(batch)); };
            auto const from_a = address_of(of_x, at(row));
            if (from_a != (inside && row < m ? uint64_t(x + first * ld_a + row) : 0)) return std::puts("A of K"), false;
            if (i >= 32) continue;
            auto const from_b = address_of(of_y, at(column));
            if (from_b != (inside && column < n ? uint64_t(y + first * ld_b + column) : 0)) return std::puts("B of K"), false;
          }
        }
      }
    }
  }
  return true;
}

// Quotients of numbers in order, and of some large ones.
bool divides_as_c_does() {
  std::mt19937 random(0);
  for (int trial = 0; trial < 20'000; ++trial) {
    int const divisor = trial < 4000 ? trial + 1 : std::max(1, int(random() >> 1)), dividend = int(random() >> (1 + trial % 31));
    int quotient, remainder;
    cutlass_ops::Divisor{divisor}(quotient, remainder, dividend);
    bool const right = quotient == dividend / divisor && remainder == dividend % divisor;
    if (!right) return std::printf("%d / %d\n", dividend, divisor), false;
  }
  return true;
}

// ---- Tiles -----------------------------------------------------------------------------------------------------------

using Tiles = std::vector<std::tuple<int, int, int>>;  // kernel's row and column of tiles, group
struct {
  cutlass_ops::RowGroups groups;
  int columns, active;
  Tiles found;
} asked;

// What one lane finds, if it is the first; all must find the same.
template <bool kSwapped, class Cluster>
void find_tiles() {
  using Scheduler = cutlass_ops::GroupedTileScheduler<kSwapped, cute::Shape<_64, _32, _64>, Cluster>;
  typename Scheduler::Params params{};
  params.groups = asked.groups, params.columns = asked.columns, params.active = asked.active;
  Tiles mine;
  Scheduler scheduler(params);
  auto tile = scheduler.initial_work_tile_info(Cluster{});
  while (tile.is_valid()) {
    mine.emplace_back(tile.M_idx, tile.N_idx, tile.L_idx);
    tile = cute::get<0>(scheduler.fetch_next_work(tile));
  }
  for (int i = 0; i < 3; ++i) {  // behind the end it stays there
    scheduler.advance_to_next_work();
    if (scheduler.get_current_work().is_valid()) mine.clear();
  }
  if (warp::lane == 0) asked.found = mine;
  if (asked.found != mine) asked.found.clear(), asked.found.emplace_back(-1, -1, -1);
}

template <bool kSwapped, class Cluster>
bool hands_out_each_tile_once(std::vector<int32_t> const& ends, int rows, int room = 0) {
  constexpr int kRowsOfCluster = kSwapped ? 32 * int(size<1>(Cluster{})) : 64 * int(size<0>(Cluster{}));
  constexpr int kM = size<0>(Cluster{}), kN = size<1>(Cluster{});
  asked = {{ends.data(), int(ends.size()), rows, room}, 3, 1, {}};
  warp::run(find_tiles<kSwapped, Cluster>);
  Tiles const all = asked.found;
  std::set<std::tuple<int, int, int>> wanted;
  for (int group = 0, reached = 0; group < int(ends.size()); ++group) {
    if (room > 0) reached = group * room;
    int const end = group * room + std::clamp(ends[group], 0, rows);
    auto const own = asked.groups.of(group);
    if (room > 0 && (own.first != group * room || own.size != end - reached)) return false;
    int const clusters = std::max(0, end - reached + kRowsOfCluster - 1) / kRowsOfCluster;
    if (clusters > (own.size + kRowsOfCluster - 1) / kRowsOfCluster || own.first + own.size > asked.groups.all()) return false;
    for (int row = 0; row < clusters; ++row) {
      for (int column = 0; column < 3; ++column) {
        wanted.emplace(kM * (kSwapped ? column : row), kN * (kSwapped ? row : column), group);
      }
    }
    reached = std::max(reached, end);
  }
  if (all.size() != wanted.size() || std::set(all.begin(), all.end()) != wanted) return false;
  // A cluster that is not alone takes every so many-th.
  asked.active = 7;
  warp::run(find_tiles<kSwapped, Cluster>);
  Tiles some;
  for (size_t i = 0; i < all.size(); i += 7) some.push_back(all[i]);
  return asked.found == some;
}

template <bool kSwapped, class Cluster>
bool finds_groups() {
  std::mt19937 random(kSwapped);
  for (int trial = 0; trial < 60; ++trial) {
    int const counts[] = {1, 3, 40, 128, 129, 500, 1100}, count = counts[trial % 7], rows = trial % 3 == 0 ? 50 : 3000;
    std::vector<int32_t> ends(count);
    for (int32_t& end : ends) end = int32_t(random() % unsigned(rows + 1));
    if (trial % 4 != 3) std::sort(ends.begin(), ends.end());  // else they fall
    if (trial % 5 == 4) ends[count / 2] = INT32_MAX, ends[0] = INT32_MIN;
    if (trial % 6 == 5) std::fill(ends.begin(), ends.end(), rows);  // all rows are the first group's
    if (trial == 1) std::fill(ends.begin(), ends.end(), 0);
    if (!hands_out_each_tile_once<kSwapped, Cluster>(ends, rows)) return std::printf("tiles of trial %d\n", trial), false;
    int const room = trial % 2 == 0 ? rows : 1 << 18;  // with the latter, numbers behind the last group's wrap around
    bool const each = hands_out_each_tile_once<kSwapped, Cluster>(ends, room, room);
    if (!each) return std::printf("tiles of trial %d, with room\n", trial), false;
  }
  return true;
}

}  // namespace

int main() {
  bool const right = divides_as_c_does() && stores_each_group<cutlass::bfloat16_t, false>() && stores_each_group<cutlass::bfloat16_t, true>() &&
                     stores_each_group<float, false>() && stores_each_group<float, true>() &&
                     loads_each_group<false>() && loads_each_group<true>() &&
                     scales_each_group<false>(0) && scales_each_group<true>(0) && scales_each_group<false>(300) &&
                     scales_each_group<true>(300) &&
                     loads_each_group_of_k<cutlass::layout::ColumnMajor, cutlass::layout::RowMajor>() &&
                     finds_groups<false, cute::Shape<_1, _1, _1>>() && finds_groups<true, cute::Shape<_1, _1, _1>>() &&
                     finds_groups<false, cute::Shape<_2, _1, _1>>() && finds_groups<true, cute::Shape<_4, _2, _1>>();
  std::puts(right ? "ok" : "wrong");
}
