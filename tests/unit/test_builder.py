import io
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from concurrent.futures import CancelledError, ProcessPoolExecutor
from multiprocessing import forkserver
from pathlib import Path

import pytest
from fake_toolkit import FFMA, HMMA, FakeToolkit, library, sm80_spec, sm90_spec

from cutlass_ops import builder as build_module
from cutlass_ops import legality, render
from cutlass_ops.builder import build_artifact, build_many
from cutlass_ops.errors import CompileError, ConfigError, MissingKernelError, StoreError, ToolchainError
from cutlass_ops.spec import KernelSpec
from cutlass_ops.store import KernelStore
from cutlass_ops.toolchain import Toolchain

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


def test_defaults(store, toolkit, monkeypatch):
    monkeypatch.setenv("CUTLASS_OPS_CACHE_DIR", str(store.root))
    monkeypatch.setenv("CUTLASS_OPS_NVCC", str(toolkit.nvcc))
    monkeypatch.setenv("NVCC_CCBIN", str(toolkit.host))
    artifact = build_artifact(SPEC)
    assert store.lookup(artifact.key) == artifact
    assert build_many([SPEC]) == [artifact]


def test_an_illegal_declaration_never_reaches_the_compiler(store, toolkit, toolchain, monkeypatch):
    def refuse(spec):
        raise ConfigError("no")

    monkeypatch.setattr(legality, "require_legal", refuse)
    for use in (build_artifact, lambda spec, **more: build_many([spec], **more)):
        with pytest.raises(ConfigError):
            use(SPEC, store=store, toolchain=toolchain)
    assert toolkit.compilations == 0


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


def test_a_store_in_a_path_that_a_shell_would_change(toolkit, toolchain, tmp_path):
    store = KernelStore(tmp_path / "$(touch ran)")
    with pytest.raises(ToolchainError, match=r"would not take '\$' as it stands; set CUTLASS_OPS_CACHE_DIR"):
        build_artifact(sm80_spec(), source="source", store=store, toolchain=toolchain)
    assert left_over(store) == []
    assert toolkit.compilations == 0


def test_a_compiler_that_makes_nothing(store, toolkit, toolchain):
    toolkit.does("exit 0")
    with pytest.raises(CompileError, match=r"nvcc made no kernel\.fatbin"):
        build_artifact(SPEC, store=store, toolchain=toolchain)


def test_a_vanished_compiler(store, toolkit, toolchain):
    shutil.rmtree(toolkit.root)
    with pytest.raises(ToolchainError, match="cannot be run"):
        build_artifact(SPEC, store=store, toolchain=toolchain)
    assert left_over(store) == []


def test_cancelling_leaves_nothing(store, toolkit, toolchain):
    toolkit.does("sleep 60")
    cancel = threading.Event()
    threading.Timer(0.2, cancel.set).start()
    with pytest.raises(CancelledError):
        build_artifact(SPEC, store=store, toolchain=toolchain, cancel=cancel)
    assert left_over(store) == []


# ---- Compilation switched off ----


def test_frozen_uses_what_is_there_whoever_compiled_it(store, toolchain, monkeypatch):
    artifact = build_artifact(SPEC, store=store, toolchain=toolchain)
    monkeypatch.setenv("CUTLASS_OPS_JIT", "0")
    monkeypatch.setattr(build_module, "find_toolchain", None)  # and without looking for a compiler
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


def test_many_at_the_same_time(store, toolkit, toolchain):
    meet = '; touch "$here/here.$$"; n=0; while [ $(ls "$here"/here.* | wc -l) -lt 4 ]; do sleep 0.01; n=$((n+1)); '
    toolkit.makes(library(HMMA), before=f"true{meet} [ $n -lt 1000 ] || exit 9; done\n")
    assert len(build_many(SPECS, jobs=4, store=store, toolchain=toolchain)) == 4


def test_one_failure_does_not_stop_the_others(store, toolkit, toolchain):
    toolkit.makes(library(HMMA), before=f'if grep -q {SPECS[1].slug} kernel.cu; then echo "x: error: y"; exit 1; fi\n')
    with pytest.raises(CompileError, match=f"^{SPECS[1].slug}: x: error: y"):
        build_many(SPECS, jobs=2, store=store, toolchain=toolchain)
    assert len(list(store.entries())) == 3


