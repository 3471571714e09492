"""What a launch asks of CUDA: a real kernel's library with a CUDA runtime that keeps count in place of the real one."""

import os
import subprocess

import pytest

import cutlass_ops as co
from cutlass_ops.compilation.builder import build_artifact
from cutlass_ops.compilation.toolchain import find_toolchain
from cutlass_ops.epilogue import builtin
from cutlass_ops.ship import catalog
from tests.compile.test_types import declared

pytestmark = [pytest.mark.compile, pytest.mark.slow]

ENTRIES = {entry.file: entry for entry in catalog.default()}

# Functions that the program exports are found before those of libcudart, which the library names as its own.
PROGRAM = r"""
#include <cuda.h>
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <tvm/ffi/c_api.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
#include <string>
#include <thread>

// ---- A driver and a runtime: a thread has a context once it has set the device ----

static thread_local bool has_context = false;
static bool refuses = false, sets = true;
static int launches = 0, encoded = 0, lookups = 0, cleared = 0;
static uintptr_t const a_data = 1 << 20;
static std::string boxes_of_a;  // their rows
static std::string launched;    // parameters of the last kernel, without what it is launched on
static cudaStream_t stream;     // of the last launch
static std::set<void const*> loaded;  // kernels
static bool loads = true;
static int prepared_for = 0;  // how often the runtime was asked for what a launch needs
static cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;

static CUresult encode(CUtensorMap* map, CUtensorMapDataType, cuuint32_t, void* data, cuuint64_t const*,
                       cuuint64_t const*, cuuint32_t const* box, cuuint32_t const*, CUtensorMapInterleave,
                       CUtensorMapSwizzle, CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill) {
  if (!has_context) return CUDA_ERROR_INVALID_CONTEXT;
  if (refuses || promotion != CU_TENSOR_MAP_L2_PROMOTION_L2_256B) return CUDA_ERROR_INVALID_VALUE;
  memset(static_cast<void*>(map), 0, sizeof(*map));
  memcpy(static_cast<void*>(map), &data, sizeof(data));
  if (data == reinterpret_cast<void*>(a_data)) boxes_of_a += " " + std::to_string(box[1]);
  return ++encoded, CUDA_SUCCESS;
}

extern "C" {
cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaSetDevice(int) { return has_context = sets, cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) { return *value = 132, cudaSuccess; }
cudaError_t cudaMemsetAsync(void*, int, size_t, cudaStream_t) { return ++cleared, cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void const*, int, size_t) {
  return *blocks = 1, cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(void const*, cudaFuncAttribute, int) { return ++prepared_for, cudaSuccess; }
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* other) {
  return std::swap(mode, *other), cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, void const* kernel) {
  if (!has_context) return cudaErrorDeviceUninitialized;
  if (mode != cudaStreamCaptureModeRelaxed) return cudaErrorStreamCaptureUnsupported;
  if (!loads) return cudaErrorMemoryAllocation;
  return loaded.insert(kernel), cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, void const*, cudaLaunchConfig_t const*) {
  return *clusters = 132, cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(char const* name, void** entry, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  if (strcmp(name, "cuTensorMapEncodeTiled") != 0) return cudaErrorNotSupported;
  ++lookups;
  *entry = reinterpret_cast<void*>(&encode);
  return *result = cudaDriverEntryPointSuccess, cudaSuccess;
}
cudaError_t cudaLaunchKernelExC(cudaLaunchConfig_t const* config, void const* kernel, void** arguments) {
  if (!has_context) return cudaErrorDeviceUninitialized;
  auto const add = [](auto const& value) { launched.append(reinterpret_cast<char const*>(&value), sizeof(value)); };
  launched.clear(), add(kernel), add(config->gridDim), add(config->blockDim), add(config->dynamicSmemBytes);
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    add(config->attrs[i].id), launched.append(config->attrs[i].val.pad, i == 0 ? sizeof(dim3) : sizeof(int));
  }
  // The mode and the extents come first; then, aligned, A's descriptor. Between them is padding.
  auto const* const params = static_cast<char const*>(arguments[0]);
  launched.append(params, 5 * sizeof(int)), launched.append(params + alignof(CUtensorMap), sizeof(CUtensorMap));
  stream = config->stream;
  return ++launches, cudaSuccess;
}
}

// ---- A call ----

static int64_t m = 64;
static bool needs_workspace = false;
static bool across = false;  // whether A, B and D are INT8, and B lies across K
static int64_t const n = 128, k = 256;
using Launch = int (*)(void*, TVMFFIAny const*, int32_t, TVMFFIAny*);
static Launch launch, prepare, load_kernels;

// Which stream is current, as PyTorch says it.
static void* current = nullptr;
static int current_stream(DLDeviceType type, int32_t device, void** result) {
  return *result = current, type == kDLCUDA && device == 0 ? 0 : -1;
}
static DLPackExchangeAPI const api = [] {
  DLPackExchangeAPI found{};
  found.current_work_stream = current_stream;
  return found;
}();

struct Tensor {
  int64_t shape[2], strides[2];
  DLTensor tensor{};
  Tensor(uintptr_t data, int dimensions, int64_t rows, int64_t columns, int64_t row, int64_t column)
      : shape{rows, columns}, strides{row, column} {
    tensor.data = reinterpret_cast<void*>(data);
    tensor.device = {kDLCUDA, 0};
    tensor.ndim = dimensions;
    tensor.dtype = {kDLBfloat, 16, 1};
    tensor.shape = shape;
    tensor.strides = strides;
  }
};

// Calls a function with tensors of these extents, and with the address of the streams if it prepares.
static int call(Launch function, TVMFFIAny& result) {
  Tensor a(a_data, 2, m, k, k, 1), b(2 << 20, 2, k, n, across ? n : 1, across ? 1 : k);
  Tensor d(3 << 20, 2, m, n, n, 1), bias(4 << 20, 1, n, 1, 1, 1);
  if (across) a.tensor.dtype = b.tensor.dtype = d.tensor.dtype = {kDLInt, 8, 1};
  TVMFFIAny arguments[8]{};
  Tensor* const tensors[] = {&a, &b, &d, &bias};
  for (int i = 0; i < 4; ++i) {
    arguments[i].type_index = kTVMFFIDLTensorPtr;
    arguments[i].v_ptr = &tensors[i]->tensor;
  }
  for (int i = 4; i < 6; ++i) {
    arguments[i].type_index = kTVMFFIInt;
    arguments[i].v_int64 = i - 4;  // raster, swizzle
  }
  arguments[6].type_index = kTVMFFINone;
  Tensor scratch(5 << 20, 1, 1 << 22, 1, 1, 1);  // of two bytes each
  if (needs_workspace) arguments[6].type_index = kTVMFFIDLTensorPtr, arguments[6].v_ptr = &scratch.tensor;
  arguments[7].type_index = kTVMFFIInt;
  arguments[7].v_int64 = reinterpret_cast<intptr_t>(&api);
  return function(nullptr, arguments, function == prepare ? 8 : 7, &result);
}

static int call() {
  TVMFFIAny result{};
  return call(launch, result) != 0 || result.v_int64 != 0;
}

static int repeat(TVMFFIAny const& function) {
  TVMFFIAny result{};
  return TVMFFIFunctionCall(function.v_obj, nullptr, 0, &result);
}

// What the last launch that failed said.
static std::string error() {
  TVMFFIObjectHandle raised = nullptr;
  TVMFFIErrorMoveFromRaised(&raised);
  TVMFFIByteArray const message = TVMFFIErrorGetCellPtr(raised)->message;
  std::string const text(message.data, message.size);
  TVMFFIObjectDecRef(raised);
  return text;
}

#define REQUIRE(...) \
  if (!(__VA_ARGS__)) return std::printf("line %d: %s\n", __LINE__, #__VA_ARGS__), 1

// Has the driver load the kernels, in another thread than that of the launches; or says something else than a device.
static int load(int32_t type, int64_t device) {
  TVMFFIAny argument{}, result{};
  argument.type_index = type;
  argument.v_int64 = device;
  result.type_index = kTVMFFIInt;
  int failed = -1;
  std::thread([&] {
    failed = load_kernels(nullptr, &argument, 1, &result);
    if (failed != 0) (void)error();
  }).join();
  return failed != 0 || mode != cudaStreamCaptureModeGlobal || result.type_index != kTVMFFINone;
}

// A kernel that needs a workspace: its prepared launch is so many kernels, or none if it gives its recording up.
static int with_workspace(int kernels) {
  needs_workspace = true;
  TVMFFIAny prepared{};
  REQUIRE(call(prepare, prepared) == 0 && launches == 0 && cleared == 0);
  REQUIRE(prepared.type_index == (kernels == 0 ? kTVMFFINone : kTVMFFIFunction));
  REQUIRE(call() == 0);
  int const ordinary = launches;
  REQUIRE(kernels == 0 ? cleared > 0 : ordinary == kernels && cleared == 0);
  if (kernels == 0) return std::puts("ok"), 0;
  std::string const last = launched;
  launched.clear();
  REQUIRE(repeat(prepared) == 0 && launches == 2 * kernels && launched == last);
  TVMFFIObjectDecRef(prepared.v_obj);
  needs_workspace = false;  // said when it is prepared, as when it is launched
  TVMFFIAny refused{};
  REQUIRE(call(prepare, refused) == 0 && refused.type_index == kTVMFFIInt && refused.v_int64 == 16 * 6 + 8);
  return std::puts("ok"), 0;
}

int main(int count, char** argv) {
  void* const library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return std::puts(dlerror()), 1;
  launch = reinterpret_cast<Launch>(dlsym(library, "__tvm_ffi_launch"));
  prepare = reinterpret_cast<Launch>(dlsym(library, "__tvm_ffi_prepare"));
  load_kernels = reinterpret_cast<Launch>(dlsym(library, "__tvm_ffi_load"));

  // All of its kernels, and nothing is left to be asked at the first launch.
  loads = false;
  REQUIRE(load(kTVMFFIInt, 0) != 0);
  loads = true;
  REQUIRE(load(kTVMFFIInt, 64) != 0 && load(kTVMFFIInt, -1) != 0 && load(kTVMFFINone, 0) != 0 && prepared_for == 0);
  REQUIRE(load(kTVMFFIInt, 0) == 0 && int(loaded.size()) == std::atoi(argv[2]) && launches == 0);
  int const before = prepared_for;
  across = count > 4;
  if (count > 3) return with_workspace(std::atoi(argv[3])) || prepared_for != before;

  REQUIRE(call() == 0 && launches == 1 && encoded == 4);  // A, its last rows, B and D
  REQUIRE(before == 1 && prepared_for == before);
  REQUIRE(boxes_of_a == " 128 64");
  has_context = false;                                    // as if that had been done behind its back: not launched
  REQUIRE(call() != 0 && launches == 1 && error().find("cudaErrorDeviceUninitialized") != std::string::npos);
  has_context = true;
  REQUIRE(call() == 0 && launches == 2);
  refuses = true;
  REQUIRE(call() != 0 && launches == 2 && error().find("cudaErrorInvalidValue") != std::string::npos);
  refuses = false;
  REQUIRE(call() == 0 && launches == 3);
  boxes_of_a.clear(), encoded = 0, m = 256;
  REQUIRE(call() == 0 && launches == 4 && encoded == 3 && boxes_of_a == " 128");  // whole tiles
  boxes_of_a.clear(), encoded = 0, m = 1100;
  REQUIRE(call() == 0 && launches == 5 && encoded == 4 && boxes_of_a == " 128 76");

  // A prepared launch is the same one, on the stream that is current when it is called, and encodes nothing.
  std::string const ordinary = launched;
  TVMFFIAny prepared{}, refused{};
  REQUIRE(call(prepare, prepared) == 0 && prepared.type_index == kTVMFFIFunction && launches == 5 && encoded == 8);
  for (int i = 1; i <= 2; ++i) {
    launched.clear(), current = &launches + i;
    REQUIRE(repeat(prepared) == 0 && launches == 5 + i && encoded == 8 && launched == ordinary && stream == current);
  }
  int repeated = -1;
  std::thread([&] { repeated = repeat(prepared); }).join();
  REQUIRE(repeated == 0 && launches == 8);
  has_context = false;
  REQUIRE(repeat(prepared) != 0 && error().find("gemm_bias_relu") == 0 && launches == 8);
  has_context = true;
  TVMFFIObjectDecRef(prepared.v_obj);
  m = 0;
  REQUIRE(call(prepare, refused) == 0 && refused.type_index == kTVMFFIInt && refused.v_int64 == 2);  // a's shape
  m = 1100, launches = 5;

  // The first that another thread does with CUDA.
  int failed = -1;
  std::thread([&] { failed = call(); }).join();
  REQUIRE(failed == 0 && launches == 6);
  sets = false;  // where there is no context to be had
  std::thread([&] { failed = call(); }).join();
  REQUIRE(failed != 0 && launches == 6);
  REQUIRE(lookups == 1);
  std::puts("ok");
}
"""


