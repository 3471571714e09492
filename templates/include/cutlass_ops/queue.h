// Where a call's kernels go: into its stream, or into a recording that launches them again without another look at arguments.

#pragma once

#include <cstddef>
#include <cstring>
#include <memory>
#include <vector>

#include "cutlass_ops/halves.h"

#include <tvm/ffi/c_api.h>

namespace cutlass_ops {

constexpr int kMaxDevices = 64;

// Makes the operands' device and its context current for a call. A thread that has not called CUDA yet has a current device
// without a context, and the driver encodes no descriptor there.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    static thread_local uint64_t entered = 0;  // by this thread, a bit for each device
    static_assert(kMaxDevices <= 64);
    cudaGetDevice(&previous_);
    changed_ = previous_ != device;
    if (changed_ || (entered >> device & 1) == 0) {
      // The launch fails if this does, and the next one tries again.
      if (cudaSetDevice(device) == cudaSuccess) entered |= uint64_t(1) << device;
    }
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(previous_);
  }
  DeviceGuard(DeviceGuard const&) = delete;
  DeviceGuard& operator=(DeviceGuard const&) = delete;

 private:
  int previous_ = 0;
  bool changed_ = false;
};

// The kernels of one call, with their parameters. Nothing in it changes once it is complete, so threads may share it.
class Recording {
 public:
  // `kernel` is a name for messages.
  explicit Recording(char const* kernel) : kernel_(kernel) {}

  // A launch of these kernels needs more than their parameters, such as a memset. So the recording is of no use.
  void give_up() { given_up_ = true; }
  bool given_up() const { return given_up_; }
  char const* kernel() const { return kernel_; }

  void complete(int device, DLPackCurrentWorkStream streams) {
    device_ = device;
    streams_ = streams;
  }

  void add(cudaLaunchConfig_t const& config, void const* kernel, void const* params, size_t bytes) {
    Step step;
    step.kernel = kernel;
    step.config = config;
    for (unsigned i = 0; i < config.numAttrs && i < kMaxAttributes; ++i) step.attributes[i] = config.attrs[i];
    if (config.numAttrs > kMaxAttributes) give_up();
    step.params.reset(new Line[(bytes + sizeof(Line) - 1) / sizeof(Line)]);
    std::memcpy(static_cast<void*>(step.params.get()), params, bytes);
    steps_.push_back(std::move(step));
  }

  // Launches the kernels on the stream that the owner of the tensors has for current.
  cudaError_t repeat() const {
    void* stream = nullptr;
    if (streams_(kDLCUDA, device_, &stream) != 0) return cudaErrorInvalidResourceHandle;
    DeviceGuard const guard(device_);
    for (Step const& step : steps_) {
      cudaLaunchConfig_t config = step.config;
      config.stream = static_cast<cudaStream_t>(stream);
      config.attrs = const_cast<cudaLaunchAttribute*>(step.attributes);
      void* arguments[] = {step.params.get()};
      if (cudaError_t const error = cudaLaunchKernelExC(&config, step.kernel, arguments); error != cudaSuccess) return error;
    }
    return cudaSuccess;
  }

 private:
  static constexpr unsigned kMaxAttributes = 2;
  struct alignas(64) Line {  // as a TMA descriptor
    unsigned char bytes[64];
  };
  struct Step {
    void const* kernel = nullptr;
    cudaLaunchConfig_t config{};
    cudaLaunchAttribute attributes[kMaxAttributes];
    std::unique_ptr<Line[]> params;
  };

  char const* kernel_;
  int device_ = 0;
  DLPackCurrentWorkStream streams_ = nullptr;
  bool given_up_ = false;
  std::vector<Step> steps_;
};

// A call's stream, unless its kernels are recorded.
class Queue {
 public:
  explicit Queue(cudaStream_t stream) : stream_(stream) {}
  explicit Queue(Recording& recording) : recording_(&recording) {}

  cudaStream_t stream() const { return stream_; }

  // Asked before anything that a recording cannot repeat. If the answer is yes, leave it out: nothing is launched.
  bool gives_up() const {
    if (recording_ != nullptr) recording_->give_up();
    return recording_ != nullptr;
  }

  template <class Params>
  cudaError_t launch(cudaLaunchConfig_t config, void const* kernel, Params const& params) const {
    if (recording_ != nullptr) return recording_->add(config, kernel, &params, sizeof(Params)), cudaSuccess;
    config.stream = stream_;
    void* arguments[] = {const_cast<Params*>(&params)};
    return cudaLaunchKernelExC(&config, kernel, arguments);
  }

 private:
  cudaStream_t stream_ = nullptr;
  Recording* recording_ = nullptr;
};

}  // namespace cutlass_ops
