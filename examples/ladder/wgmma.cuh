// wgmma: four warps, a warpgroup, multiply 64 rows of A by up to 256 of B. Both lie in shared memory, swizzled by 128 bytes.
//
// Source: PTX ISA, "Asynchronous warpgroup-level matrix instructions".
#pragma once

#include "swizzled.cuh"

constexpr int kWarpgroup = 128;  // threads

// Return the thread's warpgroup. The shuffle tells the compiler that a warp's threads agree, so that what follows from it
// can lie in uniform registers, where wgmma wants its operands' places.
__device__ inline int warpgroup() { return __shfl_sync(0xFFFFFFFF, static_cast<int>(threadIdx.x) / kWarpgroup, 0); }

// Say where an operand lies: rows of 64 halves whose K is contiguous. The parts of the descriptor, lowest bits first:
// the address in units of 16 bytes (14 bits), at bit 16 a stride that this layout does not use, at bit 32 the distance
// of groups of eight rows in units of 16 bytes, at bit 62 the swizzle, of which 1 is the one of 128 bytes.
__device__ inline uint64_t operand(uint32_t address) {
  return static_cast<uint64_t>((address & 0x3FFFF) >> 4) | uint64_t{1} << 16 | uint64_t{kSwizzleBytes >> 4} << 32 |
         uint64_t{1} << 62;
}

// The next 16 of K begin 32 bytes later: the hardware swizzles the address that results, as it does each row's.
constexpr uint64_t kNextPart = 32 >> 4;

// Registers that wgmma uses were written before: needed ahead of the first wgmma, and after any change of its sums.
__device__ inline void begin_multiplying() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ inline void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Wait until at most kPending of the warpgroup's groups of products are not finished.
template <int kPending>
__device__ inline void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keep the compiler from reading sums before this point: it does not know that they change until the wait.
template <int kCount>
__device__ inline void hold(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// What ordinary stores and cp.async wrote into shared memory is seen by wgmma after this, and a barrier.
__device__ inline void show_to_wgmma() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

#define LADDER_SUMS_4(d, i) "+f"(d[i]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3])
#define LADDER_SUMS_16(d, i) \
  LADDER_SUMS_4(d, i), LADDER_SUMS_4(d, (i) + 4), LADDER_SUMS_4(d, (i) + 8), LADDER_SUMS_4(d, (i) + 12)
#define LADDER_SUMS_32(d, i) LADDER_SUMS_16(d, i), LADDER_SUMS_16(d, (i) + 16)
#define LADDER_SUMS_64(d, i) LADDER_SUMS_32(d, i), LADDER_SUMS_32(d, (i) + 32)
#define LADDER_SUMS_128(d, i) LADDER_SUMS_64(d, i), LADDER_SUMS_64(d, (i) + 64)

// Add A B^T for 16 of K to d. Of the numbers at the end: d is added to, neither A nor B is negated, and K is contiguous
// in both.
//
// A thread's sums d[4 j + i]: row 16 w + l / 4 (+ 8 for i of 2 and 3) and column 8 j + 2 (l % 4) + i % 2, for the warp w of
// the warpgroup and its lane l.

// 64x64 of D: 32 sums a thread.
__device__ inline void multiply(float (&d)[32], uint64_t a, uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
      " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "%32, %33, 1, 1, 1, 0, 0;"
      : LADDER_SUMS_32(d, 0)
      : "l"(a), "l"(b));
}

// 64x128 of D: 64 sums a thread.
__device__ inline void multiply(float (&d)[64], uint64_t a, uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
      " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"
      " %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47,"
      " %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "%64, %65, 1, 1, 1, 0, 0;"
      : LADDER_SUMS_64(d, 0)
      : "l"(a), "l"(b));
}

// 64x256 of D: 128 sums a thread.
__device__ inline void multiply(float (&d)[128], uint64_t a, uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
      " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"
      " %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47,"
      " %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63,"
      " %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79,"
      " %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95,"
      " %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111,"
      " %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
      "%128, %129, 1, 1, 1, 0, 0;"
      : LADDER_SUMS_128(d, 0)
      : "l"(a), "l"(b));
}

// Multiply one step: 64 rows of A and kRows of B, 64 of K.
template <int kCount>
__device__ inline void multiply_step(float (&d)[kCount], uint32_t a, uint32_t b) {
  uint64_t of_a = operand(a), of_b = operand(b);
#pragma unroll
  for (int part = 0; part < kStep / 16; ++part) multiply(d, of_a + part * kNextPart, of_b + part * kNextPart);
}
