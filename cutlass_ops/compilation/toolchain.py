"""The CUDA compiler and all that goes with it: which ones are used, and why."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cutlass_ops.base import arch, env, programs
from cutlass_ops.base.errors import ToolchainError
from cutlass_ops.base.session import cached

# sm_90a's instructions and C++17 in device code; 13.0 and 13.5 are what is tested.
MIN_NVCC = (12, 4)

_INSTALL = 'pip install "cutlass_ops[toolkit]"'

# What g++ starts: cc1plus and the two that a folder on PATH may hold as well, as and ld.
_HOST_PROGRAMS = ("cc1plus", "collect2", "as", "ld")
_NVCC_PROGRAMS = ("cicc", "ptxas", "fatbinary")
# Parts of CUDA that come apart from nvcc say so here.
_CUDA_VERSIONS = ("cuda_runtime_api.h", "cuda/std/__cccl/version.h")

TEMPORARY = "tmp"  # folder of a compiler's temporary files, in the folder that it runs in
_TIMEOUT = 60.0  # seconds in which a compiler says what it is

_WHOLE = 8 << 20  # bytes
_END = 256 << 10  # bytes

# What a shell changes: within double quotes, and without. No path needs control characters.
_NOT_LITERAL = re.compile(r'["$`\\\x00-\x1f\x7f]')
_NOT_BARE = re.compile(r"[^\w@%+=:,./\x80-\U0010ffff-]", re.ASCII)


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
    nvcc_digest, host_digest : str
        Of the programs that each consists of, which may come from several packages or folders.
    parts : tuple of (Path, tuple of int)
        Files that were read for these digests, or names on PATH, each with what shows that it is still the same.
    path : str
        The ``PATH`` that all of them are found by, and run with.
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
    nvcc_digest: str
    host_digest: str
    parts: tuple[tuple[Path, tuple[int, ...]], ...]
    path: str
    cutlass_dir: Path
    cutlass_version: str
    tvm_ffi_dir: Path
    tvm_ffi_version: str
    cuobjdump: Path | None
    nvdisasm: Path | None

    @property
    def unchanged(self) -> bool:
        """Whether all that was examined is still the same."""
        return all(_stamp(part, self.path) == stamp for part, stamp in self.parts)

    @property
    def identity(self) -> dict[str, str]:
        """The versions and digests that decide the machine code: part of a kernel's key, and free of machine paths."""
        return {
            "nvcc": f"{self.nvcc_version}+{self.nvcc_digest}",
            "host_compiler": f"{self.host_version}+{self.host_digest}",
            "cutlass": self.cutlass_version,
            "tvm_ffi": self.tvm_ffi_version,
        }


def find_toolchain() -> Toolchain:
    """Find the compiler and everything that goes with it.

    nvcc is the first of: ``CUTLASS_OPS_NVCC``; ``bin/nvcc`` in ``CUDA_HOME``, then in ``CUDA_PATH``; the one on PATH;
    the one from the PyPI wheels. The answer is kept, for as long as these say the same.

    Raises
    ------
    ToolchainError
        If a part is missing or unusable; the message says what to install or set.
    """
    if arch.other_platform():
        raise ToolchainError(arch.other_platform())
    path = _search_path()
    nvcc, source = _find_nvcc(path)
    inputs = (nvcc, source, _find_host_compiler(path), env.cutlass_dir(), path)
    found = _examine(*inputs)
    if not found.unchanged:
        # A compiler was installed meanwhile, under the same name.
        _examine.cache_clear()
        found = _examine(*inputs)
    return found


def _search_path() -> str:
    # What is relative means another folder wherever a compiler runs.
    folders = (os.environ.get("PATH") or os.defpath).split(os.pathsep)
    return os.pathsep.join(folder for folder in folders if os.path.isabs(folder))


