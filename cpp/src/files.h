// A bundle's files, in an archive or a folder, and memory that the dynamic linker takes a library from. The same rules as
// in cutlass_ops/container.py, private.py and loader.py.

#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

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

class Container {
 public:
  virtual ~Container() = default;
  // Reads a whole file of at most so many bytes; BundleError if it is not there, or not as it must be.
  virtual std::string read(std::string const& name, int64_t most) const = 0;
};

std::unique_ptr<Container> open_container(std::string const& path);

// A path under which the dynamic linker finds exactly these bytes, for as long as this lives.
class Mappable {
 public:
  explicit Mappable(std::string const& data);
  ~Mappable();
  Mappable(Mappable const&) = delete;
  Mappable& operator=(Mappable const&) = delete;
  std::string const& path() const { return path_; }

 private:
  std::string path_;
  std::string folder_;  // where memory cannot be executed: a private folder that goes with this
};

}  // namespace cutlass_ops
