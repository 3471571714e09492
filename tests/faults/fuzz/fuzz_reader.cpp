// Coverage-guided fuzzing of the C++ reader: whatever is read, it is a bundle or an Error. Run by run.sh; FUZZ_TARGET says which
// part of it. A manifest's own digest is put right here, and only here: no mutation would get past it.

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "../../../cpp/src/elf.h"
#include "../../../cpp/src/files.h"
#include "../../../cpp/src/manifest.h"
#include "../../../cpp/src/sha256.h"
#include "../../../cpp/src/signing.h"

namespace {

using namespace cutlass_ops;

void require(bool good) {
  if (!good) std::abort();
}

// The text with its own digest where there is one.
std::string sealed(std::string text) {
  std::string const field = ",\"sha256\":\"";
  size_t const version = text.find("\"library_version\"");
  size_t const at = version == text.npos ? text.npos : text.find(field, version);
  if (at == text.npos || text.size() - at < field.size() + 65) return text;
  std::string without = text;
  without.erase(at, field.size() + 65);
  return text.replace(at + field.size(), 64, sha256(without));
}

// What a process does with a manifest that was accepted.
void use(Manifest const& manifest) {
  for (size_t s = 0; s < manifest.signatures.size(); ++s) {
    Signature const& signature = manifest.signatures[s];
    require(!signature.kernels.empty() && signature.operands.size() >= 3);
    for (size_t k = 0; k < signature.kernels.size(); ++k) {
      require(manifest.key_of(s, k).size() == 64);
      require(manifest.files.count("kernels/" + signature.kernels[k].key + ".so") == 1);
    }
    for (Weight const& weight : signature.weights) require(!weight.rows.empty());
  }
}

void of_manifest(std::string const& data) {
  try {
    use(read_manifest(sealed(data)));
  } catch (BundleError const&) {
  }
}

// Puts bytes into a file of the folder for that.
std::string write(std::string const& data) {
  char const* const folder = std::getenv("FUZZ_SCRATCH");
  require(folder != nullptr);
  std::string const path = std::string(folder) + "/input";
  int const file = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  require(file >= 0 && ::write(file, data.data(), data.size()) == ssize_t(data.size()) && close(file) == 0);
  return path;
}

void of_archive(std::string const& data) {
  try {
    auto const container = open_container(write(data));
    std::string manifest;
    for (auto const& [name, size] : container->sizes()) {
      std::string const read = container->read(name);
      require(int64_t(read.size()) == size && size <= int64_t(data.size()));
      if (name == "manifest.json") manifest = read;
    }
    use(read_manifest(sealed(manifest)));
  } catch (BundleError const&) {
  }
}

void of_library(std::string const& data) { linkage_problem(data); }

void of_key(std::string const& data) {
  try {
    require_signature("message", std::string(kSignature, 'x'), {write(data)});
    std::abort();  // no such signature is right
  } catch (Error const&) {
  }
}

// ---- Changing a manifest as a value ------------------------------------------------------------------------------

using Part = std::pair<size_t, size_t>;  // where it begins, and how long it is

// Where values of a JSON text lie: what follows a bracket, a comma or a colon, to the end of its own brackets.
std::vector<Part> values(std::string const& text) {
  std::vector<Part> found;
  for (size_t begin = 1; begin < text.size(); ++begin) {
    if (std::string("[,:").find(text[begin - 1]) == std::string::npos) continue;
    int depth = 0;
    bool in_text = false;
    size_t end = begin;
    for (; end < text.size(); ++end) {
      char const c = text[end];
      if (c == '"') in_text = !in_text;
      if (in_text) continue;
      if (c == '[' || c == '{') ++depth;
      if (depth == 0 && (c == ',' || c == ']' || c == '}')) break;
      if ((c == ']' || c == '}') && --depth == 0) {
        ++end;
        break;
      }
    }
    if (end > begin) found.emplace_back(begin, end - begin);
  }
  return found;
}

char const* const kValues[] = {"null", "true", "false", "0", "1", "-1", "2", "2147483648", "1e9", "0.5", "[]", "{}", "\"\"", "\"sm_80\"",
                               "99999999999999999999", "[[]]", "\"0x1.8000000000000p+1\"", "\"\\u0000\""};

}  // namespace

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t most);

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t most, unsigned seed) {
  static bool const is_manifest = std::getenv("FUZZ_TARGET") == nullptr || std::getenv("FUZZ_TARGET") == std::string("manifest");
  std::minstd_rand random(seed);
  std::string text(reinterpret_cast<char const*>(data), size);
  std::vector<Part> const parts = is_manifest && random() % 2 ? values(text) : std::vector<Part>();
  if (parts.empty()) return LLVMFuzzerMutate(data, size, most);
  auto const [at, length] = parts[random() % parts.size()];
  auto const [other, other_length] = parts[random() % parts.size()];
  switch (random() % 4) {
    case 0: text.replace(at, length, kValues[random() % std::size(kValues)]); break;
    case 1: text.replace(at, length, text.substr(other, other_length)); break;
    case 2: text.insert(at, text.substr(at, length) + ","); break;
    default: text.erase(at, length + (text[at + length] == ',' ? 1 : 0)); break;
  }
  text.resize(std::min(text.size(), most));
  std::memcpy(data, text.data(), text.size());
  return text.size();
}

extern "C" int LLVMFuzzerTestOneInput(uint8_t const* data, size_t size) {
  static std::string const target = std::getenv("FUZZ_TARGET") == nullptr ? "manifest" : std::getenv("FUZZ_TARGET");
  std::string const text(reinterpret_cast<char const*>(data), size);
  if (target == "manifest") of_manifest(text);
  else if (target == "archive") of_archive(text);
  else if (target == "library") of_library(text);
  else if (target == "key") of_key(text);
  else std::abort();
  return 0;
}
