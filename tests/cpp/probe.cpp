// Calls single parts of the C++ interface, for test_cpp.py. Nothing here needs a GPU: no address is ever read.

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include <tvm/ffi/extra/c_env_api.h>

#include "cutlass_ops/bundle.h"
#include "sha256.h"

namespace {

using namespace cutlass_ops;
using Words = std::vector<std::string>;

void* address(uintptr_t number) { return reinterpret_cast<void*>(number); }

void hash(Words const& words) {
  std::ifstream file(words.at(0), std::ios::binary);
  std::string const data{std::istreambuf_iterator<char>(file), {}};
  for (size_t size = 0; size <= data.size(); ++size) std::printf("%s\n", sha256(data.substr(0, size)).c_str());
}

void list(Words const& words) {
  Bundle const bundle(words.at(0), words.size() > 1 ? words[1] : "");
  for (Signature const& signature : bundle.signatures()) {
    std::printf("%s\n", signature.epilogue.c_str());
    for (Operand const& operand : signature.operands) std::printf("%s %s\n", operand.name.c_str(), operand.type.c_str());
    for (KernelInfo const& kernel : signature.kernels) std::printf("%s %s\n", kernel.key.c_str(), kernel.target.c_str());
  }
}

// Capability's two numbers, N, K, then numbers of rows.
void choose(Words const& words) {
  Bundle const bundle(words.at(0));
  auto const number = [&](size_t at) { return std::stoi(words.at(at)); };
  for (size_t at = 5; at < words.size(); ++at) {
    Choice const choice = bundle.signatures()[0].choose({number(1), number(2)}, number(at), number(3), number(4));
    std::printf("%s %d %d\n", choice.key.c_str(), choice.order.raster, choice.order.swizzle);
  }
}

void find(Words const& words) {
  Bundle const bundle(words.at(0));
  std::printf("%s\n", bundle.signature(words.at(1), {words.begin() + 2, words.end()}).kernels[0].key.c_str());
}

void load(Words const& words) {
  Bundle const bundle(words.at(0));
  for (size_t at = 1; at < words.size(); ++at) {
    Kernel const kernel = bundle.load(words[at]);
    std::printf("loaded, workspace %lld\n", static_cast<long long>(kernel.workspace_size(1, 2, 3, {4, 5})));
  }
}

// Raster order and swizzle, which tell the fake kernel what to answer, and bytes of workspace.
void launch(Words const& words) {
  Bundle const bundle(words.at(0));
  auto const number = [&](size_t at) { return std::stoi(words.at(at)); };
  TVMFFIEnvSetStream(kDLCUDA, 1, address(7), nullptr);
  std::vector<Argument> const arguments = {
      Tensor::row_major(address(1 << 12), kBF16, 16, 32, 40, 1),
      Tensor::column_major(address(2 << 12), kBF16, 32, 64, 48, 1),
      Tensor::row_major(address(3 << 12), kF16, 16, 64, 64, 1),
      Tensor::vector(address(4 << 12), kF32, 64, 1),
      0.5,
      Tensor::vector(address(5 << 12), kF32, 16, 1),
  };
  Workspace const workspace{number(3) ? address(6 << 12) : nullptr, number(3)};
  auto const show = [] { std::printf("stream after it %p\n", TVMFFIEnvGetStream(kDLCUDA, 1)); };
  try {
    bundle.load("").launch(arguments, {number(1), number(2)}, workspace, address(9));
  } catch (Error const&) {
    show();
    throw;
  }
  show();
}

// A kernel of bias + ReLU in BF16 is given one wrong argument.
void refuse(Words const& words) {
  Kernel const kernel = Bundle(words.at(0)).load("");
  std::string const& how = words.at(1);
  int64_t const m = 64, n = how == "alignment" ? 129 : 128, k = 64;
  std::vector<Argument> arguments = {
      Tensor::row_major(address(1 << 20), kBF16, m, k, k),
      Tensor::column_major(address(2 << 20), kBF16, how == "shape" ? k + 8 : k, n, k + 8),
      Tensor::row_major(address(how == "overlap" ? 1 << 20 : 3 << 20), kBF16, m, n, n),
      Tensor::vector(address(4 << 20), how == "dtype" ? kF32 : kBF16, n, how == "device" ? 1 : 0),
  };
  if (how == "kind") arguments[3] = 0.5;
  if (how == "number") arguments[0] = 0.5;
  if (how == "major") arguments[0] = Tensor::column_major(address(1 << 20), kBF16, m, k, m);
  if (how == "count") arguments.pop_back();
  kernel.launch(arguments, {}, {}, nullptr);
}

}  // namespace

int main(int count, char** values) {
  Words words(values + 1, values + count);
  std::string const command = words.at(0);
  words.erase(words.begin());
  std::setvbuf(stdout, nullptr, _IONBF, 0);
  char const* kind = "Error";
  std::string what;
  try {
    if (command == "hash") hash(words);
    else if (command == "list") list(words);
    else if (command == "choose") choose(words);
    else if (command == "find") find(words);
    else if (command == "load") load(words);
    else if (command == "launch") launch(words);
    else if (command == "refuse") refuse(words);
    else return 2;
    return 0;
  } catch (BundleError const& error) {
    kind = "BundleError", what = error.what();
  } catch (LoadError const& error) {
    kind = "LoadError", what = error.what();
  } catch (ArgumentError const& error) {
    kind = "ArgumentError", what = error.what();
  } catch (LaunchError const& error) {
    kind = "LaunchError", what = error.what();
  }
  std::printf("%s: %s\n", kind, what.c_str());
  return 1;
}
