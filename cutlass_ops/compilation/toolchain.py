"""Find the compilers, headers and libraries that build kernels, and identify their versions."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cutlass_ops.base import arch, env, programs
from cutlass_ops.base.errors import ToolchainError
from cutlass_ops.base.session import cached
from cutlass_ops.compilation import finding

# Needed for sm_90a and for C++17 in device code. 13.0 and 13.5 are tested.
MIN_NVCC = (12, 4)

# Programs that g++ starts. It may find as and ld on PATH.
_HOST_PROGRAMS = ("cc1plus", "collect2", "as", "ld")
_NVCC_PROGRAMS = ("cicc", "ptxas", "fatbinary")
# Headers with the versions of the parts of CUDA that can be installed apart from nvcc.
_CUDA_VERSIONS = ("cuda_runtime_api.h", "cuda/std/__cccl/version.h")

TEMPORARY = "tmp"  # folder of a compiler's temporary files, relative to its working directory
_TIMEOUT = 60.0  # seconds for a compiler to report its version

_WHOLE = 8 << 20  # bytes; larger files are hashed in part
_END = 256 << 10  # bytes hashed at either end of a large file

# Characters that a shell changes in double quotes, and without quotes. Paths do not need control characters.
_NOT_LITERAL = re.compile(r'["$`\\\x00-\x1f\x7f]')
_NOT_BARE = re.compile(r"[^\w@%+=:,./\x80-\U0010ffff-]", re.ASCII)


@dataclass(frozen=True)
class Toolchain:
    """The compilers, headers and libraries that build kernels."""

    nvcc: Path  # the CUDA compiler
    source: str  # where it was found: the name of a variable, `"PATH"` or `"PyPI wheels"`
    nvcc_version: str  # for example `"13.0.88"`
    # Folders of CUDA's headers and libraries.
    include_dirs: tuple[Path, ...]
    lib_dirs: tuple[Path, ...]
    cudart: Path | None  # the shared CUDA runtime to link with; None leaves it to the linker's search
    host_compiler: Path  # the C++ compiler
    host_version: str  # first line of the output of its `--version`
    # Digests of each compiler's programs, which may come from several packages or folders.
    nvcc_digest: str
    host_digest: str
    # The digested files, or names on PATH, each with a stamp that shows whether it changed.
    parts: tuple[tuple[Path, tuple[int, ...]], ...]
    path: str  # the `PATH` that the compilers are found in and run with
    cutlass_dir: Path  # folder with CUTLASS's `include` and `tools`
    cutlass_version: str  # from `cutlass/version.h`, with a digest of the headers if the user named the folder
    tvm_ffi_dir: Path  # installed package `tvm_ffi`, which has `include` and `lib`
    tvm_ffi_version: str  # its version
    # Disassemblers, if installed. Only inspection uses them.
    cuobjdump: Path | None
    nvdisasm: Path | None

    @property
    def unchanged(self) -> bool:
        """Whether all parts are unchanged since they were found."""
        return all(_stamp(part, self.path) == stamp for part, stamp in self.parts)

    @property
    def identity(self) -> dict[str, str]:
        """The versions and digests that determine the machine code: part of a kernel's key, without paths."""
        return {
            "nvcc": f"{self.nvcc_version}+{self.nvcc_digest}",
            "host_compiler": f"{self.host_version}+{self.host_digest}",
            "cutlass": self.cutlass_version,
            "tvm_ffi": self.tvm_ffi_version,
        }


def find_toolchain() -> Toolchain:
    """Find the compilers, headers and libraries. A compiler that cannot be used gives way to the next one."""
    if arch.other_platform():
        raise ToolchainError(arch.other_platform())
    path = finding.search_path()
    nvccs, host, cutlass = finding.nvccs(path), finding.host_compiler(path), env.cutlass_dir()
    refused = []
    for nvcc, source in nvccs:
        try:
            found = _examine(nvcc, source, host, cutlass, path)
            if found.unchanged:
                return found
            # A compiler was replaced under the same name.
            _examine.cache_clear()
            return _examine(nvcc, source, host, cutlass, path)
        except ToolchainError as exc:  # noqa: PERF203
            refused.append(exc)
    raise refused[0]


