"""Compilations by other processes: nothing that is finished is lost, and what is lost is done again."""

import logging
import os
import signal
import threading
import time
from concurrent.futures import ProcessPoolExecutor

import crowd
import pytest
from distributed import Client, LocalCluster
from fake_toolkit import HMMA, FakeToolkit, library, sm80_spec
from processes import ended

from cutlass_ops.base import executors
from cutlass_ops.base.errors import CompileError, ToolchainError
from cutlass_ops.compilation.builder import build_many

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


@pytest.mark.slow
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
def test_a_compiler_error_comes_back_in_words(kit, store, pool):
    kit.does("echo 'kernel.cu(1): error: no such thing'; exit 1")
    with pytest.raises(CompileError, match="no such thing") as error:
        build_many(SPECS[:1], store=store, executor=pool)
    kept = next((store.root / "failed").iterdir())
    assert f"source: {kept}/kernel.cu" in str(error.value)
    assert list(store.entries()) == []


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_worker_that_was_told_to_end_begins_no_job(processes, tmp_path):
    worker = processes.Process(target=crowd.begin_a_job_late, args=(tmp_path,))
    worker.start()
    worker.join()
    assert worker.exitcode == 1
    assert [path.name for path in tmp_path.iterdir()] == ["told"]


def test_no_scheduler_is_an_error_in_words(monkeypatch):
    monkeypatch.setattr(executors, "_PATIENCE", 0.2)
    with pytest.raises(ToolchainError, match="no Dask scheduler answers at 127"), executors.named("dask://127.0.0.1:1"):
        pass
