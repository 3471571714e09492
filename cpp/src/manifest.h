// What a bundle says of itself: the same rules as in cutlass_ops/artifacts/manifest.py, and what it names of the epilogue language and of
// configurations. tests/cpp compares the tables, tests/faults the readers.

#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "cutlass_ops/bundle.h"

namespace cutlass_ops {

// As in cutlass_ops/artifacts/loader.py, _version.py, container.py and manifest.py.
constexpr int64_t kAbi = 2;
constexpr int64_t kTemplates = 4;
constexpr int64_t kMaxFile = 64 << 20;
constexpr int64_t kMaxManifest = 4 << 20;

struct Manifest {
  int64_t abi = 0;
  int64_t templates = 0;
  std::string library_version;
  std::string nvcc;     // version of the compiler
  int64_t version = 0;  // the catalogue's; 0 if it has none
  std::vector<Signature> signatures;
  // Sizes of all files that the bundle has besides the manifest and its signature, by name.
  std::map<std::string, int64_t> files;

  // Parts of its text, of which kernels' keys are hashes.
  struct Identity {
    std::string config, headers, source;
  };
  struct Declaration {
    std::string types_a_b, types_d;  // a signature in two parts, between which a configuration comes
    std::vector<Identity> kernels;
  };
  std::vector<Declaration> declarations;     // of each signature
  std::map<std::string, std::string> flags;  // of each target
  std::string toolchain;

  // The key that belongs to what it says of a kernel.
  std::string key_of(size_t signature, size_t kernel) const;
};

// Reads a manifest, which need not be trusted. BundleError if it is not what cutlass_ops writes, or of another version.
Manifest read_manifest(std::string const& text);

// The tables that are Python's as well, for the tests: a line for each.
std::string manifest_tables();

}  // namespace cutlass_ops
