// Calls single parts of the C++ interface, for the tests in this folder. Nothing here needs a GPU: no address is ever read.

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#include <tvm/ffi/extra/c_env_api.h>

#include "cutlass_ops/bundle.h"
#include "elf.h"
#include "manifest.h"
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

// Says of each text in a file, which has its length in a line before it, whether it is a manifest.
void manifests(Words const& words) {
  std::ifstream file(words.at(0), std::ios::binary);
  size_t size;
  while (file >> size) {
    file.get();
    std::string text(size, '\0');
    file.read(text.data(), std::streamsize(size));
    try {
      read_manifest(text);
      std::printf("ok\n");
    } catch (BundleError const& error) {
      std::printf("%s\n", error.what());
    }
  }
}

void linkage(Words const& words) {
  for (std::string const& path : words) {
    std::ifstream file(path, std::ios::binary);
    std::printf("%s\n", linkage_problem(std::string{std::istreambuf_iterator<char>(file), {}}).c_str());
  }
}

void find(Words const& words) {
  Bundle const bundle(words.at(0));
  std::printf("%s\n", bundle.signature(words.at(1), {words.begin() + 2, words.end()}).kernels[0].key.c_str());
}

// Says of each bundle whether it can be opened, and with --load how many of its kernels can be loaded, in a process of its own.
void each(Words const& words) {
  bool const loads = words.at(0) == "--load";
  for (size_t at = loads ? 1 : 0; at < words.size(); ++at) {
    if (loads) {
      if (pid_t const child = fork(); child != 0) {
        waitpid(child, nullptr, 0);
        continue;
      }
    }
    try {
      Bundle const bundle(words[at]);
      size_t good = 0;
      for (Signature const& signature : bundle.signatures()) {
        for (KernelInfo const& kernel : signature.kernels) {
          try {
            if (loads) bundle.load(kernel.key), ++good;
          } catch (Error const&) {
          }
        }
      }
      std::printf("ok %zu\n", good);
    } catch (Error const& error) {
      std::printf("%s\n", error.what());
    }
    if (loads) std::exit(0);
  }
}

// A bundle and public keys with one of which it must be signed.
void signed_by(Words const& words) {
  Bundle const bundle(words.at(0), "", {words.begin() + 1, words.end()});
  std::printf("signed\n");
}

void recent(Words const& words) {
  Bundle const bundle(words.at(0), "", {}, std::stoll(words.at(1)));
  std::printf("recent\n");
}

void zero(Words const& words) { Bundle const bundle(words.at(0) + std::string("\0x", 2)); }

// Loads the one kernel, with so many MiB of memory more than there is already.
void starve(Words const& words) {
  rlim_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  rlimit const limit = {pages * 4096 + (rlim_t(std::stoi(words.at(1))) << 20), RLIM_INFINITY};
  if (setrlimit(RLIMIT_AS, &limit) != 0) throw std::runtime_error("no limit");
  Bundle(words.at(0)).load("");
  std::printf("loaded\n");
}

size_t descriptors() {
  auto const entries = std::filesystem::directory_iterator("/proc/self/fd");
  return size_t(std::distance(begin(entries), end(entries)));
}

// How many descriptors more there are after what fails: bundles that cannot be opened, and kernels that cannot be loaded.
void leak(Words const& words) {
  auto const fail = [&](size_t at) {
    try {
      Bundle(words.at(at)).load("");
      throw std::logic_error("nothing failed");
    } catch (Error const&) {
    }
  };
  fail(0);  // what is opened once stays
  size_t const before = descriptors();
  for (int i = 0; i < 3; ++i) {
    for (size_t at = 0; at < words.size(); ++at) fail(at);
  }
  std::printf("%zu more\n", descriptors() - before);
}

// Loads the one kernel of each bundle, and says what each answers: no two may be taken for one another.
void apart(Words const& words) {
  for (std::string const& path : words) {
    try {
      std::printf("%lld\n", static_cast<long long>(Bundle(path).load("").workspace_size(1, 2, 3, {4, 5})));
    } catch (Error const& error) {
      std::printf("%s\n", error.what());
    }
  }
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
    else if (command == "each") each(words);
    else if (command == "signed") signed_by(words);
    else if (command == "recent") recent(words);
    else if (command == "zero") zero(words);
    else if (command == "starve") starve(words);
    else if (command == "leak") leak(words);
    else if (command == "manifests") manifests(words);
    else if (command == "apart") apart(words);
    else if (command == "tables") std::printf("%s", manifest_tables().c_str());
    else if (command == "linkage") linkage(words);
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
  } catch (Error const& error) {
    what = error.what();
  }
  std::printf("%s: %s\n", kind, what.c_str());
  return 1;
}
