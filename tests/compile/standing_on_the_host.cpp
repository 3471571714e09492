// The memory that launches share (standing.h), with a CUDA runtime that only keeps count.
#include "cutlass_ops/standing.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
#include <thread>
#include <vector>

// ---- A runtime: streams 1 and 2, of which one may be captured, and memory whose first bytes are read ----

static bool captured = false, malloc_fails = false, memset_fails = false;
static int mallocs = 0, frees = 0, mode = cudaStreamCaptureModeGlobal, streams = 0;

extern "C" {
cudaError_t cudaMalloc(void** result, size_t bytes) {
  if (mode != cudaStreamCaptureModeRelaxed) return cudaErrorStreamCaptureUnsupported;
  if (malloc_fails) return cudaErrorMemoryAllocation;
  ++mallocs;
  *result = aligned_alloc(512, (bytes + 511) / 512 * 512);
  memset(*result, 0xaa, bytes);
  return cudaSuccess;
}
cudaError_t cudaFree(void* at) {
  if (at != nullptr) ++frees;
  return free(at), cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* at, int value, size_t bytes, cudaStream_t stream) {
  if (memset_fails) return cudaErrorUnknown;
  if (stream == nullptr) return cudaErrorStreamCaptureImplicit;
  memset(at, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = reinterpret_cast<cudaStream_t>(size_t(0x100));
  ++streams;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamDestroy(cudaStream_t) { return --streams, cudaSuccess; }
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* other) {
  auto const before = cudaStreamCaptureMode(mode);
  mode = *other;
  *other = before;
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = captured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long* id) {
  *id = reinterpret_cast<size_t>(stream);
  return cudaSuccess;
}
}

// ---- The tests ----

#define REQUIRE(...) \
  if (!(__VA_ARGS__)) return std::printf("line %d: %s\n", __LINE__, #__VA_ARGS__), 1

struct First;
struct Second;

template <class User = First>
static char* of(int device, size_t stream, int64_t bytes) {
  void* found = nullptr;
  auto const error = cutlass_ops::Standing::of<User>(device, reinterpret_cast<cudaStream_t>(stream), bytes, &found);
  return error == cudaSuccess ? static_cast<char*>(found) : nullptr;
}
static bool is_zero(char const* start, int64_t bytes) {
  for (int64_t i = 0; i < bytes; ++i) {
    if (start[i] != 0) return false;
  }
  return true;
}

int main() {
  malloc_fails = true;
  REQUIRE(of(0, 1, 1000) == nullptr);
  malloc_fails = false;
  REQUIRE(frees == 0);
  memset_fails = true;
  REQUIRE(of(0, 1, 1000) == nullptr && frees == 1);
  memset_fails = false;

  char* const first = of(0, 1, 1000);  // a failure is not remembered
  REQUIRE(first != nullptr && is_zero(first, 1000) && size_t(first) % 256 == 0);
  REQUIRE(mode == cudaStreamCaptureModeGlobal && streams == 0);
  int const before = mallocs;
  REQUIRE(of(0, 1, 1000) == first && of(0, 1, 1) == first);
  char* const of_another = of<Second>(0, 1, 1000);  // for something else in the same launch
  REQUIRE(of_another >= first + 1000 || of_another + 1000 <= first);
  char* const other = of(0, 2, 1000);
  REQUIRE(other >= first + 1000 || other + 1000 <= first);
  REQUIRE(size_t(other) % 256 == 0 && is_zero(other, 1000));
  char* const elsewhere = of(1, 1, 1000);  // of another device
  REQUIRE(elsewhere != first && elsewhere != other);
  REQUIRE(mallocs == before + 2);  // a device has memory of its own, and what is for something else

  // Growth: elsewhere, zeroed, and never less again.
  memset(first, 1, 1000);
  char* const larger = of(0, 1, 5000);
  REQUIRE(larger != first && is_zero(larger, 5000));
  REQUIRE(of(0, 1, 1000) == larger && of(0, 1, 5000) == larger);
  char* const huge = of(0, 1, 50 << 20);
  REQUIRE(huge != nullptr && is_zero(huge, 50 << 20) && of(0, 1, 10) == huge);

  // Captured launches share with nobody, not even with each other.
  captured = true;
  std::set<char*> blocks{first, other, larger, huge};
  for (int i = 0; i < 2000; ++i) {
    char* const own = of(0, 1, 700);
    REQUIRE(own != nullptr && is_zero(own, 700) && size_t(own) % 256 == 0);
    memset(own, 1, 700);  // an overlap would show
    REQUIRE(blocks.insert(own).second);
  }
  captured = false;
  REQUIRE(of(0, 1, 10) == huge);

  // Threads, each with a stream of its own.
  std::vector<std::thread> threads;
  std::vector<char*> found(8);
  for (size_t i = 0; i < found.size(); ++i) {
    threads.emplace_back([&found, i] {
      for (int64_t bytes = 1; bytes < 100000; bytes += 997) found[i] = of(0, 100 + i, bytes);
    });
  }
  for (auto& thread : threads) thread.join();
  REQUIRE(std::set<char*>(found.begin(), found.end()).size() == found.size());
  REQUIRE(frees == 1);
  std::puts("ok");
}
