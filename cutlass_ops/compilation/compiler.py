"""Compile a rendered source into a shared library: device code and host code in parallel, then linked.

nvcc compiles the device code. The host compiler compiles the host code directly;
``templates/include/cutlass_ops/halves.h`` explains how it reads CUDA. nvcc alone would compile them one after the other
and take longer for the host code.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import CancelledError
from dataclasses import dataclass
from pathlib import Path

from cutlass_ops.artifacts.compiled import Compiled
from cutlass_ops.base import env, resources, reuse
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

# Maximum number of folders of CUDA headers, for the host compiler. nvcc finds its own.
_CUDA_FOLDERS = 3

# ptxas reports serialised wgmma and ignored setmaxnreg as mere information, but they make kernels several times slower.
_SLOW_CODE = re.compile(r"^.*\(C75(?:08|10|14)\).*$", re.MULTILINE)
_ERROR = re.compile(r"^.*(?:\b(?:error|fatal)\b[^:\n]{0,12}:|undefined reference|/ld: |No space left).*$", re.MULTILINE)
_RESOURCES = re.compile(
    r"Function properties for (?P<function>\S+)\n"
    r"\s*(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads\n"
    r".*?Used (?P<registers>\d+) registers(?P<rest>[^\n]*)"
)
_SHARED = re.compile(r"(\d+) bytes smem")


def compile_flags(target: Target) -> dict[str, tuple[str, ...]]:
    """Return the flags of the three steps for a target: ``"device"``, ``"host"`` and ``"link"``.

    The flags are the same on every machine: they name folders through links that :func:`compile_kernel` makes beside
    the source. So neither flags nor artifacts contain paths of this machine, and equal inputs give equal bytes.
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
) -> Compiled:
    """Compile one rendered kernel into a shared library, and clear what ptxas must not have left in it.

    Parameters
    ----------
    folder : Path
        Folder to work in. Beside the library it gets the log, the device and host code, ``tmp``, and the links ``inc``
        and ``lib``, which are needed to run a printed command again.
    source, library : str
        File names of the source and the result in that folder.
    target : Target
        Machine-code target.
    toolchain : Toolchain
        From :func:`cutlass_ops.compilation.toolchain.find_toolchain`.
    timeout : float
        Seconds until the compilers are killed.
    cancel : threading.Event, optional
        Set it to end the compilers.

    Raises
    ------
    CompileError
        If a compiler fails, takes too long, or reports a severe loss of speed. The message has its first error and the
        command.
    CancelledError
        If ``cancel`` was set.
    ToolchainError
        If a compiler cannot be started or was replaced meanwhile, or a shell would change the folder's path.
    """
    # nvcc writes its working folder into shell commands.
    remedy = f"set {env.CACHE_DIR.name}, or for a worker TMPDIR, to another folder"
    require_literal(folder.absolute(), "the folder to compile in is", remedy)
    link_inputs(folder, toolchain)
    flags = compile_flags(target)
    nvcc, host = str(toolchain.nvcc), str(toolchain.host_compiler)
    run = _Run(folder, toolchain.path, time.monotonic() + timeout, timeout, cancel)
    device_step = _Step((nvcc, f"-ccbin={host}", *flags["device"], "-o", _DEVICE, source), _DEVICE)
    host_step = _Step((host, *flags["host"], "-o", _HOST, source), _HOST)
    link_step = _Step((host, _HOST, f"inc/cutlass_ops/{IMAGE}", *flags["link"], "-o", library), library)
    began = time.monotonic()
    log = run(device_step, host_step)
    run(link_step)
    built = (folder / library).read_bytes()
    (folder / library).write_bytes(reuse.mended(built))
    if not toolchain.unchanged:
        raise ToolchainError(f"{nvcc}, {host} or a part of them was replaced during the compilation: start again")
    return Compiled(time.monotonic() - began, tuple(_resources_used(log)))


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
