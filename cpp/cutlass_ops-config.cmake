# find_package(cutlass_ops): the target cutlass_ops::bundle, a small static library compiled into the project that uses it.
#
#     cmake -S . -B build -Dcutlass_ops_DIR="$(python -m cutlass_ops cmakedir)"
#
# tvm-ffi comes from its Python wheel: a Python that has it must be found, such as that of an active virtual environment.
# CUTLASS_OPS_SIGNATURES says whether signatures can be checked, which OpenSSL does: by default where it is found. A program
# that cannot check them refuses bundles for which it is given a key.
# cutlass_ops::cudart is the CUDA runtime for programs that call it: a toolkit's, or that of the PyPI wheels, which have no
# name that find_package(CUDAToolkit) looks for.

if(TARGET cutlass_ops::bundle)
  return()
endif()

include(CMakeFindDependencyMacro)
find_dependency(Threads)
find_dependency(Python COMPONENTS Interpreter)
execute_process(
  COMMAND "${Python_EXECUTABLE}" -m tvm_ffi.config --cmakedir
  OUTPUT_VARIABLE _cutlass_ops_tvm_ffi OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE _cutlass_ops_failed)
if(_cutlass_ops_failed)
  set(cutlass_ops_FOUND FALSE)
  set(cutlass_ops_NOT_FOUND_MESSAGE
    "${Python_EXECUTABLE} has no apache-tvm-ffi: activate an environment that has, or set Python_EXECUTABLE")
  return()
endif()
set(tvm_ffi_DIR "${_cutlass_ops_tvm_ffi}")
find_dependency(tvm_ffi CONFIG)

set(CUTLASS_OPS_SIGNATURES AUTO CACHE STRING "Check Ed25519 signatures of bundles, by OpenSSL: ON, OFF, or AUTO, where it is found")
set_property(CACHE CUTLASS_OPS_SIGNATURES PROPERTY STRINGS AUTO ON OFF)
if(NOT CUTLASS_OPS_SIGNATURES MATCHES "^(AUTO|ON|OFF)$")
  set(cutlass_ops_FOUND FALSE)
  set(cutlass_ops_NOT_FOUND_MESSAGE "CUTLASS_OPS_SIGNATURES is ${CUTLASS_OPS_SIGNATURES}: use AUTO, ON or OFF")
  return()
endif()
set(_cutlass_ops_signatures FALSE)
if(NOT CUTLASS_OPS_SIGNATURES STREQUAL "OFF")
  find_package(OpenSSL 1.1.1 QUIET COMPONENTS Crypto)
  set(_cutlass_ops_signatures "${OpenSSL_FOUND}")
endif()
if(CUTLASS_OPS_SIGNATURES STREQUAL "ON" AND NOT _cutlass_ops_signatures)
  set(cutlass_ops_FOUND FALSE)
  set(cutlass_ops_NOT_FOUND_MESSAGE
    "CUTLASS_OPS_SIGNATURES is ON, and there is no OpenSSL 1.1.1 or later with its headers (libssl-dev, openssl-devel)")
  return()
endif()

add_library(cutlass_ops_bundle STATIC
  "${CMAKE_CURRENT_LIST_DIR}/src/bundle.cpp"
  "${CMAKE_CURRENT_LIST_DIR}/src/elf.cpp"
  "${CMAKE_CURRENT_LIST_DIR}/src/files.cpp"
  "${CMAKE_CURRENT_LIST_DIR}/src/manifest.cpp"
  "${CMAKE_CURRENT_LIST_DIR}/src/sha256.cpp"
  "${CMAKE_CURRENT_LIST_DIR}/src/signing.cpp")
add_library(cutlass_ops::bundle ALIAS cutlass_ops_bundle)
target_compile_features(cutlass_ops_bundle PUBLIC cxx_std_17)
set_target_properties(cutlass_ops_bundle PROPERTIES POSITION_INDEPENDENT_CODE ON)
target_include_directories(cutlass_ops_bundle PUBLIC "${CMAKE_CURRENT_LIST_DIR}/include")
target_link_libraries(cutlass_ops_bundle PUBLIC tvm_ffi::shared Threads::Threads)
if(_cutlass_ops_signatures)
  target_compile_definitions(cutlass_ops_bundle PRIVATE CUTLASS_OPS_SIGNATURES=1)
  target_link_libraries(cutlass_ops_bundle PRIVATE OpenSSL::Crypto)
endif()

file(GLOB _cutlass_ops_wheels "${Python_SITELIB}/nvidia/cu*")
set(_cutlass_ops_cuda "$ENV{CUDA_HOME}" "$ENV{CUDA_PATH}" ${_cutlass_ops_wheels} /usr/local/cuda)
find_path(cutlass_ops_CUDA_INCLUDE cuda_runtime_api.h HINTS ${_cutlass_ops_cuda} PATH_SUFFIXES include)
# In the toolkit that has the header; the versions that a kernel may have been linked with, the newest first.
get_filename_component(_cutlass_ops_cuda "${cutlass_ops_CUDA_INCLUDE}/.." REALPATH)
find_library(cutlass_ops_CUDA_RUNTIME NAMES libcudart.so.13 libcudart.so.12 cudart
  HINTS "${_cutlass_ops_cuda}" PATH_SUFFIXES lib64 lib)
if(cutlass_ops_CUDA_INCLUDE AND cutlass_ops_CUDA_RUNTIME)
  add_library(cutlass_ops::cudart SHARED IMPORTED)
  set_target_properties(cutlass_ops::cudart PROPERTIES
    IMPORTED_LOCATION "${cutlass_ops_CUDA_RUNTIME}" INTERFACE_INCLUDE_DIRECTORIES "${cutlass_ops_CUDA_INCLUDE}")
endif()
