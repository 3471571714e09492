#include "cutlass_ops/bundle.h"

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/extra/json.h>
#include <tvm/ffi/extra/module.h>
#include <tvm/ffi/function.h>

#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <optional>
#include <regex>
#include <utility>

#include "files.h"
#include "sha256.h"

namespace cutlass_ops {
namespace {

namespace ffi = tvm::ffi;
using Object = ffi::json::Object;
using Array = ffi::json::Array;

// As in cutlass_ops/manifest.py, container.py and loader.py.
constexpr char kFormat[] = "cutlass_ops.bundle/1";
constexpr int64_t kAbi = 2;
constexpr int64_t kMaxManifest = 4 << 20;
constexpr int64_t kMaxFile = 64 << 20;
constexpr int64_t kMaxExtent = int64_t(1) << 40;

// ---- The manifest ------------------------------------------------------------------------------------------------

BundleError wrong(std::string const& why) { return BundleError("the manifest is wrong: " + why); }

template <class T>
T as(ffi::Any const& value, char const* what) {
  if (std::optional<T> found = value.as<T>()) return *found;
  throw wrong(std::string(what) + " has another type than it must have");
}

ffi::Any field(Object const& object, char const* name) {
  auto const found = object.find(ffi::String(name));
  if (found == object.end()) throw wrong(std::string("there is no ") + name);
  return (*found).second;
}

template <class T>
T field(Object const& object, char const* name) { return as<T>(field(object, name), name); }

std::string text(Object const& object, char const* name) { return std::string(field<ffi::String>(object, name)); }

int64_t integer(ffi::Any const& value, char const* what, int64_t low, int64_t high) {
  int64_t const number = as<int64_t>(value, what);
  if (number < low || number > high) throw wrong(std::string(what) + " is " + std::to_string(number));
  return number;
}

int64_t integer(Object const& object, char const* name, int64_t low, int64_t high) {
  return integer(field(object, name), name, low, high);
}

bool is_digest(std::string const& text) {
  return text.size() == 64 && text.find_first_not_of("0123456789abcdef") == std::string::npos;
}

std::string digest(Object const& object, char const* name) {
  std::string const found = text(object, name);
  if (!is_digest(found)) throw wrong(std::string(name) + " is not a SHA-256");
  return found;
}

// The parser recurses: what is nested deeper than any manifest must not reach it.
void require_shallow(std::string const& json) {
  int depth = 0;
  bool in_string = false;
  for (size_t at = 0; at < json.size(); ++at) {
    char const c = json[at];
    if (in_string) {
      if (c == '\\') ++at;
      if (c == '"') in_string = false;
    } else if (c == '"') {
      in_string = true;
    } else if (c == '{' || c == '[') {
      if (++depth > 32) throw wrong("it is nested too deeply");
    } else if (c == '}' || c == ']') {
      --depth;
    }
  }
}

Object parse(std::string const& json) {
  require_shallow(json);
  ffi::String error;
  ffi::Any const found = ffi::json::Parse(json, &error);
  if (!error.empty()) throw wrong("it is not JSON: " + std::string(error));
  Object const manifest = as<Object>(found, "it");
  std::string const format = text(manifest, "format");
  if (format != kFormat) {
    throw BundleError("its format is \"" + format.substr(0, 80) + "\", and this program reads \"" + kFormat +
                      "\": make the bundle again");
  }
  // Its own digest, which shows a change by accident, is that of the text without it. Quotes in strings are escaped, and
  // other digests come first in their objects, so that this text stands in it once.
  std::string const own = digest(manifest, "sha256"), stands = ",\"sha256\":\"" + own + "\"";
  size_t const at = json.find(stands);
  if (at == std::string::npos || sha256(std::string(json).erase(at, stands.size())) != own) {
    throw wrong("its own SHA-256 is another: it was changed");
  }
  int64_t const abi = field<int64_t>(manifest, "abi");
  if (abi != kAbi) {
    throw BundleError("its kernels are by cutlass_ops " + text(manifest, "library_version") + " (ABI " +
                      std::to_string(abi) + "), and this program calls kernels of ABI " + std::to_string(kAbi) +
                      ": make the bundle, or the program, again");
  }
  return manifest;
}

// An epilogue as expressions: what tells a person, and a program, which one it is.
std::string expressions(Object const& graph) {
  constexpr size_t kMost = 1000;  // shared subexpressions could make it exponentially long
  std::vector<std::string> nodes;
  auto const at = [&](ffi::Any const& index) {
    return nodes[size_t(integer(index, "a node", 0, int64_t(nodes.size()) - 1))];
  };
  for (ffi::Any const& value : field<Array>(graph, "nodes")) {
    Array const node = as<Array>(value, "a node");
    if (node.size() != 3) throw wrong("a node has an operation, arguments and an attribute");
    std::string const op(as<ffi::String>(node[0], "an operation"));
    std::string attribute;
    if (node[2] != nullptr) {
      std::optional<ffi::String> const name = node[2].as<ffi::String>();
      attribute = name ? std::string(*name) : std::string(ffi::json::Stringify(node[2]));
    }
    std::string arguments;
    for (ffi::Any const& argument : as<Array>(node[1], "arguments")) {
      arguments += (arguments.empty() ? "" : ", ") + at(argument);
    }
    std::string expression = op;
    if (op == "input" || op == "const") {
      expression = attribute;
    } else if (!arguments.empty()) {
      expression += "(" + arguments + (attribute.empty() ? "" : ", " + attribute) + ")";
    }
    nodes.push_back(expression.size() <= kMost ? expression : "node " + std::to_string(nodes.size()));
  }
  std::string all;
  for (ffi::Any const& value : field<Array>(graph, "outputs")) {
    Array const output = as<Array>(value, "an output");
    if (output.size() != 4) throw wrong("an output has a name, a node, a kind and a reduction");
    std::string const name(as<ffi::String>(output[0], "an output")), kind(as<ffi::String>(output[2], "a kind"));
    std::string const expression = at(output[1]);
    all += (all.empty() ? "" : "; ") + name + " = ";
    bool const reduced = output[3] != nullptr;
    if (reduced) all += std::string(as<ffi::String>(output[3], "a reduction")) + " for each " + kind + " of ";
    all += expression;
  }
  return all;
}

// An operand's type, such as "bf16.row.align1".
std::string type_of(Object const& object, char const* name) {
  static std::regex const form("(f16|bf16|f32)\\.(row|col)(\\.align[1248])?");
  std::string const found = text(object, name);
  if (!std::regex_match(found, form)) throw wrong(std::string(name) + " has a type that there is not");
  return found;
}

std::vector<Operand> operands_of(Object const& signature) {
  std::vector<Operand> found = {
      {"a", type_of(signature, "a")}, {"b", type_of(signature, "b")}, {"out", type_of(signature, "d")}};
  Object const graph = field<Object>(signature, "epilogue");
  auto const add = [&](char const* group, size_t skipped) {
    Object const types = field<Object>(signature, group);
    Array const named = field<Array>(graph, group);
    for (size_t i = skipped; i < named.size(); ++i) {
      Array const entry = as<Array>(named[int64_t(i)], group);
      if (entry.empty()) throw wrong(std::string(group) + " have names");
      std::string const name(as<ffi::String>(entry[0], group));
      found.push_back({name, type_of(types, name.c_str())});
    }
  };
  add("inputs", 0);
  add("outputs", 1);  // the first is D
  return found;
}

// As cutlass_ops/plan.py numbers the order of tiles.
Order order_of(Object const& config, Object const& changes) {
  auto const value = [&](char const* name) {
    return field(changes.count(ffi::String(name)) ? changes : config, name);
  };
  Order order;
  std::string const arch = text(config, "arch");
  if (arch == "gemv") return order;  // there is one
  order.swizzle = int(integer(value("swizzle"), "swizzle", 1, 64));
  if (arch != "sm90") return order;
  std::array<char const*, 3> const rasters = {"heuristic", "along_m", "along_n"};
  ffi::String const raster = as<ffi::String>(value("raster"), "raster");
  auto const place = std::find(rasters.begin(), rasters.end(), std::string(raster));
  if (place == rasters.end()) throw wrong("raster is none that there is");
  order.raster = int(place - rasters.begin()) + (as<bool>(value("by_gpc"), "by_gpc") ? 4 : 0);
  return order;
}

Weight weight_of(Object const& choice, std::vector<KernelInfo> const& kernels, std::vector<Object> const& configs) {
  Weight found;
  Array const capability = field<Array>(choice, "capability");
  if (capability.size() != 2) throw wrong("capability has a major and a minor number");
  found.capability = {int(integer(capability[0], "capability", 1, 99)), int(integer(capability[1], "capability", 0, 99))};
  found.n = integer(choice, "n", 1, kMaxExtent);
  found.k = integer(choice, "k", 1, kMaxExtent);
  for (ffi::Any const& value : field<Array>(choice, "rows")) {
    Array const row = as<Array>(value, "rows");
    if (row.size() != 3) throw wrong("a row of a choice has a number of rows, a kernel and an order of tiles");
    int64_t const most = integer(row[0], "rows", 1, kMaxExtent);
    auto const at = size_t(integer(row[1], "rows", 0, int64_t(kernels.size()) - 1));
    if (!kernels[at].runs_on(found.capability)) throw wrong("a choice names a kernel for another device");
    if (!found.rows.empty() && found.rows.back().most >= most) throw wrong("rows of a choice are in increasing order");
    found.rows.push_back({most, {kernels[at].key, order_of(configs[at], as<Object>(row[2], "an order of tiles"))}});
  }
  if (found.rows.empty()) throw wrong("a choice has no rows");
  return found;
}

Signature signature_of(Object const& group) {
  Object const signature = field<Object>(group, "signature");
  Signature found;
  found.epilogue = expressions(field<Object>(signature, "epilogue"));
  found.operands = operands_of(signature);
  std::vector<Object> configs;
  for (ffi::Any const& value : field<Array>(group, "kernels")) {
    Object const kernel = as<Object>(value, "a kernel");
    Object const library = field<Object>(kernel, "library");
    configs.push_back(field<Object>(kernel, "config"));
    found.kernels.push_back({digest(kernel, "key"), text(kernel, "target"), digest(library, "sha256"),
                             integer(library, "size", 0, kMaxFile)});
  }
  for (ffi::Any const& value : field<Array>(group, "choices")) {
    found.weights.push_back(weight_of(as<Object>(value, "a choice"), found.kernels, configs));
  }
  return found;
}

std::string typed(Signature const& signature) {
  std::string line = signature.epilogue + " with ";
  for (Operand const& operand : signature.operands) line += operand.name + " " + operand.type + ", ";
  return line.substr(0, line.size() - 2);
}

std::string shown(Capability c) { return std::to_string(c.major) + "." + std::to_string(c.minor); }

}  // namespace

bool KernelInfo::runs_on(Capability capability) const {
  std::string const number = std::to_string(capability.major) + std::to_string(capability.minor);
  return target == "sm_" + number || target == "sm_" + number + "a";
}

Choice Signature::choose(Capability capability, int64_t m, int64_t n, int64_t k) const {
  auto const runs = [&](KernelInfo const& kernel) { return kernel.runs_on(capability); };
  if (std::none_of(kernels.begin(), kernels.end(), runs)) {
    throw LoadError("the bundle has no kernel of " + typed(*this) + " for compute capability " + shown(capability) +
                    ": add its target to the catalogue");
  }
  std::string others;
  for (Weight const& weight : weights) {
    bool const here = weight.capability.major == capability.major && weight.capability.minor == capability.minor;
    if (here && weight.n == n && weight.k == k) {
      auto const serves = [&](Weight::Rows const& rows) { return m <= rows.most; };
      auto const found = std::find_if(weight.rows.begin(), weight.rows.end(), serves);
      return found != weight.rows.end() ? found->choice : weight.rows.back().choice;
    }
    if (here) others += " " + std::to_string(weight.n) + "x" + std::to_string(weight.k);
  }
  throw LoadError("the bundle's catalogue does not name the weight " + std::to_string(n) + "x" + std::to_string(k) +
                  " (N x K) for compute capability " + shown(capability) + "; it names" +
                  (others.empty() ? " none" : others) + ". Any kernel of the signature for this device computes it: load one by its key");
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

// Numbered as in templates/include/cutlass_ops/binding.h.
enum Reason { kKind = 1, kShape, kDtype, kDevice, kMajor, kAlignment, kOverlap, kWorkspace, kCount, kNull };

DLTensor view(Tensor const& t) {
  if (t.strides.size() != t.shape.size()) throw ArgumentError("a tensor has as many strides as extents");
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
  Tensor const& t = std::get<Tensor>(argument);
  return shown(t.dtype) + ", shape " + listed(t.shape) + ", strides " + listed(t.strides) + ", on device " +
         std::to_string(t.device);
}

// A kernel's refusal in words, as cutlass_ops/plan.py has them.
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
  int const width = element == "f32" ? 4 : 2;
  size_t const align = type.find(".align");
  int const bytes = align == std::string::npos ? 16 : std::stoi(type.substr(align + 6)) * width;
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

// Makes a stream tvm-ffi's current one on this thread: the one that kernels launch on.
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
  for (int64_t extent : {m, n, k}) {
    if (extent < 1 || extent > INT32_MAX) {
      throw ArgumentError("M, N and K are from 1 to 2147483647, not " + std::to_string(extent));
    }
  }
  try {
    return loaded_->workspace_size(m, n, k, order.raster, order.swizzle).cast<int64_t>();
  } catch (ffi::Error const& error) {
    throw LaunchError(name_ + ": " + error.message());
  }
}

void Kernel::launch(std::vector<Argument> const& arguments, Order order, Workspace workspace, void* stream) const {
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

  ffi::Any result;
  try {
    CurrentStream const current(a->device, stream);
    loaded_->launch.CallPacked(packed.data(), int32_t(packed.size()), &result);
  } catch (ffi::Error const& error) {
    throw LaunchError(error.message());
  }
  if (int64_t const status = result.cast<int64_t>(); status != 0) throw refusal(status, name_, operands_, arguments);
}

// ---- Bundles -----------------------------------------------------------------------------------------------------

struct Bundle::Files {
  std::string path;
  std::unique_ptr<Container> container;
};

Bundle::Bundle(std::string const& path, std::string const& manifest_sha256)
    : files_(std::make_shared<Files>(Files{path, open_container(path)})) {
  try {
    std::string const json = files_->container->read("manifest.json", kMaxManifest);
    if (!manifest_sha256.empty() && sha256(json) != manifest_sha256) {
      throw BundleError("it is another bundle than asked for: the SHA-256 of its manifest is " + sha256(json) + ", not " +
                        manifest_sha256);
    }
    Object const manifest = parse(json);
    cuda_ = text(field<Object>(manifest, "toolchain"), "nvcc");
    for (ffi::Any const& group : field<Array>(manifest, "signatures")) {
      signatures_.push_back(signature_of(as<Object>(group, "a signature")));
    }
  } catch (BundleError const& error) {
    throw BundleError("bundle " + path + ": " + error.what());
  }
}

Signature const& Bundle::signature(std::string const& epilogue, std::vector<std::string> const& types) const {
  std::string all;
  for (Signature const& found : signatures_) {
    bool fits = found.epilogue == epilogue && types.size() <= found.operands.size();
    for (size_t i = 0; fits && i < types.size(); ++i) fits = found.operands[i].type == types[i];
    if (fits) return found;
    all += "\n  " + typed(found);
  }
  throw LoadError("bundle " + files_->path + " has no signature " + epilogue + " with these types; it has" + all);
}

Kernel Bundle::load(std::string const& key) const {
  std::vector<std::pair<Signature const*, KernelInfo const*>> found;
  for (Signature const& signature : signatures_) {
    for (KernelInfo const& kernel : signature.kernels) {
      if (kernel.key.compare(0, key.size(), key) == 0) found.emplace_back(&signature, &kernel);
    }
  }
  if (found.size() != 1) {
    std::string const count = found.empty() ? "no kernel" : std::to_string(found.size()) + " kernels";
    throw LoadError("bundle " + files_->path + " has " + count + " whose key begins with \"" + key + "\": `cutlass-ops list --bundle` shows what is there");
  }
  auto const& [signature, kernel] = found.front();
  std::string const name = typed(*signature) + " for " + kernel->target + ", " + kernel->key.substr(0, 12);

  // Never destroyed: kernels stay until the process ends, since CUDA's own clean-up may run later than this one's.
  static auto& mutex = *new std::mutex;
  static auto& loaded = *new std::map<std::string, std::shared_ptr<Kernel::Loaded const>>;
  std::lock_guard<std::mutex> const lock(mutex);
  std::shared_ptr<Kernel::Loaded const>& entry = loaded[kernel->sha256];
  if (entry == nullptr) {
    std::string const file = "kernels/" + kernel->key + ".so";
    std::string const data = files_->container->read(file, kMaxFile);
    if (int64_t(data.size()) != kernel->size || sha256(data) != kernel->sha256) {
      throw BundleError("bundle " + files_->path + ": " + file + " is not what the manifest says: its SHA-256 is another");
    }
    try {
      Mappable const mappable(data);
      // Module::LoadFromFile goes by the file's ending, and descriptors have none.
      ffi::Function const open = ffi::Function::GetGlobalRequired("ffi.Module.load_from_file.so");
      auto const module = open(mappable.path(), "so").cast<ffi::Module>();
      auto const function = [&](char const* symbol) { return module->GetFunction(symbol).value(); };
      entry = std::make_shared<Kernel::Loaded const>(
          Kernel::Loaded{module, function("launch"), function("workspace_size")});
    } catch (ffi::Error const& error) {
      throw LoadError(name + " cannot be loaded: " + error.message() + " (its CUDA runtime is libcudart.so." +
                      cuda_.substr(0, cuda_.find('.')) + ", which the process must have or find)");
    }
  }
  return Kernel(entry, name, signature->operands);
}

}  // namespace cutlass_ops
