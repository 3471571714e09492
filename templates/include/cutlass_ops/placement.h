// Which of a device's GPCs (graphics processing clusters) a launch's thread block clusters land on.
//
// Reads of one line by several multiprocessors of a GPC are merged before the L2 cache if they come at nearly the same time;
// across GPCs they are not (benchmarks/NOTES.md). The runtime has no name for a GPC, but thread block clusters never span
// two: those that large clusters connect belong together. What is found here affects a kernel's speed, never its results.

#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>

#include "cutlass_ops/binding.h"
#include "cutlass_ops/halves.h"

namespace cutlass_ops {

// To which group each of a launch's clusters belongs.
struct Groups {
  uint8_t const* of = nullptr;
  int count = 0;
};

namespace placement {

constexpr int kMaxMultiprocessors = 1024;
constexpr int kResident = 20'000;  // nanoseconds within which all blocks of a launch start
constexpr int kAttempts = 8;       // launches after which a device that was always busy is let alone
constexpr auto kPatience = std::chrono::milliseconds(20);  // for one observation

// Each block reports its multiprocessor and stays until all have started.
struct Report {
  struct Params {
    int* multiprocessors;
  };
  static constexpr int kThreads = 32;

  CUTLASS_DEVICE static void run(Params const& params) {
    unsigned id;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(id));
    if (threadIdx.x == 0) params.multiprocessors[blockIdx.x] = int(id);
    uint64_t start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do {
      asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - start < kResident);
  }
};

}  // namespace placement
}  // namespace cutlass_ops

CUTLASS_OPS_KERNEL(cutlass_ops_placement, cutlass_ops::placement::Report)

#if CUTLASS_OPS_HOST
namespace cutlass_ops {
namespace placement {

// Launches that kernel on a stream of its own. Whatever fails is no error: nothing is known then.
class Observer {
 public:
  explicit Observer(int device) {
    cudaDeviceGetAttribute(&shared_memory_, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    ready_ = cudaFuncSetAttribute(kernel(), cudaFuncAttributeNonPortableClusterSizeAllowed, 1) == cudaSuccess &&
             cudaFuncSetAttribute(kernel(), cudaFuncAttributeMaxDynamicSharedMemorySize, shared_memory_) == cudaSuccess &&
             cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking) == cudaSuccess &&
             cudaHostAlloc(&reported_, kMaxMultiprocessors * sizeof(int), cudaHostAllocMapped) == cudaSuccess;
  }

