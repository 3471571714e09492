// SHA-256 (FIPS 180-4) as hexadecimal digits. It guards no secret, so plain code will do; a library for it would be all that
// a program needs besides tvm-ffi. tests/cpp compares it with Python's.

#pragma once

#include <string>
#include <string_view>

namespace cutlass_ops {

std::string sha256(std::string_view data);

}  // namespace cutlass_ops
