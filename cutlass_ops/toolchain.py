"""The CUDA compiler and all that goes with it: which ones are used, and why."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cutlass_ops import _env, arch
from cutlass_ops.errors import ToolchainError

# sm_90a's instructions and C++17 in device code; 13.0 and 13.5 are what is tested.
MIN_NVCC = (12, 4)

_INSTALL = 'pip install "cutlass_ops[toolkit]"'

# They change what nvcc or the host compiler reads or does without being seen in the command, and so in the key.
HIDDEN_INPUTS = (
    "NVCC_PREPEND_FLAGS",
    "NVCC_APPEND_FLAGS",
    "NVCC_CCBIN",
    "CPATH",
    "C_INCLUDE_PATH",
    "CPLUS_INCLUDE_PATH",
    "LIBRARY_PATH",
)


@dataclass(frozen=True)
class Toolchain:
    """What compiles kernels, and where each part of it was found.

    Attributes
    ----------
    nvcc : Path
        The compiler.
    source : str
        Why this one: the variable that names it, ``"PATH"`` or ``"PyPI wheels"``.
    nvcc_version : str
        Such as ``"13.0.88"``.
    include_dirs, lib_dirs : tuple of Path
        Where it looks for CUDA's headers and libraries.
    cudart : Path or None
        The shared CUDA runtime to link with; None leaves it to the linker's own search.
    host_compiler : Path
        The C++ compiler behind nvcc.
    host_version : str
        First line of what it says about its version.
    cutlass_dir : Path
        Folder that holds CUTLASS's ``include`` and ``tools``.
    cutlass_version : str
        From ``cutlass/version.h``; with a digest of the headers where the user named the folder.
    tvm_ffi_dir : Path
        Installed package ``tvm_ffi``, which holds ``include`` and ``lib``.
    tvm_ffi_version : str
        Its version.
    cuobjdump, nvdisasm : Path or None
        Disassembler, if there is one. Nothing but reading along needs it.
    """

    nvcc: Path
    source: str
    nvcc_version: str
    include_dirs: tuple[Path, ...]
    lib_dirs: tuple[Path, ...]
    cudart: Path | None
    host_compiler: Path
    host_version: str
    cutlass_dir: Path
    cutlass_version: str
    tvm_ffi_dir: Path
    tvm_ffi_version: str
    cuobjdump: Path | None
    nvdisasm: Path | None

    @property
    def identity(self) -> dict[str, str]:
        """The versions that decide the machine code: part of a kernel's key, and free of machine paths."""
        return {
            "nvcc": self.nvcc_version,
            "host_compiler": self.host_version,
            "cutlass": self.cutlass_version,
            "tvm_ffi": self.tvm_ffi_version,
        }


def find_toolchain() -> Toolchain:
    """Find the compiler and everything that goes with it.

    nvcc is the first of: ``CUTLASS_OPS_NVCC``; ``bin/nvcc`` in ``CUDA_HOME``, then in ``CUDA_PATH``; the one on PATH;
    the one from the PyPI wheels. The answer is kept for the process, for as long as these say the same.

    Raises
    ------
    ToolchainError
        If a part is missing or unusable; the message says what to install or set.
    """
    if arch.other_platform():
        raise ToolchainError(arch.other_platform())
    nvcc, source = _find_nvcc()
    return _examine(nvcc, source, _find_host_compiler(), _env.cutlass_dir())


def _find_nvcc() -> tuple[Path, str]:
    named = _env.nvcc()
    if named is not None:
        if not os.access(named, os.X_OK):
            raise ToolchainError(f"{_env.NVCC.name} names {named}, which is not an executable file")
        return named, _env.NVCC.name
    for name, home in _env.cuda_homes():
        if os.access(home / "bin" / "nvcc", os.X_OK):
            return home / "bin" / "nvcc", name
    on_path = shutil.which("nvcc")
    if on_path is not None:
        return Path(on_path), "PATH"
    for folder in _wheel_bins():
        if os.access(folder / "nvcc", os.X_OK):
            return folder / "nvcc", "PyPI wheels"
    raise ToolchainError(
        f"no CUDA compiler: {_env.NVCC.name} is not set, CUDA_HOME and CUDA_PATH hold no bin/nvcc, none is on PATH, "
        f"and the PyPI wheels are not installed. Install them with: {_INSTALL}"
    )


