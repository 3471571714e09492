#include "files.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#include "cutlass_ops/bundle.h"
#include "manifest.h"

#ifndef MFD_EXEC
#define MFD_EXEC 0x0010U  // since Linux 6.3
#endif

namespace cutlass_ops {

Descriptor::~Descriptor() {
  if (number_ >= 0) close(number_);
}

int Descriptor::release() { return std::exchange(number_, -1); }

namespace {

// As in cutlass_ops/artifacts/container.py.
constexpr int64_t kMaxArchive = 0xffffffff;  // bytes; more needs ZIP64
constexpr size_t kMaxFiles = 20'000;
constexpr uint32_t kMaxName = 100;

BundleError unreadable(std::string const& path) {
  return BundleError(path + " cannot be read: " + std::strerror(errno));
}

// Opens a file that only this user or root can have written, since code is loaded from it.
Descriptor open_private(int folder, std::string const& name, std::string const& path, bool is_folder) {
  // O_NONBLOCK: do not block if someone put a pipe there.
  int const flags = O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK | (is_folder ? O_DIRECTORY : 0);
  Descriptor found(openat(folder, name.c_str(), flags));
  struct stat info;
  if (found.get() < 0 || fstat(found.get(), &info) != 0) throw unreadable(path);
  if (!is_folder && !S_ISREG(info.st_mode)) throw BundleError(path + " is not a regular file");
  if (info.st_uid != geteuid() && info.st_uid != 0) {
    throw BundleError(path + " belongs to user " + std::to_string(info.st_uid) + ", not to this one (" +
                      std::to_string(geteuid()) + ")");
  }
  if (info.st_mode & (S_IWGRP | S_IWOTH)) {
    throw BundleError(path + " can be written by others: compiled code would be loaded from it; fix it with "
                      "chmod -R go-w");
  }
  return found;
}

int64_t size_of(Descriptor const& file, std::string const& path) {
  struct stat info;
  if (fstat(file.get(), &info) != 0) throw unreadable(path);
  return info.st_size;
}

// Reads with pread: after a fork, processes share the file position.
std::string read_at(Descriptor const& file, int64_t offset, int64_t count, std::string const& path) {
  std::string data(size_t(count), '\0');
  for (int64_t done = 0; done < count;) {
    ssize_t const got = pread(file.get(), data.data() + done, size_t(count - done), offset + done);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw unreadable(path);
    if (got == 0) throw BundleError(path + " is truncated");
    done += got;
  }
  return data;
}

bool is_named(std::string_view name, std::string_view folder, std::string_view ending) {
  return name.size() == folder.size() + 64 + ending.size() && name.substr(0, folder.size()) == folder &&
         name.substr(folder.size(), 64).find_first_not_of("0123456789abcdef") == name.npos &&
         name.substr(folder.size() + 64) == ending;
}

// Names are made from digests and file types; a manifest cannot choose them.
bool is_name(std::string_view name) {
  return name == "manifest.json" || name == "manifest.sig" || is_named(name, "kernels/", ".so") ||
         is_named(name, "sources/", ".cu") || is_named(name, "tables/", ".json");
}

// An untrusted name, for a message.
std::string shown(std::string_view name) {
  std::string text(name.substr(0, kMaxName));
  for (char& c : text) c = c < ' ' || c > '~' ? '?' : c;
  return "'" + text + "'";
}

void require_size(int64_t size, std::string const& path) {
  if (size < 0 || size > kMaxFile) {
    throw BundleError(path + " has " + std::to_string(size) + " bytes: at most " + std::to_string(kMaxFile) + " are allowed");
  }
}

class Folder : public Container {
 public:
  explicit Folder(std::string path) : path_(std::move(path)) {
    folders_.emplace("", open_private(AT_FDCWD, path_, path_, true));
    std::vector<std::string> const present = names(folders_.at(""));
    for (std::string const name : {"kernels", "sources", "tables"}) {
      if (std::find(present.begin(), present.end(), name) == present.end()) continue;
      folders_.emplace(name, open_private(folders_.at("").get(), name, path_ + "/" + name, true));
    }
    for (auto const& [folder, opened] : folders_) {
      for (std::string const& name : folder.empty() ? present : names(opened)) {
        if (folder.empty() && folders_.count(name) != 0) continue;
        if (sizes_.size() == kMaxFiles) throw too_many();
        std::string const full = folder.empty() ? name : folder + "/" + name;
        sizes_[full] = size(opened, name, full);
      }
    }
  }

  std::string read(std::string const& name) const override {
    auto const found = sizes_.find(name);
    if (found == sizes_.end()) throw BundleError(path_ + " has no file " + name);
    std::string const path = path_ + "/" + name;
    size_t const slash = name.find('/');
    std::string const folder = slash == std::string::npos ? "" : name.substr(0, slash);
    Descriptor const file = open_private(folders_.at(folder).get(), name.substr(slash + 1), path, false);
    if (size_of(file, path) != found->second) throw BundleError(path + " changed its size since the bundle was opened");
    return read_at(file, 0, found->second, path);
  }

