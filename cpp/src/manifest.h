// Reads a bundle's manifest: its bytes, structure, limits and digests. What declarations mean is checked by Python alone
// (cutlass_ops/artifacts/manifest.py), which writes bundles: a kernel's key covers every byte of its declaration. tests/cpp
// compares limits and readers: this one accepts what Python's accepts.

#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "cutlass_ops/bundle.h"

namespace cutlass_ops {

// As in cutlass_ops/artifacts/loader.py, _version.py, container.py and manifest.py.
constexpr int64_t kAbi = 5;
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
  // Sizes by name of all files except the manifest and its signature.
  std::map<std::string, int64_t> files;

  // Parts of the manifest's text, from which kernels' keys are hashed.
  struct Identity {
    std::string config, headers, source;
  };
  struct Declaration {
    std::string types_a_b, types_d;  // a signature's parts before and after the configuration
    std::vector<Identity> kernels;
  };
  std::vector<Declaration> declarations;     // of each signature
  std::map<std::string, std::string> flags;  // of each target
  std::string toolchain;

  // The key that follows from a kernel's identity in the manifest.
  std::string key_of(size_t signature, size_t kernel) const;
};

// Reads an untrusted manifest. BundleError if it is not in the form that cutlass_ops writes, or of another version.
Manifest read_manifest(std::string const& text);

// The tables that Python has too, one per line, for the tests.
std::string manifest_tables();

}  // namespace cutlass_ops
