// What every kernel shares on the host: decoding one call's arguments, checking them against what the kernel was
// compiled for, and the current stream. Only tvm-ffi's C interface is used, which keeps this header cheap to compile.
//
// A launch takes (a, b, d, inputs..., outputs..., raster, swizzle, workspace) and returns a status: 0 after a launch, else
// 16 * (position of the argument) + Reason. Nothing was launched then, and the caller explains the reason in words. CUDA's
// own failures are raised as errors.
//
// `prepare` takes the same, and the address of a DLPackExchangeAPI, which says what stream is current. It launches nothing and
// returns a function without arguments that launches with exactly these tensors, a status, or None where more would have to be
// done at each launch. The caller keeps the tensors and the workspace.
//
// `load` takes a device's number, and has its driver load the kernels, which it would otherwise do at their first launch.

#pragma once

#include <cstdint>
#include <cstdio>

#include "cutlass_ops/halves.h"

#include "cutlass_ops/queue.h"

#include <tvm/ffi/c_api.h>
#include <tvm/ffi/extra/c_env_api.h>

#include "cutlass/detail/helper_macros.hpp"

namespace cutlass_ops {

enum class Major { kRow, kCol };

// Numbered as in cutlass_ops/artifacts/loader.py.
enum class Reason : int {
  kNone = 0,
  kKind = 1,       // not a tensor, or not a number
  kShape = 2,      // number of dimensions, or an extent that disagrees with the other arguments
  kDtype = 3,
  kDevice = 4,
  kMajor = 5,      // not adjacent in memory along the expected dimension
  kAlignment = 6,  // address, leading dimension or extent
  kOverlap = 7,    // an output shares memory with another argument
  kWorkspace = 8,  // too small
  kCount = 9,      // number of arguments
  kNull = 10,      // no memory behind elements
};

struct Problem {
  int m = 0;
  int n = 0;
  int k = 0;
  int count = 1;  // GEMMs of these extents
  int inner = 1;  // of these, how many lie one distance apart: see batched.h
};

// An operand in two dimensions, leading ones folded into the first; `ld` is the distance in elements between neighbours along the strided dimension.
struct Matrix {
  void* data = nullptr;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t ld = 0;

  template <class Element>
  CUTLASS_HOST_DEVICE Element* ptr() const { return static_cast<Element*>(data); }
};

// Scales of an operand's blocks: `data[i * stride + k * step_stride]` is that of its i-th block of rows at the k-th block of K.
struct StridedScales {
  float const* data = nullptr;
  int64_t stride = 0, step_stride = 0;
  int last = 0;  // of the blocks of rows
};

// The same as an output. Each of its rows has a line of blocks.
struct WrittenScales {
  float* data = nullptr;
  int64_t stride = 0, step_stride = 0;
};

template <class Element>
struct Scalar {
  Element value = Element(0);
  Element const* ptr = nullptr;  // on the device; if set, the value is read there
};

// What DLPack calls an element type. A kernel's source has a name for each of its types.
template <class Element>
struct DataType;

#define CUTLASS_OPS_TYPE(Element, type_code)                   \
  template <>                                                  \
  struct cutlass_ops::DataType<Element> {                      \
    static constexpr int code = type_code, bits = 8 * sizeof(Element); \
  };

// Bytes that an argument occupies: `rows` runs of `width` bytes, `pitch` bytes apart.
struct Extent {
  uintptr_t begin = 0;
  uintptr_t width = 0;
  uintptr_t pitch = 0;
  uintptr_t rows = 0;
  bool is_tile = false;  // an (M, N) input: may be overwritten in place by an output of the same layout

