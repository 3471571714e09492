// Rung 1: a thread computes one element of D, on the CUDA cores. Every product reads both operands from global memory.
#include "common.cuh"

constexpr int kSide = 16;

__global__ void naive(const half* a, const half* b, half* d, int m, int n, int k) {
  int row = blockIdx.y * kSide + threadIdx.y;
  int column = blockIdx.x * kSide + threadIdx.x;
  if (row >= m || column >= n) return;
  const half* of_a = a + static_cast<size_t>(row) * k;
  const half* of_b = b + static_cast<size_t>(column) * k;
  float sum = 0;
  for (int i = 0; i < k; ++i) sum += __half2float(of_a[i]) * __half2float(of_b[i]);
  d[static_cast<size_t>(row) * n + column] = __float2half(sum);
}

LADDER_LAUNCH {
  naive<<<dim3(ceil_div(n, kSide), ceil_div(m, kSide)), dim3(kSide, kSide), 0, stream>>>(a, b, d, m, n, k);
  return cudaGetLastError();
}
