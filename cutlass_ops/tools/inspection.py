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

_REGISTER_UNIT = 8  # registers of a thread are allocated in multiples of this


@dataclass(frozen=True, repr=False)
class KernelReport:
    """Evidence about one compiled kernel.

    Attributes
    ----------
    slug, key, target : str
        The kernel's name, key and target.
    library_bytes : int
        Size of the shared library.
    sass : dict
        Count of instructions by opcode: Tensor Core, copies, and local memory (LDL, STL: spills or arrays).
    registers : int
        Registers for each thread at launch.
    stack, spill_stores, spill_loads : int
        Bytes for each thread.
    static_shared_memory : int
        Bytes for each thread block.
    dynamic_shared_memory, threads, stages : int or None
        Bytes and threads for each thread block, and pipeline stages, as the loaded kernel reports them. None if it
        cannot be loaded.
    blocks_per_sm : int or None
        Thread blocks that one multiprocessor holds at a time. None if the kernel cannot be loaded.
    device : str or None
        The GPU whose driver gave ``blocks_per_sm``. None if it was computed from registers and shared memory.
    """

    slug: str
    key: str
    target: str
    library_bytes: int
    sass: dict[str, int]
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    static_shared_memory: int
    dynamic_shared_memory: int | None
    threads: int | None
    stages: int | None
    blocks_per_sm: int | None
    device: str | None

    def __repr__(self) -> str:
        return f"<report of {self.slug}: {self.registers} registers>"

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return dataclasses.asdict(self)


def inspect(kernel: Artifact | str | os.PathLike[str]) -> KernelReport:
    """Report on a compiled kernel. No GPU is needed, but the driver of a matching one is asked for the occupancy.

    Parameters
    ----------
    kernel : Artifact or path
        An artifact, or the path of its folder or of a file in it.

    Raises
    ------
    LoadError
        If the path has no complete artifact.
    CompileError
        If the machine code cannot be read.
    """
    artifact = kernel if isinstance(kernel, Artifact) else _open(Path(kernel))
    resources = _main_function(artifact)
    described = _describe(artifact)
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


def _describe(artifact: Artifact) -> dict[str, int]:
    try:
        return load(artifact).describe()
    except LoadError:
        return {}


def _occupancy(
    artifact: Artifact, resources: dict[str, Any], described: dict[str, int]
) -> tuple[int | None, str | None]:
    target = arch.target(artifact.target)
    answer = _ask_driver(artifact, resources["function"], described, target)
    if answer is not None:
        return answer
    shared = resources["static_shared_memory"] + described["shared_memory"] + arch.KIB
    registers = -(-resources["registers"] // _REGISTER_UNIT) * _REGISTER_UNIT * described["threads"]
    limits = (
        target.shared_memory_per_sm // shared,
        arch.REGISTERS_PER_SM // registers,
        target.threads_per_sm // described["threads"],
        target.blocks_per_sm,
    )
    return min(limits), None


def _ask_driver(artifact: Artifact, function: str, described: dict[str, int], target: Target) -> tuple[int, str] | None:
    """Ask the driver of a device that runs this machine code, if there is one."""
    try:
        device = _find_device(target)
        if device is None:
            return None
        return _blocks_per_sm(device, artifact, function, described), _device_name(device)
    except (ImportError, RuntimeError):
        # No cuda-python, or no usable driver: the same as no device.
        return None


def _cuda(name: str, *args: Any) -> Any:
    """Call the driver and return its values without the status."""
    from cuda.bindings import driver

    status, *values = getattr(driver, name)(*args)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"{name}: {status}")
    return values[0] if len(values) == 1 else values


def _find_device(target: Target) -> Any:
    from cuda.bindings.driver import CUdevice_attribute as Attribute

    _cuda("cuInit", 0)
    for index in range(_cuda("cuDeviceGetCount")):
        device = _cuda("cuDeviceGet", index)
        major = _cuda("cuDeviceGetAttribute", Attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device)
        minor = _cuda("cuDeviceGetAttribute", Attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device)
        if (major, minor) == target.capability:
            return device
    return None


def _device_name(device: Any) -> str:
    return str(_cuda("cuDeviceGetName", 256, device).split(b"\0")[0].decode())


def _blocks_per_sm(device: Any, artifact: Artifact, function: str, described: dict[str, int]) -> int:
    from cuda.bindings.driver import CUfunction_attribute as Attribute

    context = _cuda("cuDevicePrimaryCtxRetain", device)
    _cuda("cuCtxPushCurrent", context)
    try:
        module = _cuda("cuModuleLoadData", next(elf.gpu_images(artifact.read_library())))
        try:
            kernel = _cuda("cuModuleGetFunction", module, function.encode())
            shared = described["shared_memory"]
            _cuda("cuFuncSetAttribute", kernel, Attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared)
            return int(_cuda("cuOccupancyMaxActiveBlocksPerMultiprocessor", kernel, described["threads"], shared))
        finally:
            _cuda("cuModuleUnload", module)
    finally:
        _cuda("cuCtxPopCurrent")
        _cuda("cuDevicePrimaryCtxRelease", device)