  uintptr_t end() const { return begin + (rows - 1) * pitch + width; }
  bool operator==(Extent const& o) const {
    return begin == o.begin && width == o.width && pitch == o.pitch && rows == o.rows;
  }
};

inline bool overlap(Extent const& x, Extent const& y) {
  if (x.rows == 0 || y.rows == 0 || x.width == 0 || y.width == 0) return false;
  if (x.end() <= y.begin || y.end() <= x.begin) return false;
  // Column slices of one buffer interleave without sharing a byte.
  if (x.pitch == y.pitch && x.rows > 1) {
    uintptr_t const offset = (x.begin <= y.begin) ? (y.begin - x.begin) % x.pitch : (x.begin - y.begin) % x.pitch;
    uintptr_t const first = (x.begin <= y.begin) ? x.width : y.width;
    uintptr_t const second = (x.begin <= y.begin) ? y.width : x.width;
    return !(offset >= first && offset + second <= x.pitch);
  }
  return true;
}

// One call's arguments, read in order. The first that breaks the contract sets the status; what is read after that is
// empty, so that the caller checks once.
class Call {
 public:
  static constexpr int kMaxArguments = 32;
  static constexpr int kAnyDimensions = 0;

  Call(TVMFFIAny const* args, int32_t count, Recording* recording = nullptr)
      : args_(args), count_(count), recording_(recording) {
    if (count > kMaxArguments) fail(0, Reason::kCount);
  }

  template <class Element, Major kMajor, int kAlignment, bool kAlignedExtent>
  Matrix input() { return matrix<Element, kMajor, kAlignment, kAlignedExtent>(next_++, -1, -1, false, false); }

  // A second B, of the first one's shape.
  template <class Element, Major kMajor, int kAlignment>
  Matrix second(Problem p) {
    if (p.n > INT32_MAX / 2) fail(next_, Reason::kShape);  // both together are counted in 32 bits
    return matrix<Element, kMajor, kAlignment, false>(next_++, p.k, p.n, false, false);
  }

  // D: the output whose shape is the problem's.
  template <class Element, Major kMajor, int kAlignment, bool kAlignedExtent>
  Matrix result() { return matrix<Element, kMajor, kAlignment, kAlignedExtent>(next_++, -1, -1, true, false); }

  Problem problem(Matrix const& a, Matrix const& b, Matrix const& d) {
    constexpr int64_t kMax = INT32_MAX;
    if (a.rows > kMax || a.cols > kMax) fail(0, Reason::kShape);
    if (b.rows != a.cols || b.cols > kMax) fail(1, Reason::kShape);
    if (d.rows != a.rows || d.cols != b.cols) fail(2, Reason::kShape);
    return {int(a.rows), int(b.cols), int(a.cols)};
  }

  // M and N of one matrix alone.
  Problem problem(Matrix const& x) {
    constexpr int64_t kMax = INT32_MAX;
    if (x.rows > kMax || x.cols > kMax) fail(0, Reason::kShape);
    return {int(x.rows), int(x.cols), 0};
  }

  template <class Element, Major kMajor, int kAlignment, bool kAlignedExtent>
  Matrix tile(Problem p) {
    return matrix<Element, kMajor, kAlignment, kAlignedExtent>(next_++, p.m, p.n, false, true);
  }

  template <class Element, Major kMajor, int kAlignment, bool kAlignedExtent>
  Matrix tile_output(Problem p) {
    return matrix<Element, kMajor, kAlignment, kAlignedExtent>(next_++, p.m, p.n, true, false);
  }

  template <class Element>
  Element* row(Problem p) { return vector<Element>(next_++, p.n, 1, false); }
  template <class Element>
  Element* col(Problem p) { return vector<Element>(next_++, p.m, kAnyDimensions, false); }
  template <class Element>
  Element* row_output(Problem p) { return vector<Element>(next_++, p.n, 1, true); }
  template <class Element>
  Element* col_output(Problem p) { return vector<Element>(next_++, p.m, kAnyDimensions, true); }

