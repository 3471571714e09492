"""A diagnosis of this installation: compiler, GPUs, store, bundles, and every environment variable."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cutlass_ops.artifacts.bundle import Bundle
from cutlass_ops.artifacts.bundles import Bundles
from cutlass_ops.artifacts.remote_store import RemoteStores
from cutlass_ops.artifacts.store import KernelStore
from cutlass_ops.base import arch, env, resources
from cutlass_ops.base.errors import BundleError, StoreError, ToolchainError
from cutlass_ops.base.units import counted
from cutlass_ops.compilation.toolchain import Toolchain, find_toolchain
from cutlass_ops.epilogue.unknown import alike

ORDER = "CUTLASS_OPS_NVCC, then bin/nvcc in CUDA_HOME and in CUDA_PATH, then PATH, then the PyPI wheels"


# Variables that people set for compilers, which do not reach compilers here.
_IGNORED = (
    *("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "NVCC_CCBIN"),
    *("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH"),
    *("COMPILER_PATH", "GCC_EXEC_PREFIX", "LD_RUN_PATH"),
)


# Variables that only builds and calls read. Other parts of the report read those of places.
_READ_LATE: tuple[Callable[[], object], ...] = (
    env.jobs,
    env.progress,
    env.tuning_dir,
    env.bundle_keys,
    env.bundle_version,
    env.lineinfo_enabled,
    env.executor_timeout,
    env.stand_in,
    env.remembers_choices,
    env.nvtx_enabled,
    env.cuda_homes,
)


@dataclass(frozen=True)
class Gpu:
    """A CUDA device that PyTorch sees. ``target`` is None if no kernel of this library runs on it."""

    name: str
    capability: tuple[int, int]
    target: str | None


@dataclass(frozen=True)
class Store:
    """The kernel store, its number of kernels, how many of them were fetched, and their size in bytes."""

    path: str
    kernels: int
    fetched: int
    bytes: int


@dataclass(frozen=True)
class Remote:
    """The remote store, whether it answers, and whether kernels that are compiled here are published there."""

    url: str
    answers: bool
    publishes: bool


@dataclass(frozen=True)
class Bundled:
    """A bundle that serves calls, or an installed distribution of several: its kernels' number and targets."""

    path: str
    kernels: int
    targets: tuple[str, ...]


@dataclass(frozen=True)
class Diagnosis:
    """The diagnosis."""

    versions: dict[str, str]  # of this library, Python and PyTorch
    toolchain: Toolchain | None  # compiles kernels
    gpus: tuple[Gpu, ...]  # those that PyTorch sees
    store: Store | None
    remote: Remote | None
    bundles: tuple[Bundled, ...]  # loaded, named by the environment or installed, in look-up order
    can_compile: bool
    can_run: bool  # whether a kernel is available and can run
    problems: tuple[str, ...]  # each with a remedy
    remarks: tuple[str, ...]  # environment variables without effect
    environment: dict[str, str | None]  # every variable that this library reads; None if it is unset

    @property
    def healthy(self) -> bool:
        """Whether this installation can compile or run a kernel."""
        return self.can_compile or self.can_run

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        plain: dict[str, Any] = _plain(dataclasses.asdict(self))
        return plain

    def lines(self) -> Iterator[str]:
        """Yield the diagnosis as lines of text."""
        yield ", ".join(f"{name} {version}" for name, version in self.versions.items())
        yield from _section("Compiler", self._compiler())
        yield from _section("GPU", [_gpu_line(gpu) for gpu in self.gpus] or ["none that PyTorch sees"])
        yield from _section("Store", [_store_line(self.store) if self.store else "unusable"])
        yield from _section("Remote store", [_remote_line(self.remote) if self.remote else "none"])
        bundles = [f"{b.path}: {counted(b.kernels, 'kernel')} for {', '.join(b.targets)}" for b in self.bundles]
        yield from _section("Bundles", bundles or ["none"])
        yield from _section("Environment", [_variable_line(v, self.environment[v.name]) for v in env.VARIABLES])
        if self.remarks:
            yield from _section("Remarks", list(self.remarks))
        if self.problems:
            yield from _section("Problems", list(self.problems))
        able = {True: "yes", False: "no"}
        yield ""
        yield f"Can compile a kernel: {able[self.can_compile]}. Can run one: {able[self.can_run]}."

    def _compiler(self) -> list[str]:
        order = f"search order for nvcc: {ORDER}"
        found = self.toolchain
        if found is None:
            return ["none", order]
        return [
            f"nvcc           {found.nvcc_version}, {found.nvcc} (from {found.source})",
            f"CUTLASS        {found.cutlass_version}, {found.cutlass_dir}",
            f"host compiler  {found.host_version}, {found.host_compiler}",
            f"tvm-ffi        {found.tvm_ffi_version}, {found.tvm_ffi_dir}",
            f"cuobjdump      {found.cuobjdump or 'none, and not needed'}",
            order,
        ]


