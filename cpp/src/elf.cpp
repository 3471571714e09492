#include "elf.h"

#include <elf.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <vector>

namespace cutlass_ops {
namespace {

constexpr uint64_t kPage = 4096;
constexpr uint16_t kMaxHeaders = 64;  // a kernel has about ten

// The C and C++ runtimes, tvm-ffi and the CUDA runtime. A number follows a final dot. A slash would make the name a path.
constexpr std::string_view kLibraries[] = {"libtvm_ffi.so", "libcudart.so.", "libstdc++.so.",          "libgcc_s.so.",
                                           "libm.so.",      "libc.so.",      "ld-linux-x86-64.so."};

struct Tag {
  int64_t number;
  char const* name;
};
// Other entries that make the dynamic linker load or search files.
constexpr Tag kForbidden[] = {{DT_RPATH, "DT_RPATH"},         {DT_RUNPATH, "DT_RUNPATH"}, {DT_CONFIG, "DT_CONFIG"},
                              {DT_DEPAUDIT, "DT_DEPAUDIT"},   {DT_AUDIT, "DT_AUDIT"},     {DT_FILTER, "DT_FILTER"},
                              {DT_AUXILIARY, "DT_AUXILIARY"}};

template <class T>
std::optional<T> read(std::string_view data, uint64_t at) {
  if (at > data.size() || data.size() - at < sizeof(T)) return std::nullopt;
  T value;
  std::memcpy(&value, data.data() + at, sizeof value);
  return value;
}

// The mapped segments of a library.
class Image {
 public:
  // Returns false if the mapped memory could differ from the file's bytes.
  bool add(std::string_view file, Elf64_Phdr const& part) {
    if (part.p_filesz > part.p_memsz || part.p_offset > file.size() || file.size() - part.p_offset < part.p_filesz) return false;
    if (part.p_vaddr > UINT64_MAX / 2 || part.p_memsz > UINT64_MAX / 4 || (part.p_vaddr - part.p_offset) % kPage != 0) return false;
    // Whole pages are mapped: if two segments shared a page, the later one would win.
    if (part.p_vaddr / kPage * kPage < end_) return false;
    end_ = (part.p_vaddr + part.p_memsz + kPage - 1) / kPage * kPage;
    parts_.push_back({part.p_vaddr, file.substr(part.p_offset, part.p_filesz)});
    return true;
  }

  // The bytes from an address to the end of its segment; empty if nothing of the file is mapped there.
  std::string_view from(uint64_t address) const {
    for (auto const& [begin, data] : parts_) {
      if (address >= begin && address - begin < data.size()) return data.substr(address - begin);
    }
    return {};
  }

 private:
  struct Part {
    uint64_t begin;
    std::string_view data;
  };
  std::vector<Part> parts_;
  uint64_t end_ = 0;
};

std::string needed_problem(std::string_view names, uint64_t at) {
  size_t const end = at < names.size() ? names.find('\0', at) : std::string_view::npos;
  if (end == std::string_view::npos) return "the name of a library that it needs is missing";
  std::string_view const name = names.substr(at, end - at);
  auto const is = [&](std::string_view known) {
    if (name.substr(0, known.size()) != known) return false;
    std::string_view const number = name.substr(known.size());
    return known.back() == '.' ? !number.empty() && number.find_first_not_of("0123456789") == number.npos : number.empty();
  };
  if (std::any_of(std::begin(kLibraries), std::end(kLibraries), is)) return "";
  std::string shown(name.substr(0, 80));
  for (char& c : shown) c = c < ' ' || c > '~' ? '?' : c;
  return "it needs " + shown + ", which kernels must not load";
}

}  // namespace

std::string linkage_problem(std::string_view library) {
  auto const header = read<Elf64_Ehdr>(library, 0);
  if (!header || std::memcmp(header->e_ident, ELFMAG, SELFMAG) != 0) return "it is not a shared library";
  if (header->e_ident[EI_CLASS] != ELFCLASS64 || header->e_ident[EI_DATA] != ELFDATA2LSB || header->e_machine != EM_X86_64 ||
      header->e_type != ET_DYN) {
    return "it is not a shared library for x86-64";
  }
  if (header->e_phentsize != sizeof(Elf64_Phdr) || header->e_phnum > kMaxHeaders) {
    return "its program headers are not those of a kernel";
  }
  Image image;
  std::optional<Elf64_Phdr> dynamic;
  for (uint16_t i = 0; i < header->e_phnum; ++i) {
    if (header->e_phoff > library.size()) return "it ends before its program headers do";
    auto const part = read<Elf64_Phdr>(library, header->e_phoff + i * sizeof(Elf64_Phdr));
    if (!part) return "it ends before its program headers do";
    if (part->p_type == PT_LOAD && !image.add(library, *part)) return "its segments are not in a linker's layout";
    if (part->p_type != PT_DYNAMIC) continue;
    if (dynamic) return "it has two dynamic sections";
    dynamic = part;
  }
  if (!dynamic) return "it has no dynamic section";

  // Read the dynamic section as the dynamic linker does: where it is mapped, not at its offset in the file, up to DT_NULL.
  std::string_view const section = image.from(dynamic->p_vaddr);
  std::vector<uint64_t> needed;
  std::optional<uint64_t> names;
  for (uint64_t at = 0;; at += sizeof(Elf64_Dyn)) {
    auto const entry = read<Elf64_Dyn>(section, at);
    if (!entry) return "its dynamic section has no end";
    if (entry->d_tag == DT_NULL) break;
    for (Tag const& tag : kForbidden) {
      if (entry->d_tag == tag.number) {
        return "it has " + std::string(tag.name) + " and could load code of other users: link it without";
      }
    }
    if (entry->d_tag == DT_NEEDED) needed.push_back(entry->d_un.d_val);
    if (entry->d_tag != DT_STRTAB) continue;
    if (names) return "it has two string tables";
    names = entry->d_un.d_ptr;
  }
  std::string_view const table = names ? image.from(*names) : std::string_view();
  for (uint64_t name : needed) {
    if (std::string problem = needed_problem(table, name); !problem.empty()) return problem;
  }
  return "";
}

}  // namespace cutlass_ops