def _find_nvcc(path: str) -> tuple[Path, str]:
    named = env.nvcc()
    if named is not None:
        if not os.access(named, os.X_OK):
            raise ToolchainError(f"{env.NVCC.name} names {named}, which is not an executable file")
        return named, env.NVCC.name
    for name, home in env.cuda_homes():
        if os.access(home / "bin" / "nvcc", os.X_OK):
            return (home / "bin" / "nvcc").absolute(), name
    on_path = shutil.which("nvcc", path=path)
    if on_path is not None:
        return Path(on_path), "PATH"
    for folder in _wheel_bins():
        if os.access(folder / "nvcc", os.X_OK):
            return folder / "nvcc", "PyPI wheels"
    raise ToolchainError(
        f"no CUDA compiler: {env.NVCC.name} is not set, CUDA_HOME and CUDA_PATH hold no bin/nvcc, none is on PATH, "
        f"and the PyPI wheels are not installed. Install them with: {_INSTALL}"
    )


def _wheel_bins() -> Iterator[Path]:
    """Yield the folders of programs in NVIDIA's wheels, the newest CUDA first; nothing is imported.

    Some of these wheels make `nvidia` a package of one folder. Others may lie beside it, in another of `sys.path`.
    """
    for root in sys.path:
        if os.path.isabs(root):
            yield from sorted(Path(root).glob("nvidia/cu[0-9]*/bin"), reverse=True)


def _find_host_compiler(path: str) -> Path:
    named = env.host_compiler()
    command = "g++" if named is None else os.path.join(named, "g++") if os.path.isdir(named) else named
    found = shutil.which(command, path=path)
    if found is None:
        hint = f"{env.NVCC_CCBIN.name} names {named!r}" if named else "install it (Debian: apt-get install g++)"
        raise ToolchainError(f"no C++ compiler: {command} is not there; {hint}")
    return Path(found).absolute()


@cached(maxsize=8)
def _examine(nvcc: Path, source: str, host: Path, cutlass: Path | None, path: str | None = None) -> Toolchain:
    path = _search_path() if path is None else path
    require_literal(nvcc, f"{source} has nvcc in a folder", f"name another in {env.NVCC.name}")
    require_literal(host, f"{env.NVCC_CCBIN.name}, or PATH, gives the host compiler", "name a link to it there")
    try:
        with tempfile.TemporaryDirectory(prefix="cutlass_ops.") as folder:
            require_literal(Path(folder), "temporary files lie in", "set TMPDIR to another folder")
            return _examined(_Ask(Path(folder), path), nvcc, source, host, cutlass)
    except OSError as exc:
        raise ToolchainError(f"{nvcc} and {host} cannot be examined: {exc}") from None


def _examined(ask: _Ask, nvcc: Path, source: str, host: Path, cutlass: Path | None) -> Toolchain:
    version = _nvcc_version(nvcc, ask)
    settings = _nvcc_settings(nvcc, host, ask)
    top = Path(settings["TOP"]).resolve()
    for folder in (Path(settings["TOP"]), *_named(settings, ("INCLUDES", "SYSTEM_INCLUDES"))):
        require_literal(folder / "x", f"{nvcc} has parts in a folder", f"name another in {env.NVCC.name}")
    include_dirs = _folders(settings, ("INCLUDES", "SYSTEM_INCLUDES"), top / "include")
    lib_dirs = _folders(settings, ("LIBRARIES",), top / "lib64", top / "lib")
    # Distributions put CUDA's headers among the system's.
    for header in ("cuda_runtime.h", "nv/target"):
        if not any((folder / header).is_file() for folder in (*include_dirs, Path("/usr/include"))):
            raise ToolchainError(f"{nvcc} comes without the CUDA header {header}. Install a whole set with: {_INSTALL}")
    cutlass_dir, cutlass_version = _find_cutlass(cutlass)
    tvm_ffi_dir, tvm_ffi_version = _find_tvm_ffi()
    cudart = _find_cudart(lib_dirs)
    host_version = _host_version(host, ask)
    nvcc_parts = [nvcc, *_nvcc_parts(nvcc, settings, top, ask.path), *_cuda_versions(include_dirs)]
    if cudart is not None:
        nvcc_parts.append(cudart)
    host_parts = [host, *_host_parts(host, ask)]
    # Before they are read: what changes meanwhile is seen the next time.
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
    """Refuse a path that a shell would change: nvcc has one run its parts.

    Folders stand in double quotes there, and the host compiler's own name bare.

    Parameters
    ----------
    path : Path
        The path.
    what, remedy : str
        What it is and what to do, for the message.

    Raises
    ------
    ToolchainError
        With the character that is not taken as it stands.
    """
    found = _NOT_LITERAL.search(str(path)) or _NOT_BARE.search(path.name)
    if found is not None:
        raise ToolchainError(
            f"{what} {str(path)!r}: nvcc gives it to a shell, which would not take {found[0]!r} as it stands; {remedy}"
        )