def diagnose() -> Diagnosis:
    """Examine everything that compiling and running a kernel needs, without changing anything."""
    problems: list[str] = []
    toolchain = _toolchain(problems)
    store = _store(problems)
    writable = store is not None and _is_writable(problems)
    before = len(problems)
    remote = _remote(problems)
    shared = remote is not None or len(problems) == before
    gpus = _gpus()
    bundles = _bundles(problems)
    jit = _jit(problems)
    wrong: list[str] = []
    for read in _READ_LATE:
        with _noted(wrong):
            read()
    can_compile = toolchain is not None and writable and jit and shared and not wrong
    usable = any(gpu.target is not None for gpu in gpus)
    return Diagnosis(
        versions={
            "cutlass_ops": resources.library_version(),
            "Python": platform.python_version(),
            "PyTorch": str(torch.__version__),
        },
        toolchain=toolchain,
        gpus=gpus,
        store=store,
        remote=remote,
        bundles=bundles,
        can_compile=can_compile,
        can_run=usable and not wrong and (can_compile or bool(bundles) or (store is not None and store.kernels > 0)),
        problems=tuple(dict.fromkeys([*problems, *wrong])),
        remarks=tuple(_remarks()),
        environment={variable.name: variable.text for variable in env.VARIABLES},
    )


@contextlib.contextmanager
def _noted(problems: list[str]) -> Iterator[None]:
    """Note an error of one part of the installation as a problem, and go on."""
    try:
        yield
    except (BundleError, StoreError, ToolchainError, ValueError, OSError) as exc:
        problems.append(str(exc))


def _toolchain(problems: list[str]) -> Toolchain | None:
    with _noted(problems):
        return find_toolchain()
    return None


def _store(problems: list[str]) -> Store | None:
    with _noted(problems):
        store = KernelStore.of_user()
        # A look-up checks that other users cannot write to the store.
        store.lookup("0" * 64)
        artifacts, size = list(store.entries()), store.size()
        env.cache_size()
        fetched = sum("fetched_from" in artifact.manifest for artifact in artifacts)
        return Store(str(store.root), len(artifacts), fetched, size)
    return None


def _is_writable(problems: list[str]) -> bool:
    """Whether kernels can be built into the store. If not, existing kernels may still be usable."""
    with _noted(problems):
        KernelStore.of_user().require_writable()
        return True
    return False


def _remote(problems: list[str]) -> Remote | None:
    with _noted(problems):
        store = RemoteStores.current().store()
        if store is None:
            return None
        answers = store.reachable()
        if not answers:
            problems.append(f"the remote store {store.where} does not answer: kernels are compiled here")
        return Remote(store.where, answers, store.publishes)
    return None


def _bundles(problems: list[str]) -> tuple[Bundled, ...]:
    together: dict[str, list[Bundle]] = {}
    with _noted(problems):
        for bundle in Bundles.current().all():
            of = str(bundle.path) if bundle.installed_with is None else f"installed with {bundle.installed_with}"
            together.setdefault(of, []).append(bundle)
    return tuple(
        Bundled(
            of,
            sum(len(bundle.manifest.kernels) for bundle in mine),
            tuple(sorted({target for bundle in mine for target in bundle.manifest.targets})),
        )
        for of, mine in together.items()
    )


def _jit(problems: list[str]) -> bool:
    with _noted(problems):
        if env.jit_enabled():
            return True
        problems.append(f"{env.JIT.name}=0 switches compilation off: unset it to compile kernels")
    return False


# ---- Remarks -----------------------------------------------------------------------------------------------------


