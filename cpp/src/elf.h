// Checks which libraries a kernel's library makes the dynamic linker load, before it is loaded.

#pragma once

#include <string>
#include <string_view>

namespace cutlass_ops {

// Returns why the library must not be mapped, or an empty string. It must be a shared library for x86-64. It must not make
// the dynamic linker load unchecked code (DT_RPATH, DT_RUNPATH and the like, or a library that kernels must not load).
std::string linkage_problem(std::string_view library);

}  // namespace cutlass_ops
