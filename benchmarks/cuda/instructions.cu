// Loops of one Tensor Core instruction each, on operands that stay in registers or in shared memory: what the instruction
// itself reaches, without loads from global memory. benchmarks/bench_instructions.py compiles this file and launches them.
//
// Operands are random and come with both signs in turn, so that sums stay small and the wires move as in a real GEMM.

#include <cstdint>
#include <tuple>
#include <type_traits>

#include <cuda_runtime.h>

#include "cute/arch/mma_sm90.hpp"
#include "cute/atom/mma_atom.hpp"
#include "cute/atom/mma_traits_sm90_gmma.hpp"
#include "cute/tensor.hpp"

#include "cutlass/arch/barrier.h"
#include "cutlass/arch/mma.h"
#include "cutlass/arch/mma_sm90.h"
#include "cutlass_ops/sm80_doubles.h"

namespace {

using cutlass::half_t;

// What a thread block says of its loop.
struct Passed {
  int64_t clocks;
  int64_t nanoseconds;
};

__device__ int64_t nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return int64_t(now);
}

// Uniform in [-1/8, 1/8].
__device__ float drawn(uint32_t at) {
  at = (at ^ 61u ^ (at >> 16)) * 9u;
  at = (at ^ (at >> 4)) * 0x27d4eb2du;
  at ^= at >> 15;
  return (float(at >> 8) / float(1 << 24) - 0.5f) / 4.0f;
}

// Runs a loop between two looks at the clocks, of the first thread alone.
template <class Loop>
__device__ void timed(Passed* passed, Loop loop) {
  __syncthreads();
  int64_t const clocks = clock64(), begin = nanoseconds();
  loop();
  __syncthreads();
  if (threadIdx.x == 0) passed[blockIdx.x] = {clock64() - clocks, nanoseconds() - begin};
}

// ---- mma.sync: eight sums a warp, which do not wait for each other -------------------------------------------------------

constexpr int kWarps = 16, kSums = 8;

template <class Instruction>
__device__ void product(typename Instruction::FragmentC& c, typename Instruction::FragmentA const& a,
                        typename Instruction::FragmentB const& b) {
  if constexpr (std::is_same<Instruction, cutlass_ops::sm80::DoubleProduct<8>>::value ||
                std::is_same<Instruction, cutlass_ops::sm80::DoubleProduct<16>>::value) {
    Instruction()(c, a, b);
  } else {
    Instruction()(c, a, b, c);
  }
}

template <class Instruction>
__global__ void __launch_bounds__(kWarps * 32) synchronous(Passed* passed, int steps, float* kept) {
  typename Instruction::FragmentA a[2];
  typename Instruction::FragmentB b[2];
  typename Instruction::FragmentC c[kSums];
  using Element = typename Instruction::ElementA;
  for (int i = 0; i < int(a[0].size()); ++i) {
    float const value = drawn(threadIdx.x * 64 + i);
    a[0][i] = Element(value);
    a[1][i] = Element(-value);
  }
  for (int i = 0; i < int(b[0].size()); ++i) {
    for (int each = 0; each < 2; ++each) b[each][i] = Element(drawn(threadIdx.x * 64 + 32 + each * 16 + i));
  }
  for (auto& sum : c) sum.clear();
  timed(passed, [&] {
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
#pragma unroll
      for (int sign = 0; sign < 2; ++sign) {
#pragma unroll
        for (int i = 0; i < kSums; ++i) product<Instruction>(c[i], a[sign], b[i % 2]);
      }
    }
  });
  float sum = 0;
  for (auto& each : c) {
    for (int i = 0; i < int(each.size()); ++i) sum += float(each[i]);
  }
  if (sum == 12345.0f) *kept = sum;  // never, which the compiler does not know
}

// ---- wgmma: two warpgroups, which take turns, as in a cooperative kernel of 128 x 256 --------------------------------------