def _remarks() -> Iterator[str]:
    """Yield environment variables whose values have no effect."""
    names = [variable.name for variable in env.VARIABLES]
    for name in sorted(os.environ):
        if name.upper().startswith("CUTLASS_OPS") and name not in names:
            # The names share a prefix, so a high similarity is required.
            question = (
                alike(name, names, 1, 0.85) or f"they are {', '.join(n for n in names if n.startswith('CUTLASS_OPS'))}"
            )
            yield f"{name} is not a variable of this library: {question}"
    for variable in env.VARIABLES:
        if os.environ.get(variable.name) == "" and variable not in (env.BUNDLE_KEY, env.BUNDLE_VERSION):
            yield f"{variable.name} is empty, which counts as unset"
    yield from _cuda_homes()
    xdg = env.XDG_CACHE_HOME.text
    if xdg is not None and not os.path.isabs(xdg):
        yield f"{env.XDG_CACHE_HOME.name} is {xdg!r}, which is ignored: use an absolute path"
    elif xdg is not None and env.CACHE_DIR.text:
        yield f"{env.XDG_CACHE_HOME.name} is ignored: {env.CACHE_DIR.name} takes precedence"
    if env.JIT.text == "0":
        for variable in (env.NVCC, env.NVCC_CCBIN, env.CUTLASS_DIR, env.JOBS):
            if variable.text:
                yield f"{variable.name} is ignored: with {env.JIT.name}=0 nothing is compiled"
    for name in _IGNORED:
        if os.environ.get(name) and name not in names:
            yield f"{name} is ignored: kernels are compiled without it"
    if env.REMOTE_STORE.text is None:
        for variable in (env.REMOTE_STORE_KEY, env.REMOTE_STORE_SIGNING_KEY):
            if variable.text:
                yield f"{variable.name} is ignored: {env.REMOTE_STORE.name} names no remote store"
    for key in (env.BUNDLE_KEY.text or "").split(os.pathsep):
        if os.path.isabs(key) and not os.path.isfile(key):
            yield f"{env.BUNDLE_KEY.name} names {key!r}, which is not a file: no bundle can be opened"


def _cuda_homes() -> Iterator[str]:
    before = env.NVCC.name if env.NVCC.text else None
    try:
        homes = env.cuda_homes()
    except ValueError:
        return  # reported among the problems
    for name, home in homes:
        nvcc = home / "bin" / "nvcc"
        if not home.is_dir():
            yield f"{name} is {str(home)!r}, which is not a folder and is ignored: correct it or unset it"
        elif not os.access(nvcc, os.X_OK):
            yield f"{name} is {str(home)!r}, which has no executable bin/nvcc and is ignored: correct it or unset it"
        elif before is not None:
            yield f"{name} is ignored: {before} takes precedence"
        else:
            before = name


def _gpus() -> tuple[Gpu, ...]:
    if not torch.cuda.is_available():
        return ()
    return tuple(_gpu(torch.cuda.get_device_properties(i)) for i in range(torch.cuda.device_count()))


def _gpu(properties: Any) -> Gpu:
    capability = (properties.major, properties.minor)
    target = arch.best_target(capability)
    return Gpu(properties.name, capability, None if target is None else target.name)


def _plain(value: Any) -> Any:
    """Convert a value to JSON types; paths become texts."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, Path) else value


def _section(title: str, lines: list[str]) -> Iterator[str]:
    yield ""
    yield title
    yield from (f"  {line}" for line in lines)


def _store_line(store: Store) -> str:
    fetched = f", {store.fetched:,} of them fetched" if store.fetched else ""
    return f"{store.path}: {counted(store.kernels, 'kernel')}{fetched}, {store.bytes:,} bytes"


def _remote_line(remote: Remote) -> str:
    answers = "answers" if remote.answers else "does not answer"
    does = "published" if remote.publishes else "not published"
    return f"{remote.url}: {answers}; kernels compiled here are {does} there"


def _gpu_line(gpu: Gpu) -> str:
    major, minor = gpu.capability
    serves = f"runs kernels for {gpu.target}" if gpu.target else "no kernel of this library runs on it"
    return f"{gpu.name}, compute capability {major}.{minor}: {serves}"


def _variable_line(variable: env.Variable, value: str | None) -> str:
    state = f"unset ({variable.default})" if value is None else value
    return f"{variable.name:<36}  {state}: {variable.doc}"