def _host_version(host: Path, ask: _Ask) -> str:
    text = ask([str(host), "--version"])
    # It reads CUTLASS's device code as host code, which takes GCC's -fpermissive.
    if "Free Software Foundation" not in text:
        raise ToolchainError(
            f"{host} is not GCC, but {text.partition(chr(10))[0].strip()!r}: name a g++ in {env.NVCC_CCBIN.name}, or "
            f"unset it where g++ is on PATH"
        )
    return text.partition("\n")[0]


def _host_parts(host: Path, ask: _Ask) -> Iterator[Path]:
    # At once, as each process that is started takes its time.
    each = 'for name do "$0" -print-prog-name="$name" || exit; done'
    answers = ask(["/bin/sh", "-c", each, str(host), *_HOST_PROGRAMS]).splitlines()
    if len(answers) != len(_HOST_PROGRAMS):
        raise ToolchainError(f"{host} does not say where its {', '.join(_HOST_PROGRAMS)} are: {answers}")
    for name, answer in zip(_HOST_PROGRAMS, answers, strict=True):
        # A bare name says that it is looked for on PATH, each time anew.
        if shutil.which(answer, path=ask.path) is None:
            raise ToolchainError(f"{host} finds no {name}: install the rest of GCC and binutils")
        yield Path(answer)


def _nvcc_parts(nvcc: Path, settings: Mapping[str, str], top: Path, path: str) -> Iterator[Path]:
    here = Path(settings.get("_HERE_", top / "bin"))
    # As nvcc has it: its own folders come first.
    folders = (settings.get("CICC_PATH", top / "nvvm" / "bin"), settings.get("PATH", f"{here}{os.pathsep}{path}"))
    for name in _NVCC_PROGRAMS:
        found = shutil.which(name, path=os.pathsep.join(map(str, folders)))
        if found is None:
            raise ToolchainError(f"{nvcc} comes without {name}. Install a whole set with: {_INSTALL}")
        yield Path(found)
    libdevice = Path(settings.get("NVVMIR_LIBRARY_DIR", top / "nvvm" / "libdevice"))
    # The nvcc that was found may be a script that starts the real one.
    for part in (here / "nvcc", here / "nvcc.profile", *sorted(libdevice.glob("*.bc"))):
        if part.is_file():
            yield part


def _cuda_versions(include_dirs: Sequence[Path]) -> Iterator[Path]:
    for header in _CUDA_VERSIONS:
        found = (folder / header for folder in (*include_dirs, Path("/usr/include")) if (folder / header).is_file())
        yield from list(found)[:1]


def _located(part: Path, path: str) -> Path | None:
    found = part if part.is_absolute() else shutil.which(part, path=path)
    return None if found is None else Path(found)


def _stamp(part: Path, path: str) -> tuple[int, ...]:
    """Return what shows that a file is still the same, in this process."""
    where = _located(part, path)
    try:
        info = None if where is None else where.stat()
    except OSError:
        info = None
    return () if info is None else (info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)


