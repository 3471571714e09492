"""Compilations by other processes: nothing that is finished is lost, and what is lost is done again."""

import logging
import os
import signal
import threading
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import crowd
import pytest
from distributed import Client, LocalCluster
from fake_toolkit import HMMA, FakeToolkit, library, sm80_spec
from processes import ended
from signatures import signature

from cutlass_ops.artifacts.store import KernelStore
from cutlass_ops.base import executors
from cutlass_ops.base.errors import CompileError, ToolchainError
from cutlass_ops.choose import tables
from cutlass_ops.choose.tables import Measured
from cutlass_ops.compilation import builder
from cutlass_ops.compilation.builder import build_many
from cutlass_ops.declare.device import Device
from cutlass_ops.declare.problem import Problem
from cutlass_ops.ship import packing, shipping
from cutlass_ops.tuner import tuning
from cutlass_ops.tuner.measuring import Outcome
from cutlass_ops.tuner.tuning import Effort

SPECS = [sm80_spec(stages, dtype) for dtype in ("bf16", "f16") for stages in (2, 3, 4)]


@pytest.fixture
def kit(tmp_path, monkeypatch, session):
    """Compilers that this process and all that it starts find."""
    kit = FakeToolkit(tmp_path / "kit")
    monkeypatch.setenv("CUTLASS_OPS_NVCC", str(kit.nvcc))
    monkeypatch.setenv("NVCC_CCBIN", str(kit.host))
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    return kit


def compiled_by(kit):
    """For each compilation that ended, the source's folder; a worker's is in a temporary folder of its own."""
    return (kit.root / "ended").read_text().splitlines() if (kit.root / "ended").exists() else []


def slowly(kit, seconds):
    kit.makes(library(HMMA), before=f'sleep {seconds}; pwd >> "$here/ended"\n')


def _like(environment):
    # The server that processes are forked from was started in another environment.
    os.environ.update(environment)


def workers(processes, count, **changed):
    environment = {**os.environ, **changed}
    return ProcessPoolExecutor(count, mp_context=processes, initializer=_like, initargs=(environment,))


@pytest.fixture
def pool(processes, kit):
    with workers(processes, 2) as pool:
        yield pool


def test_an_executor_compiles_and_the_store_stays_here(kit, store, pool):
    slowly(kit, 0)
    made = build_many(SPECS, store=store, executor=pool)
    assert [a.spec for a in made] == SPECS
    assert kit.compilations == len(SPECS)
    assert not any(str(store.root) in folder for folder in compiled_by(kit))
    assert [a.manifest["resources"][0]["registers"] for a in made] == [168] * len(SPECS)
    assert build_many(SPECS, store=store, executor=pool) == made
    assert kit.compilations == len(SPECS)


@pytest.mark.slow
def test_a_bundle_is_the_same_whoever_compiled(kit, tmp_path, pool):
    wanted = shipping.Catalogue(specs=tuple(SPECS))
    here = packing.pack(wanted, store=KernelStore(tmp_path / "a"))
    there = packing.pack(wanted, store=KernelStore(tmp_path / "b"), executor=pool)
    assert here.manifest.to_bytes() == there.manifest.to_bytes()
    assert here.files == there.files


@pytest.mark.slow
def test_an_executor_compiles_what_is_tuned(kit, pool, tmp_path, monkeypatch):
    monkeypatch.setenv("CUTLASS_OPS_CACHE_DIR", str(tmp_path / "cache"))
    a100 = Device((8, 0), 108, "NVIDIA A100-SXM4-80GB")
    wanted, problems = signature(), [Problem(16, 1024, 1024), Problem(512, 1024, 1024)]
    effort = Effort(kernels=4, candidates=3)
    seen = []

    def measure(signature, problem, kernels):
        seen.append(problem)
        assert all((folder / "kernel.so").is_file() for folder in kernels.values())
        ranked = tuple(Measured(e.config, 10.0 + place, place / 10, e.order) for place, e in enumerate(kernels))
        return Outcome(ranked, {"eager": 99.0}, {})

    tasks = tuning.plan({wanted: problems}, a100, effort)
    place = tuning.Place(a100.name, a100, tmp_path / "tables")
    report = tuning.run(tasks, place, effort, measure=measure, executor=pool)
    assert (report.measured, report.failed, sorted(seen)) == (2, {}, problems)
    assert len(tables.load(place.path(wanted)).points) == 2
    assert kit.compilations == len({e.config for task in tasks for e in task.entrants})
    assert not any(str(tmp_path / "cache") in folder for folder in compiled_by(kit))


def test_any_executor(kit, store):
    with ThreadPoolExecutor(2) as pool:
        assert len(build_many(SPECS, store=store, executor=pool)) == len(SPECS)


def test_a_compiler_error_comes_back_in_words(kit, store, pool):
    kit.does("echo 'kernel.cu(1): error: no such thing'; exit 1")
    with pytest.raises(CompileError, match="no such thing") as error:
        build_many(SPECS[:1], store=store, executor=pool)
    kept = next((store.root / "failed").iterdir())
    assert f"source: {kept}/kernel.cu" in str(error.value)
    assert list(store.entries()) == []


def test_a_worker_with_another_compiler_is_refused(kit, store, tmp_path, processes):
    other = FakeToolkit(tmp_path / "other")
    other.says_version("13.9.1")
    with (
        workers(processes, 1, CUTLASS_OPS_NVCC=str(other.nvcc)) as pool,
        pytest.raises(ToolchainError, match=r"its toolchain differ.*13\.9\.1"),
    ):
        build_many(SPECS[:1], store=store, executor=pool)
    assert other.compilations == 0
    assert list(store.entries()) == []