def _wheel_bins() -> Iterator[Path]:
    """Yield the folders of programs in NVIDIA's wheels, the newest CUDA first; nothing is imported."""
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        yield from sorted(Path(root).glob("cu[0-9]*/bin"), reverse=True)


def _find_host_compiler() -> Path:
    named = _env.host_compiler()
    command = "g++" if named is None else os.path.join(named, "g++") if os.path.isdir(named) else named
    found = shutil.which(command)
    if found is None:
        hint = f"{_env.NVCC_CCBIN.name} names {named!r}" if named else "install it (Debian: apt-get install g++)"
        raise ToolchainError(f"no C++ compiler: {command} is not there; {hint}")
    return Path(found).absolute()


@functools.lru_cache(maxsize=8)
def _examine(nvcc: Path, source: str, host: Path, cutlass: Path | None) -> Toolchain:
    version = _nvcc_version(nvcc)
    settings = _nvcc_settings(nvcc, host)
    top = Path(settings["TOP"]).resolve()
    include_dirs = _folders(settings, ("INCLUDES", "SYSTEM_INCLUDES"), top / "include")
    lib_dirs = _folders(settings, ("LIBRARIES",), top / "lib64", top / "lib")
    # Distributions put CUDA's headers among the system's.
    for header in ("cuda_runtime.h", "nv/target"):
        if not any((folder / header).is_file() for folder in (*include_dirs, Path("/usr/include"))):
            raise ToolchainError(f"{nvcc} comes without the CUDA header {header}. Install a whole set with: {_INSTALL}")
    cutlass_dir, cutlass_version = _find_cutlass(cutlass)
    tvm_ffi_dir, tvm_ffi_version = _find_tvm_ffi()
    return Toolchain(
        nvcc=nvcc,
        source=source,
        nvcc_version=version,
        include_dirs=include_dirs,
        lib_dirs=lib_dirs,
        cudart=_find_cudart(lib_dirs),
        host_compiler=host,
        host_version=_host_version(host),
        cutlass_dir=cutlass_dir,
        cutlass_version=cutlass_version,
        tvm_ffi_dir=tvm_ffi_dir,
        tvm_ffi_version=tvm_ffi_version,
        cuobjdump=_find_tool("cuobjdump", top),
        nvdisasm=_find_tool("nvdisasm", top),
    )


def _host_version(host: Path) -> str:
    text = _output([str(host), "--version"])
    # It reads CUTLASS's device code as host code, which takes GCC's -fpermissive.
    if "Free Software Foundation" not in text:
        raise ToolchainError(
            f"{host} is not GCC, but {text.partition(chr(10))[0].strip()!r}: name a g++ in {_env.NVCC_CCBIN.name}, or "
            f"unset it where g++ is on PATH"
        )
    return text.partition("\n")[0]


def _nvcc_version(nvcc: Path) -> str:
    text = _output([str(nvcc), "--version"])
    match = re.search(r"\bV(\d+)\.(\d+)\.(\d+)", text)
    if match is None:
        raise ToolchainError(f"{nvcc} --version names no version: {text.strip()!r}")
    if (int(match[1]), int(match[2])) < MIN_NVCC:
        needed = ".".join(map(str, MIN_NVCC))
        raise ToolchainError(f"{nvcc} is version {match[0][1:]}; {needed} or later is needed: {_INSTALL}")
    return match[0][1:]


