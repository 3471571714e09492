"""Compile a rendered source into a shared library: device code and host code in parallel, then linked.

nvcc compiles the device code. The host compiler compiles the host code directly;
``templates/include/cutlass_ops/halves.h`` explains how it reads CUDA. nvcc alone would compile them one after the other
and take longer for the host code.

Most of nvcc's time goes into headers and templates that kernels share. So several kernels can be compiled in one file,
as far as PTX (:func:`compile_ptx`). From there each has its own machine code and its own library, with the same bytes
as if it had been compiled alone.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shlex
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from pathlib import Path

from cutlass_ops.artifacts.entry import Compiled
from cutlass_ops.base import env, resources, sass
from cutlass_ops.base.arch import Target
from cutlass_ops.base.errors import CompileError, ToolchainError
from cutlass_ops.base.programs import Program
from cutlass_ops.compilation.toolchain import TEMPORARY, Toolchain, environment, require_literal

COMPILE_TIMEOUT = 1800.0  # seconds; a kernel takes well under a minute
LOG = "compile.log"

_POLL = 0.02  # seconds

IMAGE = "cutlass_ops/image.S"  # in the folder of headers; embeds the device code in the library

_DEVICE = "kernel.fatbin"  # the name in image.S
_HOST = "kernel.o"
_PTX = "kernels.ptx"

# Maximum number of folders of CUDA headers, for the host compiler. nvcc finds its own.
_CUDA_FOLDERS = 3

# ptxas reports serialised wgmma and ignored setmaxnreg as mere information, but they make kernels several times slower.
_SLOW_CODE = re.compile(r"^.*\(C75(?:08|10|14)\).*$", re.MULTILINE)
_ERROR = re.compile(r"^.*(?:\b(?:error|fatal)\b[^:\n]{0,12}:|undefined reference|/ld: |No space left).*$", re.MULTILINE)
# What the machine lacks is no fault of the kernel: it is tried again. The texts are those of LC_ALL=C.
_NO_SPACE = re.compile(r"No space left on device|Disk quota exceeded|File too large")
_NO_MEANS = re.compile(
    r"^.*(?:Cannot allocate memory|out of memory|memory exhausted|Memory allocation failure|bad_alloc"
    r"|Resource temporarily unavailable|Too many open files|Read-only file system|Input/output error|Stale file handle"
    r"|\bKilled\b|[Tt]erminated with signal|signal (?:1|2|7|9|15|24|25)\b).*$",
    re.MULTILINE | re.IGNORECASE,
)
# Signals by which others end a program, or limits and full file systems do. The rest is a compiler's own crash.
_SIGNALS = {getattr(signal, f"SIG{name}") for name in ("HUP", "INT", "BUS", "KILL", "TERM", "XCPU", "XFSZ")}
# Bytes that compilers may need in a folder: with less, what went wrong there was perhaps not even said.
_NEEDED = 64 << 20
_RESOURCES = re.compile(
    r"Function properties for (?P<function>\S+)\n"
    r"\s*(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads\n"
    r".*?Used (?P<registers>\d+) registers(?P<rest>[^\n]*)"
)
_SHARED = re.compile(r"(\d+) bytes smem")
_BODY = "\nnamespace {\n"  # begins what is one kernel's own in a source
_KERNEL = re.compile(r"^CUTLASS_OPS_KERNEL\((\w+),", re.MULTILINE)
_ENTRY = re.compile(r"^\.visible \.entry (\w+)\(", re.MULTILINE)


def compile_flags(target: Target) -> dict[str, tuple[str, ...]]:
    """Return the flags of the three steps for a target: ``"device"``, ``"host"`` and ``"link"``.

    They name folders through links that :func:`compile_kernel` makes beside the source. So neither flags nor artifacts
    contain paths of this machine, and equal inputs give equal bytes.
    """
    common = (
        "-std=c++17",
        "-DNDEBUG",  # with assertions, ptxas serialises every wgmma
        "-Iinc/cutlass_ops",
        "-Iinc/cutlass",
        "-Iinc/cutlass_tools",
        "-Iinc/tvm_ffi",
    )
    return {
        "device": (
            *common,
            "-O3",
            "--expt-relaxed-constexpr",
            f"-gencode={target.gencode}",
            "-fatbin",
            "--no-compress",  # sass.py reads the code; 10% larger, but faster to load
            "-Xcudafe=--orig_src_path_name,kernel.cu",  # names of internal symbols contain a hash of this path
            "-Xptxas=-v",
            "-diag-suppress=177",  # unused in device code: only host code refers to it
            *(("-lineinfo",) if env.lineinfo_enabled() else ()),
        ),
        "host": (
            "-xc++",
            *common,
            *(f"-isysteminc/cuda{i}" for i in range(_CUDA_FOLDERS)),
            # A distribution has thousands of libraries: -Os makes a third less code than -O2, and the next two take
            # away 5% of a library.
            "-Os",
            "-fwhole-program",
            "-fno-plt",
            "-fPIC",
            "-fvisibility=hidden",
            "-fvisibility-inlines-hidden",
            "-fpermissive",  # CUTLASS changes the meaning of names within a class
            "-w",
            "-c",
        ),
        "link": (
            "-shared",
            "-Llib",
            "-lcudart",  # PyTorch provides the runtime
            "-ltvm_ffi",
            "-Wl,-s",
            "-Wl,-z,noseparate-code",  # no pages of padding between code and data
            "-Wl,-z,now",  # nothing is left that could be bound later
        ),
    }


def compile_kernel(
    folder: Path,
    source: str,
    library: str,
    target: Target,
    toolchain: Toolchain,
    *,
    timeout: float = COMPILE_TIMEOUT,
    cancel: threading.Event | None = None,
    together: Together | None = None,
) -> Compiled:
    """Compile one rendered kernel into a shared library, and clear what ptxas must not have left in it.

    The folder gets the log, and the links ``inc`` and ``lib``, by which a printed command runs again. ``together`` has
    PTX in which the kernel is one of several.
    """
    run = _prepared(folder, toolchain, timeout, cancel)
    flags = compile_flags(target)
    nvcc, host = str(toolchain.nvcc), str(toolchain.host_compiler)
    host_step = _Step((host, *flags["host"], "-o", _HOST, source), _HOST)
    link_step = _Step((host, _HOST, f"inc/cutlass_ops/{IMAGE}", *flags["link"], "-o", library), library)
    began = time.monotonic()
    if together is None:
        run(ptx_step(source, target, toolchain), host_step)
    else:
        with together.turn:
            run(host_step)
        (folder / _PTX).symlink_to(together.ptx.result())
    own = own_functions(folder / _PTX, folder / source)
    command = (nvcc, f"-ccbin={host}", *flags["device"], f"--entries={own}", "-o", _DEVICE, _PTX)
    log = run(_Step(command, _DEVICE))
    run(link_step)
    built = (folder / library).read_bytes()
    (folder / library).write_bytes(sass.mended(built))
    if not toolchain.unchanged:
        raise ToolchainError(f"{nvcc}, {host} or a part of them was replaced during the compilation: start again")
    return Compiled(time.monotonic() - began, tuple(_resources_used(log)))


@dataclass(frozen=True)
class Together:
    """What kernels share that are compiled in one file."""

    ptx: Future[Path]  # the file from `compile_ptx`
    # Is held by the kernel whose host code is being compiled: one after the other, beside the device code.
    turn: threading.Lock = field(default_factory=threading.Lock)


def beginning(source: str) -> str:
    """Return what a rendered source has before its own kernel: sources that begin alike can be compiled in one file."""
    lines = source.partition(_BODY)[0].splitlines()
    return "\n".join(line for line in lines if line and not line.startswith("//"))


def joined(sources: Sequence[str]) -> str:
    """Return one source of several with the same :func:`beginning`, for device code: each has a namespace."""
    parts = [source.partition(_BODY) for source in sources]
    bodies = [
        f'\nnamespace kernel_{at} {{\n#line {head.count(chr(10)) + 2} "kernel.cu"{body}{rest}}}\n'
        for at, (head, body, rest) in enumerate(parts)
    ]
    return "".join((beginning(sources[0]), *bodies))


def compile_ptx(
    folder: Path, sources: Sequence[str], target: Target, toolchain: Toolchain, cancel: threading.Event | None = None
) -> Path:
    """Compile the device code of several kernels in one file, and return the PTX."""
    run = _prepared(folder, toolchain, COMPILE_TIMEOUT, cancel)
    (folder / "kernel.cu").write_text(joined(sources), encoding="utf-8")
    run(ptx_step("kernel.cu", target, toolchain))
    return folder / _PTX


def _prepared(folder: Path, toolchain: Toolchain, timeout: float, cancel: threading.Event | None) -> _Run:
    """Return what runs compilers in a folder."""
    # nvcc writes its working folder into shell commands.
    remedy = f"set {env.CACHE_DIR.name}, or for a worker TMPDIR, to another folder"
    require_literal(folder.absolute(), "the folder to compile in is", remedy)
    link_inputs(folder, toolchain)
    return _Run(folder, toolchain.path, time.monotonic() + timeout, timeout, cancel)


def ptx_step(source: str, target: Target, toolchain: Toolchain) -> _Step:
    """Return the step that compiles a source's device code as far as PTX."""
    flags = ("-ptx" if flag == "-fatbin" else flag for flag in compile_flags(target)["device"])
    return _Step((str(toolchain.nvcc), f"-ccbin={toolchain.host_compiler}", *flags, "-o", _PTX, source), _PTX)


