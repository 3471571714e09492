// A library with a kernel's exports and no kernel: it says what a launch was given, and answers what it is told to.

#include <cstdio>

#include <tvm/ffi/c_api.h>
#include <tvm/ffi/extra/c_env_api.h>

namespace {

__attribute__((constructor)) void mapped() { std::printf("mapped\n"); }

void set(TVMFFIAny* result, int64_t value) {
  result->type_index = kTVMFFIInt;
  result->zero_padding = 0;
  result->v_int64 = value;
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

// The raster order is the status that it returns; a swizzle of 0 is a failure of CUDA.
EXPORT int __tvm_ffi_launch(void*, TVMFFIAny const* args, int32_t count, TVMFFIAny* result) {
  for (int32_t i = 0; i < count; ++i) {
    if (args[i].type_index == kTVMFFIDLTensorPtr) {
      auto const* t = static_cast<DLTensor const*>(args[i].v_ptr);
      std::printf("tensor code %d bits %d device %d:%d shape", int(t->dtype.code), int(t->dtype.bits),
                  int(t->device.device_type), int(t->device.device_id));
      for (int d = 0; d < t->ndim; ++d) std::printf(" %lld", static_cast<long long>(t->shape[d]));
      std::printf(" strides");
      for (int d = 0; d < t->ndim; ++d) std::printf(" %lld", static_cast<long long>(t->strides[d]));
      std::printf("\n");
    } else if (args[i].type_index == kTVMFFIFloat) {
      std::printf("float %g\n", args[i].v_float64);
    } else if (args[i].type_index == kTVMFFIInt) {
      std::printf("integer %lld\n", static_cast<long long>(args[i].v_int64));
    } else {
      std::printf("none %d\n", int(args[i].type_index == kTVMFFINone));
    }
  }
  std::printf("stream %p\n", TVMFFIEnvGetStream(kDLCUDA, 1));
  if (args[count - 2].v_int64 == 0) {
    TVMFFIErrorSetRaisedFromCStr("RuntimeError", "launch failed: out of memory");
    return -1;
  }
  set(result, args[count - 3].v_int64);
  return 0;
}

EXPORT int __tvm_ffi_workspace_size(void*, TVMFFIAny const* args, int32_t count, TVMFFIAny* result) {
  int64_t sum = 0;
  for (int32_t i = 0; i < count; ++i) sum = 10 * sum + args[i].v_int64;
  set(result, sum);
  return 0;
}
