// Device memory that a kernel finds full of zeros and leaves full of zeros, so that nothing has to clear it between launches.

#pragma once

#include "cutlass_ops/halves.h"

#if CUTLASS_OPS_HOST

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>

#include <cuda_runtime.h>

namespace cutlass_ops {

// One stream's launches follow each other and share a block. A captured launch has one of its own for good, since its graph
// may run beside anything. Memory that a launch was given is never freed.
class Standing {
 public:
  // At least `bytes` for a launch on a stream of the current device, in which each `User` has its own.
  template <class User>
  static cudaError_t of(int device, cudaStream_t stream, int64_t bytes, void** result) {
    static Standing standing;
    return standing.find(device, stream, bytes, result);
  }

 private:
  struct Block {
    char* start = nullptr;
    int64_t bytes = 0;
  };
  static constexpr int64_t kAlignment = 256, kChunk = 256 * 1024;

  cudaError_t find(int device, cudaStream_t stream, int64_t bytes, void** result) {
    cudaStreamCaptureStatus capture;
    if (cudaError_t const error = cudaStreamIsCapturing(stream, &capture); error != cudaSuccess) return error;
    std::lock_guard<std::mutex> const lock(mutex_);
    if (capture != cudaStreamCaptureStatusNone) return take(device, bytes, result);
    unsigned long long id;
    if (cudaError_t const error = cudaStreamGetId(stream, &id); error != cudaSuccess) return error;
    Block& mine = streams_[{device, id}];
    if (mine.bytes < bytes) {
      int64_t const enough = std::max(2 * mine.bytes, bytes);
      void* start;
      if (cudaError_t const error = take(device, enough, &start); error != cudaSuccess) return error;
      mine = {static_cast<char*>(start), enough};
    }
    *result = mine.start;
    return cudaSuccess;
  }

  cudaError_t take(int device, int64_t bytes, void** result) {
    bytes = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    Block& left = left_[device];
    if (left.bytes < bytes) {
      int64_t const size = std::max(kChunk, bytes);
      if (cudaError_t const error = zeroed(size, &left.start); error != cudaSuccess) return left = {}, error;
      left.bytes = size;
    }
    *result = left.start;
    left.start += bytes;
    left.bytes -= bytes;
    return cudaSuccess;
  }

  // This also works while a thread captures a graph: the capture does not see it.
  static cudaError_t zeroed(int64_t bytes, char** result) {
    auto mode = cudaStreamCaptureModeRelaxed;
    if (cudaError_t const error = cudaThreadExchangeStreamCaptureMode(&mode); error != cudaSuccess) return error;
    cudaStream_t stream = nullptr;
    *result = nullptr;
    cudaError_t error = cudaMalloc(reinterpret_cast<void**>(result), size_t(bytes));
    if (error == cudaSuccess) error = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    if (error == cudaSuccess) error = cudaMemsetAsync(*result, 0, size_t(bytes), stream);
    if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
    if (stream != nullptr) (void)cudaStreamDestroy(stream);
    if (error != cudaSuccess) (void)cudaFree(*result);
    (void)cudaThreadExchangeStreamCaptureMode(&mode);
    return error;
  }

  std::mutex mutex_;
  std::map<std::pair<int, unsigned long long>, Block> streams_;
  std::map<int, Block> left_;
};

}  // namespace cutlass_ops

#endif  // CUTLASS_OPS_HOST