def own_functions(ptx: Path, source: Path) -> str:
    """Return the functions in PTX that are one source's own, and those of headers, as nvcc takes them."""
    own = set(_KERNEL.findall(source.read_text(encoding="utf-8")))
    there = _ENTRY.findall(ptx.read_text(encoding="utf-8", errors="replace"))
    return ",".join(name for name in there if name in own or name.startswith("cutlass_ops_"))


def link_inputs(folder: Path, toolchain: Toolchain) -> None:
    """Create the links that the flags use, ``inc`` and ``lib``, and the folder ``tmp``."""
    links = {
        "inc/cutlass_ops": resources.include(),
        "inc/cutlass": toolchain.cutlass_dir / "include",
        "inc/cutlass_tools": toolchain.cutlass_dir / "tools" / "util" / "include",
        "inc/tvm_ffi": toolchain.tvm_ffi_dir / "include",
        "lib/libtvm_ffi.so": toolchain.tvm_ffi_dir / "lib" / "libtvm_ffi.so",
    }
    # The host compiler searches /usr/include itself. Naming it would change the search order.
    cuda = [folder for folder in toolchain.include_dirs if folder != Path("/usr/include")]
    links |= {f"inc/cuda{i}": folder for i, folder in enumerate(cuda[:_CUDA_FOLDERS])}
    if toolchain.cudart is not None:
        links["lib/libcudart.so"] = toolchain.cudart
    for name in ("inc", "lib", TEMPORARY):
        (folder / name).mkdir()
    for name, where in links.items():
        (folder / name).symlink_to(where)