@pytest.mark.slow
def test_a_pool_that_breaks_loses_nothing(kit, store, processes, caplog):
    """A dead worker breaks a whole ProcessPoolExecutor: what was finished is stored, the rest is compiled here."""
    slowly(kit, 0.5)
    with workers(processes, 2) as pool, caplog.at_level(logging.WARNING, "cutlass_ops"):

        def kill_one():
            while len(list(store.entries())) < 2:
                time.sleep(0.02)
            os.kill(next(iter(pool._processes)), signal.SIGKILL)

        killer = threading.Thread(target=kill_one, daemon=True)
        killer.start()
        made = build_many(SPECS, store=store, executor=pool)
        killer.join()
    assert [a.spec for a in made] == SPECS
    assert "locally: the executor lost it" in caplog.text
    assert len(list(store.entries())) == len(SPECS)
    # Two were under way at most when the worker died.
    assert kit.compilations <= len(SPECS) + 2


@pytest.fixture
def cluster(kit):
    with LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, silence_logs=logging.CRITICAL
    ) as cluster:
        yield cluster


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_dask_worker_killed_half_way(kit, store, cluster):
    slowly(kit, 1)
    address = cluster.scheduler_address.removeprefix("tcp://")
    with Client(cluster) as client:
        pids = list(client.run(os.getpid).values())
    killed = []

    def kill_one():
        while len(list(store.entries())) < 2:
            time.sleep(0.05)
        killed.append(len(list(store.entries())))
        os.kill(pids[0], signal.SIGKILL)

    killer = threading.Thread(target=kill_one, daemon=True)
    killer.start()
    with executors.named(f"dask://{address}") as executor:
        made = build_many(SPECS, store=store, executor=executor)
    killer.join()
    assert killed[0] < len(SPECS)
    assert [a.spec for a in made] == SPECS
    assert len(list(store.entries())) == len(SPECS)
    # Nothing that was stored was compiled again: what the killed worker had in hand at most.
    assert kit.compilations <= len(SPECS) + 2
    assert not any(str(store.root) in folder for folder in compiled_by(kit))


@pytest.mark.filterwarnings("default")
def test_a_cluster_without_workers_is_an_error_in_the_end(kit, store, monkeypatch):
    monkeypatch.setenv("CUTLASS_OPS_EXECUTOR_TIMEOUT", "0.5")
    with LocalCluster(n_workers=0, processes=False, dashboard_address=None, silence_logs=logging.CRITICAL) as cluster:
        address = cluster.scheduler_address.removeprefix("tcp://")
        if not address[:1].isdigit():
            address = cluster.scheduler.address
        with (
            Client(cluster) as client,
            client.get_executor() as executor,
            pytest.raises(ToolchainError, match="6 are left"),
        ):
            build_many(SPECS, store=store, executor=executor)
    assert list(store.entries()) == []


@pytest.mark.parametrize("text", ["", "dask", "dask://x", "dask://a:1/b", "processes:0", "threads:2", "http://x:1"])
def test_what_is_no_executor(text):
    with pytest.raises(ValueError, match="is not an executor: write processes"), executors.named(text):
        pass


@pytest.mark.slow
def test_processes_by_name(kit, store):
    with executors.named("processes:2") as pool:
        assert isinstance(pool, ProcessPoolExecutor)
        assert len(build_many(SPECS[:2], store=store, executor=pool)) == 2
    assert Path(store.root).is_dir()
    assert builder._at_once(None, None) >= 1


@pytest.mark.slow
@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_ends_local_processes_and_their_compilers(kit, store, tmp_path, monkeypatch):
    """Whatever is queued: no compiler goes on, and no folder of a worker stays."""
    kit.does('echo $$ >> "$here/pids"; exec sleep 600')
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    main, pids = threading.main_thread().ident, kit.root / "pids"

    def interrupt():
        while not pids.exists() or len(pids.read_text().split()) < 2:
            time.sleep(0.02)
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    with pytest.raises(KeyboardInterrupt), executors.named("processes:2") as pool:
        build_many(SPECS, store=store, executor=pool)
    thread.join()
    assert all(ended(int(pid)) for pid in pids.read_text().split())
    assert [path for path in (tmp_path / "tmp").iterdir() if path.name.startswith("cutlass_ops.")] == []
    assert list(store.entries()) == []


def test_a_worker_that_was_told_to_end_begins_no_job(processes, tmp_path):
    worker = processes.Process(target=crowd.begin_a_job_late, args=(tmp_path,))
    worker.start()
    worker.join()
    assert worker.exitcode == 1
    assert [path.name for path in tmp_path.iterdir()] == ["told"]


def test_workers_that_do_not_listen_are_killed(processes, monkeypatch):
    monkeypatch.setattr(executors, "_PATIENCE", 0.2)
    monkeypatch.setattr(executors, "_PAUSE", 0.05)
    deaf = processes.Event()
    worker = processes.Process(target=crowd.listen_to_nobody, args=(deaf,))
    worker.start()
    deaf.wait()
    executors._end({worker})
    assert worker.exitcode == -signal.SIGKILL


def test_no_scheduler_is_an_error_in_words(monkeypatch):
    monkeypatch.setattr(executors, "_PATIENCE", 0.2)
    with pytest.raises(ToolchainError, match="no Dask scheduler answers at 127"), executors.named("dask://127.0.0.1:1"):
        pass
