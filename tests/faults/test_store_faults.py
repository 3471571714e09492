"""What a store is after the worst: killed builders, full disks, crowds, other versions, wrong clocks."""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import crowd
import pytest
from crowd import LIBRARY, SPECS, left_over, visible
from fake_toolkit import HMMA, FakeToolkit, library, sm80_spec

from cutlass_ops.artifacts import entry as entry_module
from cutlass_ops.artifacts import store as store_module
from cutlass_ops.artifacts.store import KernelStore
from cutlass_ops.compilation.builder import build_artifact, build_many

KILLS = 200


# ---- Killed --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_killed_at_200_random_moments(tmp_path, processes):
    """After kill -9, whatever is visible is whole, and the next call has all kernels."""
    toolchain = crowd.slow_kit(tmp_path / "kit").find()
    stores = [KernelStore(tmp_path / f"store{i}") for i in range(4)]
    # The second time nothing has to be imported first.
    for _ in range(2):
        stores[0].clean()
        child = processes.Process(target=crowd.build_all, args=(stores[0].root, toolchain))
        began = time.monotonic()
        child.start()
        child.join()
        whole = time.monotonic() - began
        assert len(visible(stores[0])) == len(SPECS)
    stores[0].clean()
    # Builders mostly wait.
    with ThreadPoolExecutor(len(stores)) as pool:
        seen = set().union(*pool.map(lambda store: _kill_builders(store, toolchain, processes, whole), stores))
    assert len(seen) > 1  # they were killed at different steps
    time.sleep(0.3)  # for the compilers whose builders were killed
    for store in stores:
        build_many(SPECS, store=store, toolchain=toolchain)
        assert visible(store) == [LIBRARY] * len(SPECS)
        assert left_over(store) == []


