// Which GPCs clusters land on (placement.h), with a CUDA runtime that places them on devices of its own: no GPU is needed.
// tests/compile/test_programs_on_the_host.py compiles it. It says "ok", or what is wrong.

#include "cutlass_ops/placement.h"

#include <cstdio>
#include <map>
#include <vector>

// ---- A runtime: devices with GPCs, which hand out whole clusters in turns -------------------------------------------

struct Device {
  std::vector<std::vector<int>> gpcs;  // multiprocessors
  int alone = 0;                       // of the first GPC, how many take no cluster of more than two blocks
  int largest = 16;                    // cluster
  bool is_busy = false, is_shared = false, is_restless = false;
  int launches = 0;
};

static std::map<int, Device> devices;
static int current = 0, alive = 0;

// The multiprocessor of each block.
static std::vector<int> placed(Device const& device, int cluster) {
  if (cluster > device.largest) return {};
  std::vector<std::vector<int>> free;
  for (size_t g = 0; g < device.gpcs.size(); ++g) {
    std::vector<int> left = device.gpcs[g];
    if (g == 0 && cluster > 2) left.resize(left.size() - device.alone);
    // Clusters of other sizes begin elsewhere.
    std::rotate(left.begin(), left.begin() + 16 / cluster % left.size(), left.end());
    free.push_back(left);
  }
  std::vector<int> found;
  int const shift = device.is_restless ? device.launches : 0;
  for (bool more = true; more;) {
    more = false;
    for (size_t g = 0; g < free.size(); ++g) {
      auto& left = free[(g + shift) % free.size()];
      if (left.size() < size_t(cluster)) continue;
      found.insert(found.end(), left.begin(), left.begin() + cluster);
      left.erase(left.begin(), left.begin() + cluster);
      more = true;
    }
  }
  return found;
}

extern "C" {
char const cutlass_ops_image[1] = {};
void** __cudaRegisterFatBinary(void*) { return nullptr; }
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, char const*, char*, char const*, int, uint3*, uint3*, dim3*, dim3*, int*) {}

cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int device) { return *value = 232448, current = device, cudaSuccess; }
cudaError_t cudaFuncSetAttribute(void const*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = reinterpret_cast<cudaStream_t>(size_t(0x100 + current));
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** at, size_t bytes, unsigned) { return *at = calloc(1, bytes), ++alive, cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  return devices[int(reinterpret_cast<size_t>(stream)) - 0x100].is_busy ? cudaErrorNotReady : cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, void const*, cudaLaunchConfig_t const* config) {
  int const cluster = config->attrs->val.clusterDim.x;
  *clusters = int(placed(devices[int(reinterpret_cast<size_t>(config->stream)) - 0x100], cluster).size()) / cluster;
  return cudaSuccess;
}
cudaError_t cudaLaunchKernelExC(cudaLaunchConfig_t const* config, void const*, void** arguments) {
  auto& device = devices[int(reinterpret_cast<size_t>(config->stream)) - 0x100];
  auto const found = placed(device, config->attrs->val.clusterDim.x);
  ++device.launches;
  if (found.size() != config->gridDim.x) return cudaErrorInvalidValue;
  auto* const reported = static_cast<cutlass_ops::placement::Report::Params*>(arguments[0])->multiprocessors;
  for (size_t i = 0; i < found.size(); ++i) reported[i] = device.is_shared ? found[0] : found[i];
  return cudaSuccess;
}
}

// ---- The tests -------------------------------------------------------------------------------------------------------

#define REQUIRE(...) \
  if (!(__VA_ARGS__)) return std::printf("line %d: %s\n", __LINE__, #__VA_ARGS__), 1

// Multiprocessors are numbered across GPCs.
static Device device_of(std::vector<int> const& sizes) {
  Device found;
  found.gpcs.resize(sizes.size());
  int number = 0;
  for (int at = 0; at < 32; ++at) {
    for (size_t g = 0; g < sizes.size(); ++g) {
      if (at < sizes[g]) found.gpcs[g].push_back(number++);
    }
  }
  return found;
}

static int gpc_of(Device const& device, int multiprocessor) {
  for (size_t g = 0; g < device.gpcs.size(); ++g) {
    for (int x : device.gpcs[g]) {
      if (x == multiprocessor) return int(g);
    }
  }
  return -1;
}

// Whether clusters have the same group where they are on the same GPC, and other groups elsewhere; the first GPC's `alone`
// multiprocessors count as the smallest GPC's.
static bool right(Device const& device, int cluster, cutlass_ops::Groups groups) {
  auto const found = placed(device, cluster);
  if (groups.of == nullptr || groups.count * cluster != int(found.size())) return false;
  size_t smallest = 0;
  auto const size = [&](size_t g) { return device.gpcs[g].size() - (g == 0 ? device.alone : 0); };
  for (size_t g = 0; g < device.gpcs.size(); ++g) smallest = size(g) < size(smallest) ? g : smallest;
  std::map<int, int> group;  // of each GPC
  for (int i = 0; i < groups.count; ++i) {
    int g = gpc_of(device, found[i * cluster]);
    auto const& first = device.gpcs[0];
    bool const is_alone = std::find(first.end() - device.alone, first.end(), found[i * cluster]) != first.end();
    if (is_alone) g = int(smallest);
    if (group.emplace(g, groups.of[i]).first->second != groups.of[i]) return false;
  }
  std::map<int, int> back;
  for (auto const& [g, number] : group) back[number] = g;
  return back.size() == group.size();
}

int main() {
  using cutlass_ops::placement::of;
  devices[0] = device_of({16, 18, 16, 18, 16, 16, 16, 16});
  REQUIRE(right(devices[0], 1, of<1>(0)) && right(devices[0], 2, of<2>(0)));
  int const launches = devices[0].launches;
  REQUIRE(of<2>(0).of == of<2>(0).of && devices[0].launches == launches);  // found once

  devices[1] = device_of({18, 16, 10, 16});  // without clusters of sixteen, and with some that no cluster of four takes
  devices[1].largest = 8, devices[1].alone = 2;
  REQUIRE(right(devices[1], 1, of<1>(1)) && right(devices[1], 2, of<2>(1)));

  devices[2] = devices[0];
  devices[2].is_busy = true;
  REQUIRE(of<1>(2).of == nullptr && devices[2].launches == launches);
  devices[2].is_busy = false;
  REQUIRE(right(devices[2], 1, of<1>(2)));  // it was tried again

  devices[3] = devices[0];
  devices[3].is_shared = true;  // another kernel was there: two blocks on one multiprocessor
  REQUIRE(of<1>(3).of == nullptr);

  devices[4] = devices[0];
  devices[4].is_restless = true;  // no two launches are placed alike
  for (int i = 0; i < 20; ++i) REQUIRE(of<1>(4).of == nullptr);
  int const tried = devices[4].launches;
  REQUIRE(of<1>(4).of == nullptr && devices[4].launches == tried);  // given up

  devices[5] = device_of({1, 1, 1});  // no clusters at all
  devices[5].largest = 1;
  REQUIRE(of<1>(5).of == nullptr);
  REQUIRE(alive == 6 * 2 - 4);  // one observer for each device and size of clusters
  std::puts("ok");
}
