// Shared tiles whose rows have 64 halves, 128 bytes, swizzled, and asynchronous copies into them.
//
// A row has eight chunks of 16 bytes. Chunk c of row r lies at place c XOR (r mod 8): the same chunk of eight neighbouring
// rows, which ldmatrix reads and wgmma too, then lies in eight different groups of banks. TMA's and wgmma's 128-byte
// swizzle is this one. It is one of addresses, so tiles begin at multiples of 1024 bytes.
#pragma once

#include "common.cuh"

constexpr int kStep = 64;           // halves of a row: K of one step
constexpr int kRowBytes = 128;
constexpr int kSwizzleBytes = 1024;  // eight rows, after which the pattern repeats

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Return the first multiple of 1024 bytes in a block's dynamic shared memory. Launches ask for 1024 bytes more.
__device__ inline uint8_t* aligned(uint8_t* memory) {
  return memory + (kSwizzleBytes - shared_address(memory) % kSwizzleBytes) % kSwizzleBytes;
}

__device__ inline uint32_t swizzled(int row, int chunk) { return row * kRowBytes + ((chunk ^ (row % 8)) << 4); }

// Copy 64 columns of kRows rows into a tile, zeros beyond the matrix. Columns are a multiple of eight. Eight threads copy a
// row, a chunk each: a thread's chunks lie at one place of their rows, since the rows are a multiple of eight apart.
template <int kRows, int kThreads>
__device__ inline void copy_tile(uint32_t tile, const half* matrix, int rows, int columns, int row, int column) {
  constexpr int kApart = kThreads / 8;  // rows
  static_assert(kApart % 8 == 0 && kRows % kApart == 0, "every thread copies as many chunks, each to the same place");
  int chunk = threadIdx.x % 8;
  uint32_t to = tile + swizzled(threadIdx.x / 8, chunk);
  row += threadIdx.x / 8;
  column += chunk * 8;
  const half* from = matrix + static_cast<size_t>(row) * columns + column;
#pragma unroll
  for (int i = 0; i < kRows / kApart; ++i) {
    // Of 16 bytes, `bytes` are read, and the others are zeros. Where that is none, the address is not used.
    int bytes = row + i * kApart < rows && column < columns ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to + i * kApart * kRowBytes), "l"(from), "r"(bytes)
                 : "memory");
    from += static_cast<size_t>(kApart) * columns;
  }
}

__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait until at most kPending of the thread's groups of copies are on their way.
template <int kPending>
__device__ inline void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}
