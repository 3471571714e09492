// Runs the kernel that PROGRAM names on the host: each thread of a block is a thread of this process. Tensors come from files
// of a folder, and results go there.

#define CUTLASS_OPS_ON_THE_HOST

#include <barrier>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "cutlass_ops/halves.h"

#include "cutlass_ops/binding.h"

namespace emulated {

thread_local dim3 thread, block;
std::unique_ptr<std::barrier<>> whole;
std::vector<std::unique_ptr<std::barrier<>>> warps;
alignas(16) char lanes[1024][16];

template <class T>
T shuffle_xor(T const& x, int other) {
  int const at = int(thread.x);
  *reinterpret_cast<T*>(lanes[at]) = x;
  warps[at / 32]->arrive_and_wait();
  T const found = *reinterpret_cast<T*>(lanes[at ^ other]);
  warps[at / 32]->arrive_and_wait();
  return found;
}

// Runs all blocks of a kernel, one after the other.
template <class Kernel, class Params>
void run(Params const& params, unsigned blocks, dim3 size) {
  unsigned const count = size.x * size.y;
  for (unsigned b = 0; b < blocks; ++b) {
    whole = std::make_unique<std::barrier<>>(count);
    warps.clear();
    for (unsigned w = 0; w < count / 32; ++w) warps.push_back(std::make_unique<std::barrier<>>(32));
    std::vector<std::thread> threads;
    for (unsigned t = 0; t < count; ++t) {
      threads.emplace_back([&, t] {
        thread = dim3(t % size.x, t / size.x), block = dim3(b);
        Kernel::run(params);
      });
    }
    for (auto& each : threads) each.join();
  }
}

}  // namespace emulated

#define threadIdx emulated::thread
#define blockIdx emulated::block
#define __syncthreads() emulated::whole->arrive_and_wait()
#undef __shared__
#define __shared__ static

#include "cutlass_ops/reduce.h"

namespace cutlass_ops {
template <class Second>
struct Pair;
inline float shuffle_xor(float x, int other) { return emulated::shuffle_xor(x, other); }
template <class Second>
Pair<Second> shuffle_xor(Pair<Second> const& x, int other) {
  return emulated::shuffle_xor(x, other);
}
}  // namespace cutlass_ops

#include "cutlass_ops/pointwise.h"

// Nothing is registered with the CUDA runtime.
#undef CUTLASS_OPS_KERNEL
#undef CUTLASS_OPS_EXPORT
#define CUTLASS_OPS_KERNEL(name, ...) static char const name = 0;
#define CUTLASS_OPS_EXPORT(...)

#include PROGRAM

// The one function of the device that is called here.
float __int_as_float(int bits) {
  float found;
  std::memcpy(&found, &bits, sizeof(found));
  return found;
}

namespace {

std::string folder;

template <class T>
std::vector<T> read(char const* name, size_t count) {
  std::vector<T> found(count);
  std::ifstream(folder + "/" + name, std::ios::binary).read(reinterpret_cast<char*>(found.data()), count * sizeof(T));
  return found;
}

template <class T>
void write(char const* name, std::vector<T> const& values) {
  std::ofstream(folder + "/" + name, std::ios::binary).write(reinterpret_cast<char const*>(values.data()), values.size() * sizeof(T));
}

template <class T>
cutlass_ops::Matrix matrix(std::vector<T>& values, int m, int n, int64_t ld) {
  return {values.data(), m, n, ld};
}

}  // namespace

// Arguments: the folder, M, N, the leading dimensions of x (row-major), y (column-major) and D, and 1 if D overwrites x.
int main(int, char** arguments) {
  folder = arguments[1];
  int const m = std::stoi(arguments[2]), n = std::stoi(arguments[3]);
  int const ld_x = std::stoi(arguments[4]), ld_y = std::stoi(arguments[5]), ld_d = std::stoi(arguments[6]);
  auto x = read<Element_x>("x", size_t(m) * ld_x);
  auto y = read<Element_y>("y", size_t(n) * ld_y);
  auto bias = read<Element_bias>("bias", n);
  auto scale = read<Element_scale>("scale", m);
  auto d = read<ElementD>("d", size_t(m) * ld_d);
  auto copy = read<Element_copy>("copy", size_t(m) * n);
  std::vector<Element_col_sum> col_sum(n);
  std::vector<Element_col_at> col_at(n);
  std::vector<Element_row_sum> row_sum(m);
  std::vector<Element_row_lse> row_lse(m);

  Pointwise::Operands o{};
  o.problem.m = m, o.problem.n = n, o.problem.k = 8;
  o.d = matrix(d, m, n, ld_d), o.x = matrix(x, m, n, ld_x), o.y = matrix(y, m, n, ld_y), o.copy = matrix(copy, m, n, n);
  bool const in_place = std::stoi(arguments[7]) == 1;
  if (in_place) o.d = o.x;
  o.bias = bias.data(), o.scale = scale.data(), o.alpha.value = Element_alpha(0.75f);
  o.col_sum = col_sum.data(), o.col_at = col_at.data(), o.row_sum = row_sum.data(), o.row_lse = row_lse.data();
  std::vector<char> workspace(Pointwise::assign(o, nullptr), char(0xff));  // NaN, until parts are there
  Pointwise::assign(o, workspace.data());

  using cutlass_ops::pointwise::parts_of;
  unsigned const strips = parts_of(n, cutlass_ops::pointwise::kColumns), tiles = parts_of(m, Kernel::kTileRows);
  emulated::run<Kernel>(o, strips * tiles, dim3(Kernel::kThreads));
  auto const finish = [&](auto reduce, auto* partial, auto* out, int length, int parts) {
    using Reduce = decltype(reduce);
    using Finish = cutlass_ops::sm80::Finish<Reduce, std::remove_pointer_t<decltype(out)>>;
    emulated::run<Finish>(typename Finish::Params{partial, out, length, parts}, parts_of(length, cutlass_ops::sm80::kFinishWidth),
                          dim3(cutlass_ops::sm80::kFinishWidth, cutlass_ops::sm80::kFinishHeight));
  };
  finish(Reduce_col_sum{}, o.partial_col_sum_, o.col_sum, n, tiles);
  finish(Reduce_col_at{}, o.partial_col_at_, o.col_at, n, tiles);
  finish(Reduce_row_sum{}, o.partial_row_sum_, o.row_sum, m, strips);
  finish(Reduce_row_lse{}, o.partial_row_lse_, o.row_lse, m, strips);
  write("d", in_place ? x : d), write("copy", copy), write("col_sum", col_sum), write("col_at", col_at);
  write("row_sum", row_sum), write("row_lse", row_lse);
}