  // Scales of blocks along the last dimension, K: one row of scales for each `block` of an operand's `extent` rows. They may
  // have any strides. A stride of 0 means that several blocks share a scale.
  template <class Element>
  StridedScales blocks(int64_t extent, int64_t block, int64_t k, int64_t k_block) {
    int64_t const rows = (extent + block - 1) / block;
    auto const [data, stride, step_stride] = scales<Element>(next_++, rows, (k + k_block - 1) / k_block, false);
    return {data, stride, step_stride, int(rows) - 1};
  }

  // The same as an output: any strides with which no two scales share memory.
  template <class Element>
  WrittenScales blocks_output(int64_t extent, int64_t block, int64_t n, int64_t n_block) {
    return scales<Element>(next_++, (extent + block - 1) / block, (n + n_block - 1) / n_block, true);
  }

  template <class Element>
  Scalar<Element> scalar() {
    int const at = next_++;
    if (at >= count_) return fail(at, Reason::kCount), Scalar<Element>{};
    TVMFFIAny const& arg = args_[at];
    if (arg.type_index == kTVMFFIFloat) return {Element(float(arg.v_float64)), nullptr};
    if (arg.type_index == kTVMFFIInt) return {Element(float(arg.v_int64)), nullptr};
    DLTensor const* t = tensor<Element>(at);
    if (t == nullptr) return {};
    if (t->ndim != 0) return fail(at, Reason::kShape), Scalar<Element>{};
    if (is_null(t)) return fail(at, Reason::kNull), Scalar<Element>{};
    add({address(t), sizeof(Element), sizeof(Element), 1, false}, at, false);
    return {Element(0), reinterpret_cast<Element const*>(address(t))};
  }

  // The declared workspace: None where none is needed, else a tensor of at least `bytes` bytes.
  void* workspace(size_t bytes) {
    int const at = next_++;
    if (bytes == 0 || status_ != 0) return nullptr;
    if (at >= count_) return fail(at, Reason::kCount), nullptr;
    DLTensor const* t = as_tensor(args_[at]);
    if (t == nullptr) return fail(at, Reason::kWorkspace), nullptr;
    if (t->device.device_type != kDLCUDA || t->device.device_id != device_) return fail(at, Reason::kDevice), nullptr;
    size_t size = (t->dtype.bits * t->dtype.lanes + 7) / 8;
    for (int i = 0; i < t->ndim; ++i) size *= size_t(t->shape[i]);
    if (size > 0 && is_null(t)) return fail(at, Reason::kNull), nullptr;
    if (size < bytes || address(t) % 256 != 0) return fail(at, Reason::kWorkspace), nullptr;
    return reinterpret_cast<void*>(address(t));
  }

  int integer() {
    int const at = next_++;
    if (at >= count_) return fail(at, Reason::kCount), 0;
    if (args_[at].type_index != kTVMFFIInt) return fail(at, Reason::kKind), 0;
    return int(args_[at].v_int64);
  }

  // 0 if every argument read so far keeps the contract.
  int status() {
    if (status_ == 0) check_overlap();
    return status_;
  }

  int device() const { return device_; }
  Queue queue() const {
    if (recording_ != nullptr) return Queue(*recording_);
    return Queue(static_cast<cudaStream_t>(TVMFFIEnvGetStream(kDLCUDA, device_)));
  }

 private:
  friend class BatchedOperands;

  static uintptr_t address(DLTensor const* t) { return reinterpret_cast<uintptr_t>(t->data) + t->byte_offset; }

  // Whether a tensor only stands for others, as PyTorch's wrappers do. It has a type and a shape, but no memory.
  static bool is_null(DLTensor const* t) { return t->data == nullptr; }

  static DLTensor const* as_tensor(TVMFFIAny const& arg) {
    if (arg.type_index == kTVMFFIDLTensorPtr) return static_cast<DLTensor const*>(arg.v_ptr);
    if (arg.type_index == kTVMFFITensor) return TVMFFITensorGetDLTensorPtr(arg.v_obj);
    return nullptr;
  }

  void fail(int at, Reason reason) {
    if (status_ == 0) status_ = 16 * at + int(reason);
  }

