#include "files.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#include "cutlass_ops/bundle.h"

#ifndef MFD_EXEC
#define MFD_EXEC 0x0010U  // since Linux 6.3
#endif

namespace cutlass_ops {

Descriptor::~Descriptor() {
  if (number_ >= 0) close(number_);
}

int Descriptor::release() { return std::exchange(number_, -1); }

namespace {

constexpr int64_t kMaxArchive = 0xffffffff;  // bytes; more would need another form of ZIP
constexpr int64_t kMaxFiles = 20'000;

BundleError unreadable(std::string const& path) {
  return BundleError(path + " cannot be read: " + std::strerror(errno));
}

// Opens what nobody but this user (or root) can have written: code will come from it.
Descriptor open_private(int folder, std::string const& name, std::string const& path, bool is_folder) {
  // O_NONBLOCK: opening a pipe that somebody put there must not wait for a writer.
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
    throw BundleError(path + " can be written by others: compiled code would be loaded from it; correct it with "
                      "chmod -R go-w");
  }
  return found;
}

int64_t size_of(Descriptor const& file, std::string const& path) {
  struct stat info;
  if (fstat(file.get(), &info) != 0) throw unreadable(path);
  return info.st_size;
}

// Reads at a place, and not through the file's own position, which processes share after a fork.
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

void require_size(int64_t size, int64_t most, std::string const& path) {
  if (size > most) {
    throw BundleError(path + " has " + std::to_string(size) + " bytes: at most " + std::to_string(most) + " are allowed");
  }
}

class Folder : public Container {
 public:
  explicit Folder(std::string path) : path_(std::move(path)), folder_(open_private(AT_FDCWD, path_, path_, true)) {}

  std::string read(std::string const& name, int64_t most) const override {
    std::string const path = path_ + "/" + name;
    size_t const slash = name.find('/');
    if (slash == std::string::npos) return whole(open_private(folder_.get(), name, path, false), most, path);
    std::string const above = name.substr(0, slash);
    Descriptor const folder = open_private(folder_.get(), above, path_ + "/" + above, true);
    return whole(open_private(folder.get(), name.substr(slash + 1), path, false), most, path);
  }

 private:
  static std::string whole(Descriptor const& file, int64_t most, std::string const& path) {
    int64_t const size = size_of(file, path);
    require_size(size, most, path);
    return read_at(file, 0, size, path);
  }

  std::string path_;
  Descriptor folder_;
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

// A ZIP file in the one form that cutlass_ops/container.py writes: what is read is compared with what would have been
// written, so that compression, links, duplicates, overlaps and hidden parts need no rule each.
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
    std::string const directory = read_at(file_, offset, length, path_);
    size_t at = 0;
    int64_t place = 0;
    for (uint32_t i = 0; i < count; ++i) {
      if (directory.size() - at < kCentral) throw foreign();
      Entry entry;
      entry.crc = number(directory, at + 16, 4), entry.size = number(directory, at + 24, 4), entry.offset = uint32_t(place);
      std::string const name = directory.substr(at + kCentral, number(directory, at + 28, 2));
      std::string const central = central_header(name, entry);
      if (directory.compare(at, central.size(), central) != 0) throw foreign();
      if (!entries_.empty() && name <= entries_.rbegin()->first) throw foreign();
      entries_[name] = entry;
      at += central.size();
      place += int64_t(local_header(name, entry).size()) + entry.size;
    }
    if (at != directory.size() || place != int64_t(offset)) throw foreign();
  }

  std::string read(std::string const& name, int64_t most) const override {
    auto const found = entries_.find(name);
    if (found == entries_.end()) throw BundleError(path_ + " has no file " + name);
    Entry const& entry = found->second;
    require_size(entry.size, most, path_ + ": " + name);
    std::string const head = local_header(name, entry);
    std::string data = read_at(file_, entry.offset, int64_t(head.size()) + entry.size, path_);
    if (data.compare(0, head.size(), head) != 0) throw foreign();
    return data.substr(head.size());
  }

