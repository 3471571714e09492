// Runs a bundle's kernels in a C++ program without Python. A program opens a bundle, chooses a kernel for a device and a
// problem, loads it and launches it. docs/deployment.md explains bundles. examples/cpp is a complete program.
//
//     cutlass_ops::Bundle bundle("kernels.bundle");
//     auto const& signature = bundle.signature("d = relu(add(acc, bias))", {"bf16.row", "bf16.col", "bf16.row"});
//     auto const choice = signature.choose({9, 0}, m, n, k);
//     cutlass_ops::Kernel const kernel = bundle.load(choice.key);
//     kernel.launch({a, b, d, bias}, choice.order, {}, stream);
//
// Everything here is thread-safe. All errors are exceptions that derive from Error.

#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <variant>
#include <vector>

#include <dlpack/dlpack.h>

namespace cutlass_ops {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A bundle, or a file in it, is unsafe, incomplete, of another version, or does not match the manifest.
struct BundleError : Error {
  using Error::Error;
};

// The bundle has no such kernel or signature, or a kernel cannot be loaded here.
struct LoadError : Error {
  using Error::Error;
};

// An argument is not valid: a launch rejected it and launched nothing, or a file has no public key.
struct ArgumentError : Error {
  using Error::Error;
};

// CUDA reported an error at a launch.
struct LaunchError : Error {
  using Error::Error;
};

// ---- Contents of a bundle ----------------------------------------------------------------------------------------

// Compute capability of a device: {9, 0} for an H100.
struct Capability {
  int major = 0;
  int minor = 0;
};

// The order in which a kernel computes its tiles. It affects only the speed. Both numbers are launch arguments.
struct Order {
  int raster = 0;
  int swizzle = 1;
};

// One argument of a kernel. Types are spelled as in declarations: "bf16.row" needs 16-byte alignment, "bf16.row.align1"
// only the alignment of an element.
struct Operand {
  std::string name;
  std::string type;
};

struct KernelInfo {
  std::string key;     // 64 hexadecimal digits
  std::string target;  // such as "sm_90a"
  std::string sha256;  // of the library
  int64_t size = 0;    // of the library, in bytes

  // Whether the kernel runs on devices of this compute capability.
  bool runs_on(Capability capability) const;
};

struct Choice {
  std::string key;
  Order order;
};

// The kernels for one weight, by M. They were chosen when the bundle was built.
struct Weight {
  struct Rows {
    int64_t most;
    Choice choice;
  };
  Capability capability;
  int64_t n = 0;
  int64_t k = 0;
  std::vector<Rows> rows;  // in increasing order of `most`; the last one is for every larger M too
};

// An epilogue with the types of its operands, and its kernels. Each kernel works for any M, N and K.
struct Signature {
  // The epilogue as expressions, such as "d = relu(add(acc, bias))"; outputs are separated by "; ".
  std::string epilogue;
  // Which GEMMs one launch computes:
  //   "dense": one GEMM.
  //   "batched": A, B and D have one or two leading batch dimensions.
  //   "grouped": each group of A's rows has its own matrix of B (E, K, N).
  //   "ragged_k": each group of A's columns and B's rows gives its own matrix of D (E, M, N).
  // `offsets` (E), 32-bit integers, are the ends of the groups. If A is (E, M, K) and D is (E, M, N), the form "grouped"
  // takes the number of rows of each group instead.
  std::string form = "dense";
  // In the order of a launch: a, b, out, then offsets if there are groups, the epilogue's inputs, and its further outputs.
  std::vector<Operand> operands;
  std::vector<KernelInfo> kernels;
  std::vector<Weight> weights;

  // The kernel for m rows and a weight in the bundle's catalogue. Throws LoadError for other weights: any kernel of the
  // signature that runs on the device can compute them, but none was chosen for speed.
  Choice choose(Capability capability, int64_t m, int64_t n, int64_t k) const;
};

// ---- Launching ---------------------------------------------------------------------------------------------------

constexpr DLDataType kF16{kDLFloat, 16, 1};
constexpr DLDataType kBF16{kDLBfloat, 16, 1};
constexpr DLDataType kF32{kDLFloat, 32, 1};
constexpr DLDataType kF64{kDLFloat, 64, 1};
constexpr DLDataType kI8{kDLInt, 8, 1};

// Device memory that the caller owns. Strides are in elements.
struct Tensor {
  void* data = nullptr;
  DLDataType dtype{};
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;
  int device = 0;