  // What an argument has to be. Its code is there once, for all types: a distribution has thousands of libraries.
  struct Expected {
    int code;
    int bits;
    Major major = Major::kRow;
    int alignment = 1;  // of lines, in elements
    bool aligned_extent = false;

    int64_t bytes() const { return bits / 8; }
  };

  template <class Element>
  static constexpr Expected expected() { return {DataType<Element>::code, DataType<Element>::bits}; }
  template <class Element, Major kMajor, int kAlignment, bool kAlignedExtent>
  static constexpr Expected expected() {
    return {DataType<Element>::code, DataType<Element>::bits, kMajor, kAlignment, kAlignedExtent};
  }

  template <class Element>
  DLTensor const* tensor(int at) { return tensor(at, expected<Element>()); }

  DLTensor const* tensor(int at, Expected const& type) {
    if (status_ != 0) return nullptr;
    if (at >= count_) return fail(at, Reason::kCount), nullptr;
    DLTensor const* t = as_tensor(args_[at]);
    if (t == nullptr) return fail(at, Reason::kKind), nullptr;
    if (t->dtype.code != type.code || t->dtype.bits != type.bits || t->dtype.lanes != 1) {
      return fail(at, Reason::kDtype), nullptr;
    }
    if (t->device.device_type != kDLCUDA) return fail(at, Reason::kDevice), nullptr;
    if (device_ < 0) device_ = t->device.device_id;
    if (t->device.device_id != device_) return fail(at, Reason::kDevice), nullptr;
    return t;
  }

  template <class Element, Major kMajor, int kAlignment, bool kAlignedExtent>
  Matrix matrix(int at, int64_t rows, int64_t cols, bool output, bool is_tile) {
    return matrix(at, expected<Element, kMajor, kAlignment, kAlignedExtent>(), rows, cols, output, is_tile);
  }

  Matrix matrix(int at, Expected const& type, int64_t rows, int64_t cols, bool output, bool is_tile) {
    DLTensor const* t = tensor(at, type);
    if (t == nullptr) return {};
    if (t->ndim < 1) return fail(at, Reason::kShape), Matrix{};
    Dimension const row = fold(t, t->ndim - 1), col = {t->shape[t->ndim - 1], t->strides[t->ndim - 1], true};
    Matrix const r = lines(at, type, t, row, col, rows, cols);
    if (r.data == nullptr) return r;
    bool const by_rows = type.major == Major::kRow;
    int64_t const length = by_rows ? r.cols : r.rows, runs = by_rows ? r.rows : r.cols;
    add({address(t), uintptr_t(length * type.bytes()), uintptr_t(r.ld * type.bytes()), uintptr_t(runs), is_tile}, at,
        output);
    return r;
  }

  struct Dimension {
    int64_t extent;
    int64_t stride;
    bool uniform;  // whether one stride leads through all of it
  };

  // A tensor's matrix, given its dimensions. It has no data if the tensor breaks the contract.
  Matrix lines(int at, Expected const& type, DLTensor const* t, Dimension row, Dimension col, int64_t rows, int64_t cols) {
    if ((rows >= 0 && row.extent != rows) || (cols >= 0 && col.extent != cols) || row.extent < 1 || col.extent < 1) {
      return fail(at, Reason::kShape), Matrix{};
    }
    if (is_null(t)) return fail(at, Reason::kNull), Matrix{};
    bool const by_rows = type.major == Major::kRow;
    Dimension const inner = by_rows ? col : row, outer = by_rows ? row : col;
    if (!row.uniform || (inner.extent > 1 && inner.stride != 1) || (outer.extent > 1 && outer.stride < inner.extent)) {
      return fail(at, Reason::kMajor), Matrix{};
    }
    int64_t const runs = outer.extent, length = inner.extent, alignment = type.alignment;
    if (address(t) % uintptr_t(alignment * type.bytes()) != 0 || (runs > 1 && outer.stride % alignment != 0) ||
        (type.aligned_extent && length % alignment != 0)) {
      return fail(at, Reason::kAlignment), Matrix{};
    }
    // A single run has no leading dimension; give it one that every loader accepts.
    int64_t const ld = (runs == 1) ? (length + alignment - 1) / alignment * alignment : outer.stride;
    return {reinterpret_cast<void*>(address(t)), row.extent, col.extent, ld};
  }

