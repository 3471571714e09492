"""What a launch refuses (``binding.h``), argument by argument, without a kernel and without a GPU."""

import subprocess

import pytest

from cutlass_ops.artifacts.loader import Reason, refusal
from tests.compile import host

pytestmark = pytest.mark.compile

# Prints the status of a call whose arguments are all in order but for one: argv says which, and what is wrong with it.
PROGRAM = r"""
#include "cutlass_ops/binding.h"

#include <cstdlib>
#include <cstring>

#include "cutlass/numeric_types.h"

CUTLASS_OPS_TYPE(float, kDLFloat)
CUTLASS_OPS_TYPE(cutlass::half_t, kDLFloat)

using cutlass_ops::Call;
using cutlass_ops::Major;

struct Tensor {
  int64_t shape[2], strides[2];
  DLTensor tensor{};
  Tensor(uintptr_t data, int dimensions, int bits, int64_t rows, int64_t columns)
      : shape{rows, columns}, strides{dimensions == 1 ? 1 : columns, 1} {
    tensor.data = reinterpret_cast<void*>(data);
    tensor.device = {kDLCUDA, 0};
    tensor.ndim = dimensions;
    tensor.dtype = {uint8_t(bits == 8 ? kDLUInt : kDLFloat), uint8_t(bits), 1};
    tensor.shape = shape;
    tensor.strides = strides;
  }
};

int main(int, char** argv) {
  int const changed = std::atoi(argv[1]);
  Tensor a(1 << 20, 2, 16, 16, 32), b(2 << 20, 2, 16, 32, 8), d(3 << 20, 2, 16, 16, 8), row(4 << 20, 1, 16, 8, 1),
      column(5 << 20, 1, 16, 16, 1), tile(6 << 20, 2, 16, 16, 8), scalar(7 << 20, 0, 32, 1, 1),
      also(8 << 20, 2, 16, 16, 8), sums(9 << 20, 1, 32, 16, 1), workspace(10 << 20, 1, 8, 512, 1),
      blocks(11 << 20, 2, 32, 16, 3), scales(12 << 20, 2, 32, 16, 2);
  Tensor* const tensors[] = {&a, &b, &d, &row, &column, &tile, &scalar, &blocks, &scales, &also, &sums, &workspace};
  constexpr int kCount = 12;
  TVMFFIAny arguments[kCount]{};
  for (int i = 0; i < kCount; ++i) {
    arguments[i].type_index = kTVMFFIDLTensorPtr;
    arguments[i].v_ptr = &tensors[i]->tensor;
  }
  if (changed >= 0) {
    DLTensor& t = tensors[changed]->tensor;
    if (std::strcmp(argv[2], "null") == 0) t.data = nullptr;
    if (std::strcmp(argv[2], "null with an offset") == 0) t.data = nullptr, t.byte_offset = 4096;
    if (std::strcmp(argv[2], "dtype") == 0) t.dtype.code = kDLInt;
    if (std::strcmp(argv[2], "a larger stride") == 0) t.strides[0] = 1000;
    if (std::strcmp(argv[2], "a stride of 0") == 0) t.strides[0] = t.strides[1] = 0;
    if (std::strcmp(argv[2], "a stride of 1") == 0) t.strides[0] = t.strides[1] = 1;
    if (std::strcmp(argv[2], "the other major") == 0) t.strides[0] = 1, t.strides[1] = t.shape[0];
    if (std::strcmp(argv[2], "another row") == 0) ++t.shape[0];
    if (std::strcmp(argv[2], "another column") == 0) ++t.shape[1];
    if (std::strcmp(argv[2], "an odd address") == 0) t.byte_offset = 2;
    if (std::strcmp(argv[2], "no elements") == 0) t.data = nullptr, t.shape[0] = 0;
  }
  using Half = cutlass::half_t;
  Call call(arguments, kCount);
  auto const ma = call.input<Half, Major::kRow, 8, false>();
  auto const mb = call.input<Half, Major::kRow, 8, false>();
  auto const md = call.result<Half, Major::kRow, 8, true>();
  auto const problem = call.problem(ma, mb, md);
  call.row<Half>(problem);
  call.col<Half>(problem);
  call.tile<Half, Major::kRow, 8, false>(problem);
  call.scalar<float>();
  call.blocks<float>(problem.m, 1, problem.k, 12);
  call.blocks_output<float>(problem.m, 1, problem.n, 5);
  call.tile_output<Half, Major::kRow, 8, true>(problem);
  call.col_output<float>(problem);
  call.workspace(512);
  std::printf("%d", call.status());
}
"""

BLOCKS, SCALES, WORKSPACE = 7, 8, 11


@pytest.fixture(scope="module")
def status(tmp_path_factory):
    """Run the program, and return what it says of a changed argument."""
    path = host.program(tmp_path_factory.mktemp("binding"), PROGRAM, *host.UNLINKED)

    def run(position, change):
        done = subprocess.run([str(path), str(position), change], capture_output=True, text=True, check=True)
        return int(done.stdout)

    return run


def test_arguments_in_order_are_accepted(status):
    assert status(-1, "") == 0


@pytest.mark.parametrize("change", ["null", "null with an offset"])
@pytest.mark.parametrize("position", range(WORKSPACE + 1))
def test_a_tensor_without_memory_is_refused(status, position, change):
    assert refusal(status(position, change)) == (position, Reason.NULL)


@pytest.mark.parametrize("position", range(WORKSPACE))
def test_other_reasons_come_first(status, position):
    assert refusal(status(position, "dtype")) == (position, Reason.DTYPE)


@pytest.mark.parametrize(("position", "reason"), [(0, Reason.SHAPE), (3, Reason.SHAPE), (WORKSPACE, Reason.WORKSPACE)])
def test_no_elements_need_no_memory(status, position, reason):
    """They are refused for what they are."""
    assert refusal(status(position, "no elements")) == (position, reason)


@pytest.mark.parametrize("change", ["a larger stride", "a stride of 0", "the other major"])
def test_scales_of_blocks_have_any_strides(status, change):
    assert status(BLOCKS, change) == 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [("another row", Reason.SHAPE), ("another column", Reason.SHAPE), ("an odd address", Reason.ALIGNMENT)],
)
def test_scales_of_blocks_fit_the_problem(status, change, reason):
    assert refusal(status(BLOCKS, change)) == (BLOCKS, reason)


@pytest.mark.parametrize("change", ["a larger stride", "the other major"])
def test_scales_of_d_have_any_strides(status, change):
    assert status(SCALES, change) == 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("another row", Reason.SHAPE),
        ("another column", Reason.SHAPE),
        ("an odd address", Reason.ALIGNMENT),
        ("a stride of 0", Reason.MAJOR),
        ("a stride of 1", Reason.MAJOR),
    ],
)
def test_scales_of_d_fit_the_problem_and_share_no_memory(status, change, reason):
    assert refusal(status(SCALES, change)) == (SCALES, reason)
