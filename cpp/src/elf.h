// What a kernel's library has the dynamic linker do, before the dynamic linker does it.

#pragma once

#include <string>
#include <string_view>

namespace cutlass_ops {

// Why the library must not be mapped: it is no shared library for x86-64, or the dynamic linker would take code for it from
// where anybody may have put some (DT_RPATH, DT_RUNPATH and their like, or a library that no kernel needs). Empty if it may.
std::string linkage_problem(std::string_view library);

}  // namespace cutlass_ops