  template <class Element>
  WrittenScales scales(int at, int64_t extent, int64_t steps, bool output) {
    static_assert(sizeof(Element) == sizeof(float));
    DLTensor const* t = tensor<Element>(at);
    if (t == nullptr) return {};
    if (t->ndim < 2) return fail(at, Reason::kShape), WrittenScales{};
    Dimension const rows = fold(t, t->ndim - 1);
    int64_t const stride = rows.stride, step_stride = t->strides[t->ndim - 1];
    if (rows.extent != extent || t->shape[t->ndim - 1] != steps) return fail(at, Reason::kShape), WrittenScales{};
    if (is_null(t)) return fail(at, Reason::kNull), WrittenScales{};
    int64_t const along = (extent - 1) * stride, across = (steps - 1) * step_stride;  // from the first to the last
    bool const apart = (extent == 1 || stride > 0) && (steps == 1 || step_stride > 0) &&
                       (extent == 1 || steps == 1 || stride > across || step_stride > along);
    if (!rows.uniform || stride < 0 || step_stride < 0 || (output && !apart)) return fail(at, Reason::kMajor), WrittenScales{};
    if (address(t) % sizeof(float) != 0) return fail(at, Reason::kAlignment), WrittenScales{};
    uintptr_t const bytes = uintptr_t(along + across + 1) * sizeof(float);
    add({address(t), bytes, bytes, 1, false}, at, output);
    return {reinterpret_cast<float*>(address(t)), stride, step_stride};
  }

  // The first `count` dimensions folded into one, such as batches into M, if the strides allow it.
  static Dimension fold(DLTensor const* t, int count) {
    Dimension d{1, 0, true};
    for (int i = count - 1; i >= 0; --i) {
      if (t->shape[i] == 1) continue;
      if (d.extent == 1) {
        d.stride = t->strides[i];
      } else if (t->strides[i] != d.stride * d.extent) {
        d.uniform = false;
      }
      d.extent *= t->shape[i];
    }
    return d;
  }

  template <class Element>
  Element* vector(int at, int64_t length, int dimensions, bool output) {
    return static_cast<Element*>(vector(at, expected<Element>(), length, dimensions, output));
  }

  void* vector(int at, Expected const& type, int64_t length, int dimensions, bool output) {
    DLTensor const* t = tensor(at, type);
    if (t == nullptr) return nullptr;
    Dimension const d = fold(t, t->ndim);
    if (t->ndim < 1 || (dimensions != kAnyDimensions && t->ndim != dimensions) || d.extent != length) {
      return fail(at, Reason::kShape), nullptr;
    }
    if (is_null(t)) return fail(at, Reason::kNull), nullptr;
    if (!d.uniform || (length > 1 && d.stride != 1)) return fail(at, Reason::kMajor), nullptr;
    if (address(t) % uintptr_t(type.bytes()) != 0) return fail(at, Reason::kAlignment), nullptr;
    uintptr_t const bytes = uintptr_t(length * type.bytes());
    add({address(t), bytes, bytes, 1, false}, at, output);
    return reinterpret_cast<void*>(address(t));
  }

  void add(Extent extent, int at, bool output) {
    extents_[at] = extent;
    if (output) outputs_ |= 1u << at;
  }

  void check_overlap() {
    for (int at = 0; at < next_ && at < count_; ++at) {
      if ((outputs_ >> at & 1u) == 0) continue;
      for (int other = 0; other < next_ && other < count_; ++other) {
        if (other == at || (other < at && (outputs_ >> other & 1u))) continue;
        bool const in_place = extents_[other].is_tile && extents_[other] == extents_[at];
        if (!in_place && overlap(extents_[at], extents_[other])) return fail(at, Reason::kOverlap);
      }
    }
  }

