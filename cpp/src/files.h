// A bundle's files, in an archive or a folder, and memory files that libraries are loaded from. The rules are those of
// cutlass_ops/artifacts/container.py and loader.py, and of cutlass_ops/base/disk.py.

#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>

namespace cutlass_ops {

// Owns a file descriptor.
class Descriptor {
 public:
  explicit Descriptor(int number) : number_(number) {}
  Descriptor(Descriptor&& other) noexcept : number_(other.release()) {}
  Descriptor& operator=(Descriptor&&) = delete;
  ~Descriptor();
  int get() const { return number_; }
  int release();

 private:
  int number_;
};

// A bundle's files. They are opened once, so a later rename over the bundle changes nothing.
class Container {
 public:
  virtual ~Container() = default;
  // Bytes of each file, at most kMaxFile.
  std::map<std::string, int64_t> const& sizes() const { return sizes_; }
  // A file's contents, as many bytes as sizes() says. BundleError if the file is missing or changed.
  virtual std::string read(std::string const& name) const = 0;

 protected:
  std::map<std::string, int64_t> sizes_;
};

std::unique_ptr<Container> open_container(std::string const& path);

// The contents of a small file that no other user may write, such as a public key.
std::string read_file(std::string const& path, int64_t most);

// A path from which the dynamic linker loads exactly these bytes, valid as long as this object. No library in this process was
// opened under the same path: the dynamic linker identifies libraries by path, and would return the other one.
class Mappable {
 public:
  explicit Mappable(std::string_view data);
  std::string const& path() const { return path_; }

 private:
  // A file in a temporary folder, if memory files cannot be executed. The destructor removes both.
  class Folder {
   public:
    Folder() = default;
    ~Folder();
    Folder(Folder const&) = delete;
    Folder& operator=(Folder const&) = delete;
    std::string name, file;
  };

  Descriptor memory_;
  Folder folder_;
  std::string path_;
};

}  // namespace cutlass_ops
