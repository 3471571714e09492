#include "cutlass_ops/bundle.h"

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/extra/module.h>
#include <tvm/ffi/function.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <new>
#include <utility>

#include "elf.h"
#include "files.h"
#include "manifest.h"
#include "sha256.h"
#include "signing.h"

namespace cutlass_ops {
namespace {

namespace ffi = tvm::ffi;

constexpr size_t kShown = 20;  // maximum items of a list in a message

// Turns every exception into an Error, even std::bad_alloc.
template <class Body>
auto guarded(Body&& body) -> decltype(body()) {
  try {
    return body();
  } catch (Error const&) {
    throw;
  } catch (ffi::Error const& error) {
    throw LoadError(error.message());
  } catch (std::bad_alloc const&) {
    throw Error("out of memory");
  } catch (std::exception const& error) {
    throw Error(error.what());
  }
}

std::string typed(Signature const& signature) {
  std::string line = (signature.form == "dense" ? "" : signature.form + " ") + signature.epilogue + " with ";
  for (Operand const& operand : signature.operands) line += operand.name + " " + operand.type + ", ";
  return line.substr(0, line.size() - 2);
}

std::string shown(Capability c) { return std::to_string(c.major) + "." + std::to_string(c.minor); }

Choice chosen(Signature const& signature, Capability capability, int64_t m, int64_t n, int64_t k) {
  auto const runs = [&](KernelInfo const& kernel) { return kernel.runs_on(capability); };
  if (std::none_of(signature.kernels.begin(), signature.kernels.end(), runs)) {
    throw LoadError("the bundle has no kernel of " + typed(signature) + " for compute capability " + shown(capability) +
                    ": add its target to the catalogue");
  }
  std::string others;
  size_t count = 0;
  for (Weight const& weight : signature.weights) {
    bool const here = weight.capability.major == capability.major && weight.capability.minor == capability.minor;
    if (here && weight.n == n && weight.k == k) {
      auto const serves = [&](Weight::Rows const& rows) { return m <= rows.most; };
      auto const found = std::find_if(weight.rows.begin(), weight.rows.end(), serves);
      return found != weight.rows.end() ? found->choice : weight.rows.back().choice;
    }
    if (here && count++ < kShown) others += " " + std::to_string(weight.n) + "x" + std::to_string(weight.k);
  }
  if (count > kShown) others += " and " + std::to_string(count - kShown) + " more";
  throw LoadError("the bundle's catalogue does not name the weight " + std::to_string(n) + "x" + std::to_string(k) +
                  " (N x K) for compute capability " + shown(capability) + "; it names" +
                  (others.empty() ? " none" : others) + ". Any kernel of the signature for this device computes it: load one by its key");
}

}  // namespace

bool KernelInfo::runs_on(Capability capability) const {
  std::string const number = std::to_string(capability.major) + std::to_string(capability.minor);
  return target == "sm_" + number || target == "sm_" + number + "a";
}

Choice Signature::choose(Capability capability, int64_t m, int64_t n, int64_t k) const {
  return guarded([&] { return chosen(*this, capability, m, n, k); });
}

// ---- Launching ---------------------------------------------------------------------------------------------------

Tensor Tensor::row_major(void* data, DLDataType dtype, int64_t rows, int64_t cols, int64_t ld, int device) {
  return {data, dtype, {rows, cols}, {ld, 1}, device};
}

Tensor Tensor::column_major(void* data, DLDataType dtype, int64_t rows, int64_t cols, int64_t ld, int device) {
  return {data, dtype, {rows, cols}, {1, ld}, device};
}

Tensor Tensor::vector(void* data, DLDataType dtype, int64_t length, int device) {
  return {data, dtype, {length}, {1}, device};
}

struct Kernel::Loaded {
  ffi::Module module;
  ffi::Function launch;
  ffi::Function workspace_size;
};

namespace {

constexpr int64_t kOneGemm = 1;  // the count of a dense problem

// Numbered as in templates/include/cutlass_ops/binding.h.
enum Reason { kKind = 1, kShape, kDtype, kDevice, kMajor, kAlignment, kOverlap, kWorkspace, kCount, kNull };

DLTensor view(Tensor const& t) {
  if (t.strides.size() != t.shape.size()) throw ArgumentError("a tensor must have as many strides as extents");
  return {t.data, {kDLCUDA, t.device}, int32_t(t.shape.size()), t.dtype, const_cast<int64_t*>(t.shape.data()),
          const_cast<int64_t*>(t.strides.data()), 0};
}

std::string listed(std::vector<int64_t> const& numbers) {
  std::string text;
  for (int64_t number : numbers) text += (text.empty() ? "" : ", ") + std::to_string(number);
  return "(" + text + ")";
}

std::string shown(DLDataType type) {
  char const* const name = type.code == kDLBfloat ? "bf" : type.code == kDLFloat ? "f" : "another type of ";
  return name + std::to_string(type.bits);
}

std::string shown(Argument const& argument) {
  if (double const* number = std::get_if<double>(&argument)) return "the number " + std::to_string(*number);
  if (int64_t const* whole = std::get_if<int64_t>(&argument)) return "the number " + std::to_string(*whole);
  Tensor const& t = std::get<Tensor>(argument);
  return shown(t.dtype) + ", shape " + listed(t.shape) + ", strides " + listed(t.strides) + ", on device " +
         std::to_string(t.device);
}

// The message for a rejected launch, as in cutlass_ops/run/plan.py.
ArgumentError refusal(int64_t status, std::string const& kernel, std::vector<Operand> const& operands,
                      std::vector<Argument> const& arguments) {
  auto const position = size_t(status / 16);
  auto const reason = int(status % 16);
  std::string const tail = ". The kernel is " + kernel;
  if (reason == kWorkspace || (reason == kNull && position >= operands.size())) {
    return ArgumentError("the workspace is too small, not aligned to 256 bytes, or null: workspace_size says how much is "
                         "needed" + tail);
  }
  if (position >= operands.size() || reason == kCount) {
    return ArgumentError("argument " + std::to_string(position) + " was refused (" + std::to_string(reason) + ")" + tail);
  }
  Operand const& operand = operands[position];
  std::string const& type = operand.type;
  std::string const element = type.substr(0, type.find('.'));
  bool const rows = type.find(".row") != std::string::npos;
  size_t const align = type.find(".align");
  auto const* const tensor = std::get_if<Tensor>(&arguments.at(position));
  int const bits = tensor == nullptr ? 8 : tensor->dtype.bits;
  int const bytes = align == std::string::npos ? 16 : std::stoi(type.substr(align + 6)) * bits / 8;
  std::map<int, std::string> const words = {
      {kKind, "must be a tensor of " + element},
      {kShape, "has a shape that disagrees with the other arguments"},
      {kDtype, "must have elements of type " + element},
      {kDevice, "must be on the same CUDA device as a"},
      {kMajor, rows ? "must be row-major: contiguous along the last dimension"
                    : "must be col-major: contiguous along the first dimension"},
      {kAlignment, "must be aligned to " + std::to_string(bytes) + " bytes in address, leading dimension and extent"},
      {kOverlap, "shares memory with another argument"},
      {kNull, "has no memory: its address is null"},
  };
  auto const found = words.find(reason);
  std::string const what = found != words.end() ? found->second : "was refused (" + std::to_string(reason) + ")";
  return ArgumentError(operand.name + " " + what + "; it is " + shown(arguments.at(position)) + tail);
}

// Makes a stream tvm-ffi's current stream of this thread, on which kernels launch.
class CurrentStream {
 public:
  CurrentStream(int device, void* stream) : device_(device) {
    if (TVMFFIEnvSetStream(kDLCUDA, device_, stream, &previous_) != 0) throw LaunchError("tvm-ffi takes no stream");
  }
  ~CurrentStream() { TVMFFIEnvSetStream(kDLCUDA, device_, previous_, nullptr); }
  CurrentStream(CurrentStream const&) = delete;
  CurrentStream& operator=(CurrentStream const&) = delete;