  TVMFFIAny const* args_;
  int32_t count_;
  Recording* recording_;
  int next_ = 0;
  int status_ = 0;
  int device_ = -1;
  uint32_t outputs_ = 0;
  Extent extents_[kMaxArguments] = {};
};

inline int raise(char const* kind, char const* what) {
  TVMFFIErrorSetRaisedFromCStr(kind, what);
  return -1;
}

inline int raise_cuda(cudaError_t error, char const* kernel, char const* what = "launch") {
  char text[512];
  std::snprintf(text, sizeof(text), "%s: %s failed: %s (%s)", kernel, what, cudaGetErrorString(error),
                cudaGetErrorName(error));
  return raise("RuntimeError", text);
}

inline void set_int(TVMFFIAny* result, int64_t value) {
  result->type_index = kTVMFFIInt;
  result->zero_padding = 0;
  result->v_int64 = value;
}

inline int set_string(TVMFFIAny* result, char const* text, size_t size) {
  TVMFFIByteArray const bytes{text, size};
  return TVMFFIStringFromByteArray(&bytes, result);
}

// Numbers that a kernel reports of itself.
struct Description {
  int stages;
  int threads;
  int shared_memory;
};

// Exports a kernel under the five names that the loader looks up. `Entry` offers
//   static cudaError_t launch(Call&, int& status);
//   static int64_t workspace_size(Problem, int raster, int swizzle);
//   static cudaError_t load(int device);  does what is done once for the current device, which has this number
//   static Description describe();
template <class Entry>
int export_launch(TVMFFIAny const* args, int32_t count, TVMFFIAny* result, char const* name) {
  Call call(args, count);
  int status = 0;
  cudaError_t const error = Entry::launch(call, status);
  if (error != cudaSuccess) return raise_cuda(error, name);
  set_int(result, status);
  return 0;
}

inline int repeat(void* recording, TVMFFIAny const*, int32_t, TVMFFIAny* result) {
  auto const& recorded = *static_cast<Recording const*>(recording);
  if (cudaError_t const error = recorded.repeat(); error != cudaSuccess) return raise_cuda(error, recorded.kernel());
  result->type_index = kTVMFFINone;
  return 0;
}

inline void forget(void* recording) { delete static_cast<Recording*>(recording); }

template <class Entry>
int export_prepare(TVMFFIAny const* args, int32_t count, TVMFFIAny* result, char const* name) {
  DLPackExchangeAPI const* api = nullptr;
  if (count > 0 && args[count - 1].type_index == kTVMFFIInt) {
    api = reinterpret_cast<DLPackExchangeAPI const*>(args[count - 1].v_int64);
  }
  if (api == nullptr || api->current_work_stream == nullptr) {
    return raise("TypeError", "prepare takes the address of a DLPackExchangeAPI as its last argument");
  }
  auto recording = std::make_unique<Recording>(name);
  Call call(args, count - 1, recording.get());
  int status = 0;
  if (cudaError_t const error = Entry::launch(call, status); error != cudaSuccess) return raise_cuda(error, name);
  result->type_index = kTVMFFINone;
  if (status != 0) return set_int(result, status), 0;
  if (recording->given_up()) return 0;
  recording->complete(call.device(), api->current_work_stream);
  TVMFFIObjectHandle function = nullptr;
  if (TVMFFIFunctionCreate(recording.get(), &repeat, &forget, &function) != 0) return -1;
  recording.release();  // the function's now
  result->type_index = kTVMFFIFunction;
  result->zero_padding = 0;
  result->v_obj = static_cast<TVMFFIObject*>(function);
  return 0;
}

// Also while another thread captures a graph, which this has no part in.
template <class Entry>
cudaError_t load_all(int device) {
  DeviceGuard const guard(device);
  auto mode = cudaStreamCaptureModeRelaxed;
  cudaError_t error = cudaThreadExchangeStreamCaptureMode(&mode);
  if (error != cudaSuccess) return error;
  for (Listed const* each = Listed::first(); each != nullptr && error == cudaSuccess; each = each->next) {
    cudaFuncAttributes attributes;  // nobody can say these of a kernel that is not loaded
    error = cudaFuncGetAttributes(&attributes, each->kernel);
  }
  if (error == cudaSuccess) error = Entry::load(device);
  (void)cudaThreadExchangeStreamCaptureMode(&mode);
  return error;
}

template <class Entry>
int export_load(TVMFFIAny const* args, int32_t count, TVMFFIAny* result, char const* name) {
  bool const is_device = count == 1 && args[0].type_index == kTVMFFIInt && args[0].v_int64 >= 0 && args[0].v_int64 < kMaxDevices;
  if (!is_device) return raise("TypeError", "load takes the number of a device");
  if (cudaError_t const error = load_all<Entry>(int(args[0].v_int64)); error != cudaSuccess) {
    return raise_cuda(error, name, "loading");
  }
  result->type_index = kTVMFFINone;
  return 0;
}

template <class Entry>
int export_workspace_size(TVMFFIAny const* args, int32_t count, TVMFFIAny* result) {
  Call call(args, count);
  Problem p;
  p.m = call.integer();
  p.n = call.integer();
  p.k = call.integer();
  p.count = p.inner = call.integer();
  int const raster = call.integer();
  int const swizzle = call.integer();
  if (call.status() != 0) return raise("TypeError", "workspace_size takes six integers: M, N, K, count, raster, swizzle");
  set_int(result, Entry::workspace_size(p, raster, swizzle));
  return 0;
}

template <class Entry>
int export_describe(TVMFFIAny* result) {
  Description const d = Entry::describe();
  char text[160];
  int const size = std::snprintf(text, sizeof(text), "{\"stages\": %d, \"threads\": %d, \"shared_memory\": %d}", d.stages,
                                 d.threads, d.shared_memory);
  return set_string(result, text, size_t(size));
}

}  // namespace cutlass_ops

