import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import CancelledError, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import forkserver
from pathlib import Path

import pytest
from fake_toolkit import FFMA, HMMA, STALE_FLAG, FakeToolkit, library, sm80_spec, sm90_spec
from processes import WITHOUT_PYTORCH

from cutlass_ops.artifacts.store import KernelStore
from cutlass_ops.base import sass
from cutlass_ops.base.errors import CompileError, MissingKernelError, StoreError, ToolchainError
from cutlass_ops.compilation import identity, remote
from cutlass_ops.compilation.builder import build_artifact, build_many, building
from cutlass_ops.compilation.toolchain import Toolchain
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.kinds import render

SPEC = sm80_spec()
SPECS = [sm80_spec(stages) for stages in (2, 3, 4, 5)]


@pytest.fixture(autouse=True)
def _no_rendering(monkeypatch):
    monkeypatch.setattr(render, "render", lambda spec: f"// {spec.slug}\n")
    monkeypatch.setenv("CUTLASS_OPS_PROGRESS", "0")
    monkeypatch.delenv("CUTLASS_OPS_JIT", raising=False)


@pytest.fixture
def toolkit(tmp_path):
    return FakeToolkit(tmp_path / "toolkit")


@pytest.fixture
def toolchain(toolkit):
    return toolkit.find()


@pytest.fixture
def store(tmp_path):
    return KernelStore(tmp_path / "store")