 private:
  int device_;
  TVMFFIStreamHandle previous_ = nullptr;
};

}  // namespace

Kernel::Kernel(std::shared_ptr<Loaded const> loaded, std::string name, std::vector<Operand> operands)
    : loaded_(std::move(loaded)), name_(std::move(name)), operands_(std::move(operands)) {}

int64_t Kernel::workspace_size(int64_t m, int64_t n, int64_t k, Order order) const {
  return guarded([&] { return asked_workspace(m, n, k, order); });
}

int64_t Kernel::asked_workspace(int64_t m, int64_t n, int64_t k, Order order) const {
  for (int64_t extent : {m, n, k}) {
    if (extent < 1 || extent > INT32_MAX) {
      throw ArgumentError("M, N and K must be from 1 to 2147483647, not " + std::to_string(extent));
    }
  }
  try {
    return loaded_->workspace_size(m, n, k, kOneGemm, order.raster, order.swizzle).cast<int64_t>();
  } catch (ffi::Error const& error) {
    throw LaunchError(name_ + ": " + error.message());
  }
}

void Kernel::launch(std::vector<Argument> const& arguments, Order order, Workspace workspace, void* stream) const {
  guarded([&] { launched(arguments, order, workspace, stream); });
}

void Kernel::launched(std::vector<Argument> const& arguments, Order order, Workspace workspace, void* stream) const {
  if (arguments.size() != operands_.size()) {
    std::string names;
    for (Operand const& operand : operands_) names += (names.empty() ? "" : ", ") + operand.name;
    throw ArgumentError(name_ + " takes " + std::to_string(operands_.size()) + " arguments (" + names + "), not " +
                        std::to_string(arguments.size()));
  }
  Tensor const* const a = std::get_if<Tensor>(&arguments[0]);
  if (a == nullptr) throw ArgumentError("a must be a tensor; it is " + shown(arguments[0]));

  std::vector<DLTensor> views;
  views.reserve(arguments.size() + 1);  // addresses are taken: no reallocation
  std::vector<ffi::AnyView> packed;
  for (Argument const& argument : arguments) {
    if (double const* number = std::get_if<double>(&argument)) {
      packed.emplace_back(*number);
    } else if (int64_t const* whole = std::get_if<int64_t>(&argument)) {
      packed.emplace_back(*whole);
    } else {
      packed.emplace_back(&views.emplace_back(view(std::get<Tensor>(argument))));
    }
  }
  packed.emplace_back(order.raster);
  packed.emplace_back(order.swizzle);
  Tensor const memory{workspace.data, {kDLUInt, 8, 1}, {workspace.bytes}, {1}, a->device};
  if (workspace.data == nullptr) {
    packed.emplace_back(nullptr);
  } else {
    packed.emplace_back(&views.emplace_back(view(memory)));
  }

  int64_t status;
  try {
    CurrentStream const current(a->device, stream);
    ffi::Any result;
    loaded_->launch.CallPacked(packed.data(), int32_t(packed.size()), &result);
    status = result.cast<int64_t>();
  } catch (ffi::Error const& error) {
    throw LaunchError(error.message());
  }
  if (status != 0) throw refusal(status, name_, operands_, arguments);
}

// ---- Bundles -----------------------------------------------------------------------------------------------------

struct Bundle::Opened {
  std::string path;
  std::unique_ptr<Container> container;
  Manifest manifest;
};

namespace {

// The manifest's text, after the checks that come before parsing it.
std::string manifest_text(Container const& container, std::string const& digest, std::vector<std::string> const& public_keys) {
  auto const size_of = [&](char const* name) {
    auto const found = container.sizes().find(name);
    return found == container.sizes().end() ? -1 : found->second;
  };
  int64_t const size = size_of("manifest.json");
  if (size < 0) throw BundleError("it has no manifest.json");
  if (size > kMaxManifest) {
    throw BundleError("manifest.json has " + std::to_string(size) + " bytes: at most " + std::to_string(kMaxManifest) + " are allowed");
  }
  std::string text = container.read("manifest.json");
  if (!digest.empty() && sha256(text) != digest) {
    throw BundleError("it is another bundle than asked for: the SHA-256 of its manifest is " + sha256(text) + ", not " + digest);
  }
  if (public_keys.empty()) return text;
  int64_t const signature = size_of("manifest.sig");
  if (signature < 0) throw BundleError("it is not signed: it has no manifest.sig");
  if (signature != int64_t(kSignature)) {
    throw BundleError("manifest.sig must have " + std::to_string(kSignature) + " bytes, not " + std::to_string(signature));
  }
  require_signature(text, container.read("manifest.sig"), public_keys);
  return text;
}

// Checks that the bundle has exactly the files in its manifest.
void require_files(Container const& container, Manifest const& manifest) {
  std::map<std::string, int64_t> there = container.sizes();
  there.erase("manifest.json");
  there.erase("manifest.sig");
  if (there == manifest.files) return;
  for (auto const& [name, size] : manifest.files) {
    auto const found = there.find(name);
    if (found == there.end()) throw BundleError(name + " is missing");
    if (found->second != size) throw BundleError(name + " is of another size than the manifest says");
  }
  for (auto const& [name, size] : there) {
    if (manifest.files.count(name) == 0) throw BundleError(name + " is not in the manifest");
  }
}

void require_version(Manifest const& manifest) {
  if (manifest.abi == kAbi && manifest.templates == kTemplates) return;
  auto const shown = [](int64_t abi, int64_t templates) {
    return "ABI " + std::to_string(abi) + ", templates " + std::to_string(templates);
  };
  throw BundleError("its kernels are by cutlass_ops " + manifest.library_version + " (" + shown(manifest.abi, manifest.templates) +
                    "), and this program calls kernels of " + shown(kAbi, kTemplates) + ": build the bundle or the program again");
}

void require_recent(Manifest const& manifest, int64_t least) {
  if (least < 0) throw ArgumentError("minimum_version must be 1 or more, or 0 for any, not " + std::to_string(least));
  if (manifest.version >= least) return;
  throw BundleError((manifest.version == 0 ? "it has no version" : "its version is " + std::to_string(manifest.version)) +
                    ", but version " + std::to_string(least) + " or later is required: use a newer bundle");
}

}  // namespace

Bundle::Bundle(std::string const& path, std::string const& manifest_sha256, std::vector<std::string> const& public_keys,
               int64_t minimum_version)
    : opened_(guarded([&] {
        if (!public_keys.empty()) require_signing();
        auto opened = std::make_shared<Opened>(Opened{path, open_container(path), {}});
        try {
          opened->manifest = read_manifest(manifest_text(*opened->container, manifest_sha256, public_keys));
          require_files(*opened->container, opened->manifest);
          require_version(opened->manifest);
          require_recent(opened->manifest, minimum_version);
        } catch (BundleError const& error) {
          throw BundleError("bundle " + path + ": " + error.what());
        }
        return opened;
      })) {}

std::vector<Signature> const& Bundle::signatures() const { return opened_->manifest.signatures; }

Signature const& Bundle::signature(std::string const& epilogue, std::vector<std::string> const& types,
                                   std::string const& form) const {
  return *guarded([&] {
    for (Signature const& found : signatures()) {
      bool fits = found.epilogue == epilogue && found.form == form && types.size() <= found.operands.size();
      for (size_t i = 0; fits && i < types.size(); ++i) fits = found.operands[i].type == types[i];
      if (fits) return &found;
    }
    std::string all;
    size_t const count = signatures().size();
    for (size_t i = 0; i < std::min(count, kShown); ++i) all += "\n  " + typed(signatures()[i]);
    if (count > kShown) all += "\n  and " + std::to_string(count - kShown) + " more";
    throw LoadError("bundle " + opened_->path + " has no " + form + " signature " + epilogue + " with these types; it has" + all);
  });
}

Kernel Bundle::load(std::string const& key) const {
  return guarded([&] { return loaded(key); });
}

Kernel Bundle::loaded(std::string const& key) const {
  Manifest const& manifest = opened_->manifest;
  std::vector<std::pair<size_t, size_t>> found;
  for (size_t s = 0; s < manifest.signatures.size(); ++s) {
    std::vector<KernelInfo> const& kernels = manifest.signatures[s].kernels;
    for (size_t k = 0; k < kernels.size(); ++k) {
      if (kernels[k].key.compare(0, key.size(), key) == 0) found.emplace_back(s, k);
    }
  }
  if (found.size() != 1) {
    std::string const count = found.empty() ? "no kernel" : std::to_string(found.size()) + " kernels";
    throw LoadError("bundle " + opened_->path + " has " + count + " whose key begins with \"" + key +
                    "\": `cutlass-ops list --bundle` shows what is there");
  }
  Signature const& signature = manifest.signatures[found[0].first];
  KernelInfo const& kernel = signature.kernels[found[0].second];
  std::string const name = typed(signature) + " for " + kernel.target + ", " + kernel.key.substr(0, 12);
  std::string const file = "kernels/" + kernel.key + ".so", where = "bundle " + opened_->path + ": " + file;
  if (manifest.key_of(found[0].first, found[0].second) != kernel.key) {
    throw BundleError(where + ": its key does not match its identity in the manifest");
  }

  // Never destroyed: at exit, CUDA may clean up later than this program, so kernels must stay loaded.
  static auto& mutex = *new std::mutex;
  static auto& all = *new std::map<std::string, std::shared_ptr<Kernel::Loaded const>>;
  std::lock_guard<std::mutex> const lock(mutex);
  if (auto const here = all.find(kernel.sha256); here != all.end()) return Kernel(here->second, name, signature.operands);
  std::string const data = opened_->container->read(file);
  if (sha256(data) != kernel.sha256) throw BundleError(where + " does not match the manifest: its SHA-256 differs");
  if (std::string const problem = linkage_problem(data); !problem.empty()) throw LoadError(where + " cannot be loaded: " + problem);
  try {
    Mappable const mappable(data);
    // Module::LoadFromFile needs a file extension, which descriptors lack.
    ffi::Function const open = ffi::Function::GetGlobalRequired("ffi.Module.load_from_file.so");
    auto const module = open(mappable.path(), "so").cast<ffi::Module>();
    auto const function = [&](char const* symbol) { return module->GetFunction(symbol).value(); };
    auto const entry = std::make_shared<Kernel::Loaded const>(
        Kernel::Loaded{module, function("launch"), function("workspace_size")});
    all.emplace(kernel.sha256, entry);
    return Kernel(entry, name, signature.operands);
  } catch (ffi::Error const& error) {
    throw LoadError(name + " cannot be loaded: " + error.message() + " (its CUDA runtime is libcudart.so." +
                    manifest.nvcc.substr(0, manifest.nvcc.find('.')) + ", which the process must have or find)");
  }
}

}  // namespace cutlass_ops
