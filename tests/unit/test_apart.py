"""Kernels are built by a process apart, which ends with this one."""

import contextlib
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fake_toolkit import FakeToolkit, sm80_spec
from processes import WITHOUT_PYTORCH

from cutlass_ops.base.errors import CompileError, MissingKernelError
from cutlass_ops.base.session import Session
from cutlass_ops.compilation import lookup
from cutlass_ops.compilation.apart import Apart, Lost


@pytest.fixture
def toolkit(tmp_path, monkeypatch):
    found = FakeToolkit(tmp_path / "kit")
    monkeypatch.setenv("CUTLASS_OPS_CACHE_DIR", str(tmp_path / "store"))
    monkeypatch.setenv("CUTLASS_OPS_NVCC", str(found.nvcc))
    monkeypatch.setenv("NVCC_CCBIN", str(found.host))
    return found


@pytest.fixture
def process():
    found = Apart(Session())
    yield found
    found.close()


def child(shell):
    """Return the process that a shell supervises, once that has begun."""
    until = time.monotonic() + 300
    while time.monotonic() < until:
        with contextlib.suppress(FileNotFoundError):  # of one that has ended meanwhile
            children = Path(f"/proc/{shell}/task/{shell}/children").read_text().split()
            found = [pid for pid in children if Path(f"/proc/{pid}/cmdline").read_text().startswith(sys.executable)]
            if found:
                return int(*found)
        time.sleep(0.01)
    raise TimeoutError(f"shell {shell} supervises no Python")


def build(process, spec):
    """Build, and find what was built."""
    return lookup.with_key(spec, process.submit(spec, urgent=False).result(timeout=300))


def pids(process):
    return [child(each._program._shell.pid) for each in process._processes.values()]


@pytest.mark.slow
def test_it_builds_into_the_store_of_this_process(toolkit, process, monkeypatch):
    monkeypatch.setenv("CUTLASS_OPS_JOBS", "4")  # no two share a file
    first = build(process, sm80_spec(3))
    assert first.library.is_file()
    assert toolkit.compilations == 1
    # Nothing was compiled here.
    monkeypatch.setattr("cutlass_ops.compilation.builder._compile", lambda *_: pytest.fail("compiled here"))
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda stages: build(process, sm80_spec(stages)), (2, 4, 3)))
    assert len({each.key for each in found}) == 3
    assert found[2].key == first.key
    assert toolkit.compilations == 3
    assert len(pids(process)) == 1


@pytest.mark.slow
def test_its_errors_are_those_of_building_here(toolkit, process, monkeypatch):
    toolkit.does("echo no such register; exit 1")
    with pytest.raises(CompileError, match="no such register"):
        build(process, sm80_spec(3))
    monkeypatch.setenv("CUTLASS_OPS_JIT", "0")
    with pytest.raises(MissingKernelError, match="CUTLASS_OPS_JIT=0"):
        build(process, sm80_spec(3))
    # It was started with other settings, so there are two.
    assert len(pids(process)) == 2


@pytest.mark.slow
def test_closing_ends_it_and_its_compilers(toolkit, process):
    toolkit.does('echo $$ > "$here/pid"; sleep 600')
    asked = process.submit(sm80_spec(3), urgent=False)
    while not (toolkit.root / "pid").exists():
        time.sleep(0.01)
    process.close()
    with pytest.raises(Lost, match="it has ended"):
        asked.result(timeout=300)
    compiler = int((toolkit.root / "pid").read_text())
    while os.path.exists(f"/proc/{compiler}"):
        time.sleep(0.01)


@pytest.mark.slow
def test_if_it_is_killed_what_it_builds_is_lost(toolkit, process):
    toolkit.does("sleep 600")
    asked = process.submit(sm80_spec(3), urgent=True)
    while not toolkit.compilations:
        time.sleep(0.01)
    os.kill(*pids(process), 9)
    with pytest.raises(Lost, match="it has ended"):
        asked.result(timeout=300)
    with pytest.raises(Lost, match="it has ended"):
        process.submit(sm80_spec(3), urgent=True).result(timeout=300)


SCRIPT = """
import os, sys
sys.path.insert(0, "tests/unit")
from fake_toolkit import sm80_spec
from cutlass_ops.base.session import Session
from cutlass_ops.compilation.apart import Apart, Lost
process = Apart(Session())
process.submit(sm80_spec(3), urgent=True)
(other,) = process._processes.values()
print(other._program._shell.pid, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "killed while a fork of it holds the pipe"])
def test_it_ends_with_this_process(toolkit, how):
    toolkit.does("sleep 600")
    fork = "\nif os.fork() == 0:\n    import time; time.sleep(600)\n" if "fork" in how else ""
    script = WITHOUT_PYTORCH + SCRIPT + fork + "import time; time.sleep(600)"
    with subprocess.Popen([sys.executable, "-W", "ignore", "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        while not toolkit.compilations:
            time.sleep(0.01)
        parent.kill()
        while os.path.exists(f"/proc/{pid}") and "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text():
            time.sleep(0.01)


# ---- Kernels that are asked for without waiting ------------------------------------------------------------------


@pytest.mark.slow
def test_what_is_needed_is_built_before_guesses(toolkit, process, monkeypatch):
    monkeypatch.setenv("CUTLASS_OPS_JOBS", "1")
    toolkit.makes((toolkit.root / "library").read_bytes(), before='until [ -f "$here/go" ]; do sleep 0.01; done; ')
    order = []

    def submit(stages, urgent):
        found = process.submit(sm80_spec(stages), urgent=urgent)
        found.add_done_callback(lambda _: order.append((stages, urgent)))
        return found

    first = submit(2, False)
    while not toolkit.compilations:
        time.sleep(0.01)
    others = [submit(3, False), submit(4, False), submit(5, True)]
    process.submit(sm80_spec(4), urgent=True)
    (toolkit.root / "go").touch()
    for each in (first, *others):
        each.result(timeout=300)
    assert [stages for stages, _ in order] == [2, 5, 4, 3]
    assert toolkit.compilations == 3  # the two that are needed share a file


def test_without_a_process_the_future_says_so(process, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/usr/bin/blender")
    with pytest.raises(Lost, match="no Python interpreter"):
        process.submit(sm80_spec(2), urgent=True).result()