@dataclass(frozen=True)
class _Step:
    """One compiler's command and its output file."""

    command: tuple[str, ...]
    result: str

    @property
    def program(self) -> str:
        return Path(self.command[0]).name


@dataclass(frozen=True)
class _Run:
    """Runs steps in a folder until a deadline, and logs their output."""

    folder: Path
    path: str
    deadline: float
    timeout: float
    cancel: threading.Event | None

    def __call__(self, *steps: _Step) -> str:
        """Run steps in parallel and return their output. If one fails, end the others."""
        running: dict[_Step, Program] = {}
        given_up: set[_Step] = set()
        try:
            # ExitStack ends every program, even if a second interrupt comes meanwhile.
            with contextlib.ExitStack() as ends:
                for step in steps:
                    running[step] = self._start(step)
                    ends.callback(_end, step, running[step], given_up)
                self._wait(running)
        finally:
            said = {step: self._said(step) for step in running}
            self._note(said)
        for step, program in running.items():
            reason = None if step in given_up else _failure(step, self.folder, said[step], program.status)
            if reason is not None:
                _require_means(step, self.folder, said[step], program.status)
                raise CompileError(
                    f"{reason}\n  command: cd {shlex.quote(str(self.folder))} && {shlex.join(step.command)}"
                )
        return "".join(said.values())

    def _start(self, step: _Step) -> Program:
        # Temporary files of the compilers are in the folder too, and so are removed with it however this process ends.
        with self._output(step).open("wb") as output:
            try:
                return Program(
                    step.command,
                    cwd=self.folder,
                    env=environment(self.path),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            except OSError as exc:
                raise ToolchainError(f"{step.command[0]} cannot be run: {exc}") from None

    def _wait(self, running: Mapping[_Step, Program]) -> None:
        while None in (states := [program.status for program in running.values()]):
            if any(states):
                return
            if self.cancel is not None and self.cancel.is_set():
                raise CancelledError
            if time.monotonic() > self.deadline:
                late = next(step for step, program in running.items() if program.status is None)
                raise CompileError(f"{late.program} was killed after {self.timeout:.0f} s: {shlex.join(late.command)}")
            time.sleep(_POLL)

    def _note(self, said: Mapping[_Step, str]) -> None:
        # Independent of the locale: compiler output and paths may be any bytes.
        with (self.folder / LOG).open("a", encoding="utf-8", errors="backslashreplace") as log:
            log.writelines(f"$ {shlex.join(step.command)}\n{text}" for step, text in said.items())

    def _output(self, step: _Step) -> Path:
        return self.folder / TEMPORARY / f"{step.result}.log"

    def _said(self, step: _Step) -> str:
        return self._output(step).read_text(encoding="utf-8", errors="replace")


def _end(step: _Step, program: Program, given_up: set[_Step]) -> None:
    if program.end():
        given_up.add(step)


def _failure(step: _Step, folder: Path, log: str, status: int | None) -> str | None:
    if status == 0:
        slow = _SLOW_CODE.search(log)
        if slow:
            return slow[0].strip()
        return None if (folder / step.result).is_file() else f"{step.program} did not create {step.result}"
    match = _ERROR.search(log)
    if match is not None:
        return match[0].strip()[:1000]
    last = log.strip().rpartition("\n")[2]
    return f"{step.program} failed with status {status}" + (f": {last[:1000]}" if last else " and no output")


def _require_means(step: _Step, folder: Path, log: str, status: int | None) -> None:
    """Check that a step did not fail for what this machine lacks at the moment."""
    if _NO_SPACE.search(log):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
    match = _NO_MEANS.search(log)
    if match is not None or (status is not None and -status in _SIGNALS):
        why = match[0].strip()[:1000] if match is not None else f"it was ended by signal {-(status or 0)}"
        raise ToolchainError(
            f"{step.program} could not run to its end: {why}. If memory is short, set {env.JOBS.name} to fewer kernels "
            "at the same time"
        )
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, _NEEDED)
    except OSError as exc:
        if exc.errno in (errno.ENOSPC, errno.EDQUOT):
            raise


def _resources_used(log: str) -> Iterator[dict[str, str | int]]:
    for match in _RESOURCES.finditer(log):
        shared = _SHARED.search(match["rest"])
        yield {
            "function": match["function"],
            "registers": int(match["registers"]),
            "static_shared_memory": int(shared[1]) if shared else 0,
            "stack": int(match["stack"]),
            "spill_stores": int(match["stores"]),
            "spill_loads": int(match["loads"]),
        }