template <class Instruction>
__global__ void __launch_bounds__(256) asynchronous(Passed* passed, int steps, float* kept) {
  using namespace cute;
  extern __shared__ __align__(1024) unsigned char memory[];
  auto const rows = tile_to_shape(GMMA::Layout_K_SW128_Atom<half_t>{}, Shape<_128, _64>{});
  auto const columns = tile_to_shape(GMMA::Layout_K_SW128_Atom<half_t>{}, Shape<_256, _64>{});
  auto* const first = reinterpret_cast<half_t*>(memory);
  Tensor a = make_tensor(make_smem_ptr(first), rows);
  Tensor b = make_tensor(make_smem_ptr(first + 128 * 64), columns);
  for (int at = threadIdx.x; at < 128 * 64; at += 256) {
    int const row = at / 64, k = at % 64;
    a(row, k) = half_t((k < 32 ? 1.0f : -1.0f) * drawn(row * 32 + k % 32));
  }
  for (int at = threadIdx.x; at < 256 * 64; at += 256) {
    int const column = at / 64, k = at % 64;
    b(column, k) = half_t(drawn(65536 + column * 32 + k % 32));
  }
  cutlass::arch::fence_view_async_shared();
  auto const mma = make_tiled_mma(Instruction{}, Layout<Shape<_2, _1, _1>>{});
  auto const mine = mma.get_slice(threadIdx.x);
  Tensor of_a = mine.make_fragment_A(mine.partition_A(a));
  Tensor of_b = mine.make_fragment_B(mine.partition_B(b));
  Tensor sums = partition_fragment_C(mma, Shape<_128, _256>{});
  clear(sums);
  timed(passed, [&] {
    for (int step = 0; step < steps; ++step) {
      warpgroup_fence_operand(sums);
      warpgroup_arrive();
      CUTE_UNROLL
      for (int k = 0; k < size<2>(of_a); ++k) cute::gemm(mma, of_a(_, _, k), of_b(_, _, k), sums);
      warpgroup_commit_batch();
      warpgroup_wait<0>();
    }
  });
  warpgroup_fence_operand(sums);
  float sum = 0;
  for (int i = 0; i < size(sums); ++i) sum += float(sums(i));
  if (sum == 12345.0f) *kept = sum;
}

// ---- Launches ----------------------------------------------------------------------------------------------------------

template <int M, int N, int K, class Element, class Sum>
using MmaSync = cutlass::arch::Mma<cutlass::gemm::GemmShape<M, N, K>, 32, Element, cutlass::layout::RowMajor, Element,
                                   cutlass::layout::ColumnMajor, Sum, cutlass::layout::RowMajor,
                                   cutlass::arch::OpMultiplyAdd>;

template <class Instruction>
int run_synchronous(Passed* passed, int steps, int blocks, float* kept, cudaStream_t stream) {
  synchronous<Instruction><<<blocks, kWarps * 32, 0, stream>>>(passed, steps, kept);
  return int(cudaGetLastError());
}

template <class Instruction>
int run_asynchronous(Passed* passed, int steps, int blocks, float* kept, cudaStream_t stream) {
  constexpr int kBytes = (128 + 256) * 64 * 2;
  cudaError_t const error = cudaFuncSetAttribute(asynchronous<Instruction>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return int(error);
  asynchronous<Instruction><<<blocks, 256, kBytes, stream>>>(passed, steps, kept);
  return int(cudaGetLastError());
}

using Run = int (*)(Passed*, int, int, float*, cudaStream_t);

// A loop, and the products of one of its steps in a block.
struct Loop {
  char const* name;
  Run run;
  int64_t products;
};

template <int M, int N, int K>
constexpr int64_t products = int64_t(2) * kSums * kWarps * M * N * K;

constexpr auto kK = cute::GMMA::Major::K;
constexpr int64_t kTile = int64_t(128) * 256 * 64;

Loop const kLoops[] = {
    {"wgmma.m64n256k16.f32.f16.f16", run_asynchronous<cute::SM90_64x256x16_F32F16F16_SS<kK, kK>>, kTile},
    {"wgmma.m64n256k16.f16.f16.f16", run_asynchronous<cute::SM90_64x256x16_F16F16F16_SS<kK, kK>>, kTile},
    {"mma.m16n8k16.f32.f16.f16", run_synchronous<MmaSync<16, 8, 16, half_t, float>>, products<16, 8, 16>},
    {"mma.m16n8k16.f16.f16.f16", run_synchronous<MmaSync<16, 8, 16, half_t, half_t>>, products<16, 8, 16>},
    {"mma.m8n8k4.f64", run_synchronous<MmaSync<8, 8, 4, double, double>>, products<8, 8, 4>},
    {"mma.m16n8k4.f64", run_synchronous<MmaSync<16, 8, 4, double, double>>, products<16, 8, 4>},
    {"mma.m16n8k8.f64", run_synchronous<cutlass_ops::sm80::DoubleProduct<8>>, products<16, 8, 8>},
    {"mma.m16n8k16.f64", run_synchronous<cutlass_ops::sm80::DoubleProduct<16>>, products<16, 8, 16>},
};

}  // namespace

extern "C" {

int loops() { return int(sizeof(kLoops) / sizeof(Loop)); }
char const* loop_name(int loop) { return kLoops[loop].name; }
int64_t loop_products(int loop) { return kLoops[loop].products; }

// `passed` has two numbers of 64 bits for each block, its clocks and nanoseconds. Returns a CUDA error.
int loop_run(int loop, void* passed, int steps, int blocks, void* kept, void* stream) {
  return kLoops[loop].run(static_cast<Passed*>(passed), steps, blocks, static_cast<float*>(kept),
                          static_cast<cudaStream_t>(stream));
}
}