@pytest.fixture(scope="session")
def processes():
    """Fresh processes in no time, and not by forking this one, which has threads."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", __name__])
    with pytest.MonkeyPatch.context() as patch:
        # The server does not take over sys.path, and would skip what it cannot import.
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        forkserver.ensure_running()
    return context


def build_here(spec: KernelSpec, root: Path, toolchain: Toolchain) -> str:
    return build_artifact(spec, source="source", store=KernelStore(root), toolchain=toolchain).sha256


def left_over(store: KernelStore) -> list[str]:
    return [p.name for folder in ("tmp", "failed") for p in (store.root / folder).glob("*")]


# ---- One kernel ----


def test_a_kernel_is_compiled_once(store, toolkit, toolchain):
    first = build_artifact(SPEC, store=store, toolchain=toolchain)
    again = build_artifact(SPEC, store=store, toolchain=toolchain)
    assert first == again == store.lookup(first.key)
    assert toolkit.compilations == 1
    assert first.source.read_text() == f"// {SPEC.slug}\n"
    assert first.manifest["sass"] == {"HMMA": 2}
    assert first.manifest["resources"][0]["registers"] == 168
    assert left_over(store) == []


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("log", "kind", "message"),
    [
        ("ld: final link failed: No space left on device", StoreError, "no space is left in the kernel store"),
        ("cicc: Disk quota exceeded", StoreError, "no space is left in the kernel store"),
        ("nvcc error   : 'ptxas' died due to signal 9 (Kill signal)", ToolchainError, "could not run to its end"),
    ],
)
def test_what_the_machine_lacks_leaves_no_failure_and_is_tried_again(store, toolkit, toolchain, log, kind, message):
    good = (toolkit.root / "behaviour").read_text()
    toolkit.does(f'echo "{log}"; exit 1')
    for build in (build_artifact, lambda spec, **more: build_many([spec, SPECS[1]], **more)):
        with pytest.raises(kind, match=message):
            build(SPEC, store=store, toolchain=toolchain)
    assert left_over(store) == []
    toolkit.does(good)
    assert build_artifact(SPEC, store=store, toolchain=toolchain)


@pytest.mark.sample(5)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_store_that_is_deleted_during_a_build(store, toolkit, toolchain, caplog, when, times):
    once = f'[ $(wc -l < "$here/count") -gt {times} ] || rm -rf {store.root}\n'
    if when == "before":
        toolkit.makes(library(HMMA), before=once)
    else:
        toolkit.does((toolkit.root / "behaviour").read_text() + once)
    artifact = build_artifact(SPEC, store=store, toolchain=toolchain)
    assert toolkit.compilations == times + 1
    assert store.lookup(artifact.key) == artifact
    assert caplog.text.count(f"{store.root} was deleted while {SPEC.slug} was being added: adding it again") == times
    assert left_over(store) == []


def test_a_failure_shows_the_error_and_keeps_source_and_log(store, toolkit, toolchain):
    toolkit.does('echo "kernel.cu(7): error: something"; exit 1')
    with pytest.raises(CompileError) as caught:
        build_artifact(SPEC, store=store, toolchain=toolchain)
    (kept,) = (store.root / "failed").iterdir()
    title, command, source, log = str(caught.value).split("\n")
    assert title == f"{SPEC.slug}: kernel.cu(7): error: something"
    assert command.startswith(f"  command: cd {kept} && {toolkit.nvcc} ")
    assert source == f"  source: {kept}/kernel.cu"
    assert log == f"  log: {kept}/compile.log"
    assert Path(source.split()[1]).read_text() == f"// {SPEC.slug}\n"
    assert "something" in Path(log.split()[1]).read_text()
    assert (kept / "inc" / "cutlass" / "cutlass" / "cutlass.h").exists()
    assert list(store.entries()) == []
    toolkit.makes(library(HMMA))
    assert build_artifact(SPEC, store=store, toolchain=toolchain)


@pytest.mark.parametrize("spec", [SPEC, sm90_spec()])
def test_a_kernel_without_tensor_cores_is_not_published(store, toolkit, toolchain, spec):
    toolkit.makes(library(FFMA))
    with pytest.raises(CompileError, match=r"holds no (HMMA|HGMMA and no UTMALDG) instruction"):
        build_artifact(spec, store=store, toolchain=toolchain)
    assert list(store.entries()) == []


@pytest.mark.parametrize("wrong", [{"search": {29: "/opt/lib"}}, {"needed": ("libopt.so",)}])
def test_a_library_that_has_others_loaded_is_not_published(store, toolkit, toolchain, wrong):
    toolkit.makes(library(HMMA, **wrong))
    with pytest.raises(CompileError, match=r"'/opt/lib' \(RPATH or RUNPATH\)|needs libopt\.so") as caught:
        build_artifact(sm80_spec(), source="source", store=store, toolchain=toolchain)
    assert f"source: {store.root}/failed/" in str(caught.value)
    assert list(store.entries()) == []


def test_cancelling_leaves_nothing(store, toolkit, toolchain):
    toolkit.does("sleep 600")
    cancel = threading.Event()
    threading.Timer(0.2, cancel.set).start()
    with pytest.raises(CancelledError):
        build_artifact(SPEC, store=store, toolchain=toolchain, cancel=cancel)
    assert left_over(store) == []


# ---- Compilation switched off ----


def test_frozen_uses_what_is_there_whoever_compiled_it(store, toolchain, monkeypatch):
    artifact = build_artifact(SPEC, store=store, toolchain=toolchain)
    monkeypatch.setenv("CUTLASS_OPS_JIT", "0")
    monkeypatch.setattr(identity, "find_toolchain", None)  # and without looking for a compiler
    assert build_artifact(SPEC, store=store) == artifact
    assert build_many([SPEC, SPEC], store=store) == [artifact, artifact]


def test_frozen_names_what_is_missing_and_the_command(store, monkeypatch):
    monkeypatch.setenv("CUTLASS_OPS_JIT", "0")
    for use in (build_artifact, lambda spec, **more: build_many([spec], **more)):
        with pytest.raises(MissingKernelError) as caught:
            use(SPEC, store=store)
        text = str(caught.value)
        assert SPEC.slug in text
        assert "python -m cutlass_ops build SPEC.json" in text
        assert KernelSpec.from_json(json.loads(text[text.index("{") :])) == SPEC


# ---- Many kernels ----


def test_many_come_back_in_order_and_once_each(store, toolkit, toolchain):
    specs = [SPECS[1], SPECS[0], SPECS[1], SPECS[2]]
    artifacts = build_many(specs, jobs=2, store=store, toolchain=toolchain)
    assert [a.spec for a in artifacts] == specs
    assert toolkit.compilations == 3
    assert build_many(specs, store=store, toolchain=toolchain) == artifacts
    assert build_many([], store=store, toolchain=toolchain) == []
    assert toolkit.compilations == 3


def test_one_failure_does_not_stop_the_others(store, toolkit, toolchain):
    toolkit.makes(library(HMMA), before=f'if grep -q {SPECS[1].slug} kernel.cu; then echo "x: error: y"; exit 1; fi\n')
    with pytest.raises(CompileError, match=f"^{SPECS[1].slug}: x: error: y"):
        build_many(SPECS, jobs=2, store=store, toolchain=toolchain)
    assert len(list(store.entries())) == 3


def test_several_failures_are_all_named(store, toolkit, toolchain):
    toolkit.does('echo "x: error: y"; exit 1')
    with pytest.raises(CompileError) as caught:
        build_many(SPECS, jobs=2, store=store, toolchain=toolchain)
    assert str(caught.value).startswith(f"4 of 4 kernels cannot be compiled. First: {SPECS[0].slug}: x: error: y")
    assert all(spec.slug in str(caught.value) for spec in SPECS)


def test_an_error_of_the_store_stops_all(store, toolkit, toolchain, monkeypatch):
    def fail(*_args):
        raise StoreError("full")

    monkeypatch.setattr(KernelStore, "publish", fail)
    toolkit.makes(library(HMMA), before=f"if grep -vq {SPECS[0].slug} kernel.cu; then sleep 600; fi\n")
    with pytest.raises(StoreError, match="full"):
        build_many(SPECS, jobs=4, store=store, toolchain=toolchain)
    assert left_over(store) == []


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_ends_everything_at_once(store, toolkit, toolchain):
    toolkit.does('sleep 600; touch "$here/ended"')
    main = threading.main_thread().ident

    def interrupt():
        while toolkit.compilations < 2:
            time.sleep(0.01)
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        build_many(SPECS, jobs=2, store=store, toolchain=toolchain)
    thread.join()
    assert not (toolkit.root / "ended").exists()
    assert toolkit.compilations == 2
    assert left_over(store) == []


# ---- Executors ----


@pytest.fixture
def found(toolkit, monkeypatch):
    """Have whatever compiles find the toolkit."""
    monkeypatch.setattr(remote, "find_toolchain", toolkit.find)
    monkeypatch.setattr(identity, "find_toolchain", toolkit.find)


class Given(Executor):
    """Gives futures that nobody else knows of."""

    def __init__(self, futures):
        self.left = list(futures)
        self.given = []

    def submit(self, function, *args):
        self.given.append(self.left.pop(0))
        return self.given[-1]


def failed(error):
    future = Future()
    future.set_exception(error)
    return future


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    "future", [Future(), failed(SystemExit()), failed(KeyboardInterrupt()), failed(CancelledError()), failed(OSError())]
)
@pytest.mark.parametrize("many", [True, False])
def test_whatever_an_executor_loses_is_compiled_here(store, toolkit, toolchain, future, many):
    if not future.done():
        future.cancel()  # and nobody is notified
    executor = Given([future])
    if many:
        assert build_many([SPEC], store=store, toolchain=toolchain, executor=executor)[0].spec == SPEC
    else:
        assert build_artifact(SPEC, store=store, toolchain=toolchain, executor=executor).spec == SPEC
    assert toolkit.compilations == 1


def test_an_executor_that_takes_no_more(store, toolkit, toolchain, caplog):
    pool = ThreadPoolExecutor(1)
    pool.shutdown()
    assert len(build_many(SPECS, store=store, toolchain=toolchain, executor=pool)) == len(SPECS)
    assert "the executor takes no more jobs" in caplog.text


def test_an_executor_that_gives_nothing_back_is_an_error(store, toolkit, toolchain, monkeypatch):
    monkeypatch.setenv("CUTLASS_OPS_EXECUTOR_TIMEOUT", "0.2")
    executor = Given([Future() for _ in SPECS])
    with pytest.raises(ToolchainError) as caught:
        build_many(SPECS, store=store, toolchain=toolchain, executor=executor)
    text = str(caught.value)
    assert "the executor has returned no kernel for 0.2 s, and 4 are left" in text
    assert "CUTLASS_OPS_EXECUTOR_TIMEOUT" in text
    assert all(spec.slug in text for spec in SPECS)
    assert all(future.cancelled() for future in executor.given)
    assert left_over(store) == []
    assert toolkit.compilations == 0


@pytest.mark.parametrize("text", ["0", "-1", "soon", "nan"])
def test_a_wrong_deadline_is_said_at_once(store, toolkit, toolchain, monkeypatch, text):
    monkeypatch.setenv("CUTLASS_OPS_EXECUTOR_TIMEOUT", text)
    with pytest.raises(ValueError, match="CUTLASS_OPS_EXECUTOR_TIMEOUT must be a positive number of seconds"):
        build_many(SPECS, store=store, toolchain=toolchain, executor=Given([]))


# ---- Removed from the store ----


@pytest.mark.slow
def test_what_is_removed_before_it_is_read_is_built_again(store, toolkit, toolchain):
    fresh = build_artifact(SPEC, store=store, toolchain=toolchain)
    stored = build_artifact(SPEC, store=store, toolchain=toolchain)
    (many,) = build_many([SPEC], store=store, toolchain=toolchain)
    wanted = fresh.read_library()
    for artifact in (fresh, stored, many):
        before = toolkit.compilations
        store.clean()
        assert artifact.read_library() == wanted
        assert artifact.read_source().decode() == f"// {SPEC.slug}\n"
        store.clean()
        assert artifact.present() == store.lookup(artifact.key)
        assert toolkit.compilations == before + 2
        os.utime(artifact.folder, (0, 0))
        assert artifact.present() is artifact
        assert artifact.folder.stat().st_mtime > 0  # the last to be removed


# ---- Many processes ----


def _as_nobody(root: Path, toolchain: Toolchain) -> str:
    if os.geteuid() == 0:
        os.setegid(65534)
        os.seteuid(65534)
    try:
        found = build_here(SPEC, root, toolchain)
    except StoreError as exc:
        return str(exc)
    return found


@pytest.mark.slow
def test_a_read_only_store(toolkit, processes):
    # Root may write anything, so root's part is played by nobody; who cannot enter root's temporary folders.
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        kit = FakeToolkit(Path(folder, "kit"))
        root = Path(folder, "store")
        artifact = build_artifact(SPEC, source="source", store=KernelStore(root), toolchain=kit.find())
        for path in (root, *root.rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
        with ProcessPoolExecutor(1, mp_context=processes) as pool:
            assert pool.submit(_as_nobody, root, kit.find()).result() == artifact.sha256
            artifact.folder.chmod(0o755)
            artifact.library.unlink()
            artifact.folder.chmod(0o555)
            message = pool.submit(_as_nobody, root, kit.find()).result()
        assert "cannot be written" in message
        assert "CUTLASS_OPS_CACHE_DIR" in message
        for path in (root, *root.rglob("*")):
            path.chmod(0o755)


def test_a_flag_that_gives_a_register_its_former_value_is_cleared_before_a_kernel_is_stored(toolkit, toolchain, store):
    made = library(HMMA, more=STALE_FLAG)
    with pytest.raises(CompileError, match="former value"):
        sass.require_none_stale(made, "it")
    toolkit.makes(made)
    stored = build_artifact(SPEC, store=store, toolchain=toolchain).read_library()
    sass.require_none_stale(stored, "it")
    assert stored == sass.mended(made) != made


# ---- Arguments ----


@pytest.mark.parametrize(("jobs", "error"), [(0, ValueError), (-1, ValueError), (1.5, TypeError), ("2", TypeError)])
def test_jobs_that_are_no_number_of_kernels(store, toolchain, jobs, error):
    with pytest.raises(error, match=f"jobs must be .*, not {jobs!r}"):
        build_many([SPEC], jobs=jobs, store=store, toolchain=toolchain)
    with pytest.raises(error, match="jobs must be"), building([SPEC], jobs=jobs):
        pass


@pytest.mark.parametrize("executor", ["processes:2", 5, object()])
def test_what_is_no_executor_is_refused(store, toolkit, toolchain, executor):
    for use in (build_artifact, lambda spec, **more: build_many([spec], **more)):
        with pytest.raises(TypeError, match=r"executor must be a concurrent\.futures\.Executor, not"):
            use(SPEC, store=store, toolchain=toolchain, executor=executor)
    assert toolkit.compilations == 0


_AT_THE_END = """
import atexit, json, sys, threading
import cutlass_ops as co
from cutlass_ops.artifacts.store import KernelStore
from cutlass_ops.base import env
from cutlass_ops.base.executors import named
from cutlass_ops.base.session import Session
from cutlass_ops.compilation.background import Background
from cutlass_ops.compilation.builder import build_many, building