def _nvcc_settings(nvcc: Path, host: Path) -> dict[str, str]:
    """Ask nvcc where its parts are: its own path may be a link or a script that starts the real one."""
    command = [str(nvcc), f"-ccbin={host}", "--dryrun", "-x", "cu", "-c", os.devnull, "-o", os.devnull]
    settings = dict(re.findall(r"^#\$ (\w+)=(.*)$", _output(command), re.MULTILINE))
    if "TOP" not in settings:
        raise ToolchainError(f"{nvcc} --dryrun does not say where its toolkit is")
    return settings


def _folders(settings: Mapping[str, str], names: Sequence[str], *more: Path) -> tuple[Path, ...]:
    words = [word for name in names for word in shlex.split(settings.get(name, ""))]
    given = [Path(re.sub(r"^-[IL]", "", word)) for word in words if word != "-isystem"]
    # Stubs satisfy a linker and no program.
    found = (folder.resolve() for folder in (*given, *more) if folder.is_dir() and folder.name != "stubs")
    return tuple(dict.fromkeys(found))


def _find_cudart(lib_dirs: Sequence[Path]) -> Path | None:
    # Wheels hold the versioned name only, which -lcudart does not find.
    found = (library for folder in lib_dirs for library in sorted(folder.glob("libcudart.so*")))
    return next(found, None)


def _find_cutlass(named: Path | None) -> tuple[Path, str]:
    if named is not None:
        where, folder = f"{_env.CUTLASS_DIR.name} names {named}", named
    else:
        # Importing this package would do a lot of work.
        spec = importlib.util.find_spec("cutlass_library")
        if spec is None or spec.origin is None:
            raise ToolchainError(
                f"the CUTLASS headers are missing: pip install nvidia-cutlass, or set {_env.CUTLASS_DIR.name}"
            )
        folder = Path(spec.origin).parent / "source"
        where = f"the package nvidia-cutlass lies in {folder}"
    header = folder / "include" / "cutlass" / "version.h"
    if not header.is_file():
        raise ToolchainError(f"{where}, which has no include/cutlass/version.h")
    found = dict(re.findall(r"#define CUTLASS_(MAJOR|MINOR|PATCH)\s+(\d+)", header.read_text()))
    if len(found) != 3:
        raise ToolchainError(f"{header} names no version of CUTLASS")
    version = ".".join(found[part] for part in ("MAJOR", "MINOR", "PATCH"))
    # A released package is what its version says; a user's checkout may be edited.
    return folder, version if named is None else f"{version}+{_digest(folder)}"


def _digest(cutlass: Path) -> str:
    digest = hashlib.sha256()
    for root in (cutlass / "include", cutlass / "tools" / "util" / "include"):
        for path in sorted(root.rglob("*.h*")):
            digest.update(f"{path.relative_to(cutlass)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _find_tvm_ffi() -> tuple[Path, str]:
    spec = importlib.util.find_spec("tvm_ffi")
    if spec is None or spec.origin is None:
        raise ToolchainError("the package apache-tvm-ffi is missing: pip install apache-tvm-ffi")
    return Path(spec.origin).parent, importlib.metadata.version("apache-tvm-ffi")


def _find_tool(name: str, top: Path) -> Path | None:
    on_path = shutil.which(name)
    candidates = [top / "bin" / name, *([Path(on_path)] if on_path else []), *(b / name for b in _wheel_bins())]
    return next((path for path in candidates if os.access(path, os.X_OK)), None)


def _output(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment(),
            encoding="utf-8",
            errors="replace",
            timeout=60,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise ToolchainError(f"{command[0]} cannot be run: {exc}") from None
    if done.returncode != 0:
        raise ToolchainError(f"{shlex.join(command)} failed ({done.returncode}): {done.stdout.strip()[-500:]}")
    return done.stdout


def environment() -> dict[str, str]:
    """Return the environment that compilers run in."""
    return {k: v for k, v in os.environ.items() if k not in HIDDEN_INPUTS} | {"LC_ALL": "C"}