  // The multiprocessor of each block, cluster by cluster, with one block on each multiprocessor. Returns the number of blocks,
  // 0 if nothing is known.
  int observe(int cluster, int (&found)[kMaxMultiprocessors]) {
    if (!ready_ || cudaStreamQuery(stream_) != cudaSuccess) return 0;
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {unsigned(cluster), 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(cluster);
    config.blockDim = dim3(Report::kThreads);
    config.dynamicSmemBytes = shared_memory_;
    config.stream = stream_;
    config.attrs = &attribute;
    config.numAttrs = 1;
    int clusters = 0;
    if (cudaOccupancyMaxActiveClusters(&clusters, kernel(), &config) != cudaSuccess) return 0;
    int const blocks = std::min(clusters * cluster, kMaxMultiprocessors);
    config.gridDim = dim3(blocks);
    Report::Params params{reported_};
    void* arguments[] = {&params};
    if (blocks == 0 || cudaLaunchKernelExC(&config, kernel(), arguments) != cudaSuccess || !finished()) return 0;
    bool taken[kMaxMultiprocessors] = {};
    for (int i = 0; i < blocks; ++i) {
      int const at = found[i] = reported_[i];
      if (at < 0 || at >= kMaxMultiprocessors || taken[at]) return 0;
      taken[at] = true;
    }
    return blocks;
  }

 private:
  static void const* kernel() { return handle(&cutlass_ops_placement); }

  // This waits a limited time: another kernel may hold the device until this very thread goes on.
  bool finished() {
    auto const deadline = std::chrono::steady_clock::now() + kPatience;
    cudaError_t state;
    while ((state = cudaStreamQuery(stream_)) == cudaErrorNotReady) {
      if (std::chrono::steady_clock::now() > deadline) return false;
    }
    return state == cudaSuccess;
  }

  bool ready_ = false;
  int shared_memory_ = 0;
  cudaStream_t stream_ = nullptr;
  int* reported_ = nullptr;
};

// The GPC of each multiprocessor, numbered from 0; -1 where there is none. False if they are not known.
inline bool gpcs(Observer& observer, int (&gpc)[kMaxMultiprocessors]) {
  constexpr int kMaxGpcs = 255;
  int parent[kMaxMultiprocessors], found[kMaxMultiprocessors];
  for (int i = 0; i < kMaxMultiprocessors; ++i) parent[i] = i;
  auto const root = [&](int x) {
    while (parent[x] != x) x = parent[x] = parent[parent[x]];
    return x;
  };
  // Sizes that do not divide a GPC alike connect all of it.
  bool connected[kMaxMultiprocessors] = {}, present[kMaxMultiprocessors] = {};
  for (int cluster : {16, 8, 4, 1}) {
    for (int repetition = 0; repetition < (cluster == 1 ? 1 : 3); ++repetition) {
      int const blocks = observer.observe(cluster, found);
      if (blocks == 0) {
        if (cluster == 16) break;  // larger than portable ones: some devices have none
        return false;
      }
      for (int i = 0; i < blocks; ++i) {
        present[found[i]] = true;
        if (cluster == 1) continue;
        connected[found[i]] = true;
        parent[root(found[i])] = root(found[i - i % cluster]);
      }
    }
  }
  int size[kMaxGpcs] = {}, count = 0;
  std::fill_n(gpc, kMaxMultiprocessors, -1);
  for (int i = 0; i < kMaxMultiprocessors; ++i) {
    if (!connected[i]) continue;
    int& number = gpc[root(i)];
    if (number < 0) {
      if (count == kMaxGpcs) return false;
      number = count++;
    }
    ++size[number];
    gpc[i] = number;
  }
  if (count == 0) return false;
  // An H100 has ten multiprocessors that no cluster of four takes. Their reads merge with those of the smallest GPC.
  int const smallest = int(std::min_element(size, size + count) - size);
  for (int i = 0; i < kMaxMultiprocessors; ++i) {
    if (present[i] && gpc[i] < 0) gpc[i] = smallest;
  }
  return true;
}

// The GPC of each cluster of a launch.
struct Places {
  uint8_t of[kMaxMultiprocessors];
  int count = 0;
};

// Where the clusters of a launch land that finds the device empty. False if that is not known.
inline bool find(Observer& observer, int cluster, Places& places) {
  int gpc[kMaxMultiprocessors], found[kMaxMultiprocessors];
  if (!gpcs(observer, gpc)) return false;
  for (int repetition = 0; repetition < 4; ++repetition) {
    int const blocks = observer.observe(cluster, found), before = places.count;
    if (blocks == 0) return false;
    int same = 0;
    places.count = 0;
    for (int i = 0; i < blocks; i += cluster) {
      uint8_t& place = places.of[places.count];
      auto const now = uint8_t(gpc[found[i]]);
      same += places.count < before && place == now;
      place = now;
      ++places.count;
    }
    // Kernels on other streams would show as differences. A few clusters differ even on an idle device.
    if (same * 10 >= places.count * 8) return true;
  }
  return false;
}

// As above, found once a device. None while nothing is known.
template <int kCluster>
Groups of(int device) {
  static std::mutex mutex;
  static std::atomic<Places const*> known[kMaxDevices] = {};
  static int attempts[kMaxDevices];
  auto const groups = [](Places const* found) {
    return found == nullptr ? Groups{} : Groups{found->of, found->count};
  };
  if (auto const* there = known[device].load(std::memory_order_acquire)) return groups(there);
  std::lock_guard<std::mutex> const lock(mutex);
  if (known[device].load(std::memory_order_relaxed) == nullptr && attempts[device] < kAttempts) {
    ++attempts[device];
    // The thread may be capturing a graph, in which these calls have no part.
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    cudaThreadExchangeStreamCaptureMode(&mode);
    static Observer* observers[kMaxDevices];  // kept: to free what a late report may still use would be to wait for it
    if (observers[device] == nullptr) observers[device] = new Observer(device);
    if (Places found; find(*observers[device], kCluster, found)) {
      known[device].store(new Places(found), std::memory_order_release);
    }
    cudaThreadExchangeStreamCaptureMode(&mode);
    cudaGetLastError();  // what failed here is no failure of the launch
  }
  return groups(known[device].load(std::memory_order_relaxed));
}

}  // namespace placement
}  // namespace cutlass_ops
#endif  // CUTLASS_OPS_HOST