def _kill_builders(store, toolchain, processes, whole):
    """Return how many kernels were found after each of 50 kills."""
    rng, seen = random.Random(store.root.name), set()
    longest = whole  # a builder's time, which other work on the machine may change at any moment
    for kill in range(KILLS // 4):
        # Every other time all of the builder's group dies at once. Its compilers are killed a moment later.
        group = kill % 2 == 0
        target = crowd.build_all_in_a_session_of_its_own if group else crowd.build_all
        child = processes.Process(target=target, args=(store.root, toolchain))
        child.start()
        time.sleep(rng.uniform(0, longest))
        if group:
            # It may end at any of these steps, or not have its own group yet.
            with contextlib.suppress(ProcessLookupError):
                if os.getpgid(child.pid) == child.pid:
                    os.killpg(child.pid, signal.SIGKILL)
        child.kill()
        child.join()
        found = visible(store)
        assert set(found) <= {LIBRARY}
        seen.add(len(found))
        if len(found) == len(SPECS):
            store.clean()
        # Later where it was killed too early, and earlier where it was killed too late.
        longest *= 0.7 if len(found) == len(SPECS) else 1.15
        if kill % 20 == 19:
            made = build_many(SPECS, store=store, toolchain=toolchain)
            assert [artifact.read_library() for artifact in made] == [LIBRARY] * len(SPECS)
            store.clean()
    return seen


# ---- Crowds --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_64_processes_compile_once(store, toolkit, processes):
    toolkit.makes(library(HMMA), before="sleep 1\n")
    toolchain = toolkit.find()
    with ProcessPoolExecutor(64, mp_context=processes) as pool:
        futures = [pool.submit(crowd.build_one, store.root, toolchain) for _ in range(64)]
        assert len({f.result() for f in futures}) == 1
    assert toolkit.compilations == 1
    assert left_over(store) == []


def test_locks_whose_files_come_and_go_have_one_holder(tmp_path, processes):
    number = tmp_path / "number"
    number.write_text("0")
    with ProcessPoolExecutor(4, mp_context=processes) as pool:
        for future in [pool.submit(crowd.count_up, number, 30) for _ in range(4)]:
            future.result()
    assert number.read_text() == "120"
    assert list(tmp_path.iterdir()) == [number]


@pytest.mark.slow
def test_a_store_that_is_too_small_for_all_costs_nothing_but_time(store, tmp_path, processes, monkeypatch):
    """Kernels are removed while others look them up, read and publish them: nobody sees anything but whole ones."""
    kit = FakeToolkit(tmp_path / "kit")
    kit.makes(LIBRARY)
    toolchain = kit.find()
    one = build_artifact(SPECS[0], source="// 0", store=store, toolchain=toolchain)
    limit = 3 * sum(path.stat().st_size for path in one.folder.iterdir()) + 1000
    with ProcessPoolExecutor(4, mp_context=processes) as pool:
        futures = [pool.submit(crowd.build_some, store.root, toolchain, limit, seed) for seed in range(4)]
        assert [future.result() for future in futures] == [60] * 4
    assert kit.compilations > 8  # some were built again
    assert set(visible(store)) == {LIBRARY}
    monkeypatch.setenv("CUTLASS_OPS_CACHE_SIZE", str(limit))
    build_artifact(SPECS[0], source="// one more", store=store, toolchain=toolchain)
    assert store.size() <= limit
    assert left_over(store) == []
    assert list((store.root / "locks").iterdir()) == []


# ---- Disks ---------------------------------------------------------------------------------------------------------

_FULL = """
import sys
from pathlib import Path
from crowd import SPECS
from cutlass_ops.compilation.builder import build_many
from cutlass_ops.base.errors import CutlassOpsError
from cutlass_ops.artifacts.store import KernelStore
from cutlass_ops.compilation.toolchain import _examine

kit, store = Path(sys.argv[1]), KernelStore(Path(sys.argv[2]) / "store")
toolchain = _examine(kit / "bin" / "nvcc", "test", kit / "host" / "g++", None)
(first,) = build_many(SPECS[:1], store=store, toolchain=toolchain)
filler = Path(sys.argv[2], "filler")
try:
    with filler.open("wb") as file:
        while True:
            file.write(bytes(1024))
            file.flush()
except OSError:
    pass
try:
    build_many(SPECS, store=store, toolchain=toolchain)
except CutlassOpsError as exc:
    print(type(exc).__name__, str(exc).replace(chr(10), " "))
print(len(list(store.entries())), list(store.entries()) == [first])
filler.unlink()
print(len(build_many(SPECS, store=store, toolchain=toolchain)))
"""


def _may_mount():
    command = ["unshare", "--user", "--map-root-user", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"]
    return shutil.which("unshare") is not None and subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(not _may_mount(), reason="no file system may be mounted here")
def test_a_disk_that_is_full(tmp_path):
    kit = FakeToolkit(tmp_path / "kit")
    disk = tmp_path / "disk"
    disk.mkdir()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    script = f'mount -t tmpfs -o size=256k none "$1" && exec "$0" -c "$2" "{kit.root}" "$1"'
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, sys.executable, disk, _FULL]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    error, entries, after = done.stdout.splitlines()
    assert error.startswith("StoreError no space is left")
    assert entries == "1 True"
    assert after == str(len(SPECS))


# ---- Clocks --------------------------------------------------------------------------------------------------------


# ---- Versions ------------------------------------------------------------------------------------------------------


def test_two_formats_of_the_store_share_a_folder(store, toolkit, monkeypatch):
    """Neither sees, changes or removes what is the other's."""
    toolchain = toolkit.find()
    ours = build_artifact(sm80_spec(), source="source", store=store, toolchain=toolchain)
    with monkeypatch.context() as patch:
        for module in (entry_module, store_module):
            patch.setattr(module, "FORMAT", 99)
        assert list(store.entries()) == []
        theirs = build_artifact(sm80_spec(), source="source", store=store, toolchain=toolchain)
        assert theirs.folder.parts[-3] == "v99"
    assert list(store.entries()) == [ours]
    assert store.clean() == 1
    with monkeypatch.context() as patch:
        for module in (entry_module, store_module):
            patch.setattr(module, "FORMAT", 99)
        assert list(store.entries()) == [theirs]
        assert theirs.read_library()