@cached(maxsize=8)
def _examine(nvcc: Path, source: str, host: Path, cutlass: Path | None, path: str | None = None) -> Toolchain:
    path = finding.search_path() if path is None else path
    require_literal(nvcc, f"nvcc from {source} is", f"name another in {env.NVCC.name}")
    require_literal(host, f"the host compiler from {env.NVCC_CCBIN.name} or PATH is", "use a link to it")
    try:
        with tempfile.TemporaryDirectory(prefix="cutlass_ops.") as folder:
            require_literal(Path(folder), "the temporary folder is", "set TMPDIR to another folder")
            return _examined(_Ask(Path(folder), path), nvcc, source, host, cutlass)
    except OSError as exc:
        raise ToolchainError(f"{nvcc} and {host} cannot be examined: {exc}") from None


def _examined(ask: _Ask, nvcc: Path, source: str, host: Path, cutlass: Path | None) -> Toolchain:
    version = _nvcc_version(nvcc, ask)
    settings = _nvcc_settings(nvcc, host, ask)
    top = Path(settings["TOP"]).resolve()
    for folder in (Path(settings["TOP"]), *_named(settings, ("INCLUDES", "SYSTEM_INCLUDES"))):
        require_literal(folder / "x", f"a folder of {nvcc} is", f"name another nvcc in {env.NVCC.name}")
    include_dirs = _folders(settings, ("INCLUDES", "SYSTEM_INCLUDES"), top / "include")
    lib_dirs = _folders(settings, ("LIBRARIES",), top / "lib64", top / "lib")
    places = (*include_dirs, Path("/usr/include"))  # where Linux distributions install CUDA's headers
    for header in ("cuda_runtime.h", "nv/target"):
        if not any((folder / header).is_file() for folder in places):
            hint = f"Install a complete set with: {finding.INSTALL}"
            raise ToolchainError(f"{nvcc} lacks the CUDA header {header}. {hint}")
    cutlass_dir, cutlass_version = _find_cutlass(cutlass)
    tvm_ffi_dir, tvm_ffi_version = _find_tvm_ffi()
    # Wheels have only the versioned name, which -lcudart does not find.
    cudart = next((library for folder in lib_dirs for library in sorted(folder.glob("libcudart.so*"))), None)
    host_version = _host_version(host, ask)
    versions = (next(filter(Path.is_file, (folder / header for folder in places)), None) for header in _CUDA_VERSIONS)
    found = (*_nvcc_parts(nvcc, settings, top, ask.path), *versions, cudart)
    nvcc_parts = [nvcc, *(part for part in found if part is not None)]
    host_parts = [host, *_host_parts(host, ask)]
    # Take the stamps before reading the files: a change in between is then noticed the next time.
    parts = tuple((part, _stamp(part, ask.path)) for part in (*nvcc_parts, *host_parts))
    return Toolchain(
        nvcc=nvcc,
        source=source,
        nvcc_version=version,
        include_dirs=include_dirs,
        lib_dirs=lib_dirs,
        cudart=cudart,
        host_compiler=host,
        host_version=host_version,
        nvcc_digest=_digest(nvcc_parts, ask.path),
        host_digest=_digest(host_parts, ask.path),
        parts=parts,
        path=ask.path,
        cutlass_dir=cutlass_dir,
        cutlass_version=cutlass_version,
        tvm_ffi_dir=tvm_ffi_dir,
        tvm_ffi_version=tvm_ffi_version,
        cuobjdump=_find_tool("cuobjdump", top),
        nvdisasm=_find_tool("nvdisasm", top),
    )


def require_literal(path: Path, what: str, remedy: str) -> None:
    """Check that a shell would not change a path: nvcc runs its parts through a shell."""
    # nvcc quotes folders with double quotes, and does not quote the host compiler's name.
    found = _NOT_LITERAL.search(str(path)) or _NOT_BARE.search(path.name)
    if found is not None:
        raise ToolchainError(
            f"{what} {str(path)!r}: nvcc passes it to a shell, where {found[0]!r} has a special meaning; {remedy}"
        )