 private:
  std::vector<std::string> names(Descriptor const& folder) const {
    // A separate descriptor, since the position among the entries belongs to it.
    Descriptor opened(openat(folder.get(), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    std::unique_ptr<DIR, int (*)(DIR*)> const entries(opened.get() < 0 ? nullptr : fdopendir(opened.get()), &closedir);
    if (entries == nullptr) throw unreadable(path_);
    opened.release();
    std::vector<std::string> found;
    while (dirent const* const entry = (errno = 0, readdir(entries.get()))) {
      std::string const name = entry->d_name;
      if (name == "." || name == "..") continue;
      if (found.size() > kMaxFiles) throw too_many();
      found.push_back(name);
    }
    if (errno != 0) throw unreadable(path_);
    return found;
  }

  int64_t size(Descriptor const& folder, std::string const& name, std::string const& full) const {
    if (!is_name(full)) throw BundleError(path_ + ": a bundle cannot have a file named " + shown(full));
    std::string const path = path_ + "/" + full;
    struct stat info;
    if (fstatat(folder.get(), name.c_str(), &info, AT_SYMLINK_NOFOLLOW) != 0) throw unreadable(path);
    if (!S_ISREG(info.st_mode)) throw BundleError(path + " is not a regular file");
    require_size(info.st_size, path);
    return info.st_size;
  }

  BundleError too_many() const { return BundleError(path_ + " has more than " + std::to_string(kMaxFiles) + " files"); }

  std::string path_;
  std::map<std::string, Descriptor> folders_;
};

// ZIP's numbers are little-endian.
uint32_t number(std::string const& bytes, size_t at, int count) {
  uint32_t value = 0;
  for (int i = 0; i < count; ++i) value |= uint32_t(static_cast<unsigned char>(bytes.at(at + i))) << 8 * i;
  return value;
}

std::string bytes(std::initializer_list<std::pair<int, uint32_t>> numbers) {
  std::string text;
  for (auto [count, value] : numbers) {
    for (int i = 0; i < count; ++i) text += char(value >> 8 * i & 0xff);
  }
  return text;
}

constexpr size_t kCentral = 46, kEnd = 22;

// A ZIP file in the canonical form that cutlass_ops/artifacts/container.py writes. Reading compares the file with that form, so
// compression, links, duplicates, overlaps and hidden parts need no separate checks.
class Archive : public Container {
 public:
  explicit Archive(std::string path) : path_(std::move(path)), file_(open_private(AT_FDCWD, path_, path_, false)) {
    int64_t const size = size_of(file_, path_);
    if (size < int64_t(kEnd) || size > kMaxArchive) throw foreign();
    std::string const end = read_at(file_, size - kEnd, kEnd, path_);
    uint32_t const count = number(end, 10, 2), length = number(end, 12, 4), offset = number(end, 16, 4);
    if (end != bytes({{4, 0x06054b50}, {4, 0}, {2, count}, {2, count}, {4, length}, {4, offset}, {2, 0}}) ||
        int64_t(offset) + length + int64_t(kEnd) != size || count > kMaxFiles) {
      throw foreign();
    }
    // Check the size before reading: the number of entries limits it.
    if (int64_t(length) > int64_t(count) * int64_t(kCentral + kMaxName)) throw foreign();
    std::string const directory = read_at(file_, offset, length, path_);
    size_t at = 0;
    int64_t place = 0;
    std::string last;
    for (uint32_t i = 0; i < count; ++i) {
      if (directory.size() - at < kCentral) throw foreign();
      Entry const entry{number(directory, at + 16, 4), number(directory, at + 24, 4), uint32_t(place)};
      std::string const name = directory.substr(at + kCentral, std::min(number(directory, at + 28, 2), kMaxName));
      if (!is_name(name)) throw BundleError(path_ + ": a bundle cannot have a file named " + shown(name));
      std::string const central = central_header(name, entry);
      if (directory.compare(at, central.size(), central) != 0 || name <= last) throw foreign();
      require_size(entry.size, path_ + ": " + name);
      sizes_[name] = entry.size;
      entries_[name] = entry;
      at += central.size();
      place += int64_t(local_header(name, entry).size()) + entry.size;
      if (place > int64_t(offset)) throw foreign();
      last = name;
    }
    if (at != directory.size() || place != int64_t(offset)) throw foreign();
  }

  std::string read(std::string const& name) const override {
    auto const found = entries_.find(name);
    if (found == entries_.end()) throw BundleError(path_ + " has no file " + name);
    Entry const& entry = found->second;
    std::string const head = local_header(name, entry);
    if (read_at(file_, entry.offset, int64_t(head.size()), path_) != head) throw foreign();
    return read_at(file_, int64_t(entry.offset) + int64_t(head.size()), entry.size, path_);
  }

 private:
  struct Entry {
    uint32_t crc, size, offset;
  };

  // Version 2.0, stored, on ZIP's first day.
  static std::string local_header(std::string const& name, Entry const& e) {
    return bytes({{4, 0x04034b50}, {2, 20}, {2, 0}, {2, 0}, {2, 0}, {2, 0x21}, {4, e.crc}, {4, e.size}, {4, e.size},
                  {2, uint32_t(name.size())}, {2, 0}}) + name;
  }
  static std::string central_header(std::string const& name, Entry const& e) {
    return bytes({{4, 0x02014b50}, {2, 20}, {2, 20}, {2, 0}, {2, 0}, {2, 0}, {2, 0x21}, {4, e.crc}, {4, e.size},
                  {4, e.size}, {2, uint32_t(name.size())}, {2, 0}, {2, 0}, {2, 0}, {2, 0}, {4, 0}, {4, e.offset}}) + name;
  }

  BundleError foreign() const {
    return BundleError(path_ + " is not a bundle of cutlass_ops: it is truncated, repacked, or another kind of file");
  }

  std::string path_;
  Descriptor file_;
  std::map<std::string, Entry> entries_;
};

bool write_all(int file, std::string_view data) {
  for (size_t done = 0; done < data.size();) {
    ssize_t const wrote = write(file, data.data() + done, data.size() - done);
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote <= 0) return false;
    done += size_t(wrote);
  }
  return true;
}

// A sealed memory file: nobody can replace the bytes, and nothing is written to disk. None if the system has no memory files.
Descriptor sealed(std::string_view data) {
  int number = memfd_create("cutlass_ops", MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_EXEC);
  // Linux before 6.3 has no such flag and does not need it.
  if (number < 0) number = memfd_create("cutlass_ops", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  Descriptor memory(number);
  if (number < 0 || !write_all(number, data)) return Descriptor(-1);
  if (fcntl(number, F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) return Descriptor(-1);
  return memory;
}

// A path to a descriptor that no other mapped file in this process has. It encodes the inode's number in extra slashes and
// dots, which do not change the path's meaning. A mapped file keeps its inode, so no other mapped file has the same number,
// whoever loads libraries here. The first dot keeps the path different from Python's.
std::string unique_name(Descriptor const& memory) {
  struct stat info;
  if (fstat(memory.get(), &info) != 0) throw LoadError(std::string("memory for a kernel has no number: ") + std::strerror(errno));
  std::string name = "/proc/self/.";
  for (uint64_t left = info.st_ino; left != 0; left >>= 1) name += left & 1 ? "/." : "/";
  return name + "/fd/" + std::to_string(memory.get());
}

// The user may link to a file or bundle. Links inside a bundle are rejected.
std::string real_path(std::string const& path, std::string const& what) {
  if (path.find('\0') != std::string::npos) throw BundleError(shown(path) + " cannot be read: its name has a zero byte");
  std::unique_ptr<char, decltype(&std::free)> const real(realpath(path.c_str(), nullptr), &std::free);
  if (real == nullptr) throw unreadable(what);
  return real.get();
}

}  // namespace

std::unique_ptr<Container> open_container(std::string const& path) {
  std::string const real = real_path(path, "bundle " + path);
  struct stat info;
  if (stat(real.c_str(), &info) != 0) throw unreadable("bundle " + path);
  if (S_ISDIR(info.st_mode)) return std::make_unique<Folder>(real);
  return std::make_unique<Archive>(real);
}

std::string read_file(std::string const& path, int64_t most) {
  std::string const real = real_path(path, path);
  Descriptor const file = open_private(AT_FDCWD, real, path, false);
  int64_t const size = size_of(file, path);
  if (size > most) throw BundleError(path + " has " + std::to_string(size) + " bytes: at most " + std::to_string(most) + " are allowed");
  return read_at(file, 0, size, path);
}

Mappable::Mappable(std::string_view data) : memory_(sealed(data)) {
  if (memory_.get() >= 0) {
    path_ = unique_name(memory_);
    return;
  }
  // A file in a private folder, for systems that forbid executing memory files.
  char const* const root = std::getenv("TMPDIR");
  std::string name = std::string(root != nullptr && *root != '\0' ? root : "/tmp") + "/cutlass_ops.XXXXXX";
  if (mkdtemp(name.data()) == nullptr) throw LoadError(name + " cannot be made: " + std::strerror(errno));
  folder_.file.reserve(name.size() + 16);
  folder_.name = std::move(name);
  path_ = folder_.name + "/kernel.so";
  folder_.file = path_;
  Descriptor const file(open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (file.get() < 0 || !write_all(file.get(), data)) throw LoadError(path_ + " cannot be written: " + std::strerror(errno));
}

Mappable::Folder::~Folder() {
  if (!file.empty()) unlink(file.c_str());
  if (!name.empty()) rmdir(name.c_str());
}

}  // namespace cutlass_ops
