import subprocess

import pytest
from fake_toolkit import HMMA, FakeToolkit, library, sm80_spec

from cutlass_ops.artifacts.store import KernelStore
from cutlass_ops.base import arch, elf
from cutlass_ops.base.errors import CompileError
from cutlass_ops.compilation import abi_check
from cutlass_ops.compilation.abi_check import prove_halves_agree
from cutlass_ops.compilation.builder import build_artifact
from cutlass_ops.compilation.toolchain import find_toolchain


@pytest.mark.parametrize("size", [8, 528, 4096, 4097, 4864, 16384, 32764])
def test_halves_that_agree(write, size):
    prove_halves_agree(write(library(HMMA, host=size, device=size)))


# What nvcc 13.0 wrote for sm_90a of parameters that have 512 bytes, and 6144.
@pytest.mark.parametrize(
    ("attributes", "size"),
    [
        ("04170c00000000000000000000f00108 03500000031bff00", 512),
        ("04450c00000000000000000000180000 03500000031bff00", 6144),
    ],
)
def test_both_ways_in_which_nvcc_writes_a_size_are_read(attributes, size):
    assert list(abi_check._parameter_bytes(bytes.fromhex(attributes))) == [size]


@pytest.mark.compile
@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("size", [528, 4096, 4100, 20000, 32764])
def test_sizes_are_those_that_this_nvcc_writes(tmp_path, target, size):
    source, image = tmp_path / "kernel.cu", tmp_path / "kernel.cubin"
    source.write_text(
        f"struct P {{ int words[{size // 4}]; }};\n"
        'extern "C" __global__ void kernel(__grid_constant__ P const p) { *(int*)8 = p.words[threadIdx.x]; }\n'
    )
    found = find_toolchain()
    command = [found.nvcc, f"-ccbin={found.host_compiler}", f"-gencode={arch.target(target).gencode}", "-cubin"]
    subprocess.run([str(part) for part in (*command, "-o", image, source)], check=True)
    (data,) = (s.data for s in elf.sections(image.read_bytes()) if s.name == ".nv.info.kernel")
    assert list(abi_check._parameter_bytes(data)) == [size]


@pytest.mark.parametrize(
    "data",
    [
        library(HMMA, host=520),
        library(HMMA, device=520),
        library(HMMA, host=4864, device=4856),
        library(HMMA, host=4864, device=4864 + (1 << 14)),
        library(HMMA, host=4096, device=4104),
        library(HMMA).replace(b".cutlass_ops.kernel", b".cutlass_ops.hernel"),
        library(HMMA).replace(b".nv.info.kernel", b".nv.info.hernel"),
        library(HMMA).replace(b".cutlass_ops.kernel", b".something.kernel"),
        library(HMMA).replace(b".nv.info.", b".nv.inof.").replace(b".cutlass_ops.", b".cutlass_spo."),
    ],
)
def test_halves_that_do_not(write, data):
    with pytest.raises(CompileError, match=r"host code and device code in .* disagree"):
        prove_halves_agree(write(data))


def test_a_truncated_library(write):
    whole = library(HMMA)
    for size in range(64, len(whole) - 4, 7):
        with pytest.raises(CompileError):
            prove_halves_agree(write(whole[:size]))


def test_no_kernel_is_published_whose_halves_disagree(tmp_path):
    toolkit = FakeToolkit(tmp_path / "toolkit")
    toolkit.makes(library(HMMA, host=520))
    store = KernelStore(tmp_path / "store")
    with pytest.raises(CompileError, match=r"on the host: \{'kernel': 520\}; on the device: \{'kernel': 528\}"):
        build_artifact(sm80_spec(), source="source", store=store, toolchain=toolkit.find())
    assert not list(store.entries())
