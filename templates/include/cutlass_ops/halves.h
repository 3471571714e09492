// The two halves of a rendered file, and what joins them.
//
// A rendered file is an ordinary CUDA source: `nvcc -shared` makes a library of it. cutlass_ops compiles its halves at the
// same time instead: nvcc the device's, the C++ compiler alone the host's. The latter compiles no kernel. Of most kinds, it
// reads kernels, since their types say what a launch needs, and this header lets it. Of those for Sm90 it knows plain
// structures alone (sm90_launch.h). image.S puts the machine code into the library. This header makes it known to the CUDA
// runtime, as nvcc would.

#pragma once

#if !defined(__CUDACC__)
#include <cuda.h>
// CUTLASS asks what the compiler can do; both halves must hear the same.
#define __CUDACC_VER_MAJOR__ (CUDA_VERSION / 1000)
#define __CUDACC_VER_MINOR__ (CUDA_VERSION % 1000 / 10)
#endif

#include <cuda_runtime.h>

// Whether this pass compiles what runs on the host.
#if defined(__CUDA_ARCH__)
#define CUTLASS_OPS_HOST 0
#else
#define CUTLASS_OPS_HOST 1
#endif

namespace cutlass_ops {

#if defined(__CUDA_ARCH__)
// nvcc names internal symbols after a file's first external one. It is this one, whichever kernels are in the file, so that
// a kernel has the same bytes compiled alone and with others. A host's variable leaves nothing in device code.
int first_external_symbol = 0;
#endif

// What the runtime's functions take for a kernel.
template <class Kernel>
void const* handle(Kernel* kernel) {
  return reinterpret_cast<void const*>(kernel);
}

#if CUTLASS_OPS_HOST
// The kernels of this library, each in the list before any function of the library can be called.
struct Listed {
  explicit Listed(void const* kernel) : kernel(kernel), next(first()) { first() = this; }
  Listed(Listed const&) = delete;

  static Listed const*& first() {
    static Listed const* listed = nullptr;
    return listed;
  }

  void const* kernel;
  Listed const* next;
};
#define CUTLASS_OPS_LIST(name) \
  [[maybe_unused]] static cutlass_ops::Listed const name##_is_listed(cutlass_ops::handle(&name));
#else
#define CUTLASS_OPS_LIST(name)
#endif

}  // namespace cutlass_ops

// CUTLASS_OPS_KERNEL(name, Kernel) defines a kernel, for the device, and its handle `&name`, for the runtime. `Kernel` offers
//   struct Params; static constexpr int kThreads; static __device__ void run(Params const&);
// The name is that of the function in traces and profiles.
#if defined(__CUDACC__)

#define CUTLASS_OPS_KERNEL(name, ...)                                     \
  extern "C" __global__ void __launch_bounds__(__VA_ARGS__::kThreads, 1) \
      name(__grid_constant__ __VA_ARGS__::Params const params) {          \
    __VA_ARGS__::run(params);                                             \
  }                                                                       \
  CUTLASS_OPS_LIST(name)
#define CUTLASS_OPS_COMPLETE_IMAGE()

#else

#define CUTLASS_OPS_KERNEL(name, ...)                                                                                  \
  static char const name = 0;                                                                                          \
  [[maybe_unused]] static bool const name##_is_known = cutlass_ops::Image::get().add(&name, #name);                    \
  CUTLASS_OPS_LIST(name)                                                                                               \
  /* Read by cutlass_ops/compilation/abi_check.py: bytes of the kernel's parameters, which both halves must agree about. */     \
  __attribute__((used, section(".cutlass_ops." #name))) static unsigned const name##_bytes = sizeof(__VA_ARGS__::Params);
#define CUTLASS_OPS_COMPLETE_IMAGE() \
  [[maybe_unused]] static bool const cutlass_ops_image_is_complete = cutlass_ops::Image::get().complete();

// ---- The runtime's interface to what nvcc generates --------------------------------------------------------------

extern "C" {
extern char const cutlass_ops_image[];
void** __cudaRegisterFatBinary(void* wrapper);
void __cudaRegisterFatBinaryEnd(void** image);
void __cudaUnregisterFatBinary(void** image);
void __cudaRegisterFunction(void** image, char const* handle, char* name, char const* device_name, int thread_limit,
                            uint3* thread, uint3* block, dim3* block_size, dim3* grid_size, int* warp_size);
}

namespace cutlass_ops {

// The machine code of this library, made known to the runtime before any function of the library can be called.
class Image {
 public:
  static Image& get() {
    static Image image;
    return image;
  }

  bool add(char const* handle, char const* name) {
    __cudaRegisterFunction(image_, handle, const_cast<char*>(name), name, -1, nullptr, nullptr, nullptr, nullptr,
                           nullptr);
    return true;
  }

  bool complete() {
    __cudaRegisterFatBinaryEnd(image_);
    return true;
  }

  Image(Image const&) = delete;

 private:
  struct Wrapper {
    int magic = 0x466243b1, version = 1;
    void const* data = cutlass_ops_image;
    void* unused = nullptr;
  };

  Image() : image_(__cudaRegisterFatBinary(&wrapper_)) {}
  ~Image() { __cudaUnregisterFatBinary(image_); }

  Wrapper wrapper_;
  void** image_;
};

}  // namespace cutlass_ops

// ---- What nvcc declares by itself --------------------------------------------------------------------------------

// Names that CUTLASS's templates use without depending on an argument. Nothing here is ever called.
extern uint3 const threadIdx, blockIdx;
extern dim3 const blockDim, gridDim;
void __syncthreads();
int __syncthreads_and(int);
void __syncwarp(unsigned = 0xffffffff);
float __fdividef(float, float);
float __int_as_float(int);
float rsqrtf(float);

namespace cutlass::arch {
int LaneId();
int SmId();
}  // namespace cutlass::arch

namespace nvcuda::wmma {
enum layout_t { mem_row_major, mem_col_major };
struct row_major;
struct col_major;
struct matrix_a;
struct matrix_b;
struct accumulator;
template <class Use, int M, int N, int K, class Element, class Layout = void>
class fragment;
template <class... T>
void fill_fragment(T&&...);
template <class... T>
void load_matrix_sync(T&&...);
template <class... T>
void store_matrix_sync(T&&...);
template <class... T>
void mma_sync(T&&...);
template <class... T>
void bmma_sync(T&&...);
namespace experimental {
enum bmmaBitOp { bmmaBitOpXOR, bmmaBitOpAND };
enum bmmaAccumulateOp { bmmaAccumulateOpPOPC };
namespace precision {
struct u4;
struct s4;
struct b1;
}  // namespace precision
}  // namespace experimental
}  // namespace nvcuda::wmma

#endif