def _host_version(host: Path, ask: _Ask) -> str:
    text = ask([str(host), "--version"])
    # The host compiler parses CUTLASS's device code as host code, which needs GCC's -fpermissive.
    if "Free Software Foundation" not in text:
        raise ToolchainError(
            f"{host} is not GCC, but {text.partition(chr(10))[0].strip()!r}: name a g++ in {env.NVCC_CCBIN.name}, or "
            f"unset it if g++ is on PATH"
        )
    return text.partition("\n")[0]


def _host_parts(host: Path, ask: _Ask) -> Iterator[Path]:
    # One shell for all: starting processes is slow.
    each = 'for name do "$0" -print-prog-name="$name" || exit; done'
    answers = ask(["/bin/sh", "-c", each, str(host), *_HOST_PROGRAMS]).splitlines()
    if len(answers) != len(_HOST_PROGRAMS):
        raise ToolchainError(f"{host} -print-prog-name does not name {', '.join(_HOST_PROGRAMS)}: {answers}")
    for name, answer in zip(_HOST_PROGRAMS, answers, strict=True):
        # A bare name means that g++ searches PATH each time.
        if shutil.which(answer, path=ask.path) is None:
            raise ToolchainError(f"{host} finds no {name}: install the rest of GCC and binutils")
        yield Path(answer)


def _nvcc_parts(nvcc: Path, settings: Mapping[str, str], top: Path, path: str) -> Iterator[Path]:
    here = Path(settings.get("_HERE_", top / "bin"))
    # nvcc searches its own folders first.
    folders = (settings.get("CICC_PATH", top / "nvvm" / "bin"), settings.get("PATH", f"{here}{os.pathsep}{path}"))
    for name in _NVCC_PROGRAMS:
        found = shutil.which(name, path=os.pathsep.join(map(str, folders)))
        if found is None:
            raise ToolchainError(f"{nvcc} lacks {name}. Install a complete set with: {finding.INSTALL}")
        yield Path(found)
    libdevice = Path(settings.get("NVVMIR_LIBRARY_DIR", top / "nvvm" / "libdevice"))
    # The found nvcc may be a script that starts the real one.
    for part in (here / "nvcc", here / "nvcc.profile", *sorted(libdevice.glob("*.bc"))):
        if part.is_file():
            yield part


def _located(part: Path, path: str) -> Path | None:
    found = part if part.is_absolute() else shutil.which(part, path=path)
    return None if found is None else Path(found)


def _stamp(part: Path, path: str) -> tuple[int, ...]:
    """Return a stamp that changes when the file does. It is valid in this process only."""
    where = _located(part, path)
    try:
        info = None if where is None else where.stat()
    except OSError:
        info = None
    return () if info is None else (info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)


def _digest(parts: Iterable[Path], path: str) -> str:
    """Return a digest of the programs' contents, without paths and times, which differ between machines.

    Large files are hashed by size and both ends: cc1plus, cicc and ptxas have up to 200 MB. Another build has another
    size or other ends. Scripts, and programs that PATH can replace, are small and hashed completely.
    """
    digest = hashlib.sha256()
    for where in (_located(part, path) for part in parts):
        if where is None:
            continue
        with where.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(f"{size}\0".encode())
            if size > _WHOLE:
                digest.update(file.read(_END))
                file.seek(-_END, os.SEEK_END)
            digest.update(file.read())
    return digest.hexdigest()[:16]


def _nvcc_version(nvcc: Path, ask: _Ask) -> str:
    text = ask([str(nvcc), "--version"])
    match = re.search(r"\bV(\d+)\.(\d+)\.(\d+)", text)
    if match is None:
        raise ToolchainError(f"{nvcc} --version prints no version: {text.strip()!r}")
    if (int(match[1]), int(match[2])) < MIN_NVCC:
        needed = ".".join(map(str, MIN_NVCC))
        raise ToolchainError(f"{nvcc} is version {match[0][1:]}, but {needed} or later is needed: {finding.INSTALL}")
    return match[0][1:]