def run(tmp_path, spec, *arguments):
    """Run the program with a kernel's library."""
    toolchain, artifact = find_toolchain(), build_artifact(spec)
    source, program = tmp_path / "launch.cpp", tmp_path / "launch"
    source.write_text(PROGRAM)
    include = [f"-I{toolchain.tvm_ffi_dir / 'include'}", *(f"-isystem{p}" for p in toolchain.include_dirs)]
    link = ["-rdynamic", "-pthread", "-ldl", f"-L{toolchain.tvm_ffi_dir / 'lib'}", "-ltvm_ffi"]
    command = [toolchain.host_compiler, "-std=c++17", *include, source, "-o", program, *link]
    subprocess.run([str(part) for part in command], check=True)
    folders = [toolchain.tvm_ffi_dir / "lib", *([toolchain.cudart.parent] if toolchain.cudart else [])]
    env = os.environ | {"LD_LIBRARY_PATH": ":".join(map(str, folders))}
    command = [str(program), str(artifact.library), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", "")


def test_every_thread_has_a_context_and_what_cannot_be_encoded_is_not_launched(tmp_path):
    run(tmp_path, ENTRIES["sm_90a/gemm_bias_relu_bf16.cu"].spec, 2)  # it, and what finds where clusters are


def spec(a, b, config):
    types = {"a": a, "b": b, "d": "bf16.row", "inputs": {"bias": "bf16"}}
    return co.KernelSpec(**types, epilogue=builtin.bias_relu.graph, config=config)


PREPARED = {
    "copies of operands": (
        spec(
            "bf16.row.align1",
            "bf16.col.align1",
            co.Sm90Config(co.ThreadblockShape(64, 64, 64), schedule="warp_specialized", realign=True),
        ),
        (3, 2),
    ),
    # A kernel whose instructions test_types.py looks at.
    "copies along K": (declared("int8 to int8 by wgmma, copied"), (3, 2, "across")),
    # A kernel that examples/deploy compiles as well.
    "stream-K": (
        spec(
            "bf16.row",
            "bf16.col",
            co.Sm80Config(co.ThreadblockShape(32, 128, 64), co.WarpShape(32, 32, 64), stages=3, stream_k=True),
        ),
        (1, 0),
    ),
}


@pytest.mark.parametrize(("spec", "arguments"), PREPARED.values(), ids=PREPARED)
def test_a_prepared_launch_repeats_every_kernel_or_is_given_up(tmp_path, spec, arguments):
    """Of a kernel that needs a workspace: how many kernels its library has, and one launch of it."""
    run(tmp_path, spec, *arguments)
