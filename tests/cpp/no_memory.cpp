// memfd_create where a system forbids it.

#include <cerrno>

extern "C" int __wrap_memfd_create(char const*, unsigned) {
  errno = EPERM;
  return -1;
}
