"""Reports on compiled kernels: instructions, registers, shared memory, spills and occupancy."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cutlass_ops.artifacts.entry import Artifact, open_entry
from cutlass_ops.artifacts.loader import load
from cutlass_ops.base import arch, elf
from cutlass_ops.base.arch import Target
from cutlass_ops.base.errors import LoadError
from cutlass_ops.base.sass import opcodes
from cutlass_ops.base.units import counted

_REGISTER_UNIT = 8  # registers of a thread are allocated in multiples of this


@dataclass(frozen=True, repr=False)
class KernelReport:
    """Evidence about one compiled kernel."""

    slug: str
    key: str
    target: str
    library_bytes: int
    # count of instructions by opcode: Tensor Core, copies, and local memory (LDL, STL: spills or arrays)
    sass: dict[str, int]
    registers: int  # for each thread, at launch
    stack: int  # bytes for each thread; so are the spills
    spill_stores: int
    spill_loads: int
    static_shared_memory: int  # bytes for each thread block
    # bytes for each thread block; this and the next three are None if the kernel cannot be loaded
    dynamic_shared_memory: int | None
    threads: int | None  # for each thread block
    stages: int | None  # of the pipeline
    blocks_per_sm: int | None  # thread blocks that one multiprocessor holds at a time
    # the GPU whose driver gave ``blocks_per_sm``; None if it was computed from registers and shared memory
    device: str | None

    def __repr__(self) -> str:
        return f"<report of {self.slug}: {self.registers} registers>"

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return dataclasses.asdict(self)

    def lines(self, where: str) -> list[str]:
        """Return the report as text. ``where`` says where the kernel is."""
        block = {
            ("stage", "stages"): self.stages,
            ("thread", "threads"): self.threads,
            ("byte of dynamic shared memory", "bytes of dynamic shared memory"): self.dynamic_shared_memory,
            ("block an SM", "blocks an SM"): self.blocks_per_sm,
        }
        known = ", ".join(counted(number, *names) for names, number in block.items() if number is not None)
        return [
            self.slug,
            f"  {where}",
            f"  library   {self.library_bytes:,} bytes for {self.target}",
            f"  SASS      {', '.join(f'{count} {opcode}' for opcode, count in self.sass.items())}",
            f"  thread    {self.registers} registers, {self.stack} bytes of stack, "
            f"spills: {self.spill_stores} bytes stored, {self.spill_loads} loaded",
            f"  block     {known or 'unknown: the kernel cannot be loaded here'}",
        ]


def inspect(kernel: Artifact | str | os.PathLike[str]) -> KernelReport:
    """Report on a compiled kernel, given as an artifact, its folder or a file in it."""
    artifact = kernel if isinstance(kernel, Artifact) else _open(Path(kernel))
    resources = _main_function(artifact)
    try:
        described = load(artifact).describe()
    except LoadError:
        described = {}
    blocks, device = _occupancy(artifact, resources, described) if described else (None, None)
    return KernelReport(
        slug=artifact.spec.slug,
        key=artifact.key,
        target=artifact.target,
        library_bytes=artifact.size,
        sass=opcodes(artifact.read_library(), artifact.where),
        registers=resources["registers"],
        stack=resources["stack"],
        spill_stores=resources["spill_stores"],
        spill_loads=resources["spill_loads"],
        static_shared_memory=resources["static_shared_memory"],
        dynamic_shared_memory=described.get("shared_memory"),
        threads=described.get("threads"),
        stages=described.get("stages"),
        blocks_per_sm=blocks,
        device=device,
    )


def _open(path: Path) -> Artifact:
    path = path.absolute()
    return open_entry(path if path.is_dir() else path.parent)


def _main_function(artifact: Artifact) -> dict[str, Any]:
    """Return ptxas's numbers for the GEMM itself, the function with most registers."""
    functions = artifact.manifest["resources"]
    if not functions:
        raise LoadError(f"the manifest of {artifact.where} has no resources: build the kernel again")
    return dict(max(functions, key=lambda f: f["registers"]))


def _occupancy(
    artifact: Artifact, resources: dict[str, Any], described: dict[str, int]
) -> tuple[int | None, str | None]:
    """Return the thread blocks that a multiprocessor holds, and the GPU whose driver says so, if there is one."""
    target = arch.target(artifact.target)
    try:
        answer = _ask_driver(artifact, resources["function"], described, target)
    except (ImportError, RuntimeError):  # no cuda-python, or no usable driver
        answer = None
    if answer is not None:
        return answer
    shared = int(resources["static_shared_memory"]) + described["shared_memory"] + arch.KIB
    registers = -(-int(resources["registers"]) // _REGISTER_UNIT) * _REGISTER_UNIT * described["threads"]
    limits = (
        target.shared_memory_per_sm // shared,
        arch.REGISTERS_PER_SM // registers,
        target.threads_per_sm // described["threads"],
        target.blocks_per_sm,
    )
    return min(limits), None


def _ask_driver(artifact: Artifact, function: str, described: dict[str, int], target: Target) -> tuple[int, str] | None:
    """Ask the driver of a device that runs this machine code; None without one."""
    from cuda.bindings.driver import CUdevice_attribute, CUfunction_attribute

    _cuda("cuInit", 0)
    for device in [_cuda("cuDeviceGet", at) for at in range(_cuda("cuDeviceGetCount"))]:
        major = _cuda("cuDeviceGetAttribute", CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device)
        minor = _cuda("cuDeviceGetAttribute", CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device)
        if (major, minor) == target.capability:
            break
    else:
        return None
    _cuda("cuCtxPushCurrent", _cuda("cuDevicePrimaryCtxRetain", device))
    try:
        module = _cuda("cuModuleLoadData", next(elf.gpu_images(artifact.read_library())))
        try:
            kernel = _cuda("cuModuleGetFunction", module, function.encode())
            most, shared = (
                CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                described["shared_memory"],
            )
            _cuda("cuFuncSetAttribute", kernel, most, shared)
            blocks = _cuda("cuOccupancyMaxActiveBlocksPerMultiprocessor", kernel, described["threads"], shared)
            return int(blocks), str(_cuda("cuDeviceGetName", 256, device).split(b"\0")[0].decode())
        finally:
            _cuda("cuModuleUnload", module)
    finally:
        _cuda("cuCtxPopCurrent")
        _cuda("cuDevicePrimaryCtxRelease", device)


def _cuda(name: str, *args: Any) -> Any:
    """Call the driver and return its values without the status."""
    from cuda.bindings import driver

    status, *values = getattr(driver, name)(*args)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"{name}: {status}")
    return values[0] if len(values) == 1 else values