  // `ld` is the distance between neighbouring rows, or columns. A weight of shape (N, K) is passed as B: a column-major
  // matrix of shape (K, N).
  static Tensor row_major(void* data, DLDataType dtype, int64_t rows, int64_t cols, int64_t ld, int device = 0);
  static Tensor column_major(void* data, DLDataType dtype, int64_t rows, int64_t cols, int64_t ld, int device = 0);
  static Tensor vector(void* data, DLDataType dtype, int64_t length, int device = 0);
};

// An argument of a launch: a tensor, a number for a scalar input, or an integer for an integer input.
using Argument = std::variant<Tensor, double, int64_t>;

// Device memory that a launch may overwrite while it runs.
struct Workspace {
  void* data = nullptr;
  int64_t bytes = 0;
};

// A loaded kernel. It stays loaded until the process ends. Copies are cheap.
class Kernel {
 public:
  // Bytes of workspace that a launch needs on the current device. The workspace must be aligned to 256 bytes.
  int64_t workspace_size(int64_t m, int64_t n, int64_t k, Order order = {}) const;

  // Launches on a stream (a cudaStream_t) of the operands' device. M, N and K follow from the shapes. A launch does not wait
  // and allocates no device memory. Exceptions are kernels with device memory of their own, such as those whose idle warps
  // compute the means of A's rows (docs/rmsnorm.md). They do both when they need more memory than before.
  void launch(std::vector<Argument> const& arguments, Order order, Workspace workspace, void* stream) const;

 private:
  friend class Bundle;
  struct Loaded;
  int64_t asked_workspace(int64_t m, int64_t n, int64_t k, Order order) const;
  void launched(std::vector<Argument> const& arguments, Order order, Workspace workspace, void* stream) const;
  Kernel(std::shared_ptr<Loaded const> loaded, std::string name, std::vector<Operand> operands);

  std::shared_ptr<Loaded const> loaded_;
  std::string name_;
  std::vector<Operand> operands_;
};

// ---- Bundles -----------------------------------------------------------------------------------------------------

class Bundle {
 public:
  // Opens an archive, or a folder (`cutlass-ops bundle --folder`), and checks everything except the contents of its
  // kernels, like Python's load_bundle.
  //
  // `manifest_sha256`: only the bundle with this digest is opened. `cutlass-ops bundle --json` prints it.
  // `public_keys`: PEM files of Ed25519 keys. If there are any, one of them must have signed the manifest. The signature is
  // checked before the manifest is read. A program that was built without OpenSSL then opens no bundle.
  // `minimum_version`: the minimum version in the manifest, so that nobody can pass an older signed bundle for a newer one.
  //
  // No environment variable is read. Without these arguments, a bundle is only as trustworthy as its source.
  explicit Bundle(std::string const& path, std::string const& manifest_sha256 = "",
                  std::vector<std::string> const& public_keys = {}, int64_t minimum_version = 0);

  std::vector<Signature> const& signatures() const;

  // The first signature with this epilogue and form whose operands' types begin with `types`. Throws LoadError if there is
  // none.
  Signature const& signature(std::string const& epilogue, std::vector<std::string> const& types = {},
                             std::string const& form = "dense") const;

  // Loads the kernel whose key begins with `key`. Its SHA-256 is checked before it is mapped, and exactly the checked bytes
  // run. A kernel with its own library search paths is rejected. The CUDA runtime that the kernel was linked with must be
  // loaded already, or be on the library path.
  Kernel load(std::string const& key) const;

 private:
  struct Opened;
  Kernel loaded(std::string const& key) const;

  std::shared_ptr<Opened const> opened_;
};

}  // namespace cutlass_ops
