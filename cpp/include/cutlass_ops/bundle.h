// Kernels of a bundle in a C++ program, without Python: open a bundle, look up what it has for a device and a problem,
// load a kernel, launch it. docs/deployment.md says what bundles are, and examples/cpp is a whole program.
//
//     cutlass_ops::Bundle bundle("kernels.bundle");
//     auto const& signature = bundle.signature("d = relu(add(acc, bias))", {"bf16.row", "bf16.col", "bf16.row"});
//     auto const choice = signature.choose({9, 0}, m, n, k);
//     cutlass_ops::Kernel const kernel = bundle.load(choice.key);
//     kernel.launch({a, b, d, bias}, choice.order, {}, stream);
//
// Everything here may be used from several threads at once. Errors are exceptions that derive from Error, whatever goes wrong.

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

// A bundle, or a file in it, is not safe to read, not whole, not what its manifest says, or of another version.
struct BundleError : Error {
  using Error::Error;
};

// The bundle has no such kernel or signature, or a kernel cannot be loaded here.
struct LoadError : Error {
  using Error::Error;
};

// An argument cannot be what it is: a launch refused it, and nothing was launched, or a file holds no public key.
struct ArgumentError : Error {
  using Error::Error;
};

// CUDA refused a launch.
struct LaunchError : Error {
  using Error::Error;
};

// ---- What a bundle has -------------------------------------------------------------------------------------------

// Of a device: {9, 0} for an H100.
struct Capability {
  int major = 0;
  int minor = 0;
};

// In which order a kernel takes its tiles: a matter of speed only. The numbers are those of the kernel's launch.
struct Order {
  int raster = 0;
  int swizzle = 1;
};

// One argument of a kernel. The type is written as in declarations: "bf16.row" needs 16-byte alignment, "bf16.row.align1"
// none beyond that of an element.
struct Operand {
  std::string name;
  std::string type;
};

struct KernelInfo {
  std::string key;     // 64 hexadecimal digits
  std::string target;  // such as "sm_90a"
  std::string sha256;  // of its library
  int64_t size = 0;    // of its library, in bytes

  // Whether a device of this compute capability takes the kernel.
  bool runs_on(Capability capability) const;
};

struct Choice {
  std::string key;
  Order order;
};

// Which kernel serves up to how many rows with one weight: chosen when the bundle was made.
struct Weight {
  struct Rows {
    int64_t most;
    Choice choice;
  };
  Capability capability;
  int64_t n = 0;
  int64_t k = 0;
  std::vector<Rows> rows;  // in increasing order; the last serves all beyond
};

// An epilogue with the types of its operands, and the kernels that compute it, each at any M, N and K.
struct Signature {
  // The epilogue as expressions, such as "d = relu(add(acc, bias))"; outputs are separated by "; ".
  std::string epilogue;
  // In the order in which a launch takes them: a, b, out, then the epilogue's inputs, then its further outputs.
  std::vector<Operand> operands;
  std::vector<KernelInfo> kernels;
  std::vector<Weight> weights;

  // Which kernel serves m rows with a weight that the bundle's catalogue named. Any kernel of the signature that runs on
  // the device computes any other problem; LoadError then says so, since none was chosen to be fast.
  Choice choose(Capability capability, int64_t m, int64_t n, int64_t k) const;
};

// ---- Launching ---------------------------------------------------------------------------------------------------

constexpr DLDataType kF16{kDLFloat, 16, 1};
constexpr DLDataType kBF16{kDLBfloat, 16, 1};
constexpr DLDataType kF32{kDLFloat, 32, 1};

// Device memory that the caller owns. Strides are in elements.
struct Tensor {
  void* data = nullptr;
  DLDataType dtype{};
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;
  int device = 0;

  // `ld` is the distance of neighbouring rows, or columns. A weight of N rows and K columns is, as B, the column-major
  // matrix of K rows and N columns.
  static Tensor row_major(void* data, DLDataType dtype, int64_t rows, int64_t cols, int64_t ld, int device = 0);
  static Tensor column_major(void* data, DLDataType dtype, int64_t rows, int64_t cols, int64_t ld, int device = 0);
  static Tensor vector(void* data, DLDataType dtype, int64_t length, int device = 0);
};

// A number is what a scalar input takes, and a whole one what an integer input takes.
using Argument = std::variant<Tensor, double, int64_t>;

// Device memory that a launch may overwrite while it runs.
struct Workspace {
  void* data = nullptr;
  int64_t bytes = 0;
};

// A kernel in this process, where it stays until the process ends. Copies are cheap.
class Kernel {
 public:
  // Bytes of workspace, aligned to 256, that a launch needs on the current device.
  int64_t workspace_size(int64_t m, int64_t n, int64_t k, Order order = {}) const;

  // Launches on a stream (a cudaStream_t) of the operands' device. M, N and K follow from the shapes. It does not wait, and
  // allocates no device memory, but for kernels whose idle warps take means of A's rows (docs/rmsnorm.md): these do both where
  // they need more memory than they have.
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
  // Opens an archive, or a folder (`cutlass-ops bundle --folder`), and checks all but the contents of its kernels, as
  // Python's load_bundle does.
  //
  // `manifest_sha256`, as `cutlass-ops bundle --json` prints it, ties the program to one bundle: no other is opened.
  // `public_keys` are PEM files of Ed25519 keys: where there are any, the manifest must have been signed with one of them, and
  // that is checked before it is read. A program that was built without OpenSSL then opens nothing. Of signed bundles an old
  // one may be put in a new one's place: `minimum_version` is what the manifest's version must be at least. No environment
  // variable is read. Without all of these, a bundle is as trustworthy as the way it came.
  explicit Bundle(std::string const& path, std::string const& manifest_sha256 = "",
                  std::vector<std::string> const& public_keys = {}, int64_t minimum_version = 0);

  std::vector<Signature> const& signatures() const;

  // The signature of an epilogue, with operands whose types begin with these.
  Signature const& signature(std::string const& epilogue, std::vector<std::string> const& types = {}) const;

  // Loads the kernel whose key begins so. Its SHA-256 is compared before it is mapped, and the bytes that were compared
  // are those that run; what would have the dynamic linker look for libraries in places of its own is refused. The process
  // must have the CUDA runtime that the kernel was linked with, or find it on the library path.
  Kernel load(std::string const& key) const;

 private:
  struct Opened;
  Kernel loaded(std::string const& key) const;

  std::shared_ptr<Opened const> opened_;
};

}  // namespace cutlass_ops
