// SHA-256 (FIPS 180-4) as hexadecimal digits. The data is not secret, so plain code is safe, and programs need no library
// besides tvm-ffi. tests/cpp compares it with Python's.

#pragma once

#include <string>
#include <string_view>

namespace cutlass_ops {

std::string sha256(std::string_view data);

}  // namespace cutlass_ops