def _nvcc_settings(nvcc: Path, host: Path, ask: _Ask) -> dict[str, str]:
    """Ask nvcc where its parts are. Its path does not tell: it may be a link, or a script that starts the real one."""
    command = [str(nvcc), f"-ccbin={host}", "--dryrun", "-x", "cu", "-c", os.devnull, "-o", os.devnull]
    settings = dict(re.findall(r"^#\$ (\w+)=(.*)$", ask(command), re.MULTILINE))
    if "TOP" not in settings:
        raise ToolchainError(f"{nvcc} --dryrun does not print its toolkit's folder (TOP)")
    return settings


def _named(settings: Mapping[str, str], names: Sequence[str]) -> list[Path]:
    words = [word for name in names for word in shlex.split(settings.get(name, ""))]
    return [Path(re.sub(r"^-[IL]", "", word)) for word in words if word != "-isystem"]


def _folders(settings: Mapping[str, str], names: Sequence[str], *more: Path) -> tuple[Path, ...]:
    # Stub libraries are for linking only and cannot be loaded.
    given = (*_named(settings, names), *more)
    found = (folder.resolve() for folder in given if folder.is_dir() and folder.name != "stubs")
    return tuple(dict.fromkeys(found))


def _find_cutlass(named: Path | None) -> tuple[Path, str]:
    if named is not None:
        where, folder = f"{env.CUTLASS_DIR.name} names {named}", named
    else:
        # Do not import the package: it does a lot of work at import.
        spec = importlib.util.find_spec("cutlass_library")
        if spec is None or spec.origin is None:
            raise ToolchainError(
                f"the CUTLASS headers are missing: pip install nvidia-cutlass, or set {env.CUTLASS_DIR.name}"
            )
        folder = Path(spec.origin).parent / "source"
        where = f"the package nvidia-cutlass is in {folder}"
    header = folder / "include" / "cutlass" / "version.h"
    if not header.is_file():
        raise ToolchainError(f"{where}, which has no include/cutlass/version.h")
    text = header.read_text(encoding="utf-8", errors="replace")
    found = dict(re.findall(r"#define CUTLASS_(MAJOR|MINOR|PATCH)\s+(\d+)", text))
    if len(found) != 3:
        raise ToolchainError(f"{header} does not define CUTLASS's version")
    version = ".".join(found[part] for part in ("MAJOR", "MINOR", "PATCH"))
    # A user's checkout may be edited, so its headers are hashed.
    return folder, version if named is None else f"{version}+{_headers_digest(folder)}"


def _headers_digest(cutlass: Path) -> str:
    digest = hashlib.sha256()
    for root in (cutlass / "include", cutlass / "tools" / "util" / "include"):
        for path in sorted(root.rglob("*.h*")):
            digest.update(os.fsencode(path.relative_to(cutlass)) + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _find_tvm_ffi() -> tuple[Path, str]:
    spec = importlib.util.find_spec("tvm_ffi")
    if spec is None or spec.origin is None:
        raise ToolchainError("the package apache-tvm-ffi is missing: pip install apache-tvm-ffi")
    return Path(spec.origin).parent, importlib.metadata.version("apache-tvm-ffi")


def _find_tool(name: str, top: Path) -> Path | None:
    on_path = shutil.which(name)
    candidates = [top / "bin" / name, *([Path(on_path)] if on_path else []), *(b / name for b in finding.wheel_bins())]
    return next((path for path in candidates if os.access(path, os.X_OK)), None)


@dataclass(frozen=True)
class _Ask:
    """Runs programs that report their version or parts, in a temporary folder."""

    folder: Path
    path: str

    def __call__(self, command: Sequence[str]) -> str:
        (self.folder / TEMPORARY).mkdir(exist_ok=True)
        try:
            status, said = programs.ask(command, _TIMEOUT, cwd=self.folder, env=environment(self.path))
        except OSError as exc:
            raise ToolchainError(f"{command[0]} cannot be run: {exc}") from None
        if status != 0:
            raise ToolchainError(f"{shlex.join(command)} failed ({status}): {said.strip()[-500:]}")
        return said


def environment(path: str) -> dict[str, str]:
    """Return the complete environment for compilers. Any other variable might change the machine code."""
    # TMPDIR is relative: nvcc expands it in a shell, and a relative path does not depend on this machine.
    return {"PATH": path, "TMPDIR": TEMPORARY, "LC_ALL": "C"}
