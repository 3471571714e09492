"""What this installation can do, and why: compiler, GPUs, store, bundles, and every environment variable."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from cutlass_ops import _env, _resources, arch
from cutlass_ops.bundles import BUNDLES
from cutlass_ops.errors import BundleError, StoreError, ToolchainError
from cutlass_ops.store import KernelStore
from cutlass_ops.toolchain import Toolchain, find_toolchain

ORDER = "CUTLASS_OPS_NVCC, then bin/nvcc in CUDA_HOME and in CUDA_PATH, then PATH, then the PyPI wheels"


@dataclass(frozen=True)
class Gpu:
    """One CUDA device that PyTorch sees; ``target`` is None if no kernel of this library runs on it."""

    name: str
    capability: tuple[int, int]
    target: str | None


@dataclass(frozen=True)
class Store:
    """The kernel store: how many kernels it holds, and their size in bytes."""

    path: str
    kernels: int
    bytes: int


@dataclass(frozen=True)
class Bundled:
    """One bundle that calls are served from: how many kernels it holds, and for which targets."""

    path: str
    kernels: int
    targets: tuple[str, ...]


@dataclass(frozen=True)
class Diagnosis:
    """What was found.

    Attributes
    ----------
    versions : dict
        Of this library, Python and PyTorch.
    toolchain : Toolchain or None
        What would compile a kernel.
    gpus : tuple of Gpu
        The devices that PyTorch sees.
    store : Store or None
        Where compiled kernels are kept.
    bundles : tuple of Bundled
        Loaded, named by the environment or installed, the first to look in first.
    can_compile, can_run : bool
        Whether a kernel can be compiled, and whether one can be had and run.
    problems : tuple of str
        What stands in the way, each with what to do.
    environment : dict
        Every variable that this library reads: its value, or None.
    """

    versions: dict[str, str]
    toolchain: Toolchain | None
    gpus: tuple[Gpu, ...]
    store: Store | None
    bundles: tuple[Bundled, ...]
    can_compile: bool
    can_run: bool
    problems: tuple[str, ...]
    environment: dict[str, str | None]

    @property
    def healthy(self) -> bool:
        """Whether this installation is of any use: it can compile a kernel or run one."""
        return self.can_compile or self.can_run

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        data = dataclasses.asdict(self)
        if self.toolchain is not None:
            data["toolchain"] = {name: _plain(value) for name, value in data["toolchain"].items()}
        return data

    def lines(self) -> Iterator[str]:
        """Yield the diagnosis for a person."""
        yield ", ".join(f"{name} {version}" for name, version in self.versions.items())
        yield from _section("Compiler", self._compiler())
        yield from _section("GPU", [_gpu_line(gpu) for gpu in self.gpus] or ["none that PyTorch sees"])
        store = [f"{self.store.path}: {self.store.kernels} kernels, {self.store.bytes:,} bytes"] if self.store else []
        yield from _section("Store", store or ["unusable"])
        bundles = [f"{b.path}: {b.kernels} kernels for {', '.join(b.targets)}" for b in self.bundles]
        yield from _section("Bundles", bundles or ["none"])
        yield from _section("Environment", [_variable_line(v, self.environment[v.name]) for v in _env.VARIABLES])
        if self.problems:
            yield from _section("Problems", list(self.problems))
        able = {True: "yes", False: "no"}
        yield ""
        yield f"Can compile a kernel: {able[self.can_compile]}. Can run one: {able[self.can_run]}."

    def _compiler(self) -> list[str]:
        order = f"nvcc is looked for in {ORDER}"
        found = self.toolchain
        if found is None:
            return ["none", order]
        return [
            f"nvcc           {found.nvcc_version}, {found.nvcc} (from {found.source})",
            f"CUTLASS        {found.cutlass_version}, {found.cutlass_dir}",
            f"host compiler  {found.host_version}, {found.host_compiler}",
            f"tvm-ffi        {found.tvm_ffi_version}, {found.tvm_ffi_dir}",
            f"cuobjdump      {found.cuobjdump or 'none: not needed, the machine code is read without it'}",
            order,
        ]


def diagnose() -> Diagnosis:
    """Look at everything that compiling and running a kernel depends on; nothing is changed."""
    problems: list[str] = []
    toolchain = _toolchain(problems)
    store = _store(problems)
    gpus = _gpus()
    bundles = _bundles(problems)
    jit = _jit(problems)
    can_compile = toolchain is not None and store is not None and jit
    usable = any(gpu.target is not None for gpu in gpus)
    return Diagnosis(
        versions={
            "cutlass_ops": _resources.library_version(),
            "Python": platform.python_version(),
            "PyTorch": str(torch.__version__),
        },
        toolchain=toolchain,
        gpus=gpus,
        store=store,
        bundles=bundles,
        can_compile=can_compile,
        can_run=usable and (can_compile or bool(bundles) or (store is not None and store.kernels > 0)),
        problems=tuple(problems),
        environment={variable.name: variable.text for variable in _env.VARIABLES},
    )


def _toolchain(problems: list[str]) -> Toolchain | None:
    try:
        return find_toolchain()
    except (ToolchainError, ValueError) as exc:
        problems.append(str(exc))
        return None


def _store(problems: list[str]) -> Store | None:
    try:
        store = KernelStore.default()
        # Looking anything up refuses a store that others may write.
        store.lookup("0" * 64)
        artifacts, size = list(store.entries()), store.size()
        _env.cache_size()
    except (StoreError, ValueError) as exc:
        problems.append(str(exc))
        return None
    return Store(str(store.root), len(artifacts), size)


def _bundles(problems: list[str]) -> tuple[Bundled, ...]:
    try:
        found = [(str(b.path), b.manifest) for b in BUNDLES.all()]
    except (BundleError, ValueError, OSError) as exc:
        problems.append(str(exc))
        return ()
    return tuple(Bundled(path, len(manifest.kernels), manifest.targets) for path, manifest in found)


def _jit(problems: list[str]) -> bool:
    try:
        enabled = _env.jit_enabled()
    except ValueError as exc:
        problems.append(str(exc))
        return False
    if not enabled:
        problems.append(f"compilation is switched off: {_env.JIT.name}=0")
    return enabled


def _gpus() -> tuple[Gpu, ...]:
    if not torch.cuda.is_available():
        return ()
    return tuple(_gpu(torch.cuda.get_device_properties(i)) for i in range(torch.cuda.device_count()))


def _gpu(properties: Any) -> Gpu:
    capability = (properties.major, properties.minor)
    target = arch.target_for(capability, wgmma=True) or arch.target_for(capability, wgmma=False)
    return Gpu(properties.name, capability, None if target is None else target.name)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [str(item) for item in value]
    return None if value is None else str(value)


def _section(title: str, lines: list[str]) -> Iterator[str]:
    yield ""
    yield title
    yield from (f"  {line}" for line in lines)


def _gpu_line(gpu: Gpu) -> str:
    major, minor = gpu.capability
    serves = f"runs kernels for {gpu.target}" if gpu.target else "no kernel of this library runs on it"
    return f"{gpu.name}, compute capability {major}.{minor}: {serves}"


def _variable_line(variable: _env.Variable, value: str | None) -> str:
    state = f"unset ({variable.default})" if value is None else value
    return f"{variable.name:<28}  {state}: {variable.doc}"