specs = [co.KernelSpec.from_json(json.loads(text)) for text in sys.argv[1:4]]

def build():
    print(len({artifact.key for artifact in build_many(specs[:2])}), flush=True)
    with building(specs[2:]) as builds:
        print(builds[specs[2]].result().origin)
    with named("processes:1") as pool:
        build_many(specs[:1], store=KernelStore(env.cache_dir() / "other"), executor=pool)
    # Nothing waits for what nobody will need.
    Session().part(Background).guess(specs, lambda spec, artifact: None)

def wait():
    # A thread that Python waits for.
    threading.main_thread().join()
    build()

if sys.argv[4] == "atexit":
    atexit.register(build)
else:
    threading.Thread(target=wait).start()
"""


@pytest.mark.slow
@pytest.mark.parametrize("where", ["atexit", "a thread"])
def test_kernels_are_built_while_the_interpreter_ends(store, toolkit, where):
    specs = [sm80_spec(stages).canonical() for stages in (3, 4, 5)]
    more = {"CUTLASS_OPS_CACHE_DIR": store.root, "CUTLASS_OPS_NVCC": toolkit.nvcc, "NVCC_CCBIN": toolkit.host}
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_PYTORCH + _AT_THE_END, *specs, where],
        env=os.environ | {name: str(value) for name, value in more.items()},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in ran.stderr
    assert ran.stdout.split("\n")[:2] == ["2", "compiled here"]
    assert toolkit.compilations == 4
