// relu(A @ B + bias) in BF16 by a bundle's kernel, without Python, compared with the same in double.
//
//     bias_relu [--signed-by PUBLIC_KEY]... BUNDLE M N K [KEY]
//
// KEY is the beginning of a kernel's key; by default the bundle's choice for the weight. Where public keys are named, one of
// them must have signed the bundle. Exit codes: 0 the result is within
// the bound, 1 it is not, or something failed, 2 wrong usage, 77 there is no GPU.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "cutlass_ops/bundle.h"

namespace {

constexpr int kNoGpu = 77;
// Leading dimensions are no part of a kernel: here rows of A and D lie this many elements further apart than they are long.
constexpr int64_t kApart = 8;

void check(cudaError_t error, char const* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

float from_bf16(uint16_t bits) {
  uint32_t const wide = uint32_t(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

uint16_t to_bf16(float value) {  // to nearest even; the values here are no NaN
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

std::vector<uint16_t> random_bf16(int64_t count, unsigned seed) {
  std::mt19937 generator(seed);
  std::uniform_real_distribution<float> uniform(-1, 1);
  std::vector<uint16_t> values(static_cast<size_t>(count));
  for (uint16_t& value : values) value = to_bf16(uniform(generator));
  return values;
}

// Device memory with a copy of host data, or just as many bytes.
class Device {
 public:
  explicit Device(std::vector<uint16_t> const& host) : Device(host.size() * sizeof(uint16_t)) {
    check(cudaMemcpy(data_, host.data(), host.size() * sizeof(uint16_t), cudaMemcpyHostToDevice), "copying to the GPU");
  }
  explicit Device(size_t bytes) { check(cudaMalloc(&data_, bytes), "allocating on the GPU"); }
  ~Device() { cudaFree(data_); }
  Device(Device const&) = delete;
  Device& operator=(Device const&) = delete;
  void* get() const { return data_; }

 private:
  void* data_ = nullptr;
};

// The kernel for a problem: the bundle's choice, or, where its catalogue did not name the weight, the first that runs here.
cutlass_ops::Choice choose(cutlass_ops::Signature const& signature, cutlass_ops::Capability device, int64_t m, int64_t n,
                           int64_t k) {
  try {
    return signature.choose(device, m, n, k);
  } catch (cutlass_ops::LoadError const& error) {
    for (cutlass_ops::KernelInfo const& kernel : signature.kernels) {
      if (!kernel.runs_on(device)) continue;
      std::printf("%s\n", error.what());
      return {kernel.key, {}};
    }
    throw;
  }
}

int run(std::vector<std::string> const& public_keys, std::string const& path, int64_t m, int64_t n, int64_t k,
        std::string const& key) {
  int devices = 0;
  bool const has_gpu = cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0;
  cutlass_ops::Capability capability{9, 0};  // without a GPU, as on an H100
  int device = 0;
  if (has_gpu) {
    check(cudaGetDevice(&device), "asking for the current device");
    check(cudaDeviceGetAttribute(&capability.major, cudaDevAttrComputeCapabilityMajor, device), "asking the device");
    check(cudaDeviceGetAttribute(&capability.minor, cudaDevAttrComputeCapabilityMinor, device), "asking the device");
  }

  cutlass_ops::Bundle const bundle(path, "", public_keys);
  auto const& signature = bundle.signature("d = relu(add(acc, bias))", {"bf16.row", "bf16.col", "bf16.row"});
  cutlass_ops::Choice const choice = key.empty() ? choose(signature, capability, m, n, k) : cutlass_ops::Choice{key, {}};
  cutlass_ops::Kernel const kernel = bundle.load(choice.key);
  std::printf("kernel %.12s of %s\n", choice.key.c_str(), path.c_str());
  if (!has_gpu) {
    std::printf("no CUDA device: the kernel was checked and loaded, and not run\n");
    return kNoGpu;
  }

  int64_t const lda = k + kApart, ldd = n + kApart;
  std::vector<uint16_t> const a = random_bf16(m * lda, 1), weight = random_bf16(n * k, 2), bias = random_bf16(n, 3);
  std::vector<uint16_t> d(static_cast<size_t>(m * ldd), to_bf16(-1));  // no result of relu
  Device const device_a(a), device_weight(weight), device_bias(bias), device_d(d);
  int64_t const bytes = kernel.workspace_size(m, n, k, choice.order);
  Device const workspace(static_cast<size_t>(std::max<int64_t>(bytes, 1)));

  using cutlass_ops::kBF16;
  using cutlass_ops::Tensor;
  cudaStream_t stream;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "making a stream");
  kernel.launch(
      {
          Tensor::row_major(device_a.get(), kBF16, m, k, lda, device),
          Tensor::column_major(device_weight.get(), kBF16, k, n, k, device),  // (N, K) in memory
          Tensor::row_major(device_d.get(), kBF16, m, n, ldd, device),
          Tensor::vector(device_bias.get(), kBF16, n, device),
      },
      choice.order, {workspace.get(), bytes}, stream);
  check(cudaStreamSynchronize(stream), "running the kernel");
  check(cudaStreamDestroy(stream), "releasing the stream");
  check(cudaMemcpy(d.data(), device_d.get(), d.size() * sizeof(uint16_t), cudaMemcpyDeviceToHost), "copying from the GPU");

  // One rounding to BF16 (2^-8 of the result), and one of each of K additions in FP32 (2^-23 of what is added up, since
  // Tensor Cores truncate).
  double worst = 0;
  int64_t wrong = 0;
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      double sum = from_bf16(bias[j]), magnitude = std::abs(sum);
      for (int64_t p = 0; p < k; ++p) {
        double const product = double(from_bf16(a[i * lda + p])) * from_bf16(weight[j * k + p]);
        sum += product;
        magnitude += std::abs(product);
      }
      double const wanted = std::max(sum, 0.0), got = from_bf16(d[i * ldd + j]);
      double const bound = std::ldexp(wanted, -8) + std::ldexp(magnitude * double(k), -23);
      double const ratio = std::abs(got - wanted) / bound;
      worst = std::max(worst, ratio);
      if (!(ratio <= 1)) ++wrong;  // so is a NaN
    }
    for (int64_t j = n; j < ldd; ++j) {
      if (d[i * ldd + j] != to_bf16(-1)) throw std::runtime_error("the kernel wrote between D's rows");
    }
  }
  std::printf("%lld x %lld x %lld: ", static_cast<long long>(m), static_cast<long long>(n), static_cast<long long>(k));
  if (wrong != 0) {
    std::printf("%lld elements are wrong; the largest error is %.3f of the bound\n", static_cast<long long>(wrong), worst);
    return 1;
  }
  std::printf("every element is within the bound; the largest error is %.3f of it\n", worst);
  return 0;
}

int64_t extent(char const* text) {
  size_t used = 0;
  long long value = 0;
  try {
    value = std::stoll(text, &used);
  } catch (std::logic_error const&) {
    used = 0;
  }
  if (used == 0 || text[used] != '\0' || value < 1 || value > INT32_MAX) {
    throw std::invalid_argument(std::string(text) + " is no extent: an integer from 1 to 2147483647 is needed");
  }
  return value;
}

}  // namespace

int main(int count, char** words) {
  try {
    std::vector<std::string> public_keys;
    for (; count > 2 && std::string(words[1]) == "--signed-by"; words += 2, count -= 2) public_keys.emplace_back(words[2]);
    if (count != 5 && count != 6) throw std::invalid_argument("usage: bias_relu [--signed-by PUBLIC_KEY]... BUNDLE M N K [KEY]");
    return run(public_keys, words[1], extent(words[2]), extent(words[3]), extent(words[4]), count == 6 ? words[5] : "");
  } catch (std::invalid_argument const& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 2;
  } catch (std::exception const& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
}