 private:
  struct Entry {
    uint32_t crc, size, offset;
  };

  // Version 2.0, stored, on the first day that ZIP can name.
  static std::string local_header(std::string const& name, Entry const& e) {
    return bytes({{4, 0x04034b50}, {2, 20}, {2, 0}, {2, 0}, {2, 0}, {2, 0x21}, {4, e.crc}, {4, e.size}, {4, e.size},
                  {2, uint32_t(name.size())}, {2, 0}}) + name;
  }
  static std::string central_header(std::string const& name, Entry const& e) {
    return bytes({{4, 0x02014b50}, {2, 20}, {2, 20}, {2, 0}, {2, 0}, {2, 0}, {2, 0x21}, {4, e.crc}, {4, e.size},
                  {4, e.size}, {2, uint32_t(name.size())}, {2, 0}, {2, 0}, {2, 0}, {2, 0}, {4, 0}, {4, e.offset}}) + name;
  }

  BundleError foreign() const {
    return BundleError(path_ + " is not a bundle as cutlass_ops writes it: it is truncated, packed again, or something else");
  }

  std::string path_;
  Descriptor file_;
  std::map<std::string, Entry> entries_;
};

bool write_all(int file, std::string const& data) {
  for (size_t done = 0; done < data.size();) {
    ssize_t const wrote = write(file, data.data() + done, data.size() - done);
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote <= 0) return false;
    done += size_t(wrote);
  }
  return true;
}

// Sealed memory: nobody can exchange the bytes any more, and nothing is written to a disk. -1 if there is none.
int sealed(std::string const& data) {
  int number = memfd_create("cutlass_ops", MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_EXEC);
  // Before Linux 6.3 there is no such flag, and no need of it.
  if (number < 0) number = memfd_create("cutlass_ops", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  Descriptor memory(number);
  if (number < 0 || !write_all(number, data)) return -1;
  if (fcntl(number, F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) return -1;
  return memory.release();
}

// A file in a private folder, for systems that forbid to execute memory. Returns the folder.
std::string private_copy(std::string const& data) {
  char const* const root = std::getenv("TMPDIR");
  std::string const pattern = std::string(root != nullptr && *root != '\0' ? root : "/tmp") + "/cutlass_ops.XXXXXX";
  std::vector<char> name(pattern.c_str(), pattern.c_str() + pattern.size() + 1);
  if (mkdtemp(name.data()) == nullptr) throw LoadError(pattern + " cannot be made: " + std::strerror(errno));
  std::string const folder(name.data()), path = folder + "/kernel.so";
  Descriptor const file(open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (file.get() < 0 || !write_all(file.get(), data)) {
    LoadError const error(path + " cannot be written: " + std::strerror(errno));
    unlink(path.c_str());
    rmdir(folder.c_str());
    throw error;
  }
  return folder;
}

}  // namespace

std::unique_ptr<Container> open_container(std::string const& path) {
  // A link to the bundle is the user's own; within it there are none.
  std::unique_ptr<char, decltype(&std::free)> const real(realpath(path.c_str(), nullptr), &std::free);
  struct stat info;
  if (real == nullptr || stat(real.get(), &info) != 0) throw unreadable("bundle " + path);
  if (S_ISDIR(info.st_mode)) return std::make_unique<Folder>(real.get());
  return std::make_unique<Archive>(real.get());
}

Mappable::Mappable(std::string const& data) {
  int const memory = sealed(data);
  if (memory < 0) {
    folder_ = private_copy(data);
    path_ = folder_ + "/kernel.so";
    return;
  }
  // The descriptor is never closed. The dynamic linker knows libraries by the name that they were opened under, and would
  // return this one where its number was used again. The dot keeps the name apart from those that Python uses.
  path_ = "/proc/self/./fd/" + std::to_string(memory);
}

Mappable::~Mappable() {
  if (folder_.empty()) return;
  unlink(path_.c_str());
  rmdir(folder_.c_str());
}

}  // namespace cutlass_ops