def _digest(parts: Iterable[Path], path: str) -> str:
    """Return a digest of what programs are; where they lie and since when differs from machine to machine.

    Of large ones their size and both ends count. What PATH can exchange, and every script, is small and read whole.
    cc1plus, cicc and ptxas have up to 200 MB, which take longer to read than all else before a compilation; another
    build of them has another size or other ends.
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
        raise ToolchainError(f"{nvcc} --version names no version: {text.strip()!r}")
    if (int(match[1]), int(match[2])) < MIN_NVCC:
        needed = ".".join(map(str, MIN_NVCC))
        raise ToolchainError(f"{nvcc} is version {match[0][1:]}; {needed} or later is needed: {_INSTALL}")
    return match[0][1:]


def _nvcc_settings(nvcc: Path, host: Path, ask: _Ask) -> dict[str, str]:
    """Ask nvcc where its parts are: its own path may be a link or a script that starts the real one."""
    command = [str(nvcc), f"-ccbin={host}", "--dryrun", "-x", "cu", "-c", os.devnull, "-o", os.devnull]
    settings = dict(re.findall(r"^#\$ (\w+)=(.*)$", ask(command), re.MULTILINE))
    if "TOP" not in settings:
        raise ToolchainError(f"{nvcc} --dryrun does not say where its toolkit is")
    return settings


def _named(settings: Mapping[str, str], names: Sequence[str]) -> list[Path]:
    words = [word for name in names for word in shlex.split(settings.get(name, ""))]
    return [Path(re.sub(r"^-[IL]", "", word)) for word in words if word != "-isystem"]


def _folders(settings: Mapping[str, str], names: Sequence[str], *more: Path) -> tuple[Path, ...]:
    # Stubs satisfy a linker and no program.
    given = (*_named(settings, names), *more)
    found = (folder.resolve() for folder in given if folder.is_dir() and folder.name != "stubs")
    return tuple(dict.fromkeys(found))


def _find_cudart(lib_dirs: Sequence[Path]) -> Path | None:
    # Wheels hold the versioned name only, which -lcudart does not find.
    found = (library for folder in lib_dirs for library in sorted(folder.glob("libcudart.so*")))
    return next(found, None)


def _find_cutlass(named: Path | None) -> tuple[Path, str]:
    if named is not None:
        where, folder = f"{env.CUTLASS_DIR.name} names {named}", named
    else:
        # Importing this package would do a lot of work.
        spec = importlib.util.find_spec("cutlass_library")
        if spec is None or spec.origin is None:
            raise ToolchainError(
                f"the CUTLASS headers are missing: pip install nvidia-cutlass, or set {env.CUTLASS_DIR.name}"
            )
        folder = Path(spec.origin).parent / "source"
        where = f"the package nvidia-cutlass lies in {folder}"
    header = folder / "include" / "cutlass" / "version.h"
    if not header.is_file():
        raise ToolchainError(f"{where}, which has no include/cutlass/version.h")
    text = header.read_text(encoding="utf-8", errors="replace")
    found = dict(re.findall(r"#define CUTLASS_(MAJOR|MINOR|PATCH)\s+(\d+)", text))
    if len(found) != 3:
        raise ToolchainError(f"{header} names no version of CUTLASS")
    version = ".".join(found[part] for part in ("MAJOR", "MINOR", "PATCH"))
    # A released package is what its version says; a user's checkout may be edited.
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
    candidates = [top / "bin" / name, *([Path(on_path)] if on_path else []), *(b / name for b in _wheel_bins())]
    return next((path for path in candidates if os.access(path, os.X_OK)), None)


@dataclass(frozen=True)
class _Ask:
    """Runs programs that say what they are, in a folder of their own."""

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
    """Return the environment that compilers run in: all of it, since any other variable may be one that they read.

    Parameters
    ----------
    path : str
        ``PATH``, as :attr:`Toolchain.path` has it.
    """
    # nvcc has a shell expand TMPDIR, and a relative one says nothing of this machine.
    return {"PATH": path, "TMPDIR": TEMPORARY, "LC_ALL": "C"}
