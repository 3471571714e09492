// A bundle's files, in an archive or a folder, and memory that the dynamic linker takes a library from. The same rules as
// in cutlass_ops/artifacts/container.py, private.py and loader.py.

#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>

namespace cutlass_ops {

// A file descriptor that is closed.
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

// A bundle's files, opened once: what is renamed over it later changes nothing.
class Container {
 public:
  virtual ~Container() = default;
  // Bytes of each file, at most kMaxFile.
  std::map<std::string, int64_t> const& sizes() const { return sizes_; }
  // As many bytes as sizes() says; BundleError if the file is not there, or not as it was.
  virtual std::string read(std::string const& name) const = 0;

 protected:
  std::map<std::string, int64_t> sizes_;
};

std::unique_ptr<Container> open_container(std::string const& path);

// All of a small file that nobody else may write, such as a public key.
std::string read_file(std::string const& path, int64_t most);

// A path under which the dynamic linker finds exactly these bytes, for as long as this lives. It is one that no library in
// this process was opened under: the dynamic linker knows them by their names, and would return another.
class Mappable {
 public:
  explicit Mappable(std::string_view data);
  std::string const& path() const { return path_; }

 private:
  // Where memory cannot be executed: a folder with a file that go with this.
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