def test_several_failures_are_all_named(store, toolkit, toolchain):
    toolkit.does('echo "x: error: y"; exit 1')
    with pytest.raises(CompileError) as caught:
        build_many(SPECS, jobs=2, store=store, toolchain=toolchain)
    assert str(caught.value).startswith(f"4 of 4 kernels cannot be compiled. The first: {SPECS[0].slug}: x: error: y")
    assert all(spec.slug in str(caught.value) for spec in SPECS)


def test_an_error_of_the_store_stops_all(store, toolkit, toolchain, monkeypatch):
    def fail(*_args):
        raise StoreError("full")

    monkeypatch.setattr(KernelStore, "publish", fail)
    toolkit.makes(library(HMMA), before=f"if grep -vq {SPECS[0].slug} kernel.cu; then sleep 60; fi\n")
    with pytest.raises(StoreError, match="full"):
        build_many(SPECS, jobs=4, store=store, toolchain=toolchain)
    assert left_over(store) == []


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_ends_everything_at_once(store, toolkit, toolchain):
    toolkit.does("sleep 60")
    main = threading.main_thread().ident

    def interrupt():
        while toolkit.compilations < 2:
            time.sleep(0.01)
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        build_many(SPECS, jobs=2, store=store, toolchain=toolchain)
    thread.join()
    assert time.monotonic() - began < 20
    assert toolkit.compilations == 2
    assert left_over(store) == []


def test_progress(store, toolkit, toolchain, monkeypatch, capsys):
    monkeypatch.setenv("CUTLASS_OPS_PROGRESS", "auto")
    toolkit.makes(library(HMMA), before=f'if grep -q {SPECS[1].slug} kernel.cu; then echo "x: error: y"; exit 1; fi\n')
    with pytest.raises(CompileError):
        build_many(SPECS, jobs=1, store=store, toolchain=toolchain)
    lines = capsys.readouterr().err.splitlines()
    assert [line.startswith("cutlass_ops: ") for line in lines] == [True] * 4
    assert "1 of 4 kernels compiled, " in lines[0]
    assert f"{SPECS[1].slug} failed" in lines[1]
    assert "3 of 4 kernels compiled, 1 failed, " in lines[3]
    (built,) = build_many(SPECS[:1], store=store, toolchain=toolchain)
    assert built.spec == SPECS[0]
    assert capsys.readouterr().err == ""  # nothing to compile, nothing to say


def test_a_closed_stream_costs_no_kernel(store, toolchain, monkeypatch):
    monkeypatch.setenv("CUTLASS_OPS_PROGRESS", "1")
    stream = io.StringIO()
    stream.close()
    monkeypatch.setattr("sys.stderr", stream)
    assert build_many(SPECS, store=store, toolchain=toolchain)


# ---- Many processes ----


def test_threads_compile_once(store, toolkit, toolchain):
    toolkit.makes(library(HMMA), before="sleep 0.2\n")
    threads = [threading.Thread(target=build_here, args=(SPEC, store.root, toolchain)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert toolkit.compilations == 1
    assert len(list(store.entries())) == 1


def test_who_waits_for_a_killed_builder_builds(store, toolkit, toolchain, processes):
    toolkit.does("sleep 60")
    child = processes.Process(target=build_here, args=(SPEC, store.root, toolchain))
    child.start()
    while not toolkit.compilations:
        time.sleep(0.01)
    toolkit.makes(library(HMMA))
    threading.Timer(0.2, child.kill).start()
    assert build_artifact(SPEC, source="source", store=store, toolchain=toolchain)
    child.join()


def _as_nobody(root: Path, toolchain: Toolchain) -> str:
    if os.geteuid() == 0:
        os.setegid(65534)
        os.seteuid(65534)
    try:
        found = build_here(SPEC, root, toolchain)
    except StoreError as exc:
        return str(exc)
    return found


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