// What a library offers. Its host code is compiled as all there is (-fwhole-program), so that nothing else is kept.
#define CUTLASS_OPS_EXPORTED extern "C" __attribute__((visibility("default"), externally_visible))

#define CUTLASS_OPS_EXPORT(name, Entry)                                                                               \
  CUTLASS_OPS_COMPLETE_IMAGE()                                                                                        \
  CUTLASS_OPS_EXPORTED int __tvm_ffi_launch(void*, TVMFFIAny const* args, int32_t count, TVMFFIAny* result) {         \
    return cutlass_ops::export_launch<Entry>(args, count, result, #name);                                             \
  }                                                                                                                   \
  CUTLASS_OPS_EXPORTED int __tvm_ffi_prepare(void*, TVMFFIAny const* args, int32_t count, TVMFFIAny* result) {        \
    return cutlass_ops::export_prepare<Entry>(args, count, result, #name);                                            \
  }                                                                                                                   \
  CUTLASS_OPS_EXPORTED int __tvm_ffi_load(void*, TVMFFIAny const* args, int32_t count, TVMFFIAny* result) {           \
    return cutlass_ops::export_load<Entry>(args, count, result, #name);                                               \
  }                                                                                                                   \
  CUTLASS_OPS_EXPORTED int __tvm_ffi_workspace_size(void*, TVMFFIAny const* args, int32_t count, TVMFFIAny* result) { \
    return cutlass_ops::export_workspace_size<Entry>(args, count, result);                                            \
  }                                                                                                                   \
  CUTLASS_OPS_EXPORTED int __tvm_ffi_describe(void*, TVMFFIAny const*, int32_t, TVMFFIAny* result) {                  \
    return cutlass_ops::export_describe<Entry>(result);                                                               \
  }
